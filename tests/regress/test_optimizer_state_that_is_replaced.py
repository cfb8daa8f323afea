"""An optimizer's state was cleared, or loaded again, during the run: snapshots went on saving the
tensors of the dicts before, and a resume put those back without a word."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
import copy
from collections import defaultdict

model = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
first = copy.deepcopy(opt.state_dict())
kept = None
for step in range(1, 13):
    loss = (model(torch.randn(16, 8)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step in (2, 4):
        CHANGE
final(*model.state_dict().values())
"""

CHANGES = {
    "clear": "opt.state.clear()",
    "another dict": "opt.state = defaultdict(dict)",
    "load_state_dict": "opt.load_state_dict(first)",
    "its own state": "opt.load_state_dict(copy.deepcopy(opt.state_dict()))",
    "new items": "opt.state = defaultdict(dict, {p: dict(s) for p, s in opt.state.items()})",
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_it_keeps_then_comes_back(jobs: Runner, name: str) -> None:
    jobs.same(SCRIPT.replace("CHANGE", CHANGES[name]))
