"""A small training that loses nodes: nothing of reft in it but the backend's name.

    node_worker.py --backend reft --state replicas|dropout|own|fsdp|sharded --steps 16 --out DIR [--delay S]

`replicas`: DDP, and all ranks draw the same random numbers, so all that a rank has is on the others
too. `dropout`: DDP, and each rank draws its own. `own`: in addition, each rank has a layer with an
optimizer of its own, which no other rank has. `fsdp`: FSDP2 over all ranks. `sharded`: as
`replicas`, with gradients clipped, and optimizer state that each rank keeps a part of
(ZeroRedundancyOptimizer).

Writes r<rank>.s<start>.pid, where <start> counts how often this rank was started;
r<rank>.s<start>.log, a line `step loss.hex()` after each step; and at the end r<rank>.final with a
hash of everything that training changed, which it prints, too. NODE_FAULTS is a JSON object
with the value of REFT_FAULT for each start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from train_worker import BATCH, BATCHES_PER_EPOCH, Net, everything


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--state", choices=["replicas", "dropout", "own", "fsdp", "sharded"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Appended to without a buffer, so that a line that was written survives SIGKILL.
    log = open(begin(args.out, os.environ["RANK"]), "ab", buffering=0)  # noqa: SIM115
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    torch.manual_seed(5)
    features = torch.randn(BATCH * BATCHES_PER_EPOCH, 32)
    data = TensorDataset(features, features[:, :4].argmax(dim=1))
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
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    step, running = 0, 0.0
    for epoch in range(1 + args.steps // BATCHES_PER_EPOCH):
        for i, (x, y) in enumerate(loader):
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
            log.write(f"{step} {loss.item().hex()}\n".encode())
            time.sleep(args.delay)
    optimizers += [optimizer.optim for optimizer in optimizers if hasattr(optimizer, "optim")]
    final = everything(nn.ModuleList([net, own]), optimizers, schedulers, [step, running])
    (args.out / f"r{rank}.final").write_text(final)
    print(f"rank {rank} final {final}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
