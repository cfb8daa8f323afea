# ranks: 2; kills: 2 4 7
# Gradient accumulation with no_sync, autocast and GradScaler on the CPU, cosine warm restarts.
import contextlib

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train():
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.GELU(), nn.Linear(10, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)
    data = TensorDataset(torch.arange(36), torch.randn(36, 5), torch.randint(3, (36,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    accumulate = 3
    updates, running = 0, 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for micro, (ids, x, y) in enumerate(loader):
            last = (micro + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y) / accumulate
                scaler.scale(loss).backward()
            running += loss.item()
            if last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                updates += 1
            print(
                f"r{rank} {epoch}.{micro} {loss.item().hex()} ids {ids.tolist()} scale {scaler.get_scale()}", flush=True
            )
    print(f"r{rank} final {updates} {running.hex()} {schedule.get_last_lr()} {scaler.state_dict()}", flush=True)
    print(f"r{rank} final {digest(model, optimizer, schedule)}", flush=True)


dist.init_process_group("reft")
train()
dist.destroy_process_group()
