"""`python -m client_sdk.engine.torch_engine`: the reference engine as a process, tiny."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.server_process import ServerProcess
from tests.helpers.torch_engines import TINY

ANSWER_SECONDS = 60.0


@dataclass
class TorchEngineProcess(ServerProcess):
    """A context manager; ends what it started. `settings` are keys of the engine section."""

    directory: Path
    engine_id: str = "engine-a"
    settings: dict[str, Any] = field(default_factory=dict)

    module = "client_sdk.engine.torch_engine"

    def __post_init__(self) -> None:
        self._set_up(self.directory, self.engine_id)
        self._endpoint_file = self.directory / f"{self.engine_id}.json"

    @property
    def url(self) -> str:
        loaded: dict[str, Any] = json.loads(self._endpoint_file.read_text())
        return str(loaded["url"])

    def complete(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """The answer to a prompt of token ids."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, **more}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())  # noqa: S310
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:  # noqa: S310
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def __enter__(self) -> TorchEngineProcess:
        self._start_or_clean()
        return self

    def spawn(self) -> None:
        self._endpoint_file.unlink(missing_ok=True)
        super().spawn()

    def _is_serving(self) -> bool:
        return self._endpoint_file.exists()

    def _settings(self) -> Mapping[str, Any]:
        values: dict[str, Any] = {
            "port": 0,
            "engine_id": self.engine_id,
            "endpoint_file": self._endpoint_file,
            **TINY,
            "load_patience_seconds": 10,
            **self.settings,
        }
        return {f"engine.{key}": value for key, value in values.items()}
