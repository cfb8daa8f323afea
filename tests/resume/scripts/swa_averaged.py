# ranks: 2; kills: 3 7 10
# swa_utils: AveragedModel with a start epoch, SWALR after CosineAnnealingLR, BatchNorm statistics.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(31)
data = TensorDataset(torch.arange(18), torch.randn(18, 4), torch.randn(18, 1))
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, 3, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)))
swa_model = AveragedModel(model.module, use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, nesterov=True)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
swa = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for ids, x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.huber_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"r{rank} {epoch} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
    if epoch >= 2:
        swa_model.update_parameters(model.module)
        swa.step()
    else:
        cosine.step()
    print(
        f"r{rank} end of {epoch} lr {optimizer.param_groups[0]['lr']} averaged {swa_model.n_averaged.item()}",
        flush=True,
    )
print(f"r{rank} final {digest(model, optimizer, cosine, swa)} {digest(swa_model)}", flush=True)
dist.destroy_process_group()
