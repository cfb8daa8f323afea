"""From measurements to faults, against the enumeration of all explanations."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import pytest

from reft._check import judge, plan, stats
from reft._check.course import Course
from reft._check.evidence import (
    DEAD,
    LINK,
    LOSSY,
    SLOW,
    WRONG,
    Pair,
    Part,
    Port,
    Report,
    Unit,
    Verdict,
    link_unit,
    nic_unit,
    node_unit,
)

FINE = 10.0
POOR = 0.25
Levels = Mapping[Unit, str]


def report(node: int, gpu: float = 700.0, fault: str = "", **port: int) -> Report:
    parts = (
        Part("gpu 0", "gpu matmul X", gpu, "TFLOP/s", fault),
        Part("memory", "memory X", 20.0 + node * 0.1, "GB/s"),
    )
    return Report(node, f"h{node}", parts, (Port("10.0.0.1", 1, "eth0", **{"mbits": 10000, **port}),), 30.0)


def reports(nodes: int, **special: Report) -> dict[int, Report]:
    found = {node: report(node) for node in range(nodes)}
    return found | {int(name[1:]): one for name, one in special.items()}


def pair(a: int, b: int, how: str = "", **more: float) -> Pair:
    if how == DEAD:
        return Pair(a, b, 0, False)
    fine = Pair(a, b, 0, True, FINE, 50.0, 0, 800)
    changes = {SLOW: {"gbits": POOR}, LOSSY: {"lost": 40, "gbits": POOR}, WRONG: {"is_corrupt": True}}
    return replace(fine, **{**changes.get(how, {}), **more})  # type: ignore[arg-type]


def measured(nodes: int, levels: Levels) -> list[Pair]:
    """What nodes measure whose units are at fault like that: the worst counts."""
    found = []
    for a, b in itertools.combinations(range(nodes), 2):
        hows = [levels.get(unit, "") for unit in (nic_unit(a, 0), nic_unit(b, 0), link_unit(a, b, 0))]
        found.append(pair(a, b, max(hows, key=["", SLOW, LOSSY, DEAD].index)))
    return found


def decide(nodes: int, levels: Levels) -> Verdict:
    return judge.judge(nodes, reports(nodes), measured(nodes, levels))


def network_units(nodes: int) -> list[Unit]:
    cards = [nic_unit(node, 0) for node in range(nodes)]
    return cards + [link_unit(a, b, 0) for a, b in itertools.combinations(range(nodes), 2)]


def explanations(nodes: int) -> dict[tuple[Pair, ...], list[frozenset[Unit]]]:
    """For everything that at most two faults can cause: the smallest sets that cause it."""
    causes: dict[tuple[Pair, ...], set[frozenset[Unit]]] = defaultdict(set)
    for count in (0, 1, 2):
        for chosen in itertools.combinations(network_units(nodes), count):
            for hows in itertools.product((SLOW, DEAD), repeat=count):
                seen = tuple(measured(nodes, dict(zip(chosen, hows, strict=True))))
                causes[seen].add(frozenset(chosen))
    return {
        seen: [one for one in sets if not any(other < one for other in sets)]
        for seen, sets in causes.items()
    }


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_names_what_all_smallest_explanations_contain_and_asks_about_the_rest(nodes: int) -> None:
    undecided = 0
    for seen, smallest in explanations(nodes).items():
        verdict = judge.judge(nodes, reports(nodes), seen)
        named = frozenset(fault.unit for fault in verdict.faults)
        assert named == frozenset.intersection(*smallest), (seen, smallest)
        if len(smallest) == 1:
            assert not verdict.between
            continue
        undecided += 1
        (question,) = verdict.between
        found = {named | {fault.unit for fault in one} for one in question}
        assert found == set(smallest)
        assert len(question[0]) == min(len(one) - len(named) for one in smallest)
    assert (undecided > 0) == (nodes < 4)


@pytest.mark.parametrize("how", [SLOW, LOSSY, DEAD])
def test_with_three_nodes_a_bad_card_excludes_its_node(how: str) -> None:
    verdict = decide(3, {nic_unit(1, 0): how})
    assert verdict.exclude == (1,)
    assert [fault.unit for fault in verdict.between[0][0]] == [nic_unit(1, 0)]
    assert {f.unit for f in verdict.between[0][1]} == {link_unit(0, 1, 0), link_unit(1, 2, 0)}


def test_with_two_nodes_a_bad_link_excludes_no_node() -> None:
    for unit in network_units(2):
        verdict = decide(2, {unit: DEAD})
        assert verdict.exclude == () and not verdict.is_good
        assert [one[0].unit for one in verdict.between[0]] == sorted(network_units(2))


@pytest.mark.parametrize("is_card", [True, False])
def test_measurements_at_one_time_tell_a_slow_card_from_two_slow_links(is_card: bool) -> None:
    slow = [nic_unit(0, 0)] if is_card else [link_unit(0, 1, 0), link_unit(0, 2, 0)]
    course = Course(3, reports(3))
    shared = 0
    while (one := course.next()) is not None:
        found = []
        for a, b in one.pairs:
            seen = next(p for p in measured(3, dict.fromkeys(slow, SLOW)) if (p.a, p.b) == (a, b))
            if one.phase == "shared":
                shared += 1
                assert set(one.pairs) == {(0, 1), (0, 2)}
                seen = replace(seen, is_shared=True, gbits=seen.gbits / (2 if is_card else 1))
            found.append(seen)
        course.record(found)
    verdict = course.verdict()
    assert shared == 2
    assert not verdict.between and [fault.unit for fault in verdict.faults] == slow
    assert verdict.exclude == ((0,) if is_card else ())


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_measurements_at_one_time_that_show_neither_are_repeated_and_decide_nothing(share: float) -> None:
    course = Course(3, reports(3))
    while (one := course.next()) is not None:
        seen = {(p.a, p.b): p for p in measured(3, {nic_unit(0, 0): SLOW})}
        found = [seen[at] for at in one.pairs]
        if one.phase == "shared":
            found = [replace(p, is_shared=True, reached=share > 0, gbits=p.gbits * share) for p in found]
        course.record(found)
    assert course.rounds["shared"] == plan.SHARED_ROUNDS
    verdict = course.verdict()
    assert not verdict.faults and len(verdict.between[0]) == 2 and verdict.exclude == (0,)


def test_a_card_without_carrier_is_named_with_two_nodes() -> None:
    seen = reports(2, n1=report(1, carrier=0))
    verdict = judge.judge(2, seen, [pair(0, 1, DEAD)])
    assert [fault.unit for fault in verdict.faults] == [nic_unit(1, 0)]
    assert verdict.exclude == (1,) and not verdict.between


def test_a_card_of_lower_nominal_speed_is_named() -> None:
    verdict = judge.judge(3, reports(3, n2=report(2, mbits=1000)), measured(3, {}))
    assert [(fault.unit, fault.how) for fault in verdict.faults] == [(nic_unit(2, 0), SLOW)]


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_wrong_results_and_missing_reports_need_no_partner(nodes: int) -> None:
    verdict = judge.judge(nodes, reports(nodes, n0=report(0, fault="sums differ")), measured(nodes, {}))
    assert [(fault.unit, fault.how) for fault in verdict.faults] == [(node_unit(0), WRONG)]
    assert verdict.exclude == (0,)
    if nodes > 1:
        there = reports(nodes)
        del there[1]
        alive = [one for one in measured(nodes, {}) if 1 not in (one.a, one.b)]
        verdict = judge.judge(nodes, there, alive)
        assert [(fault.unit, fault.how) for fault in verdict.faults] == [(node_unit(1), DEAD)]


def test_a_slow_node_is_named_and_a_slow_cluster_is_not() -> None:
    verdict = judge.judge(4, reports(4, n2=report(2, gpu=400.0)), measured(4, {}))
    assert [(fault.unit, fault.how) for fault in verdict.faults] == [(node_unit(2), SLOW)]
    slow = {node: report(node, gpu=70.0) for node in range(4)}
    links = [pair(a, b, gbits=FINE / 4) for a, b in itertools.combinations(range(4), 2)]
    assert judge.judge(4, slow, links).is_good


def test_half_of_the_nodes_are_no_stragglers() -> None:
    seen = {node: report(node, gpu=700.0 if node % 2 else 300.0) for node in range(16)}
    verdict = judge.judge(16, seen, measured(16, {}))
    assert verdict.is_good and verdict.exclude == () and "too many" in verdict.notes[0]


def test_two_racks_with_a_slow_uplink_exclude_nobody() -> None:
    across = [link_unit(a, b, 0) for a in range(4) for b in range(4, 8)]
    verdict = decide(8, dict.fromkeys(across, SLOW))
    assert verdict.faults == () and verdict.exclude == () and "common cause" in verdict.notes[0]


def test_a_dead_link_of_a_slow_card_is_named_and_links_of_a_dead_card_are_hidden() -> None:
    verdict = decide(5, {nic_unit(0, 0): SLOW, link_unit(0, 3, 0): DEAD})
    named = {fault.unit: fault.how for fault in verdict.faults}
    assert named == {nic_unit(0, 0): SLOW, link_unit(0, 3, 0): DEAD}
    verdict = decide(5, {nic_unit(0, 0): DEAD, link_unit(0, 3, 0): DEAD})
    assert [fault.unit for fault in verdict.faults] == [nic_unit(0, 0)]
    assert link_unit(0, 3, 0) in verdict.hidden and link_unit(1, 3, 0) not in verdict.hidden


def test_one_disturbed_measurement_is_measured_again_and_forgotten() -> None:
    course = Course(6, reports(6))
    phases = []
    while (one := course.next()) is not None:
        phases.append(one.phase)
        poor = (1, 4) if one.phase == "first" else None
        course.record([pair(a, b, SLOW if (a, b) == poor else "") for a, b in one.pairs])
    assert phases == ["first"] * 5 + ["again"]
    assert course.verdict().is_good


def test_a_node_that_goes_silent_is_named_and_asked_no_more() -> None:
    course = Course(5, reports(5))
    rounds = 0
    while (one := course.next()) is not None:
        rounds += 1
        if rounds > 2:
            assert all(3 not in at for at in one.pairs)
        silent = {3} if rounds == 2 else set()
        course.record([pair(a, b) for a, b in one.pairs if not silent & {a, b}], silent)
    verdict = course.verdict()
    assert [(fault.unit, fault.how) for fault in verdict.faults] == [(node_unit(3), DEAD)]


def test_what_a_short_plan_has_not_measured_is_counted() -> None:
    course = Course(8, reports(8), 3)
    while (one := course.next()) is not None:
        course.record([pair(a, b, DEAD if 2 in (a, b) else "") for a, b in one.pairs])
    verdict = course.verdict()
    assert [fault.unit for fault in verdict.faults] == [nic_unit(2, 0)]
    assert verdict.untested == 28 - 12


def test_a_reference_is_what_healthy_values_give() -> None:
    values = [10.0, 10.4, 9.8, 2.0, 2.1]
    reference = stats.highest(values, 3)
    assert reference.value == 10.0
    assert reference.is_below(2.1, 0.65) and not reference.is_below(9.0, 0.65)
    wide = stats.highest([10.0, 30.0, 20.0], 3)
    assert not wide.is_below(10.0, 0.65), "as far apart as the healthy ones are from each other"


def test_most_rounds_are_kept_with_two_faults_of_the_network() -> None:
    for nodes in (2, 3, 4, 7):
        first, more = plan.most_rounds(nodes)
        for chosen in itertools.combinations(network_units(nodes), 2):
            course = Course(nodes, reports(nodes))
            seen = {(p.a, p.b): p for p in measured(nodes, dict.fromkeys(chosen, SLOW))}
            while (one := course.next()) is not None:
                course.record([replace(seen[at], is_shared=one.phase == "shared") for at in one.pairs])
            assert course.rounds["first"] == first
            assert course.rounds["again"] + course.rounds["shared"] <= more


def test_links_have_their_lower_node_first() -> None:
    assert link_unit(4, 1, 0) == Unit(LINK, 1, 0, 4)
