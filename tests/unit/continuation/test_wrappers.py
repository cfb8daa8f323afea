"""What lies in weak containers, proxies, exceptions, classes and modules made at run time comes back, as do attributes
of objects of others; what cannot is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import ASIDE, LEARN

pytest.importorskip("torch")

Run = Callable[..., Any]

HEADER = """
import collections, datetime, functools, itertools, logging, random, threading, types, weakref
import numpy as np
import probe, torch
probe.hook_optimizers()
""" + LEARN

SCRIPTS = {
    "weak_containers": """
class Item:
    def __init__(self, n):
        self.n = n
""" + ASIDE + """class Holder:
    total = Aside()
def main():
    items = {n: Item(n) for n in range(3)}
    counts, cache, alive = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary(), weakref.WeakSet()
    holder = Holder()
    for step in range(8):
        learn()
        items[step % 3].n += step
        counts[items[step % 3]] = counts.get(items[step % 3], 0) + step
        cache[step % 2] = items[step % 3]
        alive.add(items[step % 3])
        if step % 4 == 3:
            alive.discard(items[0])
        holder.total += step
        probe.trace(step, sorted(counts.values()), [(k, v.n) for k, v in sorted(cache.items())], sorted(one.n for one in alive), holder.total)
        probe.trace(all(one in items.values() for one in [*counts, *cache.values(), *alive]))
main()
""",
    "weak_references": """
class Item:
    def __init__(self, n):
        self.n, self.left = n, iter({k: k for k in range(40)})
    def turn(self, k):
        self.n += k
        return self.n + next(self.left)
    def __call__(self, k):
        self.n -= k
        return self.n
ITEMS = [Item(n) for n in range(5)]  # no function reads it: only what is weak leads there
METHOD, PROXY = weakref.WeakMethod(ITEMS[0].turn), weakref.proxy(ITEMS[1])
CALLED, GONE = [], lambda reference: None
CALLED.append(weakref.ref(ITEMS[2], GONE))
def main(later=None):
    dead = weakref.proxy(Item(9))
    for step in range(8):
        learn()
        del dead
        dead = weakref.proxy(Item(9))
        PROXY(step)
        CALLED[0]().turn(step)
        if step == 1:
            later = weakref.WeakMethod(PROXY.turn)
        probe.trace(step, METHOD()(step), PROXY.n, CALLED[0]().n, later and later()(step))
main()
""",
    "proxies_and_exceptions": """
class Stop(Exception):
    pass
def main():
    seen, last, plain = types.MappingProxyType({"n": [], "k": {}}), Stop(0), None
    held = [seen]
    for step in range(8):
        learn()
        seen["n"].append(step)
        seen["k"][step % 3] = step
        last.args = (last.args[0] + step,)
        last.where = step
        if step == 2:
            plain = ValueError("late", [step])
        if plain:
            plain.args[1].append(step)
        probe.trace(step, list(seen["n"]), dict(seen["k"]), held[0] is seen, last.args, last.where, repr(plain))
main()
""",
    "classes_and_modules_made_at_run_time": """
def made():
    class Box:
        n, seen = 0, []
        def turn(self):
            Box.n += 1
            Box.seen.append(Box.n)
    return Box
Box = made()
made_module = types.ModuleType("made_module")
made_module.n = 0
def main():
    Local, other = made(), type("Other", (), {"n": 0})
    for step in range(8):
        learn()
        Box().turn()
        Local().turn(), Local().turn()
        other.n += step
        made_module.n += step
        probe.trace(step, Box.n, Box.seen, Local.n, Local.seen, other.n, made_module.n)
main()
""",
    "attributes_of_objects_of_others": """
scaled = functools.partial(max, 1)
scaled.calls = 0
source = random.Random(1)
source.drawn = 0
def main():
    model.when, model.turn, model.rng = datetime.datetime(2020, 1, 1), itertools.count(), random.Random(3)
    optimizer.best, optimizer.order = np.float64(9), iter(range(90))
    gate, spawning = threading.Semaphore(30), np.random.default_rng(3)
    optimizer.defaults["patience"], space, flag, logger = 3, {"n": 0}, threading.Event(), logging.getLogger("made")
    flag.turns = logger.turns = 0
    model.rows, model.error = torch.utils.data.TensorDataset(torch.zeros(3)), ValueError(0)
    for step in range(8):
        learn()
        model.when += datetime.timedelta(hours=1)
        scaled.calls += 1
        source.drawn += 1
        gate.acquire()
        optimizer.best = optimizer.best * 0.5
        optimizer.defaults["patience"] += step
        exec(f"n += {step}", space)
        flag.turns, logger.turns = flag.turns + step, logger.turns + 1
        model.rows.tensors[0][step % 3] += 1
        model.error.args = (step,)
        more = [optimizer.defaults["patience"], space["n"], flag.turns, logger.turns, model.rows.tensors[0].tolist(), model.error.args]
        drawn = [next(model.turn), model.rng.random(), next(optimizer.order), source.random(), spawning.spawn(1)[0].random()]
        probe.trace(step, str(model.when), drawn, more, float(optimizer.best), scaled.calls, source.drawn, gate._value)
main()
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_state_in_wrappers_comes_back(run_script: Run, name: str) -> None:
    result = run_script(HEADER + SCRIPTS[name], 5)
    result.check()
    assert result.captured["uncaptured"] == []


NAMED = {
    "a coroutine": (
        """
class Turn:
    def __await__(self):
        yield 1
async def turning():
    while True:
        await Turn()
state, use = turning(), lambda: state.send(None)
""",
        "a suspended coroutine",
    ),
    "a compressor": ("import zlib\nstate, use = zlib.compressobj(), lambda: state.compress(b'x')", "nothing can be read"),
    "a database": (
        "import sqlite3\nstate = sqlite3.connect(':memory:')\nstate.execute('create table t (n)')\n"
        "use = lambda: state.execute('insert into t values (1)')",
        "has changed since the first step",
    ),
    "a tree of XML": (
        "import xml.etree.ElementTree as ET\nstate, use = ET.Element('a'), lambda: ET.SubElement(state, 'b')",
        "has changed since the first step",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_state_that_nothing_can_read_is_named(run_script: Run, name: str) -> None:
    made, why = NAMED[name]
    loop = "for step in range(6):\n    learn()\n    use()\n    probe.trace(step, len([state]))\n"
    result = run_script(HEADER + made + "\n" + loop, 4)
    assert any(why in reason for _, _, reason in result.captured["uncaptured"]), result.captured
