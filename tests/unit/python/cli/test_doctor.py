"""What `reft doctor` makes of the notes of a running job's ranks."""

from __future__ import annotations

from typing import Any

from reft._cli.doctor import OK, WARN, notes_of


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
