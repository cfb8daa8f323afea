"""State that no variable of the script leads to began again, and reft called the resume bit-identical:
private attributes of enum members, own objects in modules of others, arguments of partial methods,
closures of NumPy's functions and of functions that were registered with packages."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import builtins, collections, copy, copyreg, enum, functools, sys
import numpy
import torch.utils._pytree as pytree

class Phase(enum.Enum):
    A, B = 1, 2
    def __init__(self, value):
        self._uses, self._log = 0, []
    def use(self, k):
        self._uses += 1
        self._log.append(k)
        return self._uses, len(self._log)

class Tracker:
    def __init__(self):
        self.seen = []

builtins.tracker = Tracker()
sys.meter = collections.Counter()

def add(self, to, k):
    to.append(k)
    return len(to)

class Holder:
    add = functools.partialmethod(add, [])

class Box:
    def __init__(self, n):
        self.n = n

def vectorized(seen):
    return numpy.frompyfunc(lambda k: seen.append(k) or len(seen), 1, 1)

def register():
    calls = collections.Counter()
    def parts(box):
        calls["parts"] += 1
        return [box.n], calls["parts"]
    def reduced(box):
        calls["reduced"] += 1
        return Box, (calls["reduced"],)
    @torch.library.custom_op("regress::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls["operator"] += 1
        return x * calls["operator"]
    pytree.register_pytree_node(Box, parts, lambda items, calls: Box(calls))
    copyreg.pickle(Box, reduced)

register()
function, holder, box, last = vectorized([]), Holder(), Box(0), ()
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    phase = Phase.A if k % 3 else Phase.B
    tracker.seen.append(k)
    sys.meter[k % 2] += 1
    last = (
        phase.use(k), len(tracker.seen), dict(sys.meter), holder.add(k), int(function(k)),
        pytree.tree_map(lambda n: n, box).n, copy.copy(box).n,
        torch.ops.regress.counted(torch.ones(1)).item(),
    )
final(*model.parameters(), last=last)
"""


def test_it_is_restored(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:8:before_seal")
    assert "not restor" not in said, said
