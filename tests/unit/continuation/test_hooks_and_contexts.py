"""Resumes restore, or name, what these hold: copies of contexts, contexts of decimal numbers, hooks on
nodes of autograd, filters of loggers, bytearrays under tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

torch = pytest.importorskip("torch")

from reft._continuation import node_hooks  # noqa: E402

Run = Callable[..., Any]

HEADER = (
    """
import contextvars, decimal, logging
import numpy as np
import probe, torch
probe.hook_optimizers()
"""
    + LEARN
)

SCRIPTS = {
    "contexts": """
heat, rows, hidden = contextvars.ContextVar("heat", default=1.0), contextvars.ContextVar("rows"), []
def bump(by):
    heat.set(heat.get() + by)
    rows.get().append(heat.get())
    if by == 3:
        hidden.append(contextvars.copy_context())  # one that comes later
def main():
    held, numbers = contextvars.copy_context(), decimal.Context(prec=5)
    held.run(rows.set, [])
    with np.errstate(all="ignore"), decimal.localcontext():
        other = contextvars.copy_context()
    for step in range(8):
        learn()
        held.run(bump, step)
        other.run(heat.set, step)
        numbers.prec += 1
        heat.set(heat.get() * 2)
        probe.trace(step, held[heat], held[rows], heat.get(), other[heat], str(numbers.sqrt(2)), len(hidden))
        probe.trace([one[rows] is held[rows] and one[heat] for one in hidden])
main()
""",
    "a loop in a context": """
heat = contextvars.ContextVar("heat", default=1.0)
held = contextvars.copy_context()
def main():
    for step in range(8):
        learn()
        heat.set(heat.get() * 2)
        probe.trace(step, held.get(heat), heat.get())
held.run(main)
""",
    "a block of decimals": """
from decimal import Decimal, localcontext
def main():
    with localcontext() as numbers:
        numbers.prec = 4
        for step in range(8):
            learn()
            numbers.prec += 1
            probe.trace(step, str(Decimal(1) / 3), numbers.flags[decimal.Inexact])
            numbers.flags[decimal.Inexact] = step % 2
    probe.trace(decimal.getcontext().prec)
main()
""",
    "hooks on nodes": """
def counter(step=1):
    n = 0
    def count(*gradients):
        nonlocal n
        n += step
        heard.append(n)
    return count
class Meter:
    total = 0
    def __call__(self, *gradients):
        self.total += 1
        heard.append(-self.total)
def main():
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_hook(counter())
    nodes[0].register_prehook(Meter())
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), counter(10))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), counter(20), mode="any")
    for step in range(8):
        heard.clear()
        learn()
        probe.trace(step, sorted(heard))
heard = []
main()
""",
    "hooks on the nodes of an iteration": """
def main():
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        seen = []
        loss.grad_fn.register_hook(lambda *_: seen.append(step))
        loss.register_hook(lambda gradient: seen.append(step))
        loss.backward()
        optimizer.step()
        probe.trace(step, seen)
main()
""",
    "hooks on a node that are registered in each iteration": """
def main():
    total = [0]
    node = model.bias.expand_as(model.bias).grad_fn.next_functions[0][0]
    for step in range(8):
        hook = node.register_hook(lambda *_: total.append(step))
        learn()
        hook.remove()
        probe.trace(step, total)
main()
""",
    "adapters and filters of loggers": """
class Count(logging.Filter):
    def __init__(self):
        super().__init__()
        self.n, self.last = 0, []
    def filter(self, record):
        self.n += 1
        self.last.append(record.getMessage())
        return False
def main():
    logger = logging.getLogger("a.b")
    logger.addFilter(Count())
    handler = logging.NullHandler()
    handler.addFilter(Count())
    logging.getLogger("a").addHandler(handler)
    adapter = logging.LoggerAdapter(logging.getLogger("a.c"), {"n": 0})
    for step in range(8):
        learn()
        adapter.extra["n"] += step
        logging.getLogger("a.b").error("b %d", step)
        logging.getLogger("a.c").error("c %d", step)
        filters = [*logging.getLogger("a.b").filters, *logging.getLogger("a").handlers[0].filters]
        probe.trace(step, adapter.extra, [(one.n, one.last) for one in filters])
main()
""",
    "tensors over bytearrays": """
room, row = bytearray(32), np.frombuffer(bytearray(16), np.int32)
def main():
    over = torch.frombuffer(room, dtype=torch.float32)
    also = np.frombuffer(room, np.uint8)
    for step in range(8):
        learn()
        over[step] += 0.5
        row[step % 4] += 1
        room[1] = step
        probe.trace(step, over.tolist(), room.hex(), row.tolist(), also.tolist())
main()
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_comes_back(run_script: Run, name: str) -> None:
    result = run_script(HEADER + SCRIPTS[name], 5)
    result.check()
    handles = [what for _, what, _ in result.captured["uncaptured"]]
    assert handles == ["torch.utils.hooks.RemovableHandle"] * ("registered in each" in name), result.captured


NAMED = {
    "a block of decimals that is entered in each iteration": (
        """
def main():
    for step in range(8):
        with decimal.localcontext():
            learn()
            probe.trace(step)
main()
""",
        ("the `with localcontext()` block in main", "decimal.ContextManager", "the context that comes back at its end"),
    ),
    "a bytearray that comes later": (
        """
def main():
    over = None
    for step in range(8):
        if step == 1:
            room = bytearray(32)
            over = torch.frombuffer(room, dtype=torch.float32)
        learn()
        if step:
            probe.trace(step, len(room), over.tolist())
main()
""",
        ("main:room", "bytearray", "shares its memory with a tensor or an array"),
    ),
    "a context that comes later and has what cannot be read": (
        """
def main():
    held = None
    for step in range(8):
        if step == 1:
            with np.errstate(all="ignore"):
                held = contextvars.copy_context()
        learn()
        probe.trace(step, held is None)
main()
""",
        ("main:held[numpy.ufunc.extobj]", "builtins.PyCapsule", "nothing can be read of its state"),
    ),
    "a store": (
        """
def main():
    store = torch.distributed.HashStore()
    for step in range(8):
        learn()
        probe.trace(step, store.add("n", 1))
main()
""",
        ("main:store", "torch.distributed.distributed_c10d.HashStore", "what the script keeps in a store is not"),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_it_is_named(run_script: Run, name: str) -> None:
    script, (place, kind, why) = NAMED[name]
    found = run_script(HEADER + script, 6).captured["uncaptured"]
    assert any(one[0] == place and one[2].startswith(why) for one in found), found
    assert len(found) == 1, (kind, found)


def iterate() -> None:
    torch.ones(1, requires_grad=True).sum()


def test_a_node_that_comes_late_and_stays_counts() -> None:
    nodes = node_hooks._Nodes()
    first, late = OrderedDict({0: iterate}), OrderedDict({1: iterate})
    nodes.add(first)
    assert [name for name, _ in nodes.of_script(is_first=True)] == ["<hook of autograd node 0: 0>"]
    nodes.add(late)
    for _ in range(2):
        iterate()
        of_iteration = OrderedDict({2: iterate})
        nodes.add(of_iteration)
        assert len(nodes.of_script(is_first=False)) == 1
        nodes.of_script(is_first=False)  # a second look in the same iteration
    iterate()
    assert [name for name, _ in nodes.of_script(is_first=False)] == [
        "<hook of autograd node 0: 0>",
        "<hook of autograd node 1: 0>",
    ]
    first.clear()
    assert nodes.gone() == ["<hook of autograd node 0: 0>"]
    del first
    assert nodes.gone() == []


def test_hooks_that_nodes_had_before_are_found() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_hook(iterate)  # is no node's
    module = torch.nn.Linear(1, 1)
    module.register_forward_hook(iterate)
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(iterate)
    nodes = node_hooks._Nodes()
    nodes.find_earlier()
    assert [hook for _, hook in nodes.of_script(is_first=True)] == [iterate]
