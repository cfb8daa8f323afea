# ranks: 2; kills: 2 7 13
# A custom batch sampler with its own random.Random, two worker processes that are kept over epochs,
# LambdaLR.
import random

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Buckets(Sampler):
    def __init__(self, size, batch, rank):
        self.size, self.batch, self.rng = size, batch, random.Random(9 + rank)

    def __iter__(self):
        order = list(range(self.size))
        self.rng.shuffle(order)
        for begin in range(0, self.size, self.batch):
            yield order[begin : begin + self.batch]

    def __len__(self):
        return -(-self.size // self.batch)


def main():
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    torch.manual_seed(2)
    data = TensorDataset(torch.arange(17), torch.randn(17, 3))
    loader = DataLoader(data, batch_sampler=Buckets(17, 4, rank), num_workers=2, persistent_workers=True)
    model = DDP(nn.Linear(3, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    count = 0
    for epoch in range(3):
        for ids, x in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += len(ids)
            print(f"r{rank} {epoch} {count} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
        scheduler.step()
    print(f"r{rank} final {count} {scheduler.get_last_lr()} {digest(model, optimizer, scheduler)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
