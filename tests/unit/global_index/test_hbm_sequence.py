"""Which messages are new, known, missing, or of another life."""

from __future__ import annotations

from global_index.hbm.sequence import REMEMBERED, EventSequence, Verdict


def told(sequence: EventSequence, *numbers: int, life: str = "a") -> list[Verdict]:
    verdicts = [sequence.offer(n, f"{life}{n}".encode()) for n in numbers]
    sequence.check_integrity()
    return verdicts


def test_messages_in_order_are_next_and_again_known() -> None:
    sequence = EventSequence()
    assert told(sequence, 0, 1, 2) == [Verdict.NEXT] * 3
    assert told(sequence, 0, 1, 2) == [Verdict.KNOWN] * 3
    assert told(sequence, 3) == [Verdict.NEXT]


def test_a_gap_is_not_passed_until_it_is_said_to_be() -> None:
    sequence = EventSequence()
    assert told(sequence, 57) == [Verdict.GAP]
    assert (sequence.next, sequence.replay_from, sequence.has_proof) == (0, 0, False)
    sequence.skip_to(57)
    assert told(sequence, 57, 58) == [Verdict.NEXT] * 2
    assert (sequence.replay_from, sequence.has_proof) == (58, True)


def test_a_known_number_with_other_bytes_is_another_life() -> None:
    sequence = EventSequence()
    told(sequence, *range(10))
    assert told(sequence, 0, life="b") == [Verdict.RESTART]
    assert told(sequence, 9, life="b") == [Verdict.RESTART], "it overtook the old one"
    sequence.begin()
    assert told(sequence, 0, life="b") == [Verdict.NEXT]
    assert told(sequence, 1, life="a") == [Verdict.NEXT]


def test_what_was_skipped_or_is_long_past_is_another_life() -> None:
    sequence = EventSequence()
    sequence.skip_to(5)
    told(sequence, 5)
    assert told(sequence, 4) == [Verdict.RESTART]
    sequence = EventSequence()
    told(sequence, *range(REMEMBERED + 10))
    assert told(sequence, 10) == [Verdict.KNOWN]
    assert told(sequence, 9) == [Verdict.RESTART]
