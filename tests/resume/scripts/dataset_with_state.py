# ranks: 1; kills: 2 5 9
# A dataset that keeps a cache, a count and a log of what was read: nothing is read twice, but for
# the discarded batch.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self, size):
        self.size, self.reads, self.cache, self.log = size, 0, {}, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.reads += 1
        if i not in self.cache:
            self.cache[i] = torch.full((2,), i / self.size)
            self.log.append(i)
        return i, self.cache[i]


def main():
    dist.init_process_group("reft")
    torch.manual_seed(19)
    dataset = Cached(14)
    loader = DataLoader(dataset, batch_size=3, shuffle=True)
    model = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        for ids, x in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            print(
                f"r0 {epoch} loss {loss.item().hex()} ids {ids.tolist()} read {dataset.reads} {dataset.log}", flush=True
            )
    print(f"r0 final {dataset.reads} {sorted(dataset.cache)} {torch.stack(losses).sum().item().hex()}", flush=True)
    print(f"r0 final {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
