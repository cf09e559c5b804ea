"""Any history of calls leaves the rows in a real Redis, and their runs, like the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv_proto.types import IndexKey, Tier
from global_index.index import Holder
from global_index.naive_index import NaiveIndex
from tests.helpers.redis_server import redis_server
from tests.helpers.redis_sync import SyncRedisIndex

pytestmark = pytest.mark.timeout(300)
HOLDERS = tuple(Holder(number) for number in (0, 1, 5, 64, 8191))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "remove", "clear", "remove_holder"]),
        st.sampled_from(HOLDERS),
        st.sampled_from(list(Tier)),
        st.integers(0, 20),
        st.integers(0, 25),
        st.sampled_from([1, 0x1000000000000001]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(steps=STEPS)
def test_rows_in_redis_follow_the_oracle(
    steps: list[tuple[str, Holder, Tier, int, int, int]],
) -> None:
    with redis_server() as server:
        index, oracle = SyncRedisIndex(server.url), NaiveIndex(1 << 20)
        try:
            for call, holder, tier, first, count, stride in steps:
                keys = np.arange(first, first + count, dtype=np.uint64) * np.uint64(stride)
                match call:
                    case "store":
                        wanted = oracle.apply_stored(holder, tier, keys)
                        assert index.apply_stored(holder, tier, keys) == wanted
                    case "remove":
                        wanted = oracle.apply_removed(holder, tier, keys)
                        assert index.apply_removed(holder, tier, keys) == wanted
                    case "clear":
                        expected = oracle.clear_tier(holder, tier)
                        assert index.clear_tier(holder, tier) == expected
                    case _:
                        assert index.remove_holder(holder) == oracle.remove_holder(holder)
                chain = np.arange(max(1, first), 50, dtype=np.uint64) * np.uint64(stride)
                found = sorted(index.query(chain), key=lambda hit: hit.holder)
                assert found == sorted(oracle.query(chain), key=lambda hit: hit.holder)
            key = IndexKey(max(1, steps[-1][3]))
            assert index.holdings(key) == oracle.holdings(key)
            for holder in {step[1] for step in steps}:
                for tier in Tier:
                    assert index.digest(holder, tier) == oracle.digest(holder, tier)
            index.check_integrity()
        finally:
            index.close()
