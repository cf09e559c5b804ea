"""The hash table of the memory index: where a key's entry is. Parts of kernels.

`slots` is 32-bit words, sixteen to a *bucket*, which is one cache line: twelve tags of a byte (0:
free), a count, and the twelve places that belong to the tags. A key is in its home bucket, or, if
that was full when it came, in the first one behind with room; each bucket that it went past counts
it. So a search ends at the first bucket that nothing went past, which nearly always is the home,
and a removal empties a byte and moves nothing. Homes grow with the mixed key.
"""

from __future__ import annotations

import numpy as np

from global_index.jit import (
    U32,
    U64,
    Int,
    Word,
    compiled,
    equal_bytes,
    fetch,
    lowest_bit,
    part,
    put_byte,
    rare_part,
    u64,
)

BUCKET_WORDS = 16
BUCKET_PLACES = 12
PASSED, PLACES = 3, 4
"""Words of a bucket: how many keys went past it, and the first place."""
AHEAD = 32
"""Keys whose home buckets are under way at once."""

_0, _1, _8, _28, _32, _255 = map(u64, (0, 1, 8, 28, 32, 255))
_ALL = u64((1 << BUCKET_PLACES) - 1)
_MIX = u64(0x9E3779B97F4A7C15)


@part
def mixed(key: Word) -> Word:
    return key * _MIX


@part
def home(word: Word, slots: Int) -> Int:
    """The first word of the bucket where a key belongs that is mixed to `word`."""
    return np.int64((word >> _32) * np.uint64(slots >> 4) >> _32) << 4


@part
def tag_of(word: Word) -> Word:
    """1 to 255, of other bits than those that tell homes apart."""
    return (((word >> _28) & _255) * _255 >> _8) + _1


@part
def tagged(slots: U32, first: Int, tag: Word) -> Word:
    """Which of a bucket's tags these are: bit n for the place at first + PLACES + n."""
    return equal_bytes(slots, first, tag) & _ALL


@part
def occupied(slots: U32, first: Int) -> Word:
    """Which of a bucket's places are in use."""
    return tagged(slots, first, _0) ^ _ALL


@part
def next_bucket(slots: U32, first: Int) -> Int:
    first += BUCKET_WORDS
    return 0 if first == slots.shape[0] else first


@part
def find(slots: U32, entries: U64, key: Word) -> Int:
    """Place of the entry of `key`, or -1."""
    word = mixed(key)
    first = home(word, slots.shape[0])
    same = tagged(slots, first, tag_of(word))
    while same != _0:
        place = np.int64(slots[first + PLACES + lowest_bit(same)])
        if entries[2 * place] == key:
            return place
        same &= same - _1
    return -1 if slots[first + PASSED] == 0 else find_behind(slots, entries, key)


@rare_part
def find_behind(slots: U32, entries: U64, key: Word) -> Int:
    """The same for a key that is not in its home."""
    word = mixed(key)
    start = home(word, slots.shape[0])
    first = next_bucket(slots, start)
    while first != start:
        same = tagged(slots, first, tag_of(word))
        while same != _0:
            place = np.int64(slots[first + PLACES + lowest_bit(same)])
            if entries[2 * place] == key:
                return place
            same &= same - _1
        if slots[first + PASSED] == 0:
            break
        first = next_bucket(slots, first)
    return -1


@compiled
def place_of(slots: U32, entries: U64, key: Word) -> Int:
    """`find`, for Python."""
    return find(slots, entries, key)


@part
def put_slot(slots: U32, key: Word, place: Int) -> None:
    """Note the place of a key that has no slot yet. There must be room."""
    word = mixed(key)
    first = home(word, slots.shape[0])
    free = tagged(slots, first, _0)
    while free == _0:
        slots[first + PASSED] += 1
        first = next_bucket(slots, first)
        free = tagged(slots, first, _0)
    n = lowest_bit(free)
    put_byte(slots, first, n, tag_of(word))
    slots[first + PLACES + n] = place


@part
def free_slot(slots: U32, key: Word, place: Int) -> None:
    """Forget the place of a key that has a slot."""
    word = mixed(key)
    first = home(word, slots.shape[0])
    while True:
        same = tagged(slots, first, tag_of(word))
        while same != _0:
            n = lowest_bit(same)
            if np.int64(slots[first + PLACES + n]) == place:
                put_byte(slots, first, n, _0)
                return
            same &= same - _1
        slots[first + PASSED] -= 1
        first = next_bucket(slots, first)


@part
def fetch_home(slots: U32, key: Word) -> None:
    fetch(slots, home(mixed(key), slots.shape[0]))


@part
def look_ahead(slots: U32, entries: U64, keys: U64, i: Int) -> None:
    """Fetch what later keys will need, so that misses overlap: homes, then entries."""
    if i + AHEAD < keys.shape[0]:
        fetch_home(slots, keys[i + AHEAD])
    if i + AHEAD // 2 < keys.shape[0]:
        word = mixed(keys[i + AHEAD // 2])
        first = home(word, slots.shape[0])
        same = tagged(slots, first, tag_of(word))
        if same != _0:
            fetch(entries, 2 * np.int64(slots[first + PLACES + lowest_bit(same)]))


@part
def look_ahead_near(slots: U32, keys: U64, i: Int) -> None:
    """The same for keys whose entries are neighbours, and so on their way by themselves."""
    if i + AHEAD < keys.shape[0]:
        fetch_home(slots, keys[i + AHEAD])


@part
def look_at_first(slots: U32, keys: U64, start: Int) -> None:
    """Fetch what the first keys need, which `look_ahead` is too late for."""
    for i in range(start, min(start + AHEAD, keys.shape[0])):
        fetch_home(slots, keys[i])


@part
def put_all(slots: U32, entries: U64, top: Int) -> None:
    """Note the places of all entries in slots that are all free."""
    for place in range(top):
        if place + AHEAD < top:
            fetch_home(slots, entries[2 * (place + AHEAD)])
        key = entries[2 * place]
        if key != _0:
            put_slot(slots, key, place)
