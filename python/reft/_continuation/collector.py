"""Keeps Python's garbage collector off within a capture: a collection would look at all that the
capture has made, most of which is gone at its end.

Threads: one at a time. A child that another thread forks meanwhile has the collector on.
Errors: none.
"""

from __future__ import annotations

import gc
import os


class _Off:
    """A `with` block without collections. One that the script has switched off stays off."""

    def __init__(self) -> None:
        self.is_ours = False

    def set(self, on: bool) -> None:
        """Switches the collector on or off for what comes after the block."""
        if self.is_ours:
            self.is_ours = on
        elif on:
            gc.enable()
        else:
            gc.disable()

    def __enter__(self) -> None:
        self.is_ours = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.is_ours:
            gc.enable()
            self.is_ours = False


off = _Off()

os.register_at_fork(after_in_child=lambda: off.__exit__())
