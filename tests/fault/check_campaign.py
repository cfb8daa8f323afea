"""Plants every single and double fault in simulated nodes, has `reft check` decide, and compares.

    tools/dev fault check [--nodes 2 … 16] [--rails 1] [--doubles N] [--healthy N] [--all]
    [--seed S] [--noise 1.0] [--quick] [--jobs J] [--only NODES NUMBER] [--json FILE]

A fault is a node (slow, wrong, dead), a card (slow, lossy, dead) or a link (slow, lossy, dead). For
each number of nodes, all single faults are planted, and all pairs of faults with --all, else
--doubles of them, drawn at random; and --healthy cases have no fault. Severities and noise follow from (seed, nodes, number). What
runs is the product's own course of rounds (`reft._check.course`); only the measurements are played:

    rates       10 Gbit/s with 5 % noise (standard deviation); one in 300 is disturbed to 20 - 60 %
    slow        10 - 50 % of the rate, or 1 - 20 ms more round trip; a node: a device, its disk or
                all of it, also its traffic
    lossy       1.5 - 20 % of the segments, of 800 in each direction (2400 when measured again);
                healthy links lose 0.01 %
    dead        no connection; a node: no report, or silence from some round on
    management  every node that is not dead reaches the store and what decides (node 0 in the product,
                which reports that it got no answer if node 0 is dead)

Verdicts, against the faults that are not hidden behind the other one (`hidden_behind`) and, with
--quick, the links that were measured (some always are not):

    exact         named exactly these
    undecidable   named some, and for the rest alternatives, of which one is right
    unseen        named all but what is slow and has nothing healthy to be compared with
    missed        some others were not named, and nothing healthy was
    wrong         something healthy was named

`wrong`, `missed`, an excluded node that is healthy, and a plan of more rounds than `plan.most_rounds`
(with --noise 0) fail the campaign. A node that is cut off by faulty links alone does not count as
healthy.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from reft._check import plan
from reft._check.course import AGAIN, FIRST, Course
from reft._check.evidence import (
    DEAD,
    LINK,
    LOSSY,
    NIC,
    NODE,
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

HOWS = {NODE: (SLOW, WRONG, DEAD), NIC: (SLOW, LOSSY, DEAD), LINK: (SLOW, LOSSY, DEAD)}
EXACT, UNDECIDABLE, UNSEEN, MISSED, WRONGLY = "exact", "undecidable", "unseen", "missed", "wrong"
GPUS = 4
RATE, LOOPBACK, RTT_US, SEGMENTS = 10.0, 30.0, 50.0, 800


@dataclass(frozen=True)
class Planted:
    """A fault: what, how, and how badly.

    Attributes:
        share: of the rate, where it is slow; 1 otherwise.
        delay_us: of the round trip.
        loss: share of the segments.
        where: what of a node is slow: all, gpu or disk.
        since: round from which a dead node is silent; 0: from the start.
    """

    unit: Unit
    how: str
    share: float = 1.0
    delay_us: float = 0.0
    loss: float = 0.0
    where: str = ""
    since: int = 0

    def __str__(self) -> str:
        return f"{name(self.unit)} {self.how}"


@dataclass(frozen=True)
class Case:
    nodes: int
    rails: int
    number: int
    planted: tuple[Planted, ...]

    def __str__(self) -> str:
        faults = " + ".join(map(str, self.planted)) or "no fault"
        return f"{self.nodes} nodes, case {self.number}: {faults}"


def name(unit: Unit) -> str:
    place = f"{unit.node}-{unit.peer}" if unit.kind == LINK else str(unit.node)
    return f"{unit.kind} {place}" + f" rail {unit.rail}" * (unit.kind != NODE)


def units(nodes: int, rails: int) -> list[Unit]:
    found = [node_unit(node) for node in range(nodes)]
    for rail in range(rails):
        found += [nic_unit(node, rail) for node in range(nodes)]
        found += [link_unit(a, b, rail) for a, b in itertools.combinations(range(nodes), 2)]
    return found


def cases(
    nodes: int, rails: int, doubles: int | None, seed: int
) -> list[tuple[int, tuple[tuple[Unit, str], ...]]]:
    """Numbers and faults of all single faults, and of all pairs, or of `doubles` of them."""
    single = [(unit, how) for unit in units(nodes, rails) for how in HOWS[unit.kind]]
    pairs = [(a, b) for a, b in itertools.combinations(single, 2) if a[0] != b[0]]
    chosen: list[tuple[tuple[Unit, str], ...]] = [(one,) for one in single]
    numbers = list(range(len(single)))
    drawn = range(len(pairs))
    if doubles is not None and doubles < len(pairs):
        drawn = sorted(random.Random(f"{seed} {nodes} {rails}").sample(drawn, doubles))
    chosen += [pairs[at] for at in drawn]
    numbers += [len(single) + at for at in drawn]
    return list(zip(numbers, chosen, strict=True))


def healthy_cases(count: int) -> list[tuple[int, tuple[tuple[Unit, str], ...]]]:
    """Cases without a fault, which differ in noise."""
    return [(-1 - at, ()) for at in range(count)]


def plant(unit: Unit, how: str, generator: random.Random, rounds: int) -> Planted:
    if how == SLOW:
        share = generator.uniform(0.1, 0.5)
        if unit.kind == NODE:
            where = generator.choice(["all", "gpu", "disk"])
            return Planted(unit, how, share / 3 if where == "disk" else share, where=where)
        if generator.random() < 0.3:
            return Planted(unit, how, delay_us=generator.uniform(1000, 20000))
        return Planted(unit, how, share)
    if how == LOSSY:
        return Planted(unit, how, loss=generator.uniform(0.015, 0.2))
    if how == DEAD and unit.kind == NODE and generator.random() < 0.3:
        return Planted(unit, how, since=generator.randint(1, max(1, rounds)))
    return Planted(unit, how)


class Cluster:
    """Simulated nodes that measure.

    Args:
        noise: 0: none, 1: as described above.
    """

    def __init__(self, case: Case, noise: float, generator: random.Random) -> None:
        self.case, self._noise, self._random = case, noise, generator
        self._on = {planted.unit: planted for planted in case.planted}

    def _varied(self, value: float, deviation: float) -> float:
        return value * math.exp(self._random.gauss(0, deviation * self._noise))

    def reports(self) -> dict[int, Report]:
        found = {}
        for node in range(self.case.nodes):
            fault = self._on.get(node_unit(node))
            if fault is None or fault.how != DEAD or fault.since:
                found[node] = self._report(node, fault)
        return found

    def _report(self, node: int, fault: Planted | None) -> Report:
        where, share = (fault.where, fault.share) if fault else ("", 1.0)
        whole = share if where == "all" else 1.0
        parts = []
        for gpu in range(GPUS):
            rate = 700.0 * (share if where == "gpu" and gpu == 1 else whole)
            wrong = "sums differ" if fault and fault.how == WRONG and gpu == 2 else ""
            parts.append(Part(f"gpu {gpu}", "gpu matmul X", self._varied(rate, 0.02), "TFLOP/s", wrong))
        parts.append(Part("memory", "memory X", self._varied(20 * whole, 0.05), "GB/s"))
        disk = 1.0 * (share if where == "disk" else 1.0)
        parts.append(Part("disk", "disk ext4", self._varied(disk, 0.15), "GB/s"))
        loopback = self._varied(LOOPBACK * whole, 0.05)
        ports = tuple(Port(f"10.{rail}.0.{node + 1}", 1, mbits=10000) for rail in range(self.case.rails))
        return Report(node, f"host{node}", tuple(parts), ports, loopback)

    def measure(self, a: int, b: int, rail: int, phase: str, center: int | None) -> Pair:
        on = [nic_unit(a, rail), nic_unit(b, rail), link_unit(a, b, rail)]
        faults = [self._on[unit] for unit in on if unit in self._on]
        shared = phase not in (FIRST, AGAIN)
        if any(fault.how == DEAD for fault in faults):
            return Pair(a, b, rail, False, is_shared=shared)
        rate, rtt, loss = RATE, RTT_US, 0.0001
        for fault in faults:
            own = fault.share
            if shared and fault.unit == nic_unit(center if center is not None else -1, rail):
                own /= 2
            rate = min(rate, RATE * own)
            rtt += fault.delay_us
            loss = loss + fault.loss - loss * fault.loss
        if shared:
            rate = min(rate, RATE / 2)
        for end in (a, b):
            whole = self._on.get(node_unit(end))
            if whole and whole.how == SLOW and whole.where == "all" and self._is_traffic_slow(whole):
                rate = min(rate, RATE * whole.share)
        long = phase == AGAIN
        rate = self._varied(rate, 0.05 / (3**0.5 if long else 1))
        if loss > 0.001:
            rate *= min(1.0, 0.002 / loss) * math.exp(self._random.gauss(0, 0.3 * self._noise))
        if self._noise and self._random.random() < 1 / 300:
            rate *= self._random.uniform(0.2, 0.6)
        sent = SEGMENTS * (3 if long else 1)
        lost = sum(self._random.random() < loss for _ in range(sent)) if self._noise else round(loss * sent)
        return Pair(a, b, rail, True, rate, self._varied(rtt, 0.15), lost, sent, False, shared)

    @staticmethod
    def _is_traffic_slow(fault: Planted) -> bool:
        return int(fault.share * 1e6) % 2 == 0  # half of them, always the same

    def is_silent(self, node: int, rounds: int) -> bool:
        fault = self._on.get(node_unit(node))
        return fault is not None and fault.how == DEAD and rounds >= fault.since


def run(
    case: Case, noise: float, generator: random.Random, quick: bool
) -> tuple[Verdict, dict[str, int], set[Unit]]:
    """The check of one cluster, as `reft._check.node` runs it; rounds, and the links it measured."""
    cluster = Cluster(case, noise, generator)
    course = Course(case.nodes, cluster.reports(), plan.FAULTS + 1 if quick else None)
    rounds, measured = 0, set[Unit]()
    while (one := course.next()) is not None:
        rounds += 1
        ends = Counter(node for at in one.pairs for node in at)
        center = max(ends, key=lambda node: ends[node]) if one.phase not in (FIRST, AGAIN) else None
        assert center is not None or all(count == 1 for count in ends.values())
        silent = {node for node in range(case.nodes) if cluster.is_silent(node, rounds)}
        pairs = [
            cluster.measure(a, b, rail, one.phase, center)
            for a, b in one.pairs for rail in range(case.rails)
            if not silent & {a, b}
        ]  # fmt: skip
        measured |= {link_unit(pair.a, pair.b, pair.rail) for pair in pairs}
        course.record(pairs, silent)
    return course.verdict(), course.rounds, measured


def spoils(fault: Planted, nodes: int, gone: set[int]) -> set[tuple[int, int, int]]:
    """The measurements between live nodes that a fault of the network spoils, or a slow host may."""
    unit = fault.unit
    pairs = [at for at in itertools.combinations(range(nodes), 2) if not gone & set(at)]
    if unit.kind == LINK:
        return {(a, b, unit.rail) for a, b in pairs if (a, b) == (unit.node, unit.peer)}
    if unit.kind == NIC:
        return {(a, b, unit.rail) for a, b in pairs if unit.node in (a, b)}
    if fault.where == "all":
        return {(a, b, rail) for a, b in pairs for rail in range(16) if unit.node in (a, b)}
    return set()


def hidden_behind(fault: Planted, other: Planted, nodes: int) -> bool:
    """Whether all measurements that a fault spoils are spoiled as badly by another one, or are none,
    as their nodes are dead. The check may name it all the same."""
    if fault.unit.kind == NODE:
        return False
    dead = other.unit.kind == NODE and other.how == DEAD
    own = spoils(fault, nodes, {other.unit.node} if dead else set())
    ranks = {SLOW: 1, LOSSY: 2, DEAD: 3, WRONG: 0}
    if other.unit.kind == NIC and fault.unit.kind == LINK and other.how == LOSSY and fault.how == DEAD:
        return False
    return own <= spoils(other, nodes, set()) and (not own or ranks[fault.how] <= ranks[other.how])


def unseen(case: Case) -> set[Unit]:
    """Slow cards and links of rails that have no healthy link between live nodes; slow nodes, if no
    other live one is not slow."""
    on = {planted.unit: planted for planted in case.planted}
    dead = {unit.node for unit, one in on.items() if unit.kind == NODE and one.how == DEAD}
    slow = {unit.node for unit, one in on.items() if unit.kind == NODE and one.where == "all"}
    found: set[Unit] = set()
    nodes_slow = {unit.node for unit, one in on.items() if unit.kind == NODE and one.how == SLOW}
    if len(nodes_slow | dead) == case.nodes:
        found |= {node_unit(node) for node in nodes_slow}
    for rail in range(case.rails):
        healthy = [
            (a, b)
            for a, b in itertools.combinations(range(case.nodes), 2)
            if not {a, b} & (dead | slow)
            and not {nic_unit(a, rail), nic_unit(b, rail), link_unit(a, b, rail)} & set(on)
        ]
        if not healthy:
            found |= {u for u, one in on.items() if u.kind != NODE and u.rail == rail and one.how == SLOW}
    return found


def assess(case: Case, verdict: Verdict, measured: set[Unit] | None = None) -> tuple[str, list[str]]:
    """The campaign's verdict, and what else is wrong.

    Args:
        measured: links; None: all.
    """
    truth = {fault.unit for fault in case.planted}
    hidden = {a.unit for a, b in itertools.permutations(case.planted, 2) if hidden_behind(a, b, case.nodes)}
    if measured is not None:  # with --quick, some links are not
        hidden |= {unit for unit in truth if unit.kind == LINK and unit not in measured}
    if len(truth) == 2 and all(unit.kind == NIC for unit in hidden) and hidden == truth:
        hidden = {max(truth)}  # each behind the other one: one of them is enough
    needed = truth - hidden
    visible = needed - unseen(case)
    named = {fault.unit for fault in verdict.faults}
    problems = []
    choices = [named]
    for question in verdict.between:
        choices = [base | {f.unit for f in one} for base in choices for one in question]
    if named - truth:
        result = WRONGLY
    elif verdict.between:
        result = UNDECIDABLE if any(visible <= choice <= truth for choice in choices) else WRONGLY
    elif needed <= named:
        result = EXACT
    else:
        result = UNSEEN if visible <= named else MISSED
    for node in verdict.exclude:
        links = {unit for unit in units(case.nodes, case.rails) if unit.kind == LINK and node in (unit.node, unit.peer)}
        dead = {unit.node for unit in truth if unit.kind == NODE}
        cut = {unit for unit in links if not {unit.node, unit.peer} & (dead - {node})} <= truth
        if not any(unit.kind != LINK and unit.node == node for unit in truth) and not cut:
            problems.append(f"node {node} is healthy and excluded")
    if result == EXACT:
        missing = {u.node for u in needed if u.kind != LINK} - set(verdict.exclude)
        problems += [f"node {node} is at fault and not excluded" for node in sorted(missing)]
    return result, problems


def conduct(task: tuple[Any, ...]) -> dict[str, Any]:
    """One case; what the campaign keeps of it."""
    nodes, rails, number, faults, seed, noise, quick = task
    generator = random.Random(f"{seed} {nodes} {rails} {number}")
    partners = plan.FAULTS + 1 if quick else None
    first, more = plan.most_rounds(nodes, partners)
    fewest = min(first, plan.most_rounds(max(2, nodes - 1), partners)[0])  # a node may be missing
    planted = [plant(unit, how, generator, fewest) for unit, how in faults]
    if sum(one.unit.kind == NODE and one.how == DEAD for one in planted) == nodes:
        planted = [replace(one, since=0) for one in planted]  # there are no rounds
    case = Case(nodes, rails, number, tuple(planted))
    verdict, rounds, measured = run(case, noise, generator, quick)
    result, problems = assess(case, verdict, measured)
    extra = sum(rounds.values()) - rounds[FIRST]
    planned = rounds[FIRST] <= first and extra <= more
    if not noise and not planned:
        problems.append(f"{rounds} rounds; planned {first} and at most {more}")
    hows = {planted.unit: planted.how for planted in case.planted}
    misjudged = sum(fault.how != hows.get(fault.unit, fault.how) for fault in verdict.faults)
    return {
        "nodes": nodes, "number": number, "faults": len(faults), "result": result, "problems": problems,
        "case": str(case), "said": said(verdict), "misjudged": misjudged, "planned": planned,
        "rounds": rounds[FIRST], "more_rounds": extra,
        "excluded_right": set(verdict.exclude) >= {p.unit.node for p in case.planted if p.unit.kind != LINK},
    }  # fmt: skip


def said(verdict: Verdict) -> str:
    texts = [f"{name(fault.unit)} {fault.how} ({fault.why})" for fault in verdict.faults]
    for question in verdict.between:
        texts.append(" or ".join("{" + ", ".join(name(f.unit) for f in one) + "}" for one in question))
    return "; ".join([*texts, *verdict.notes, f"excludes {list(verdict.exclude)}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(range(2, 17)))
    parser.add_argument("--rails", type=int, default=1)
    parser.add_argument("--doubles", type=int, default=400, help="pairs of faults for each number of nodes")
    parser.add_argument("--healthy", type=int, default=40, help="cases without a fault for each number of nodes")
    parser.add_argument("--all", action="store_true", help="every pair of faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="as `reft check --quick`: three partners a node")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, nargs=2, metavar=("NODES", "NUMBER"), help="one case")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    from tests.support import report

    began = time.monotonic()
    tasks = []
    for nodes in [args.only[0]] if args.only else args.nodes:
        listed = cases(nodes, args.rails, None if args.all or args.only else args.doubles, args.seed)
        for number, faults in [*healthy_cases(args.healthy), *listed]:
            if not args.only or number == args.only[1]:
                tasks.append((nodes, args.rails, number, faults, args.seed, args.noise, args.quick))
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(pool.map(conduct, tasks, chunksize=64)) if args.jobs > 1 else [conduct(task) for task in tasks]
    return conclude(results, args, time.monotonic() - began, report)


def conclude(results: list[dict[str, Any]], args: argparse.Namespace, sec: float, report: Any) -> int:
    print(f"{'nodes':>5} {'faults':>6} {'cases':>7} {'exact':>7} {'undecid.':>8} {'unseen':>6} {'missed':>6} {'wrong':>6} rounds")
    table = []
    for nodes in sorted({result["nodes"] for result in results}):
        for count in (0, 1, 2):
            rows = [r for r in results if (r["nodes"], r["faults"]) == (nodes, count)]
            if not rows:
                continue
            tally = Counter(r["result"] for r in rows)
            rounds = f"{max(r['rounds'] for r in rows)}+{max(r['more_rounds'] for r in rows)}"
            print(f"{nodes:5} {count:6} {len(rows):7} {100 * tally[EXACT] / len(rows):6.1f}% {tally[UNDECIDABLE]:8}"
                  f" {tally[UNSEEN]:6} {tally[MISSED]:6} {tally[WRONGLY]:6} {rounds}")  # fmt: skip
            table.append({"nodes": nodes, "faults": count, "cases": len(rows), **tally, "rounds": rounds,
                          "excluded_right": sum(r["excluded_right"] for r in rows)})  # fmt: skip
    bad = [r for r in results if r["result"] in (MISSED, WRONGLY) or r["problems"]]
    for r in bad[:40] if not args.only else results:
        print(f"{r['case']}: {r['result']}: {r['said']}", *r["problems"], sep="\n       ")
    tally = Counter(r["result"] for r in results)
    healthy = sum("healthy" in text for r in results for text in r["problems"])
    larger = [r for r in results if r["nodes"] >= 4]
    share = sum(r["result"] == EXACT for r in larger) / len(larger) if larger else float("nan")
    three = [r for r in results if r["nodes"] == 3 and r["faults"] == 1]
    metrics = {
        "exact": report.metric(tally[EXACT], "cases"),
        "undecidable": report.metric(tally[UNDECIDABLE], "cases"),
        "unseen": report.metric(tally[UNSEEN], "cases"),
        "missed": report.metric(tally[MISSED], "cases", None, "0", tally[MISSED] == 0),
        "wrong": report.metric(tally[WRONGLY], "cases", None, "0", tally[WRONGLY] == 0),
        "healthy_excluded": report.metric(healthy, "nodes", None, "0", healthy == 0),
        "kind_misjudged": report.metric(sum(r["misjudged"] for r in results), "faults"),
        "exact_share_from_4_nodes": report.metric(share, "", None, ">= 0.99", share >= 0.99 if larger else None),
        "three_nodes_single_excluded_right": report.metric(
            sum(r["excluded_right"] for r in three), "cases", None, str(len(three)), all(r["excluded_right"] for r in three)
        ),
        "beyond_planned_rounds": report.metric(sum(not r["planned"] for r in results), "cases"),
        "duration_sec": report.metric(sec, "s"),
    }  # fmt: skip
    notes = [f"seed {args.seed}, noise {args.noise:g}, {args.rails} rails" + ", quick" * args.quick]
    report.write(args.json, "fault check", metrics, run=len(results), failed=len(bad), notes=notes, more={"table": table})
    return 1 if bad or healthy else 0


if __name__ == "__main__":
    sys.exit(main())
