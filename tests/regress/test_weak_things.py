"""A resume restored weak dicts by class as they were at first, lost callbacks of weak references and
finalizers of what came later, and ran the finalizers of what it discarded."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

BY_CLASS = """
import weakref
class A: pass
class B: pass
uses = weakref.WeakKeyDictionary()

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    kind = A if step % 3 else B
    uses[kind] = uses.get(kind, 0) + 1
final(*model.parameters(), uses=sorted((kind.__name__, n) for kind, n in uses.items()))
"""


def test_a_weak_dict_by_class_comes_back(jobs: Runner) -> None:
    jobs.same(BY_CLASS, 1, "0:8:before_seal")


DISPATCH = """
import functools
@functools.singledispatch
def cost(value):
    return 0
class A: pass
class B(A): pass
def of_a(value):
    return 1

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
costs, b = [], B()
for step in range(12):
    if step == 5:
        cost.register(A, of_a)
    if step in (0, 6, 10, 11):
        costs.append(cost(b))
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
final(*model.parameters(), costs=costs)
"""


def test_what_a_dispatched_function_has_looked_up_is_looked_up_again(jobs: Runner) -> None:
    jobs.same(DISPATCH, 1, "0:8:before_seal")


CALLBACK = """
import collections, weakref
class Connection: pass
class Sink:
    def closed(self): pass

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
closed, live, held, sink = [], {}, [], Sink()
for step in range(12):
    if step == 4:
        held.append(Connection())
        live[step] = MADE
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
final(*model.parameters())
"""


@pytest.mark.parametrize(
    ("made", "is_named"),
    [
        ("weakref.ref(held[-1], closed.append)", True),
        ("weakref.WeakMethod(sink.closed, closed.append)", True),
        ("weakref.finalize(held[-1], closed.append, step) and None", True),
        ("weakref.proxy(held[-1], closed.append)", True),
        ("weakref.ref(held[-1])", False),
        ("weakref.proxy(held[-1])", False),
        ("weakref.WeakMethod(sink.closed)", False),
    ],
)
def test_a_callback_that_comes_later_is_named(jobs: Runner, made: str, is_named: bool) -> None:
    said = jobs.run(CALLBACK.replace("MADE", made), 1, "0:8:before_seal")
    assert ("not restorable" in said) == is_named, said[-3000:]


FINALIZER = """
import collections, gc, weakref
class Slot: pass

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
freed, held = [], collections.deque()
for name in range(3):
    slot = Slot()
    CYCLE
    weakref.finalize(slot, freed.append, name)
    held.append(slot)
    del slot
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    if step in (3, 10):
        held.popleft()
        COLLECT
final(*model.parameters(), freed=freed, left=len(held))
"""


@pytest.mark.parametrize("cycle", ["", "slot.me = slot"])
def test_what_a_resume_discards_has_not_died(jobs: Runner, cycle: str) -> None:
    script = FINALIZER.replace("CYCLE", cycle).replace("COLLECT", "gc.collect()" if cycle else "")
    said = jobs.same(script, 1, "0:8:before_seal")
    assert "not restor" not in said, said[-3000:]


TREE = """
import weakref
class Node:
    __slots__ = ("parent", "kids", "count", "deepest", "__weakref__")
    def __init__(self, parent):
        self.parent = None if parent is None else weakref.ref(parent)
        self.kids, self.count, self.deepest = {}, 0, 0
class Walker:
    def __init__(self):
        self.calls = 0
        self.then = self.again = self.call
    def call(self):
        self.calls += 1
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
then, walkers = None, []
root = Node(None)
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    node, depth = root, 0
    while len(node.kids) > 1 and depth < 4:
        node, depth = node.kids[k % 2], depth + 1
    node.kids.update({i: Node(node) for i in range(2)})
    node = node.kids[k % 2]
    while node is not None:
        node.count += 1
        node = node.parent() if node.parent else None
    if k == 2:
        then = Walker().then
    if then is not None:
        then()
        assert then.__self__.again is then.__self__.then
def counts(node): return node.count, [counts(kid) for kid in node.kids.values()]
final(*model.parameters(), counts=counts(root), calls=then.__self__.calls)
"""


def test_trees_whose_nodes_lead_back_come_back_whole(jobs: Runner) -> None:
    """Children share one weak reference to their parent. A second one found the first unfinished,
    and was left without it, without a word."""
    jobs.same(TREE, 1, "0:8:before_seal")


ENDED = """
def numbers():
    yield from range(3)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
generator, pairs, out = numbers(), enumerate(numbers(), 5), []
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    out.append((next(generator, None), next(pairs, None)))
    if k == 8:
        pairs = enumerate("abcdef")
    if k > 8:
        generator.close()
final(*model.parameters(), out=out, kind=type(generator).__name__)
"""


def test_a_generator_that_has_ended_is_one(jobs: Runner) -> None:
    """It came back as another kind of iterator, which has no `close`, and a verification named it."""
    said = jobs.same(ENDED, 1, "0:8:before_seal", REFT_RESUME_VERIFY="always")
    assert "bit-identical" in said and "not exact" not in said, said[-3000:]
