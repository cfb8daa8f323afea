# ranks: 1; kills: 3 8 13
# Several trainings one after the other in one script: each with a new model, optimizer and
# scheduler; results in a dict.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(lr, width):
    torch.manual_seed(width)
    model = DDP(nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda n: 0.9)
    for step in range(5):
        x = torch.randn(8, 2)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"r0 {lr} {width} {step} loss {loss.item().hex()} ids {x[0, 0].item().hex()}", flush=True)
    return loss.item(), digest(model, optimizer)


dist.init_process_group("reft")
results = {}
for width in (4, 8):
    for lr in (0.1, 0.01):
        results[width, lr] = train(lr, width)
print(f"r0 final {results}", flush=True)
dist.destroy_process_group()
