"""How fast a parity is made, against the bandwidth of the memory (STREAM's triad), a plain copy and
ISA-L's xor_gen.

    python tests/bench/xor.py [--repeats 12] [--json FILE]

Runs build/tests/xor_benchmark, which the build makes if it finds libbenchmark-dev, and with
libisal-dev also compares with ISA-L. The repetitions of all measurements are mixed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import report

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "tests" / "xor_benchmark"


def measure(repeats: int) -> dict[str, list[float]]:
    """Bytes per second of each repetition, by name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [
                str(PROGRAM),
                f"--benchmark_repetitions={repeats}",
                "--benchmark_enable_random_interleaving=true",
                "--benchmark_min_time=0.05",
                f"--benchmark_out={file.name}",
                "--benchmark_out_format=json",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rates: dict[str, list[float]] = {}
        for run in json.loads(Path(file.name).read_text(encoding="utf-8"))["benchmarks"]:
            if run["run_type"] == "iteration":
                name = run["run_name"].removesuffix("/real_time")
                rates.setdefault(name, []).append(run["bytes_per_second"])
        return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not PROGRAM.exists():
        print("xor_benchmark is not built: install libbenchmark-dev and libisal-dev, build again")
        return 1
    rates = measure(args.repeats)
    metrics = {}
    for cells in (3, 7):
        # The memory moves the cells and the parity.
        bandwidth = [rate * cells / (cells + 1) for rate in rates["triad"]]
        bases: list[tuple[str, list[float], float | None]] = [
            ("the memory's bandwidth", bandwidth, 0.9),
            ("a copy of the cells", rates[f"copyOfCells/{cells}"], None),
        ]
        if isal := rates.get(f"isalXorGen/{cells}"):
            bases.append(("ISA-L", isal, 1.0))
        for name, what in (
            ("xorOfAll", "XOR at once (decoding)"),
            ("xorAlone", "XOR block by block"),
            ("parityOfLiveMemory", "parity with checksum"),
        ):
            ours = rates[f"{name}/{cells}"]
            metrics[f"{what} of {cells} cells"] = report.metric(
                report.median(ours) / 1e9, "GB/s", report.mad(ours) / 1e9
            )
            for base, values, goal in bases:
                value, spread = report.ratio(ours, values)
                metrics[f"{what} of {cells} cells / {base}"] = (
                    report.metric(value, "x", spread)
                    if goal is None or name == "parityOfLiveMemory"
                    else report.metric(
                        value, "x", spread, f">= {goal:g}", report.at_least(value, spread, goal)
                    )
                )
    report.write(args.json, "bench xor", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
