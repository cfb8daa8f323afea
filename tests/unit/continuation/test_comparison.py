"""Two captures of one program point, compared."""

from __future__ import annotations

import datetime
import re
import sys
import threading
import time
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from reft._continuation import comparison
from reft._continuation.comparison import DATA, RANDOM, TENSOR, VARIABLE, Difference
from reft._continuation.continuation import Continuation


def take(frame: FrameType) -> tuple[FrameType, dict[str, Any]]:
    return frame, Continuation().capture(frame, 1 << 20)


def loop(value: Any, taken: list[Any]) -> Any:
    """Has nothing but `value` that the rest of it needs."""
    taken.append(take(sys._getframe()))
    return value


def captured(value: Any) -> tuple[FrameType, dict[str, Any]]:
    """A capture of a frame with one variable, in a thread, so that no frame of the test is in it."""
    taken: list[Any] = []
    thread = threading.Thread(target=loop, args=(value, taken))
    thread.start()
    thread.join()
    return taken[0]  # type: ignore[no-any-return]


def differences(old: Any, new: Any) -> list[Difference]:
    _, saved = captured(old)
    frame, live = captured(new)
    return Continuation().compare(frame, (saved, b""), (live, b""))


@pytest.mark.parametrize(
    "value",
    [
        3,
        2.5,
        float("nan"),
        "text",
        [1, 2, [3.0]],
        {"a": 1, 2: [3]},
        {1, 2, 3},
        (1, (2, 3)),
        torch.arange(6.0),
        np.arange(4),
        range(3),
        None,
    ],
    ids=str,
)
def test_equal_values_do_not_differ(value: Any) -> None:
    assert differences(value, value) == []


def test_a_loader_that_came_later_is_as_one_that_was_there() -> None:
    """A script makes one for each epoch: in a resumed process, the first one takes its place."""

    def loader() -> DataLoader[int]:
        return DataLoader(range(6), batch_size=2)  # type: ignore[arg-type]

    def train(value: Any, newer: Any, process: Continuation, taken: list[Any]) -> Any:
        process.observe(sys._getframe())
        value = newer()
        frame = sys._getframe()
        taken.append((frame, process.capture(frame, 1 << 20)))
        return value

    def capture(first: Any, newer: Any) -> tuple[FrameType, dict[str, Any]]:
        taken: list[Any] = []
        thread = threading.Thread(target=train, args=(first, newer, Continuation(), taken))
        thread.start()
        thread.join()
        return taken[0]  # type: ignore[no-any-return]

    one = loader()
    (_, saved), (frame, live) = capture(one, loader), capture(one, lambda: one)
    assert Continuation().compare(frame, (saved, b""), (live, b"")) == []


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        (1003, 1004, VARIABLE, "was 1003, is 1004"),
        (0.0, -0.0, VARIABLE, "was 0.0, is -0.0"),
        (1, True, VARIABLE, "was 1, is True"),
        ([1, 2], [1, 2, 3], VARIABLE, "had 2 items, has 3"),
        ({"a": 1}, {"a": 2}, VARIABLE, "was 1, is 2"),
        ({"a": 1}, {"b": 1}, VARIABLE, "the key 'a' is missing"),
        ({1, 2}, {1, 3}, VARIABLE, "2 members are in one alone"),
        (
            torch.zeros(3),
            torch.tensor([0.0, 0.5, 0.0]),
            TENSOR,
            r"1 of 3 items differ, max \|Δ\| 0.5",
        ),
        (torch.zeros(3), torch.zeros(4), TENSOR, "shape was"),
        (np.zeros(2), np.ones(2), TENSOR, "2 of 2 items differ"),
    ],
)
def test_a_value_that_differs_is_named(old: Any, new: Any, kind: str, words: str) -> None:
    found = differences(old, new)
    assert len(found) == 1
    assert found[0].kind == kind
    assert found[0].where.startswith("loop:value")
    assert re.search(words, found[0].why), found[0].why


def test_bytes_that_look_like_one_pickle_are_still_bytes() -> None:
    for kind in (bytes, bytearray, lambda data: [data]):
        (found,) = differences(kind(b"N.\0\0"), kind(b"N.\1\0"))
        assert found.kind == VARIABLE, kind


def test_a_position_in_a_loop_is_data_order() -> None:
    one, other = iter([1, 2, 3]), iter([1, 2, 3])
    next(other)
    (found,) = differences(one, other)
    assert found.kind == DATA


def test_a_generator_of_random_numbers_is_random_state() -> None:
    one, other = torch.Generator(), torch.Generator()
    torch.rand(1, generator=other)
    found = differences(one, other)
    assert found and {difference.kind for difference in found} == {RANDOM}


def test_what_a_clock_gives_may_differ() -> None:
    later = time.time() + 1e-3
    for old, new in [
        (later - 1, later),
        (time.time_ns() - 10**9, time.time_ns()),
        (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)),
    ]:
        found = differences(old, new)
        assert len(found) == 1 and found[0].may_be_time, found
    (counter,) = differences(1004, 1005)
    assert not counter.may_be_time


def test_values_of_dicts_and_tensors() -> None:
    old = {"lr": 0.1, "moments": [torch.ones(2)]}
    new = {"lr": 0.1, "moments": [torch.tensor([1.0, 1.5])]}
    assert comparison.values(old, old, "optimizer", VARIABLE) == []
    (found,) = comparison.values(old, new, "optimizer", VARIABLE)
    assert found.where == "optimizer['moments'][0]" and found.kind == TENSOR


def test_the_difference_of_two_tensors_in_words() -> None:
    a = torch.tensor([1.0, float("nan"), 3.0])
    assert comparison.delta(a, a.clone()) == ""
    assert comparison.delta(a, torch.tensor([1.0, float("nan"), 3.25])) == (
        "1 of 3 items differ, max |Δ| 0.25"
    )
    assert comparison.delta(torch.tensor([True]), torch.tensor([False])) == "1 of 1 items differ"


def test_another_place_in_the_code_is_data_order() -> None:
    _, saved = captured(1003)
    taken: list[Any] = []
    thread = threading.Thread(target=loop_later, args=(1003, taken))
    thread.start()
    thread.join()
    frame, live = taken[-1]
    (found,) = Continuation().compare(frame, (saved, b""), (live, b""))
    assert found.kind == DATA and "loop > " not in found.why


def loop_later(value: Any, taken: list[Any]) -> Any:
    return loop(value, taken)


def test_keys_that_came_and_keys_that_went() -> None:
    (gone,) = comparison.values({"a": 1}, {}, "scheduler", VARIABLE)
    (new,) = comparison.values({}, {"a": 1}, "scheduler", VARIABLE)
    assert (gone.why, new.why) == ("the key 'a' is missing", "the key 'a' is new")


class Plain:
    def __init__(self, value: float) -> None:
        self.value = value


class Odd(Plain):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("not today")


def test_objects_are_compared_by_what_they_hold() -> None:
    assert comparison.values(Plain(1.0), Plain(1.0), "object", VARIABLE) == []
    (found,) = comparison.values(Plain(1.0), Plain(2.0), "object", VARIABLE)
    assert found.where == "object['value']"


def test_what_cannot_be_compared_is_no_equality() -> None:
    (found,) = comparison.values(Odd(1.0), Odd(1.0), "object", VARIABLE)
    assert found.why == "cannot be compared: ValueError: not today"


def test_a_small_tensor_is_no_clock() -> None:
    (found,) = differences(torch.tensor(0.25), torch.tensor(0.5))
    assert found.kind == TENSOR and not found.may_be_time


def test_where_a_captured_loop_can_be_restored_is_known_before_any_write() -> None:
    known, why = Continuation(), []

    def look(taken: list[Any]) -> None:
        frame = sys._getframe(1)
        taken.append(known.capture(frame, 1 << 20))
        why.append(known.why_not_here(frame, taken[0]))

    def at_two_lines() -> None:
        taken: list[Any] = []
        for _ in range(2):
            look(taken)
        look(taken)
        unknown = {**taken[2], "exact": False}
        why.append(known.why_not_here(sys._getframe(), unknown))

    thread = threading.Thread(target=at_two_lines)
    thread.start()
    thread.join()
    same, again, elsewhere, unknown = why
    assert same == again == ""
    assert "the call in progress was in line" in elsewhere
    assert unknown == "the position of a loop is not known"
