"""The model that the vLLM tests serve, made once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import make_model, version


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `since_vllm(major, minor, reason)` under an older vLLM."""
    for mark in item.iter_markers("since_vllm"):
        major, minor, reason = mark.args
        if version() < (major, minor):
            pytest.skip(reason)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model; adapter_a and adapter_b lie beside it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model(directory)
    return directory


@pytest.fixture
def prompts() -> Callable[..., list[dict[str, Any]]]:
    """Prompts of the given lengths, the same ones for the same seed."""

    def make(*lengths: int, seed: int = 1, **more: Any) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        return [{"tokens": [rng.randrange(250) for _ in range(n)], **more} for n in lengths]

    return make
