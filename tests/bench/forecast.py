"""How well gaps are foretold in real jobs: pipelines of every kind over gloo, and DDP, a rank per process, script unchanged.

For each kind of job: the error of a step's foretold gaps (weighted by their length; median over steps, then over ranks), the share of gap
time that was foretold at all, and how many steps it takes after a change of shapes until gaps are foretold as well as before. With more
ranks than cores the ranks wait for cores, too, which nobody can foretell: the figures are then those of a crowded machine.

    python tests/bench/forecast.py [--kinds gpipe 1f1b interleaved zero_bubble ddp] [--ranks 4] [--steps 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

KINDS = ("gpipe", "1f1b", "interleaved", "zero_bubble", "ddp")
MICRO_BATCHES = 8
SETTLED = 10  # steps at the beginning of which the model has not seen enough
LIKE_BEFORE = 1.5  # times the error before the change counts as foretold as well


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    import reft

    rank, world = dist.get_rank(), dist.get_world_size()
    kind = args.kinds[0]
    torch.manual_seed(rank)
    per_rank = 2 if kind in ("interleaved", "zero_bubble") else 1

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width))

    models: list[nn.Module] = [block() for _ in range(per_rank)]
    replicated = DistributedDataParallel(models[0]) if kind == "ddp" else None
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-4)
    loss_fn = nn.functional.mse_loss

    def trainer(tokens: int) -> Callable[[], None]:
        """One step with micro-batches of so many rows. Shapes of a schedule are fixed, so another size is another schedule."""
        x = torch.randn(MICRO_BATCHES * tokens, args.width)
        if replicated is not None:
            return lambda: loss_fn(replicated(x), x).backward()
        stages = [
            pipelining.PipelineStage(model, rank + i * world, world * per_rank, torch.device("cpu"))
            for i, model in enumerate(models)
        ]
        schedule: Any
        if kind == "gpipe":
            schedule = pipelining.ScheduleGPipe(stages[0], MICRO_BATCHES, loss_fn=loss_fn)
        elif kind == "1f1b":
            schedule = pipelining.Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss_fn)
        elif kind == "interleaved":
            schedule = pipelining.ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_fn)
        else:
            schedule = pipelining.ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_fn)
        inputs = (x,) if rank == 0 else ()
        targets = {"target": x} if rank == world - 1 else {}
        return lambda: schedule.step(*inputs, **targets)

    steps: list[dict[str, int]] = []
    for tokens in (args.tokens, 2 * args.tokens):
        train = trainer(tokens)
        for _ in range(args.steps):
            train()
            optimizer.step()
            optimizer.zero_grad()
            now = reft.status()
            names = ("forecast_last_ppm", "foretold_gap_ns", "unforetold_gap_ns", "step_ns", "forecast_error_ppm")
            steps.append({name: int(now[name]) for name in names})
    (Path(args.out) / f"{rank}.json").write_text(json.dumps(steps))
    dist.barrier()
    dist.destroy_process_group()


def relearnt(before: list[dict[str, int]], after: list[dict[str, int]]) -> int | None:
    """Steps after the change until one is foretold as well as those before it; None: none is."""
    errors = [step["forecast_last_ppm"] for step in before if step["foretold_gap_ns"]]
    if not errors:
        return None
    usual = statistics.median(errors)
    for index, step in enumerate(after):
        foretold = step["foretold_gap_ns"] > step["unforetold_gap_ns"]
        if foretold and step["forecast_last_ppm"] <= LIKE_BEFORE * usual:
            return index
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="before, and after, the change of shapes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32, help="rows of a micro-batch")
    if (args := report.arguments(parser, worker)) is None:
        return 0

    metrics, failed, notes = {}, 0, []
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = {"kinds": kind} | {name: getattr(args, name) for name in ("steps", "width", "tokens")}
            ranks = report.run_ranks(__file__, args.ranks, Path(scratch), arguments, {})
            if ranks is None:
                failed += 1
                notes.append(f"{kind}: did not run")
                continue
        befores = [steps[SETTLED : args.steps] for steps in ranks]
        afters = [steps[args.steps :] for steps in ranks]
        metrics[f"{kind}_step"] = report.metric(report.median([s["step_ns"] / 1e6 for before in befores for s in before]), "ms")
        gaps = sum(s["foretold_gap_ns"] + s["unforetold_gap_ns"] for before in befores for s in before)
        if not gaps:
            notes.append(f"{kind}: has no gaps")
            continue
        foretold = sum(s["foretold_gap_ns"] for before in befores for s in before)
        metrics[f"{kind}_gap_time_foretold"] = report.metric(100 * foretold / gaps, "%")
        errors = [
            report.median(errors)
            for before in befores
            if (errors := [s["forecast_last_ppm"] / 1e4 for s in before if s["foretold_gap_ns"]])
        ]
        if not errors:
            notes.append(f"{kind}: no gap was foretold")
            continue
        metrics[f"{kind}_error"] = report.metric(report.median(errors), "%", report.mad(errors))
        metrics[f"{kind}_error_by_gap"] = report.metric(report.median([before[-1]["forecast_error_ppm"] / 1e4 for before in befores]), "%")
        steps = [count for before, after in zip(befores, afters, strict=True) if (count := relearnt(before, after)) is not None]
        if steps:
            metrics[f"{kind}_relearnt_after"] = report.metric(report.median([float(count) for count in steps]), "steps")
        if len(steps) < args.ranks:
            notes.append(f"{kind}: {args.ranks - len(steps)} ranks did not foretell as well as before within {args.steps} steps")
    report.write(args.json, "bench forecast", metrics, len(args.kinds), failed, 0, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
