"""Trains a pipeline or a replicated model, and compares every sealed snapshot with a clone taken at
its program point.

    placement_worker.py pipeline|ddp STEPS OUT        (under torchrun, backend reft)

Each rank writes OUT/rank-<n>.json: what was compared and found wrong, and the counters of the
engine.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from tests.integration.never_wrong_worker import Checker, init_checked

WIDTH = 192
MICRO_BATCHES = 8


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    kind, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checkers = init_checked()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if kind == "pipeline" else 0)
    model: nn.Module = block()
    if kind == "pipeline":
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checker = Checker(lambda: [model, optimizer])
    checkers.append(checker)
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(32 * MICRO_BATCHES, WIDTH)
        if kind == "ddp":
            nn.functional.mse_loss(model(x), x.tanh()).backward()
        elif rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=x.tanh())
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    import reft

    reft.snapshot_now(10)
    checker.check()
    found = {"wrong": checker.wrong, "verified": len(checker.verified), "steps": checker.step}
    (out / f"rank-{rank}.json").write_text(json.dumps(found | reft.status()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
