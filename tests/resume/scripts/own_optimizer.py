# ranks: 2; kills: 2 5 9
# An optimizer class that counts for itself and calls its base's step; two loaders that draw from
# one generator.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Clipped(torch.optim.SGD):
    """Clips by the running mean of the norms, and warms up."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.count, self.norms, self.highest = 0, [], lr

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        limit = sum(self.norms) / len(self.norms) if self.norms else 1.0
        self.norms.append(nn.utils.clip_grad_norm_(parameters, limit).item())
        self.count += 1
        self.param_groups[0]["lr"] = self.highest * min(1.0, self.count / 5)
        return super().step(closure)


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(nn.Linear(3, 1))
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on the base's step is hooked, too
    optimizer = Clipped(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(30 + rank)
    data = TensorDataset(torch.arange(18), torch.randn(18, 3))
    labelled = DataLoader(data, 3, shuffle=True, generator=generator)
    unlabelled = DataLoader(data, 4, shuffle=True, generator=generator)
    for epoch in range(2):
        for (ids, x), (others, y) in zip(labelled, unlabelled, strict=False):
            loss = model(torch.cat([x, y])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(
                f"r{rank} {epoch} {optimizer.count} loss {loss.item().hex()} ids {ids.tolist()} {others.tolist()}",
                flush=True,
            )
    print(f"r{rank} final {[norm.hex() for norm in optimizer.norms]} {digest(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
