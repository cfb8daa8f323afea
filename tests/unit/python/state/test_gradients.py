"""Gradients that outlive a step, and those that a resume did not bring back."""

from __future__ import annotations

import pytest
import torch

from reft._state import gradients
from reft._state.gradients import Gradients


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (torch.optim.Optimizer, torch.nn.Module):
        monkeypatch.setattr(cls, "zero_grad", cls.zero_grad)  # put back when the test ends


def made(size: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(size))
    return parameter, torch.optim.SGD([parameter], lr=0.1)


def step(known: Gradients, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    came_out = known.about_to_step(optimizer)
    optimizer.step()
    known.has_stepped(optimizer)
    return came_out


def test_gradients_that_are_added_to_after_a_step_outlive_it() -> None:
    known, (parameter, optimizer) = Gradients(), made(3)
    assert not step(known, parameter, optimizer)
    known.stepped([optimizer])
    optimizer.zero_grad()
    assert not step(known, parameter, optimizer)
    known.stepped([optimizer])
    assert step(known, parameter, optimizer) and known.outlive


def test_gradients_that_another_optimizer_gathers_outlive_its_steps() -> None:
    known, (parameter, optimizer), (rare, other) = Gradients(), made(3), made(4)
    both = [optimizer, other]
    for turn in range(2):
        optimizer.zero_grad()
        rare.sum().backward()  # type: ignore[no-untyped-call]
        step(known, parameter, optimizer)
        assert known.added_to(both) == ([other] if turn else [])
        assert known.waiting(both) == ([] if turn else [other])
        known.stepped(both)


def test_an_optimizer_that_zeroes_its_gradients_lacks_none_after_a_resume(original: None) -> None:
    known, (_, one), (_, other) = Gradients(), made(3), made(4)
    known.watch()
    known.resumed([one, other], 7)
    one.zero_grad()
    assert not known.steps_without(one)
    assert known.steps_without(other) and not known.steps_without(other)
    known.resumed([one], 1)  # the discarded iteration was the first one, too
    assert not known.steps_without(one)


def test_compiled_functions_do_not_trace_what_is_noted_of_zero_grad(original: None) -> None:
    known, model = Gradients(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known.watch()

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad(set_to_none=False)
        return model(x).sum()  # type: ignore[no-any-return]

    def zero() -> None:
        optimizer.zero_grad(set_to_none=False)

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    for _ in range(3):  # each with other gradients and versions of them
        compiled(torch.ones(1, 2)).backward()
        known.stepped([optimizer])
    known.resumed([optimizer], 7)
    torch.compile(zero, backend="eager")()
    assert not known.steps_without(optimizer), "the optimizer's own runs as it is"
    torch.compiler.reset()


def test_an_error_in_what_is_noted_does_not_reach_zero_grad(
    original: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, (parameter, optimizer) = Gradients(), made(3)
    known.watch()
    step(known, parameter, optimizer)
    known.stepped([optimizer])

    def fail(reference: object) -> int:
        raise RuntimeError("no version")

    monkeypatch.setattr(gradients, "_version", fail)
    optimizer.zero_grad()
    assert parameter.grad is None
