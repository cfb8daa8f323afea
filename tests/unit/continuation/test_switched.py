"""What names of modules and attributes of classes mean changes while the loop runs: functions,
classes, modules; names that are deleted; globals that no code names."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import functools, random, types
import torch
import probe
probe.hook_optimizers()
{LEARN}
"""

# What the loop prints, what it does after its third round, what comes before both, and the module
# `helpers`.
SWITCHES = {
    "function of a module": (
        "helpers.run(3)", "helpers.act = helpers.late", "import helpers",
        """
        def early(x): return x
        def late(x): return x * 100
        act = early
        def run(x): return act(x)
        """,
    ),
    "nothing to function": (
        "helpers.run(3)", "helpers.callback = helpers.late", "import helpers",
        """
        callback = None
        def late(x): return x * 100
        def run(x): return callback(x) if callback else x
        """,
    ),
    "function to nothing": (
        "helpers.run(3)", "helpers.callback = None", "import helpers",
        """
        def callback(x): return x * 100
        def run(x): return callback(x) if callback else x
        """,
    ),
    "class of a module": (
        "helpers.kind().n", "helpers.kind = helpers.Late", "import helpers",
        """
        class Early: n = 1
        class Late: n = 2
        kind = Early
        """,
    ),
    "module of a module": (
        "helpers.lib.__name__", "helpers.lib = helpers.other", "import helpers",
        """
        import math, cmath as other
        lib = math
        """,
    ),
    "module of the main module": (
        "LIB.__name__", "LIB = cmath", "import math, cmath\nLIB = math", "",
    ),
    "method of a class": (
        "Policy().act(3)", "Policy.act = Policy.late",
        """
        class Policy:
            def act(self, x): return x
            def late(self, x): return x * 100
        """, "",
    ),
    "class of a class": (
        "Net.block.n", "Net.block = Late",
        """
        class Early: n = 1
        class Late: n = 2
        class Net: block = Early
        """, "",
    ),
    "function of a class that had none": (
        "Net().run(3)", "Net.hook = scaled",
        """
        def scaled(self, x): return x * 100
        class Net:
            hook = None
            def run(self, x): return self.hook(x) if self.hook else x
        """, "",
    ),
    "module with a class of its own": (
        "helpers.count", "helpers.count = 7", "import helpers",
        """
        import sys, types
        count = 0
        class _Module(types.ModuleType): pass
        sys.modules[__name__].__class__ = _Module
        """,
    ),
    "global that no code names": (
        "globals()['le' + 'vel']", "globals().update({'le' + 'vel': 7})", "level = 0", "",
    ),
    "global of the main module, by another one": (
        "helpers.bump()", "pass", "import helpers\ncounted = 0",
        """
        import sys
        def bump():
            sys.modules['__main__'].counted += 1
            return sys.modules['__main__'].counted
        """,
    ),
    "deleted name of a module": (
        "hasattr(helpers, 'cache')", "del helpers.cache", "import helpers", "cache = [1]",
    ),
    "deleted function of a module": (
        "hasattr(helpers, 'hook')", "del helpers.hook", "import helpers", "def hook(): pass",
    ),
    "deleted attribute of a class": (
        "hasattr(Net, 'hook')", "del Net.hook", "class Net:\n    def hook(self): pass", "",
    ),
    "deleted attribute of a module tree": (
        "hasattr(NET, 'cache')", "del NET.cache",
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cache = [1]
        NET = Net()
        """, "",
    ),
    "emptied slot": (
        "hasattr(ITEM, 'cache')", "del ITEM.cache",
        """
        class Item:
            __slots__ = ('cache',)
        ITEM = Item()
        ITEM.cache = 1
        """, "",
    ),
    "deleted attribute of a list": (
        "hasattr(ITEMS, 'cache')", "del ITEMS.cache",
        """
        class Items(list): pass
        ITEMS = Items()
        ITEMS.cache = 1
        """, "",
    ),
    "attribute of a tuple": (
        "PAIR.count()", "pass",
        """
        class Pair(tuple):
            def count(self):
                self.n += 1
                return self.n
        PAIR = Pair((1, 2))
        PAIR.n = 0
        """, "",
    ),
    "slot of a list": (
        "ITEMS.move()", "pass",
        """
        class Items(list):
            __slots__ = ('head',)
            def move(self):
                self.head += 1
                return self.head
        ITEMS = Items()
        ITEMS.head = 0
        """, "",
    ),
    "defaults of other kinds": (
        "counted()", "pass",
        """
        class Counter(torch.nn.Module):
            n = 0
            def more(self):
                self.n += 1
                return self.n
        import itertools
        def counted(
            pair=([0], 1), numbers=torch.zeros(2), more=Counter().more, net=Counter(),
            following=iter(range(99)).__next__, numbered=itertools.count(),
        ):
            pair[0][0] += 1
            numbers.add_(1)
            return pair[0][0], numbers[0].item(), more(), net.more(), following(), next(numbered)
        """, "",
    ),
    "default that is a function with a closure": (
        "numbered()", "pass",
        """
        def counter():
            n = 0
            def following():
                nonlocal n
                n += 1
                return n
            return following
        def numbered(count=counter()): return count()
        """, "",
    ),
    "default that is a partial call": (
        "listed()", "pass",
        """
        def add(to):
            to.append(1)
            return len(to)
        def listed(count=functools.partial(add, [])): return count()
        """, "",
    ),
    "whether a parameter of no module takes part in autograd": (
        "[p.requires_grad for p in LEAVES]", "LEAVES[0].requires_grad_(False)",
        """
        LEAVES = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
        OPTIMIZER = torch.optim.SGD(LEAVES, 0.1)
        def learn():
            sum(p.sum() for p in LEAVES if p.requires_grad).backward()
            OPTIMIZER.step()
        """, "",
    ),
}  # fmt: skip


def script(printed: str, change: str, before: str) -> str:
    changes = f"global LIB; {change}" if "LIB =" in change else change
    return f"""{_HEAD}
{textwrap.dedent(before)}
def switch():
    {changes}
def main():
    for k in range(9):
        learn()
        probe.trace(k, {printed})
        if k == 2: switch()
main()
"""


@pytest.mark.parametrize("name", SWITCHES)
def test_it_is_what_it_was(run_script: Run, tmp_path: Path, name: str) -> None:
    printed, change, before, helpers = SWITCHES[name]
    (tmp_path / "helpers.py").write_text(textwrap.dedent(helpers))
    run_script(script(printed, change, before), 5).check()


def test_functions_that_have_changed_places_are_named(run_script: Run, tmp_path: Path) -> None:
    """Each one's name leads to the other."""
    before = """
    class Policy:
        def early(self, x): return x
        def late(self, x): return x * 100
    """
    change = "Policy.early, Policy.late = Policy.late, Policy.early"
    run = run_script(script("Policy().early(3)", change, before), 5)
    named = {where for where, _, _ in run.captured["uncaptured"] + run.restored["problems"]}
    assert {"__main__:Policy.early", "__main__:Policy.late"} <= named, run.restored


def test_another_static_method_is_named(run_script: Run) -> None:
    before = "class Net:\n    loss = staticmethod(max)"
    run = run_script(script("Net.loss(3, 4)", "Net.loss = staticmethod(min)", before), 5)
    assert run.captured["uncaptured"][0][0] == "__main__:Net.loss", run.captured["uncaptured"]
