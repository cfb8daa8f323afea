"""Numbers that mean something only inside one process: descriptors, process and thread numbers,
addresses.

A script may keep them in plain variables (`self.fd = os.open(…)`, `pid = os.getpid()`). Written
into another process they would name something else there: a write to an old descriptor's number
lands in whatever the new process has opened. Their kind cannot be told from the number alone, so a
number is taken for one if it was one at the first program point, the variable still holds it, and
what the variable holds in the restarted script is one there: then that stays.

Threads: the training thread. Errors: none; what cannot be read is not taken for a handle.
"""

from __future__ import annotations

import os
import threading
from typing import Any

# Where user-space mappings of 64-bit Linux lie: heap of position-independent programs, and shared
# memory.
_ADDRESSES = range(0x5500_0000_0000, 0x8000_0000_0000)
# What `hash()` makes of an address is smaller. No number below this says which object it is of.
LEAST_IDENTITY = _ADDRESSES.start >> 4


def now() -> frozenset[int]:
    """Returns this process's descriptors (but the standard three), processes and threads."""
    found = {os.getpid(), os.getppid(), os.getpgrp()}
    found.update(
        thread.native_id for thread in threading.enumerate() if thread.native_id is not None
    )
    try:
        found.update(int(name) for name in os.listdir("/proc/self/fd"))
    except OSError:
        pass
    return frozenset(found - {0, 1, 2})


def is_handle(value: Any, known: frozenset[int]) -> bool:
    """Says whether a number, or each of a pair, is an address or one that `now` returned."""
    numbers = value if type(value) is tuple else (value,)
    return all(
        type(number) is int and (number in known or is_address(number)) for number in numbers
    )


def is_address(value: int) -> bool:
    """Says whether a number lies where addresses lie: `id(x)`, `data_ptr()`, `get_ident()`."""
    return value in _ADDRESSES
