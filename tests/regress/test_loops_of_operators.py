"""Loops that `+=` and the assignment of slices run in C were not refused: training began again inside
of them, and the resume was called bit-identical."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
from collections import deque
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)

def train(k):
    opt.zero_grad()
    loss = model(torch.full((3, 4), 0.1 * float(k))).square().mean()
    loss.backward()
    opt.step()
    return loss.item()

class Steps:
    "Operators of the script's own keep nothing in C."
    def __init__(self):
        self.losses = []
    def __iadd__(self, ks):
        for k in ks:
            self.losses.append(train(k))
        return self
    __rmatmul__ = __setitem__ = lambda self, *ks: self.losses.append(train(ks[-1]))

steps, losses, queue, table = Steps(), [0.0], deque(), {}
LOOP
final(*model.parameters(), losses=losses, more=steps.losses, queue=list(queue), table=table)
"""
REFUSED = "(place in the loop): the training step runs while C code consumes an iterable: use a `for` loop"


@pytest.mark.parametrize(
    "loop",
    [
        "losses += (train(k) for k in range(12))",
        "losses += map(train, range(12))",
        "losses[1:] = (train(k) for k in range(12))",
        "queue += (train(k) for k in range(12))",
        "table |= ((k, train(k)) for k in range(12))",
    ],
)
def test_they_are_refused_before_the_kill(jobs: Runner, loop: str) -> None:
    said = jobs.run(SCRIPT.replace("LOOP", loop))
    assert REFUSED in said, said


@pytest.mark.parametrize(
    "loop",
    [
        "steps += range(12)",
        "for k in range(12):\n    0.5 @ steps if k % 2 else steps.__setitem__(0, k)",
        "for k in range(12):\n    steps[k:] = k",
        "for k in range(12):\n    losses += [train(k)]",
    ],
)
def test_operators_in_python_are_restored(jobs: Runner, loop: str) -> None:
    jobs.same(SCRIPT.replace("LOOP", loop), 1, "0:8:before_seal")
