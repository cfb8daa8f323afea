"""Tells a clean end of the process from a failure: only after a clean one may the agent forget the snapshots.

Threads: the thread that ends the interpreter. Errors: none.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

_watching = False
_failed = False


def watch(at_exit: Callable[[bool], None]) -> None:
    """Has `at_exit` called when this process, not a fork of it, ends; with True if it ends cleanly. Only the first call counts."""
    global _watching
    if _watching:
        return
    _watching = True
    original_hook, original_exit, pid = sys.excepthook, sys.exit, os.getpid()

    def excepthook(*args: Any) -> None:
        global _failed
        _failed = True
        original_hook(*args)

    def exit(status: Any = None) -> Any:
        global _failed
        _failed = _failed or status not in (None, 0)
        original_exit(status)

    def ended() -> None:
        if os.getpid() == pid:
            at_exit(not _failed)

    sys.excepthook = excepthook
    sys.exit = exit
    atexit.register(ended)
