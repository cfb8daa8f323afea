"""Lists and dicts of the main module that its code reaches by text only (`globals()["history"]`) came
back as the discarded iteration had left them, and the resume was called bit-identical."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
import sys
bank_a, bank_b = [], {"sum": 0.0}
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

def reached(letter):
    return BY

def train(step):
    loss = (weight * torch.rand(4)).square().sum() + 0.1 * len(reached("a")) * weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    reached("a").append(step)
    reached("b")["sum"] += loss.item()

for step in range(12):
    train(step)
final(weight, a=len(reached("a")), b=reached("b")["sum"])
"""


@pytest.mark.parametrize(
    "by",
    [
        'globals()["bank_" + letter]',
        'vars(sys.modules["__main__"])["bank_" + letter]',
        'eval("bank_" + letter)',
        'sys.modules[__name__].__dict__["bank_" + letter]',
    ],
)
def test_they_come_back(jobs: Runner, by: str) -> None:
    jobs.same(SCRIPT.replace("BY", by), 1, "0:8:before_seal")
