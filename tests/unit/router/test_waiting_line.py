"""The order in the line, what a request may call itself, and who must go."""

from __future__ import annotations

from random import Random

import pytest

from router.waiting import BadPriorityError, Place, Priority, WaitingLine, read_priority


@pytest.mark.parametrize(
    ("header", "in_body", "wanted"),
    [
        (None, None, Priority.NORMAL),
        (None, 0, Priority.NORMAL),
        (None, -3, Priority.HIGH),
        (None, 7, Priority.LOW),
        (None, True, Priority.NORMAL),
        (None, "high", Priority.NORMAL),
        (None, 1.5, Priority.NORMAL),
        (b"High ", 7, Priority.HIGH),
        (b"low", -1, Priority.LOW),
        (b"normal", -1, Priority.NORMAL),
    ],
)
def test_the_header_decides_else_the_sign_of_the_bodys_number(
    header: bytes | None, in_body: object, wanted: Priority
) -> None:
    assert read_priority(header, in_body) is wanted


@pytest.mark.parametrize("header", [b"", b"urgent", b"0", b"\xff"])
def test_a_header_that_names_no_class_is_a_mistake(header: bytes) -> None:
    with pytest.raises(BadPriorityError, match="high, normal or low"):
        read_priority(header, None)


def test_the_higher_class_goes_first_and_within_it_the_first_comer() -> None:
    line: WaitingLine[Place] = WaitingLine(8)
    low, normal, high, later = (
        Place("m", p) for p in (Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL)
    )
    for place in (low, normal, high, later):
        line.join(place)
    assert list(line) == [high, normal, later, low]
    assert line.ahead("m", Priority.HIGH) == 1
    assert line.ahead("m", Priority.NORMAL) == 3
    assert line.ahead("other", Priority.LOW) == 0
    line.leave(normal)
    line.leave(normal)
    assert list(line) == [high, later, low]
    line.check_integrity()


def test_only_a_lower_class_gives_way_and_of_it_the_last() -> None:
    line: WaitingLine[Place] = WaitingLine(8)
    places = [Place("m", p) for p in (Priority.NORMAL, Priority.LOW, Priority.LOW)]
    for place in places:
        line.join(place)
    assert line.displaceable(Priority.LOW) is None
    assert line.displaceable(Priority.NORMAL) is places[2]
    line.leave(places[1])
    line.leave(places[2])
    assert line.displaceable(Priority.NORMAL) is None
    assert line.displaceable(Priority.HIGH) is places[0]


def test_random_joins_and_leaves_agree_with_a_sorted_list() -> None:
    line: WaitingLine[Place] = WaitingLine(20)
    rng, plain = Random(4), list[tuple[int, int, Place]]()
    for number in range(3000):
        if rng.random() < 0.55 and not line.is_full:
            place = Place(rng.choice("ab"), rng.choice(list(Priority)))
            line.join(place)
            plain.append((place.priority, number, place))
        elif plain:
            line.leave(plain.pop(rng.randrange(len(plain)))[2])
        ordered = [place for _, _, place in sorted(plain, key=lambda item: item[:2])]
        assert list(line) == ordered
        for priority in Priority:
            assert line.ahead("a", priority) == sum(
                place.model == "a" and place.priority <= priority for place in ordered
            )
        line.check_integrity()
