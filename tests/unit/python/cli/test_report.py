"""What `reft report` prints of a job that has not come far enough."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from reft._cli import report, timeline, vaults


def run(monkeypatch: pytest.MonkeyPatch, problems: list[str], *arguments: str) -> tuple[int, str]:
    """Exit code and stdout; one rank, without a complete step."""
    rank = timeline.Rank(0, [], [], [], {tier: [] for tier in timeline.TIERS}, [], [], [])
    monkeypatch.setattr(report, "_read", lambda found: ("job", [rank], problems))
    monkeypatch.setattr(vaults, "find", lambda *where: [])
    done = CliRunner().invoke(report.command, [*arguments])
    return done.exit_code, done.stdout


def test_before_two_steps_there_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run(monkeypatch, [], "--json")
    assert code == 3 and json.loads(printed) == {"error": "no rank has completed two steps yet"}
    assert run(monkeypatch, []) == (3, "")


def test_a_vault_that_cannot_be_read_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run(monkeypatch, ["rank 1: damaged"], "--json")
    assert code == 1
    assert json.loads(printed) == {"job": "job", "ranks": [], "problems": ["rank 1: damaged"]}
