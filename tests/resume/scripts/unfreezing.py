# ranks: 2; kills: 2 6 8
# A backbone that begins to train in mid-run: it is in the optimizer from the beginning and has no
# gradients before.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(13)
backbone, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
model = DDP(nn.Sequential(backbone, head), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(40 + rank)
frozen_until = 4
for step in range(10):
    x = torch.randn(6, 4)
    with torch.set_grad_enabled(step >= frozen_until):
        features = backbone(x)
    # Through DDP from the moment on at which all of it trains.
    loss = (model(x) if step >= frozen_until else head(features)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step < frozen_until:
        for parameter in head.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    print(f"r{rank} step {step} loss {loss.item().hex()}", flush=True)
print(f"r{rank} final {digest(model, optimizer)}", flush=True)
dist.destroy_process_group()
