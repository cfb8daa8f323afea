"""A small training script on CUDA devices that a kill interrupts: nothing of reft in it but the
backend's name.

    cuda_train_worker.py --backend reft --steps 12 --out DIR [--model ddp|fsdp|pipe|split]
    [--optimizer adamw|sgd|fused] [--delay SEC]

Writes what `train_worker.py` writes. BatchNorm buffers, a DataLoader, a schedule, clipping, a
running sum on the device and one on the host take part; no random numbers of the device, which
stand-in devices have none of. With `pipe` each rank holds a stage; only the last one knows the
loss, the others log a sum of their weights. With `split` each rank trains a replica that lies on
two devices.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.fault.train_worker import RunLog, add

Train = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build(kind: str, device: torch.device) -> tuple[nn.Module, Train]:
    """The part of the model that this rank holds, and what gives the loss of a batch and its gradients."""
    if kind == "pipe":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank, world = dist.get_rank(), dist.get_world_size()
        stage = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32)).to(device)
        batches = max(4, world)
        schedule = Schedule1F1B(PipelineStage(stage, rank, world, device), batches, loss_fn=nn.functional.mse_loss)

        def train_stage(inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            losses: list[torch.Tensor] = []
            if rank == world - 1:
                schedule.step(target=inputs.tanh(), losses=losses)
                return torch.stack(losses).mean()
            schedule.step(*([inputs] if rank == 0 else []))
            return torch.stack([p.detach().sum() for p in stage.parameters()]).sum()

        return stage, train_stage

    if kind == "split":
        return build_split(device, torch.device("cuda", device.index + 1))

    norm = nn.BatchNorm1d(64) if kind == "ddp" else nn.LayerNorm(64)
    net = nn.Sequential(nn.Linear(32, 64), norm, nn.GELU(), nn.Linear(64, 4)).to(device)
    model: nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net, device_ids=[device.index])
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net[0])
        fully_shard(net)

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    return net, train


def build_split(first: torch.device, second: torch.device) -> tuple[nn.Module, Train]:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU()).to(first)
            self.head = nn.Linear(64, 4).to(second)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(inputs).to(second))

    net = Halves()
    model = DistributedDataParallel(net)

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets.to(second)).to(first)
        loss.backward()
        return loss

    return net, train


def on_host(value: Any) -> Any:
    """The part of a tensor that this rank holds."""
    if not torch.is_tensor(value):
        return value
    return (value.to_local() if hasattr(value, "to_local") else value).detach().cpu()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--model", choices=["ddp", "fsdp", "pipe", "split"], default="ddp")
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "fused"], default="adamw")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    log = RunLog(args.out)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) * (2 if args.model == "split" else 1))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    torch.manual_seed(5)
    features = torch.randn(56, 32)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(dim=1)), batch_size=8, shuffle=True)
    net, train = build(args.model, device)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=args.optimizer == "fused")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    torch.manual_seed(100 + rank)
    total = torch.zeros((), device=device)
    seen, step = 0.0, 0
    while step < args.steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = train(inputs.to(device), targets.to(device))
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.detach()
            seen += loss.item()
            step += 1
            log.line(step, loss)
            time.sleep(args.delay)
            if step >= args.steps:
                break
    digest = hashlib.sha256()
    add(digest, {name: on_host(tensor) for name, tensor in net.state_dict().items()})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            add(digest, {k: on_host(v) for k, v in optimizer.state[parameter].items()})
    add(digest, [scheduler.get_last_lr(), torch.get_rng_state(), total.cpu(), seen, step])
    (args.out / f"r{rank}.final").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
