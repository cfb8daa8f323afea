# ranks: 2; kills: 4 8 12
# An iterable dataset that fills batches by kind in an attribute (detectron2's
# AspectRatioGroupedDataset): what is not full yet outlives the epoch, and a suspended generator
# means one of the lists.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Grouped(IterableDataset):
    def __init__(self, rows, size):
        self.rows, self.size = rows, size
        self.buckets = [[] for _ in range(2)]

    def __iter__(self):
        for i, row in enumerate(self.rows):
            bucket = self.buckets[int(row[0] > 0)]
            bucket.append((i, row))
            if len(bucket) == self.size:
                yield [i for i, _ in bucket], torch.stack([row for _, row in bucket])
                del bucket[:]


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(0)
    loader = DataLoader(Grouped(torch.randn(22, 4), 3), batch_size=None)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for ids, x in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            waiting = [[i for i, _ in bucket] for bucket in loader.dataset.buckets]
            print(f"r{rank} {epoch} {loss.item().hex()} {ids} {waiting}", flush=True)
    print(f"r{rank} final {digest(model)}", flush=True)
    dist.destroy_process_group()


main()
