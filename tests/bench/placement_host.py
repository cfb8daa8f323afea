"""What a snapshot at every step costs a pipeline on processor cores under each policy, and where
its bytes are copied.

1F1B over gloo, a stage per rank, 1 thread each, script unchanged. Short blocks of steps without
snapshots, under `eager` and under `gap` alternate in one run; each block with snapshots is compared
with the blocks without before and after it. With four ranks on two cores a bubble of one rank is
work of another, so that no core is ever idle; with two ranks bubbles are idle cores.

    python tests/bench/placement_host.py [--ranks 4 2] [--blocks 8] [--steps 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import report

POLICIES = ("eager", "gap")
TIERS = ("at_once", "gap", "compute", "communication", "gate")
MICRO_BATCHES = 8


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    import reft
    from reft._session import current

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers: list[nn.Module] = []
    for _ in range(args.layers):
        layers += [nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)]
    model = nn.Sequential(*layers)
    schedule = Schedule1F1B(
        PipelineStage(model, rank, world, torch.device("cpu")), MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(MICRO_BATCHES * args.tokens, args.width)

    def step() -> tuple[float, float]:
        """Wall and processor seconds."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        if rank == world - 1:
            schedule.step(*([x] if world == 1 else []), target=x)
        else:
            schedule.step(*([x] if rank == 0 else []))
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin, time.process_time() - begin_cpu

    def block(policy: str) -> list[tuple[float, float]]:
        session = current.session()
        assert session is not None and session.engine is not None
        current.set_enabled(policy != "off")
        if policy != "off":
            session.engine.set_policy(policy)
        step()  # the step in which the change takes effect is not counted
        return [step() for _ in range(args.steps)]

    for _ in range(4):
        step()
    block("gap")  # makes the plan, and the schedule known
    out: dict[str, Any] = {"off": []} | {
        policy: {"steps": [], "wall": [], "cpu": [], "stall": [], "capture": []} for policy in POLICIES
    }
    for policy in POLICIES:
        out[policy] |= {f"{tier}_copied_bytes": 0 for tier in TIERS}
    before = block("off")
    for index in range(2 * args.blocks):
        # eager gap gap eager …: neither is always the first after the other
        policy = POLICIES[(index + index // 2) % 2]
        start = reft.status()
        on = block(policy)
        end = reft.status()
        after = block("off")
        row = out[policy]
        row["steps"] += [wall for wall, _ in on]
        for kind, name in enumerate(("wall", "cpu")):
            row[name].append(statistics.mean(t[kind] for t in on) / statistics.mean(t[kind] for t in before + after))
        taken = max(1, end["captured"] - start["captured"])
        row["stall"].append((end["gate_ns"] - start["gate_ns"]) / 1e6 / taken)
        row["capture"].append((end["capture_ns"] - start["capture_ns"]) / 1e6 / taken)
        for tier in TIERS:
            row[f"{tier}_copied_bytes"] += end[f"{tier}_copied_bytes"] - start[f"{tier}_copied_bytes"]
        out["off"] += [wall for wall, _ in after]
        before = after
    out["status"] = reft.status()
    (Path(args.out) / f"{rank}.json").write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--blocks", type=int, default=8, help="blocks under each policy")
    parser.add_argument("--steps", type=int, default=6, help="counted steps in a block")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2, help="per stage; 25 MB of state each at the default width")
    parser.add_argument("--tokens", type=int, default=48, help="rows of a micro-batch")
    if (args := report.arguments(parser, worker)) is None:
        return 0

    metrics, failed, notes = {}, 0, []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = {name: getattr(args, name) for name in ("blocks", "steps", "width", "layers", "tokens")}
            rows = report.run_ranks(__file__, ranks, Path(scratch), arguments, {})
            if rows is None:
                failed += 1
                continue
        p = f"{ranks}ranks_"
        first = rows[0]
        metrics[p + "step_off"] = report.metric(1e3 * report.median(first["off"]), "ms", 1e3 * report.mad(first["off"]))
        for policy in POLICIES:
            # A step of a pipeline takes equally long on all ranks; processor time is each rank's
            # own.
            middle, error = report.interval(first[policy]["wall"])
            metrics[p + f"{policy}_overhead"] = report.metric(100 * (middle - 1), "%", 100 * error)
            middle, error = report.interval([ratio for row in rows for ratio in row[policy]["cpu"]])
            metrics[p + f"{policy}_overhead_cpu"] = report.metric(100 * (middle - 1), "%", 100 * error)
            stalls = [stall for row in rows for stall in row[policy]["stall"]]
            metrics[p + f"{policy}_stall_per_step"] = report.metric(statistics.mean(stalls), "ms", report.mad(stalls))
            metrics[p + f"{policy}_stall_worst_block"] = report.metric(max(stalls), "ms")
            captures = [capture for row in rows for capture in row[policy]["capture"]]
            metrics[p + f"{policy}_capture_per_step"] = report.metric(
                report.median(captures), "ms", report.mad(captures)
            )
            copied = {tier: sum(row[policy][f"{tier}_copied_bytes"] for row in rows) for tier in TIERS}
            for tier, count in copied.items():
                metrics[p + f"{policy}_in_{tier}"] = report.metric(100 * count / max(1, sum(copied.values())), "%")
        status = [row["status"] for row in rows]
        metrics[p + "bytes_per_step"] = report.metric(sum(s["payload_bytes"] for s in status), "B")
        metrics[p + "forecast_error"] = report.metric(
            report.median([s["forecast_error_ppm"] / 1e4 for s in status]), "%"
        )
        wrong = sum(s["dropped"] + s["skipped"] + s["errors"] for s in status)
        lost = sum(s["op_events_lost"] for s in status)
        notes.append(
            f"{ranks} ranks: {sum(s['sealed'] for s in status)} sealed, {wrong} dropped or skipped, {lost} events lost"
        )
        failed += wrong > 0
    report.write(args.json, "bench placement_host", metrics, len(args.ranks), failed, 0, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
