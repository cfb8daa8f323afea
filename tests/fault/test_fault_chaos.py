"""The chaos campaign's short form; and its judge, which must see a death and a result that
differs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from tests.fault import chaos_campaign
from tests.fault.chaos_campaign import KINDS, WORLD, Run, draw, problems, same_bits

pytestmark = pytest.mark.exact
CAMPAIGN = Path(__file__).resolve().parent / "chaos_campaign.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("vaults", ["memory", "files"])
def test_training_does_not_notice_what_happens_meanwhile(tmp_path: Path, vaults: str) -> None:
    result = tmp_path / "chaos.json"
    command = [sys.executable, str(CAMPAIGN), "--steps", "120", "--seed", "1"]
    done = subprocess.run(
        [*command, "--vaults", vaults, "--json", str(result)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "bit-equal to gloo: yes\ndeaths: 0\nattempts: 1\n" in done.stdout
    written = json.loads(result.read_text())
    happened = {kind for kind, times in written["kinds"].items() if times}
    assert happened == set(KINDS) - set(written["impossible"])
    assert written["metrics"]["commits_seen"]["value"] >= 30, done.stdout


def of_rank(kind: str, result: str = "done") -> dict[str, object]:
    return {"rank": 0, "step": 9, "kind": kind, "result": result}


def run() -> Run:
    """One that nothing is wrong with."""
    finals = dict.fromkeys(range(WORLD), "ab")
    return Run(finals=finals, record=[of_rank("malloc"), of_rank("churn")])


def judged(spoil: Callable[[Run], object]) -> list[str]:
    """What the judge finds if the run under reft is spoilt."""
    reft = run()
    spoil(reft)
    return problems(run(), reft, ["malloc", "churn", "disk_full"], ["disk_full"])


def test_the_judge_passes_what_is_right() -> None:
    assert judged(lambda reft: None) == []


def test_the_judge_sees_a_result_that_differs() -> None:
    def flip(reft: Run) -> None:
        reft.finals[1] = "ac"
        assert not same_bits(run(), reft)

    assert judged(flip) == ["the results differ"]


def test_the_judge_sees_a_death() -> None:
    def die(reft: Run) -> None:
        reft.code = 1
        del reft.finals[0]

    assert judged(die) == [
        "reft: exit status 1",
        "reft: 1 deaths, 1 attempts",
        "the results differ",
    ]


def test_the_judge_counts_a_restart_as_deaths() -> None:
    assert judged(lambda reft: setattr(reft, "attempts", 2)) == ["reft: 2 deaths, 2 attempts"]


def test_the_judge_sees_an_act_that_never_happened() -> None:
    def skip(reft: Run) -> None:
        reft.record[0] = of_rank("malloc", "skipped: no agent listened within 10 s")

    assert judged(skip) == ["never happened: malloc"]


@pytest.mark.parametrize("words", chaos_campaign.ALARMING)
def test_the_judge_reads_what_was_printed(words: str) -> None:
    assert judged(lambda reft: setattr(reft, "said", f"1 {words} 2"))
    assert judged(lambda reft: setattr(reft, "agents_said", f"1 {words} 2"))


def test_the_judge_sees_a_hang_a_failed_act_and_a_lost_agent() -> None:
    def spoil(reft: Run) -> None:
        reft.code, reft.sec, reft.lost = None, 90.0, {17}
        reft.record.append(of_rank("churn", "failed: RuntimeError: no"))

    assert judged(spoil) == [
        "reft: hung, ended after 90 s",
        "reft: rank 0 step 9 churn failed: RuntimeError: no",
        "agents that ended by themselves: [17]",
    ]


def test_acts_follow_from_the_seed_and_all_kinds_take_part() -> None:
    for seed in range(20):
        acts = draw(seed, 120, KINDS)
        assert acts == draw(seed, 120, KINDS) != draw(seed + 1, 120, KINDS)
        assert {act.kind for act in acts} == set(KINDS)
        assert len({act.step for act in acts}) == len(acts)
        assert all(1 < act.step <= act.end <= 120 for act in acts)
    with pytest.raises(ValueError, match="too few"):
        draw(1, 20, KINDS)
