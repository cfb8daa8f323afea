"""Loops over Python's own iterators resume where they stood, on every supported interpreter, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

HEADER = "import probe, itertools\n"

LOOPS = {
    "nested_ranges": """
def main():
    total = 0
    for epoch in range(4):
        for i in range(epoch + 2):
            total += epoch * 10 + i
            probe.step()
            probe.trace(epoch, i, total)
    probe.trace("end", total)
main()
""",
    "module_level": """
total, history = 0, []
for epoch in range(4):
    for i, word in enumerate(["a", "b", "c"]):
        total += i
        history.append(total)
        probe.step()
        probe.trace(epoch, i, word, total, history)
probe.trace("end", total)
""",
    "enumerate_zip_range": """
def main():
    losses = []
    for i, (a, b) in enumerate(zip(range(0, 100, 7), [x * x for x in range(12)]), start=3):
        losses.append(a * b)
        probe.step()
        probe.trace(i, a, b, losses)
main()
""",
    "while_and_count": """
def main():
    step, counter = 0, itertools.count(10, 5)
    while step < 12:
        value = next(counter)
        step += 1
        probe.step()
        probe.trace(step, value)
main()
""",
    "half_evaluated_expression": """
def train(x):
    probe.step()
    return x * 3
def main():
    total, seen = 0, []
    for x in range(10):
        total += x + len([x, *seen, train(x)])
        seen.append(total)
        probe.trace(x, total, seen)
main()
""",
    "generators": """
def forever(items):
    n = 0
    while True:
        for item in items:
            n += 1
            yield n, item
def main():
    source = forever([5, 6, 7])
    for step in range(9):
        n, item = next(source)
        probe.step()
        probe.trace(step, n, item)
    for n, item in forever("xy"):
        probe.trace(n, item)
        if n > 3:
            break
main()
""",
    "loop_inside_generator": """
def epochs(count):
    for epoch in range(count):
        for i in reversed(range(3)):
            probe.step()
            yield epoch, i
def main():
    for epoch, i in epochs(4):
        probe.trace(epoch, i)
main()
""",
    "many_iterators": """
def main():
    table = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7, "h": 8}
    chained = itertools.chain("pq", range(20))
    for (key, value), r, m, s in zip(
        table.items(), reversed([1, 2, 3, 4, 5, 6, 7, 8]), map(abs, range(-9, 0)), itertools.islice(range(50), 2, 40, 3)
    ):
        c = next(chained)
        probe.step()
        probe.trace(key, value, r, m, s, c)
main()
""",
    "counters_of_a_trainer": """
class Meter:
    def __init__(self):
        self.sum, self.count, self.best = 0.0, 0, None
class Slotted:
    __slots__ = ("value", "name")
class Trainer:
    def __init__(self):
        self.step, self.epoch, self.meter, self.log = 0, 0, Meter(), []
        self.alias = self.log
        self.slotted = Slotted()
        self.slotted.value = 1
        self.by_name = {"train": self.meter}
    def one(self, x):
        self.step += 1
        self.meter.sum += x
        self.meter.count += 1
        self.log.append(self.step)
        self.slotted.value *= 2
        if self.step == 3:
            self.late = Meter()
            self.late.sum = 42
        probe.step()
    def fit(self):
        for self.epoch in range(4):
            for x in (0.5, 1.5, 2.5):
                self.one(x)
                self.alias.append(-x)
                m = self.by_name["train"]
                late = getattr(self, "late", None)
                probe.trace(self.step, self.epoch, m.sum, m.count, m.best, self.log, late and late.sum)
                probe.trace(self.slotted.value, self.alias is self.log, m is self.meter)
Trainer().fit()
""",
    "globals_of_functions": """
count, seen = 0, {}
def one(x):
    global count, late
    count += 1
    late = count * 2
    seen[x] = count
    probe.step()
def main():
    for x in "abcdefgh":
        one(x)
        probe.trace(x, count, late, seen)
main()
""",
    "closures_and_with": """
import contextlib
def main():
    hits = 0
    def hit():
        nonlocal hits
        hits += 1
    for i in range(6):
        with contextlib.nullcontext(i) as value:
            hit()
            for j in [value, value + 1]:
                try:
                    probe.step()
                finally:
                    probe.trace(i, j, hits, [k * hits for k in range(2)])
main()
""",
    "generators_at_other_yields": """
def batches(items, size):
    buffer = []
    for item in items:
        buffer.append(item)
        if len(buffer) == size:
            yield buffer
            buffer = []
    if buffer:
        yield buffer
def both(a, b):
    yield from batches(a, 2)
    for x in b:
        yield [x]
class Reader:
    def stream(self, start):
        for i in range(start, start + 3):
            yield i
def main():
    unused, reader, late = batches([7, 8, 9], 2), Reader(), None
    for step, batch in enumerate(both(range(5), "abcdefgh")):
        probe.step()
        if step == 2:
            late = reader.stream(10)
        probe.trace(step, batch, next(late, None) if late else None, next(unused, None) if step > 3 else 0)
main()
""",
    "closures_in_containers": """
import functools
class Callbacks:
    def __init__(self):
        self.calls = 0
    def on_value(self, by):
        self.calls += by
def counter():
    count, history = 0, []
    def tick():
        nonlocal count
        count += 1
        history.append(count)
        return count, list(history)
    return tick
tick_global = counter()
def main():
    registry = {"ticks": [counter(), counter()], "hooks": [Callbacks().on_value, functools.partial(Callbacks().on_value, 2)]}
    for step in range(9):
        probe.step()
        registry["hooks"][0](3)
        registry["hooks"][1]()
        owners = [registry["hooks"][0].__self__, registry["hooks"][1].func.__self__]
        probe.trace(step, [tick() for tick in registry["ticks"]], [owner.calls for owner in owners], tick_global())
main()
""",
    "positions_that_equal_descriptors": """
import os
def main():
    opened = [os.dup(1) for _ in range(8)]
    ids = list(range(100, 130))
    first, second = iter(ids), enumerate(ids, 3)
    for _ in range(4):
        next(first)
    for a, (b, c) in zip(itertools.islice(ids, 4, 30), second):
        probe.step()
        probe.trace(a, b, c, next(first))
main()
""",
    "stages_of_objects": """
class Stage:
    def __init__(self, name):
        self.name, self.uses, self.call = name, 0, print
def main():
    stages = [Stage("first"), Stage("second"), Stage("third")]
    for stage in stages:
        for i in range(3):
            stage.uses += 1
            probe.step()
            probe.trace(stage.name, i, [s.uses for s in stages], [s is stage for s in stages])
main()
""",
}


@pytest.mark.parametrize("at", [1, 5, 8])
@pytest.mark.parametrize("name", LOOPS)
def test_loop_continues_where_it_was_killed(run_script: Run, any_python: str, name: str, at: int) -> None:
    run_script(HEADER + LOOPS[name], at, any_python).check()


def test_changed_code_is_refused_by_name(run_script: Run, any_python: str) -> None:
    source = HEADER + LOOPS["nested_ranges"]
    result = run_script(source, 4, any_python, restore_source=source.replace("* 10", "* 11"))
    assert "main: the code has changed" in result.restored["mismatch"]


def test_another_call_site_is_refused(run_script: Run, any_python: str) -> None:
    source = (
        HEADER
        + """
def main(late):
    for i in range(8):
        if i < late:
            probe.step()
        else:
            probe.step()
        probe.trace(i)
main(3)
"""
    )
    result = run_script(source, 6, any_python)
    assert "the call in progress was in line" in result.restored["mismatch"]
    assert result.restored["lines"][0] == [0], "frames were touched before the refusal"


def test_unknown_iterator_is_named_and_refused(run_script: Run, any_python: str) -> None:
    source = (
        HEADER
        + """
import csv
for i, row in enumerate(csv.reader(["a", "b", "c", "d"])):
    probe.step()
    probe.trace(i, row)
"""
    )
    result = run_script(source, 2, any_python)
    assert not result.captured["exact"]
    assert any("reader" in kind for _, kind, _ in result.captured["uncaptured"])
    assert "mismatch" in result.restored


# C code that runs a loop, and what it is called in the reason.
C_LOOPS = {
    "list(map(work, range(6)))": "list",
    "tuple(map(work, range(6)))": "tuple",
    "set(work(i) for i in range(6))": "set",
    "dict((i, work(i)) for i in range(6))": "dict",
    "sum(work(i) for i in range(6))": "sum",
    "max(map(work, range(6)))": "max",
    "sorted(map(work, range(6)))": "sorted",
    "','.join(str(work(i)) for i in range(6))": "str.join",
    "functools.reduce(lambda a, i: a + work(i), range(6))": "reduce",
    "collections.deque(map(work, range(6)))": "deque",
    "[].extend(map(work, range(6)))": "list.extend",
    "[*map(work, range(6))]": "consumes an iterable",
    "7 in map(work, range(6))": "consumes an iterable",
    "Rows(map(work, range(6)))": "Rows",
    "[x for x in filter(work, range(6))]": "filter",
    "[x for x in zip(range(9), steps())]": "zip",
    "[x for x in enumerate(steps())]": "enumerate",
    "[x for x in itertools.islice(steps(), 6)]": "islice",
}


@pytest.mark.parametrize("loop", C_LOOPS)
def test_loop_that_c_code_runs_is_named_and_refused(run_script: Run, any_python: str, loop: str) -> None:
    source = (
        HEADER
        + f"""
import collections, functools, itertools
class Rows(list):
    pass
def work(i):
    probe.step()
    probe.trace(i)
    return i
def steps():
    for i in range(6):
        yield work(i)
def main():
    for again in range(20):  # by then the interpreter has specialised the call
        result = {loop}
main()
"""
    )
    result = run_script(source, 93, any_python)
    assert not result.captured["exact"]
    assert any(
        C_LOOPS[loop] in reason for _, kind, reason in result.captured["uncaptured"] if kind == "place in the loop"
    ), result.captured
    assert C_LOOPS[loop] in result.restored["mismatch"]


# C code that only passes a call through, of which nothing is lost.
C_CALLS = {
    "next": "next(source)",
    "send": "source.send(None)",
    "partial": "functools.partial(work)()",
    "class": "Work()",
    "callable": "worker()",
    "item": "worker[0]",
    "attribute": "worker.value",
    "exec": "exec('work()', globals())",
    "context": "contextvars.copy_context().run(work)",
    "cache": "cached(i)",
    "map": "[None for _ in map(lambda _: work(), [0])]",
    "metaclass": "Single()",
}


@pytest.mark.parametrize("call", C_CALLS)
def test_call_through_c_code_continues(run_script: Run, any_python: str, call: str) -> None:
    source = (
        HEADER
        + f"""
import contextvars, functools
def work():
    probe.step()
def steps():
    while True:
        probe.step()
        yield
@functools.lru_cache(maxsize=None)
def cached(i):
    probe.step()
class Work:
    def __init__(self):
        probe.step()
class Meta(type):
    def __call__(cls):
        return super().__call__()
class Single(metaclass=Meta):
    def __init__(self):
        probe.step()
class Worker:
    def __call__(self):
        probe.step()
    def __getitem__(self, i):
        probe.step()
    @property
    def value(self):
        probe.step()
worker = Worker()
def main():
    source = steps()
    for i in range(7):
        {C_CALLS[call]}
        probe.trace(i)
main()
"""
    )
    run_script(source, 3, any_python).check()


def test_async_for_is_named_and_refused(run_script: Run, any_python: str) -> None:
    source = (
        HEADER
        + """
import asyncio
async def batches():
    for i in range(6):
        await asyncio.sleep(0)
        yield i
async def main():
    async for i in batches():
        probe.step()
        probe.trace(i)
asyncio.run(main())
"""
    )
    result = run_script(source, 3, any_python)
    assert not result.captured["exact"]
    assert "asynchronous generator" in result.restored["mismatch"]


def test_loop_inside_a_coroutine_continues(run_script: Run, any_python: str) -> None:
    source = (
        HEADER
        + """
import asyncio
async def train(epoch):
    for i in range(3):
        probe.step()
        probe.trace(epoch, i)
        await asyncio.sleep(0)
async def main():
    for epoch in range(3):
        await train(epoch)
asyncio.run(main())
"""
    )
    run_script(source, 4, any_python).check()


def test_another_with_block_is_refused(run_script: Run, any_python: str) -> None:
    source = (
        HEADER
        + """
import contextlib
class Block:
    def __enter__(self):
        return self
    def __exit__(self, *args):
        pass
def main():
    for i in range(6):
        with Block() if i >= 2 else contextlib.nullcontext():
            probe.step()
            probe.trace(i)
main()
"""
    )
    result = run_script(source, 5, any_python)
    assert "Block, and is inside one of" in result.restored["mismatch"]
    run_script(source, 2, any_python).check()


def test_exception_that_is_handled_is_named(run_script: Run, any_python: str) -> None:
    source = (
        HEADER
        + """
def main():
    for i in range(6):
        try:
            raise ValueError(i)
        except ValueError:
            probe.step()
            probe.trace(i)
main()
"""
    )
    result = run_script(source, 3, any_python)
    assert [entry[:2] for entry in result.captured["uncaptured"]] == [["except block", "ValueError"]]
    assert result.restored["lines"] == result.expected["lines"]
