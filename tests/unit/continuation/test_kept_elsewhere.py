"""What a script keeps where no variable of its modules leads: on members of enumerations, in modules
of others, behind descriptors and NumPy's functions, in the registries of packages."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import builtins, collections, copy, copyreg, enum, functools, random, sys
import numpy as np
import torch
import probe
probe.hook_optimizers()
{LEARN}
"""

# What each round prints, and changes by that; and what comes before the loop.
CASES = {
    "private attribute of a member": (
        "Phase.A.use()",
        """
        class Phase(enum.Enum):
            A = 1
            def __init__(self, value): self._uses = 0
            def use(self):
                self._uses += 1
                return self._uses
        """,
    ),
    "attribute of a member that is deleted": (
        "Phase.A.use(k)",
        """
        class Phase(enum.Enum):
            A = 1
            def use(self, k):
                if k == 3:
                    del self._cached
                    self._other = 8
                return getattr(self, "_cached", None), getattr(self, "_other", None)
        Phase.A._cached = 7
        """,
    ),
    "attribute of a class of members": (
        "Phase.use()",
        """
        class Phase(enum.Enum):
            A = 1
            @classmethod
            def use(cls):
                cls.uses = getattr(cls, "uses", 0) + 1
                return cls.uses
        """,
    ),
    "list that is the value of a member": (
        "Phase.A.value.append(k) or list(Phase.A.value)",
        """
        class Phase(enum.Enum):
            A = []
            B = "b", 1
        """,
    ),
    "default of a method of members": (
        "Phase.A.use(k)",
        """
        class Phase(enum.Flag):
            A = 1
            def use(self, k, seen=[]):
                seen.append(k)
                return len(seen)
        """,
    ),
    "own object among the builtins": (
        "tracker.add(k)",
        """
        class Tracker:
            def __init__(self): self.seen = []
            def add(self, k):
                self.seen.append(k)
                return list(self.seen)
        builtins.tracker = Tracker()
        """,
    ),
    "own object that all modules see": (
        "tracker.append(k) or len(tracker)",
        """
        class Tracker(list): pass
        vars(builtins).update(tracker=Tracker())
        """,
    ),
    "counter in a module of others": (
        "sys.meter.update([k]) or dict(sys.meter)", "sys.meter = collections.Counter()",
    ),
    "own objects in parts of torch": (
        "next(torch.nn.turns), len(torch.optim.seen), torch.fft.own.append(k) or len(torch.fft.own)",
        """
        class Seen(list): pass
        torch.nn.turns = iter(range(99))
        def register():
            from torch import optim, fft as there
            optim.seen = Seen()
            setattr(there, "own", collections.deque())
        register()
        """,
    ),
    "function that counts in the place of a package's": (
        "random.triangular(k)",
        """
        def counted(function):
            calls = []
            @functools.wraps(function)
            def calling(k):
                calls.append(k)
                return len(calls)
            return calling
        random.triangular = counted(random.triangular)
        """,
    ),
    "arguments of a partial method": (
        "HOLDER.add(k)",
        """
        def add(self, to, k):
            to.append(k)
            return len(to)
        class Holder: add = functools.partialmethod(add, [])
        HOLDER = Holder()
        """,
    ),
    "function of a partial method": (
        "HOLDER.add(k)",
        """
        def add(self, factor, k, to=[]):
            to.append(k)
            return factor * len(to)
        class Holder: add = functools.partialmethod(add, 2)
        del add
        HOLDER = Holder()
        """,
    ),
    "default of a setter": (
        "HOLDER.put(k)",
        """
        class Holder:
            @property
            def last(self): return self.count
            @last.setter
            def last(self, k, seen=[]):
                seen.append(k)
                self.count = len(seen)
            def put(self, k):
                self.last = k
                return self.last
        HOLDER = Holder()
        """,
    ),
    "default of one of the functions of a method": (
        "HOLDER.on(k), HOLDER.on(str(k))",
        """
        class Holder:
            @functools.singledispatchmethod
            def on(self, x): return 0
            @on.register
            def _(self, x: int, seen=[]): return seen.append(x) or len(seen)
            @on.register
            def _(self, x: str): return x
        HOLDER = Holder()
        """,
    ),
    "closure of a NumPy function": (
        "int(FUNCTION(k))",
        """
        def made(seen): return np.frompyfunc(lambda k: seen.append(k) or len(seen), 1, 1)
        FUNCTION = made([])
        """,
    ),
    "closure of a function over arrays": (
        "int(FUNCTION(k))",
        """
        def made(seen): return np.vectorize(lambda k: seen.append(k) or len(seen))
        FUNCTION = made([])
        """,
    ),
    "partial call of a function over arrays": (
        "int(FUNCTION(k))",
        """
        def add(seen, k): return seen.append(k) or len(seen)
        FUNCTION = np.vectorize(functools.partial(add, []))
        """,
    ),
    "implementation of an operator": (
        "torch.ops.kept.count(torch.zeros(1)).item()",
        """
        def define():
            seen = []
            @torch.library.custom_op("kept::count", mutates_args=())
            def count(x: torch.Tensor) -> torch.Tensor:
                seen.append(1)
                return x + len(seen)
            torch.definition = count
        define()
        """,
    ),
    "how an object is copied": (
        "copy.copy(BOX).n",
        """
        class Box:
            def __init__(self, n): self.n = n
        def register():
            seen = []
            copyreg.pickle(Box, lambda box: (Box, (seen.append(1) or len(seen),)))
        register()
        BOX = Box(0)
        """,
    ),
    "how an object is taken apart": (
        "torch.utils._pytree.tree_map(lambda n: n, BOX).n",
        """
        import torch.utils._pytree
        class Box:
            def __init__(self, n): self.n = n
        class Parts:
            def __init__(self): self.count = 0
            def __call__(self, box):
                self.count += 1
                return [box.n], self.count
            def whole(self, parts, count): return Box(count + self.count)
        parts = Parts()
        torch.utils._pytree.register_pytree_node(Box, parts, parts.whole)
        del parts
        BOX = Box(0)
        """,
    ),
    "how objects are put into a batch": (
        "torch.utils.data.default_collate([BOX, BOX])",
        """
        class Box: pass
        def register():
            seen = []
            def collate(batch, *, collate_fn_map=None): return seen.append(1) or len(seen)
            torch.utils.data._utils.collate.default_collate_fn_map[Box] = collate
        register()
        BOX = Box()
        """,
    ),
}  # fmt: skip


def script(printed: str, before: str) -> str:
    return f"""{_HEAD}
{textwrap.dedent(before)}
def main():
    for k in range(9):
        learn()
        probe.trace(k, {printed})
main()
"""


@pytest.mark.parametrize("name", CASES)
def test_it_is_restored(run_script: Run, name: str) -> None:
    run_script(script(*CASES[name]), 5).check()


def test_members_of_a_class_that_a_function_has_made(run_script: Run) -> None:
    before = """
    def made():
        class Phase(enum.Enum):
            A = 1
            def use(self):
                self._uses = getattr(self, "_uses", 0) + 1
                return self._uses
        return Phase.A
    MEMBER = made()
    """
    run = run_script(script("MEMBER.use()", before), 5)
    named = [where for where, _, _ in run.captured["uncaptured"] + run.restored["problems"]]
    assert named or run.restored["lines"] == run.expected["lines"], run.restored


def test_registered_later_is_named(run_script: Run) -> None:
    before = """
    class Box: pass
    def register(seen):
        def reduced(box): return Box, (seen.append(1) or ())
        copyreg.pickle(Box, reduced)
    """
    run = run_script(script("register([]) if k == 2 else None", before), 5)
    place = "registered.copyreg.dispatch_table[__main__.Box]"
    assert place in {where for where, _, _ in run.captured["uncaptured"]}, run.captured
