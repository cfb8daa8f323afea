# ranks: 2; kills: 2 6 11
# An IterableDataset split by rank, with its own random order in each epoch and a last batch that is
# dropped.
import random

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, size, rank, world):
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        for i in order[self.rank :: self.world]:
            yield i, torch.full((3,), i / 10.0).cos()


def train(model, optimizer, stream, rank):
    step = 0
    for stream.epoch in range(3):
        for ids, x in DataLoader(stream, batch_size=3, drop_last=True):
            optimizer.zero_grad()
            loss = (model(x).mean() - 1).square()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"r{rank} {stream.epoch} {step} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
    return step


if __name__ == "__main__":
    dist.init_process_group(backend="reft")
    torch.manual_seed(90)
    net = DDP(nn.Linear(3, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01)
    steps = train(net, sgd, Stream(26, dist.get_rank(), 2), dist.get_rank())
    print(f"r{dist.get_rank()} final {steps} {digest(net, sgd)}", flush=True)
    dist.destroy_process_group()
