"""The hash table of the memory index: where a key's entry is. Parts of kernels.

A slot is 0 or `tag << 32 | place + 1`; the tag is the upper half of the mixed key, the place that
of its entry. Eight slots are a *bucket*, one cache line, which one comparison of vectors looks at.
A key is in its home bucket, or, if all from there on are full, in the first bucket that was not. A
home grows with its tag, so a rehash reads and writes in order and looks at no entry. Emptying a
slot of a full bucket brings back what had to go past it, so churn leaves nothing behind.
"""

from __future__ import annotations

import numpy as np

from global_index.jit import (
    U8,
    U64,
    Int,
    Word,
    compiled,
    equal_upper,
    equal_words,
    fetch,
    lowest_bit,
    part,
    rare_part,
    u64,
)

BUCKET_SLOTS = 8
AHEAD = 32
"""Keys whose home buckets are under way at once."""

_0, _1, _8, _32, _ALL = map(u64, (0, 1, 8, 32, 255))
_ONE = np.uint8(1)
_LOW_HALF = u64(0xFFFFFFFF)
_MIX = u64(0x9E3779B97F4A7C15)


@part
def tag_of(key: Word) -> Word:
    return (key * _MIX) >> _32


@part
def home(tag: Word, slots: Int) -> Int:
    """The first slot of the bucket where a key with this tag belongs."""
    return np.int64((tag * np.uint64(slots >> 3)) >> _32) << 3


@part
def place_of(word: Word) -> Int:
    return np.int64(word & _LOW_HALF) - 1


@part
def word_of(key: Word, place: Int) -> Word:
    """What stands in the slot of a key whose entry is at `place`."""
    return ((key * _MIX) & ~_LOW_HALF) | np.uint64(place + 1)


@part
def next_bucket(slots: U64, first: Int) -> Int:
    first += BUCKET_SLOTS
    return 0 if first == slots.shape[0] else first


@part
def second_bucket(slots: U64, first: Int, free: Word) -> Int:
    """The bucket to look into beside a home bucket: the next one, or again this if it has room."""
    return next_bucket(slots, first) if free == _0 else first


@part
def find(slots: U64, entries: U64, key: Word) -> Int:
    """Slot of `key`, or an empty slot where it may go.

    One key in six is in its second bucket, which nobody can foretell. So both are compared and
    none of it is a branch: a wrong guess would cost as much as all the rest.
    """
    tag = tag_of(key)
    first = home(tag, slots.shape[0])
    free = equal_words(slots, first, _0)
    second = second_bucket(slots, first, free)
    more = equal_words(slots, second, _0)
    same = (equal_upper(slots, first, tag) & ~free) | (
        (equal_upper(slots, second, tag) & ~more) << _8
    )
    if same != _0:
        n = lowest_bit(same)
        slot = n + (first if n < BUCKET_SLOTS else second - BUCKET_SLOTS)
        if entries[2 * place_of(slots[slot])] == key:
            return slot
    elif free | more != _0:
        return first + lowest_bit(free) if free != _0 else second + lowest_bit(more)
    return find_far(slots, entries, key)


@rare_part
def find_far(slots: U64, entries: U64, key: Word) -> Int:
    """`find` as it is defined: the key may be anywhere."""
    tag = tag_of(key)
    first = home(tag, slots.shape[0])
    while True:
        free = equal_words(slots, first, _0)
        same = equal_upper(slots, first, tag) & ~free
        while same != _0:
            slot = first + lowest_bit(same)
            if entries[2 * place_of(slots[slot])] == key:
                return slot
            same &= same - _1
        if free != _0:
            return first + lowest_bit(free)
        first = next_bucket(slots, first)


@compiled
def slot_of(slots: U64, entries: U64, key: Word) -> Int:
    """`find`, for Python."""
    return find(slots, entries, key)


@part
def fetch_home(slots: U64, key: Word) -> None:
    fetch(slots, home(tag_of(key), slots.shape[0]))


@part
def fetch_rest(slots: U64, entries: U64, key: Word) -> None:
    """Once a key's home bucket is here, fetch its entry, and the next bucket if this is full."""
    tag = tag_of(key)
    first = home(tag, slots.shape[0])
    free = equal_words(slots, first, _0)
    fetch(slots, first if free != _0 else next_bucket(slots, first))
    same = equal_upper(slots, first, tag) & ~free
    if same != _0:
        fetch(entries, 2 * place_of(slots[first + lowest_bit(same)]))


@part
def look_ahead(slots: U64, entries: U64, keys: U64, i: Int) -> None:
    """Fetch what later keys will need, so that misses overlap."""
    if i + AHEAD < keys.shape[0]:
        fetch_home(slots, keys[i + AHEAD])
    if i + AHEAD // 2 < keys.shape[0]:
        fetch_rest(slots, entries, keys[i + AHEAD // 2])


@part
def look_ahead_near(slots: U64, keys: U64, i: Int) -> None:
    """The same for keys whose entries are neighbours, and so on their way by themselves.

    Two lines always: to look first whether the second is needed costs more than to fetch it.
    """
    if i + AHEAD < keys.shape[0]:
        first = home(tag_of(keys[i + AHEAD]), slots.shape[0])
        fetch(slots, first)
        fetch(slots, next_bucket(slots, first))


@part
def look_at_first(slots: U64, keys: U64, start: Int) -> None:
    """Fetch what the first keys need, which `look_ahead` is too late for."""
    for i in range(start, min(start + AHEAD, keys.shape[0])):
        fetch_home(slots, keys[i])


@part
def put_slot(slots: U64, word: Word) -> None:
    """Write a word of a key that has no slot yet."""
    first = home(word >> _32, slots.shape[0])
    free = equal_words(slots, first, _0)
    while free == _0:
        first = next_bucket(slots, first)
        free = equal_words(slots, first, _0)
    slots[first + lowest_bit(free)] = word


@part
def free_slot(slots: U64, word: Word) -> None:
    """Empty the slot that holds `word`."""
    first = home(word >> _32, slots.shape[0])
    free = equal_words(slots, first, _0)
    second = second_bucket(slots, first, free)
    same = equal_words(slots, first, word)
    bucket = first if same != _0 else second
    same |= equal_words(slots, second, word)
    while same == _0:
        bucket = next_bucket(slots, bucket)
        same = equal_words(slots, bucket, word)
    was_full = equal_words(slots, bucket, _0) == _0
    hole = bucket + lowest_bit(same)
    slots[hole] = _0
    if was_full:
        bring_back(slots, bucket, hole)


@rare_part
def bring_back(slots: U64, bucket: Int, hole: Int) -> None:
    """Fill a hole in a bucket that was full with what had to go past it."""
    first = bucket
    while True:
        first = next_bucket(slots, first)
        is_full = equal_words(slots, first, _0) == _0
        past = first - bucket
        if past < 0:
            past += slots.shape[0]
        came = _0  # no branches: which of eight it is cannot be foretold
        for n in range(BUCKET_SLOTS):
            word = slots[first + n]
            from_home = first - home(word >> _32, slots.shape[0])
            if from_home < 0:
                from_home += slots.shape[0]
            came |= np.uint64((word != _0) & (from_home >= past)) << np.uint64(n)
        if came != _0:
            slots[hole] = slots[first + lowest_bit(came)]
            bucket, hole = first, first + lowest_bit(came)
            slots[hole] = _0
        if not is_full:
            return


@compiled
def rehash(slots: U64, old: Int, taken: U8, aside: U64) -> None:
    """Spread the words of the first `old` slots over all.

    In place and from the end: homes only move up, so what is written to has been read, but for the
    few words that have to wait in `aside`, which has room for all: those that had gone further past
    their home than this moves, and those that would go round the end. `taken` has a zero for each
    bucket, and counts: to look into a bucket that was just written to would wait for the writing.
    """
    waiting = 0
    for bucket in range(old - BUCKET_SLOTS, -1, -BUCKET_SLOTS):
        used = equal_words(slots, bucket, _0) ^ _ALL
        while used != _0:
            slot = bucket + lowest_bit(used)
            used &= used - _1
            word = slots[slot]
            slots[slot] = _0
            number = home(word >> _32, slots.shape[0]) >> 3
            has_moved = number << 3 > bucket
            while has_moved and taken[number] == BUCKET_SLOTS:
                number += 1
                has_moved = number < taken.shape[0]
            if has_moved:
                slots[number << 3 | np.int64(taken[number])] = word
                taken[number] += _ONE
            else:
                aside[waiting] = word
                waiting += 1
    for n in range(waiting):
        put_slot(slots, aside[n])
