"""What the backend costs per collective.

    python tests/bench/op_overhead.py [--json FILE] [--rounds N]

Two processes on this machine. `reft` and plain gloo take turns in short blocks, so that drift of
the machine hits both. On a busy machine the wall times say little; the processor time of rank 0
beside them is steadier.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support import report

BLOCK = 20  # calls; short, so that a disturbance spoils few of them and both sides see the same machine


def blocks(call: Any, count: int) -> tuple[float, float]:
    """Mean time of a call and mean processor time of this process (all threads), in microseconds."""
    begin, begin_cpu = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / count / 1e3, (time.process_time_ns() - begin_cpu) / count / 1e3


def rank_main(rank: int, size: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("reft", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    plain = dist.new_group(list(range(size)), backend="gloo")
    tensor = torch.ones(1)

    def ours() -> None:
        dist.all_reduce(tensor)

    def gloo() -> None:
        dist.all_reduce(tensor, group=plain)

    times: dict[str, list[float]] = {"reft": [], "gloo": [], "reft_cpu": [], "gloo_cpu": []}
    for index in range(rounds + 2):
        order = [("reft", ours), ("gloo", gloo)]
        for name, call in order if index % 2 else reversed(order):
            wall, cpu = blocks(call, BLOCK)
            if index >= 2:  # the first warm up
                times[name].append(wall)
                times[f"{name}_cpu"].append(cpu)
    dist.barrier()
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def measure_gloo(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (2, rounds, folder), 2)
        return dict(json.loads((Path(folder) / "times.json").read_text()))


def op_bench() -> Any:
    """The module that was built beside the `_C` in use: the newest one of this interpreter."""
    name = f"op_bench.{sysconfig.get_config_var('SOABI')}.so"
    found = sorted(
        Path(__file__).resolve().parents[2].glob(f"build*/tests/{name}"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise SystemExit("op_bench is not built: run tools/dev build")
    spec = importlib.util.spec_from_file_location("op_bench", found[-1])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_local() -> dict[str, list[float]]:
    """Nanoseconds, without communication and without Python in the loop."""
    from reft import _C

    bench = op_bench()
    tensor = torch.ones(1)
    noop = bench.NoopBackend()
    wrapped = _C.ReftBackend(noop, None, None, "", "bench", 0, 1)
    _C.install_call_sites([str(Path(torch.__file__).parent) + "/"])
    result: dict[str, list[float]] = {"noop": [], "wrapped": [], "op_log": [], "call_site": []}
    count = 100_000
    for _ in range(21):
        result["noop"].append(bench.time_allreduce(noop, tensor, count))
        result["wrapped"].append(bench.time_allreduce(wrapped, tensor, count))
        result["op_log"].append(bench.time_op_log(count))
        result["call_site"].append(bench.time_call_site(count))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3000)
    arguments = parser.parse_args()
    os.environ.setdefault("REFT_SNAPSHOT", "0")
    os.environ.setdefault("REFT_BANNER", "0")

    local = measure_local()
    both = measure_gloo(arguments.rounds)
    adds = [wrapped - noop for wrapped, noop in zip(local["wrapped"], local["noop"], strict=True)]

    def metric(values: list[float], unit: str, goal: float | None = None) -> dict[str, Any]:
        value = report.median(values)
        goal_text = "" if goal is None else f"<= {goal:g}"
        return report.metric(value, unit, report.mad(values), goal_text, None if goal is None else value <= goal)

    def overhead(ours: list[float], base: list[float], goal: float | None = None) -> dict[str, Any]:
        value, error = report.ratio(ours, base)
        percent, spread = 100 * (value - 1), 100 * error
        goal_text = "" if goal is None else f"<= {goal:g}"
        meets = None if goal is None else report.at_most(percent, spread, goal)
        return report.metric(percent, "%", spread, goal_text, meets)

    metrics = {
        "all_reduce_4_bytes_gloo": metric(both["gloo"], "us"),
        "all_reduce_4_bytes_reft": metric(both["reft"], "us"),
        "all_reduce_4_bytes_overhead": overhead(both["reft"], both["gloo"], 2.0),
        "all_reduce_4_bytes_gloo_cpu": metric(both["gloo_cpu"], "us"),
        "all_reduce_4_bytes_cpu_overhead": overhead(both["reft_cpu"], both["gloo_cpu"]),
        "wrapper_per_op": metric(adds, "ns", 1000.0),
        "op_log_per_op": metric(local["op_log"], "ns", 200.0),
        "call_site_per_op": metric(local["call_site"], "ns", 200.0),
    }
    notes = [
        f"2 ranks, {arguments.rounds} interleaved blocks of {BLOCK} calls each; the op log writes five phases per op",
        "overhead: ratio of the medians, ± its 95 % bootstrap interval; the others: median ± median absolute deviation",
        f"load when it ended: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    ]
    report.write(arguments.json, "bench op_overhead", metrics, len(metrics), 0, 0, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
