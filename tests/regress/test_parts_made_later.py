"""A DTensor that a script makes after the first step (the best weights so far, of FSDP2), where its
variable held None at first: it was named as not restored, and each restart then failed."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
model = torch.nn.Linear(5, 3)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
best, whole, leaf = None, None, None
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 5), 0.1 * k + dist.get_rank())).square().mean().backward()
    opt.step()
    if k % 4 == 2:
        best = [p.detach().clone() for p in model.parameters()]
        whole = {"w": model.weight.detach().redistribute(placements=[Replicate()])}
        leaf = best[0].clone().requires_grad_()
    if k >= 7:
        best[0].mul_(0.5)
final(*(p.full_tensor() for p in (*model.parameters(), *best, leaf)), whole["w"].to_local(),
      grad=leaf.requires_grad, placed=[str(t.placements) for t in (*best, whole["w"])])
"""


def test_they_come_back(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 2, "1:8:before_seal")
    assert "not restor" not in said, said[-3000:]
