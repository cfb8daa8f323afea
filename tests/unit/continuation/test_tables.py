"""Datasets of the package `datasets`. A stand-in has the parts of it that reft looks at, so that the
package need not be installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_PACKAGE = """
class Table:
    '''As an Arrow table: nothing that a snapshot could copy, and nobody may look into it.'''
    def __init__(self, rows): self.rows = rows
    def __getattr__(self, name): raise RuntimeError("looked into")
class Dataset:
    def __init__(self, rows, fingerprint):
        self._data, self._fingerprint = Table(rows), fingerprint
        self._format_type, self._format_kwargs = None, {}
        self._format_columns, self._output_all_columns = None, False
    def __len__(self): return len(self._data.rows)
    def __getitem__(self, i):
        if self._format_type == "custom": return self._format_kwargs["transform"](self._data.rows[i])
        return self._data.rows[i]
    def set_transform(self, transform):
        self._format_type, self._format_kwargs = "custom", {"transform": transform}
        self._fingerprint += "+"
    def select(self, indices):
        return Dataset([self._data.rows[i] for i in indices], f"{self._fingerprint}{list(indices)}")
"""

_HEAD = f"""
import random
import torch
from torch.utils.data import DataLoader
from datasets.arrow_dataset import Dataset
import probe
probe.hook_optimizers()
{LEARN}
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").touch()
    (tmp_path / "datasets" / "arrow_dataset.py").write_text(_PACKAGE)


def test_data_are_not_looked_at(run_script: Run) -> None:
    source = """
def main():
    torch.manual_seed(1)
    data = Dataset(list(range(8)), "a")
    loader = DataLoader(data, batch_size=2, shuffle=True)
    for epoch in range(3):
        for batch in loader:
            learn()
            probe.trace(epoch, batch.tolist(), len(data))
main()
"""
    run = run_script(_HEAD + source, 5)
    run.check()
    assert run.captured["uncaptured"] == []


def test_a_transform_keeps_its_state(run_script: Run) -> None:
    source = """
class Noise:
    def __init__(self): self.dice = random.Random(3)
    def __call__(self, row): return row + self.dice.random()
def main():
    data = Dataset([float(i) for i in range(8)], "a")
    data.set_transform(Noise())
    for k in range(9):
        learn()
        probe.trace(k, data[k % 8])
main()
"""
    run_script(_HEAD + source, 5).check()


def test_a_format_that_is_set_later_comes_back(run_script: Run) -> None:
    source = """
def double(row): return 2 * row
def main():
    data = Dataset(list(range(8)), "a")
    for k in range(9):
        learn()
        if k == 2: data.set_transform(double)
        probe.trace(k, data[3], data._fingerprint)
main()
"""
    run_script(_HEAD + source, 5).check()


def test_one_that_is_made_later_is_named(run_script: Run) -> None:
    source = """
def main():
    data = Dataset(list(range(8)), "a")
    part = data
    for k in range(9):
        learn()
        if k == 2: part = data.select(range(3))
        probe.trace(k, len(part))
main()
"""
    run = run_script(_HEAD + source, 5)
    assert any("part" in place for place, _, _ in run.restored["problems"]), run.restored
