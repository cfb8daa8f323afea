# ranks: 1; kills: 2 7 10
# A warm-up loop and the main loop: the optimizer is stepped at two places of the script. Each line
# ends with a hash.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("reft")
torch.manual_seed(29)
model = DDP(nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.randn(4, 3)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"r0 warm-up {step} loss {loss.item().hex()} {digest(model, optimizer)}", flush=True)
for step in range(8):
    loss = model(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"r0 {step} loss {loss.item().hex()} {digest(model, optimizer)}", flush=True)
print(f"r0 final {digest(model, optimizer)}", flush=True)
dist.destroy_process_group()
