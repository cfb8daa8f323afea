# ranks: 1; kills: 2 5 10
# WeightedRandomSampler with a generator of its own, zip of two loaders, ExponentialLR.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

dist.init_process_group("reft")
torch.manual_seed(8)
labelled = TensorDataset(torch.arange(15), torch.randn(15, 3))
plain = TensorDataset(torch.arange(100, 130), torch.randn(30, 3))
own = torch.Generator().manual_seed(77)
first = DataLoader(labelled, 3, sampler=WeightedRandomSampler(torch.arange(1.0, 16.0), 15, generator=own))
second = DataLoader(plain, 4, sampler=SubsetRandomSampler(range(5, 25)))
model = DDP(nn.Linear(3, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
average = None
for epoch in range(3):
    for n, ((ids, x), (more, z)) in enumerate(zip(first, second, strict=False)):
        loss = (model(x).mean() - model(z).mean()).square() + model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        print(f"r0 {epoch} {n} loss {loss.item().hex()} ids {ids.tolist()} {more.tolist()} {average.hex()}", flush=True)
    scheduler.step()
print(f"r0 final {average.hex()} {own.get_state().sum().item()} {digest(model, optimizer, scheduler)}", flush=True)
dist.destroy_process_group()
