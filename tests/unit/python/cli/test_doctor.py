"""What `reft doctor` makes of the notes of a running job's ranks, and of settings: it fails where
the ranks would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reft import _C
from reft._cli.doctor import (
    FAIL,
    OK,
    WARN,
    Finding,
    check_environment,
    check_run_dir,
    check_secret,
    check_vault_dir,
    copies_of,
    notes_of,
)


def status(verdict: int, *notes: list[str]) -> dict[str, Any]:
    ranks = [{"rank": i, "notes": list(notes), "stats": {"resume_verdict": verdict}} for i in (0, 1)]
    return {"ranks": ranks}


def test_a_verified_resume_is_no_warning() -> None:
    note = ["resume:", "step 20", "", "step 20 was computed again from step 19 and is bit-identical"]
    (found,) = notes_of("train", status(1, note))
    assert (found.result, found.check) == (OK, "train")
    assert found.text == (
        "ranks 0, 1: resume: step 20: step 20 was computed again from step 19 and is bit-identical"
    )


def test_an_inexact_resume_is_one_and_so_is_each_difference() -> None:
    notes = [
        ["resume:", "step 20", "", "step 20 was computed again from step 19 and DIFFERS"],
        ["not verified:", "main:total", "variable", "was 1.5, is 0.0"],
    ]
    first, second = notes_of("train", status(2, *notes))
    assert first.result == second.result == WARN
    assert second.text == "ranks 0, 1: not verified: main:total (variable): was 1.5, is 0.0"


def test_copies_that_no_node_keeps_are_a_warning() -> None:
    mesh = {"copies": [2, 3], "connected": 1, "sources": 1, "keepers": 1, "problem": ""}
    (kept,) = copies_of("train", {"mesh": mesh})
    assert kept.result == OK and "copies of ranks 2" in kept.text and "encrypted" not in kept.text, kept
    (kept,) = copies_of("train", {"mesh": {**mesh, "tls": True}})
    assert kept.text.endswith("of other nodes, over encrypted connections"), kept
    alone = {**mesh, "connected": 0, "keepers": 0, "problem": "Connection refused"}
    _, reach, missing = copies_of("train", {"mesh": alone})
    assert reach.result == missing.result == WARN
    assert "Connection refused" in reach.text and "its loss is not survived" in missing.text
    assert copies_of("train", {"mesh": None}) == copies_of("train", {}) == []


def test_a_place_whose_file_system_cannot_hold_vaults_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("/proc", "/proc/self/vaults"):  # the second one is not there
        monkeypatch.setenv("REFT_VAULT_DIR", place)
        (found,) = check_vault_dir()
        assert found.result == FAIL and "type 0x9fa0" in found.text, found
    for place in (tmp_path, tmp_path / "vaults"):
        monkeypatch.setenv("REFT_VAULT_DIR", str(place))
        (found,) = check_vault_dir()
        assert found.result == OK, found


@pytest.mark.parametrize("exists", [True, False])
def test_a_place_that_others_could_replace_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exists: bool
) -> None:
    shared = tmp_path / "open"
    shared.mkdir()
    shared.chmod(0o777)
    place = shared / "place"
    if exists:
        place.mkdir(mode=0o700)
    monkeypatch.setenv("REFT_VAULT_DIR", str(place))

    def checked() -> list[Finding]:
        return [check_vault_dir()[-1], check_run_dir(str(place))[-1]]  # a long path is a warning

    for finding in checked():
        assert finding.result == FAIL, finding
        assert finding.text == f"{place} is not safe: {shared} is writable by other users"
    shared.chmod(0o1777)  # as /tmp
    assert [finding.result for finding in checked()] == [OK, OK]


def test_the_secret_of_the_user_is_read_as_ranks_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert check_secret() == []
    path = tmp_path / "secret"
    monkeypatch.setenv("REFT_JOB_SECRET_FILE", str(path))

    def fails(said: str) -> bool:
        (finding,) = check_secret()
        return finding.result == FAIL and said in finding.text and bool(finding.todo)

    assert fails("No such file")
    path.write_bytes(b"x" * 31)
    path.chmod(0o600)
    assert fails("31 bytes")
    path.write_bytes(b"x" * 32)
    path.chmod(0o644)
    assert fails("mode 0644")
    path.chmod(0o600)
    (finding,) = check_secret()
    assert finding.result == OK and "xx" not in finding.text


def test_faults_are_parsed_and_do_not_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFT_FAULT", "1:x:capture:kill")
    (finding,) = check_environment()
    assert finding.result == FAIL and finding.text.startswith("REFT_FAULT is '1:x:capture:kill'")
    monkeypatch.setenv("REFT_FAULT", "*:*:capture:kill")
    (finding,) = check_environment()
    assert finding.result == OK
    _C.fault_point("capture", 1)


@pytest.mark.parametrize(
    ("value", "wrong"), [("reft.snapshot=debug,bogus", "bogus"), ("error,reft.python=trace", "")]
)
def test_log_levels_are_parsed_as_ranks_do(
    monkeypatch: pytest.MonkeyPatch, value: str, wrong: str
) -> None:
    monkeypatch.setenv("REFT_LOG", value)
    (finding,) = check_environment()
    assert finding.result == (WARN if wrong else OK)
    if wrong:
        assert finding.text.startswith(f"REFT_LOG has '{wrong}'; allowed: ")
