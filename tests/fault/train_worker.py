"""A small training script that a kill campaign interrupts: nothing of reft in it but the backend's
name.

Everything that exact resume has to put back takes part: dropout, shuffled DataLoader, NumPy's and
Python's random numbers, a schedule, running sums, BatchNorm buffers, gradient accumulation, two
optimizers.

    train_worker.py --backend reft --model ddp|fsdp|plain|two|pipe --steps 24 --out DIR

With `pipe` each rank holds a stage of a pipeline; only the last one knows the loss, the others log
a sum of their weights.

Prints `attempt N` when it starts. Writes r<rank>.a<attempt>.log (one line `step loss.hex()` after each optimizer step),
r<rank>.a<attempt>.pid and, at the end, r<rank>.final with a hash of everything that training
changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
BATCHES_PER_EPOCH = 7


class Net(nn.Module):
    def __init__(self, norm: bool, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(32, width),
            nn.BatchNorm1d(width) if norm else nn.LayerNorm(width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
        )
        self.head = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class RunLog:
    """Appends without buffering, so that a line that was written survives SIGKILL."""

    def __init__(self, out: Path) -> None:
        name = f"r{os.environ['RANK']}.a{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        self._file = open(out / f"{name}.log", "ab", buffering=0)  # noqa: SIM115
        (out / f"{name}.pid").write_text(str(os.getpid()))
        print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)

    def line(self, step: int, loss: torch.Tensor) -> None:
        self._file.write(f"{step} {loss.item().hex()}\n".encode())


def add(digest: Any, value: Any) -> None:
    """Feeds nested values into a hash."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(
            local.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if local.dim()
            else repr(local.item()).encode()
        )
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            add(digest, item)
    else:
        digest.update(repr(value).encode())


def everything(model: nn.Module, optimizers: Iterable[Any], schedulers: Iterable[Any], extra: Any) -> str:
    digest = hashlib.sha256()
    add(digest, dict(model.state_dict()))
    for optimizer in optimizers:
        add(digest, [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]])
        add(digest, [group["lr"] for group in optimizer.param_groups])
    add(digest, [scheduler.get_last_lr() for scheduler in schedulers])
    add(digest, [torch.get_rng_state(), np.random.get_state(), random.getstate(), extra])
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--model", choices=["ddp", "fsdp", "plain", "two", "pipe"], default="ddp")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--crash-at", type=int, default=-1, help="raise after this step")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    log = RunLog(args.out)
    dist.init_process_group(args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    features = torch.randn(BATCH * BATCHES_PER_EPOCH, 32)
    data = TensorDataset(features, features[:, :4].argmax(dim=1))
    net: nn.Module = Net(args.model in ("ddp", "plain"), args.width)
    model = net
    if args.model in ("ddp", "two"):
        model = DistributedDataParallel(net)
    elif args.model == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.body)
        fully_shard(net)
    elif args.model == "pipe":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        net = model = nn.Sequential(nn.Linear(32, args.width), nn.GELU(), nn.Dropout(0.1), nn.Linear(args.width, 32))
        schedule = Schedule1F1B(PipelineStage(net, rank, world, torch.device("cpu")), 4, loss_fn=nn.functional.mse_loss)

        def train_stage(x: torch.Tensor) -> torch.Tensor:
            losses: list[torch.Tensor] = []
            if rank == world - 1:
                schedule.step(target=x.tanh(), losses=losses)
                return torch.stack(losses).mean()
            schedule.step(*([x] if rank == 0 else []))
            return sum((p.detach().sum() for p in net.parameters()), torch.zeros(()))

    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    if args.model == "two":
        optimizers = [
            torch.optim.AdamW(net.body.parameters(), lr=3e-3),
            torch.optim.SGD(net.head.parameters(), lr=1e-2, momentum=0.9),
        ]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8) for optimizer in optimizers]
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    step, running = 0, 0.0
    seen: list[int] = []
    for epoch in range(1 + args.steps // BATCHES_PER_EPOCH):
        for i, (x, y) in enumerate(loader):
            if step == args.steps:
                break
            x = x + float(np.random.rand()) * 1e-2 + random.random() * 1e-2
            if args.model == "pipe":
                loss = train_stage(x)
            else:
                loss = nn.functional.cross_entropy(model(x), y) * (1.0 + 0.01 * i + 0.1 * epoch)
                loss.backward()
            if args.model == "plain":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            step += 1
            running += loss.item()
            seen.append(int(y.sum()))
            log.line(step, loss)
            if step == args.crash_at:
                raise RuntimeError("the training script fails")
            time.sleep(args.delay)
    final = everything(model, optimizers, schedulers, [step, running, seen])
    (args.out / f"r{rank}.final").write_text(final)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
