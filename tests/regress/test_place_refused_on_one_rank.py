"""A place in the loop that one rank could not restore was refused on that rank alone: it began its
loop again while the others went on, and each trained against another's iterations."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.killed import Runner
from tests.support.launchers import Forkrun

LATE = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)

def main():
    for step in range(1, 9):
        opt.zero_grad()
        model(torch.ones(2, 4) * step).square().mean().backward()
        opt.step()
        print("STEP", attempt, dist.get_rank(), step, flush=True)
        if step > 2 and dist.get_rank() == 1:
            note(step)
        if step == 2 and dist.get_rank() == 1:
            said = []
            note = (lambda kept: lambda k: kept.append(k))(said)

main()
final(*model.parameters())
"""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    launcher = Forkrun()
    yield Runner(launcher)
    launcher.close()


@pytest.mark.timeout(120)
def test_all_ranks_restore_the_place_or_none(runner: Runner) -> None:
    said = runner.run(LATE, ranks=2, kill="0:5:after_commit")
    refused = re.findall(r"reft: (rank.*): place in the loop not restored \((.*?)\)", said)
    why = "main:note did not exist yet and cannot be restored: function made after the first step"
    assert refused == [("rank 1", why)], said[-4000:]
    steps = re.findall(r"^STEP 1 (\d) (\d)$", said, re.MULTILINE)
    every = [str(step) for step in range(1, 9)]
    for rank in "01":
        assert [step for r, step in steps if r == rank] == every, said[-4000:]
