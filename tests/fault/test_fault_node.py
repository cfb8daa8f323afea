"""The node campaign's short form; and what it draws and promises."""

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

from tests.fault.node_campaign import (
    ANY,
    EXACT,
    KINDS,
    REFUSED,
    REPLICA,
    SHRINK,
    SHRINKS,
    Case,
    Loss,
    draw,
    promised,
)
from tests.fault.node_shrink import Expected, Row, Rows
from tests.support.nodes import why_no_namespaces

pytestmark = pytest.mark.exact
CAMPAIGN = Path(__file__).resolve().parent / "node_campaign.py"
WHY_NOT = why_no_namespaces()
CASES = ["1", "2", "11", "33"]  # the cable, a node, the node of the store, a second loss in the restore


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
def test_node_campaign(tmp_path: Path) -> None:
    result = tmp_path / "node.json"
    options = ["--ranks", "4", "--nodes", "4", "--states", "own", "--protections", "peer", "arc+peer"]
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *options, "--seed", "7", "--only", *CASES, "--again", "3", "--json", str(result)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    written = json.loads(result.read_text())
    assert (written["cases"]["run"], written["cases"]["failed"]) == (len(CASES), 0), done.stdout
    # On a busy machine, a point is not always reached: its step is skipped for want of a slot.
    exact, untouched = (written["metrics"][name]["value"] for name in ("exact", "untouched"))
    assert exact + untouched == len(CASES) and exact >= len(CASES) - 1, done.stdout


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
def test_node_campaign_with_fewer_nodes(tmp_path: Path) -> None:
    """Node 0, with the store, and its copies; node 1, whose shards a replica has."""
    result = tmp_path / "node.json"
    options = ["--ranks", "3", "--nodes", "3", "--seed", "22", "--only", "7", "8",
               "--states", "dropout", "--protections", "arc", "peer"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *options, "--json", str(result)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    written = json.loads(result.read_text())
    assert (written["kinds"], written["cases"]["failed"]) == ({SHRINK: 2}, 0), done.stdout
    exact, untouched = (written["metrics"][name]["value"] for name in ("exact", "untouched"))
    assert exact + untouched == 2 and exact >= 1, done.stdout


@pytest.mark.timeout(300)
def test_node_campaign_without_namespaces(tmp_path: Path) -> None:
    options = ["--ranks", "4", "--nodes", "2", "--no-netns", "--states", "replicas", "--protections", "arc"]
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *options, "--seed", "7", "--only", "0"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "note: without network namespaces" in done.stdout


def test_a_case_follows_from_its_seed_and_number_alone() -> None:
    cases = [draw(3, number, 4) for number in range(300)]
    assert cases == [draw(3, number, 4) for number in range(300)]
    assert {case.kind for case in cases} == {*KINDS, SHRINK}
    assert 30 < sum(case.kind == SHRINK for case in cases) < 70
    for case in cases:
        if case.kind == SHRINK:
            assert len(case.leaving) == 1 and case.losses[0].how in SHRINKS
            assert case.promise in (EXACT, ANY, REFUSED)
            continue
        assert all(0 <= node < 4 for loss in case.losses for node in loss.nodes)
        assert all(len(set(loss.nodes)) == len(loss.nodes) for loss in case.losses)
        assert case.promise in (EXACT, REPLICA, ANY)
    assert not any(loss.how in ("cut", "power") for n in range(300) for loss in draw(3, n, 4, isolated=False).losses)
    assert not any(draw(3, number, 2).kind == "pair" for number in range(300))


def promise(kind: str, protection: str, state: str, *lost: list[int]) -> str:
    losses = [Loss(nodes, "capture", 5, start) for start, nodes in enumerate(lost)]
    return promised(Case(0, kind, protection, state, {}, losses), 4)


@pytest.mark.parametrize("state", ["replicas", "dropout", "own", "fsdp"])
def test_one_node_is_survived_with_copies(state: str) -> None:
    for protection in ("peer", "arc+peer", "aec+peer", "arc:2+peer"):
        assert promise("node", protection, state, [1]) == EXACT
        assert promise("twice", protection, state, [1], [2]) == EXACT
    assert promise("node", "none", state, [1]) == ANY
    assert promise("ranks", "none", state, [1]) == EXACT


def test_replicas_survive_as_many_nodes_as_they_store_shards_of() -> None:
    assert promise("node", "arc", "replicas", [1]) == promise("node", "aec", "replicas", [1]) == EXACT
    assert promise("node", "arc", "dropout", [1]) == REPLICA
    assert promise("node", "arc", "own", [1]) == promise("pair", "arc", "replicas", [0, 2]) == ANY
    assert promise("pair", "arc:2", "replicas", [0, 1]) == EXACT
    assert promise("pair", "arc:2+peer", "dropout", [0, 1]) == REPLICA


def test_two_nodes_are_survived_if_neither_keeps_the_others_copies() -> None:
    assert promise("pair", "peer", "own", [0, 2]) == EXACT
    assert promise("pair", "peer", "own", [1, 2]) == promise("pair", "peer", "own", [3, 0]) == ANY
    # In a restore, the copies of the first node are not there anew.
    assert promise("restore", "peer", "own", [1], [1]) == promise("restore", "peer", "own", [1], [3]) == EXACT
    assert promise("restore", "peer", "own", [1], [2]) == promise("restore", "peer", "own", [1], [0]) == ANY


def promise_to_fewer(protection: str, state: str, how: str, nodes: int = 4) -> str:
    losses = [Loss([1], "capture", 5, how=how)]
    return promised(Case(0, SHRINK, protection, state, {}, losses), nodes)


def test_fewer_nodes_go_on_with_what_all_ranks_had_and_what_survived() -> None:
    for state in ("replicas", "dropout"):
        for protection in ("arc", "arc:2", "aec", "aor", "peer", "arc+peer"):
            assert promise_to_fewer(protection, state, "gone") == EXACT
        assert promise_to_fewer("none", state, "gone") == ANY
        assert promise_to_fewer("none", state, "excluded") == EXACT
        assert promise_to_fewer("arc:2", state, "gone", nodes=2) == ANY
    for state in ("own", "sharded"):
        assert promise_to_fewer("peer", state, "gone") == REFUSED
        assert promise_to_fewer("peer", state, "excluded") == REFUSED
    assert promise_to_fewer("peer", "fsdp", "gone") == promise_to_fewer("none", "fsdp", "excluded") == EXACT
    assert promise_to_fewer("arc", "fsdp", "gone") == ANY


ITEMS, RESUMED, LAST = 12, 2, 7


def epochs_of(ranks: int, left: list[int], first: int) -> list[Rows]:
    """Rows of all ranks from a step on, of which each takes one item; the epoch has some left."""
    rows: list[Rows] = [{} for _ in range(ranks)]
    epoch = 0
    for step in range(first, LAST + 1):
        if not left:
            epoch, left = epoch + 1, list(range(ITEMS))
        for rank in range(ranks):
            state, own, items = f"state {step}", f"{rank} {step}", (left[rank],)
            rows[rank][step] = Row(step, f"0x{step}", epoch, step - 1, state, own, items)
        left = left[ranks:]
    return rows


def shrunk(protected: bool = False) -> tuple[Expected, list[list[Rows]]]:
    """Rank 1 of three is lost after step 3, and two resume at step 2; the second one as rank 1
    was, or as any of the others."""
    truth = epochs_of(3, list(range(ITEMS)), 1)
    before = [{step: row for step, row in rows.items() if step <= 3} for rows in truth]
    del before[1][3]
    rest = epochs_of(2, list(range(RESUMED * 3, ITEMS)), RESUMED + 1)
    after = [{RESUMED: truth[source][RESUMED], **rest[rank]} for rank, source in enumerate((0, 2))]
    sources = [{0}, {1} if protected else {0, 2}]
    expected = Expected(truth, epochs_of(2, list(range(ITEMS)), 1), sources, LAST, ITEMS)
    return expected, [before, [*after, {}]]


def test_a_job_that_goes_on_with_fewer_ranks_is_right_if_all_fits() -> None:
    expected, starts = shrunk()
    assert expected.differences(starts) == []
    anew = [*expected.fewer, {}]
    assert expected.differences([starts[0], anew]) == []


def test_a_job_that_resumes_its_first_step_has_not_begun_anew() -> None:
    """Its first line is of step 1 either way; the launcher's output tells which it was."""
    expected, starts = shrunk()
    fewer = [*expected.fewer, {}]
    resumed = replace(expected, anew=False)
    assert any("at step 1" in found for found in resumed.differences([starts[0], fewer]))
    assert expected.differences([starts[0], fewer]) == []


def test_a_job_that_goes_on_with_fewer_ranks_is_wrong_if_anything_differs() -> None:
    def found(rank: int, step: int, start: int = 1, **values: Any) -> str:
        expected, starts = shrunk()
        starts[start][rank][step] = replace(starts[start][rank][step], **values)
        return "; ".join(expected.differences(starts))

    assert "state of rank 1 at step 2" in found(1, RESUMED, state="other")
    assert "random state or sums of rank 0" in found(0, RESUMED, own="2 2")  # that of a replica
    assert "random state or sums of rank 0" in found(0, RESUMED, loss="0x9")
    assert "before the loss, rank 2: step 1" in found(2, 1, start=0, items=(7,))
    assert "replicas differ after step 5" in found(0, 5, state="other")
    assert "step 3 was committed" in found(0, 3, start=0, committed=3)
    assert "items [6] of epoch 0 never came" in found(0, 3, items=(8,))

    expected, starts = shrunk(protected=True)
    assert expected.differences(starts) == ["random state or sums of rank 1 at step 2"]
    del starts[1][0][LAST]
    assert "rank 0 left out steps [7]" in expected.differences(starts)
    del starts[1][0][RESUMED]
    assert "ranks began at different steps: [2, 3]" in expected.differences(starts)
    starts[1][0].clear()
    assert "ranks [0] logged nothing any more" in expected.differences(starts)
    anew = [{step: replace(row, state="x") for step, row in of.items()} for of in expected.fewer]
    assert "begun anew, rank 0: step 1" in expected.differences([starts[0], [*anew, {}]])
