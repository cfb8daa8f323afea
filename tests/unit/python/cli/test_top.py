"""What `reft top` says of one rank."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from reft._cli import top  # noqa: E402

MS = 1_000_000
STATS = {
    "step_ns": 300 * MS,
    "sealed_step": 4,
    "capture_last_ns": 40 * MS,
    "gate_last_ns": 7 * MS,
    "device_gate_last_ns": 2 * MS,
}


@pytest.mark.parametrize(("on_device", "stall"), [(0, "47.0 ms"), (1, "2.0 ms")])
def test_a_host_ahead_of_its_device_does_not_stall_training(on_device: int, stall: str) -> None:
    rank: dict[str, Any] = {"stats": STATS | {"on_device": on_device}}
    assert top._row(rank)[0][4] == stall
