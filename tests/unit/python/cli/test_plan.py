"""`reft plan`: odds against the enumeration of all losses and against REFT's formula, and what it
prints."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from reft import _C
from reft._cli import odds
from reft._cli.main import cli
from reft._cli.odds import Shape
from reft._cli.plan import PLACEMENTS


def enumerated(protection: str, nodes: list[int], alive: float) -> float:
    """The odds by every loss of nodes."""
    there = sorted(set(nodes))
    whole = 0.0
    for lost in itertools.product((False, True), repeat=len(there)):
        gone = dict(zip(there, lost, strict=True))
        if _C.survives(protection, nodes, [gone[node] for node in nodes]):
            whole += math.prod(1 - alive if each else alive for each in lost)
    return whole


@pytest.mark.parametrize("protection", PLACEMENTS)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_odds_are_those_of_every_loss(protection: str, nodes: int, members: int) -> None:
    shape = Shape(nodes, members, nodes * members)
    group = shape.nodes_of_a_group
    assert sorted(group) == sorted(list(range(nodes)) * members)
    for alive in (0.9, 0.4, 1.0, 0.0):
        assert odds.survives(protection, shape, alive) == pytest.approx(
            enumerated(protection, group, alive), abs=1e-12
        )


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
def test_copies_on_the_next_node_survive_all_losses_but_of_two_neighbours(nodes: int) -> None:
    shape, alive = Shape(nodes, 1, nodes), 0.8
    whole = 0.0
    for lost in itertools.product((False, True), repeat=nodes):
        if not any(lost[i] and lost[(i + 1) % nodes] for i in range(nodes)):
            whole += math.prod(1 - alive if each else alive for each in lost)
    assert odds.survives("peer", shape, alive) == pytest.approx(whole, abs=1e-12)


def test_large_groups_have_several_sets() -> None:
    shape = Shape(20, 1, 20)
    assert [len(s) for s in _C.parity_sets("aec", shape.nodes_of_a_group)] == [10, 10]
    one = 0.9**10 + 10 * 0.1 * 0.9**9
    assert odds.survives("aec", shape, 0.9) == pytest.approx(one**2)


@pytest.mark.parametrize(
    ("nodes", "days", "weibull", "none", "aec"),
    [(128, 7, 1, 0.408, 0.979), (512, 7, 1, 0.028, 0.919), (128, 7, 0.7, None, 0.993), (128, 7, 1.3, None, 0.936)],
)
def test_one_erasure_in_each_group_is_survived_as_in_the_formula(
    nodes: int, days: float, weibull: float, none: float | None, aec: float
) -> None:
    """Groups of 8 on nodes of their own: P = [p^8 + 8 (1 - p) p^7] ^ (N / 8)."""
    shape = Shape(nodes, 1, 8)
    assert shape.distinct_groups == nodes // 8
    alive = odds.node_survives(days, 1e-3, weibull)
    assert odds.survives("aec", shape, alive) == pytest.approx(aec, abs=6e-4)
    assert odds.survives("arc", shape, alive) > odds.survives("aec", shape, alive)
    if none is not None:
        assert odds.survives("none", shape, alive) == pytest.approx(none, abs=6e-4)


def test_replicas_within_nodes_and_across_them() -> None:
    assert Shape(2, 4, 4).nodes_of_a_group == [0, 0, 1, 1], "two ranks a replica"
    assert Shape(4, 2, 2).nodes_of_a_group == [0, 2], "two nodes a replica"
    assert Shape(4, 2, 2).distinct_groups == 2
    for wrong in [(3, 4, 5), (3, 4, 2), (0, 1, 1)]:
        with pytest.raises(ValueError):
            Shape(*wrong)


def test_repair_makes_losses_rare() -> None:
    shape = Shape(16, 8, 128)
    none, arc = (odds.days_until_lost(p, shape, 1e-3, 10) for p in ("none", "arc"))
    assert none == pytest.approx(1 / (16 * 1e-3), rel=1e-3), "the first loss of a node"
    assert arc > 1000 * none
    rare = odds.days_until_lost("arc:3", shape, 1e-3, 10)
    four = 16 * (1e-3 * 10 / 1440) ** 4  # successive nodes of the ring, in one window
    assert rare == pytest.approx(10 / 1440 / four, rel=1e-3), "far below a float's precision"
    assert math.isinf(odds.days_until_lost("arc", shape, 0.0, 10))


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["plan", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_fits_a_terminal() -> None:
    said = run("--nodes", "64", "--replicas", "128", "--state-gb", "100")
    assert said.startswith("64 nodes of 8 ranks, 128 replicas of 4 x ")
    assert all(len(line) <= 80 for line in said.splitlines()), said
    assert [line.split()[0] for line in said.splitlines()[3:10]] == [*PLACEMENTS, "aor", "peer"]


def test_bytes_are_those_of_the_formulas() -> None:
    made = json.loads(run("--nodes", "4", "--ranks-per-node", "1", "--state-gb", "12", "--json"))
    step = {row["protection"]: row["step_bytes"] for row in made["rows"]}
    assert step["none"] == 3e9 and step["arc"] == 6e9
    assert step["aec"] == pytest.approx(4e9), "|P| / (D - 1)"
    node = {row["protection"]: row["times_state"] for row in made["rows"]}
    assert node["arc"] == 1.0, "two slots of half of the state"
    assert node["aor"] == 1.25, "and the quarter that is computed a second time"
    assert step["aor"] == step["arc"]


def test_a_job_that_cannot_be_is_refused() -> None:
    done = CliRunner().invoke(cli, ["plan", "--nodes", "3", "--replicas", "5", "--state-gb", "1"])
    assert done.exit_code == 2 and "do not form 5 equal replicas" in done.output
    done = CliRunner().invoke(cli, ["plan", "--nodes", "3", "--state-gb", "nan"])
    assert done.exit_code == 2


def test_one_node_says_that_nothing_helps() -> None:
    assert "no protection survives its loss" in run("--nodes", "1", "--state-gb", "1")
    assert "only peer survives its loss" in run("--nodes", "8", "--replicas", "1", "--state-gb", "1")


@pytest.mark.parametrize("failures", ["0", "0.001", "50"])
def test_the_page_has_a_curve_for_each_protection(tmp_path: Path, failures: str) -> None:
    file = tmp_path / "plan.html"
    said = run("--nodes", "4", "--state-gb", "1", "--failures-per-day", failures, "--html", str(file))
    assert ("never" in said) == (failures == "0")
    page = file.read_text(encoding="utf-8")
    curves = re.findall(r'<polyline points="([^"]*)"', page)
    assert len(curves) == len(PLACEMENTS) + 2
    for curve in curves:
        points = [tuple(map(float, point.split(","))) for point in curve.split()]
        assert all(60 <= x <= 700 and 10 <= y <= 310.1 for x, y in points), curve
