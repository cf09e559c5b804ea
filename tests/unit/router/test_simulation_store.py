"""What a simulated node keeps: least recently used, children first, replicas in their share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.simulation.store import NodeStore, StoreLimits


def chain(name: int, length: int) -> tuple[int, ...]:
    return tuple(1000 * name + at for at in range(1, length + 1))


def kept(store: NodeStore, *chains: tuple[int, ...]) -> list[int]:
    return [store.hit_blocks(keys) for keys in chains]


def test_the_least_recently_used_leaves_first_and_from_its_end() -> None:
    store = NodeStore(StoreLimits(6))
    old, new, third = chain(1, 3), chain(2, 3), chain(3, 2)
    store.serve(old, 0, 0, 0.0)
    store.serve(new, 0, 0, 1.0)
    changes = store.serve(third, 0, 0, 2.0)
    assert kept(store, old, new, third) == [1, 3, 2]
    assert sorted(changes.stored) == sorted(third)
    assert sorted(changes.removed) == [old[1], old[2]]
    store.serve(old[:1], 1, 0, 3.0)
    store.serve(chain(4, 1), 0, 0, 4.0)
    assert kept(store, old, new, third) == [1, 2, 2]
    store.check_integrity()


def test_reading_for_a_peer_is_a_use() -> None:
    store = NodeStore(StoreLimits(4))
    first, second = chain(1, 2), chain(2, 2)
    store.serve(first, 0, 0, 0.0)
    store.serve(second, 0, 0, 1.0)
    store.lend(first)
    store.serve(chain(3, 2), 0, 0, 2.0)
    assert kept(store, first, second) == [2, 0]


def test_replicas_make_room_among_themselves_until_they_are_used_or_pulled_again() -> None:
    store = NodeStore(StoreLimits(10, replica_share=0.2))
    own, one, two = chain(1, 3), chain(2, 2), chain(3, 2)
    store.serve(own, 0, 0, 0.0)
    store.serve(one, 0, 2, 1.0)
    assert store.replicas == 2
    store.serve(two, 0, 2, 2.0)  # more than a fifth: the older run goes, though there is room
    assert kept(store, own, one, two) == [3, 0, 2]
    store.serve(two, 2, 0, 3.0)  # used here
    assert store.replicas == 0
    store.serve(one, 0, 2, 4.0)  # pulled again within ten minutes
    assert store.replicas == 0
    store.serve(chain(4, 2), 0, 2, 5.0)
    store.clear()
    store.serve(chain(4, 2), 0, 2, 700.0)  # its pulls were forgotten
    assert store.replicas == 2
    store.check_integrity()


def test_a_replica_that_others_build_on_stays() -> None:
    store = NodeStore(StoreLimits(10, replica_share=0.0))
    keys = chain(1, 4)
    store.serve(keys, 0, 3, 0.0)  # three pulled, one computed upon them
    assert kept(store, keys) == [4]
    store.check_integrity()


def test_a_chain_longer_than_the_store_keeps_its_beginning() -> None:
    store = NodeStore(StoreLimits(3))
    keys = chain(1, 8)
    changes = store.serve(keys, 0, 0, 0.0)
    assert kept(store, keys) == [3]
    assert (sorted(changes.stored), changes.removed) == ([*keys[:3]], [])


uses = st.tuples(st.integers(0, 5), st.integers(1, 7), st.integers(0, 7), st.booleans())


@given(st.lists(uses, max_size=60), st.integers(1, 20), st.floats(0, 1))
def test_what_it_says_of_changes_is_what_it_holds(
    steps: list[tuple[int, int, int, bool]], blocks: int, share: float
) -> None:
    store = NodeStore(StoreLimits(blocks, share))
    told: set[int] = set()
    for now, (name, length, pulled, is_lent) in enumerate(steps):
        keys = chain(name % 3, 2) + chain(10 + name, length)
        own = store.hit_blocks(keys)
        if is_lent:
            store.lend(keys[:own])
            continue
        changes = store.serve(keys, own, min(pulled, len(keys) - own), float(now))
        assert not told & set(changes.stored)
        assert told >= set(changes.removed)
        told = (told | set(changes.stored)) - set(changes.removed)
        assert told == set(store.keys())
        store.check_integrity()
