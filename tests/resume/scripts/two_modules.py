# ranks: 2; kills: 2 6 9
# Model parallel within a rank: an encoder and a head as two modules with one optimizer and
# parameter groups of their own.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(23)
encoder = DDP(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU()))
head = DDP(nn.Linear(7, 2))
optimizer = torch.optim.AdamW([{"params": encoder.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 1e-2}])
scheduler = torch.optim.lr_scheduler.CyclicLR(
    optimizer, [1e-4, 1e-3], [1e-2, 5e-2], step_size_up=3, cycle_momentum=False
)
data = TensorDataset(torch.arange(20), torch.randn(20, 5), torch.randint(2, (20,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
confusion = torch.zeros(2, 2, dtype=torch.int64)
right = 0
epoch = 0
while epoch < 2:
    sampler.set_epoch(epoch)
    batches = iter(loader)
    while True:
        try:
            ids, x, y = next(batches)
        except StopIteration:
            break
        logits = head(encoder(x))
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        for expected, found in zip(y, logits.argmax(1), strict=False):
            confusion[expected, found] += 1
        right += (logits.argmax(1) == y).sum().item()
        print(f"r{rank} {epoch} loss {loss.item().hex()} ids {ids.tolist()} right {right}", flush=True)
    epoch += 1
print(f"r{rank} final {confusion.tolist()} {right} {digest(encoder, head, optimizer, scheduler)}", flush=True)
dist.destroy_process_group()
