# ranks: 2; kills: 2 8 14
# Everything at module level, nested epochs, DistributedSampler with set_epoch, StepLR, a last batch
# that is smaller.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(backend="reft")
rank = dist.get_rank()
torch.manual_seed(1)
data = TensorDataset(torch.arange(26), torch.randn(26, 6), torch.randn(26, 1))
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=3, sampler=sampler)
step = 0
total = 0.0
seen = {}
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (ids, x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        total += loss.item()
        seen.setdefault(epoch, []).extend(ids.tolist())
        print(f"r{rank} epoch {epoch} batch {i} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
    scheduler.step()
    print(f"r{rank} end of epoch {epoch} lr {scheduler.get_last_lr()}", flush=True)
print(f"r{rank} final step {step} total {total.hex()} epoch {epoch} i {i} seen {seen}", flush=True)
print(f"r{rank} final {digest(model, optimizer, scheduler)}", flush=True)
dist.destroy_process_group()
