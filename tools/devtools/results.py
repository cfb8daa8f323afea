"""Results of test stages: counts, what failed, and which cases passed at the second try only."""

from __future__ import annotations

import math
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# How much of the failures the end of the log repeats: a log that was cut still has its end.
SHOWN_FAILURES, SHOWN_ERRORS, SHOWN_LINES = 5, 12, 20
SHOWN_FILES = 20
# The last lines of a run have its second tries in them: they take no more lines than this.
SHOWN_SECOND_TRIES = 6
# Stages that took at least this long have their time in the last lines.
SHOWN_SECONDS = 10
# Of the files of a stage, those whose cases took longest together; several run at a time.
SHOWN_SLOW_FILES, SHOWN_SLOW_SECONDS = 12, 60
# Elements of a case in a JUnit report that did not simply pass.
OUTCOMES = {"failure", "error", "skipped"}
# Why a case was skipped that had not begun in time.
TOO_LATE = "this machine is too slow for it"


@dataclass
class Counts:
    """What ran.

    Attributes:
        names: stages in which something failed.
        failures: the end of the output of each failed case.
        second_try: cases that failed and passed when they ran once more, alone.
        times: what each stage took that was not short.
        slow_files: the files whose cases took longest.
        latest_start: when no stage begins any more, as of `time.monotonic()`.
        too_late: stages that were skipped for that, and how many cases of others.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    names: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    second_try: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)
    slow_files: list[str] = field(default_factory=list)
    latest_start: float = math.inf
    too_late: list[str] = field(default_factory=list)

    def add(self, stage: str, passed: int, failed: int, skipped: int, started: float) -> None:
        self.passed += passed
        self.failed += failed
        self.skipped += skipped
        if failed:
            self.names.append(stage)
        counted = f"{passed} passed, {failed} failed, {skipped} skipped"
        print(f"== {stage}: {counted} in {self.took(stage, started):.0f} s", flush=True)

    def took(self, stage: str, started: float) -> float:
        """Keeps the time of a stage for the end of the log; returns it in seconds."""
        seconds = time.monotonic() - started
        if seconds >= SHOWN_SECONDS:
            self.times.append(f"{stage} {seconds:.0f} s")
        return seconds

    def in_time(self, stage: str) -> bool:
        """Whether a stage may begin now. If not, it counts as skipped."""
        if time.monotonic() < self.latest_start:
            return True
        self.too_late.append(stage)
        self.add(stage, 0, 0, 1, time.monotonic())
        return False

    def add_exit_code(self, stage: str, code: int, started: float) -> None:
        self.add(stage, int(code == 0), int(code != 0), 0, started)

    def by_file(self) -> str:
        """How many cases of each file failed, of as many files as the end of the log has room for."""
        # "-- python: tests.unit.test_a::test_b", "-- tsan: agent.Suite.Case::agent.Suite.Case"
        files = Counter(text.partition("\n")[0][3:].partition("::")[0] for text in self.failures)
        shown = [f"{file} {count}" for file, count in files.most_common(SHOWN_FILES)]
        left = len(files) - len(shown)
        return ", ".join([*shown, *([f"and {left} more files"] if left else [])])

    def finish(self) -> int:
        """Prints the end of the log; returns the exit code.

        The second tries are among the last ten lines.
        """
        if self.slow_files:
            print(f"slowest files: {', '.join(self.slow_files)}")
        for failure in self.failures[:SHOWN_FAILURES]:
            print(failure)
        if len(self.failures) > SHOWN_FAILURES:
            print(f"(and {len(self.failures) - SHOWN_FAILURES} more failed cases)")
            print(f"failed by file: {self.by_file()}")
        if self.names:
            print(f"failed: {', '.join(self.names)}")
        shown = self.second_try[:SHOWN_SECOND_TRIES]
        for name in shown:
            print(f"needed a second try: {name}")
        if len(self.second_try) > len(shown):
            print(f"(and {len(self.second_try) - len(shown)} more that needed a second try)")
        if self.too_late:
            print(f"skipped, because this machine is too slow for them: {', '.join(self.too_late)}")
        if self.times:
            print(f"times: {', '.join(self.times)}")
        counted = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        print(counted, flush=True)
        return 1 if self.failed or not self.passed else 0


def junit(
    counts: Counts, stage: str, report: Path, code: int, started: float, again: Path | None = None
) -> None:
    """Adds the cases of a JUnit report.

    No report, or a failed run whose report has no failed case, counts as one failure.

    Args:
        code: exit code of the run that wrote `report`.
        again: report of a second try of the failed cases. A case that passed in it counts as
            passed and goes to `counts.second_try`; one that failed in it has failed.
    """
    total = failed = skipped = retried = late = 0
    second = passed_cases(again) if again else set()
    seconds: defaultdict[str, float] = defaultdict(float)
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            total += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0)) + int(suite.get("disabled", 0))
            for case in suite.iter("testcase"):
                seconds[str(case.get("classname"))] += float(case.get("time") or 0)
                if broken(case) and name_of(case) in second:
                    retried += len(broken(case))
                    counts.second_try.append(f"{stage}: {name_of(case)}")
                elif broken(case):
                    counts.failures.append(shown(stage, case))
                late += any(TOO_LATE in skip.get("message", "") for skip in case.iter("skipped"))
    counts.slow_files += [
        f"{file.rpartition('.')[2]} {took:.0f} s"
        for file, took in sorted(seconds.items(), key=lambda one: -one[1])[:SHOWN_SLOW_FILES]
        if took >= SHOWN_SLOW_SECONDS
    ]
    if late:
        counts.too_late.append(f"{late} cases of {stage}")
    unexplained = int(code != 0 and not failed)
    failed -= retried
    passed = max(0, total - failed - skipped)
    counts.add(stage, passed, failed or unexplained, skipped, started)


def shown(stage: str, case: ElementTree.Element) -> str:
    """A failed case with the end of its output."""
    # CTest leaves the reason in the output of the case.
    parts = [*broken(case), *case.iter("system-out")]
    texts = [part.text or part.get("message", "") for part in parts]
    lines = "\n".join(texts).strip().splitlines()
    wrong = [line for line in lines if line.startswith("E ")]  # pytest's: what was not as expected
    return "\n    ".join(
        [f"-- {stage}: {name_of(case)}", *wrong[:SHOWN_ERRORS], *lines[-SHOWN_LINES:]]
    )


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def broken(case: ElementTree.Element) -> list[ElementTree.Element]:
    """The failures of a case: of the test itself, and of what came before or after it."""
    return [child for child in case if child.tag in ("failure", "error")]


def passed_cases(report: Path) -> set[str]:
    """Names of the cases of a JUnit report that ran and passed."""
    if not report.exists():
        return set()
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {name_of(case) for case in cases if not OUTCOMES & {child.tag for child in case}}
