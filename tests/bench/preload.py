"""What libreft_preload.so costs: a hook on the path of a launch, and the start of a program.

    python tests/bench/preload.py [--blocks 4000] [--starts 200] [--json FILE]

Launches: build/tests/preload_benchmark calls a function that returns at once, directly and through
its hook, in turns. Starts: /bin/true with and without the library in turns, from spawn to exit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support import report

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "build" / "tests"
LIBRARY = ROOT / "build" / "intercept" / "libreft_preload.so"
GOAL_NS = 50.0
# What a launch costs the host at least, by published measurements of empty kernels.
LAUNCH_NS = 2200.0
GOAL_PERCENT = 0.5


def launches(blocks: int) -> tuple[list[float], list[float]]:
    """Nanoseconds of a call in each block: directly, and through the hook."""
    done = subprocess.run(
        [str(TESTS / "preload_benchmark"), str(TESTS / "libempty_driver.so"), str(blocks)],
        env=os.environ | {"LD_PRELOAD": str(LIBRARY)},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def start_us(preloaded: bool) -> float:
    """Microseconds from the spawn of /bin/true to its exit."""
    environment = {"PATH": "/usr/bin:/bin"} | ({"LD_PRELOAD": str(LIBRARY)} if preloaded else {})
    begin = time.perf_counter_ns()
    child = os.posix_spawn("/bin/true", ["/bin/true"], environment)
    os.waitpid(child, 0)
    return (time.perf_counter_ns() - begin) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not (TESTS / "preload_benchmark").exists():
        print("preload_benchmark is not built: tools/dev build")
        return 1
    direct, hooked = launches(args.blocks)
    added = [b - a for a, b in zip(direct, hooked, strict=True)]
    value, spread = report.interval(added)
    percent, percent_spread = 100 * value / LAUNCH_NS, 100 * spread / LAUNCH_NS
    without, with_it = [], []
    for _ in range(args.starts):
        without.append(start_us(False))
        with_it.append(start_us(True))
    starts = [b - a for a, b in zip(without, with_it, strict=True)]
    start, start_spread = report.interval(starts)
    report.write(
        args.json,
        "bench preload",
        {
            "a call": report.metric(report.median(direct), "ns", report.mad(direct)),
            "a call through its hook": report.metric(report.median(hooked), "ns", report.mad(hooked)),
            "a hook": report.metric(value, "ns", spread, f"<= {GOAL_NS:g}", report.at_most(value, spread, GOAL_NS)),
            f"a hook / a launch of {LAUNCH_NS:g} ns": report.metric(
                percent,
                "%",
                percent_spread,
                f"<= {GOAL_PERCENT:g}",
                report.at_most(percent, percent_spread, GOAL_PERCENT),
            ),
            "start of /bin/true": report.metric(report.median(without), "us", report.mad(without)),
            "start with the library": report.metric(report.median(with_it), "us", report.mad(with_it)),
            "the library at a start": report.metric(start, "us", start_spread),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
