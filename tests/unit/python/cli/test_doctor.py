"""What `reft doctor` makes of the notes of a running job's ranks, and of a place for vaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reft._cli.doctor import FAIL, OK, WARN, check_vault_dir, notes_of


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
