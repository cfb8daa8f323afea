"""Loops that NumPy runs in C were not refused: the restarted loop began again inside of them."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
import numpy as np
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []

def train(k):
    opt.zero_grad()
    loss = model(torch.full((3, 4), 0.1 * float(k))).square().mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    return losses[-1]

LOOP
final(*model.parameters(), count=len(losses))
"""


REFUSED = "(place in the loop): a loop that `ufunc` runs in C: use a `for` loop"
# The first item is that of a call in Python.
LATER = "not restorable from step 2 on: vectorize._vectorize_call:"


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        ("np.frompyfunc(train, 1, 1)(np.arange(12))", REFUSED),
        ("np.vectorize(train, otypes=[float])(np.arange(12))", REFUSED),
        ("np.vectorize(train)(np.arange(12))", LATER),
    ],
)
def test_they_are_refused_before_the_kill(jobs: Runner, loop: str, named: str) -> None:
    said = jobs.run(SCRIPT.replace("LOOP", loop))
    assert named in said and REFUSED in said, said
