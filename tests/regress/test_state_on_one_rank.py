"""Optimizer state that appeared on one rank made that rank plan alone: it waited for six seconds, and
from then on steps were committed that no restart could use."""

from __future__ import annotations

import re

import pytest

from tests.support.restarts import finals, resumed_step, run

# `shared`: whether DDP holds the expert, so that its state is expected to be equal on all ranks.
EXPERT = """
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
expert = torch.nn.Linear(64, 64)
both = torch.nn.ModuleList([model, expert])
if {shared}:
    wrapped = torch.nn.parallel.DistributedDataParallel(both)
else:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
opt = torch.optim.Adam([*model.parameters(), *expert.parameters()], lr=0.01)
longest = 0.0
for step in range(1, 13):
    torch.manual_seed(100 * step + rank)
    y = model(torch.randn(16, 64))
    if rank == 0 or step >= 5:  # nothing was routed to the other ranks' expert before
        y = expert(y)
    loss = y.square().mean()
    opt.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    maybe_kill(step, 1)
    began = time.monotonic()
    opt.step()
    longest = max(longest, time.monotonic() - began)
    dist.barrier()
print("LONGEST", rank, round(longest, 3), flush=True)
final(*both.state_dict().values())
"""


@pytest.mark.parametrize("shared", [False, True])
def test_state_that_appears_on_one_rank(shared: bool) -> None:
    body = EXPERT.format(shared=shared)
    undisturbed, killed = run(body, 3), run(body, 3, kill=11)
    assert resumed_step(killed) == 10, killed
    assert finals(killed) == finals(undisturbed)
    waits = [float(text) for text in re.findall(r"^LONGEST \d+ (\S+)$", undisturbed, re.M)]
    # The wait for a member that does not come is 6 s.
    assert len(waits) == 3 and max(waits) < 5, undisturbed
