"""What tells whether large containers have changed since the first program point."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402

from reft import _C  # noqa: E402
from reft._continuation.bulk import Bulk  # noqa: E402


class Rows(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise AssertionError("code of the script is run")


class Weights(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise AssertionError("code of the script is run")


N = 300


def put(container: Any) -> None:
    container[7] = 99.5


def put_date(dates: Any) -> None:
    dates[7] = 99


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "list": (lambda: [0.0] * N, put),
    "a list of the script's class": (lambda: Rows([0.0] * N), put),
    "dict": (lambda: dict.fromkeys(range(N), 0.0), put),
    "Counter": (lambda: Counter(range(N)), put),
    "defaultdict": (lambda: defaultdict(float, dict.fromkeys(range(N), 0.0)), put),
    "OrderedDict": (lambda: OrderedDict.fromkeys(range(N), 0.0), put),
    "the order of an OrderedDict": (
        lambda: OrderedDict.fromkeys(range(N), 0.0),
        lambda item: item.move_to_end(3),
    ),
    "a dict of the script's class": (lambda: Weights(dict.fromkeys(range(N), 0.0)), put),
    "deque": (lambda: deque([0.0] * N), put),
    "set": (lambda: set(range(N)), lambda item: (item.remove(3), item.add(-3))),
    "bytearray": (lambda: bytearray(N), lambda item: item.__setitem__(7, 9)),
    # Of more than what fingerprints read in full.
    "array": (lambda: numpy.zeros(30_000), put),
    "array of several columns": (lambda: numpy.zeros((30_000, 9)).T[1:4], lambda a: put(a[1])),
    "array in Fortran's order": (lambda: numpy.zeros((300, 9), order="F"), put),
    "array of dates": (lambda: numpy.zeros(N, "datetime64[s]"), put_date),
    "array of objects": (lambda: numpy.array([0.0] * N, object), put),
    "tensor": (lambda: torch.zeros(N), put),
    "tensor, through its memory": (lambda: torch.zeros(N), lambda t: put(t.numpy())),
    "tensor of bfloat16, through its data": (
        lambda: torch.zeros(N, dtype=torch.bfloat16),
        lambda t: put(t.data),
    ),
    "transposed tensor": (lambda: torch.zeros(2, N).T, lambda t: put(t.data)),
    # So large that each capture compared only a part of them once.
    "list of many": (lambda: [0.0] * 1_000_000, put),
    "dict of many": (lambda: dict.fromkeys(range(200_000), 0.0), put),
    "set of many": (lambda: set(range(200_000)), lambda item: (item.remove(3), item.add(-3))),
    "frozenset": (lambda: frozenset(range(N)), None),
    "array of 8 MB": (lambda: numpy.zeros(1_000_000), put),
    "array of many objects": (lambda: numpy.array([0.0] * 300_000, object), put),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_a_large_container_is_seen(name: str) -> None:
    make, change = CHANGES[name]
    item = make()
    bulk = Bulk(item)
    assert bulk.missed == ""
    assert not bulk.has_changed(item)
    assert not bulk.has_changed(item)
    if change is not None:
        change(item)
        assert bulk.has_changed(item)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [0.0] * 3_000_000, lambda item: item.append(1.0)),
        (lambda: bytearray(20_000_000), lambda item: item.__setitem__(0, 1)),
        (lambda: numpy.zeros(3_000_000), lambda item: item.__setitem__(0, 1)),
        (lambda: torch.zeros(5_000_000), lambda item: item.add_(1)),
        (lambda: deque(range(100_000), 100_000), lambda item: item.append(-1)),
        (lambda: OrderedDict.fromkeys(range(100_000)), lambda item: item.popitem()),
    ],
)
def test_of_the_largest_samples_are_compared(
    make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    item = make()
    bulk = Bulk(item)
    assert "single items" in bulk.missed
    assert not bulk.has_changed(item)
    change(item)
    assert bulk.has_changed(item)


def test_equal_items_that_are_others_are_no_change() -> None:
    """Later captures compare identities again."""
    rows = [(i, "a") for i in range(N)]
    table = dict(enumerate(rows))
    members = set(rows)
    for item, change in (
        (rows, lambda: rows.__setitem__(7, copy.deepcopy((7, "a")))),
        (table, lambda: table.__setitem__(7, (7, "".join("a")))),
        (members, lambda: (members.remove((7, "a")), members.add((7, "a")))),
    ):
        bulk = Bulk(item)
        change()
        assert not bulk.has_changed(item)
        assert not bulk.has_changed(item)


@pytest.mark.parametrize(
    ("item", "is_seen"),
    [
        ([("a.png", 3)] * N, True),
        ([((1, 2), "a", Path("b"), numpy.float32(1))] * N, True),
        (dict.fromkeys(range(N), ("a", None)), True),
        ({("a", i) for i in range(N)}, True),
        ([[1]] * N, False),
        ([{"id": 1}] * N, False),
        ([("a", [1])] * N, False),
        ([torch.zeros(1)] * N, False),
        ({i: [i] for i in range(N)}, False),
        (numpy.array([{}] * N, object), False),
    ],
)
def test_what_changes_inside_of_an_item_may_be_missed(item: Any, is_seen: bool) -> None:
    assert ("inside" not in Bulk(item).missed) == is_seen


def test_what_cannot_be_compared_has_changed() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("odd")

        __hash__ = None  # type: ignore[assignment]

    item = [Odd() for _ in range(N)]
    bulk = Bulk(item)
    assert not bulk.has_changed(item), "by identity"
    item[3] = Odd()
    assert bulk.has_changed(item)


def test_a_removed_member_of_a_set_leaves_a_mark_that_is_no_member() -> None:
    members = set(range(N))
    members.discard(5)
    assert _C.set_holds(members, [*members])
    assert not _C.set_holds(members, [*members][:-1])
    assert not _C.set_holds(members, [*members, 5])


@pytest.mark.parametrize("call", [
    lambda: _C.set_holds([1], [1]),  # type: ignore[arg-type]
    lambda: _C.holds_pairs([1], [1], [1]),  # type: ignore[arg-type]
    lambda: _C.holds_bytes(1, b""),
    lambda: _C.holds_objects(1, []),
])  # fmt: skip
def test_another_class_of_container_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        call()
