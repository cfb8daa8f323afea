"""The copy thread read memory that the script had freed or moved meanwhile, and the process died of SIGSEGV."""

from __future__ import annotations

import re

import pytest

from tests.support.killed import Runner, finals

# Each way to take the memory of a storage away while it is copied. 16 MB are unmapped when they are
# freed, and take longer to copy than the script takes to free them.
SCRIPT = """
import torch.multiprocessing as mp

WAY = "@WAY@"
size = 2048
linears = [torch.nn.Linear(size, size, bias=False) for _ in range(3)]
model = torch.nn.Sequential(*linears, torch.nn.Linear(size, 1))
frozen = torch.nn.Linear(size, size, bias=False).requires_grad_(False)
model.frozen = frozen
kept = frozen.weight.clone()
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
queue = mp.get_context("spawn").Queue() if WAY == "queue" else None
for step in range(1, 9):
    loss = model[:4](torch.randn(2, size)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if WAY == "share" and step == 3:
        for linear in linears:
            linear.weight.share_memory_()
    elif WAY == "queue" and step == 3:
        queue.put(model.state_dict())
        sent = queue.get()
        assert sent["0.weight"].shape == (size, size)
    elif WAY == "freed" and step in (3, 5):
        storage = frozen.weight.untyped_storage()
        storage.resize_(0)
        if step == 5:
            storage.resize_(size * size * 4)
            frozen.weight.copy_(kept)
    elif WAY == "larger" and step == 3:
        with torch.no_grad():
            linears[0].weight.data.resize_(3 * size, size)
            linears[0].weight.data = linears[0].weight.data[:size]
final(*(linear.weight for linear in linears))
"""


@pytest.mark.parametrize("way", ["share", "queue", "freed", "larger"])
def test_training_goes_on_as_without_reft(jobs: Runner, way: str) -> None:
    script = SCRIPT.replace("@WAY@", way)
    ours = jobs.run(script, REFT_SNAPSHOT_POLICY="eager")
    plain = jobs.run(script, REFT_DISABLE="1")
    assert finals(ours) == finals(plain) and len(finals(ours)) == 1, ours[-4000:]
    assert not re.search(r"error in|continues without snapshots", ours), ours[-4000:]
