"""Placement of copies, all of it: on stand-in devices, on processor cores, and how well gaps are
foretold on the devices.

Runs placement_device.py, forecast.py and placement_host.py one after the other (half an hour; an
hour with two cores) and gives their figures as one table. Each of them can be run alone, with
arguments of its own. Stand-in devices are run by processor cores: where there is no core for each
device, the devices are three times as slow, so that what else the machine does matters less.

    python tests/bench/placement.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import report

HERE = Path(__file__).resolve().parent
DEVICES = 4
SLOWER = "1" if len(os.sched_getaffinity(0)) >= DEVICES else "3"
PARTS = {
    "device": ["placement_device", "--slower", SLOWER],
    "forecast": ["forecast", "--device", "cuda", "--steps", "26", "--slower", SLOWER],
    "host": ["placement_host"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    metrics: dict[str, Any] = {}
    cases = {"run": 0, "failed": 0, "skipped": 0}
    notes: list[str] = []
    for name, (script, *arguments) in PARTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "part.json"
            print(f"{script} {' '.join(arguments)} ...", file=sys.stderr, flush=True)
            # Its own table goes where progress goes: the last one has all of it.
            subprocess.run(
                [sys.executable, str(HERE / f"{script}.py"), *arguments, "--json", str(file)], stdout=sys.stderr
            )
            if not file.exists():
                cases = cases | {"run": cases["run"] + 1, "failed": cases["failed"] + 1}
                notes.append(f"{script}: gave no figures")
                continue
            part = json.loads(file.read_text())
        metrics |= {f"{name}_{metric}": value for metric, value in part["metrics"].items()}
        cases = {kind: count + part["cases"][kind] for kind, count in cases.items()}
        notes += [f"{script}: {note}" for note in part["notes"]]
    report.write(args.json, "bench placement", metrics, cases["run"], cases["failed"], cases["skipped"], notes)
    return 1 if cases["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
