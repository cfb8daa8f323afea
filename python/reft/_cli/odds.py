"""How likely the state of a job survives lost nodes in memory, by what its ranks store.

Nodes fail independently of each other. A node that has run for `days` is still there with
probability exp(-rate * days ** shape) (Weibull; REFT, "survival"). REFT's own formula allows a
fixed number of lost nodes in each group. Here, the loss sets that the placement survives count,
which are more: two lost nodes that hold no shard in common are survived by `arc`.

Threads: any. Errors: `ValueError` for ranks that do not form equal groups.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any

from reft import _C
from reft._link.protection import PEER

_MINUTES_A_DAY = 24 * 60
_DIGITS = 80
Odds = Any
"""A float, or a Decimal where more digits count."""


@dataclass(frozen=True)
class Shape:
    """A job of equal nodes, each of whose parts of the model has as many replicas.

    Attributes:
        parts: ranks that a replica of the model consists of. They follow each other, as
            Megatron's and torch's device meshes have them.
    """

    nodes: int
    ranks_per_node: int
    replicas: int

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node, self.replicas) < 1:
            raise ValueError("nodes, ranks on a node and replicas are 1 or more")
        if self.world % self.replicas:
            raise ValueError(f"{self.world} ranks do not form {self.replicas} equal replicas")
        if self.ranks_per_node % self.parts and self.parts % self.ranks_per_node:
            raise ValueError(
                f"a replica of {self.parts} ranks is neither whole nodes of {self.ranks_per_node}"
                " ranks nor a whole fraction of one"
            )

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def parts(self) -> int:
        return self.world // self.replicas

    @property
    def nodes_of_a_group(self) -> list[int]:
        """The node of each member of the first group of replicas; the other groups have the same
        nodes, or as many others."""
        return [member * self.parts // self.ranks_per_node for member in range(self.replicas)]

    @property
    def distinct_groups(self) -> int:
        """Groups of replicas that share no node."""
        return max(1, self.parts // self.ranks_per_node)


def node_survives(days: float, rate: float, shape: float) -> float:
    """Probability that one node still runs after so many days."""
    return math.exp(-rate * days**shape)


def survives(protection: str, shape: Shape, alive: float) -> float:
    """Probability that no shard of the job is lost, if each node is there with odds of `alive`."""
    return float(_survives(protection, shape, alive))


def days_until_lost(protection: str, shape: Shape, rate: float, repair_minutes: float) -> float:
    """Mean days until a shard is lost from memory, if each lost node is replaced, and what it had
    is stored again, within `repair_minutes`. Nodes fail at a constant rate."""
    window = repair_minutes / _MINUTES_A_DAY
    with localcontext(prec=_DIGITS):  # what is lost is the small difference of two large numbers
        alive = 1 - Decimal(-math.expm1(-rate * window))
        lost = 1 - _survives(protection, shape, alive)
    return window / float(lost) if lost > 0 else math.inf


def _survives(protection: str, shape: Shape, alive: Odds) -> Odds:
    if protection != PEER:
        return _group_survives(protection, shape, alive) ** shape.distinct_groups
    # The nodes form one ring, and each is kept by the next one.
    return alive if shape.nodes == 1 else _no_run_lost(shape.nodes, 2, alive)


def _group_survives(protection: str, shape: Shape, alive: Odds) -> Odds:
    """As `survives`, for one group."""
    count, copies, sets = _placement(protection, shape)
    if count == 1:
        return alive
    if sets:
        return math.prod((_at_most_one_lost(size, alive) for size in sets), start=alive**0)
    return _no_run_lost(count, min(copies + 1, count), alive)


@functools.cache
def _placement(protection: str, shape: Shape) -> tuple[int, int, tuple[int, ...]]:
    """Of a group: its nodes, each of which has as many members; copies of a shard; and the nodes of
    each parity set, those of several sets on the same nodes once."""
    nodes = shape.nodes_of_a_group
    sets = {
        frozenset(nodes[member] for member in members)
        for members in _C.parity_sets(protection, nodes)
    }
    copies: int = _C.survivable_losses(protection, len(nodes))
    return len(set(nodes)), copies, tuple(len(on) for on in sets)


def _at_most_one_lost(nodes: int, alive: Odds) -> Odds:
    return alive**nodes + nodes * (1 - alive) * alive ** (nodes - 1)


def _no_run_lost(nodes: int, run: int, alive: Odds) -> Odds:
    """Probability that no `run` successive nodes of a ring are lost."""
    one = alive**0
    lost = one - alive
    whole = zero = one - one
    # A node that is there ends the run; one that is lost makes it longer.
    step = [[alive] * run]
    step += [[lost if j == i else zero for j in range(run)] for i in range(run - 1)]
    before = one  # odds that so many are lost before the first that is there
    for first in range(run):
        lengths = [one, *([zero] * (run - 1))]  # of the run that ends here
        lengths = _after(nodes - first - 1, step, lengths)
        ends = lengths[: run - first]  # the ring closes
        whole = whole + before * alive * sum(ends[1:], start=ends[0])
        before = before * lost
    return whole


def _after(steps: int, step: list[list[Odds]], odds: list[Odds]) -> list[Odds]:
    """What a matrix makes of a vector, applied so many times."""
    while steps:
        if steps % 2:
            odds = [_sum_of_products(row, odds) for row in step]
        columns = [list(column) for column in zip(*step, strict=True)]
        step = [[_sum_of_products(row, column) for column in columns] for row in step]
        steps //= 2
    return odds


def _sum_of_products(a: list[Odds], b: list[Odds]) -> Odds:
    first, *others = (x * y for x, y in zip(a, b, strict=True))
    return sum(others, start=first)
