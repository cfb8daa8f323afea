"""Robust statistics: what healthy measurements look like, although some are not healthy.

A reference is the median of the best values, of so many as are healthy whatever the assumed number
of faults is: hardware can be slower than it should be, and not faster. The median of all values is
not used: with one bad card among three nodes, two of three links are bad.

A value is bad only if it is below a share of the reference and, besides, further below it than the
healthy ones differ from each other. So a cluster that is slow as a whole has no bad value. Rates
and times vary by factors, so distances are those of logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_SIGMA = 1.4826  # of a normal distribution, in units of its MAD
_SIGMAS = 4.0


@dataclass(frozen=True)
class Reference:
    """Attributes:
    value: what a healthy measurement gives; 0 if there is none.
    spread: standard deviation of the logarithms of healthy ones, by their MAD.
    """

    value: float
    spread: float

    def is_below(self, value: float, share: float) -> bool:
        """Whether a value is too low."""
        return value < self.value * min(share, math.exp(-_SIGMAS * self.spread))

    def is_above(self, value: float, times: float, at_least: float) -> bool:
        """Whether a value is too high: above a multiple, and by no less than `at_least`."""
        high = max(times, math.exp(_SIGMAS * self.spread)) * self.value
        return value > max(high, self.value + at_least)


def highest(values: Sequence[float], healthy: int) -> Reference:
    """Reference of values of which the `healthy` highest are healthy (at least one)."""
    return _of(sorted(values, reverse=True)[: max(1, healthy)])


def lowest(values: Sequence[float], healthy: int) -> Reference:
    """As `highest`, where low values are good."""
    return _of(sorted(values)[: max(1, healthy)])


def _of(best: list[float]) -> Reference:
    if not best:
        return Reference(0.0, 0.0)
    middle = statistics.median(best)
    logs = [abs(math.log(value / middle)) for value in best if value > 0 and middle > 0]
    return Reference(middle, _SIGMA * statistics.median(logs) if logs else 0.0)
