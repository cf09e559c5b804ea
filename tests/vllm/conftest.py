"""The model that the vLLM tests serve, made once."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import HERE, environment, python

MODEL_SECONDS = 120.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model; adapter_a and adapter_b lie beside it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    subprocess.run(
        [python(), HERE / "make_model.py", directory],
        check=True,
        timeout=MODEL_SECONDS,
        env=environment(),
        capture_output=True,
    )
    return directory


@pytest.fixture
def prompts() -> Callable[..., list[dict[str, Any]]]:
    """Prompts of the given lengths, the same ones for the same seed."""

    def make(*lengths: int, seed: int = 1, **more: Any) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        return [{"tokens": [rng.randrange(250) for _ in range(n)], **more} for n in lengths]

    return make
