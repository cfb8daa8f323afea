# ranks: 2; kills: 6 7 9
# Evaluation inside the loop that moves the random state; weights clipped after the step; a frozen
# part; global counters.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEP = 0
LOG = []


def evaluate(model):
    model.eval()
    with torch.no_grad():
        value = model(torch.randn(4, 3)).mean().item()
    model.train()
    return value


def train_one(model, optimizer):
    global STEP
    x = torch.randn(6, 3)
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)
    STEP += 1
    LOG.append(loss.item())
    return loss.item(), x[0, 0].item()


def main(steps):
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    model[1].requires_grad_(False)
    model = DDP(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    torch.manual_seed(34 + rank)
    while steps > STEP:
        loss, first = train_one(model, optimizer)
        print(f"r{rank} {STEP} loss {loss.hex()} ids {first.hex()}", flush=True)
        if STEP % 3 == 0:
            print(f"r{rank} {STEP} evaluation {evaluate(model.module).hex()}", flush=True)
    print(f"r{rank} final {STEP} {[v.hex() for v in LOG]} {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main(10)
