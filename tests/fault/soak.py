"""Hours of training, kills and resumes: new campaigns of killed processes until the time is over.

    soak.py --minutes 60 [--seed N] [--batch 25] [--json FILE]

Each batch is `kill_campaign.py` with another seed. After each, nothing of reft may be left: no
agent, no rank, no growth of the run directories. A batch that fails is reported with the command
that repeats it, and the soak goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def leftovers() -> list[str]:
    """Command lines of agents and training workers that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "reft-kill-" in " ".join(words) and (
            words[0].endswith("reft-agent") or "train_worker.py" in " ".join(words)
        ):
            found.append(f"{path.parent.name}: {' '.join(words).strip()}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--batch", type=int, default=25, help="cases in a campaign")
    parser.add_argument("--seed", type=int, default=1000, help="of the first campaign; each further one has the next")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    from tests.support import report

    deadline = time.monotonic() + 60 * args.minutes
    seed, ran, failed, skipped = args.seed, 0, 0, 0
    notes: list[str] = []
    totals = dict.fromkeys(("kills", "restarts", "wrong_bits", "hangs"), 0)
    while time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.json"
            words = [
                str(HERE / "kill_campaign.py"),
                "--cases",
                str(args.batch),
                "--seed",
                str(seed),
                "--json",
                str(out),
            ]
            code = subprocess.run([sys.executable, *words]).returncode
            if out.exists():
                found = json.loads(out.read_text())
                ran += found["cases"]["run"]
                skipped += found["cases"]["skipped"]
                failed += max(found["cases"]["failed"], int(code != 0))
                for name in totals:
                    totals[name] += found["metrics"][name]["value"]
            else:
                failed += 1
        if code != 0:
            notes.append(f"again: tools/dev fault kill --cases {args.batch} --seed {seed}")
        if left := leftovers():
            failed += 1
            notes.append(f"left after seed {seed}: {left}")
        seed += 1
    metrics = {name: report.metric(value, "") for name, value in totals.items()}
    report.write(args.json, "soak", metrics, run=ran, failed=failed, skipped=skipped, notes=notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
