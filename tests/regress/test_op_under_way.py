"""A weight that an op was still writing when the optimizer step returned was sealed half written."""

from __future__ import annotations

from tests.support.restarts import finals, resumed_step, run

# An optimizer whose shards are gathered while the next iteration begins. The gather cannot end while
# reft captures the step: rank 1 takes part in it only when rank 0 is past its step.
GATHER = """
N = 1 << 16
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()

class Sharded(torch.optim.Optimizer):
    def __init__(self, p, lr):
        super().__init__([p], dict(lr=lr))
        self.p, self.work = p, None
        n = p.numel() // dist.get_world_size()
        self.mine = slice(rank * n, (rank + 1) * n)

    @torch.no_grad()
    def step(self, closure=None):
        shard = self.p.detach()[self.mine].clone() - 0.1 * self.p.grad[self.mine]
        if rank == 1 and step in LATE:
            store.wait([f"past/{step}"])
        self.work = dist.all_gather_into_tensor(self.p.data, shard, async_op=True)
        if step not in LATE:
            self.sync()

    def sync(self):
        if self.work is not None:
            self.work.wait()
            self.work = None

torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(N))
opt = Sharded(p, 0.1)
for step in range(1, 13):
    opt.sync()
    torch.manual_seed(step)
    p.grad = None
    ((p * p).mean() * N * torch.rand(()) * 0.1).backward()
    dist.all_reduce(p.grad)
    p.grad.div_(2)
    maybe_kill(step, 1)
    opt.step()
    if rank == 0 and step in LATE:
        store.set(f"past/{step}", "")
opt.sync()
if rank == 0:
    import reft
    status = reft.status()
    print("TAKEN", status["captured"], "SKIPPED", status["skipped"], flush=True)
final(p)
"""


def test_a_gather_under_way_at_some_steps() -> None:
    body = GATHER.replace("LATE", "(3, 4, 7)")
    undisturbed, killed = run(body, 2), run(body, 2, kill=8)
    assert "TAKEN 9 SKIPPED 3" in undisturbed, undisturbed
    assert "all_gather_into_tensor still writes o0.p0 when the optimizer step returns" in undisturbed
    assert "NOT protected" not in undisturbed
    assert resumed_step(killed) == 6, killed
    assert finals(killed) == finals(undisturbed)


def test_a_gather_under_way_at_every_step_is_reported() -> None:
    said = run(GATHER.replace("LATE", "range(1, 100)"), 2)
    assert "TAKEN 0 SKIPPED 12" in said, said
    assert "training is NOT protected: no snapshot of the last 8 steps" in said, said


# Statistics that are reduced across the optimizer step. Rank 1 takes part when rank 0 is past it.
STATISTICS = """
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(8))
opt = torch.optim.SGD([p], 0.1)
mean = torch.zeros(4)
for step in range(1, 13):
    torch.manual_seed(step)
    (p * torch.rand(8)).square().sum().backward()
    if rank == 1:
        store.wait([f"past/{step}"])
    pending = torch.full((4,), float(step + rank))
    work = dist.all_reduce(pending, async_op=True)
    if rank == 1:
        work.wait()
    opt.step()
    opt.zero_grad()
    if rank == 0:
        store.set(f"past/{step}", "")
    work.wait()
    mean = 0.9 * mean + 0.1 * pending
final(p, mean)
"""


def test_a_variable_that_is_reduced_across_a_step_is_named() -> None:
    said = run(STATISTICS, 2)
    assert "pending (torch.Tensor): all_reduce still writes it when the optimizer step returns" in said, said
