"""What `reft drill` shows of a run that has failed, and of a lost node."""

from __future__ import annotations

from typing import Any

import pytest

from reft._cli import drill
from reft._cli.drill_verdict import Run


def test_the_last_lines_are_those_of_the_ranks() -> None:
    said = """reft: resuming at step 2
Traceback (most recent call last):
RuntimeError: the output folder exists
W1126 12:20:26.001 sending SIGTERM
E1126 12:20:26.002 failed (exitcode: 1) local_rank: 0 (pid: 5059) of binary: python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    lines = drill.last_lines(said).splitlines()
    assert lines[-1] == "  | RuntimeError: the output folder exists" and len(lines) == 3


def test_without_the_launcher_s_summary_all_lines_count() -> None:
    assert drill.last_lines("a\nb\n") == "  | a\n  | b"


@pytest.mark.parametrize(
    ("protection", "private", "weakness", "text"),
    [
        ("", [], "", "not covered (REFT_SNAPSHOT_PROTECTION=none)"),
        ("arc", [], "", "with arc, what a lost node had comes back from the others, where"),
        ("arc", ["m0.mean"], "", "1 tensor (buffers and hyperparameters, first: m0.mean) would be another"),
        ("arc", [], "one node has all", "not survived in spite of arc: one node has all"),
    ],
)
def test_what_a_lost_node_costs_follows_the_protection(
    monkeypatch: pytest.MonkeyPatch, protection: str, private: list[str], weakness: str, text: str
) -> None:
    monkeypatch.setenv("REFT_SNAPSHOT_PROTECTION", protection)
    last: dict[str, Any] = {"shared": 4, "private": private, "node_loss": weakness}
    assert text in drill._lost_node(last, Run({}))["text"]
