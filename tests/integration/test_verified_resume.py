"""A resume computes the resumed step again, and tells the truth about it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launchers import (
    Forkrun,
    agent_pids,
    job_environment,
    kill_all,
    said_under_torchrun,
)

pytestmark = pytest.mark.exact
WORKER = Path(__file__).with_name("verification_worker.py")
_forkrun = Forkrun()


@pytest.fixture(scope="module", autouse=True)
def forkrun() -> Iterator[None]:
    yield
    _forkrun.close()


def run(
    folder: Path, ranks: int = 2, max_restarts: int = 2, under_torchrun: bool = False, **env: str
) -> str:
    environment = job_environment(folder, REFT_AGENT_LINGER_SEC="60", **env)
    if "REFT_RESUME_VERIFY" not in env:
        del environment["REFT_RESUME_VERIFY"]
    try:
        if not under_torchrun:
            log = folder / f"said-{len(list(folder.glob('said-*')))}"
            return _forkrun.run([str(WORKER)], environment, log, ranks, 180, max_restarts)
        return said_under_torchrun(WORKER, environment, ranks, max_restarts)
    finally:
        kill_all(agent_pids(folder / "run"))


def finals(said: str) -> list[str]:
    return sorted(re.findall(r"^(r\d+ final .*)$", said, re.MULTILINE))


def resumed(said: str) -> str:
    (line,) = re.findall(r"reft: (resumed at step .*)", said)
    return str(line)


def warning(said: str) -> str:
    (line,) = re.findall(r"reft: warning: (the resume is not exact.*)", said)
    return str(line)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return finals(run(tmp_path_factory.mktemp("undisturbed"), REFT_DISABLE="1"))


def test_a_resume_that_is_exact_says_so_and_is(tmp_path: Path, undisturbed: list[str]) -> None:
    said = run(tmp_path, under_torchrun=True, KILL="20", REFT_RESUME_VERIFY="always")
    assert "verifying the resume: step 20 is computed again" in said
    assert resumed(said).endswith("step 20 was computed again from step 19 and is bit-identical")
    assert "reft: warning: the resume" not in said
    assert finals(said) == undisturbed


CUT_OFF = "0:20:early_copy:kill"  # rank 0 dies while it copies step 20, and the step before has gone


def test_a_step_that_was_copied_in_part_verifies_the_one_before(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    said = run(tmp_path, REFT_FAULT=CUT_OFF, REFT_RESUME_VERIFY="always")
    assert resumed(said).endswith("; step 20 will be compared with what had been copied of it")
    assert "verifying the resume" not in said, "nothing is computed twice"
    assert re.search(
        r"reft: the resume at step 19: step 20 was computed from it and is bit-identical"
        r"( to what had been copied of it, \d+% of its bytes)?$",
        said,
        re.MULTILINE,
    )
    assert finals(said) == undisturbed


def test_a_resume_that_would_take_too_long_is_not_verified_and_says_so(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    said = run(tmp_path, KILL="20", REFT_RESUME_VERIFY="always", REFT_RESUME_VERIFY_SEC="0")
    assert "; not verified: computing 1 step again takes" in resumed(said)
    assert finals(said) == undisturbed


def test_off_verifies_nothing(tmp_path: Path, undisturbed: list[str]) -> None:
    said = run(tmp_path, KILL="20", REFT_RESUME_VERIFY="off")
    assert "verifying the resume" not in said and "computed again" not in said
    assert finals(said) == undisturbed


# What is made wrong in the restarted process → what the warning names first.
PLANTED = {
    "random": r"random state global\['(python|numpy|torch)'\]",
    "tensor": r"tensor m0\.module\.0\.weight on ranks? .*items differ, max \|Δ\|",
    "position": r"data order main<stack \d> .*yielded was 19, is 20",
    "order": r"data order main<stack \d> .*indices_drawn was -?\d+, is -?\d+",
    "variable": r"variable main:total .*was 1\.\d+, is 0\.0",
    "scheduler": r"variable scheduler\[0\]\[1\]\['last_epoch'\]",
    "optimizer": r"variable optimizer settings\[0\]\[0\]\['lr'\]",
    "hidden": r"tensor m0\.module\.0\.weight .*computed twice, it differs each time",
}


@pytest.mark.parametrize("plant", sorted(PLANTED))
def test_a_resume_that_is_wrong_is_never_called_exact(tmp_path: Path, plant: str) -> None:
    said = run(tmp_path, KILL="20", REFT_RESUME_VERIFY="always", PLANT=plant)
    assert "bit-identical" not in said
    assert resumed(said).endswith("DIFFERS, see below")
    named = warning(said)
    first = named.split("differs from the saved one: ")[1]
    assert re.match(PLANTED[plant], first), named
    assert len(named) < 1200 and os.linesep not in named


@pytest.mark.parametrize("plant", ["position", "random", "tensor", "variable"])
def test_a_wrong_resume_is_found_by_a_step_that_was_copied_in_part(
    tmp_path: Path, plant: str
) -> None:
    said = run(tmp_path, REFT_FAULT=CUT_OFF, REFT_RESUME_VERIFY="always", PLANT=plant)
    assert "bit-identical" not in said
    assert "the resume at step 19: step 20 was computed from it and DIFFERS" in said
    assert re.match(PLANTED[plant], warning(said).split("differs from the saved one: ")[1])


def test_by_default_the_first_resume_alone_is_verified(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    said = run(tmp_path, under_torchrun=True, KILL="20 30")
    first, second = re.findall(r"reft: (resumed at step .*)", said)
    assert first.startswith("resumed at step 20:") and "bit-identical" in first
    assert second.startswith("resumed at step 30:")
    assert "verified" not in second and "computed again" not in second
    assert finals(said) == undisturbed


@pytest.mark.parametrize("plant", ["killed", "raises"])
def test_a_job_that_ends_over_the_step_resumes_there_without(
    tmp_path: Path, undisturbed: list[str], plant: str
) -> None:
    said = run(tmp_path, KILL="20", PLANT=plant)
    assert "verifying the resume: step 20 is computed again" in said
    assert re.fullmatch(
        r"resumed at step 20: .*; not verified: the attempt before ended while it computed step 20"
        r" again",
        resumed(said),
    )
    assert finals(said) == undisturbed


def test_without_a_restart_left_nothing_is_risked(tmp_path: Path, undisturbed: list[str]) -> None:
    said = run(tmp_path, max_restarts=1, KILL="20")
    assert "; not verified: the launcher has no restart left" in resumed(said)
    assert finals(said) == undisturbed


def test_a_loop_may_end_in_the_step(tmp_path: Path) -> None:
    said = run(tmp_path, KILL="20", PLANT="leaves")
    assert "the script left its loop after step 19, before it had computed step 20 again" in said
    assert len(finals(said)) == 2
