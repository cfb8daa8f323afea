# ranks: 2; kills: 2 6 9
# Names and attributes that mean another function, builtin or bound method from some epoch on; with
# blocks around the step.
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def warm_up(step):
    return 0.01 * (step + 1)


def steady(step):
    return 0.05


class Trainer:
    def __init__(self, model):
        self.model, self.act, self.transform, self.entered = model, torch.relu, self.keep, []

    def keep(self, x):
        return x

    def flip(self, x):
        return -x

    @contextlib.contextmanager
    def timed(self, name):
        self.entered.append(f"+{name}")
        yield
        self.entered.append(f"-{name}")


dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(5)
trainer = Trainer(DDP(nn.Linear(3, 2)))
optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
loss_of, rate_of = F.mse_loss, warm_up
torch.manual_seed(10 + rank)
for epoch in range(3):
    if epoch == 1:
        loss_of, rate_of = F.l1_loss, steady
        trainer.act, trainer.transform = torch.tanh, trainer.flip
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.entered.append, f"epoch {epoch} over")
        for step in range(4):
            optimizer.param_groups[0]["lr"] = rate_of(step)
            with torch.random.fork_rng(), trainer.timed(f"{epoch}.{step}"):
                torch.manual_seed(100 * epoch + step)
                x = trainer.transform(torch.randn(4, 3))
                loss = loss_of(trainer.act(trainer.model(x)), torch.ones(4, 2))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"r{rank} {epoch} {step} loss {loss.item().hex()} noise {torch.rand(1).item().hex()}", flush=True)
    print(f"r{rank} end of {epoch} {trainer.entered}", flush=True)
print(f"r{rank} final {rate_of.__name__} {digest(trainer.model, optimizer)}", flush=True)
dist.destroy_process_group()
