# ranks: 2; kills: 2 6 10
# torchdata's StatefulDataLoader over a shuffled dataset.

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.resume.scripts.digest import digest


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(12)
    data = TensorDataset(torch.arange(24), torch.randn(24, 3))
    sampler = DistributedSampler(data)
    loader = StatefulDataLoader(data, batch_size=3, sampler=sampler)
    model = DDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids, x in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"r{rank} {epoch} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
    print(f"r{rank} final {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
