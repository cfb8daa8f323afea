"""Gradients that outlive a step, and those that a resume did not bring back."""

from __future__ import annotations

import pytest
import torch

from reft._state.gradients import Gradients


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


def test_an_optimizer_that_zeroes_its_gradients_lacks_none_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cls in (torch.optim.Optimizer, torch.nn.Module):
        monkeypatch.setattr(cls, "zero_grad", cls.zero_grad)  # put back when the test ends
    known, (_, one), (_, other) = Gradients(), made(3), made(4)
    known.watch()
    known.resumed([one, other], 7)
    one.zero_grad()
    assert not known.steps_without(one)
    assert known.steps_without(other) and not known.steps_without(other)
    known.resumed([one], 1)  # the discarded iteration was the first one, too
    assert not known.steps_without(one)
