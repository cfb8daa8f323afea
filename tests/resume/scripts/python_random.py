# ranks: 1; kills: 2 6 11
# A random.Random, a numpy Generator and a torch.Generator of the script's own; islice, cycle, count
# and reversed.
import itertools
import random

import numpy
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(items, dice):
    while True:
        order = list(items)
        dice.shuffle(order)
        for begin in range(0, len(order) - 2, 3):
            yield order[begin : begin + 3]


def main():
    dist.init_process_group("reft")
    dice, noise, own = random.Random(1), numpy.random.default_rng(2), torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    model = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.05)
    source = batches(range(10), dice)
    flips = itertools.cycle([1.0, -1.0, 0.5])
    numbers = itertools.count(100, 5)
    for outer in reversed(range(3)):
        for ids in itertools.islice(source, 4):
            x = torch.tensor([[i, noise.random()] for i in ids], dtype=torch.float32) / 10 * next(flips)
            x = x + torch.rand(x.shape, generator=own)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"r0 {outer} {next(numbers)} loss {loss.item().hex()} ids {ids} {dice.random().hex()}", flush=True)
    print(f"r0 final {dice.random().hex()} {noise.random().hex()} {next(numbers)} {next(flips)}", flush=True)
    print(f"r0 final {torch.rand(1, generator=own).item().hex()} {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
