"""Trains two ranks whose snapshots cost what is asked for, and writes down which steps had one.

    cadence_worker.py STEPS OUT COST_SEC        (under torchrun, backend reft)

In the first attempt each step beside a copy takes COST_SEC longer, so that it does not depend on
the machine what is measured. Each rank appends to OUT/taken-<attempt>-<rank> the steps whose
snapshot was begun, and writes OUT/end-<rank>.json at the end. With OUT/kill there, rank 1 kills
itself in its first attempt, once snapshots have become rare and the newest one is committed.
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

FIRST_KILL, LAST_KILL = 70, 260  # steps


def first_attempt() -> bool:
    """Not a variable of the loop: those come back with a resume."""
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def main() -> None:
    steps, out, cost_sec = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    import reft

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    ballast = nn.Parameter(torch.arange(1 << 20, dtype=torch.float32), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), ballast], lr=1e-3)
    taken = open(out / f"taken-{0 if first_attempt() else 1}-{rank}", "w")  # noqa: SIM115  (line by line, until this process is killed)
    captured, at_once = -1, 0
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
            if first_attempt() and status["at_once_copied_bytes"] == at_once:  # else its copy is done
                time.sleep(cost_sec)
        captured, at_once = int(status["captured"]), int(status["at_once_copied_bytes"])
        rare = status["every"] >= 4 and step % status["every"] == 2
        if rank == 1 and first_attempt() and (out / "kill").exists() and rare and FIRST_KILL <= step <= LAST_KILL:
            deadline = time.monotonic() + 30
            while reft.status()["committed_step"] < step - 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            (out / "killed").write_text(f"{step} {status['every']} {reft.status()['committed_step']}")
            os.kill(os.getpid(), signal.SIGKILL)
    reft.snapshot_now(30)
    weights = [p.detach().double().sum().item() for p in [*model.parameters(), ballast]]
    end = {"weights": weights, "exact": [p.detach().tolist() for p in model.parameters()], "status": reft.status()}
    (out / f"end-{rank}.json").write_text(json.dumps(end))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
