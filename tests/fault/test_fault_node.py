"""The node campaign's short form; and what it draws and promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from tests.fault.node_campaign import ANY, EXACT, KINDS, REPLICA, Case, Loss, draw, promised
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
        [sys.executable, str(CAMPAIGN), *options, "--seed", "7", "--only", *CASES, "--json", str(result)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    written = json.loads(result.read_text())
    assert (written["cases"]["run"], written["cases"]["failed"]) == (len(CASES), 0), done.stdout
    # On a busy machine, a point may never be reached: its step is skipped for want of a slot.
    exact, untouched = (written["metrics"][name]["value"] for name in ("exact", "untouched"))
    assert exact + untouched == len(CASES) and exact >= len(CASES) // 2, done.stdout


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
    assert {case.kind for case in cases} == set(KINDS)
    for case in cases:
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
