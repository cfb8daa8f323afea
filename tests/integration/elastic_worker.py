"""A training whose number of ranks changes between its starts. Each rank appends a line
`<rank> <epoch> <batch> <step> <loss> <items…>` to `$LOG` after each step.

    python elastic_worker.py [--workers W] [--sampler default|own] [--share N] [--wide] [--width N]
        [--hold FD] [--fsdp | --parts N [--order RANKS]] [--average list|registered]

`$KILL` is RANK:STEP: that rank kills itself after it has logged that step, which counts over all
starts. `$STEPS` is how many there are, `$DELAY` how many seconds each one waits. `$READS-<pid>`
gets a line before reft begins, and one after each step: how many bytes the process has read from
storage, and how many of its resume came from vaults in memory, from vaults on storage, and from
other nodes. With `--fsdp`, each rank has a part of the model, with `--parts`, every Nth has the
same, and `$LOG-state-<rank>` gets what
all of them have together: a line `<step> <hash>` after each step. `--average` is of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import reft

ITEMS, BATCH = 240, 4
SOURCES = ("memory", "storage", "received")


def note_reads() -> None:
    if prefix := os.environ.get("READS"):
        lines = Path("/proc/self/io").read_text().splitlines()
        counters = dict(line.split(": ") for line in lines)
        status = reft.status()
        restored = [status.get(f"restored_{source}_bytes", 0) for source in SOURCES]
        with open(f"{prefix}-{os.getpid()}", "a") as file:
            print(counters["read_bytes"], *restored, file=file)


def hash_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, more: list[torch.Tensor]
) -> str:
    """Of all parameters, of what the optimizer keeps of them, and of more tensors."""
    digest = hashlib.sha256()
    kept = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    for tensor in [*kept, *more]:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sampler", default="default")
    parser.add_argument("--share", type=int, default=0, help="items of a step, of all ranks together")
    parser.add_argument("--wide", action="store_true", help="as wide as there are ranks")
    parser.add_argument("--width", type=int, default=16, help="of the model, unless --wide")
    parser.add_argument("--hold", type=int, default=0, help="number of a descriptor to have open")
    parser.add_argument("--fsdp", action="store_true", help="each rank has a part of the model")
    parser.add_argument("--parts", type=int, default=0, help="every Nth rank has the same part")
    parser.add_argument("--order", default="", help="ranks as the mesh has them")
    parser.add_argument("--average", default="", help="of the weights, and how it is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    note_reads()
    dist.init_process_group("reft")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    items = torch.randn(ITEMS, 8)
    data = TensorDataset(items, torch.arange(ITEMS))
    sampler = RandomSampler(data) if options.sampler == "own" else DistributedSampler(data, seed=5)
    if options.hold:
        os.dup2(0, options.hold)
    config = {"batch": options.share // world or BATCH, "me": (rank, world)}
    loader = DataLoader(data, config["batch"], sampler=sampler, num_workers=options.workers)
    width = world if options.wide else options.width
    net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 8))
    is_parted = options.fsdp or options.parts > 0
    if is_parted:
        order = map(int, options.order) if options.order else range(world)
        ranks = torch.tensor(list(order)).view(-1, options.parts or world)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "parts"))
        if options.fsdp:
            mesh = mesh["parts"]
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    model = net if is_parted else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    average = [p.detach().clone() for p in model.parameters()] if options.average else []
    for i, tensor in enumerate(average if options.average == "registered" else []):
        reft.register(f"average {i}", tensor)
    step, seen = 0, 0
    for epoch in range(1000):
        if options.sampler != "own":
            sampler.set_epoch(epoch)
        for batch, (x, index) in enumerate(loader):
            optimizer.zero_grad()
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            note_reads()
            scheduler.step()
            step += 1
            share = config["batch"] * world
            assert config["me"] == (rank, world) and share in (options.share, BATCH * world)
            seen += share
            with open(f"{os.environ['LOG']}-{rank}", "a") as log:
                numbers = " ".join(map(str, index.tolist()))
                print(rank, epoch, batch, step, loss.item().hex(), share, seen, numbers, file=log)
            if is_parted:
                for mean, parameter in zip(average, model.parameters(), strict=False):
                    mean.lerp_(parameter.detach(), 0.2)
                found = hash_of(model, optimizer, average)
                with open(f"{os.environ['LOG']}-state-{rank}", "a") as log:
                    print(step, found, file=log)
            time.sleep(float(os.environ.get("DELAY", "0")))
            if os.environ.get("KILL") == f"{rank}:{step}":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == int(os.environ["STEPS"]):
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
