"""Which weights an engine serves: the one thing of a namespace that no setting of an engine names.

Shared by the doors of all engines.
"""

from __future__ import annotations

import re
from pathlib import Path

import blake3

from emberkv_proto.errors import EmberError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
DESCRIPTIONS = ("*.json", "*.model", "*.jinja", "*.txt")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class UnsupportedEngineError(EmberError):
    """This engine's KV cache cannot be kept by the store; the engine runs without it."""


def weights_id_of(model: str, revision: str, settings_name: str) -> str:
    """The commit of a hub snapshot, or a digest of a directory's files.

    Args:
        settings_name: where the user can name the weights instead, for the error's text.

    Raises:
        UnsupportedEngineError: neither is known; stale KV could hit after a change of weights.
    """
    path = Path(model)
    snapshot = _SNAPSHOT.search(str(path.resolve())) if path.exists() else None
    if snapshot:
        return snapshot.group(1)
    if path.is_dir():
        return directory_id(path)
    if _COMMIT.fullmatch(revision):
        return revision
    raise UnsupportedEngineError(
        f"the weights of {model} have no id: serve a local directory, give --revision a"
        f' commit, or set "weights_id" in {settings_name}'
    )


def directory_id(path: Path) -> str:
    """Digest of a checkpoint: names, sizes and times of the weights, texts of what describes them.

    Weights are not read. A copy that does not keep times has another id; name one in
    `weights_id` to share blocks between such copies.
    """
    digest = blake3.blake3()
    for pattern in WEIGHTS:
        for file in sorted(path.glob(pattern)):
            about = file.stat()
            digest.update(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    for pattern in DESCRIPTIONS:
        for file in sorted(path.glob(pattern)):
            digest.update(f"{file.name}\0".encode() + blake3.blake3(file.read_bytes()).digest())
    return digest.hexdigest()[:32]
