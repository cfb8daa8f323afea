"""DataLoaders that a script makes after its first step: they come back with all their parts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import functools, random
import torch
from torch.utils.data import (
    BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset,
    RandomSampler, Sampler, Subset, TensorDataset, WeightedRandomSampler,
)
import probe
probe.hook_optimizers()
{LEARN}
class Rows(Dataset):
    def __init__(self, size): self.rows = torch.arange(size)
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.rows[i]
class Stream(IterableDataset):
    def __init__(self, size): self.size, self.seen = size, 0
    def __iter__(self):
        for i in range(self.size):
            self.seen += 1
            yield i
class Mine(Sampler):
    def __init__(self, size, rank): self.size, self.rank = size, rank
    def __len__(self): return self.size // 2
    def __iter__(self): return iter(range(self.rank, self.size, 2))
def double(batch): return [2 * int(item) for item in batch]
class Trainer:
    def __init__(self): self.held, self.eval_rows = None, Rows(8)
def main():
    torch.manual_seed(3)
    trainer = Trainer()
    for k in range(9):
        learn()
        if k == 1: trainer.held = made(trainer)
        probe.trace(k, used(trainer.held))
"""

CASES = {
    "of a list": "lambda t: DataLoader(list(range(9)), batch_size=2)",
    "of a dataset of the first step": "lambda t: DataLoader(t.eval_rows, batch_size=2)",
    "of a new dataset": "lambda t: DataLoader(Rows(9), batch_size=4, drop_last=True)",
    "of tensors": "lambda t: DataLoader(TensorDataset(torch.arange(6)), 2, collate_fn=str)",
    "of parts of datasets": """
        lambda t: DataLoader(ConcatDataset([Subset(t.eval_rows, [1, 3]), Rows(3)]), batch_size=2)
    """,
    "that shuffles": "lambda t: DataLoader(t.eval_rows, batch_size=2, shuffle=True)",
    "with a generator": """
        lambda t: DataLoader(
            t.eval_rows, 2, shuffle=True, generator=torch.Generator().manual_seed(4)
        )
    """,
    "with a function that collates": "lambda t: DataLoader(t.eval_rows, 3, collate_fn=double)",
    "over a stream": "lambda t: DataLoader(Stream(5), batch_size=2)",
    "with a sampler of a rank": "lambda t: DataLoader(t.eval_rows, sampler=Mine(8, 1))",
    "with a DistributedSampler": """
        lambda t: DataLoader(t.eval_rows, sampler=DistributedSampler(t.eval_rows, 2, 1, seed=5))
    """,
    "with weights": """
        lambda t: DataLoader(t.eval_rows, sampler=WeightedRandomSampler([1.0] * 8, 5))
    """,
    "with a batch sampler": """
        lambda t: DataLoader(
            t.eval_rows, batch_sampler=BatchSampler(RandomSampler(t.eval_rows), 3, False)
        )
    """,
}


def loop(made: str, used: str) -> str:
    made = " ".join(textwrap.dedent(made).split())
    return f"{_HEAD}\nmade = {made}\n{textwrap.dedent(used)}\nmain()\n"


_READ_ALL = """
def used(loader):
    if loader is None: return None
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in loader]
"""


@pytest.mark.parametrize("name", sorted(CASES))
def test_reads_on(run_script: Run, name: str) -> None:
    run_script(loop(CASES[name], _READ_ALL), 5).check()


def test_reads_on_with_workers(run_script: Run) -> None:
    run_script(loop("lambda t: DataLoader(t.eval_rows, 2, num_workers=1)", _READ_ALL), 4).check()


@pytest.mark.parametrize("held", ["loader", "iterator"])
def test_reads_on_in_mid_epoch(run_script: Run, held: str) -> None:
    made = "lambda t: dict(loader=DataLoader(Rows(12), 1, shuffle=True))"
    used = """
    def used(held):
        if held is None: return None
        if "iterator" not in held: held["iterator"] = iter(held["loader"])
        if HELD == "iterator": held.pop("loader", None)
        return next(held["iterator"]).tolist()
    """
    used = f"HELD = {held!r}\n" + textwrap.dedent(used)
    run_script(loop(made, used), 5).check()


def test_a_wrapper_of_a_package(run_script: Run) -> None:
    """accelerate's loaders hold one, and say that they are one."""
    used = """
    class Adapter:
        def __init__(self, *args, **settings): self.base_dataloader = DataLoader(*args, **settings)
        def __getattr__(self, name):
            if name == "base_dataloader": raise AttributeError
            return getattr(self.base_dataloader, name)
        @property
        def __class__(self): return self.base_dataloader.__class__
        def __iter__(self): return iter(self.base_dataloader)
    """
    made = "lambda t: Adapter(t.eval_rows, batch_size=2, shuffle=True)"
    run_script(loop(made, textwrap.dedent(used) + _READ_ALL), 5).check()


def test_a_function_object_with_a_logger(run_script: Run) -> None:
    """As transformers wraps a `collate_fn`, which it asks for again at each evaluation."""
    used = """
    import logging
    class Collate:
        def __init__(self): self.logger, self.calls = logging.getLogger("late"), 0
        def __call__(self, batch):
            self.calls += 1
            self.logger.debug("%s", batch)
            return [self.calls, self.logger.name, *map(int, batch)]
    """
    made = "lambda t: DataLoader(t.eval_rows, 3, collate_fn=Collate())"
    run_script(loop(made, textwrap.dedent(used) + _READ_ALL), 5).check()


def test_one_that_cannot_be_made_is_named(run_script: Run) -> None:
    used = """
    import threading
    class Locked(Rows):
        def __init__(self): super().__init__(4); self.lock = threading.local()
    """
    made = "lambda t: DataLoader(Locked(), 2)"
    run = run_script(loop(made, textwrap.dedent(used) + _READ_ALL), 5)
    named = run.captured["uncaptured"] + run.restored["problems"]
    assert any("held" in place for place, _, _ in named), named
