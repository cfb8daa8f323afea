# ranks: 2; kills: 2 6 9
# Gradients that the script reads after the optimizer step: a norm that it logs by a function, and
# the gradient of a tensor that no optimizer has, with which it takes a step of its own.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Fading:
    def __init__(self):
        self.calls = 0

    def __call__(self, gradient):
        self.calls += 1
        return gradient / self.calls


def norm_of(model):
    return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = torch.ones(4, requires_grad=True)
    scale.register_hook(Fading())
    lowest = None
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4) * scale).square().mean()
        loss.backward()
        optimizer.step()
        norm = norm_of(model).item()
        lowest = norm if lowest is None else min(norm, lowest)
        with torch.no_grad():
            scale -= 0.1 * scale.grad
        scale.grad = None
        print(f"r{rank} {step} {loss.item().hex()} {norm.hex()} {scale.tolist()}", flush=True)
    print(f"r{rank} final {lowest.hex()} {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
