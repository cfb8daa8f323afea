# ranks: 1; kills: 2 4 7
# LBFGS with a closure that is called several times a step.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("reft")
torch.manual_seed(80)
model = DDP(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, history_size=5)
calls = 0
for step in range(8):
    x = torch.randn(16, 2)
    y = x.prod(1, keepdim=True)

    def closure(x=x, y=y):
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print(f"r0 {step} loss {loss.item().hex()} calls {calls} ids {x[0, 0].item().hex()}", flush=True)
print(f"r0 final {step} {calls} {digest(model, optimizer)}", flush=True)
dist.destroy_process_group()
