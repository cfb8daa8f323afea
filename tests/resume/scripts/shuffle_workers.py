# ranks: 1; kills: 3 6 11
# shuffle=True with two workers that are started anew each epoch; the workers draw noise from their
# own seeds.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return i, torch.randn(4) + i / 10


dist.init_process_group("reft")
torch.manual_seed(13)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=3)
history = []
for epoch in range(3):
    for i, (ids, x) in enumerate(loader):
        loss = (model(x) - ids.unsqueeze(1) / 20).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        print(f"r0 {epoch} {i} loss {history[-1].hex()} ids {ids.tolist()} noise {x.sum().item().hex()}", flush=True)
print(f"r0 final {[v.hex() for v in history]} {digest(model, optimizer)}", flush=True)
dist.destroy_process_group()
