"""Measurements inside a node: they find planted errors, and a hung or dying one delays nothing."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reft._check import local
from reft._check.local import Measurement, Skipped, Wrong


def test_all_parts_of_this_machine_are_measured(tmp_path: Path) -> None:
    parts, loopback = local.measure(tmp_path, quick=True)
    by_name = {part.name: part for part in parts}
    assert {"cpu matmul", "memory", "disk", "loopback"} <= set(by_name)
    for part in parts:
        assert not part.fault, part
        assert part.skipped or part.value > 0
    assert loopback == by_name["loopback"].value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_known_product_is_exact_and_one_wrong_element_shows(dtype: torch.dtype) -> None:
    a, b, rows, columns = local.known_product(256)
    product = a.to(dtype) @ b.to(dtype)
    exact = a.to(torch.int64) @ b.to(torch.int64)
    assert torch.equal(product.to(torch.int64), exact)
    assert torch.equal(rows.to(torch.int64), exact.sum(1))
    local.compare(product, rows, columns)
    product[17, 200] += 1
    with pytest.raises(Wrong, match="1 rows and 1 columns"):
        local.compare(product, rows, columns)


def test_a_product_that_differs_when_repeated_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    with pytest.raises(Wrong, match="two results"):
        local._matmul("cpu", torch.float32, 64, 0.01)


def test_memory_and_disk_that_forget_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", lambda a, b: False)
        with pytest.raises(Wrong, match="memory"):
            local._memory(8)
    assert local._memory(8) > 0

    def changed(path: str, size: int) -> Any:
        data = bytearray(Path(path).read_bytes())
        data[-3] ^= 1
        yield bytes(data)

    monkeypatch.setattr(local, "_blocks", changed)
    with pytest.raises(Wrong, match="disk"):
        local._disk(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def raising(error: BaseException) -> Any:
    def run() -> float:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (Wrong("sums differ"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EACCES, "Permission denied"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (Skipped("nothing there"), False),
        (MemoryError(), False),
    ],
)
def test_an_error_is_a_fault_only_if_the_hardware_made_it(error: BaseException, is_fault: bool) -> None:
    part = local.outcome(Measurement("disk", "disk ext4", "GB/s", 1, raising(error)))
    assert bool(part.fault) == is_fault and bool(part.skipped) != is_fault


CHILD = """
import json, os, sys, time
first = int(sys.argv[sys.argv.index("--from") + 1])
for name in ["good", "hangs", "dies", "also good"][first:]:
    print(json.dumps({"name": name, "kind": name, "unit": "x", "limit_sec": 0.3}), flush=True)
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os.abort()
    print(json.dumps({"name": name, "kind": name, "value": 1.5, "unit": "x", "fault": "", "skipped": ""}), flush=True)
"""


def test_a_measurement_that_hangs_or_dies_is_a_fault_and_the_next_ones_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(local, "_KILLED_SEC", 0.2)
    whole = local._child

    def played(command: list[str], first: int, clock: Any) -> Any:
        return whole([sys.executable, str(script), "--from", str(first)], first, clock)

    monkeypatch.setattr(local, "_child", played)
    parts, loopback = local.measure(tmp_path, quick=True)
    assert [part.name for part in parts] == ["good", "hangs", "dies", "also good"]
    assert [bool(part.fault) for part in parts] == [False, True, True, False]
    assert "did not end within" in parts[1].fault and "code -6" in parts[2].fault
    assert loopback == 0.0


def test_a_child_that_cannot_begin_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text("raise SystemExit(7)")
    parts, first, ends = local._child([sys.executable, str(script)], 0, __import__("time").monotonic)
    assert ends and first == 0 and "code 7" in parts[0].fault


def test_the_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_frsize = 1, 1 << 20

    monkeypatch.setattr(os, "statvfs", lambda path: Small())
    with pytest.raises(Skipped, match="space"):
        local._disk(tmp_path, 1)
