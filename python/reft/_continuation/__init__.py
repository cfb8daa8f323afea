"""Puts a restarted, unchanged script back where a captured loop stood.

`capture` and `restore` are called at the same program point, inside the optimizer's step post-hook,
in the process that will die and in the one that takes its place. `install` makes DataLoader
iterators remember their origin and comes before both.
"""

from __future__ import annotations

from . import graphs
from .device_parts import DeviceParts
from .frames import FrameMismatch, RestoreReport, capture, observe, restore
from .loaders import install
from .rng import capture_rng, restore_rng

__all__ = [
    "DeviceParts",
    "FrameMismatch",
    "RestoreReport",
    "capture",
    "capture_rng",
    "graphs",
    "install",
    "observe",
    "restore",
    "restore_rng",
]
