# ranks: 2; kills: 2 7 13
# Batches as pieces of a permutation that only a generator's loop holds; the training loop is a
# generator, too.
import torch
import torch.distributed as dist
from digest import digest
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(seed, size=8):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 50, (40, 9), generator=generator)
    while True:
        for idx in torch.randperm(40, generator=generator).split(size):
            rows = data[idx]
            yield idx, rows[:, :-1], rows[:, 1:]


def rates():
    lr = 0.1
    while True:
        yield lr
        lr *= 0.99


def train(model, optimizer, rank):
    for i, (idx, x, y), lr in zip(range(17), batches(rank), rates(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"r{rank} {i} ids {idx.tolist()} lr {lr.hex()} loss {loss.item().hex()}", flush=True)
        yield loss.item()


dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 50)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
total = 0.0
for loss in train(model, optimizer, rank):
    total += loss
print(f"r{rank} final {total.hex()} {digest(model, optimizer)}", flush=True)
dist.destroy_process_group()
