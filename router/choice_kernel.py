"""`cost` over all engines in one pass: CostPolicy.pick, compiled. Pure.

`candidates.py` says what is done and why; this does the same sums in the same order, so that both
pick the same engine (a test compares them). Rows of the arguments are engines, columns as named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from global_index.jit import compiled, part

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# of loads
ACTIVE, QUEUED, QUEUED_PAIRS, FIRST, FIRST_PAIRS, BUSY_SINCE = range(6)
LOAD_COLUMNS = 6
# of speeds
PREFILL, QUADRATIC, DRAM, SSD, PEER, PEER_SETUP, DECODE = range(7)
SPEED_COLUMNS = 7
# of hits, in blocks
NODE_HIT, NODE_DRAM, OWN_HIT, OWN_HBM, OWN_DRAM, PREDICTED, ELSEWHERE, BLOCK_TOKENS = range(8)
HIT_COLUMNS = 8
# of asked
(
    PROMPT,
    NOW,
    NEAR_BEST,
    LEAST_LOADED,
    TIE_SECONDS,
    TIE_FRACTION,
    CHANCE,
    MAX_REQUESTS,
    MAX_QUEUED,
    COPY_FACTOR,
) = range(10)
ASKED_COLUMNS = 10
# of what is told of the picked one
MOST_TOKENS, IN_HBM, IN_DRAM, IN_SSD, IN_PEER, QUEUE_SECONDS, OPEN = range(7)
TOLD_COLUMNS = 7


@part
def _queue(load: Any, speed: Any, now: Any) -> Any:
    seconds = load[ACTIVE] * speed[DECODE]
    if load[QUEUED] > 0:
        token, pair = speed[PREFILL], speed[QUADRATIC]
        first = load[FIRST] / token + load[FIRST_PAIRS] * pair
        queued = load[QUEUED] / token + load[QUEUED_PAIRS] * pair
        seconds += queued - min(now - load[BUSY_SINCE], first)
    return seconds


@part
def _hold(hit: Any, out: Any) -> None:
    """Tokens in HBM, DRAM, SSD and elsewhere: scoring.own_hit and holding_from."""
    own, hbm, dram = hit[OWN_HIT], hit[OWN_HBM], hit[OWN_DRAM]
    if hit[NODE_HIT] > own:
        own = hit[NODE_HIT]
        dram = max(0, hit[NODE_DRAM] - hbm)
    near = max(hbm, hit[PREDICTED])
    beyond = max(0, own - near)
    in_dram = min(beyond, max(0, dram - (near - hbm)))
    peer = max(0, hit[ELSEWHERE] - max(hit[PREDICTED], own))
    out[0] = near * hit[BLOCK_TOKENS]
    out[1] = in_dram * hit[BLOCK_TOKENS]
    out[2] = (beyond - in_dram) * hit[BLOCK_TOKENS]
    out[3] = peer * hit[BLOCK_TOKENS]


@part
def _rest_seconds(prompt: Any, held: Any, speed: Any) -> Any:
    rest = max(1, prompt - held)
    pairs = rest * (prompt - rest // 2)
    return rest / speed[PREFILL] + pairs * speed[QUADRATIC]


@part
def _estimate(prompt: Any, queue: Any, hold: Any, speed: Any, out: Any) -> None:
    """Total seconds, tokens to compute and tokens from elsewhere: scoring.estimate."""
    fetch = 0.0
    held = hold[0]
    out[0] = queue + fetch + _rest_seconds(prompt, held, speed)
    out[1] = max(1, prompt - held)
    out[2] = 0.0
    local = hold[1] / speed[DRAM]
    local += hold[2] / speed[SSD]
    if hold[1] > 0 or hold[2] > 0:
        held = hold[0] + hold[1] + hold[2]
        total = queue + local + _rest_seconds(prompt, held, speed)
        if total < out[0]:
            out[0] = total
            out[1] = max(1, prompt - held)
    if hold[3] > 0:
        held = hold[0] + hold[1] + hold[2] + hold[3]
        fetch = local + hold[3] / speed[PEER] + speed[PEER_SETUP]
        total = queue + fetch + _rest_seconds(prompt, held, speed)
        if total < out[0]:
            out[0] = total
            out[1] = max(1, prompt - held)
            out[2] = hold[3]


@part
def _new_copies(hold: Any, held: Any) -> Any:
    own, tokens = hold[0] + hold[1] + hold[2], 0.0
    upper = own + hold[3]
    for holders in range(held.shape[0]):
        lower = max(held[holders], own)
        if lower < upper:
            tokens += (upper - lower) / max(1, holders)
            upper = lower
        if upper <= own:
            break
    return tokens


@compiled
def pick_cost(
    loads: F64,
    slots: I64,
    speeds: F64,
    hits: I64,
    asked: F64,
    told: F64,
) -> Any:
    """The row of the picked engine; -1: none has room. `told` is about the picked one."""
    count = slots.shape[0]
    now, prompt = asked[NOW], np.int64(asked[PROMPT])
    queues = np.empty(count)
    holds = np.empty((count, 4), np.int64)
    is_open = np.zeros(count, np.bool_)
    most = np.int64(0)
    opened = 0
    for row in range(count):
        load = loads[slots[row]]
        if load[ACTIVE] >= asked[MAX_REQUESTS] or load[QUEUED] >= asked[MAX_QUEUED]:
            continue
        is_open[row] = True
        opened += 1
        queues[row] = _queue(load, speeds[row], now)
        _hold(hits[row], holds[row])
        most = max(most, holds[row, 0] + holds[row, 1] + holds[row, 2])
    told[OPEN] = opened
    if opened == 0:
        return -1
    wanted = max(1.0, most * asked[NEAR_BEST])
    limit, shorter, wanted_rows = -np.inf, 0, min(int(asked[LEAST_LOADED]), opened)
    while shorter < wanted_rows:
        following = np.inf
        for row in range(count):
            if is_open[row] and limit < queues[row] < following:
                following = queues[row]
        limit = following
        for row in range(count):
            shorter += is_open[row] and queues[row] == limit
    held = np.zeros(count, np.int64)
    for row in range(count):
        if is_open[row]:
            held[row] = holds[row, 0] + holds[row, 1] + holds[row, 2]
    held = np.sort(held)[::-1]
    terms = np.empty((count, 3))
    best = np.inf
    for row in range(count):
        near = holds[row, 0] + holds[row, 1] + holds[row, 2] if is_open[row] else 0
        is_open[row] = is_open[row] and (queues[row] <= limit or near >= wanted)
        if is_open[row]:
            _estimate(prompt, queues[row], holds[row], speeds[row], terms[row])
            if holds[row, 3] > 0:
                copied = asked[COPY_FACTOR] * _new_copies(holds[row], held)
                terms[row, 0] += copied / speeds[row, PREFILL]
            best = min(best, terms[row, 0])
    limit = best + max(asked[TIE_SECONDS], best * asked[TIE_FRACTION])
    computed = elsewhere = active = np.inf
    tied = 0
    for row in range(count):
        is_open[row] = is_open[row] and terms[row, 0] <= limit
        if is_open[row]:
            mine = loads[slots[row], ACTIVE]
            if (
                terms[row, 1] < computed
                or (terms[row, 1] == computed and terms[row, 2] < elsewhere)
                or (terms[row, 1] == computed and terms[row, 2] == elsewhere and mine < active)
            ):
                computed, elsewhere, active = terms[row, 1], terms[row, 2], mine
                tied = 1
            elif terms[row, 1] == computed and terms[row, 2] == elsewhere and mine == active:
                tied += 1
    left = np.int64(asked[CHANCE] * tied)
    for row in range(count):
        if (
            is_open[row]
            and terms[row, 1] == computed
            and terms[row, 2] == elsewhere
            and loads[slots[row], ACTIVE] == active
        ):
            if left == 0:
                told[MOST_TOKENS] = most
                told[IN_HBM : IN_PEER + 1] = holds[row]
                told[QUEUE_SECONDS] = queues[row]
                return row
            left -= 1
    return -1
