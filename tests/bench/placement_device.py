"""What a snapshot at every step costs on (stand-in) CUDA devices under each policy, and when the
devices copied, by their own clock.

`pipeline`: four stages of 1F1B (torch.distributed.pipelining) on a device each, gradients clipped
by their norm over all stages; `tight`: the same with more bytes than its gaps can hold; `ddp`: two
replicas; `full`: two that average their gradients themselves, with more bytes than a step can hold.
Real torch and real ProcessGroupNCCL on the stand-ins of tests/fakes/cuda: kernels take a fixed
time, copies have a fixed rate, and kernels run slower while something is copied
(FAKE_CUDA_CONTENTION_PERCENT). So the percentages are those of this model of contention, not of a
GPU; what is shown is where the copies go. Blocks without snapshots, under `eager` and under `gap`
alternate in one run, and each is compared with the blocks without before and after it: by the
median of the steps' times on the device (`overhead`) and by their mean (`overhead_mean`, in which a
step that the machine disturbed counts as well). `--slower` makes kernels and copies slower by a
factor, so that what else the machine does matters less. Which bytes were copied while the training
stream ran no kernel is counted from the trace that the devices write, not from what reft says.
`told` is the pipeline again, under each policy in a job of its own: what the job itself says of its
snapshots' cost, by its control steps, when it first says something.

    python tests/bench/placement_device.py [--jobs pipeline tight ddp full told] [--contention 60]
    [--slower 1] [--blocks N] [--steps 8]
                                             [--json FILE]
"""

from __future__ import annotations

import argparse
import bisect
import collections
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import report

POLICIES = ("eager", "gap")
TIERS = ("at_once", "gap", "compute", "communication", "gate")
RANKS = {"pipeline": 4, "tight": 4, "ddp": 2, "full": 2, "told": 4}
MICRO_BATCHES = {"pipeline": 8, "tight": 8, "ddp": 12, "full": 4, "told": 8}
BLOCKS = {
    "pipeline": 12,
    "tight": 2,
    "ddp": 3,
    "full": 1,
    "told": 0,
}  # under each policy: more where a goal is near and steps differ
# Of two square layers. A pipeline's stage copies for a fifth of its step, three quarters of its
# bubbles; a replica, which has no bubbles and shares the copying with its peer, for a hundredth;
# one of `full`, which reft does not know for a replica, for three steps.
WIDTH = {"pipeline": 512, "tight": 1024, "ddp": 192, "full": 1536, "told": 512}
MOST_STEPS_TO_TELL = 80
TRACE = "trace"
DEVICE = {"kernel_us": 4000, "copy_mb_per_sec": 20, "contention_percent": 60}
CHUNK = 64 << 10
GOAL_IN_GAPS, GOAL_OVERHEAD, GOAL_EAGER = 95.0, 1.0, 10.0


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend="reft")
    import reft
    from reft._session import current

    rank, world = dist.get_rank(), dist.get_world_size()
    pipelined, averaged = args.job not in ("ddp", "full"), args.job == "full"
    torch.manual_seed(rank if pipelined else 0)
    width, micro_batches = WIDTH[args.job], MICRO_BATCHES[args.job]
    model: nn.Module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(device)
    x = torch.randn(2 * micro_batches, width).to(device)
    if pipelined:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        schedule = Schedule1F1B(
            PipelineStage(model, rank, world, device), micro_batches, loss_fn=nn.functional.mse_loss
        )
    elif not averaged:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=1e-4)

    def clip() -> None:
        """By the norm over all stages, as pipelined training does: no stage takes its step before all have their gradients."""
        gradients = [p.grad for p in weights if p.grad is not None]
        squared = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(weights, 1.0, squared.sqrt())

    def step() -> None:
        if not pipelined:
            for micro in range(micro_batches):
                with model.no_sync() if not averaged and micro < micro_batches - 1 else torch.enable_grad():
                    model(x[2 * micro : 2 * micro + 2]).square().mean().backward()
        elif rank == world - 1:
            schedule.step(target=x)
        else:
            schedule.step(*([x] if rank == 0 else []))
        if pipelined:
            clip()
        if averaged:  # DDP waits for a future of its own, and not for the op
            for work in [
                dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True) for p in weights if p.grad is not None
            ]:
                work.wait()
        optimizer.step()
        optimizer.zero_grad()

    def block(policy: str) -> dict[str, Any]:
        session = current.session()
        assert session is not None and session.engine is not None
        current.set_enabled(policy != "off")
        if policy != "off":
            session.engine.set_policy(policy)
        for _ in range(args.settle):  # the change takes effect, and the schedule is learnt anew
            step()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        before, begin = reft.status(), time.monotonic_ns()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        end, after = time.monotonic_ns(), reft.status()
        tiers = {tier: after[f"{tier}_copied_bytes"] - before[f"{tier}_copied_bytes"] for tier in TIERS}
        took = [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
        forecast = {name: after[name] for name in ("forecast_error_ppm", "foretold_gap_ns", "unforetold_gap_ns")}
        return {"policy": policy, "begin": begin, "end": end, "tiers": tiers, "steps_ms": took} | forecast

    found: dict[str, Any] = {"pid": os.getpid(), "device": device.index}
    if args.job == "told":
        for _ in range(MOST_STEPS_TO_TELL):
            step()
        torch.cuda.synchronize()
    else:
        for _ in range(3):
            step()
        block("gap")
        found["blocks"] = [block("off")]
        for index in range(2 * args.blocks):
            found["blocks"] += [block(POLICIES[(index + index // 2) % 2]), block("off")]
    found["status"] = reft.status()
    (Path(args.out) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Trace:
    """What the streams of one device did, from the file that the stand-in writes."""

    def __init__(self, path: Path, device: int) -> None:
        kernels: collections.defaultdict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.copies: list[tuple[int, int, int]] = []
        for line in path.read_text().splitlines():
            on, stream, kind, begin, end, size = line.split()
            if int(on) != device:
                continue
            if kind == "k":
                kernels[int(stream)].append((int(begin), int(end)))
            elif kind == "d" and int(size) >= CHUNK // 2:
                self.copies.append((int(begin), int(end), int(size)))
        self._busy = sorted(max(kernels.values(), key=len))
        self._begins = [begin for begin, _ in self._busy]

    def _beside_kernels(self, begin: int, end: int) -> int:
        """Nanoseconds of a span in which the training stream ran a kernel."""
        total, at = 0, max(0, bisect.bisect_right(self._begins, begin) - 1)
        while at < len(self._busy) and self._busy[at][0] < end:
            total += max(0, min(end, self._busy[at][1]) - max(begin, self._busy[at][0]))
            at += 1
        return total

    def copied(self, begin: int, end: int) -> tuple[float, float]:
        """Bytes copied to the host in a span: all, and those beside which no kernel ran."""
        every = idle = 0.0
        for first, last, size in self.copies:
            if begin <= first < end:
                every += size
                idle += size * (1 - self._beside_kernels(first, last) / max(1, last - first))
        return every, idle


def device_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the stand-ins are like."""
    kernel_us, copy_mb_per_sec = DEVICE["kernel_us"] * args.slower, DEVICE["copy_mb_per_sec"] // args.slower
    return {"kernel_us": kernel_us, "copy_mb_per_sec": copy_mb_per_sec, "contention_percent": args.contention}


def run_ranks(job: str, args: argparse.Namespace, scratch: str, **settings: str) -> list[dict[str, Any]] | None:
    from tests.fakes.cuda import environment as cuda

    blocks = args.blocks or BLOCKS[job]
    arguments = {"job": job, "blocks": blocks, "steps": args.steps, "settle": args.settle}
    environment = cuda.environment(RANKS[job], **device_of(args)) | {"REFT_SNAPSHOT_CHUNK_BYTES": str(CHUNK)} | settings
    return report.run_ranks(__file__, RANKS[job], Path(scratch), arguments, environment)


def run_told(args: argparse.Namespace) -> tuple[dict[str, Any], bool, str]:
    """As run_job, of what jobs say themselves."""
    metrics: dict[str, Any] = {}
    silent = 0
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as scratch:
            rows = run_ranks("told", args, scratch, REFT_SNAPSHOT_POLICY=policy, REFT_SNAPSHOT_CONTROL_EVERY="64")
        if rows is None:
            return metrics, True, "told: did not run"
        known = [row["status"] for row in rows if row["status"]["overhead_noise_ppm"] >= 0]
        silent += len(rows) - len(known)
        if known:  # ranks of a pipeline are slowed together
            middle = sorted(known, key=lambda status: status["overhead_ppm"])[len(known) // 2]
            metrics[f"told_{policy}_overhead"] = report.metric(
                middle["overhead_ppm"] / 1e4, "%", middle["overhead_noise_ppm"] / 1e4
            )
    return metrics, silent > 0, f"told: {silent} ranks said nothing in {MOST_STEPS_TO_TELL} steps"


def run_job(job: str, args: argparse.Namespace) -> tuple[dict[str, Any], bool, str]:
    """Metrics of one job, whether it failed, and a remark."""
    if job == "told":
        return run_told(args)
    with tempfile.TemporaryDirectory() as scratch:
        rows = run_ranks(job, args, scratch, FAKE_CUDA_TRACE=f"{scratch}/{TRACE}")
        if rows is None:
            return {}, True, f"{job}: did not run"
        traces = [Trace(Path(scratch) / f"{TRACE}.{row['pid']}", row["device"]) for row in rows]

    blocks = rows[0]["blocks"]  # a step of coupled ranks takes equally long on all
    medians = [report.median(b["steps_ms"]) for b in blocks]
    means = [statistics.mean(b["steps_ms"]) for b in blocks]
    off = [median for median, b in zip(medians, blocks, strict=True) if b["policy"] == "off"]
    metrics = {f"{job}_step_off": report.metric(report.median(off), "ms", report.mad(off))}

    def overhead(policy: str, spans: list[float]) -> tuple[float, float]:
        """In percent of the blocks beside those of `policy`; half the width of its 95 % interval."""
        at = [i for i, b in enumerate(blocks) if b["policy"] == policy]
        middle, error = report.interval([2 * spans[i] / (spans[i - 1] + spans[i + 1]) for i in at])
        return 100 * (middle - 1), 100 * error

    for policy in POLICIES:
        extra, error = overhead(policy, medians)
        goal, meets = "", None
        if policy == "gap" and job not in ("tight", "full"):
            goal, meets = f"<= {GOAL_OVERHEAD:g}", report.at_most(extra, error, GOAL_OVERHEAD)
        elif job == "pipeline":
            goal, meets = f">= {GOAL_EAGER:g}", report.at_least(extra, error, GOAL_EAGER)
        metrics[f"{job}_{policy}_overhead"] = report.metric(extra, "%", error, goal, meets)
        extra, error = overhead(policy, means)
        metrics[f"{job}_{policy}_overhead_mean"] = report.metric(extra, "%", error)
        every = idle = 0.0
        for row, trace in zip(rows, traces, strict=True):
            for b in row["blocks"]:
                if b["policy"] == policy:
                    copied, beside_nothing = trace.copied(b["begin"], b["end"])
                    every, idle = every + copied, idle + beside_nothing
        in_gaps = 100 * idle / max(1.0, every)
        goal, meets = (
            (f">= {GOAL_IN_GAPS:g}", in_gaps >= GOAL_IN_GAPS) if (job, policy) == ("pipeline", "gap") else ("", None)
        )
        metrics[f"{job}_{policy}_copied_while_idle"] = report.metric(in_gaps, "%", None, goal, meets)
        # What reft itself says, by the device's times: in which tier they fell.
        tiers = {
            tier: sum(b["tiers"][tier] for row in rows for b in row["blocks"] if b["policy"] == policy)
            for tier in TIERS
        }
        for tier in TIERS:
            metrics[f"{job}_{policy}_in_{tier}"] = report.metric(100 * tiers[tier] / max(1, sum(tiers.values())), "%")
        steps = sum(b["policy"] == policy for b in blocks) * args.steps
        metrics[f"{job}_{policy}_bytes_per_step"] = report.metric(every / max(1, steps), "B")
    foretelling = [b for row in rows for b in row["blocks"] if b["policy"] == "gap"]
    errors = [b["forecast_error_ppm"] / 1e4 for b in foretelling if b["foretold_gap_ns"]]
    if errors:
        metrics[f"{job}_forecast_error"] = report.metric(report.median(errors), "%", report.mad(errors))
    gaps = sum(b["foretold_gap_ns"] + b["unforetold_gap_ns"] for b in foretelling)
    if gaps:
        foretold = 100 * sum(b["foretold_gap_ns"] for b in foretelling) / gaps
        metrics[f"{job}_gap_time_foretold"] = report.metric(foretold, "% of the gaps of the blocks' last steps")
    status = [row["status"] for row in rows]
    wrong = sum(s["dropped"] + s["skipped"] + s["errors"] for s in status)
    return metrics, wrong > 0, f"{job}: {sum(s['sealed'] for s in status)} sealed, {wrong} dropped or skipped"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(RANKS), choices=list(RANKS))
    parser.add_argument(
        "--contention",
        type=int,
        default=DEVICE["contention_percent"],
        help="percent of its speed that a kernel loses beside a copy",
    )
    parser.add_argument("--slower", type=int, default=1, help="factor for the time that kernels and copies take")
    parser.add_argument("--blocks", type=int, help=f"blocks under each policy (default: {BLOCKS})")
    parser.add_argument("--steps", type=int, default=8, help="counted steps in a block")
    parser.add_argument("--settle", type=int, default=4, help="steps before them")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    if (args := report.arguments(parser, worker)) is None:
        return 0

    from tests.fakes.cuda import environment as cuda

    if cuda.missing():
        print(cuda.missing(), file=sys.stderr)
        return 1
    metrics: dict[str, Any] = {}
    failed, notes = 0, [f"stand-in devices: {device_of(args)}"]
    for job in args.jobs:
        found, wrong, remark = run_job(job, args)
        metrics |= found
        failed += wrong
        notes.append(remark)
        overheads = [f"{name} {value['value']:+.2f} %" for name, value in found.items() if name.endswith("_overhead")]
        print("; ".join([remark, *overheads]), file=sys.stderr, flush=True)  # long before the last job has ended
    report.write(args.json, "bench placement_device", metrics, len(args.jobs), failed, 0, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
