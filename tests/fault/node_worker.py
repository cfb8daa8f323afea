"""A small training that loses nodes: nothing of reft in it but the backend's name.

    node_worker.py --backend reft --state replicas|dropout|own|fsdp|sharded --steps 16 --out DIR
        [--delay S] [--deal N]

`replicas`: DDP, and all ranks draw the same random numbers, so all that a rank has is on the others
too. `dropout`: DDP, and each rank draws its own. `own`: in addition, each rank has a layer with an
optimizer of its own, which no other rank has. `fsdp`: FSDP2 over all ranks. `sharded`: as
`replicas`, with gradients clipped, and optimizer state that each rank keeps a part of
(ZeroRedundancyOptimizer).

Writes r<rank>.s<start>.pid, where <start> counts how often this rank was started;
r<rank>.s<start>.log, a line `step loss.hex()` after each step; and at the end r<rank>.final with a
hash of everything that training changed, which it prints, too. NODE_FAULTS is a JSON object
with the value of REFT_FAULT for each start.

With `--deal`, a DistributedSampler deals N items to the ranks, and a line of the log is what
`node_shrink.Row` reads: `step loss epoch committed state own items…`. `state` is a hash of
parameters, optimizer state and learning rates, `own` one of what each rank has for itself, and
`committed` the newest committed step that the rank knows of.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_worker import BATCH, BATCHES_PER_EPOCH, Net, add, everything

# So large that a rank's share of an epoch is no descriptor's number, for which reft would take it
# (tests/integration/test_elastic.py has such a share).
DEALT_BATCH = 32


def begin(out: Path, rank: str) -> Path:
    """Notes this start, and sets its fault; the path of its log."""
    start = len(list(out.glob(f"r{rank}.s*.pid")))
    part = out / f".r{rank}.pid"
    part.write_text(str(os.getpid()))
    part.rename(out / f"r{rank}.s{start}.pid")
    faults = json.loads(os.environ.get("NODE_FAULTS", "{}"))
    os.environ["REFT_FAULT"] = faults.get(str(start), "")
    os.environ["REFT_FAULT_ATTEMPT"] = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"start {start} of rank {rank}", flush=True)
    return out / f"r{rank}.s{start}.log"


def hash_of(values: Any) -> str:
    digest = hashlib.sha256()
    add(digest, values)
    return digest.hexdigest()[:16]


def whole(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """With all shards of each tensor. Collective if there are shards."""
    return values and {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in values.items()}


def state_hash(net: nn.Module, optimizers: list[Any]) -> str:
    """Of what all ranks of a data-parallel job have alike."""
    of_optimizers = []
    for optimizer in optimizers:
        state = dict(optimizer.state)  # a lookup in `state` itself would add what is not there
        for group in optimizer.param_groups:
            of_optimizers += [group["lr"], *(whole(state.get(p)) for p in group["params"])]
    return hash_of([whole(dict(net.state_dict())), of_optimizers])


def committed_step(backend: str) -> int:
    """The newest committed step that this rank knows of; -1: none."""
    if backend != "reft":
        return -1
    import reft

    step = int(reft.status().get("committed_step", -1))
    return -1 if step >= 1 << 63 else step  # the counter has no sign


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--state", choices=["replicas", "dropout", "own", "fsdp", "sharded"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--deal", type=int, default=0, help="items that all ranks share")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Appended to without a buffer, so that a line that was written survives SIGKILL.
    log = open(begin(args.out, os.environ["RANK"]), "ab", buffering=0)  # noqa: SIM115
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    torch.manual_seed(5)
    features = torch.randn(args.deal or BATCH * BATCHES_PER_EPOCH, 32)
    data = TensorDataset(features, features[:, :4].argmax(dim=1), torch.arange(len(features)))
    net: nn.Module = Net(False, 96)
    model = net
    if args.state == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.body)
        fully_shard(net)
    else:
        model = DistributedDataParallel(net)
    of_rank = 0 if args.state in ("replicas", "sharded") else rank
    torch.manual_seed(100 + of_rank)
    np.random.seed(200 + of_rank)
    random.seed(300 + of_rank)
    optimizers: list[torch.optim.Optimizer] = []
    if args.state == "sharded":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizers.append(ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3))
    else:
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=3e-3))
    own: nn.Module = nn.Identity()
    if args.state == "own":
        own = nn.Linear(32, 32)
        optimizers.append(torch.optim.SGD(own.parameters(), lr=1e-2, momentum=0.9))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8) for optimizer in optimizers]
    if args.deal:
        sampler = DistributedSampler(data, seed=5)
        loader = DataLoader(data, batch_size=DEALT_BATCH, sampler=sampler)
        epochs = args.steps
    else:
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        epochs = 1 + args.steps // BATCHES_PER_EPOCH

    step, running = 0, 0.0
    for epoch in range(epochs):
        if args.deal:
            sampler.set_epoch(epoch)
        for i, (x, y, index) in enumerate(loader):
            if step == args.steps:
                break
            x = x + float(np.random.rand()) * 1e-2 + random.random() * 1e-2
            loss = nn.functional.cross_entropy(model(own(x)), y) * (1.0 + 0.01 * i + 0.1 * epoch)
            loss.backward()
            if args.state == "sharded":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            step += 1
            running += loss.item()
            line = f"{step} {loss.item().hex()}"
            if args.deal:
                chances = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
                line += f" {epoch} {committed_step(args.backend)} {state_hash(net, optimizers)}"
                line += f" {hash_of([chances, running])} {' '.join(map(str, index.tolist()))}"
            log.write(f"{line}\n".encode())
            time.sleep(args.delay)
    optimizers += [optimizer.optim for optimizer in optimizers if hasattr(optimizer, "optim")]
    final = everything(nn.ModuleList([net, own]), optimizers, schedulers, [step, running])
    (args.out / f"r{rank}.final").write_text(final)
    print(f"rank {rank} final {final}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
