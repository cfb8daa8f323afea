"""What a snapshot at every step costs a compute-bound training step.

DDP, 1 thread for each rank, on this machine's cores: nothing is idle, so every byte that is copied
and hashed takes time from training. Short blocks with and without snapshots alternate in one run;
each step with is compared with the steps without in the blocks before and after. The processor time
of the rank (all threads) beside the wall time says the same with less noise where other processes
disturb. Beside these, what is spent is added up (`accounted`): processor time of the copy threads,
capture and gate, over the length of a step. That has next to no noise; it leaves out what copies
cost others through caches and memory. Control steps, whose copy the training thread waits for, are
one in eight at first and one in CONTROL_EVERY later: a run as short as this one takes none, and
`accounted` has its part of the time that a copy takes.

    python tests/bench/step_overhead.py [--state-mb 300 1500] [--ranks 2] [--protection none arc aec aor]
        [--sharded] [--blocks 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.support import report

# Tokens per rank and step: enough that a step is arithmetic, few enough that the benchmark ends.
SHAPES = {
    300: {"layers": 6, "width": 512, "batch": 4, "context": 512},
    1500: {"layers": 10, "width": 1024, "batch": 2, "context": 512},
}


CONTROL_EVERY = 64  # default of REFT_SNAPSHOT_CONTROL_EVERY


def copy_threads_sec() -> float:
    """Processor time of this process's copy threads, and of the one that computes another rank's
    optimizer a second time (aor)."""
    computing = {thread.native_id for thread in threading.enumerate() if thread.name == "reft-recompute"}
    spent = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) in computing or (task / "comm").read_text().startswith("reft-copy"):
            spent += int((task / "schedstat").read_text().split()[0])
    return spent * 1e-9


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    import reft
    from reft._session import current

    shape = SHAPES[args.state]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        shape["width"], 8, 4 * shape["width"], batch_first=True, norm_first=True, dropout=0.0
    )
    model = nn.Sequential(
        nn.Embedding(4096, shape["width"]),
        nn.TransformerEncoder(layer, shape["layers"], enable_nested_tensor=False),
        nn.Linear(shape["width"], 4096),
    )
    # Pad with an unused-by-compute but trained table, so that the state has the size that was asked
    # for.
    have = 12 * sum(p.numel() for p in model.parameters())
    rows = max(0, args.state * 1_000_000 - have) // (12 * shape["width"])
    model[0] = nn.Embedding(4096 + rows, shape["width"])
    ddp = DistributedDataParallel(model)
    if args.sharded:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> tuple[float, float]:
        """Wall and processor seconds."""
        ids = torch.randint(4096, (shape["batch"], shape["context"]), generator=generator)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        logits = ddp(ids)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        return time.perf_counter() - begin, time.process_time() - begin_cpu

    def block(on: bool) -> list[tuple[float, float]]:
        current.set_enabled(on)
        step()  # the step in which the change takes effect is not counted
        return [step() for _ in range(args.steps)]

    for _ in range(2):
        step()
    rows_out = {
        "off": [],
        "on": [],
        "stall_ms": [],
        "capture_ms": [],
        "copy_cpu_ms": [],
        "accounted": [],
        "wall_ratio": [],
        "cpu_ratio": [],
    }
    before = block(False)
    for _ in range(args.blocks):
        start, start_copy = reft.status(), copy_threads_sec()
        on = block(True)
        end = reft.status()
        after = block(False)  # its first step is not counted: the last copies end in it
        copy_ms = (copy_threads_sec() - start_copy) * 1e3
        rows_out["off"] += [wall for wall, _ in after]
        rows_out["on"] += [wall for wall, _ in on]
        for kind, name in enumerate(("wall_ratio", "cpu_ratio")):
            base = statistics.mean(t[kind] for t in before + after)
            rows_out[name].append(statistics.mean(t[kind] for t in on) / base)
        taken = max(1, end["captured"] - start["captured"])
        rows_out["stall_ms"].append((end["gate_ns"] - start["gate_ns"]) / 1e6 / taken)
        rows_out["capture_ms"].append((end["capture_ns"] - start["capture_ns"]) / 1e6 / taken)
        rows_out["copy_cpu_ms"].append(copy_ms / taken)
        copies = 1 + 1 / CONTROL_EVERY
        spent_ms = rows_out["stall_ms"][-1] + rows_out["capture_ms"][-1] + copies * rows_out["copy_cpu_ms"][-1]
        rows_out["accounted"].append(spent_ms / (1e3 * statistics.mean(t[0] for t in before + after)))
        before = after
    status = reft.status()
    source = torch.empty(max(1, status["payload_bytes"]), dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(0)
    memcpy_ms = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        memcpy_ms.append((time.perf_counter() - begin) * 1e3)
    rows_out |= {
        "memcpy_ms": memcpy_ms,
        "payload_bytes": status["payload_bytes"],
        "state_bytes": status["state_bytes"],
        "vault_bytes": status["vault_bytes"],
        "captured": status["captured"],
        "sealed": status["sealed"],
        "dropped": status["dropped"],
        "skipped": status["skipped"],
        "copy_ms": status["copy_ns"] / 1e6 / max(1, status["captured"]),
    }
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(rows_out))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=int, nargs="+", default=[300, 1500], choices=sorted(SHAPES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--protection", nargs="+", default=["none"], help="values of REFT_SNAPSHOT_PROTECTION")
    parser.add_argument("--sharded", action="store_true", help="AdamW under a ZeroRedundancyOptimizer, as aor needs")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="counted steps in a block")
    parser.add_argument("--state", type=int, help=argparse.SUPPRESS)
    if (args := report.arguments(parser, worker)) is None:
        return 0

    metrics, failed, notes = {}, 0, []
    cases = [(state, protection) for state in args.state_mb for protection in args.protection]
    for state, protection in cases:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out.json"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={args.ranks}",
                __file__,
                "--worker",
                "--state",
                str(state),
                "--blocks",
                str(args.blocks),
                "--steps",
                str(args.steps),
                *["--sharded"] * args.sharded,
                "--out",
                str(out),
            ]
            settings = {"OMP_NUM_THREADS": "1", "REFT_SNAPSHOT_CONTROL_EVERY": "0", "REFT_SNAPSHOT_PROTECTION": protection}
            done = subprocess.run(command, env=os.environ | settings)
            if done.returncode or not out.exists():
                failed += 1
                continue
            r = json.loads(out.read_text())
        p = f"{state}mb_" + "sharded_" * args.sharded + f"{protection}_" * (protection != "none")
        for name in ("wall", "cpu"):
            middle, error = report.interval(r[f"{name}_ratio"])
            extra = 100 * (middle - 1)
            goal = ("<= 1", report.at_most(extra, 100 * error, 1)) if name == "wall" else ("", None)
            metrics[p + ("overhead" if name == "wall" else "overhead_cpu")] = report.metric(
                extra, "%", 100 * error, *goal
            )
        metrics[p + "accounted"] = report.metric(
            100 * report.median(r["accounted"]), "%", 100 * report.mad(r["accounted"])
        )
        metrics[p + "copy_threads_cpu_per_step"] = report.metric(
            report.median(r["copy_cpu_ms"]), "ms", report.mad(r["copy_cpu_ms"])
        )
        metrics[p + "step_off"] = report.metric(1e3 * report.median(r["off"]), "ms", 1e3 * report.mad(r["off"]))
        metrics[p + "step_on"] = report.metric(1e3 * report.median(r["on"]), "ms", 1e3 * report.mad(r["on"]))
        metrics[p + "stall_per_step"] = report.metric(report.median(r["stall_ms"]), "ms", report.mad(r["stall_ms"]))
        metrics[p + "capture_per_step"] = report.metric(
            report.median(r["capture_ms"]), "ms", report.mad(r["capture_ms"])
        )
        metrics[p + "copy_and_hash_per_step"] = report.metric(r["copy_ms"], "ms")
        metrics[p + "memcpy_same_bytes"] = report.metric(
            report.median(r["memcpy_ms"]), "ms", report.mad(r["memcpy_ms"])
        )
        metrics[p + "bytes_copied_per_step"] = report.metric(r["payload_bytes"], "B")
        metrics[p + "vault_per_state_byte"] = report.metric(r["vault_bytes"] / r["state_bytes"], "x")
        notes.append(
            f"{state} MB, {protection}: {r['captured']} captured, {r['sealed']} sealed, {r['dropped']} dropped, {r['skipped']} skipped"
        )
    report.write(args.json, "bench step_overhead", metrics, len(cases), failed, 0, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
