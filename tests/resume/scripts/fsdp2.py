# ranks: 2; kills: 2 5 8
# FSDP2: fully_shard on each block and on the whole, AdamW on DTensors, gradient norm over shards,
# SequentialLR; values that the script has attached to a parameter.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 32)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main():
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    torch.manual_seed(50)
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[3])
    text = torch.arange(400) * 7 % 32
    torch.manual_seed(60 + rank)
    tokens = 0
    model.head.weight.seen = []
    for step in range(9):
        start = torch.randint(0, 380, (3,)).tolist()
        x = torch.stack([text[s : s + 8] for s in start])
        y = torch.stack([text[s + 1 : s + 9] for s in start])
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tokens += x.numel()
        model.head.weight.seen.append(step)
        print(f"r{rank} {step} loss {loss.item().hex()} ids {start} norm {norm.full_tensor().item().hex()}"
              f" {model.head.weight.seen}", flush=True)
    print(f"r{rank} final {tokens} {scheduler.get_last_lr()} {digest(model, optimizer, scheduler)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
