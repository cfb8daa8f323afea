"""The inner order of sets: what is given a set's layout behaves like it from then on."""

from __future__ import annotations

import struct

import pytest
import torch  # noqa: F401  # reft._C is linked to its libraries
from hypothesis import given, settings
from hypothesis import strategies as st

from reft import _C

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "pop", "update"]), st.integers(-300, 300)),
    max_size=120,
)


def run(numbers: set[object], operations: list[tuple[str, int]]) -> list[object]:
    popped: list[object] = []
    for name, number in operations:
        if name == "pop":
            popped.append(numbers.pop() if numbers else None)
        elif name == "update":
            numbers.update((number, i, number * 1_000_003) for i in range(abs(number) % 7))
        else:
            getattr(numbers, name)(number)
    return popped


@settings(max_examples=200, deadline=None)
@given(OPERATIONS, OPERATIONS)
def test_a_set_with_the_layout_of_another_goes_on_like_it(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    first: set[object] = set()
    run(first, before)
    layout = _C.set_layout(first)
    assert layout is not None
    second: set[object] = {"something", 5, (1, 2)}
    assert _C.set_put_layout(second, list(first), *layout)
    assert list(second) == list(first) and second == first
    assert _C.set_layout(second) == layout
    assert run(second, after) == run(first, after)
    assert list(second) == list(first)


def test_frozen_sets_too() -> None:
    frozen = frozenset([3, 1, 300, 7, 17])
    layout = _C.set_layout(frozen)
    assert layout is not None
    other = frozenset(sorted(frozen))
    hash(other)
    assert _C.set_put_layout(other, list(frozen), *layout)
    assert list(other) == list(frozen) and hash(other) == hash(frozen)


@pytest.mark.parametrize(
    ("members", "mask", "finger", "places", "removed"),
    [
        ([1], 6, 0, [1], []),  # no power of two
        ([1], 3, 0, [1], []),  # too small
        ([1], 7, 9, [1], []),
        ([1, 2], 7, 0, [1], []),
        ([1], 7, 0, [8], []),
        ([1, 2], 7, 0, [1, 1], []),
        ([1], 7, 0, [1], [1]),
        (list(range(8)), 7, 0, list(range(8)), []),  # full
        ([1], (1 << 40) - 1, 0, [1], []),
    ],
)
def test_a_layout_that_no_set_has_is_refused(
    members: list[int], mask: int, finger: int, places: list[int], removed: list[int]
) -> None:
    target = {10, 20}
    packed = [struct.pack(f"{len(values)}I", *values) for values in (places, removed)]
    with pytest.raises(ValueError, match="slot"):
        _C.set_put_layout(target, members, mask, finger, *packed)
    assert target == {10, 20}


def test_members_that_cannot_be_found_there_change_nothing() -> None:
    target = {10, 20, 30}
    before = list(target)
    assert not _C.set_put_layout(target, [1, 2], 7, 0, struct.pack("2I", 5, 0), b"")
    assert list(target) == before and 20 in target
    with pytest.raises(TypeError):
        _C.set_put_layout(target, [[]], 7, 0, struct.pack("I", 1), b"")
    with pytest.raises(TypeError):
        _C.set_layout([1])  # type: ignore[arg-type]
    assert list(target) == before
