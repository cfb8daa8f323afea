"""Functions and objects of the script that only an object of a package calls: what they keep comes
back."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import functools
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
import probe
probe.hook_optimizers()
{LEARN}
def counting():
    calls, past = 0, []
    def fn(*values):
        nonlocal calls
        calls += 1
        past.append(calls)
        return calls + len(past)
    return fn
class Counting:
    def __init__(self): self.calls, self.past = 0, []
    def __call__(self, *values):
        self.calls += 1
        self.past.append(self.calls)
        return self.calls + len(self.past)
def optimizer_of(model): return torch.optim.SGD(model.parameters(), 0.1)
"""

CASES = {
    "a closure that a schedule calls": """
        def main():
            schedule = LambdaLR(optimizer_of(nn.Linear(1, 1)), counting())
            for k in range(9):
                learn()
                probe.trace(k, schedule.lr_lambdas[0](k))
        main()
    """,
    "a schedule in a schedule": """
        def main():
            optimizer = optimizer_of(nn.Linear(1, 1))
            schedule = SequentialLR(
                optimizer,
                [MultiplicativeLR(optimizer, counting()), LambdaLR(optimizer, counting())],
                [100],
            )
            for k in range(9):
                learn()
                inner = schedule._schedulers[k % 2]
                probe.trace(k, inner.lr_lambdas[0](k))
        main()
    """,
    "an object that a schedule shares with a variable": """
        def main():
            factor = Counting()
            schedule = LambdaLR(optimizer_of(nn.Linear(1, 1)), factor)
            for k in range(9):
                learn()
                factor.past.append(k)
                probe.trace(k, schedule.lr_lambdas[0](k), factor(), factor.past)
        main()
    """,
    "an average's function": """
        def main():
            average = AveragedModel(nn.Linear(1, 1), avg_fn=counting())
            for k in range(9):
                learn()
                probe.trace(k, average.avg_fn())
        main()
    """,
    "the activation of a layer": """
        def main():
            layer = nn.TransformerEncoderLayer(2, 1, 2, activation=counting())
            for k in range(9):
                learn()
                probe.trace(k, layer.activation())
        main()
    """,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_comes_back(run_script: Run, name: str) -> None:
    run_script(_HEAD + textwrap.dedent(CASES[name]), 5).check()


MADE = {
    "an attribute of a class that is made in a function": """
        def make():
            class Ticker:
                s = counted()
                def turn(self): return next(Ticker.s)
            return Ticker, Ticker().turn
        TICKER, tick = make()
    """,
    "an attribute of a module that is made": """
        import types
        TICKER = types.ModuleType("ticker")
        TICKER.s = counted()
        def make(held):
            return lambda: next(held.s)
        tick = make(TICKER)
    """,
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_comes_back_though_the_loop_does_not_name_it(run_script: Run, name: str) -> None:
    source = """
def counted():
    n = 0
    while True:
        yield n
        n += 1
        if n % 3 == 0: yield -n
{made}
def main():
    for k in range(9):
        learn()
        probe.trace(k, tick())
main()
"""
    run_script(_HEAD + source.format(made=textwrap.dedent(MADE[name])), 5).check()
