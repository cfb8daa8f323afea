"""Ends ranks of jobs in many ways, and compares what reft says of it with the truth.

    tools/dev fault crash [--cases N] [--seed S] [--only I …] [--deaths NAME …] [--most-ranks 8]
    [--minutes M] [--json FILE] [--keep DIR] [--verbose]

Each case is a job of 2 to 8 ranks under torchrun without restarts. At a step, one rank (or two, or
all) dies as a function of `crash_worker.py` says, which notes the line first. The report that the
agent writes has to name exactly these ranks, of the class in DEATHS, at that line where the death
has one. The first cases are all deaths once, in an order of the seed; `--only` repeats a case.
In one of four cases the other ranks mask what they met (`masked`).

    exact        ranks, class, and line
    undecidable  no rank is named
    misplaced    the ranks are right, the class or the line is not
    wrong        another rank is named
    silent       no report

Beside it, what torchrun's own summary says (`root`): whether its "root cause" is a rank that died by
itself, and whether it shows that rank's error; without reft's error file it shows none.

`wrong` and `silent` fail the campaign; so do less than 95 % exact.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import cgroups, report
from tests.support.launchers import job_environment, torchrun

HERE = Path(__file__).resolve().parent
WORKER = HERE / "crash_worker.py"
DEADLINE_SEC = 120.0
REPORT_SEC = 15.0  # from the end of the job to its report
MEMORY_BYTES = 1 << 30  # of the cgroup that the OOM killer watches

# Class words that are right, by death.
DEATHS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ["value", "key", "zero", "assertion", "own_class", "without_text", "group_of_exceptions", "recursion", "import",
         "no_file", "child_program", "thread_then_main", "slow_end", "own_hook", "before_training", "after_training",
         "forward", "shapes", "backward", "step_hook", "module_hook", "comm_hook", "data_exception",
         "data_worker_exception"],
        ("exception",),
    ),
    "from_another": ("disk_full",), "disk_full": ("disk_full",), "disk_error": ("disk",),
    "memory": ("host_memory",), "tensor_memory": ("host_memory",),
    "device_assert": ("device",), "device_ecc": ("device",), "device_memory": ("device_memory",),
    "data_worker_killed": ("data_worker",), "data_worker_leaves": ("data_worker",),
    **dict.fromkeys(["exit_code", "exit_text", "os_exit", "exit_after_catching", "thread_then_exit"], ("exit_code",)),
    "leaves_early": ("ended_early",),
    **dict.fromkeys(
        ["segv", "segv_in_thread", "segv_sent", "segv_under_faulthandler", "stack_overflow", "bus", "fpe", "ill",
         "user_signal"],
        ("signal",),
    ),
    "abort": ("abort",), "killed": ("killed",), "killed_in_thread": ("killed",), "terminated": ("terminated",),
    "oom": ("oom_kill",),
}  # fmt: skip
SEVERAL = ["value", "killed", "segv", "exit_code", "forward"]  # also by two ranks at once, and by all
FAILURES = {"wrong", "silent"}


@dataclass
class Case:
    number: int
    death: str
    world: int
    ranks: list[int]
    at: int
    mask: bool = False

    def __str__(self) -> str:
        who = "+".join(map(str, self.ranks))
        return f"{self.number:4} {self.death:24} rank {who} of {self.world} at {self.at}{' masked' * self.mask}"


@dataclass
class Result:
    case: Case
    verdict: str
    what: str = ""
    sec: float = 0.0
    root_right: bool = False
    root_tells: bool = False
    problems: list[str] = field(default_factory=list)


def draw(seed: int, number: int, most_ranks: int, deaths: list[str]) -> Case:
    """Case `number` of a campaign."""
    order = random.Random(seed).sample(deaths, len(deaths))
    several = [f"{name}*" for name in SEVERAL if name in deaths]
    names = order + several
    rng = random.Random(f"{seed}:{number}:{most_ranks}")
    name = names[number % len(names)]
    world = rng.randint(2, most_ranks)
    ranks = [rng.randrange(world)]
    if name.endswith("*"):
        world = max(3, world)
        ranks = sorted(rng.sample(range(world), rng.choice([2, world])))
    return Case(number, name.rstrip("*"), world, ranks, rng.randint(1, 6), rng.random() < 0.25)


class Campaign:
    def __init__(self, scratch: Path, group: Path | None, verbose: bool) -> None:
        self.scratch, self.group, self.verbose = scratch, group, verbose

    def run(self, case: Case) -> Result:
        out = self.scratch / f"case{case.number}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        arguments = ["--death", case.death, "--ranks", *map(str, case.ranks), "--at", str(case.at),
                     "--out", str(out), *["--mask"] * case.mask]  # fmt: skip
        environment = job_environment(out, REFT_AGENT_LINGER_SEC="5", OMP_NUM_THREADS="1")
        environment["PYTHONPATH"] += os.pathsep + str(HERE.parent.parent)
        if self.group is not None:
            environment["CRASH_CGROUP"] = str(self.group)
        command = torchrun(WORKER, *arguments, ranks=case.world, options=("--standalone", "--max-restarts=0"))
        began = time.monotonic()
        job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)  # fmt: skip
        try:
            text, _ = job.communicate(timeout=DEADLINE_SEC)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            text, _ = job.communicate()
            return self._ended(Result(case, "silent", problems=["the job did not end"]), text, out, began)
        (out / "job.log").write_text(text)
        found = self._report(out)
        result = self._judge(case, found, out)
        result.root_right, result.root_tells = self._root(case, text)
        if found is not None and result.verdict == "exact" and "failed first: " not in text and case.death != "leaves_early":
            result.problems.append("the terminal does not show the verdict")
        return self._ended(result, text, out, began)

    def _ended(self, result: Result, text: str, out: Path, began: float) -> Result:
        result.sec = time.monotonic() - began
        if self.verbose or result.verdict not in ("exact",) or result.problems:
            for line in text.splitlines():
                if line.startswith(("reft", "  ")) or "Error" in line:
                    print(f"       {line[:200]}")
        return result

    @staticmethod
    def _reports(out: Path) -> list[Path]:
        try:
            return sorted(out.glob("run/*/node-*/verdicts/*.json"))
        except OSError:  # a folder went meanwhile
            return []

    def _report(self, out: Path) -> dict[str, Any] | None:
        """The report on the crash; the agent writes it at about the end of the job."""
        deadline = time.monotonic() + REPORT_SEC
        while time.monotonic() < deadline:
            for path in self._reports(out):
                with contextlib.suppress(ValueError, OSError):  # being written
                    found: dict[str, Any] = json.loads(path.read_text())
                    if found.get("state") == "crash":
                        return found
            time.sleep(0.05)
        return None

    @staticmethod
    def _judge(case: Case, found: dict[str, Any] | None, out: Path) -> Result:
        if found is None:
            return Result(case, "silent")
        named = [culprit["rank"] for culprit in found["culprits"]]
        result = Result(case, "exact", f"{found['class']}, {found['remedy']}")
        if not named:
            result.verdict = "undecidable"
        elif not set(named) <= set(case.ranks):
            result.verdict, result.problems = "wrong", [f"named {named}"]
        elif named != case.ranks:
            result.verdict, result.problems = "misplaced", [f"named only {named}"]
        elif found["class"] not in DEATHS[case.death]:
            result.verdict, result.problems = "misplaced", [f"class {found['class']}"]
        else:
            for culprit in found["culprits"]:
                line = json.loads((out / f"here.r{culprit['rank']}").read_text())["line"]
                frame = culprit["frame"]
                if line and (not frame or frame["line"] != line or not frame["file"].endswith("crash_worker.py")):
                    result.verdict = "misplaced"
                    result.problems.append(f"{frame and frame['file']}:{frame and frame['line']} for line {line}")
        return result

    @staticmethod
    def _root(case: Case, text: str) -> tuple[bool, bool]:
        """Whether torchrun's root cause is one of the ranks that died, and shows an error of it."""
        root = text.partition("Root Cause (first observed failure):")[2]
        rank = re.search(r"rank\s+: (\d+)", root)
        tells = re.search(r"traceback : (?!To enable traceback|Signal \d)", root)
        return rank is not None and int(rank[1]) in case.ranks, tells is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(DEATHS) + len(SEVERAL))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--deaths", nargs="+", choices=sorted(DEATHS), help="draw from these only (other cases)")
    parser.add_argument("--most-ranks", type=int, default=8)
    parser.add_argument("--minutes", type=float, help="begin no case after that time")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keeps the files of all cases")
    parser.add_argument("--verbose", action="store_true", help="print what reft said in each case")
    args = parser.parse_args()
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="reft-crash-"))
    results: list[Result] = []
    began = time.monotonic()
    with cgroups.limited(f"reft-crash-{os.getpid()}", MEMORY_BYTES) as group:
        deaths = [name for name in args.deaths or DEATHS if name != "oom" or group is not None]
        campaign = Campaign(scratch, group, args.verbose)
        for number in args.only if args.only is not None else range(args.cases):
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                break
            result = campaign.run(draw(args.seed, number, args.most_ranks, deaths))
            results.append(result)
            root = "right" * result.root_right or "WRONG"
            print(f"{result.case}: {result.verdict} ({result.what}); torchrun's root {root}"
                  f"{', with its error' * result.root_tells}; {result.sec:.1f} s", flush=True)  # fmt: skip
            for problem in result.problems:
                print(f"       {problem}", flush=True)
            if not args.keep and result.verdict == "exact":
                shutil.rmtree(scratch / f"case{result.case.number}", ignore_errors=True)
    return conclude(results, args, time.monotonic() - began, group is not None)


def conclude(results: list[Result], args: argparse.Namespace, sec: float, oom: bool) -> int:
    verdicts = Counter(result.verdict for result in results)
    share = verdicts["exact"] / max(1, len(results))
    metrics = {
        name: report.metric(verdicts[name], "cases") for name in ("exact", "undecidable", "misplaced")
    }
    for name in sorted(FAILURES):
        metrics[name] = report.metric(verdicts[name], "cases", None, "0", verdicts[name] == 0)
    metrics["exact_share"] = report.metric(100 * share, "%", None, ">= 95", share >= 0.95)
    metrics["deaths"] = report.metric(len({result.case.death for result in results}), "kinds", None, ">= 40",
                                      len({result.case.death for result in results}) >= 40)  # fmt: skip
    metrics["torchrun_root_right"] = report.metric(sum(result.root_right for result in results), "cases")
    metrics["torchrun_root_with_error"] = report.metric(sum(result.root_tells for result in results), "cases")
    metrics["unshown"] = report.metric(sum(bool(result.problems) for result in results if result.verdict == "exact"), "cases")
    metrics["duration_sec"] = report.metric(sec, "s")
    failed = [result for result in results if result.verdict in FAILURES]
    notes = [f"seed {args.seed}", f"failed cases: {[result.case.number for result in failed]}"]
    notes += ["no cgroup can be made: no OOM kill"] * (not oom)
    report.write(args.json, "fault crash", metrics, run=len(results), failed=len(failed), skipped=0, notes=notes)
    return 1 if failed or share < 0.95 else 0


if __name__ == "__main__":
    sys.exit(main())
