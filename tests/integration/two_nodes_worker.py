"""A rank that trains by nothing but collectives, and at some step does what holds up the others.

    two_nodes_worker.py --out DIR --steps N [--fault NAME --rank R]

Each rank writes its process id to `DIR/pid.R`, and `DIR/reached.R` when it has come to the fault.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

AT = 12  # so many ops before make the place where the others wait a familiar one
LONG = 3600.0


def hold_up() -> None:
    time.sleep(LONG)  # the culprit's line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--fault", default="none", choices=["none", "sleep", "barrier"])
    parser.add_argument("--rank", type=int, default=-1)
    options = parser.parse_args()
    dist.init_process_group("reft")
    rank = dist.get_rank()
    (options.out / f"pid.{rank}").write_text(str(os.getpid()))
    for step in range(options.steps):
        time.sleep(0.02)
        if step == AT:
            (options.out / f"reached.{rank}").touch()
            if rank == options.rank and options.fault == "sleep":
                hold_up()
            if rank == options.rank and options.fault == "barrier":
                dist.barrier()
        dist.all_reduce(torch.ones(64))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
