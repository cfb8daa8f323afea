"""Random loop nests, killed at a random program point: every item comes once more or less, in the same order.

A nest is a piece of Python source. It runs in forked children of this process: undisturbed; up to
the kill, where the place is captured and the child ends; and again from its top, where the place is
put back at the first program point.
"""

from __future__ import annotations

import pickle
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import captured

pytestmark = pytest.mark.exact

HEADER = """
import itertools, random
import torch
from torch.utils.data import DataLoader, RandomSampler
random.seed(5)
torch.manual_seed(5)
total = 0
seen = []

def pairs(n):
    for x in range(n):
        yield x
        if x % 2:
            yield -x

def shuffled(n):
    order = list(range(n))
    random.shuffle(order)
    for item in order:
        yield item, random.random()

def windows(n):
    buffer = []
    for x in pairs(n + 1):
        buffer.append(x)
        if len(buffer) == 2:
            yield tuple(buffer)
            buffer.pop(0)
"""

# Where the items of a loop come from; COUNT is the number of items, OUTER the variable of the loop
# around it (or 0).
SOURCES = {
    "range": "range(COUNT)",
    "range_from": "range(OUTER, OUTER + 2 * COUNT, 2)",
    "list": "[i * i for i in range(COUNT)]",
    "tuple": "tuple(range(COUNT))",
    "string": "'abcdef'[:COUNT]",
    "enumerate": "enumerate(range(COUNT), start=OUTER)",
    "zip": "zip(range(COUNT), 'uvwxyz')",
    "zip_generator": "zip(pairs(COUNT), itertools.count(OUTER))",
    "reversed": "reversed([OUTER] * COUNT)",
    "dict": "{f'k{i}': i for i in range(COUNT)}.items()",
    "keys": "dict.fromkeys(range(COUNT))",
    "map": "map(str, range(COUNT))",
    "filter": "filter(None, range(COUNT + 1))",
    "islice": "itertools.islice(itertools.count(OUTER), COUNT)",
    "cycle": "itertools.islice(itertools.cycle('xyz'), COUNT)",
    "chain": "itertools.chain(range(COUNT - 1), [OUTER])",
    "product": "itertools.product(range(COUNT), 'pq')",
    "generator": "pairs(COUNT)",
    "random_generator": "shuffled(COUNT)",
    "nested_generator": "windows(COUNT)",
    "enumerate_generator": "enumerate(shuffled(COUNT))",
    "expression": "(i + OUTER for i in range(COUNT))",
    "sorted_set": "sorted({i * 7 % 5 for i in range(COUNT)})",
    "loader": "DataLoader(list(range(2 * COUNT)), batch_size=2)",
    "loader_kept": "KEPT",
    "loader_enumerate": "enumerate(KEPT)",
    "loader_drawn": "DataLoader(range(9), batch_size=3, sampler=RandomSampler(range(9), num_samples=2 * COUNT))",
}


@dataclass(frozen=True)
class Level:
    """One loop of a nest.

    Attributes:
        kind: a key of SOURCES, or `while`.
        own_function: the loop is in a function of its own.
        skip: a `continue` for some items, before the program point.
        leave: a `break` after so many items; 0 for none.
    """

    kind: str
    items: int
    own_function: bool
    skip: bool
    leave: int


def nest_source(levels: list[Level], in_main: bool) -> str:
    """The program; it calls point() in the innermost loop and trace() with all that it knows after it."""
    tops: list[str] = []
    for depth, level in enumerate(levels):
        if "KEPT" in SOURCES.get(level.kind, ""):
            tops.append(f"kept{depth} = DataLoader(torch.arange({3 * level.items}), batch_size=3, shuffle=True)")

    def loop(depth: int) -> list[str]:
        if depth == len(levels):
            return [
                "total += 1",
                "point()",
                f"trace({', '.join(f'plain(v{i})' for i in range(depth))}, total, len(seen))",
            ]
        level = levels[depth]
        outer = f"(v{depth - 1} if isinstance(v{depth - 1}, int) else 0)" if depth else "0"
        body = [f"seen.append(('{depth}', plain(v{depth})))"]
        if level.skip:
            body += [f"if len(seen) % 4 == {depth}:", "    continue"]
        known = ", ".join(f"v{i}" for i in range(depth + 1))
        inner = loop(depth + 1)
        if depth + 1 < len(levels) and levels[depth + 1].own_function:
            tops.extend([f"def level{depth + 1}({known}):", "    global total", *("    " + line for line in inner)])
            body.append(f"level{depth + 1}({known})")
        else:
            body += inner
        if level.leave:
            body += [f"c{depth} += 1", f"if c{depth} == {level.leave}:", "    break"]
        if level.kind == "while":
            head = [
                f"w{depth} = 0",
                f"while w{depth} < {level.items}:",
                f"    w{depth} += 1",
                f"    v{depth} = w{depth}",
            ]
        else:
            source = SOURCES[level.kind].replace("KEPT", f"kept{depth}")
            head = [f"for v{depth} in {source.replace('COUNT', str(level.items)).replace('OUTER', outer)}:"]
        return [f"c{depth} = 0", *head, *("    " + line for line in body)]

    lines = loop(0)
    if in_main:
        lines = ["def main():", "    global total", *("    " + line for line in lines), "main()"]
    return "\n".join([HEADER, *tops, *lines, "trace('end', total, seen, random.random(), torch.rand(1).item())"])


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def child(source: str, kill: int, place: bytes) -> dict[str, Any]:
    return captured.child(source, kill, place, names={"plain": plain})


def holds(levels: list[Level], in_main: bool, where: float) -> None:
    source = nest_source(levels, in_main)
    undisturbed = child(source, 0, b"")
    assert "error" not in undisturbed, undisturbed["error"] + source
    if not undisturbed["points"]:
        return  # every loop was empty
    kill = 1 + int(where * (undisturbed["points"] - 1))
    case = f"killed at program point {kill} of {undisturbed['points']} of{source}"
    seen = child(source, kill, b"")
    assert "place" in seen, f"{seen.get('error')}: {case}"
    assert seen["exact"] and not seen["uncaptured"], f"{seen['uncaptured']}: {case}"
    assert seen["lines"] == undisturbed["lines"][: kill - 1], case
    restored = child(source, 0, seen["place"])
    assert "refused" not in restored, f"{restored['refused']}: {case}"
    assert "error" not in restored, f"{restored['error']}: {case}"
    assert restored["problems"] == [], f"{restored['problems']}: {case}"
    assert restored["lines"] == undisturbed["lines"][kill - 1 :], case


levels = st.builds(
    Level,
    kind=st.sampled_from([*SOURCES, "while"]),
    items=st.integers(2, 4),
    own_function=st.booleans(),
    skip=st.booleans(),
    leave=st.sampled_from([0, 0, 2]),
)
nests = st.lists(levels, min_size=1, max_size=3)
checks = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.timeout(300)
@settings(derandomize=True, max_examples=40, deadline=None, suppress_health_check=checks)
@given(nests, st.booleans(), st.floats(0, 1))
def test_each_item_once(levels: list[Level], in_main: bool, where: float) -> None:
    holds(levels, in_main, where)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=60, deadline=None, suppress_health_check=checks, print_blob=True)
@given(nests, st.booleans(), st.floats(0, 1))
def test_each_item_once_at_length(levels: list[Level], in_main: bool, where: float) -> None:
    holds(levels, in_main, where)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [*SOURCES, "while"])
def test_each_kind_alone(kind: str) -> None:
    """One kind at a time in the middle of a nest, so that a kind that fails is named."""
    for in_main in (False, True):
        around = [
            Level("range", 2, False, False, 0),
            Level(kind, 3, in_main, False, 0),
            Level("while", 2, False, False, 0),
        ]
        holds(around, in_main, 0.7)


def test_nests_are_not_empty() -> None:
    """What the property is about does happen: a nest has many points, and a lost item would be seen."""
    source = nest_source([Level("range", 3, False, False, 0), Level("generator", 3, True, False, 0)], True)
    done = child(source, 0, b"")
    assert done["points"] == 12 and done["lines"][-1][0] == "end", textwrap.dedent(source)
    assert len({pickle.dumps(line) for line in done["lines"]}) == 13
