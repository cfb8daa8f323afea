"""Random training scripts, each killed once: does what reft claims of the resume hold?

    scripts_campaign.py [--cases N] [--seed S] [--jobs J] [--only CASE …] [--show CASE] [--json FILE]
    [--shrink] [--collected [FILE …]] [--places]

A script is a mixture of a model, an optimizer, a schedule, a loader, a style of loop, and pieces of
state in places where they hide (tests/support/script_case). It runs undisturbed on gloo, then on
reft, where one rank is killed at a random step and point; what both print of each step and of the
final state is compared, and with it what reft said. A resume that is not exact and about which reft
said nothing fails the campaign. `--show` prints a case as a script; `--shrink` looks for the pieces
that a fault needs. `--collected` runs the scripts of tests/fault/collected instead, loops in the
style of packages' examples; those whose packages are missing are left out. `--places` tries each
kind of state in several places without jobs, in forks of one process.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import importlib.util
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support import report
from tests.support.script_case import assembly, parts, places
from tests.support.script_case.assembly import Choice
from tests.support.script_case.trial import CLASSES, FAULTS, Outcome, Trials, plain_environment

POINTS = ["capture", "before_seal", "after_seal", "after_vote", "gate", "after_commit", "early_copy", "collective"]

COLLECTED = Path(__file__).with_name("collected")


def missing(script: Path) -> list[str]:
    """Packages that a script imports and that are not installed."""
    names = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def fault(seed: int, number: int, choice: Choice) -> str:
    """rank:step:point of the kill."""
    rng = random.Random(f"kill {seed}:{number}")
    most = assembly.STEPS // 2 if choice.update == "accumulate" else assembly.STEPS
    return f"{rng.randrange(2)}:{rng.randrange(3, most - 1)}:{rng.choice(POINTS)}"


def shrink(trials: Trials, choice: Choice, where: str, wanted: str) -> Choice:
    """Leaves out pieces of state one by one as long as the verdict stays."""
    for at in reversed(range(len(choice.states))):
        less = Choice(**choice.__dict__ | {"states": choice.states[:at] + choice.states[at + 1 :]})
        if trials.judge(assembly.text(less), where).verdict == wanted:
            choice = less
    return choice


class Campaign:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.counts = args, Counter[str]()
        self.own = threading.local()
        self.made: list[Trials] = []
        self.lock = threading.Lock()
        self.failed: list[int | str] = []

    def trials(self) -> Trials:
        if not hasattr(self.own, "trials"):
            self.own.trials = Trials()
            with self.lock:
                self.made.append(self.own.trials)
        return self.own.trials

    def case(self, number: int) -> None:
        seed = self.args.seed
        choice = assembly.draw(seed, number)
        where = fault(seed, number, choice)
        outcome = self.trials().judge(assembly.text(choice), where)
        shown = choice
        if self.args.shrink and outcome.verdict in FAULTS:
            shown = shrink(self.trials(), choice, where, outcome.verdict)
            outcome = self.trials().judge(assembly.text(shown), where) if shown is not choice else outcome
        self.report(f"{number:4} {where:18}", str(shown), outcome)
        with self.lock:
            if outcome.verdict in FAULTS:
                self.failed.append(number)

    def script(self, path: Path) -> None:
        for where in ("1:5:before_seal", "0:8:after_commit"):
            outcome = self.trials().judge(parts.PRELUDE + path.read_text(), where)
            self.report(f"{where:23}", path.name, outcome)
            with self.lock:
                if outcome.verdict in FAULTS:
                    self.failed.append(path.name)

    def places(self) -> None:
        places.import_all()
        every = places.drawn(self.args.seed)
        some = random.Random(self.args.seed).sample(every, min(self.args.cases or len(every), len(every)))
        for place in some:
            verdict, why = places.judge(place)
            self.counts[verdict] += 1
            print(f"{verdict:10} {place.kind} in {place.holder}, {place.use}, {place.style}, {place.point}: {why}", flush=True)
            if verdict in FAULTS:
                self.failed.append(f"{place.kind} in {place.holder}")

    def report(self, where: str, what: str, outcome: Outcome) -> None:
        with self.lock:
            self.counts[outcome.verdict] += 1
            print(f"{where} {outcome.verdict:10} {outcome.sec:5.1f} s  {what}", flush=True)
            if outcome.verdict not in ("exact", "not killed"):
                for line in [*outcome.differs[:3], *outcome.named[:4], outcome.resumed]:
                    print(f"       {line[:400]}")
            if outcome.verdict == "unusable" or outcome.verdict == "CRASHED" or self.args.verbose:
                print("\n".join("       | " + line for line in outcome.said.splitlines()[-(300 if self.args.verbose else 25):]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts_campaign.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="default: 150, or all places")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--show", type=int, metavar="CASE", help="print a case as a script of its own")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--collected", type=Path, nargs="*", help="run these scripts (default: all)")
    parser.add_argument("--places", action="store_true", help="kinds in places, without jobs")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.show is not None:
        choice = assembly.draw(args.seed, args.show)
        print(assembly.text(choice, f"case {args.show} of seed {args.seed}: {choice}; killed at {fault(args.seed, args.show, choice)}"))
        return 0
    plain_environment()
    campaign = Campaign(args)
    began = time.monotonic()
    one = campaign.case
    work: list[Any] = list(args.only or range(args.cases or 150))
    if args.collected is not None:
        one, work = campaign.script, [path for path in args.collected or sorted(COLLECTED.glob("*.py")) if not missing(path)]
    if args.places:
        campaign.places()
        work = []
    try:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for done in [pool.submit(one, each) for each in work]:
                done.result()
    finally:
        for trials in campaign.made:
            trials.close()
    print()
    for name, meaning in CLASSES.items():
        print(f"{campaign.counts[name]:5} {name:10} {meaning}")
    faults = sum(campaign.counts[name] for name in FAULTS)
    metrics = {name.lower().replace(" ", "_"): report.metric(campaign.counts[name], "cases") for name in CLASSES}
    metrics["duration_sec"] = report.metric(time.monotonic() - began, "s")
    report.write(args.json, "fault scripts", metrics, run=sum(campaign.counts.values()), failed=faults,
                 skipped=campaign.counts["unusable"] + campaign.counts["not killed"],
                 notes=[f"seed {args.seed}", *([f"failed: {campaign.failed}"] if campaign.failed else [])])  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
