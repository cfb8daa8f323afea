"""Training on one GPU that a kill interrupts, with what stand-in devices have not: random numbers of
the device, cuDNN's convolutions, fused attention, compiled models, a scaler of gradients, graphs.

    gpu_train_worker.py --backend nccl --steps 14 --out DIR
    --model attention|compiled|trees|convolution|graphed|sharded [--delay SEC]

Writes what `train_worker.py` writes. Kernels are the deterministic ones of torch: two undisturbed
runs are equal bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.fault.cuda_train_worker import on_host
from tests.fault.train_worker import RunLog, add

BATCH = 8


class Attention(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.parts, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.parts(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


def build(kind: str, device: torch.device) -> tuple[nn.Module, tuple[int, ...]]:
    """The model, and the shape of a batch."""
    if kind == "convolution":
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 128),
        )
        return model.to(device, memory_format=torch.channels_last), (BATCH, 3, 32, 32)
    return nn.Sequential(Attention(), Attention()).to(device), (BATCH, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    log = RunLog(args.out)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(args.backend)
    torch.manual_seed(5)
    net, shape = build(args.model, device)
    is_half = args.model == "convolution"
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=4, enabled=is_half)
    model: nn.Module = net
    if args.model == "sharded":
        for part in net:
            fully_shard(part)
        model = fully_shard(net)
    elif args.model == "graphed":
        model = torch.cuda.make_graphed_callables(net, (torch.randn(shape, device=device),))
    else:
        model = DistributedDataParallel(net, device_ids=[device.index])
    if args.model == "compiled":
        model = torch.compile(model)
    elif args.model == "trees":  # replays graphs that it captures by itself
        model = torch.compile(model, mode="reduce-overhead")
    total = torch.zeros((), device=device)
    seen = 0.0
    for step in range(1, args.steps + 1):
        x = torch.randn(shape, device=device)  # drawn by the device
        optimizer.zero_grad(set_to_none=args.model != "graphed")
        with torch.autocast("cuda", torch.float16 if is_half else torch.bfloat16, args.model != "graphed"):
            loss = (model(x) - 1).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        total += loss.detach()
        seen += loss.item()
        log.line(step, loss)
        time.sleep(args.delay)
    digest = hashlib.sha256()
    add(digest, {name: on_host(tensor) for name, tensor in net.state_dict().items()})
    for parameter in net.parameters():
        add(digest, {k: on_host(v) for k, v in optimizer.state[parameter].items()})
    add(digest, [scheduler.get_last_lr(), torch.get_rng_state(), torch.cuda.get_rng_state(), total.cpu(), seen])
    add(digest, scaler.state_dict())
    (args.out / f"r{dist.get_rank()}.final").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
