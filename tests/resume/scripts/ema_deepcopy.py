# ranks: 2; kills: 2 6 11
# A copy of the model that follows by an exponential average, updated after each step and evaluated
# now and then.
import copy

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def update(ema, model, decay):
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), model.parameters(), strict=False):
            slow.lerp_(fast, 1 - decay)


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(30)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(40 + rank)
    probe = torch.linspace(-1, 1, 12).reshape(4, 3)
    scores = {}
    for step in range(1, 13):
        x = torch.randn(5, 3, generator=generator)
        loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(ema, net, decay=min(0.9, step / (step + 3)))
        print(f"r{rank} {step} loss {loss.item().hex()} first {x[0, 0].item().hex()}", flush=True)
        if step % 4 == 0:
            scores[step] = ema(probe).sum().item()
            print(f"r{rank} {step} average says {scores[step].hex()}", flush=True)
    print(f"r{rank} final {scores} {digest(model, optimizer)} average {digest(ema)}", flush=True)
    dist.destroy_process_group()


main()
