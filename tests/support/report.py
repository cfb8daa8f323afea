"""The JSON object that every benchmark, campaign and demo writes, and robust statistics for it."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def mad(values: list[float]) -> float:
    """Median absolute deviation: the spread beside a median."""
    middle = median(values)
    return median([abs(value - middle) for value in values])


def ratio(ours: list[float], base: list[float], samples: int = 1000) -> tuple[float, float]:
    """Ratio of the medians, and half the width of its 95 % bootstrap interval."""
    generator = random.Random(0)
    drawn = sorted(
        median(generator.choices(ours, k=len(ours))) / median(generator.choices(base, k=len(base)))
        for _ in range(samples)
    )
    return median(ours) / median(base), (
        drawn[int(0.975 * samples)] - drawn[int(0.025 * samples)]
    ) / 2


def interval(values: list[float], samples: int = 1000) -> tuple[float, float]:
    """Median, and half the width of its 95 % bootstrap interval; infinite for a single value."""
    if len(values) < 2:
        return median(values), math.inf
    generator = random.Random(0)
    drawn = sorted(median(generator.choices(values, k=len(values))) for _ in range(samples))
    return median(values), (drawn[int(0.975 * samples)] - drawn[int(0.025 * samples)]) / 2


def arguments(
    parser: argparse.ArgumentParser, worker: Callable[[argparse.Namespace], None]
) -> argparse.Namespace | None:
    """Arguments of a benchmark that `run_ranks` starts again as `worker`; None in the worker."""
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return None
    return args


def run_ranks(
    script: str, ranks: int, scratch: Path, arguments: dict[str, Any], environment: dict[str, str]
) -> list[Any] | None:
    """Runs `script --worker --out SCRATCH …` under torchrun.

    Returns:
        What each rank left in SCRATCH/RANK.json; None if one failed.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        script,
    ]
    command += ["--worker", "--out", str(scratch)]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    # Control steps would be steps of another kind.
    settings = {"OMP_NUM_THREADS": "1", "REFT_SNAPSHOT_CONTROL_EVERY": "0"}
    done = subprocess.run(command, env=os.environ | settings | environment)
    files = [scratch / f"{rank}.json" for rank in range(ranks)]
    if done.returncode or not all(file.exists() for file in files):
        return None
    return [json.loads(file.read_text()) for file in files]


def metric(
    value: Any, unit: str, spread: float | None = None, goal: str = "", meets: bool | None = None
) -> dict[str, Any]:
    known = spread if spread is not None and math.isfinite(spread) else None
    return {"value": value, "unit": unit, "spread": known, "goal": goal, "meets": meets}


def at_most(value: float, spread: float, goal: float) -> bool | None:
    """Whether a figure keeps to a goal; None if its interval, ± `spread`, holds both answers."""
    if value - spread > goal:
        return False
    return True if value + spread <= goal else None


def at_least(value: float, spread: float, goal: float) -> bool | None:
    """As at_most, for a goal that is a lower bound."""
    if value + spread < goal:
        return False
    return True if value - spread >= goal else None


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def write(
    path: str | None,
    command: str,
    metrics: dict[str, dict[str, Any]],
    run: int = 1,
    failed: int = 0,
    skipped: int = 0,
    notes: list[str] | None = None,
    more: dict[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Prints the metrics as a table, unless `quiet`, and writes the object to `path` if there is
    one.

    Args:
        more: fields of this campaign alone.
    """
    import torch

    result = {
        "command": command,
        "commit": _commit(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "metrics": metrics,
        "cases": {"run": run, "failed": failed, "skipped": skipped},
        "notes": notes or [],
        **(more or {}),
    }
    if not quiet:
        _show(result)
    if path:
        # Whoever reads it, or goes on from it, finds a whole one.
        part = Path(path + ".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(path)
    return result


def _show(result: dict[str, Any]) -> None:
    metrics = result["metrics"]
    width = max((len(name) for name in metrics), default=0)
    for name, m in metrics.items():
        value = f"{m['value']:.4g}" if isinstance(m["value"], float) else str(m["value"])
        spread = f" ± {m['spread']:.2g}" if m["spread"] is not None else ""
        verdict = {True: "met", False: "NOT met", None: "undecided, the noise is larger"}[
            m["meets"]
        ]
        goal = f"  goal {m['goal']}: {verdict}" if m["goal"] else ""
        print(f"{name:<{width}}  {value}{spread} {m['unit']}{goal}")
    for note in result["notes"]:
        print(f"note: {note}")
