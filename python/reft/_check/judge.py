"""From measurements to faults.

Three kinds of evidence, in this order:

1. A node that publishes no report, or goes silent, is dead. No partner is needed.
2. What a node measures alone: a test that failed is a fault of the node; a value far below those of
   the same device elsewhere is one, too (`stats`). A card without carrier, or with a lower nominal
   speed than its peers, is at fault.
3. Measurements between nodes, each rail by itself. With four nodes or more, the rule that `plan`
   proves: a card is at fault if and only if all its measurements are bad, and a bad measurement
   between healthy cards is a faulty link. With two or three nodes, all sets of at most two faults
   that explain what was measured are enumerated. If one is left, it is the answer. If not, what all
   of them contain is certain, and the rest is a question with alternatives.

What one fault conceals is not judged but listed as hidden: links behind a dead card, or a slow card
of a slow node. More faults than `most_named` allows have a common cause (a switch, another
topology), or are not what the rule assumes: then nobody is excluded for its network.

Threads: any. Errors: none.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reft._check import stats
from reft._check.evidence import (
    DEAD,
    LINK,
    LOSSY,
    NIC,
    NODE,
    SLOW,
    WRONG,
    Fault,
    Pair,
    Part,
    Report,
    Unit,
    Verdict,
    link_unit,
    nic_unit,
    node_unit,
)
from reft._check.plan import FAULTS, Edge, edge

OK, IMPAIRED, CUT = 0, 1, 2  # levels of a link

SLOW_SHARE = 0.65
"""A link is slow below this share of the reference."""
_WEAK_SHARE = 0.8  # may be slow if nearly all others of the card are
_RTT_TIMES, _RTT_US = 4.0, 300.0
_LOSS, _LOST = 0.004, 3  # share of the segments, and the fewest that count
_WEAK_LOSS = 0.001
_LOSS_TIMES, _MOST_LOSS = 5.0, 0.01  # of the others' loss; so much is never healthy
_NOMINAL_SHARE = 0.03  # of what both hosts and cards can do, for a link with no other to compare
_ODD_SHARE, _MAY_BE_ODD_SHARE = 0.5, 0.65  # of the rates that a slow card's other links have
_EQUAL = 1.6  # two rates of one slow card differ by less
_SIGMAS = 5.0
_ONE_CARD, _TWO_LINKS = 1.25, 1.6  # two rates at one time, each divided by that alone: 1 or 2

# By the first word of `Part.kind`: below this share of the reference, a part is slow.
_PART_SHARES = {"gpu": 0.8, "cpu": 0.6, "memory": 0.5, "disk": 0.25, "loopback": 0.5, "copy": 0.6}
_OTHER_PART = 0.5
_TRAFFIC_PARTS = ("cpu", "memory", "loopback")  # what TCP needs


@dataclass(frozen=True)
class Grade:
    """What a pair's measurements amount to.

    Attributes:
        pair: the measurement that decides.
        is_weak: not bad, but may be.
    """

    level: int
    how: str
    why: str
    pair: Pair
    is_weak: bool = False


@dataclass
class _Found:
    """What has been decided so far."""

    faults: dict[Unit, Fault] = field(default_factory=dict)
    between: list[tuple[tuple[Fault, ...], ...]] = field(default_factory=list)
    exclude: set[int] = field(default_factory=set)
    hidden: set[Unit] = field(default_factory=set)
    slow_hosts: set[int] = field(default_factory=set)  # so slow that their traffic may be, too
    notes: list[str] = field(default_factory=list)

    def add(self, unit: Unit, how: str, why: str) -> None:
        self.faults.setdefault(unit, Fault(unit, how, why))
        if unit.kind != LINK:
            self.exclude.add(unit.node)


def most_named(nodes: int) -> int:
    """So many faults of one kind of evidence are named; more have a common cause."""
    return {1: 1, 2: 1}.get(nodes, max(FAULTS, nodes // 4))


def judge(
    nodes: int, reports: Mapping[int, Report], pairs: Iterable[Pair], silent: Iterable[int] = ()
) -> Verdict:
    """The verdict on nodes 0 to `nodes` - 1.

    Args:
        reports: of the nodes that have published one.
        pairs: in the order in which they were measured. Later ones of a pair decide.
        silent: nodes that have published a report, and did not answer afterwards.
    """
    found = _Found()
    gone = {node for node in range(nodes) if node not in reports} | set(silent)
    for node in sorted(gone):
        why = "no report from it" if node not in reports else "it went silent during the check"
        found.add(node_unit(node), DEAD, why)
    _judge_parts(nodes, [reports[node] for node in sorted(reports)], found)
    untested = 0
    for one in _rails(nodes, reports, pairs, gone, found):
        untested += one.untested
        one.judge()
    return Verdict(
        tuple(found.faults[unit] for unit in sorted(found.faults)),
        tuple(found.between),
        tuple(sorted(found.exclude)),
        tuple(sorted(found.hidden - set(found.faults))),
        tuple(found.notes),
        untested,
    )


def odd_links(
    nodes: int, reports: Mapping[int, Report], pairs: Iterable[Pair], silent: Iterable[int] = ()
) -> set[Edge]:
    """Pairs, of any rail, that are or may be worse than faults of cards explain."""
    found = _Found()
    _judge_parts(nodes, [reports[node] for node in sorted(reports)], found)
    gone = {node for node in range(nodes) if node not in reports} | set(silent)
    return {
        at
        for one in _rails(nodes, reports, pairs, gone, found)
        for at in one.odd(_MAY_BE_ODD_SHARE)
    }


def _rails(
    nodes: int,
    reports: Mapping[int, Report],
    pairs: Iterable[Pair],
    gone: set[int],
    found: _Found,
) -> Iterable[_Rail]:
    by_rail: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.a not in gone and pair.b not in gone:
            by_rail[pair.rail].append(pair)
    for rail in range(max((len(report.ports) for report in reports.values()), default=0)):
        there = [n for n in range(nodes) if n not in gone and rail < len(reports[n].ports)]
        _judge_ports(rail, [reports[node] for node in there], found)
        grades = grade(by_rail[rail], reports)
        yield _Rail(nodes, rail, there, grades, by_rail[rail], len(gone), found)


# -- inside the nodes


def _judge_parts(nodes: int, reports: Sequence[Report], found: _Found) -> None:
    groups: dict[str, list[tuple[int, Part]]] = defaultdict(list)
    for report in reports:
        for part in report.parts:
            if part.fault:
                found.add(node_unit(report.node), WRONG, f"{part.name}: {part.fault}")
            elif not part.skipped:
                groups[part.kind].append((report.node, part))
    slow: dict[int, str] = {}
    low: set[int] = set()  # whose traffic may be slow, too
    for kind, members in groups.items():
        share = _PART_SHARES.get(kind.split()[0], _OTHER_PART)
        values = [part.value for _, part in members]
        reference = stats.highest(values, len(values) - FAULTS * _most_of_one(members, nodes))
        for node, part in members:
            if reference.is_below(part.value, share):
                text = f"{part.name}: {part.value:.3g} {part.unit}, others {reference.value:.3g}"
                slow.setdefault(node, text)
            if kind.split()[0] in _TRAFFIC_PARTS and part.value < _WEAK_SHARE * reference.value:
                low.add(node)
    if len(slow) > most_named(nodes):
        found.notes.append(
            f"{len(slow)} of {nodes} nodes are slower than the others: too many to be stragglers"
        )
        return
    found.slow_hosts = low & set(slow)
    for node, text in slow.items():
        found.add(node_unit(node), SLOW, text)


def _most_of_one(members: list[tuple[int, Part]], nodes: int) -> int:
    """Most parts of a kind that one fault can spoil: those of a node; in a single node, one."""
    if nodes == 1:
        return 1
    counts: dict[int, int] = defaultdict(int)
    for node, _ in members:
        counts[node] += 1
    return max(counts.values())


def _judge_ports(rail: int, reports: Sequence[Report], found: _Found) -> None:
    ports = {report.node: report.ports[rail] for report in reports}
    for node, port in ports.items():
        if port.carrier == 0:
            found.add(nic_unit(node, rail), DEAD, f"{port.device or port.address}: no carrier")
    speeds = {node: float(port.mbits) for node, port in ports.items() if port.mbits}
    reference = stats.highest([*speeds.values()], len(speeds) - FAULTS)
    low = {node: speed for node, speed in speeds.items() if reference.is_below(speed, SLOW_SHARE)}
    if len(low) > most_named(len(reports)):
        return  # two kinds of cards
    for node, speed in low.items():
        name = ports[node].device or ports[node].address
        why = f"{name} runs at {speed:.0f} Mbit/s, others at {reference.value:.0f}"
        found.add(nic_unit(node, rail), SLOW, why)


# -- between the nodes


def grade(pairs: Sequence[Pair], reports: Mapping[int, Report]) -> dict[Edge, Grade]:
    """Grades of the pairs of a rail. A pair that was measured again is as good as the best of its
    measurements, because what is at fault is so each time; but if the first one was good, and only
    doubtful, the later ones decide."""
    measured: dict[Edge, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if not pair.is_shared:
            measured[edge(pair.a, pair.b)].append(pair)
    firsts = [all_of[0] for all_of in measured.values()]
    degree: dict[int, int] = defaultdict(int)
    for pair in firsts:
        degree[pair.a] += 1
        degree[pair.b] += 1
    worst = sum(sorted(degree.values(), reverse=True)[:FAULTS]) - 1
    healthy = len(firsts) - worst  # whatever two faults are
    reached = [pair for pair in firsts if pair.reached]
    scale = _Scale(
        stats.highest([pair.gbits for pair in reached], healthy),
        stats.lowest([pair.rtt_us for pair in reached], healthy),
        stats.lowest([pair.lost / max(1, pair.sent) for pair in reached], healthy),
    )
    few = len(degree) <= 3
    found = {}
    for at, all_of in measured.items():
        expected = _expected(all_of[0], reports) if few else 0.0
        graded = [scale.grade(pair, expected) for pair in all_of]
        if not graded[0].level:
            graded = graded[1:] or graded
        found[at] = min(graded, key=lambda one: (one.level, -one.pair.gbits))
    return found


def _expected(pair: Pair, reports: Mapping[int, Report]) -> float:
    """Gbit/s that both hosts and both cards can do; 0 if unknown."""
    ends = [reports[node] for node in (pair.a, pair.b) if node in reports]
    if len(ends) < 2 or any(pair.rail >= len(end.ports) for end in ends):
        return 0.0
    return min(min(end.loopback, end.ports[pair.rail].mbits / 1000) for end in ends)


@dataclass(frozen=True)
class _Scale:
    """What healthy pairs of a rail measure."""

    gbits: stats.Reference
    rtt_us: stats.Reference
    loss: stats.Reference

    def grade(self, pair: Pair, expected: float) -> Grade:
        if not pair.reached:
            return Grade(CUT, DEAD, "no connection", pair)
        if pair.gbits <= 0:
            return Grade(CUT, DEAD, "connected, but no data came", pair)
        if pair.is_corrupt:
            return Grade(IMPAIRED, WRONG, "data arrived changed", pair)
        loss = pair.lost / max(1, pair.sent)
        usual = min(_LOSS_TIMES * self.loss.value, _MOST_LOSS)
        if pair.lost >= _LOST and loss >= max(_LOSS, usual):
            return Grade(IMPAIRED, LOSSY, f"{100 * loss:.1f} % of the segments lost", pair)
        if self.gbits.is_below(pair.gbits, SLOW_SHARE):
            why = f"{pair.gbits:.3g} Gbit/s, others {self.gbits.value:.3g}"
            return Grade(IMPAIRED, SLOW, why, pair)
        if self.rtt_us.is_above(pair.rtt_us, _RTT_TIMES, _RTT_US):
            why = f"round trip {pair.rtt_us:.0f} us, others {self.rtt_us.value:.0f}"
            return Grade(IMPAIRED, SLOW, why, pair)
        if pair.gbits < _NOMINAL_SHARE * expected:
            why = f"{pair.gbits:.3g} Gbit/s, cards and hosts can do {expected:.3g}"
            return Grade(IMPAIRED, SLOW, why, pair)
        is_weak = (
            pair.gbits < _WEAK_SHARE * self.gbits.value
            or (pair.lost > 0 and loss >= _WEAK_LOSS)
            or self.rtt_us.is_above(pair.rtt_us, _RTT_TIMES / 2, _RTT_US / 2)
        )
        return Grade(OK, "", "", pair, is_weak)


class _Rail:
    """The decision for one rail.

    Args:
        nodes: of the job.
        there: those that have a card in this rail and are not silent.
        measured: all measurements, also those at one time.
        gone: so many nodes are silent.
        found: what is known before, and gets what is decided.
    """

    def __init__(
        self,
        nodes: int,
        rail: int,
        there: list[int],
        grades: dict[Edge, Grade],
        measured: Sequence[Pair],
        gone: int,
        found: _Found,
    ) -> None:
        self._nodes, self._rail, self._there, self._grades = nodes, rail, there, grades
        self._measured, self._gone, self._found = measured, gone, found
        self._of: dict[int, dict[int, Grade]] = {node: {} for node in there}
        for (a, b), one in grades.items():
            self._of[a][b] = one
            self._of[b][a] = one
        self.untested = len(there) * (len(there) - 1) // 2 - len(grades)
        self._spent = sum(unit.kind == NODE for unit in found.faults)
        # Slow hosts all of whose measurements are bad: what is slow there may be the host.
        self._slow = {
            node
            for node in found.slow_hosts & set(there)
            if self._of[node] and all(one.level for one in self._of[node].values())
        }

    def judge(self) -> None:
        """Adds to what is known."""
        if not any(one.level for one in self._grades.values()):
            return
        if len(self._there) >= 4 or (len(self._there) == 3 and self._gone and not self._slow):
            self._by_rule()
        else:
            self._by_enumeration()

    # -- four nodes or more

    def odd(self, share: float) -> list[Edge]:
        """Links that are worse than their cards explain.

        Args:
            share: a link of a slow card is slow itself below this share of the card's others.
        """
        spoiled = self._spoiled()
        bad = [at for at, one in self._grades.items() if one.level]
        return [at for at in bad if self._is_odd(at, spoiled, share)]

    def _spoiled(self) -> dict[int, str]:
        """How cards are at fault, by their measurements or by what their nodes report."""
        known = {u.node: f.how for u, f in self._found.faults.items() if self._is_card(u)}
        return {**self._cards(), **known}

    def _cards(self) -> dict[int, str]:
        return {node: how for node in self._there if (how := self._card(node))}

    def _by_rule(self) -> None:
        cards, spoiled, links = self._cards(), self._spoiled(), self.odd(_ODD_SHARE)
        own = [node for node in cards if not self._is_of_node(node, cards[node])]
        if len(own) + len(links) > most_named(self._nodes):
            bad = sum(1 for one in self._grades.values() if one.level)
            self._found.notes.append(
                f"rail {self._rail}: {bad} of {len(self._grades)} links are bad, which a few faults"
                " do not explain: a common cause (a switch, another topology)"
            )
            return
        for node, how in cards.items():
            if self._is_of_node(node, how):
                self._found.hidden.add(nic_unit(node, self._rail))
            else:
                self._found.add(nic_unit(node, self._rail), how, self._why(node))
        for at in links:
            one = self._grades[at]
            self._found.add(link_unit(*at, self._rail), one.how, one.why)
        for at in self._grades:
            if any(self._conceals(spoiled.get(node, "")) for node in at):
                self._found.hidden.add(link_unit(*at, self._rail))

    def _card(self, node: int) -> str:
        """How a card is at fault by its measurements; "" if it is not."""
        bad = [one for one in self._of[node].values() if one.level]
        good = [one for one in self._of[node].values() if not one.level]
        # Each node that is gone is one of the faults that could be behind bad measurements.
        if len(bad) < max(2, FAULTS + 1 - self._gone):
            return ""
        if len(good) > FAULTS or 2 * len(good) >= len(bad) or not all(one.is_weak for one in good):
            return ""
        if not good and all(one.level == CUT for one in bad):
            return DEAD
        hows = [one.how for one in bad if one.level == IMPAIRED]
        return next((how for how in (WRONG, LOSSY) if 2 * hows.count(how) > len(hows)), SLOW)

    def _why(self, node: int) -> str:
        others = self._of[node].values()
        return f"{_typical(others)}, with all {len(others)} nodes that it was measured with"

    def _is_odd(self, at: Edge, spoiled: Mapping[int, str], share: float) -> bool:
        """Whether a bad link is at fault itself, given how its cards are."""
        one = self._grades[at]
        ends = [node for node in at if node in spoiled]
        hows = {spoiled[node] for node in ends}
        if not ends:
            return True
        if DEAD in hows:
            return False
        if one.level == CUT:
            return True
        if hows != {SLOW}:
            return False
        if one.how != SLOW:
            return True
        usual = []
        for node in ends:
            other = at[0] if node == at[1] else at[1]
            rates = [
                grade.pair.gbits
                for peer, grade in self._of[node].items()
                if peer != other and grade.pair.gbits > 0
            ]
            usual.append(statistics.median(rates) if rates else 0.0)
        return one.pair.gbits < share * min(usual)

    @staticmethod
    def _conceals(how: str) -> bool:
        return how in (DEAD, LOSSY, WRONG)

    def _is_card(self, unit: Unit) -> bool:
        return unit.kind == NIC and unit.rail == self._rail

    def _is_of_node(self, node: int, how: str) -> bool:
        """Whether what a card shows may come from its host, which is slow."""
        return node in self._slow and how == SLOW

    # -- two or three nodes

    def _by_enumeration(self) -> None:
        known = {unit for unit in self._found.faults if self._is_card(unit)}
        explained = self._explanations(max(1, FAULTS - self._spent, len(known)))
        for is_possible in (known.issubset, self._agrees_with_shared):
            explained = [one for one in explained if is_possible(one)] or explained
        if not explained:
            bad = sum(1 for one in self._grades.values() if one.level)
            self._found.notes.append(
                f"rail {self._rail}: {bad} of {len(self._grades)} links are bad, which"
                f" {FAULTS} faults do not explain"
            )
            return
        faults = [tuple(self._as_fault(unit) for unit in sorted(one)) for one in explained]
        certain = set.intersection(*(set(one) for one in faults))
        for fault in sorted(certain, key=lambda one: one.unit):
            self._found.add(fault.unit, fault.how, fault.why)
        if len(faults) > 1:
            rest = [tuple(f for f in one if f not in certain) for one in faults]
            rest.sort(key=lambda one: (len(one), [fault.unit for fault in one]))
            self._found.between.append(tuple(rest))
            for node in self._there:
                if all(self._is_sick(node, {*certain, *one}) for one in faults):
                    self._found.exclude.add(node)
        self._found.hidden.update(nic_unit(node, self._rail) for node in self._slow)
        for at in self._grades:
            if any(f.unit == nic_unit(node, self._rail) and self._conceals(f.how)
                   for f in certain for node in at):  # fmt: skip
                self._found.hidden.add(link_unit(*at, self._rail))

    def _explanations(self, most: int) -> list[frozenset[Unit]]:
        """Smallest sets of at most `most` faults that explain every measurement."""
        units = [nic_unit(node, self._rail) for node in self._there]
        units += [link_unit(*at, self._rail) for at in self._grades]
        found: list[frozenset[Unit]] = []
        for size in range(most + 1):
            for chosen in itertools.combinations(units, size):
                if any(smaller < set(chosen) for smaller in found):
                    continue
                levels = itertools.product((IMPAIRED, CUT), repeat=size)
                if any(self._explains(dict(zip(chosen, one, strict=True))) for one in levels):
                    found.append(frozenset(chosen))
        return found

    def _explains(self, levels: Mapping[Unit, int]) -> bool:
        for (a, b), one in self._grades.items():
            units = [nic_unit(a, self._rail), nic_unit(b, self._rail)]
            units.append(link_unit(a, b, self._rail))
            predicted = max(levels.get(unit, OK) for unit in units)
            free = one.how == SLOW and bool(self._slow & {a, b})
            if predicted != one.level and not (free and predicted < one.level):
                return False
        return all(self._fits(unit.node, levels) for unit in levels if unit.kind == NIC)

    def _fits(self, node: int, levels: Mapping[Unit, int]) -> bool:
        """Whether a card's measurements are alike, as far as it alone explains them."""
        alone = [
            grade
            for peer, grade in self._of[node].items()
            if grade.level == IMPAIRED
            and not (grade.how == SLOW and {node, peer} & self._slow)
            and nic_unit(peer, self._rail) not in levels
            and link_unit(node, peer, self._rail) not in levels
        ]
        return all(_are_alike(x.pair, y.pair) for x, y in itertools.combinations(alone, 2))

    def _agrees_with_shared(self, units: frozenset[Unit]) -> bool:
        """Whether an explanation fits what nodes measured with two others at once: together as much
        as with one alone, if their card is slow; twice that, if both links are."""
        best = max(one.pair.gbits for one in self._grades.values())
        for node in self._there:
            rates = []
            for pair in self._measured:
                alone = self._grades.get(edge(pair.a, pair.b))
                if pair.is_shared and node in (pair.a, pair.b) and alone:
                    rates.append((pair.gbits, alone.pair.gbits))
            rates = rates[-2:]  # the newest ones
            if len(rates) < 2 or any(not 0 < one < SLOW_SHARE * best for _, one in rates):
                continue
            if any(together <= 0 for together, _ in rates):
                continue
            times = sum(together / one for together, one in rates)
            both = {link_unit(node, peer, self._rail) for peer in self._of[node]}
            if times < _ONE_CARD and both <= units:
                return False
            if times > _TWO_LINKS and nic_unit(node, self._rail) in units:
                return False
        return True

    def _as_fault(self, unit: Unit) -> Fault:
        ends = [unit.node] if unit.kind == NIC else [unit.node, unit.peer]
        if unit.kind == NIC:
            if before := self._found.faults.get(unit):
                return before
            of = [one for one in self._of[unit.node].values() if one.level]
            level = min((one.level for one in of), default=OK)
            of = [one for one in of if one.level == level]
            hows = [one.how for one in of]
            how = max((DEAD, WRONG, LOSSY, SLOW), key=hows.count)
            return Fault(unit, how, _typical(of))
        one = self._grades[edge(*ends)]
        return Fault(unit, one.how, one.why)

    def _is_sick(self, node: int, faults: set[Fault]) -> bool:
        units = {fault.unit for fault in faults}
        if nic_unit(node, self._rail) in units:
            return True
        links = {link_unit(node, peer, self._rail) for peer in self._of[node]}
        return len(links) > 1 and links <= units


def _typical(grades: Iterable[Grade]) -> str:
    """Evidence of the middle one of a card's bad measurements."""
    bad = sorted((one for one in grades if one.level), key=lambda one: one.pair.gbits)
    return bad[len(bad) // 2].why if bad else ""


def _are_alike(x: Pair, y: Pair) -> bool:
    """Whether one card may have caused two measurements: equal loss, and without loss equal
    rates."""
    if (x.lost < _LOST and y.lost < _LOST) and x.gbits > 0 and y.gbits > 0:
        return 1 / _EQUAL < x.gbits / y.gbits < _EQUAL
    sent = x.sent + y.sent
    if not x.sent or not y.sent:
        return True
    share = (x.lost + y.lost) / sent
    spread = (share * (1 - share) * (1 / x.sent + 1 / y.sent)) ** 0.5
    return bool(abs(x.lost / x.sent - y.lost / y.sent) <= _SIGMAS * spread)


def open_question(verdict: Verdict) -> int | None:
    """The node that `plan`'s third phase is to measure with both others at once; None if it would
    decide nothing: only for the question whether a card is slow, or both its links are."""
    for question in verdict.between:
        cards = [f.unit for one in question for f in one if len(one) == 1 and f.unit.kind == NIC]
        if len(cards) == 1 and all(f.how == SLOW for one in question for f in one):
            return cards[0].node
    return None
