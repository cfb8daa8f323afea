"""Objects keep their places over restarts: the order in which the script makes them."""

from __future__ import annotations

import gc

import pytest
import torch

from reft._state import constructions
from reft._state.constructions import Constructions


class Base:
    def __init__(self, size: int) -> None:
        self.size = size


class Derived(Base):
    def __init__(self) -> None:
        super().__init__(1)


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Constructions:
    for cls in (Base, Derived):
        monkeypatch.setattr(cls, "__init__", cls.__init__)  # put back when the test ends
    monkeypatch.setattr(constructions, "_WATCHED", (Base, Derived))
    made = Constructions()
    made.watch()
    made.watch()
    return made


def test_known_objects_come_in_the_order_of_their_making(watching: Constructions) -> None:
    first, second, third = Base(1), Base(2), Base(3)
    assert watching.in_order([third, second, first], Base) == [first, second, third]


def test_a_constructor_that_calls_its_base_makes_one_object(watching: Constructions) -> None:
    one = Derived()
    assert watching.in_order([], Base) == [one] and watching.count == 2


def test_objects_from_before_come_first(watching: Constructions) -> None:
    late = Base(1)
    early = object.__new__(Base)
    assert watching.in_order([late, early], Base) == [early, late]


def test_an_object_that_is_gone_keeps_nothing_alive(watching: Constructions) -> None:
    kept = Base(1)
    Base(2)
    gc.collect()
    assert watching.in_order([], Base) == [kept] and watching.count == 2


def test_classes_are_told_apart(watching: Constructions) -> None:
    base, derived = Base(1), Derived()
    assert watching.in_order([], Derived) == [derived]
    assert watching.in_order([], (Base,)) == [base, derived]


def test_objects_from_before_are_told_apart_by_their_places(watching: Constructions) -> None:
    one, two, three = (object.__new__(Base) for _ in range(3))
    places = {id(one): "main:b", id(two): "main:a", id(three): "main:c"}
    watching.place_of = lambda obj: places.get(id(obj))
    assert watching.in_order([three, one, two], Base) == [two, one, three]
    keys = [watching.key_of(obj) for obj in (two, one, three)]
    other = Constructions()
    other.place_of = watching.place_of
    assert other.in_order([one, two, three], Base) == [two, one, three]
    assert [other.key_of(obj) for obj in (two, one, three)] == keys
    assert not any(map(watching.is_twin, (one, two, three)))


def test_objects_from_before_keep_their_order_when_they_change(watching: Constructions) -> None:
    one, two = object.__new__(Base), object.__new__(Base)
    one.size, two.size = 2, 1
    assert watching.in_order([one, two], Base) == [two, one]
    one.size = 0
    assert watching.in_order([one, two], Base) == [two, one]
    assert not watching.is_twin(one)


def test_objects_that_nothing_tells_apart_are_twins(watching: Constructions) -> None:
    one, two, other = (object.__new__(Base) for _ in range(3))
    one.size = two.size = 2
    other.size = 3
    watching.in_order([one, other, two], Base)
    assert [watching.is_twin(obj) for obj in (one, two, other)] == [True, True, False]


def test_constructors_keep_their_names_and_signatures() -> None:
    import inspect

    constructions.of_process.watch()
    scheduler = torch.optim.lr_scheduler.LRScheduler
    assert scheduler.__init__.__name__ == "__init__"
    assert "optimizer" in inspect.signature(scheduler.__init__).parameters
