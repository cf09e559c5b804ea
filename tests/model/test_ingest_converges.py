"""A bounded number of the runs of `tests.model.index_runs` with each backend."""

from __future__ import annotations

import pytest

from tests.model.index_runs import runner

RUNS = {"memory": 60, "dict": 80, "naive": 50, "redis": 10}


@pytest.mark.slow
@pytest.mark.timeout(180)  # the first one may have to compile kernels
@pytest.mark.parametrize("backend", RUNS)
def test_index_follows_random_histories_through_an_unreliable_channel(backend: str) -> None:
    with runner(backend) as run:
        runs = [run(seed) for seed in range(1, RUNS[backend] + 1)]
    assert sum(run.bucket_repairs for run in runs) >= RUNS[backend] // 3, "drift was not repaired"
