"""Steps whose replicas differed were committed, and no restart could use them."""

from __future__ import annotations

from tests.support.restarts import finals, resumed_step, run

LOCAL_SGD = """
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 15):
    torch.manual_seed(100 * step + rank)
    x = torch.randn(16, 64)
    # every rank steps by itself, and they average every 4th step
    with (contextlib.nullcontext() if step <= 2 else model.no_sync()):
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
    if step > 2 and step % 4 == 0:
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p)
                p.div_(2)
    maybe_kill(step, 1)
    opt.step()
    dist.barrier()
final(*model.state_dict().values())
"""

# DDP ignores them, their gradients are each rank's own, and the warm-up begins with a rate of 0: at
# the first step they are equal.
IGNORED = """
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
DDP = torch.nn.parallel.DistributedDataParallel
DDP._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
model = DDP(net)
opt = torch.optim.AdamW(net.parameters(), 0.02)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, n / 4))
for step in range(1, 15):
    torch.manual_seed(100 * step + rank)
    loss = model(torch.randn(6, 4) + rank).square().mean()
    opt.zero_grad()
    loss.backward()
    maybe_kill(step, 1)
    opt.step()
    sched.step()
    dist.barrier()
final(*net.state_dict().values())
"""


def check(body: str) -> None:
    undisturbed, killed = run(body, 2), run(body, 2, kill=11)
    for said in (undisturbed, killed):
        assert " was not committed: " in said, said
        assert "not equal on ranks 0 1 (first: m0." in said, said
    assert resumed_step(killed) == 10, killed
    assert finals(killed) == finals(undisturbed)


def test_ranks_that_average_now_and_then() -> None:
    check(LOCAL_SGD)


def test_parameters_that_ddp_ignores() -> None:
    check(IGNORED)


CORRUPTED = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 12):
    loss = model(torch.randn(16, 64)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 5 and dist.get_rank() == 1:
        with torch.no_grad():
            model.module.weight.view(torch.int32).bitwise_xor_(1 << 12)
    dist.barrier()
"""


def test_memory_that_one_rank_of_three_corrupts() -> None:
    said = run(CORRUPTED, 3)
    assert "1 replicated tensor not equal on ranks 0-2 (first: m0.module.weight)" in said, said
    assert "Rank 1 has other bytes than the rest: " in said, said
