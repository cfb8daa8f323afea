# ranks: 2; kills: 2 6 11
# A function with `while`, batches drawn with torch.randint, dropout, OneCycleLR at each step, a
# list of losses.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def get_batch(x, y, size):
    index = torch.randint(len(x), (size,))
    return index.tolist(), x[index], y[index]


def main():
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    torch.manual_seed(5)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True).sin()
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=14)
    losses = []
    iteration = 0
    best = float("inf")
    while iteration < 12:
        ids, a, b = get_batch(x, y, 6)
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        best = min(best, losses[-1])
        iteration += 1
        print(f"r{rank} it {iteration} loss {losses[-1].hex()} ids {ids} norm {grad_norm.item().hex()}", flush=True)
    print(f"r{rank} final {iteration} best {best.hex()} losses {[v.hex() for v in losses]}", flush=True)
    print(f"r{rank} final lr {scheduler.get_last_lr()} {digest(model, optimizer, scheduler)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
