"""Keeps what other tests of the process left alive out of reft's sight."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from reft._state import heap


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers and schedulers that live now are found no more, until the test ends."""
    find = heap.live
    # Kept, so that nothing new gets the id of one.
    strangers = {id(obj): obj for found in find(Optimizer, LRScheduler) for obj in found}

    def live(*classes: Any) -> list[list[Any]]:
        return [[obj for obj in found if id(obj) not in strangers] for found in find(*classes)]

    monkeypatch.setattr(heap, "live", live)
