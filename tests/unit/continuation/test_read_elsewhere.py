"""State that decides what an iterator or a module gives, and that stands somewhere else or is
replaced while the loop runs: it comes back, or the capture or the resume names it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import collections, functools, types
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
import probe
probe.hook_optimizers()
{LEARN}
"""

# What a sampler shuffles by, how the loop sets it for an epoch `e`, and what comes before both.
ORDERS = {
    "global": ("EPOCH", "global EPOCH; EPOCH = e", "EPOCH = 0"),
    "attribute of a class": ("Config.epoch", "Config.epoch = e", "class Config: epoch = 0"),
    "object of a module": (
        "CONFIG.epoch", "CONFIG.epoch = e", "CONFIG = types.SimpleNamespace(epoch=0)",
    ),
    "dict of a module": ("CONFIG['epoch']", "CONFIG['epoch'] = e", "CONFIG = {'epoch': 0}"),
    "tuple of the sampler": ("sum(self.value)", "sampler.value = (e, 1)", "pass"),
    "object of the sampler": ("self.value.n", "sampler.value = types.SimpleNamespace(n=e)", "pass"),
    "function of the sampler": (
        "self.value()", "sampler.value = functools.partial(int, e)", "pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_by_what_is_no_part_of_the_loader(run_script: Run, name: str) -> None:
    use, change, before = ORDERS[name]
    kind = "collections.namedtuple('V', 'n')(0)" if "object of the" in name else "(0, 1)"
    kind = "functools.partial(int, 0)" if "function" in name else kind
    source = f"""
{before}
class Shuffled(Sampler):
    def __init__(self): self.value = {kind}
    def __len__(self): return 8
    def __iter__(self):
        g = torch.Generator()
        g.manual_seed({use})
        return iter(torch.randperm(8, generator=g).tolist())
def main():
    sampler = Shuffled()
    loader = DataLoader(torch.arange(8), 2, sampler=sampler)
    for e in range(3):
        {"set_epoch(e)" if "global" in change else change}
        for x in loader:
            learn()
            probe.trace(e, x.tolist())
def set_epoch(e):
    {change if "global" in change else "pass"}
main()
"""
    run_script(_HEAD + textwrap.dedent(source), 6).check()


def test_a_sampler_that_gives_other_items_than_before_is_named(run_script: Run) -> None:
    """What it reads has changed since its epoch began."""
    source = """
POOL = [5, 1, 7, 3, 2, 6, 0, 4]
class ByPriority(Sampler):
    def __len__(self): return 8
    def __iter__(self): return iter(sorted(range(8), key=POOL.__getitem__))
def main():
    loader = DataLoader(torch.arange(8), 1, sampler=ByPriority())
    for e in range(3):
        for x in loader:
            learn()
            probe.trace(x.tolist())
            POOL[x.item()] = (POOL[x.item()] * 7 + 3) % 23
main()
"""
    run = run_script(_HEAD + source, 12)
    assert any("other items" in reason for _, _, reason in run.restored["problems"]), run.restored


def test_a_dict_with_deleted_entries_is_left_as_it_is(run_script: Run) -> None:
    """Its iterator counts them; a dict that is written again has none."""
    source = """
def main():
    tasks = {name: i for i, name in enumerate("abcdefgh")}
    del tasks["a"]
    for name in tasks:
        learn()
        probe.trace(name)
    probe.trace(len(tasks))
main()
"""
    run_script(_HEAD + source, 3).check()


@pytest.mark.parametrize(
    "head",
    [
        "for x in tasks",
        "for x in tasks.values()",
        "for name, x in tasks.items()",
        "for x in reversed(tasks)",
        "for i, (name, x) in enumerate(tasks.items())",
        "for x, i in zip(tasks.items(), range(9))",
        "it = iter(tasks.items())\n        for x in it",
        "for x in (n for n in tasks)",
    ],
)
def test_the_iterator_of_another_dict_comes_back(run_script: Run, head: str) -> None:
    source = f"""
def main():
    for epoch in range(3):
        tasks = {{f"{{epoch}}{{c}}": c + str(epoch) for c in "abcd"[epoch % 2:]}}
        {head}:
            learn()
            probe.trace(str(x), list(tasks))
main()
"""
    run_script(_HEAD + source, 6).check()


def test_the_iterator_of_another_set_is_named(run_script: Run) -> None:
    source = """
def main():
    for epoch in range(3):
        tasks = {10 * epoch + n for n in range(4)}
        for task in tasks:
            learn()
            probe.trace(task)
main()
"""
    run = run_script(_HEAD + source, 6)
    assert any("would give" in reason for _, _, reason in run.restored["problems"]), run.restored


def test_a_dict_that_has_grown_ends_no_script(run_script: Run) -> None:
    source = """
def main():
    tasks = {"a": 0, "b": 1, "c": 2}
    for epoch in range(3):
        for name in tasks:
            learn()
            probe.trace(epoch, name)
        tasks[f"t{epoch}"] = epoch
main()
"""
    run = run_script(_HEAD + source, 6)
    assert "4 items in all, the live one has 3" in run.restored["mismatch"]


def test_a_module_in_the_place_of_another_is_named(run_script: Run) -> None:
    source = """
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss, self.layers = nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Sigmoid())
def main():
    task = Task()
    for k in range(8):
        learn()
        probe.trace(k, task.loss(torch.tensor(-1.0)).item())
        if k == 2:
            task.loss = nn.Tanh()
            task.layers[1] = nn.ReLU()
main()
"""
    run = run_script(_HEAD + source, 5)
    places = {place for place, _, _ in run.captured["uncaptured"]}
    assert places == {"main:task.loss", "main:task.layers.1"}


def test_a_file_that_is_opened_for_writing_later_is_named(run_script: Run) -> None:
    source = """
def main():
    for epoch in range(3):
        with open(f"rows{epoch}.txt", "a") as rows:
            for k in range(4):
                learn()
                print(k, file=rows)
                probe.trace(rows.name)
main()
"""
    run = run_script(_HEAD + source, 6)
    assert ["main:rows", "_io.TextIOWrapper"] in [[a, b] for a, b, _ in run.captured["uncaptured"]]
    first = run_script(_HEAD + source, 2)
    assert first.captured["uncaptured"] == []
    first.check()


def test_whether_a_tensor_takes_part_in_autograd_comes_back(run_script: Run) -> None:
    source = """
def main():
    t, ts = torch.zeros(3), {"a": torch.zeros(2, requires_grad=True)}
    for k in range(8):
        learn()
        probe.trace(k, t.requires_grad, ts["a"].requires_grad)
        if k == 2:
            t.requires_grad_(True)
            ts["a"].requires_grad_(False)
main()
"""
    run_script(_HEAD + source, 5).check()


METHODS = {
    "a decorator gave it another name": """
def traced(f):
    def wrapper(self): return f(self)
    return wrapper
class Policy:
    @traced
    def warm(self): return 1
    @traced
    def late(self): return 2
    def __init__(self): self.act = self.warm
    def switch(self): self.act = self.late
""",
    "private": """
class Policy:
    def __init__(self): self.act = self.__warm
    def __warm(self): return 1
    def __late(self): return 2
    def switch(self): self.act = self.__late
""",
    "function of the module": """
def warm(self): return 1
def late(self): return 2
class Policy:
    def __init__(self): self.act = types.MethodType(warm, self)
    def switch(self): self.act = types.MethodType(late, self)
""",
    "lambda": """
class Policy:
    warm, late = (lambda self: 1), (lambda self: 2)
    def __init__(self): self.act = self.warm
    def switch(self): self.act = self.late
""",
    "of a base class": """
class Base:
    def run(self): return 2
class Policy(Base):
    def run(self): return 1
    def __init__(self): self.act = self.run
    def switch(self): self.act = super().run
""",
    "of a class": """
class Policy:
    @classmethod
    def warm(cls): return 1
    @classmethod
    def late(cls): return 2
    def __init__(self): self.act = self.warm
    def switch(self): self.act = self.late
""",
}


@pytest.mark.parametrize("name", METHODS)
def test_another_method_of_the_same_object_comes_back(run_script: Run, name: str) -> None:
    source = """
def main():
    policy = Policy()
    for k in range(8):
        learn()
        probe.trace(k, policy.act())
        if k == 2:
            policy.switch()
main()
"""
    run_script(_HEAD + METHODS[name] + source, 5).check()


def test_workers_get_the_dataset_as_it_was(run_script: Run) -> None:
    """They are forked when it is back: what it holds may be no part that a replay copies."""
    source = """
class Items(torch.utils.data.Dataset):
    def __init__(self): self.transform, self.sizes = abs, (1, 2)
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor([self.transform(-i), self.sizes[0]])
def main():
    items = Items()
    loader = DataLoader(items, 2, num_workers=1)
    for e in range(3):
        for x in loader:
            learn()
            probe.trace(e, x.tolist())
        items.transform, items.sizes = float, (e + 10, 2)
main()
"""
    run_script(_HEAD + source, 6).check()


def test_a_hook_in_the_place_of_another_is_named(run_script: Run) -> None:
    source = """
def early(module, arguments, output): pass
def late(module, arguments, output): pass
def main():
    handle = model.register_forward_hook(early)
    for k in range(8):
        learn()
        probe.trace(k)
        if k == 2:
            handle.remove()
            handle = model.register_forward_hook(late)
main()
"""
    run = run_script(_HEAD + source, 5)
    reasons = [reason for _, _, reason in run.restored["problems"]]
    assert "replaced after the first step" in reasons


def test_what_is_looked_at_does_not_change(run_script: Run) -> None:
    source = """
class Open:
    def __init__(self): self.__dict__["asked"] = []
    def __getattr__(self, name):
        self.asked.append(name)
        return None
class Counted(dict):
    seen = 0
    def __len__(self):
        Counted.seen += 1
        return dict.__len__(self)
OPEN = Open()
def main():
    counted = Counted(a=1)
    for k in range(6):
        learn()
        probe.trace(k, [name for name in OPEN.asked if not name.startswith("__")], Counted.seen)
        dict.__setitem__(counted, "a", k)
main()
"""
    run = run_script(_HEAD + source, 4)
    assert run.expected["lines"][-1] == [5, [], 0]
    assert run.restored["lines"][-1] == [5, [], 0]


def test_settings_of_the_process_come_back(run_script: Run) -> None:
    source = """
import os, sys, tempfile
def look():
    return [os.getcwd(), sys.getrecursionlimit(), str(torch.get_default_device())]
def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(8, 2)
    for k in range(8):
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.trace(k, look(), str(torch.empty(0).device))
        if k == 2:
            os.chdir(tempfile.gettempdir())
            sys.setrecursionlimit(sys.getrecursionlimit() + 100)
            torch.set_default_device("meta")
        if k == 4:
            torch.set_default_device(None)
main()
"""
    for kill in (4, 7):
        run_script(_HEAD + source, kill).check()


def test_a_directory_that_is_gone_is_named(run_script: Run) -> None:
    source = """
import os, tempfile
def main():
    for k in range(8):
        learn()
        if k == 2:
            os.chdir(tempfile.mkdtemp())
        if k == 3:
            os.rmdir(os.getcwd())
        probe.trace(k)
main()
"""
    run = run_script(_HEAD + source, 5)
    assert [where for where, _, _ in run.restored["problems"]] == ["working directory"]


def test_a_directory_that_another_thread_may_leave_is_named(run_script: Run) -> None:
    source = """
import contextlib, os, tempfile, threading
left = threading.Event()
def saves():
    with contextlib.chdir(tempfile.gettempdir()):
        inside.set()
        left.wait()
def main():
    global inside
    here = os.getcwd()
    inside = threading.Event()
    for k in range(8):
        learn()
        if k == 2:
            saver = threading.Thread(target=saves, daemon=True)
            saver.start()
            inside.wait()
        if k == 5 and saver is not None:
            left.set()
            saver.join()
        probe.trace(k)
    saver = None
main()
"""
    run = run_script(_HEAD + source, 5)
    assert "working directory" in [where for where, _, _ in run.captured["uncaptured"]]


def test_handlers_of_signals_that_come_later_are_named(run_script: Run) -> None:
    source = """
import signal
def main():
    signal.signal(signal.SIGUSR1, lambda *_: None)
    for k in range(8):
        learn()
        probe.trace(k)
        if k == 2:
            signal.signal(signal.SIGUSR2, lambda *_: None)
main()
"""
    assert not run_script(_HEAD + source, 3).captured["uncaptured"]
    ((where, _, why),) = run_script(_HEAD + source, 5).captured["uncaptured"]
    assert (where, why) == ("handler of SIGUSR2", "set after the first step")


def test_settings_that_change_the_arithmetic_come_back(run_script: Run) -> None:
    source = """
import decimal
import numpy as np
BACKENDS = torch.backends
def look():
    return [
        torch.get_num_threads(), BACKENDS.cudnn.deterministic, BACKENDS.cudnn.enabled,
        BACKENDS.cuda.math_sdp_enabled(), BACKENDS.mkldnn.enabled, np.geterr()["over"],
        decimal.getcontext().prec,
    ]
def main():
    for k in range(8):
        learn()
        probe.trace(k, look())
        if k == 2:
            torch.set_num_threads(torch.get_num_threads() + 2)
            BACKENDS.cudnn.deterministic, BACKENDS.cudnn.enabled = True, False
            BACKENDS.cuda.enable_math_sdp(False)
            BACKENDS.mkldnn.set_flags(False)
            np.seterr(over="raise")
            decimal.getcontext().prec = 7
main()
"""
    run_script(_HEAD + source, 5).check()
