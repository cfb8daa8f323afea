# ranks: 2; kills: 2 6 10
# Data from generator functions: files of lines, a shuffle buffer, batches; and `for … in
# enumerate(generator)`.
import random

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def lines(rank, world):
    for shard in range(rank, 6, world):
        for number in range(8):
            yield shard * 100 + number


def shuffled(source, size, dice):
    buffer = []
    for item in source:
        buffer.append(item)
        if len(buffer) == size:
            yield buffer.pop(dice.randrange(size))
    dice.shuffle(buffer)
    yield from buffer


def batched(source, size):
    batch = []
    for item in source:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def main():
    dist.init_process_group("reft")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    dice = random.Random(rank)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 4),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 9]),
        ]
    )
    total = 0
    for n, ids in enumerate(batched(shuffled(lines(rank, world), 5, dice), 2)):
        x = torch.tensor(ids, dtype=torch.float32).unsqueeze(1) / 600
        loss = (model(x) - x.cos()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += sum(ids)
        print(f"r{rank} {n} loss {loss.item().hex()} ids {ids} lr {scheduler.get_last_lr()}", flush=True)
    print(f"r{rank} final {n} {total} {dice.random().hex()} {digest(model, optimizer, scheduler)}", flush=True)
    dist.destroy_process_group()


main()
