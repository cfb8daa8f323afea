"""What tools/dev makes of test reports and of wheels."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools.devtools import build, results
from tools.devtools.results import Counts

FAILURE = '<failure message="AssertionError">E   assert 1 == 2</failure>'
ERROR = '<error message="teardown">E   OSError</error>'


def report(path: Path, **cases: str) -> Path:
    """Writes a JUnit report as pytest does: name of a case -> its elements, "" if it passed."""
    text = "".join(
        f'<testcase classname="m" name="{n}">{inner}</testcase>' for n, inner in cases.items()
    )
    failures, errors, skipped = (text.count(f"<{tag}") for tag in ("failure", "error", "skipped"))
    path.write_text(
        f'<testsuites><testsuite tests="{len(cases)}" failures="{failures}" errors="{errors}" '
        f'skipped="{skipped}">{text}</testsuite></testsuites>'
    )
    return path


def add(counts: Counts, first: Path, code: int, again: Path | None = None) -> None:
    results.junit(counts, "python", first, code, time.monotonic(), again)


def test_a_case_that_needed_a_second_try_is_in_the_last_ten_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counts()
    first = report(tmp_path / "1.xml", steady="", shaky=FAILURE)
    add(counts, first, 1, report(tmp_path / "2.xml", shaky=""))
    counts.add("later stage", 5, 0, 0, time.monotonic())
    capsys.readouterr()
    assert counts.finish() == 0
    assert (counts.passed, counts.failed) == (7, 0)
    assert "needed a second try: python: m::shaky" in capsys.readouterr().out.splitlines()[-10:]


def test_the_slowest_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"tests.unit.test_a": 59.0, "tests.test_b": 100.0, "tests.test_c": 250.0}
    text = "".join(f'<testcase classname="{name}" name="x" time="{took}"/>' for name, took in cases.items())
    path = tmp_path / "1.xml"
    path.write_text(f'<testsuites><testsuite tests="3">{text * 2}</testsuite></testsuites>')
    counts = Counts()
    add(counts, path, 0)
    counts.finish()
    assert "slowest files: test_c 500 s, test_b 200 s, test_a 118 s\n" in capsys.readouterr().out


def test_failing_twice_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts()
    first = report(tmp_path / "1.xml", steady="", wrong=FAILURE)
    add(counts, first, 1, report(tmp_path / "2.xml", wrong=FAILURE))
    assert counts.finish() == 1
    out = capsys.readouterr().out
    assert (counts.passed, counts.failed, counts.second_try) == (1, 1, [])
    assert "-- python: m::wrong" in out and "failed: python" in out and "second try" not in out


def test_a_case_without_a_second_try_has_failed(tmp_path: Path) -> None:
    """As one marked `exact`, or one that the second run skipped."""
    counts = Counts()
    first = report(tmp_path / "1.xml", exact=FAILURE, shaky=FAILURE)
    add(counts, first, 1, report(tmp_path / "2.xml", shaky="", exact="<skipped/>"))
    assert counts.failed == 1 and counts.finish() == 1
    assert counts.second_try == ["python: m::shaky"]


def test_a_case_that_failed_and_could_not_clean_up_is_tried_again_as_one(tmp_path: Path) -> None:
    counts = Counts()
    add(
        counts,
        report(tmp_path / "1.xml", shaky=FAILURE + ERROR),
        1,
        report(tmp_path / "2.xml", shaky=""),
    )
    assert (counts.passed, counts.failed, counts.second_try) == (1, 0, ["python: m::shaky"])


def test_a_failure_that_no_report_explains_counts(tmp_path: Path) -> None:
    for case in ({}, {"fine": ""}):
        counts = Counts()
        path = report(tmp_path / "1.xml", **case) if case else tmp_path / "missing.xml"
        add(counts, path, 3)
        assert counts.failed == 1 and counts.finish() == 1


def test_a_run_of_nothing_is_no_success() -> None:
    assert Counts().finish() == 1


def test_what_is_too_late_to_begin_counts_as_skipped_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = Counts(passed=1, latest_start=time.monotonic() + 1000)
    assert counts.in_time("asan")
    counts.latest_start = time.monotonic() - 1
    assert not counts.in_time("tsan") and not counts.in_time("fuzz")
    assert counts.finish() == 0
    *_, named, last = capsys.readouterr().out.splitlines()
    assert named == "skipped, because this machine is too slow for them: tsan, fuzz"
    assert last == "1 passed, 0 failed, 2 skipped"


def test_cases_that_began_too_late_are_counted_in_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts()
    late = f'<skipped message="{results.TOO_LATE}"/>'
    add(counts, report(tmp_path / "1.xml", fine="", late=late, later=late, absent='<skipped message="no GPU"/>'), 0)
    assert counts.finish() == 0
    *_, named, last = capsys.readouterr().out.splitlines()
    assert named == "skipped, because this machine is too slow for them: 2 cases of python"
    assert last == "1 passed, 0 failed, 3 skipped"


def test_many_second_tries_leave_the_counts_in_sight(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts(passed=40, second_try=[f"python: m::case{i}" for i in range(30)])
    assert counts.finish() == 0
    last = capsys.readouterr().out.splitlines()[-10:]
    assert last[-1].startswith("40 passed") and "24 more that needed a second try" in last[-2]
    assert sum("needed a second try: " in line for line in last) == 6


WHEEL = [*build.WHEEL_FILES, "reft/_C.cpython-311-x86_64-linux-gnu.so", "reft-0.1.0.dist-info/METADATA",
         "reft-0.1.0.dist-info/licenses/LICENSE", "reft-0.1.0.dist-info/licenses/THIRD_PARTY_NOTICES"]  # fmt: skip


def test_a_wheel_of_the_product_alone_is_fine() -> None:
    assert build.wrong_in_wheel(WHEEL) == ""


def test_a_wheel_without_its_agent_or_with_tests_is_refused() -> None:
    assert "reft/bin/reft-agent" in build.wrong_in_wheel([n for n in WHEEL if "agent" not in n])
    assert build.wrong_in_wheel(WHEEL[:-1]) == "missing: THIRD_PARTY_NOTICES"
    assert "tests/x.py" in build.wrong_in_wheel([*WHEEL, "tests/x.py"])
    assert "reft/lib/libreft.so" in build.wrong_in_wheel([*WHEEL, "reft/lib/libreft.so"])


def test_the_end_of_the_log_counts_the_failed_cases_of_each_file(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [f"-- python: tests.test_a::case{i}\n    E    wrong" for i in range(6)]
    counts = Counts(failed=7, failures=[*cases, "-- tsan: agent.Suite.Case::agent.Suite.Case"])
    assert counts.finish() == 1
    assert "failed by file: python: tests.test_a 6, tsan: agent.Suite.Case 1" in capsys.readouterr().out
