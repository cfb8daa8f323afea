# ranks: 2; kills: 2 5 7
# A rotary cache that is registered again when longer sequences come, under a curriculum of lengths;
# the last outputs are kept as a part of what was larger.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("steps", 0.1 / torch.arange(1, width + 1))
        self.longest = 0
        self.grow(4)

    def grow(self, length):
        self.longest = length
        self.register_buffer("cached", torch.outer(torch.arange(length), self.steps).cos())

    def forward(self, x):
        if x.shape[1] > self.longest:
            self.grow(x.shape[1])
        return x * self.cached[: x.shape[1]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.inner = Rotary(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(self.rotary(x))


def main():
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    torch.manual_seed(50)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(60 + rank)
    memory = torch.zeros(2, 3, 6)
    for step in range(9):
        x = torch.randn(2, 4 + step // 2, 6)
        out = model(x)
        loss = (out - x.roll(1, 1)).square().mean() + memory.sum() * out.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory = out.detach()[:, -3:]
        shape = tuple(model.module.rotary.cached.shape)
        print(f"r{rank} {step} loss {loss.item().hex()} {shape}", flush=True)
    print(f"r{rank} final {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
