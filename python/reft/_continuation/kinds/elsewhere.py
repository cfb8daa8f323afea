"""Objects that lead to state of another process, or that ranks share: they are named, because a
snapshot has no part of that state.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ..nodes import Node, type_name
from .objects import OWNED

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk

_OTHER_END = "what its other end keeps is not restored"
_RUNNING = "the state of a process that it runs is not restored"
_STORED = "what the script keeps in a store is not restored"
_WHY = {
    ("multiprocessing.managers", "BaseProxy"): "what the manager's process keeps is not restored",
    ("multiprocessing.shared_memory", "ShareableList"): "memory that processes share is not"
    " restored; use a list, or an array over the memory",
    ("multiprocessing.connection", "_ConnectionBase"): _OTHER_END,
    ("socket", "socket"): _OTHER_END,
    ("unittest.mock", "NonCallableMock"): "the calls that a mock has seen are not restored",
    ("subprocess", "Popen"): _RUNNING,
    ("multiprocessing.process", "BaseProcess"): _RUNNING,
    ("torch.distributed", "Store"): _STORED,
}


def leads_elsewhere(kind: type) -> bool:
    return _key_of(kind) is not None


def capture(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    key = _key_of(type(value))
    assert key is not None
    why = _WHY[key]
    if walk.note_births or (why == _RUNNING and not _runs(value)):
        return OWNED
    if why == _STORED and _is_of_groups(value):
        return OWNED
    return walk.lost(place, type_name(type(value)), why)


def _key_of(kind: type) -> tuple[str, str] | None:
    for module, name in _WHY:
        base = getattr(sys.modules.get(module), name, None)
        if isinstance(base, type) and issubclass(kind, base):
            return module, name
    return None


def _runs(process: Any) -> bool:
    """Whether a child process has not ended. It is left for its owner to reap."""
    started = getattr(process, "_popen", process)  # a Process has one once it was started
    pid = getattr(started, "pid", None)
    if type(pid) is not int or getattr(started, "returncode", None) is not None:
        return False
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # of another parent, as with a fork server, or reaped
        return os.path.exists(f"/proc/{pid}")
    return ended is None


def _is_of_groups(store: Any) -> bool:
    """Whether process groups use a store: what they keep there is of this process."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    groups = [one for _, one in c10d._world.pg_map.values()]
    return any(_behind(one) is _behind(store) for one in groups)


def _behind(store: Any) -> Any:
    """The store that a prefix leads to."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
