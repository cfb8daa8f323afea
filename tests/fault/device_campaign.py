"""Keeps one rank's device from coming to an op, in every way that has a name, and checks whom a
verdict names.

    tools/dev fault device [--only PATTERN] [--ranks 2 3 4] [--suspect 4] [--preload] [--json FILE] [--verbose]

Real torch and real ProcessGroupNCCL, on stand-in devices where there is no GPU. Rows are those of
docs/hang.md ("Devices"). Hangs, with the rank that has to be named:

    kernel   H50  a kernel that does not end, before an all_reduce
    ddp      H50  the same under DDP, which waits for futures and on streams only
    async    H50  the same before ops that are waited for later
    pipe     H50  the same before a send; each rank receives from the one before
    inner    H50  the same, behind an op that only two ranks share: the others wait for both
    event    H52  the stream waits for an event behind such a kernel on another stream
    lost     H53  the device fails for good, and the script catches the error and goes on
    fatal    H53  the same with NCCL's watchdog, which ends the rank: a crash
    sync     H59  the host waits for its device and does not begin the op; with --preload, which puts
                  libreft_preload.so into the ranks, the verdict has to say so

and what only looks like one, which no verdict `hang` may follow:

    long     H51  a kernel of half the time of suspicion
    uneven   N16  one rank's device takes a second longer, again and again
    graph    N12  steps that replay a CUDA graph

Verdicts: `exact` (this rank alone is named), `undecidable` (candidates, and it is among them),
`missed`, `wrong`; for healthy jobs `silent` or `false`. `wrong`, `false` and `missed` fail it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.cuda import environment as cuda
from tests.support import report
from tests.support.launchers import Forkrun, agent_pids, job_environment, kill_all

WORKER = Path(__file__).with_name("device_worker.py")
HANGS = {"kernel": "H50", "ddp": "H50", "async": "H50", "pipe": "H50", "inner": "H50", "event": "H52", "lost": "H53", "fatal": "H53", "sync": "H59"}
HEALTHY = {"long": "H51", "uneven": "N16", "graph": "N12"}
ENDLESS_SEC = 3600
LIBRARY = WORKER.parents[2] / "python" / "reft" / "lib" / "libreft_preload.so"
DEADLINE_SEC = 120


@dataclass(frozen=True)
class Case:
    kind: str
    ranks: int
    chosen: int
    preload: bool = False

    @property
    def name(self) -> str:
        return f"{(HANGS | HEALTHY)[self.kind]} {self.kind} {self.ranks} r{self.chosen}"

    @property
    def class_wanted(self) -> str:
        """"" for any: where a rank has not begun the op, its stack says why."""
        if self.kind == "fatal":  # or of the hang, if the watchdog takes its time
            return "device|device_failed"
        if self.kind == "sync":
            return "waits_for_device" if self.preload else ""
        return "device_failed" if self.kind == "lost" else "device_behind"


@dataclass
class Outcome:
    result: str
    seconds: float = 0.0
    text: str = ""


def cases(worlds: list[int], preload: bool) -> list[Case]:
    """Each kind with the first, a middle and the last rank; what needs a third rank has one."""
    found = []
    for kind in HANGS | HEALTHY:
        for ranks in worlds:
            if kind == "inner" and ranks < 3:
                continue
            # The last rank of a pipeline sends to no rank.
            last = ranks - 2 if kind == "pipe" else ranks - 1
            chosen = {0, last // 2, last} if kind in HANGS else {last}
            found += [Case(kind, ranks, one, preload) for one in sorted(chosen)]
    return found


class Campaign:
    """Runs jobs one after the other.

    Args:
        suspect_sec: REFT_HANG_SUSPECT_SEC of the jobs.
        preload: with libreft_preload.so.
    """

    def __init__(self, worlds: list[int], suspect_sec: int, preload: bool) -> None:
        self.suspect_sec = suspect_sec
        self._environment = cuda.environment(max(worlds))
        if preload:
            first = [str(LIBRARY), *filter(None, [self._environment.get("LD_PRELOAD")])]
            self._environment["LD_PRELOAD"] = ":".join(first)
        self._forkrun = Forkrun(self._environment)

    def run(self, case: Case) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            try:
                return self._run(case, folder)
            finally:
                self._forkrun.kill()
                kill_all(agent_pids(folder / "run"))

    def _run(self, case: Case, folder: Path) -> Outcome:
        own = job_environment(folder, REFT_HANG_SUSPECT_SEC=str(self.suspect_sec))
        if case.kind == "lost":  # else NCCL's watchdog ends the rank: that is a crash
            own |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
        paths = [own["PYTHONPATH"], *filter(None, [self._environment.get("PYTHONPATH")])]
        seconds = ENDLESS_SEC if case.kind in HANGS else self.suspect_sec // 2
        steps = 1 << 30 if case.kind in ("lost", "fatal") else 40
        words = [str(WORKER), case.kind, str(case.chosen), str(seconds), str(steps)]
        log = folder / "said"
        environment = own | self._environment | {"PYTHONPATH": ":".join(paths)}
        self._forkrun.start(words, environment, log, case.ranks, 0)
        deadline = time.monotonic() + DEADLINE_SEC
        begun = 0.0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if not begun and "injected" in said_in(log):
                begun = time.monotonic()
            if verdict := first_verdict(folder):
                return judge(case, verdict, time.monotonic() - begun)
            if (code := self._forkrun.poll()) is not None:
                said = said_in(log)
                whole = code == 0 and said.count("trained to the end") == case.ranks
                return Outcome("silent" if whole and case.kind in HEALTHY else "missed", text=f"{said[-2000:]}exit code {code}")
        return Outcome("missed", text=said_in(log)[-2000:])

    def close(self) -> None:
        self._forkrun.abort()


def said_in(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def first_verdict(folder: Path) -> dict[str, Any] | None:
    """The text of each is written after its JSON."""
    texts = sorted((folder / "run").glob("*/node-*/verdicts/*.txt"))
    return dict(json.loads(texts[0].with_suffix(".json").read_bytes())) if texts else None


def judge(case: Case, verdict: dict[str, Any], seconds: float) -> Outcome:
    named = [culprit["rank"] for culprit in verdict["culprits"]]
    candidates = [culprit["rank"] for culprit in verdict["candidates"]]
    if case.kind in HEALTHY:
        result = "false"
    elif named == [case.chosen] and verdict["class"] in (case.class_wanted or verdict["class"]).split("|"):
        result = "exact"
    elif named:
        result = "wrong"
    else:
        result = "undecidable" if case.chosen in candidates else "missed"
    return Outcome(result, seconds, verdict["screen"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--suspect", type=int, default=4)
    parser.add_argument("--preload", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if why := cuda.missing():
        print(why)
        return 1
    chosen = [case for case in cases(args.ranks, args.preload) if re.search(args.only, case.name)]
    campaign = Campaign(args.ranks, args.suspect, args.preload)
    results: Counter[str] = Counter()
    times = []
    try:
        for case in chosen:
            outcome = campaign.run(case)
            results[outcome.result] += 1
            if outcome.result == "exact":
                times.append(outcome.seconds)
            print(f"{case.name:24} {outcome.result:12} {outcome.seconds:6.1f} s", flush=True)
            if args.verbose or outcome.result in ("wrong", "false", "missed"):
                print(outcome.text, flush=True)
    finally:
        campaign.close()
    failed = results["wrong"] + results["false"] + results["missed"]
    hangs = sum(case.kind in HANGS for case in chosen)
    metrics = {name: report.metric(results[name], "cases") for name in
               ("exact", "undecidable", "missed", "wrong", "silent", "false")}  # fmt: skip
    if hangs:
        metrics["right"] = report.metric(results["exact"] / hangs, "", 0, ">= 0.95", results["exact"] >= 0.95 * hangs)
    if times:
        metrics["time_to_verdict"] = report.metric(report.median(times), "s", report.mad(times))
    report.write(args.json, "fault device", metrics, len(chosen), failed, 0, [])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
