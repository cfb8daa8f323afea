"""What tells whether objects of packages have changed, and what a loader reaches."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reft._continuation import foreign  # noqa: E402
from reft._continuation.loader_parts import Parts  # noqa: E402
from reft._continuation.reach import reach  # noqa: E402


class Rows(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise AssertionError("code of the script is run")


class Stage:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Private:
    __slots__ = ("__inner",)

    def __init__(self) -> None:
        self.__inner = 0

    def count(self) -> None:
        self.__inner += 1


def test_a_fingerprint_sees_members_of_sets_and_private_slots() -> None:
    holder = Stage(names={"a", "b"}, rows=Rows([1, 2]))
    before = foreign.Fingerprint(holder)
    assert before == foreign.Fingerprint(holder) and before.is_whole
    holder.names = {"a", "c"}
    assert before != foreign.Fingerprint(holder)
    holder.names = {"a", "b"}
    list.append(holder.rows, 3)
    assert before != foreign.Fingerprint(holder)
    private = Private()
    before = foreign.Fingerprint(private)
    private.count()
    assert before != foreign.Fingerprint(private)


@pytest.mark.parametrize("many", [set(range(5000)), [None] * 5000, dict.fromkeys(range(5000))])
def test_a_fingerprint_of_a_part_says_so(many: Any) -> None:
    assert not foreign.Fingerprint(many).is_whole


# -- after a resume


SCRIPT = """
import collections, sys
import numpy, probe, torch
from reft._continuation import plain
from reft._continuation.kinds.objects import Owned
from reft._continuation.nodes import Graph
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.losses, self.kept = numpy.zeros(100_000), numpy.ones(100_000)
        self.seen, self.recent = set(range(20_000)), collections.deque(range(100_000))
        self.order = collections.OrderedDict.fromkeys(range(4))
def look():
    captured = probe.c.capture(sys._getframe(), 1 << 26)
    graph = Graph.unpacked(plain.loads(captured["frames"])[-2])
    left = [kind for node, kind in zip(graph.nodes, graph.types) if isinstance(node, Owned)]
    probe.result["left_out"] = [kind for kind in left if kind.split(".")[-1] in ("ndarray", "set", "deque")]
def main():
    data = Data()
    for step in range(4):
        if step:
            data.losses[5] += 1; data.seen.add(-step); data.recent[-1] += 1; data.order.move_to_end(0)
        probe.step()
        if probe.mode == "restore" and step == 2:
            look()
        probe.trace(float(data.losses.sum()), len(data.seen), data.recent[-1], list(data.order))
main()
"""


def test_what_a_resume_has_written_is_in_the_next_snapshot(run_script: Callable[..., Any]) -> None:
    result = run_script(SCRIPT, 3, limit=1 << 26)
    result.check()
    assert result.restored["left_out"] == ["numpy.ndarray"], "one array has not changed"


# -- what a loader reaches


def module(name: str, source: str) -> types.ModuleType:
    made = types.ModuleType(name)
    exec(source, made.__dict__)  # noqa: S102
    return made


@pytest.mark.parametrize("root", sorted(foreign.TRACKERS))
def test_a_tracker_is_not_walked_into(root: str) -> None:
    run = module(f"{root}.run", "class Run:\n def __init__(self): self.step, self.state = 0, {}")
    collate = Stage(run=run.Run(), scale=2.0)
    found = reach(("collate_fn", collate, False))
    assert [part.path for part in found.parts] == ["collate_fn"]
    assert not foreign.is_open(run.Run)


def test_generators_in_private_slots_are_reached() -> None:
    class Hidden:
        __slots__ = ("__random",)

        def __init__(self) -> None:
            self.__random = torch.Generator()

    assert [path for path, _ in reach(("stage", Hidden(), True)).generators] == [
        "stage._Hidden__random"
    ]


def test_parts_that_are_not_drawn_from_give_tensors_and_generators() -> None:
    stage = Stage(
        mean=torch.ones(2), random=torch.Generator(), name="x", rows=[1, 2], step=3
    )
    numbers, generators, contents = Parts(("stage", stage, False)).capture()
    assert numbers == {}
    assert list(generators) == ["stage.random"]
    assert list(contents) == ["stage.mean"]


# -- what a replay of a sampler begins with


def test_counters_and_sets_of_a_sampler_are_kept_for_its_replay() -> None:
    sampler = Stage(seen=Counter([1]), used={3}, recent=OrderedDict(a=1))
    parts = Parts(("sampler", sampler, True))
    before = parts.capture(nested=True)  # as a replay takes it
    sampler.seen[1] += 1
    sampler.used.add(4)
    sampler.recent["b"] = 2
    parts.write(before)
    assert (sampler.seen, sampler.used, [*sampler.recent]) == (Counter([1]), {3}, ["a"])
