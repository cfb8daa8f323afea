"""Filters of a script's own on loggers and on their handlers: loggers call them as torch calls
hooks, and often hold the only reference.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import logging
import weakref
from itertools import compress
from typing import Any

from .hooks import Hooks, is_own_hook

_LISTS_LAST = 64  # looks for which a logger is trusted to keep its lists


def of_script() -> Hooks:
    """Gives the filters."""
    return _loggers.filters()


class _Loggers:
    """The loggers and handlers that there are. Of most, only the list of their filters is looked
    at, which is empty."""

    def __init__(self) -> None:
        self._sizes = (-1, -1)
        self._looks = -1
        # With what each is called; a handler that is removed closes its file when it is freed.
        self._known: list[tuple[str, weakref.ref[logging.Filterer]]] = []
        self._filters: list[list[Any]] = []
        self._handlers: list[list[Any]] = []  # of each logger
        self._handlers_known = -1
        self._free: list[str] = []  # names that are no logger's yet
        self._holders: list[Any] = []  # what has their places

    def filters(self) -> Hooks:
        """Gives the filters of the script's on loggers and on their handlers."""
        named = logging.root.manager.loggerDict
        sizes = len(named), len(logging._handlerList)  # type: ignore[attr-defined]
        self._looks += 1
        if (
            sizes != self._sizes
            or sum(map(len, self._handlers)) != self._handlers_known
            or list(map(named.get, self._free)) != self._holders
            or self._looks % _LISTS_LAST == 0
        ):
            self._sizes = sizes
            self._look([*named.items(), ("root", logging.root)])
        found: Hooks = []
        for called, reference in compress(self._known, self._filters):
            owner = reference()
            own = [] if owner is None else list(filter(is_own_hook, list(owner.filters)))
            found += [(f"<filter {i} of {called}>", one) for i, one in enumerate(own)]
        return found

    def _look(self, named: list[tuple[str, Any]]) -> None:
        owners: list[tuple[str, logging.Filterer]] = []
        self._free, self._holders, self._handlers = [], [], []
        for name, one in named:
            if not isinstance(one, logging.Logger):
                self._free.append(name)
                self._holders.append(one)
                continue
            owners.append((f"logger {name}", one))
            self._handlers.append(one.handlers)
            owners += [
                (f"handler {i} of logger {name}", handler)
                for i, handler in enumerate(list(one.handlers))
            ]
        self._handlers_known = sum(map(len, self._handlers))
        self._filters = [one.filters for _, one in owners]
        self._known = [(called, weakref.ref(one)) for called, one in owners]


_loggers = _Loggers()
