"""What capturing the place in the loop costs each step of a typical script, and that
REFT_RESUME=off takes it off the path.

The script: nested epochs over a DataLoader, a trainer object with meters and a history, an averaged
copy of the weights, a scheduler, a random generator of its own. One rank; the time of each capture
is taken around the call itself, because it is far below the noise of a step: processor time of the
thread, which other load does not move, and wall time beside it. With REFT_RESUME=off every Python
call of some steps is looked at.

    python tests/bench/resume_cost.py [--steps 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import report

GOAL_MS = 0.5


def worker(args: argparse.Namespace) -> None:
    import random

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    import reft
    from reft import _continuation

    spent: list[float] = []
    walls: list[float] = []
    sizes: list[int] = []
    original = _continuation.capture

    def timed(*values: Any, **options: Any) -> Any:
        wall, begin = time.perf_counter_ns(), time.thread_time_ns()
        captured = original(*values, **options)
        spent.append((time.thread_time_ns() - begin) / 1e6)
        walls.append((time.perf_counter_ns() - wall) / 1e6)
        sizes.append(len(captured["frames"]))
        return captured

    _continuation.capture = timed  # type: ignore[assignment]

    called: set[str] = set()
    folder = os.path.dirname(_continuation.__file__)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            called.add(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}")

    class Meter:
        def __init__(self) -> None:
            self.sum, self.count, self.last = 0.0, 0, 0.0

        def update(self, value: float) -> None:
            self.sum, self.count, self.last = self.sum + value, self.count + 1, value

    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
            self.average = [p.detach().clone() for p in self.model.parameters()]
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
            data = TensorDataset(torch.randn(800, 32), torch.randint(8, (800,)))
            self.sampler = DistributedSampler(data)
            self.loader = DataLoader(data, batch_size=8, sampler=self.sampler)
            self.meters = {"loss": Meter(), "norm": Meter()}
            self.history: list[float] = []
            self.dice = random.Random(1)
            self.best = {"epoch": 0, "loss": float("inf")}
            self.config = {"lr": 1e-3, "name": "typical", "layers": [32, 64, 8]}
            self.step = 0

        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x + 0.01 * self.dice.random()), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.meters["loss"].update(loss.item())
            self.meters["norm"].update(norm.item())
            self.history.append(loss.item())

        def fit(self, steps: int) -> None:
            for epoch in range(1_000_000):
                self.sampler.set_epoch(epoch)
                for i, (x, y) in enumerate(self.loader):
                    if args.profile and 10 <= self.step < 20:
                        sys.setprofile(profile)
                    self.train_step(x, y)
                    sys.setprofile(None)
                    if self.step == steps:
                        return
                    if i % 10 == 0:
                        for slow, fast in zip(self.average, self.model.parameters(), strict=True):
                            slow.lerp_(fast.detach(), 0.1)
                self.best = {"epoch": epoch, "loss": min(self.best["loss"], self.history[-1])}

    Trainer().fit(args.steps)
    status = reft.status()
    found = {
        "capture_ms": spent,
        "wall_ms": walls,
        "bytes": sizes,
        "called": sorted(called),
        "loader_patched": hasattr(DataLoader.__iter__, "_reft_original"),
        "sealed": status.get("sealed", 0),
    }
    Path(args.out).write_text(json.dumps(found))
    dist.destroy_process_group()


def one(scratch: Path, steps: int, resume: str, profile: bool) -> dict[str, Any] | None:
    """Runs the script in a process of its own; None if it failed."""
    out = scratch / f"{resume}.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "REFT_RESUME": resume, "REFT_JOB_ID": f"resume-cost-{os.getpid()}-{resume}",
        "REFT_RUN_DIR": str(scratch / "run"), "REFT_AGENT_LINGER_SEC": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--worker", "--steps", str(steps), "--out", str(out)]
    done = subprocess.run(command + (["--profile"] if profile else []), env=env)
    return json.loads(out.read_text()) if done.returncode == 0 and out.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    if (args := report.arguments(parser, worker)) is None:
        return 0

    with tempfile.TemporaryDirectory(prefix="reft-rc-") as scratch:
        exact = one(Path(scratch), args.steps, "exact", False)
        off = one(Path(scratch), 40, "off", True)
    failed = [name for name, found in (("exact", exact), ("off", off)) if found is None]
    metrics: dict[str, dict[str, Any]] = {}
    notes = [f"failed: {name}" for name in failed]
    if exact is not None:
        counted = sorted(exact["capture_ms"][5:])
        median = report.median(counted)
        late = counted[int(0.99 * len(counted))]
        metrics["capture_per_step"] = report.metric(
            median, "ms", report.mad(counted), f"<= {GOAL_MS}", median <= GOAL_MS
        )
        metrics["capture_p99"] = report.metric(late, "ms")
        wall = exact["wall_ms"][5:]
        metrics["capture_wall"] = report.metric(report.median(wall), "ms", report.mad(wall))
        metrics["first_capture"] = report.metric(exact["capture_ms"][0], "ms")
        metrics["bytes_at_end"] = report.metric(exact["bytes"][-1], "B")
        notes.append(
            f"{len(counted)} steps counted, {exact['sealed']} snapshots sealed; the history grew to {args.steps} losses"
        )
    if off is not None:
        # Random state is part of the tensors' snapshot and has no part in this.
        calls = [name for name in off["called"] if not name.startswith("rng.py")]
        count = len(off["capture_ms"]) + len(calls) + int(off["loader_patched"])
        metrics["calls_when_off"] = report.metric(count, "calls", None, "== 0", count == 0)
        if calls:
            notes.append(f"called with REFT_RESUME=off: {', '.join(calls)}")
    missed = [name for name, found in metrics.items() if found["meets"] is False]
    report.write(args.json, "bench resume_cost", metrics, 2, len(failed) + len(missed), 0, notes)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
