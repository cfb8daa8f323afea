#!/usr/bin/env python3
"""Does the backend pass what gloo passes? Runs torch's own distributed tests under both and
compares.

    tests/conformance/run_distributed_tests.py      every test, 2 ranks, gloo first, then reft
        --world 3           with the tests of subgroups
        --only all_reduce   tests whose name matches
        --shard 1/4         every fourth test (what CI runs on a commit)
        --state DIR         continue where a run was interrupted

Everything runs on the CPU, one test at a time. A test that fails is run once more, and said to be
flaky if it passes then. Exit codes: 0 the backend is nowhere behind the reference, 1 a test that
passes under the reference fails or is skipped, or one is skipped for another reason, 2 the suite
could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUITE = Path(__file__).with_name("suite.py")
DIED = "the process that runs the tests died"


@dataclass(frozen=True)
class Result:
    """What became of a test: outcome is "passed", "failed" or "skipped"."""

    outcome: str
    reason: str
    seconds: float
    flaky: bool = False

    @property
    def last_line(self) -> str:
        """The exception's own line of a traceback."""
        lines = [line.strip() for line in self.reason.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|SystemExit|Timeout)\b", line)]
        return (errors or lines or [""])[-1][:160]


class Runner:
    """Runs tests under one backend and keeps the results in a file, so that they survive an interruption."""

    def __init__(self, backend: str, args: argparse.Namespace, state: Path) -> None:
        self.backend = backend
        self.args = args
        self.results = state / f"{backend}-{args.world}.jsonl"
        self.logs = state / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Result]:
        """Results so far. A test that began and never ended has failed with the process that ran it."""
        found: dict[str, Result] = {}
        failed_once: set[str] = set()
        if not self.results.exists():
            return found
        for line in self.results.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            name = row["test"]
            if row["outcome"] == "started":
                found[name] = Result("failed", DIED, 0)
                continue
            flaky = row["outcome"] == "passed" and name in failed_once
            found[name] = Result(row["outcome"], row["reason"], row["seconds"], flaky)
            if row["outcome"] == "failed":
                failed_once.add(name)
        return found

    def run(self, tests: Sequence[str]) -> dict[str, Result]:
        """Runs those tests that have no result yet, then the failed ones once more."""
        self._run_missing(tests)
        results = self.read()
        again = [name for name in tests if results[name].outcome == "failed"]
        if again and not self.args.no_retry:
            self._call(again)
            results = self.read()
        return {name: results[name] for name in tests}

    def _run_missing(self, tests: Sequence[str]) -> None:
        while missing := [name for name in tests if name not in self.read()]:
            before = len(missing)
            self._call(missing)
            if before == len([name for name in tests if name not in self.read()]):
                raise RuntimeError(f"the tests do not start under {self.backend}: see {self.logs / 'suite.log'}")

    def _call(self, tests: Sequence[str]) -> None:
        command = [sys.executable, str(SUITE), "--backend", self.backend, "--world", str(self.args.world)]
        command += ["--timeout-sec", str(self.args.timeout_sec), "--results", str(self.results)]
        command += ["--logs", str(self.logs), *tests]
        with open(self.logs / "suite.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            shown = 0
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    shown = self._progress(tests, shown)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()

    def _progress(self, tests: Sequence[str], shown: int) -> int:
        done = self.read()
        ended = [done[name] for name in tests if name in done and done[name].reason != DIED]
        count = len(ended)
        if count // 25 > shown // 25:
            failed = sum(result.outcome == "failed" for result in ended)
            print(f"  {self.backend}: {count} of {len(tests)}, {failed} failed", flush=True)
        return count


def names_of_tests(args: argparse.Namespace) -> list[str]:
    """The tests that this call has to run.

    Raises:
        RuntimeError: the suite cannot be imported.
    """
    listing = subprocess.run([sys.executable, str(SUITE), "--list"], capture_output=True, text=True)
    if listing.returncode != 0:
        raise RuntimeError(listing.stderr.strip().splitlines()[-1])
    names = [name for name in listing.stdout.split() if re.search(args.only, name)]
    index, count = (int(part) for part in args.shard.split("/"))
    return names[index - 1 :: count]


def compare(reference: dict[str, Result], backend: dict[str, Result]) -> list[tuple[str, str]]:
    """Tests where the backend is behind the reference, with what differs."""
    behind = []
    for name, expected in reference.items():
        seen = backend[name]
        if expected.outcome == "passed" and seen.outcome == "failed":
            behind.append((name, seen.last_line))
        elif expected.outcome == "passed" and seen.outcome == "skipped":
            behind.append((name, f"skipped: {seen.reason}"))
        elif expected.outcome == "skipped" and seen.outcome == "failed":
            behind.append((name, f"the reference skips it ({expected.reason}); here: {seen.last_line}"))
        elif expected.outcome == seen.outcome == "skipped" and expected.reason != seen.reason:
            behind.append((name, f"skipped for another reason: {seen.reason!r} instead of {expected.reason!r}"))
    return behind


def show(backend: str, results: dict[str, Result], every: bool) -> None:
    """Prints the lists of one backend."""
    lists = {kind: [n for n, r in results.items() if r.outcome == kind] for kind in ("passed", "failed", "skipped")}
    seconds = sum(result.seconds for result in results.values())
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in lists.items())
    print(f"\n{backend}: {counts} in {seconds:.0f} s")
    for name in lists["failed"]:
        print(f"  failed  {name}: {results[name].last_line}")
    for name in (n for n, r in results.items() if r.flaky):
        print(f"  flaky   {name}: passed when run again")
    if every:
        for kind in ("passed", "skipped"):
            for name in lists[kind]:
                print(f"  {kind:<7} {name}" + (f": {results[name].reason}" if kind == "skipped" else ""))


def report(command: str, outcomes: dict[str, dict[str, Result]], behind: list[tuple[str, str]]) -> dict[str, Any]:
    """The object that `--json` writes."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=SUITE.parent, capture_output=True, text=True
    ).stdout.strip()
    under_test = list(outcomes.values())[-1]
    metrics: dict[str, Any] = {}
    for backend, results in outcomes.items():
        for kind in ("passed", "failed", "skipped"):
            count = sum(1 for result in results.values() if result.outcome == kind)
            metrics[f"{backend}_{kind}"] = {"value": count, "unit": "tests"}
        metrics[f"{backend}_flaky"] = {"value": sum(r.flaky for r in results.values()), "unit": "tests"}
        metrics[f"{backend}_time"] = {"value": round(sum(r.seconds for r in results.values()), 1), "unit": "s"}
    metrics["behind_reference"] = {"value": len(behind), "unit": "tests", "goal": "0", "meets": not behind}
    return {
        "command": command,
        "commit": commit,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "metrics": metrics,
        "cases": {
            "run": sum(1 for result in under_test.values() if result.outcome != "skipped"),
            "failed": len(behind),
            "skipped": sum(1 for result in under_test.values() if result.outcome == "skipped"),
        },
        "notes": [f"{name}: {what}" for name, what in behind],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", default="reft", help="under test; the reference's name: run the reference alone")
    options.add_argument("--reference", default="gloo")
    options.add_argument("--world", type=int, default=2, help="ranks")
    options.add_argument("--only", default="", metavar="REGEX")
    options.add_argument("--shard", default="1/1", metavar="I/N", help="every Nth test, beginning with the Ith")
    options.add_argument("--timeout-sec", type=float, default=60, help="for one test")
    options.add_argument("--no-retry", action="store_true", help="do not run failed tests once more")
    options.add_argument("--state", metavar="DIR", help="keep results and logs here, and continue from them")
    options.add_argument("--json", metavar="FILE")
    options.add_argument("--verbose", action="store_true", help="list passed and skipped tests, too")
    args = options.parse_args()

    state = Path(args.state or tempfile.mkdtemp(prefix="conformance-"))
    state.mkdir(parents=True, exist_ok=True)
    try:
        tests = names_of_tests(args)
        print(f"{len(tests)} tests, {args.world} ranks, results and logs of failed tests in {state}", flush=True)
        backends = list(dict.fromkeys([args.reference, args.backend]))
        outcomes = {backend: Runner(backend, args, state).run(tests) for backend in backends}
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    for backend, results in outcomes.items():
        show(backend, results, args.verbose)
    behind = compare(outcomes[args.reference], outcomes[args.backend])
    if args.reference != args.backend:
        print(f"\n{args.backend} against {args.reference}: {len(behind)} tests behind")
        for name, what in behind:
            print(f"  {name}: {what}")
    if args.json:
        command = " ".join(["tests/conformance/run_distributed_tests.py", *sys.argv[1:]])
        found = report(command, outcomes, behind)
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
