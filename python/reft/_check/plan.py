"""Which nodes measure a link with each other, and when: rounds in which each node is in one pair at
most, so that no measurement disturbs another one.

**First phase.** `tournament` is the circle method: one node keeps its place, the others move on by
one place a round. For n nodes it has n - 1 rounds (n even) or n (n odd), in which every pair meets
exactly once. No plan is shorter: a round has at most floor(n / 2) of the n (n - 1) / 2 pairs.
With `partners` = p, the plan stops as soon as every node has met p others: after p rounds (n even),
or p + 1 (n odd, as each node sits out one of the first n rounds at most). Units are then found as
below if p > f, except links that were not measured.

**Why that decides.** Let f be the largest number of faults, and let a faulty card or node spoil all
its measurements in a rail, and a faulty link its one. Take a node that has been measured with d > f
others. If its card is healthy, each of its bad measurements needs a fault of its own (the card of
the partner, or the link), so at most f < d are bad. So: *all its measurements are bad if and only
if its card is faulty*. A bad measurement between two cards that are healthy by this rule is a
faulty link. Every pair meets, so d = n - 1, and two faults are separated among four nodes or more;
one fault among three. `judge` enumerates what is left (n = 2, and two faults with n = 3). What
measurements inside a node show (`local`) needs no partner at all, so that n = 1 is decided.

**Second phase.** `confirmation` measures again what decides: each bad pair of two cards that are
not suspects; for a suspect (a card with more than f measurements, all of them bad), f + 1 of them,
with partners that are not suspects as far as possible; and the few good ones of a card most of
whose measurements are bad. Let D be the most pairs of one node among those. A greedy plan has at
most 2 D - 1 rounds, because each end of a pair occupies at most D - 1 rounds with other pairs. With
at most two faults and no noise, D <= 3: five rounds at most. The phase is run twice at most, and
not at all if nothing is suspicious.

**Third phase.** Only if three nodes are left, and two of the three pairs are slow: one round, in
which the node of both measures both at once (`course`). A slow card is shared by them, two slow
links are not. It is repeated, twice at most, if the two were not measured in the same time, or show
neither.

Threads: any. Errors: none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Edge = tuple[int, int]
"""Two nodes, the lower one first."""

FULL_NODES = 32
"""Up to so many nodes, every pair is measured unless the user wants less."""
FAULTS = 2
"""So many faults at once are separated from each other."""
CONFIRMATIONS = 2
SHARED_ROUNDS = 3


def edge(a: int, b: int) -> Edge:
    return (a, b) if a < b else (b, a)


def tournament(nodes: Sequence[int], partners: int | None = None) -> list[list[Edge]]:
    """Rounds of the first phase.

    Args:
        nodes: distinct numbers.
        partners: how many others every node meets at least; None: all.
    """
    places: list[int | None] = [*nodes]
    if len(places) < 2:
        return []
    if len(places) % 2:
        places.append(None)  # who meets it sits the round out
    rounds = len(places) - 1
    if partners is not None:
        rounds = min(rounds, partners + len(nodes) % 2)
    found = []
    for _ in range(rounds):
        pairs = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append(sorted(edge(a, b) for a, b in pairs if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def confirmation(measured: Iterable[Edge], bad: Iterable[Edge]) -> list[list[Edge]]:
    """Rounds of the second phase.

    Args:
        measured: all pairs of a rail that were measured.
        bad: those that were bad.
    """
    all_of: dict[int, set[int]] = defaultdict(set)
    bad_of: dict[int, set[int]] = defaultdict(set)
    for a, b in measured:
        all_of[a].add(b)
        all_of[b].add(a)
    wrong = sorted(set(bad))
    for a, b in wrong:
        bad_of[a].add(b)
        bad_of[b].add(a)
    suspects = {
        node for node, others in bad_of.items() if len(others) > FAULTS and others == all_of[node]
    }
    wanted: set[Edge] = set()
    for node in sorted(suspects):
        partners = sorted(bad_of[node], key=lambda other: (other in suspects, other))
        wanted.update(edge(node, other) for other in partners[: FAULTS + 1])
    wanted.update((a, b) for a, b in wrong if a not in suspects and b not in suspects)
    for node, others in bad_of.items():
        good = all_of[node] - others
        if 0 < len(good) < len(others) and len(good) <= FAULTS:
            wanted.update(edge(node, other) for other in good)
    return greedy(sorted(wanted))


def greedy(edges: list[Edge]) -> list[list[Edge]]:
    """Rounds for pairs in the given order."""
    rounds: list[list[Edge]] = []
    busy: list[set[int]] = []
    for a, b in edges:
        free = (at for at, nodes in enumerate(busy) if a not in nodes and b not in nodes)
        at = next(free, len(rounds))
        if at == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[at].append((a, b))
        busy[at].update((a, b))
    return rounds


def most_rounds(nodes: int, partners: int | None = None) -> tuple[int, int]:
    """So many rounds the first phase has, and so many the others have at most with no more than two
    faults and no noise."""
    if nodes < 2:
        return 0, 0
    first = nodes - 1 if nodes % 2 == 0 else nodes
    if partners is not None:
        first = min(first, partners + nodes % 2)
    each = {2: 1, 3: 3}.get(nodes, 2 * (FAULTS + 1) - 1)
    return first, CONFIRMATIONS * each + SHARED_ROUNDS * (nodes == 3)
