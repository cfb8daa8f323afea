"""What a restore could break by putting back too much: variables that nothing reads any more, keys
whose hashes are not back yet, attributes of what is not the same object."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import functools, weakref
import torch
from torch.utils.data import DataLoader
import probe
probe.hook_optimizers()
{LEARN}
"""

CASES = {
    "a large tensor that is assigned before it is read": """
        for k in range(9):
            x = torch.randn(64, 5000)
            learn()
            probe.trace(k)
    """,
    "an iterator of a dict that grows, and that nothing reads": """
        table = {"a": 0, "b": 1}
        for k in range(9):
            it = iter(table.items())
            name, _ = next(it)
            learn()
            table[f"k{k}"] = k
            probe.trace(k, name)
    """,
    "an iterator of a loader whose data grow, and that nothing reads": """
        data = list(range(8))
        for k in range(9):
            it = iter(DataLoader(list(data), batch_size=2))
            batch = next(it).tolist()
            learn()
            data.append(k)
            probe.trace(k, batch)
    """,
    "keys whose hash is made of a list": """
        class State:
            def __init__(self, board): self.board = board
            def __hash__(self): return hash(tuple(self.board))
            def __eq__(self, other): return self.board == other.board
        def main():
            for e in range(3):
                queue, states = {}, []
                for k in range(3):
                    states.append(State([k, k + 1]))
                    queue[states[-1]] = k
                    learn()
                    probe.trace(e, k, [queue.get(state) for state in states])
        main()
    """,
    "keys whose hash has changed since the first step": """
        class Node:
            def __init__(self, i): self.i = i
            def __hash__(self): return hash(self.i)
            def __eq__(self, other): return self.i == other.i
        def main():
            nodes = [Node(i) for i in range(3)]
            for e in range(3):
                score = {node: 0 for node in nodes}
                for k in range(3):
                    learn()
                    for node in nodes: score[node] += k
                    probe.trace(e, k, list(score.values()))
                for node in nodes: node.i += 10
        main()
    """,
    "one method deleted and another one added at once": """
        class Net:
            def old(self): return 1
        def new(self): return 2
        def main():
            for k in range(9):
                learn()
                probe.trace(k, hasattr(Net, "old"), hasattr(Net, "new"))
                if k == 2: del Net.old; Net.new = new
        main()
    """,
    "a tuple that leads back to itself": """
        class Pair(tuple): pass
        def main():
            pair = Pair((1, 2))
            pair.me = pair
            for k in range(9):
                learn()
                probe.trace(k, pair.me is pair)
        main()
    """,
    "an empty dict whose items are its attributes": """
        class Items(dict):
            def __init__(self): self.__dict__ = self
        def main():
            for e in range(3):
                items = Items()
                for k in range(3):
                    learn()
                    items.loss = k
                    probe.trace(e, k, "loss" in items)
        main()
    """,
    "a function that is its own default": """
        def f(g=None): pass
        f.__defaults__ = (f,)
        def main():
            for k in range(9):
                learn()
                probe.trace(k)
        main()
    """,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [4, 5])
def test_continues_as_if_undisturbed(run_script: Run, name: str, at: int) -> None:
    run_script(_HEAD + textwrap.dedent(CASES[name]), at).check()


def test_dead_variables_cost_other_state_nothing(run_script: Run, tmp_path: Path) -> None:
    """They would use up what `REFT_RESUME_FRAME_BYTES` allows."""
    helpers = "import numpy\nBIG = numpy.zeros(10_000)\ndef bump(k): BIG[:] += k\n"
    (tmp_path / "helpers.py").write_text(helpers)
    source = """
import helpers
for k in range(9):
    x = torch.randn(260, 1000)
    learn()
    helpers.bump(k)
    probe.trace(k, float(helpers.BIG.sum()))
"""
    run_script(_HEAD + source, 5).check()


def test_a_default_that_is_gone_ends_nothing(run_script: Run) -> None:
    source = """
class Held: pass
HELD = Held()
def f(held=weakref.proxy(HELD)): pass
del HELD
def main():
    for k in range(9):
        learn()
        probe.trace(k)
main()
"""
    run = run_script(_HEAD + source, 5)
    assert run.restored["lines"] == run.expected["lines"]


def test_a_module_in_the_place_of_another_kind_of_module_ends_nothing(run_script: Run) -> None:
    source = """
class Scale(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
    def forward(self, x): return x * self.by
class Power(torch.nn.Module):
    def __init__(self, to):
        super().__init__()
        self.to_ = to
    def forward(self, x): return x ** self.to_
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Scale(3)
def main():
    net = Net()
    for k in range(9):
        learn()
        probe.trace(k, net.part(torch.tensor([2.0])).item())
        if k == 2: net.part = Power(4)
main()
"""
    run = run_script(_HEAD + source, 5)  # it would die of the attributes of the other class
    assert [line[0] for line in run.restored["lines"]] == [line[0] for line in run.expected["lines"]]
    named = run.captured["uncaptured"] + run.restored["problems"]
    assert any("taken the place of another module" in why for _, _, why in named), named
