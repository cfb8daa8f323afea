# ranks: 1; kills: 3 7 12
# One loader iterated without end by a helper, validation every five steps inside the loop,
# PolynomialLR, weight decay groups.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def forever(loader):
    while True:
        yield from loader


def accuracy(model, loader):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for _, x, y in loader)
    model.train()
    return hits


dist.init_process_group("reft")
torch.manual_seed(55)
train = TensorDataset(torch.arange(22), torch.randn(22, 4), torch.randint(3, (22,)))
valid = TensorDataset(torch.arange(9), torch.randn(9, 4), torch.randint(3, (9,)))
train_loader = DataLoader(train, 4, sampler=RandomSampler(train, replacement=True, num_samples=22))
valid_loader = DataLoader(valid, 4, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)))
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=14, power=2.0)
hits = []
for step, (ids, x, y) in zip(range(14), forever(train_loader), strict=False):
    loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"r0 {step} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
    if (step + 1) % 5 == 0:
        hits.append(accuracy(model.module, valid_loader))
        print(f"r0 {step} hits {hits} order {torch.rand(1).item().hex()}", flush=True)
print(f"r0 final {step} {hits} {digest(model, optimizer, scheduler)}", flush=True)
dist.destroy_process_group()
