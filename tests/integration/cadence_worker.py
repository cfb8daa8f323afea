"""Trains two ranks whose snapshots cost far more than a step, and writes down which steps had one.

    cadence_worker.py STEPS OUT        (under torchrun, backend reft, REFT_SNAPSHOT_OVERHEAD_PERCENT set)

Each rank appends to OUT/taken-<attempt>-<rank> the steps whose snapshot was begun, and writes OUT/end-<rank>.json at the end. With
OUT/kill there, rank 1 kills itself in its first attempt, once snapshots have become rare and the newest one is committed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

FIRST_KILL, LAST_KILL = 90, 400  # steps


def main() -> None:
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    import reft

    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    ballast = nn.Parameter(torch.arange(4 << 20, dtype=torch.float32), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), ballast], lr=1e-3)
    taken = open(out / f"taken-{attempt}-{rank}", "w")  # noqa: SIM115  (line by line, until this process is killed)
    captured = -1
    for step in range(1, steps + 1):
        torch.manual_seed(step * 10 + rank)
        model(torch.randn(4, 16)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        status = reft.status()
        if captured >= 0 and status["captured"] != captured:
            print(step, file=taken, flush=True)
        captured = int(status["captured"])
        rare = status["every"] >= 4 and step % status["every"] == 2
        if rank == 1 and attempt == 0 and (out / "kill").exists() and rare and FIRST_KILL <= step <= LAST_KILL:
            deadline = time.monotonic() + 30
            while reft.status()["committed_step"] < step - 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            (out / "killed").write_text(f"{step} {status['every']} {reft.status()['committed_step']}")
            os.kill(os.getpid(), signal.SIGKILL)
    weights = [p.detach().double().sum().item() for p in [*model.parameters(), ballast]]
    end = {"weights": weights, "exact": [p.detach().tolist() for p in model.parameters()], "status": reft.status()}
    (out / f"end-{rank}.json").write_text(json.dumps(end))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
