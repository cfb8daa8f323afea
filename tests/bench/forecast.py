"""How well gaps are foretold in real jobs: pipelines of every kind, DDP, FSDP2 and replicated
pipelines, a rank per process, script unchanged.

For each kind of job: the error of a step's foretold gaps (weighted by their length; median over
steps, then over ranks), the share of gap time that was foretold at all, and how many steps it takes
after a change of shapes until gaps are foretold again: with an error of no more than the goal of 10
%, or as before if that is more (`relearnt_after`), and as well as before (`as_before_after`).

`--device cpu`: over gloo, gaps are the host's waits; the change is to micro-batches of twice as
many rows. With more ranks than cores the ranks wait for cores, too, which nobody can foretell: the
figures are then those of a crowded machine. `--device cuda`: over the real ProcessGroupNCCL on
stand-in devices (tests/fakes/cuda), whose kernels take a fixed time whatever the machine does; gaps
are the device's, and the change is to half as many micro-batches. What a step was like is known
there when the device has passed it, a step or two later.

    python tests/bench/forecast.py [--device cpu] [--kinds gpipe 1f1b interleaved zero_bubble ddp
    fsdp hybrid] [--ranks 4] [--steps 40]
                                   [--slower 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import report

KINDS = ("gpipe", "1f1b", "interleaved", "zero_bubble", "ddp", "fsdp", "hybrid")
STAND_IN = {"kernel_us": 4000, "copy_mb_per_sec": 200, "contention_percent": 60}
MICRO_BATCHES = 8
SETTLED = 10  # steps at the beginning of which the model has not seen enough
LAG = 4  # steps after the change, of which one at least is not as those before
LIKE_BEFORE = 1.5  # times the error before the change counts as foretold as well
GOAL_PERCENT, GOAL_STEPS = 10.0, 3.0


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend="reft")
    import reft

    rank, world = dist.get_rank(), dist.get_world_size()
    kind = args.kinds[0]
    # `hybrid`: a half of the ranks is a pipeline, and the other half a replica of it.
    stages_of, stage_of, pipeline = world, rank, None
    replicas = None
    if kind == "hybrid":
        mesh = dist.init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replica", "stage"))
        pipeline, replicas = mesh.get_group("stage"), mesh.get_group("replica")
        stages_of, stage_of = world // 2, mesh.get_local_rank("stage")
    torch.manual_seed(stage_of)
    per_rank = 2 if kind in ("interleaved", "zero_bubble") else 1

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        ).to(device)

    models: list[nn.Module] = [block() for _ in range(per_rank)]
    replicated = DistributedDataParallel(models[0]) if kind == "ddp" else None
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        models = [nn.Sequential(block(), block(), block())]
        for layer in models[0].children():
            fully_shard(layer)
        fully_shard(models[0])
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-4)
    loss_fn = nn.functional.mse_loss

    def trainer(tokens: int, micro_batches: int) -> Callable[[], None]:
        """One step with micro-batches of so many rows. Shapes of a schedule are fixed, so another size is another schedule."""
        x = torch.randn(micro_batches * tokens, args.width).to(device)
        if kind in ("ddp", "fsdp"):
            model = replicated or models[0]
            return lambda: loss_fn(model(x), x).backward()
        stages = [
            pipelining.PipelineStage(model, stage_of + i * stages_of, stages_of * per_rank, device, group=pipeline)
            for i, model in enumerate(models)
        ]
        schedule: Any
        if kind == "gpipe":
            schedule = pipelining.ScheduleGPipe(stages[0], micro_batches, loss_fn=loss_fn)
        elif kind in ("1f1b", "hybrid"):
            schedule = pipelining.Schedule1F1B(stages[0], micro_batches, loss_fn=loss_fn)
        elif kind == "interleaved":
            schedule = pipelining.ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss_fn)
        else:
            schedule = pipelining.ScheduleInterleavedZeroBubble(stages, micro_batches, loss_fn=loss_fn)
        inputs = (x,) if stage_of == 0 else ()
        targets = {"target": x} if stage_of == stages_of - 1 else {}
        return lambda: schedule.step(*inputs, **targets)

    def average() -> None:
        for parameter in models[0].parameters():
            if parameter.grad is not None:
                dist.all_reduce(
                    parameter.grad, dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM, replicas
                )

    steps: list[dict[str, int]] = []
    changed = (2 * args.tokens, MICRO_BATCHES) if args.device == "cpu" else (args.tokens, MICRO_BATCHES // 2)
    for tokens, micro_batches in ((args.tokens, MICRO_BATCHES), changed):
        train = trainer(tokens, micro_batches)
        for _ in range(args.steps):
            train()
            if replicas is not None:
                average()
            optimizer.step()
            optimizer.zero_grad()
            now = reft.status()
            names = (
                "forecast_steps",
                "forecast_last_ppm",
                "foretold_gap_ns",
                "unforetold_gap_ns",
                "step_ns",
                "forecast_error_ppm",
            )
            steps.append({name: int(now[name]) for name in names})
    (Path(args.out) / f"{rank}.json").write_text(json.dumps(steps))
    dist.barrier()
    dist.destroy_process_group()


def relearnt(before: list[dict[str, int]], after: list[dict[str, int]], enough_ppm: float) -> int | None:
    """Steps that are foretold worse than `enough_ppm` and worse than those before the change, until
    one is not; None: none is.

    Counted from the first that is worse: on a device it is known a step or two later what a step
    was like, so a step may be read twice (it counts once) and another never.
    """
    errors = [step["forecast_last_ppm"] for step in before if step["foretold_gap_ns"]]
    if not errors:
        return None
    enough = max(enough_ppm, LIKE_BEFORE * statistics.median(errors))
    good = [
        step["foretold_gap_ns"] > step["unforetold_gap_ns"] and step["forecast_last_ppm"] <= enough for step in after
    ]
    first = good[:LAG].index(False) if False in good[:LAG] else 0
    if True not in good[first:]:
        return None
    return after[good.index(True, first)]["forecast_steps"] - after[first]["forecast_steps"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="before, and after, the change of shapes")
    parser.add_argument(
        "--slower", type=int, default=1, help="factor for the time that kernels and copies of stand-in devices take"
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32, help="rows of a micro-batch")
    if (args := report.arguments(parser, worker)) is None:
        return 0

    metrics, failed, notes = {}, 0, []
    environment = {}
    if args.device == "cuda":
        from tests.fakes.cuda import environment as cuda

        if cuda.missing():
            print(cuda.missing(), file=sys.stderr)
            return 1
        slowed = {
            "kernel_us": STAND_IN["kernel_us"] * args.slower,
            "copy_mb_per_sec": STAND_IN["copy_mb_per_sec"] // args.slower,
        }
        stand_in = STAND_IN | slowed
        environment = cuda.environment(args.ranks, **stand_in) | {"REFT_SNAPSHOT_POLICY": "gap"}
        notes.append(f"stand-in devices: {stand_in}")
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = {"kinds": kind} | {name: getattr(args, name) for name in ("device", "steps", "width", "tokens")}
            ranks = report.run_ranks(__file__, args.ranks, Path(scratch), arguments, environment)
            if ranks is None:
                failed += 1
                notes.append(f"{kind}: did not run")
                continue
        befores = [steps[SETTLED : args.steps] for steps in ranks]
        afters = [steps[args.steps :] for steps in ranks]
        metrics[f"{kind}_step"] = report.metric(
            report.median([s["step_ns"] / 1e6 for before in befores for s in before]), "ms"
        )
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
        error = report.median([before[-1]["forecast_error_ppm"] / 1e4 for before in befores])
        metrics[f"{kind}_error_by_gap"] = report.metric(error, "%", None, f"<= {GOAL_PERCENT:g}", error <= GOAL_PERCENT)
        for name, enough_percent in (("relearnt_after", GOAL_PERCENT), ("as_before_after", 0.0)):
            counts = [
                relearnt(before, after, 1e4 * enough_percent) for before, after in zip(befores, afters, strict=True)
            ]
            if steps := [float(count) for count in counts if count is not None]:
                middle = report.median(steps)
                goal = (f"<= {GOAL_STEPS:g}", middle <= GOAL_STEPS) if enough_percent else ("", None)
                metrics[f"{kind}_{name}"] = report.metric(middle, "steps", None, *goal)
            if len(steps) < args.ranks:
                notes.append(f"{kind}, {name}: {args.ranks - len(steps)} ranks did not within {args.steps} steps")
    report.write(args.json, "bench forecast", metrics, len(args.kinds), failed, 0, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
