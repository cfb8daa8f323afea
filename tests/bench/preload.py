"""What libreft_preload.so costs: a hook on the path of a launch, and the start of a program.

    python tests/bench/preload.py [--blocks 4000] [--starts 200] [--json FILE]

Launches: build/tests/preload_benchmark calls a function that returns at once, directly and through
its hook, in turns. Starts: /bin/true from spawn to exit, in turns without a preloaded library, with
an almost empty one, and with this one; of each the fastest tenth, as others use the machine.
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
EMPTY = TESTS / "libempty_driver.so"
LIBRARY = ROOT / "build" / "intercept" / "libreft_preload.so"
GOAL_NS = 50.0
GOAL_PERCENT = 0.5  # of a loop that only launches


def launches(blocks: int) -> tuple[list[float], list[float]]:
    """Nanoseconds of a call in each block: directly, and through the hook."""
    done = subprocess.run(
        [str(TESTS / "preload_benchmark"), str(EMPTY), str(blocks)],
        env=os.environ | {"LD_PRELOAD": str(LIBRARY)},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def start_us(preloaded: Path | None) -> float:
    """Microseconds from the spawn of /bin/true to its exit."""
    environment = {"LD_PRELOAD": str(preloaded)} if preloaded else {}
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
    starts: dict[Path | None, list[float]] = {None: [], EMPTY: [], LIBRARY: []}
    for _ in range(args.starts):
        for library, times in starts.items():
            times.append(start_us(library))
    fastest = {library: sorted(times)[len(times) // 10] for library, times in starts.items()}
    report.write(
        args.json,
        "bench preload",
        {
            "a call": report.metric(report.median(direct), "ns", report.mad(direct)),
            "a call through its hook": report.metric(report.median(hooked), "ns", report.mad(hooked)),
            "a hook": report.metric(value, "ns", spread, f"<= {GOAL_NS:g}", report.at_most(value, spread, GOAL_NS)),
            f"a launch of which that is {GOAL_PERCENT:g} %": report.metric(
                value / GOAL_PERCENT / 10, "us", spread / GOAL_PERCENT / 10
            ),
            "a start": report.metric(fastest[None], "us"),
            "any preloaded library at a start": report.metric(fastest[EMPTY] - fastest[None], "us"),
            "this one beyond that": report.metric(fastest[LIBRARY] - fastest[EMPTY], "us"),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
