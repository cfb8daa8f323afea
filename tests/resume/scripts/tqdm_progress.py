# ranks: 2; kills: 2 6 9
# tqdm around the epochs and around the loader, with a running average in the bar.
import sys

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(6)
    data = TensorDataset(torch.arange(24), torch.randn(24, 3), torch.randn(24, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in tqdm(range(3), desc="epochs", disable=rank != 0, file=sys.stderr):
        sampler.set_epoch(epoch)
        bar = tqdm(loader, desc=f"epoch {epoch}", leave=False, disable=rank != 0, file=sys.stderr)
        running = 0.0
        for n, (ids, x, y) in enumerate(bar):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            running += (loss.item() - running) / (n + 1)
            bar.set_postfix(loss=running)
            print(f"\nr{rank} {epoch} {n} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
        print(f"\nr{rank} end of {epoch} running {running.hex()} at {bar.n}", flush=True)
    print(f"\nr{rank} final {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
