# ranks: 2; kills: 4 8 12
# Loaders whose one iterator lasts for the whole training, over a sampler that is repeated (timm's
# MultiEpochsDataLoader, YOLO's InfiniteDataLoader), with workers and without; a collate object that
# counts and draws.
import numpy as np
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Rows(Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, i):
        return i, torch.randn(4, generator=torch.Generator().manual_seed(i))


class Mask:
    def __init__(self, seed):
        self.random, self.calls = np.random.RandomState(seed), 0

    def __call__(self, items):
        self.calls += 1
        ids, x = zip(*items, strict=True)
        x = torch.stack(x)
        return list(ids), x.masked_fill(torch.from_numpy(self.random.rand(*x.shape) < 0.3), 0), self.calls


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = Rows()
    samplers = [DistributedSampler(data, seed=seed) for seed in (0, 1)]
    here = MultiEpochsLoader(data, 4, sampler=samplers[0], collate_fn=Mask(rank))
    there = MultiEpochsLoader(data, 4, sampler=samplers[1], num_workers=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for (ids, x, calls), (others, y) in zip(here, there, strict=True):
            loss = (model(x).square() + model(y).square()).mean() if len(x) == len(y) else model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"r{rank} {epoch} {loss.item().hex()} {ids} {others.tolist()} {calls}", flush=True)
    print(f"r{rank} final {digest(model)}", flush=True)
    dist.destroy_process_group()


main()
