"""Where an iteration ends: learnt from the order in which optimizers step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from reft._session.boundary import Boundary
from reft._state import gradients
from tests.support import strangers

FRAME = sys._getframe()  # some frame


@pytest.fixture(autouse=True)
def no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers.hide(monkeypatch)


class Recorder:
    """Writes down what a boundary reports."""

    def __init__(self, position: dict[str, Any] | None = None) -> None:
        self.events: list[str] = []
        self.position = position
        self.has_all = True
        self.boundary = Boundary(self)

    def gate(self, optimizer: Optimizer | None = None) -> None:
        self.events.append("gate")

    def program_point(self, frame: FrameType, gated: bool = True) -> None:
        self.events.append("point")
        self.position = None

    def possible_point(self, frame: FrameType) -> None:
        self.events.append("possible")

    def failed(self, what: str, error: Exception) -> None:
        self.events.append(f"error {what} {error}")

    waits = exact = True

    @property
    def most_optimizers(self) -> int:
        return 9

    def optimizers_now(self) -> list[Optimizer]:
        return self.boundary.optimizers

    def awaited(self) -> Any:
        return None if self.position is None else self

    def has_optimizers(self, known: list[Optimizer]) -> bool:
        return self.has_all

    def optimizers_replaced(self) -> None:
        pass

    def graph_crosses(self) -> bool:
        return False

    def step_crossed(self, instead: int) -> None:
        pass

    def iteration_lengthened(
        self, crossed: torch.optim.Optimizer, closing: torch.optim.Optimizer
    ) -> None:
        self.events.append("lengthened")

    @property
    def points(self) -> list[int]:
        """Numbers of the gates after which a point came."""
        gates, found = 0, []
        for event in self.events:
            gates += event == "gate"
            if event == "point":
                found.append(gates)
        return found


def optimizer(renews: bool = True) -> torch.optim.Optimizer:
    """With a gradient, a new one at each step."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    made = torch.optim.SGD([parameter], lr=0.1)
    if renews:
        made.register_step_pre_hook(lambda *_: setattr(parameter, "grad", torch.ones(2)))
    return made


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.boundary.remove()


def test_single_optimizer_ends_every_step_from_the_first(recorder: Recorder) -> None:
    only = optimizer()
    for _ in range(3):
        only.step()
    assert recorder.points == [1, 2, 3]


def test_gan_ends_with_the_second_optimizer(recorder: Recorder) -> None:
    a, b = optimizer(), optimizer()
    for _ in range(3):
        a.step()
        b.step()
    assert recorder.boundary.closing == 1
    assert recorder.points == [4, 6]  # known when `a` steps for the second time


def test_the_first_round_says_where_a_restarted_script_will_be_put_back(recorder: Recorder) -> None:
    a, b = optimizer(), optimizer()
    for _ in range(2):
        a.step()
        b.step()
    # The last of them, after b's first step, is where `a` and `b` stand when a restarted script
    # sees b close.
    assert recorder.events == ["gate", "possible", "gate", "possible", "gate", "gate", "point"]


def test_a_wrapper_that_shares_the_optimizers_parameters_is_no_second_optimizer(
    recorder: Recorder,
) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, wrapped: torch.optim.Optimizer) -> None:
            self.wrapped = wrapped

        @property
        def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
            return self.wrapped.param_groups

        def step(self) -> None:  # type: ignore[override]
            self.wrapped.step()

    only = Wrapper(optimizer())
    for _ in range(3):
        only.step()
    assert recorder.points == [1, 2, 3]


def test_a_step_that_calls_its_bases_step_is_one_step(recorder: Recorder) -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.fails:
                raise ValueError
            super().step()

        fails = False

    optimizer()  # from now on the base's step has hooks of its own
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    only = Clipped([parameter], lr=0.1)
    only.step()
    only.fails = True
    with pytest.raises(ValueError):
        only.step()
    only.fails = False
    only.step()
    assert recorder.points == [2, 5]  # after the outer steps only; the gate comes with each


def test_every_step_of_a_critic_ends_an_iteration(recorder: Recorder) -> None:
    critic, generator = optimizer(), optimizer()
    for _ in range(2):
        for _ in range(3):
            critic.step()
        generator.step()
    assert recorder.boundary.closing == 0
    assert recorder.events.count("gate") == 8  # the generator's step is a gate and no point


def test_a_step_that_raises_does_not_confuse_the_next(recorder: Recorder) -> None:
    only = optimizer()

    def closure() -> float:
        raise RuntimeError("user error")

    with pytest.raises(RuntimeError, match="user error"):
        only.step(closure)
    only.step()
    assert recorder.points[-1:] == [2]


def test_an_error_in_the_listener_stays_out_of_training() -> None:
    class Failing(Recorder):
        def gate(self, optimizer: Optimizer | None = None) -> None:
            raise ValueError("ours")

        def program_point(self, frame: FrameType, gated: bool = True) -> None:
            raise ValueError("ours too")

    made = Failing()
    optimizer().step()
    made.boundary.remove()
    assert made.events == ["error gate ours", "error step ours too"]


def test_nested_optimizers_count_once(recorder: Recorder) -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], lr=0.1)
            self.optim = inner

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.optim.step()

    outer = Outer(optimizer())
    for _ in range(2):
        outer.step()
    assert recorder.events.count("point") == 2


class Crossed(Recorder):
    """With a graph that a test declares used since the last look at the frames."""

    def __init__(self) -> None:
        self.used = False
        super().__init__()

    def graph_crosses(self) -> bool:
        return self.used

    def step_crossed(self, instead: int) -> None:
        self.used = self.used and instead < 0


@pytest.fixture
def crossed() -> Iterator[Crossed]:
    made = Crossed()
    yield made
    made.boundary.remove()


def test_a_step_that_a_graph_crosses_ends_no_iteration(crossed: Crossed) -> None:
    critic, generator = optimizer(), optimizer()
    for n in range(9):
        critic.step()
        if n % 3 == 0:
            crossed.used = (
                n == 0
            )  # its loss is of what was computed before the critic's step; from then on that is not looked at
            generator.step()
    assert crossed.boundary.closing == 1
    assert crossed.points == [6, 10]  # at the generator's second and third steps
    assert crossed.events.count("lengthened") == 1


def test_a_late_graph_ends_the_iteration_at_the_step_behind_it(crossed: Crossed) -> None:
    critic, generator = optimizer(), optimizer()
    for n in range(8):
        critic.step()
        if n > 4:
            crossed.used = True
            generator.step()
    assert crossed.boundary.closing == 1
    assert crossed.points == [2, 3, 4, 5, 6, 7, 9, 11]
    assert crossed.events.count("lengthened") == 1


def test_the_only_optimizer_ends_iterations_though_crossed(crossed: Crossed) -> None:
    only = optimizer()
    for _ in range(3):
        crossed.used = True
        only.step()
    assert crossed.points == [1, 2, 3]
    assert crossed.used  # whoever captures says that the place is not saved


def test_a_crossed_optimizer_ends_iterations_when_the_other_one_rests_for_good(
    crossed: Crossed,
) -> None:
    critic, generator = optimizer(), optimizer()
    for n in range(80):
        critic.step()
        if n == 0:
            crossed.used = True
            generator.step()
    assert crossed.boundary.closing == 0
    assert 60 < crossed.points[0] < 72
    assert len(crossed.points) == 82 - crossed.points[0]


def test_gradients_from_before_a_step_cross_it(recorder: Recorder) -> None:
    first, second = optimizer(renews=False), optimizer(renews=False)
    for n in range(6):
        for one in (first, second):  # one backward for both
            one.param_groups[0]["params"][0].grad = torch.ones(2)
        first.step()
        if n % 2:
            second.step()
    assert recorder.boundary.closing == 1
    assert recorder.points == [
        2,
        4,
        5,
        6,
        9,
    ]  # known when `second`, known by then, steps again: its step ends that iteration


def test_gradients_that_are_new_do_not_cross(recorder: Recorder) -> None:
    first, second = optimizer(), optimizer()
    for n in range(6):
        first.step()
        if n % 2:
            second.param_groups[0]["params"][0].grad = torch.ones(2)
            second.step()
    assert recorder.boundary.closing == 0


def test_a_restarted_script_is_put_back_where_it_was_first_seen() -> None:
    """Loops over one optimizer after the other: the one that ends iterations changes."""

    def run(made: Recorder, rounds: int) -> None:
        for turn in range(rounds):
            for one in (first, second):
                for _ in range(3):
                    one.step()
                    if made.events[-1] == "point":
                        saved.append((turn, one is second, made.boundary.position(FRAME)))

    first, second = optimizer(), optimizer()
    saved: list[tuple[int, bool, dict[str, Any]]] = []
    made = Recorder()
    run(made, 2)
    made.boundary.remove()
    assert {is_second for _, is_second, _ in saved} == {False, True}
    for _, _, position in saved:
        again = Recorder(position)
        first, second = optimizer(), optimizer()
        first.step()
        again.boundary.remove()
        assert again.events == ["gate", "possible", "point"]


def test_a_restarted_script_waits_for_optimizers_that_are_made_later() -> None:
    made = Recorder({"first": 1, "at": 0, "complete": 4, "reached": {}})
    try:
        made.has_all = False
        only = optimizer()
        for _ in range(3):
            only.step()
        assert made.points == []
        made.has_all = True
        only.step()
        assert made.points == [4]
    finally:
        made.boundary.remove()


def test_an_optimizer_that_nobody_has_numbered_is_there_when_it_steps() -> None:
    class Unnumbered(Recorder):
        def optimizers_now(self) -> list[Optimizer]:
            return []

    made = Unnumbered()
    try:
        optimizer().step()
        assert made.boundary.early == 1
        assert made.boundary.position(FRAME)["complete"] == 1
    finally:
        made.boundary.remove()


def test_it_does_not_wait_for_ever() -> None:
    made = Recorder({"first": 1, "at": 0, "complete": 4, "reached": {}})
    try:
        made.has_all = False
        only = optimizer()
        for _ in range(70):
            only.step()
        assert made.points[0] == 65
    finally:
        made.boundary.remove()


def test_a_step_that_was_put_back_ends_iterations_as_before(recorder: Recorder) -> None:
    first, second = optimizer(), optimizer()
    for _ in range(4):
        for one in (first, second):
            for _ in range(2):
                one.step()
    position = recorder.boundary.position(FRAME)
    again = Recorder()
    try:
        again.boundary.know(recorder.boundary.optimizers)
        again.boundary.put_back(position, has_place=True)
        for made in (recorder, again):
            made.events.clear()
        for one in (first, second, first, second):
            one.step()
            one.step()
        assert again.events == recorder.events
    finally:
        again.boundary.remove()


def test_an_optimizer_inside_another_has_stepped_with_its_gradients(recorder: Recorder) -> None:
    class Outer(Optimizer):
        """Steps another one, for its own part of the parameters, as ZeroRedundancyOptimizer does."""

        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            super().__init__(parameters, {})
            self.inner = torch.optim.SGD(parameters[1:], lr=0.1)

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.inner.step()

    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    outer = Outer(parameters)
    assert gradients.of_process.waiting([outer, outer.inner]) == [outer, outer.inner]
    outer.step()
    assert gradients.of_process.waiting([outer, outer.inner]) == []
    assert recorder.events.count("point") == 1
