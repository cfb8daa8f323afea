"""Objects of packages' classes that come into being after the first step, and that no copy of their
attributes makes: they come back as their classes make them from a pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import functools, inspect, threading
import torch
import probe
probe.hook_optimizers()
{LEARN}
"""

_METRIC = """
class Metric(torch.nn.Module):
    '''As torchmetrics makes one: its own methods are wrapped.'''
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(2)
        self._wrap()
    def _wrap(self):
        self._signature = inspect.signature(self.update)
        inner, calls = self.update, 0
        @functools.wraps(inner)
        def update(*args):
            nonlocal calls
            calls += 1
            inner(*args)
            return calls
        self.update = update
    def update(self, value: float): self.total = self.total + value
    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k not in ("update", "_signature")}
    def __setstate__(self, state):
        self.__dict__.update(state)
        self._wrap()
"""


def test_a_metric_that_wraps_its_methods(run_script: Run) -> None:
    """Also what the wrapper has counted comes back."""
    source = """
def main():
    results = {}
    for k in range(9):
        learn()
        if k == 1: results["loss"] = Metric()
        seen = [results["loss"].update(k), results["loss"].total.tolist()] if results else []
        probe.trace(k, seen, [str(m._signature) for m in results.values()])
main()
"""
    run_script(_HEAD + _METRIC + source, 5).check()


@pytest.mark.parametrize(
    "setstate",
    ["self.__dict__.update(state)", "raise KeyError('parts')", "self.__dict__['total'] = None"],
)
def test_one_that_stays_half_is_named(run_script: Run, setstate: str) -> None:
    """One that leaves out what it had, one that wants another state, one that changes it."""
    source = f"""
def restored(self, state):
    {setstate}
Metric.__setstate__ = restored
def main():
    results = {{}}
    for k in range(9):
        learn()
        if k == 1: results["loss"] = Metric()
        probe.trace(k)
main()
"""
    run = run_script(_HEAD + _METRIC + source, 5)
    named = run.captured["uncaptured"] + run.restored["problems"]
    assert any("results" in place for place, _, _ in named), named
    assert run.restored["lines"] == run.expected["lines"]


def test_objects_that_share_one_dict(run_script: Run) -> None:
    """accelerate keeps its state so: one made later has to see what the others see."""
    source = """
class Shared:
    _state = {}
    def __init__(self):
        self.__dict__ = Shared._state
        if not self._state: self.steps, self.seen = 0, []
def main():
    first, later = Shared(), {}
    for k in range(9):
        learn()
        if k == 1: later["again"] = Shared()
        for held in later.values():
            held.steps += 1
            held.seen += [k]
        probe.trace(k, first.steps, first.seen, [h.__dict__ is first.__dict__ for h in later.values()])
main()
"""
    run_script(_HEAD + source, 5).check()


def test_a_signature_that_has_changed_is_named(run_script: Run) -> None:
    source = """
def f(x): pass
def g(x, y=2): pass
def main():
    wanted = inspect.signature(f)
    for k in range(9):
        learn()
        probe.trace(k, len(wanted.parameters) > 0)
        if k == 2: wanted = inspect.signature(g)
main()
"""
    run = run_script(_HEAD + source, 5)
    named = run.captured["uncaptured"] + run.restored["problems"]
    assert any("wanted" in place for place, _, _ in named), named
