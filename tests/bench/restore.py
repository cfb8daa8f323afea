"""How fast a snapshot comes back, against the bound: a raw memcpy of the own shard and a gloo
all_gather of the rest.

    python tests/bench/restore.py [--state-mb 512] [--repeats 5] [--json FILE]

Both move the same bytes to the same place: a full replica's state into every rank's live tensors.
reft reads the other shards of its node through the agent's descriptors and verifies every checksum.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import report


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from tests.support.restored import Restored

    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    rank, world = dist.get_rank(), dist.get_world_size()
    job = Restored(args.state_mb)
    plan = job.plan()
    own = job.total // world
    source = torch.empty(own, dtype=torch.uint8).fill_(3)
    shard = torch.empty(own, dtype=torch.uint8).fill_(1)
    gathered = torch.empty(own * world, dtype=torch.uint8).fill_(2)
    raw, ours = [], []
    gloo = dist.new_group(backend="gloo")
    for _ in range(args.repeats):
        dist.barrier()
        begin = time.perf_counter()
        shard.copy_(source)
        dist.all_gather_into_tensor(gathered, shard, group=gloo)
        raw.append(time.perf_counter() - begin)
        ours.append(job.restore(plan))
    if rank == 0:
        Path(args.out).write_text(json.dumps({"raw": raw, "ours": ours, "bytes": job.total}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    if (args := report.arguments(parser, worker)) is None:
        return 0

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            __file__,
            "--worker",
            "--state-mb",
            str(args.state_mb),
            "--repeats",
            str(args.repeats),
            "--out",
            str(out),
        ]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode or not out.exists():
            return 1
        r = json.loads(out.read_text())
    gigabytes = r["bytes"] / 1e9
    ratios = [a / b for a, b in zip(r["raw"], r["ours"], strict=True)]
    ratio = report.median(ratios)
    report.write(
        args.json,
        "bench restore",
        {
            "rate_ratio": report.metric(ratio, "x of memcpy + all_gather", report.mad(ratios), ">= 0.8", ratio >= 0.8),
            "restore": report.metric(gigabytes / report.median(r["ours"]), "GB/s per rank"),
            "memcpy_and_all_gather": report.metric(gigabytes / report.median(r["raw"]), "GB/s per rank"),
            "state": report.metric(gigabytes, "GB"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
