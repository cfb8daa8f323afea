"""The hang campaign's own machinery: what it reads from other tools, and that no case ends it."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fault import hang_campaign, hang_peers

HERE = Path(__file__).resolve().parent


def dumped(ops: int, groups: dict[str, list[int]]) -> tuple[bytes, dict[str, list[int]]]:
    """What a rank over gloo dumps after so many all_reduces."""
    entries = [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": ("0", ""),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": number,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": "scheduled",
            "is_p2p": False,
        }
        for number in range(ops)
    ]
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries}), groups


def test_recorder(tmp_path: Path) -> None:
    everyone = {"0": [0, 1, 2]}
    dumps = {rank: dumped(3 if rank == 1 else 4, everyone) for rank in range(3)}
    plain = hang_peers._recorder("recorder", tmp_path / "plain", dumps, 3, 0.0, complete=False)
    assert plain.result == "not run" and "its analyser failed: KeyError" in plain.note
    whole = hang_peers._recorder("recorder", tmp_path / "whole", dumps, 3, 0.0, complete=True)
    assert (whole.result, whole.named, whole.candidates) == ("none", [1], [])
    del dumps[1]
    some = hang_peers._recorder("recorder", tmp_path / "some", dumps, 3, 0.0, complete=True)
    assert (some.named, some.candidates) == ([], [1]) and "2 of 3 ranks dumped" in some.note


@pytest.mark.parametrize(
    ("text", "named", "candidates"),
    [
        ("collective: all_reduce\nmissing ranks: {3, 1}\nmissing ranks: {2}", [1, 3], []),
        ("error msg: Culprit rank 2; Error type: X, Culprit rank 1; Error type: Y", [1, 2], []),
        ("because we missed FR dumps from ranks ({0, 5}) so", [], [0, 5]),
        ("No errors found for this collective entry", [], []),
    ],
)
def test_first_report(text: str, named: list[int], candidates: list[int]) -> None:
    assert hang_peers.first_report(text)[:2] == (named, candidates)


def test_absent_tools_are_named(tmp_path: Path) -> None:
    assert {hang_peers.SPY, hang_peers.LM} <= set(hang_peers.find(tmp_path).absent)


@pytest.mark.parametrize(
    ("named", "candidates", "result"),
    [
        ([2], [], "exact"),
        ([1], [], "WRONG single"),
        ([1, 2], [], "WRONG set"),
        ([], [2, 3], "undecidable"),
        ([], [], "none"),
    ],
)
def test_score_of_a_culprit(named: list[int], candidates: list[int], result: str) -> None:
    said = hang_peers.Said("tool", "none", named, candidates)
    hang_campaign.score_said(hang_campaign.Case("H00", "fault_sleep", rank=2, named=frozenset({2})), said)
    assert said.result == result


def test_score_of_a_pair() -> None:
    case = hang_campaign.Case("H41", "ops_crossed_sends", between=frozenset({0, 1}))
    pair, one = hang_peers.Said("tool", "none", [0, 1]), hang_peers.Said("tool", "none", [0])
    hang_campaign.score_said(case, pair)
    hang_campaign.score_said(case, one)
    assert (pair.result, one.result) == ("exact", "WRONG single")


class Odd:
    """Runs nothing: the first case of each runner fails, and one that hangs ends when it is aborted."""

    made = 0

    def __init__(self, *_: Any) -> None:
        Odd.made += 1
        self.launcher = self
        self.aborted = False

    def limit_sec(self, case: hang_campaign.Case) -> float:
        return 0.2

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        pass

    def run(self, case: hang_campaign.Case) -> hang_campaign.Outcome:
        if case.rank == 0:
            raise BrokenPipeError("no launcher")
        if case.rank == 1:
            end = time.monotonic() + 30
            while not self.aborted:
                assert time.monotonic() < end
                time.sleep(0.01)
            raise RuntimeError("forkrun ended")
        return hang_campaign.Outcome(case, "exact")


def test_no_case_ends_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_campaign, "Runner", Odd)
    cases = [hang_campaign.Case("H00", "fault_sleep", rank=rank) for rank in range(4)]
    outcomes = {outcome.case.rank: outcome for outcome in hang_campaign.run_all(cases, tmp_path, 2.5, 1)}
    assert [outcomes[rank].result for rank in range(4)] == ["campaign failed", "campaign failed", "exact", "exact"]
    assert "forkrun ended" in outcomes[1].problem
    assert Odd.made == 3  # each failure gets the next case a new launcher


def test_resume(tmp_path: Path) -> None:
    file = tmp_path / "hang.json"
    case = next(case for case in hang_campaign.matrix() if not case.healthy)
    said = hang_peers.Said("py-spy", "none", stacks=4, frame_seen=True)
    outcome = hang_campaign.Outcome(case, "exact", True, named=[0], after_sec=1.5, beside=[said])
    args = argparse.Namespace(json=str(file), beside=True, suspect=2.5, seed=1)
    hang_campaign.conclude([outcome], args, 1.0, quiet=True)
    assert hang_campaign.resumed(str(file)) == [outcome]
    assert any("py-spy" in line for line in json.loads(file.read_text())["beside"])
    campaign = [sys.executable, str(HERE / "hang_campaign.py"), "--list", "--resume", str(file)]
    left = subprocess.run(campaign, capture_output=True, text=True, check=True).stdout.split()
    assert case.name not in left and len(left) == len(hang_campaign.matrix()) - 1
