"""The model that SGLang, and vLLM beside it, serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sglang_server import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model(directory)
    return directory
