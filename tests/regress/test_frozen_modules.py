"""Modules that `gc.freeze` hides were not found: no buffers, no replicas."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import gc
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
gc.collect()
gc.freeze()
for step in range(1, 4):
    loss = model(torch.randn(16, 64)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values())
"""


def test_replicas_are_found_behind_gc_freeze(jobs: Runner) -> None:
    assert "2 tensors (2 shared with replicas)" in jobs.run(SCRIPT, ranks=2)
