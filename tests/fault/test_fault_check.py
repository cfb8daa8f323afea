"""The check campaign's short form; and that it finds a check that decides wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from reft._check import judge, plan
from reft._check.evidence import (
    DEAD,
    LINK,
    NIC,
    NODE,
    SLOW,
    Fault,
    Verdict,
    link_unit,
    nic_unit,
    node_unit,
)
from tests.fault.check_campaign import (
    EXACT,
    MISSED,
    UNDECIDABLE,
    UNSEEN,
    WRONGLY,
    Case,
    Planted,
    assess,
    cases,
    conduct,
    hidden_behind,
)

CAMPAIGN = Path(__file__).resolve().parent / "check_campaign.py"


def campaign(result: Path, *options: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *options, "--json", str(result)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return json.loads(result.read_text())


@pytest.mark.timeout(300)
def test_check_campaign(tmp_path: Path) -> None:
    written = campaign(tmp_path / "check.json", "--nodes", "2", "3", "4", "5", "8", "16", "--doubles", "120", "--seed", "5")
    metrics = {name: one["value"] for name, one in written["metrics"].items()}
    assert metrics["wrong"] == metrics["missed"] == metrics["healthy_excluded"] == 0
    assert metrics["exact_share_from_4_nodes"] >= 0.99
    assert written["cases"]["run"] > 1500


@pytest.mark.timeout(300)
def test_without_noise_every_fault_is_exact_in_the_rounds_that_are_planned(tmp_path: Path) -> None:
    written = campaign(tmp_path / "check.json", "--nodes", "4", "5", "6", "--doubles", "300", "--noise", "0")
    assert written["metrics"]["exact"]["value"] == written["cases"]["run"]
    assert written["metrics"]["beyond_planned_rounds"]["value"] == 0


@pytest.mark.timeout(300)
def test_rails_are_judged_each_by_itself(tmp_path: Path) -> None:
    written = campaign(tmp_path / "check.json", "--nodes", "4", "6", "--rails", "2", "--doubles", "100", "--seed", "3")
    assert written["metrics"]["exact_share_from_4_nodes"]["value"] >= 0.99


@pytest.mark.timeout(300)
def test_a_short_plan_finds_all_nodes_and_cards(tmp_path: Path) -> None:
    written = campaign(tmp_path / "check.json", "--nodes", "5", "8", "--quick", "--doubles", "100", "--seed", "4")
    assert written["metrics"]["exact_share_from_4_nodes"]["value"] >= 0.99


def test_cases_are_all_single_faults_and_follow_from_the_seed() -> None:
    drawn = cases(5, 1, 30, 9)
    assert drawn == cases(5, 1, 30, 9) != cases(5, 1, 30, 8)
    singles = [faults for _, faults in drawn if len(faults) == 1]
    assert len(singles) == 3 * (5 + 5 + 10) and len(drawn) == len(singles) + 30
    numbers = dict(cases(3, 1, None, 0))
    assert len(numbers) == 27 + 27 * 26 // 2 - 9 * 3, "two faults are of two units"


def case(*planted: Planted, nodes: int = 4) -> Case:
    return Case(nodes, 1, 0, planted)


def named(*units: Any, **more: Any) -> Verdict:
    faults = tuple(Fault(unit, SLOW, "") for unit in units)
    exclude = tuple(sorted({unit.node for unit in units if unit.kind != LINK}))
    return Verdict(**{"faults": faults, "exclude": exclude, **more})


CARD, OTHER, WIRE = nic_unit(1, 0), nic_unit(2, 0), link_unit(0, 3, 0)


def test_the_campaign_tells_right_from_wrong() -> None:
    both = case(Planted(CARD, SLOW, 0.3), Planted(WIRE, DEAD))
    assert assess(both, named(CARD, WIRE)) == (EXACT, [])
    assert assess(both, named(CARD))[0] == MISSED
    assert assess(both, named(CARD, WIRE, OTHER))[0] == WRONGLY
    right, wrong = (Fault(WIRE, DEAD, ""),), (Fault(OTHER, DEAD, ""),)
    assert assess(both, named(CARD, between=((wrong, right),)))[0] == UNDECIDABLE
    assert assess(both, named(CARD, between=((wrong, wrong),)))[0] == WRONGLY
    assert "healthy" in assess(both, named(CARD, WIRE, exclude=(1, 2)))[1][0]
    assert "not excluded" in assess(both, named(CARD, WIRE, exclude=()))[1][0]
    assert assess(case(Planted(CARD, SLOW, 0.5), nodes=2), named())[0] == UNSEEN
    assert assess(case(Planted(CARD, DEAD), nodes=2), named())[0] == MISSED
    assert assess(both, named(CARD), measured={WIRE})[0] == MISSED
    assert assess(both, named(CARD), measured=set())[0] == EXACT


def test_only_what_goes_through_another_fault_is_hidden() -> None:
    link, own = Planted(link_unit(1, 3, 0), DEAD), Planted(node_unit(1), SLOW, 0.3, where="all")
    assert hidden_behind(link, Planted(CARD, DEAD), 4) and not hidden_behind(link, Planted(CARD, SLOW), 4)
    assert hidden_behind(replace(link, how=SLOW), Planted(CARD, SLOW), 4)
    assert not hidden_behind(link, Planted(OTHER, DEAD), 4)
    assert hidden_behind(Planted(CARD, SLOW), own, 4) and not hidden_behind(Planted(CARD, DEAD), own, 4)
    assert not hidden_behind(Planted(CARD, SLOW), replace(own, where="gpu"), 4)
    assert not hidden_behind(own, Planted(CARD, DEAD), 4)
    assert not hidden_behind(Planted(CARD, SLOW), Planted(OTHER, DEAD), 4), "two other partners"
    assert hidden_behind(Planted(CARD, SLOW), Planted(nic_unit(0, 0), DEAD), 2), "the only partner"
    assert hidden_behind(Planted(CARD, SLOW), Planted(node_unit(0), DEAD), 2)
    assert not hidden_behind(Planted(CARD, SLOW), Planted(node_unit(0), DEAD), 3)


def verdicts_of(kind: str, nodes: int) -> set[str]:
    found = set()
    for number, faults in cases(nodes, 1, 0, 1):
        if faults[0][0].kind == kind:
            found.add(conduct((nodes, 1, number, faults, 1, 1.0, False))["result"])
    return found


def test_a_judge_that_takes_a_card_for_links_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts_of(NIC, 5) == verdicts_of(LINK, 5) == verdicts_of(NODE, 5) == {EXACT}
    monkeypatch.setattr(judge._Rail, "_card", lambda self, node: "")
    assert verdicts_of(NIC, 5) != {EXACT}


def test_healthy_nodes_measure_in_as_few_rounds_as_planned() -> None:
    for nodes in (2, 3, 7, 8):
        result = conduct((nodes, 1, -1, (), 1, 0.0, False))
        assert (result["result"], result["rounds"], result["more_rounds"]) == (EXACT, plan.most_rounds(nodes)[0], 0)
