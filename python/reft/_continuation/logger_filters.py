"""Filters of a script's own on loggers and on their handlers: they are called as hooks are, and often
nothing else holds them.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import logging
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
        self._known: list[tuple[str, logging.Filterer]] = []  # with what each is called
        self._filters: list[list[Any]] = []
        self._free: list[str] = []  # names that are no logger's yet
        self._holders: list[Any] = []  # what has their places

    def filters(self) -> Hooks:
        """Gives the filters of the script's on loggers and on their handlers."""
        named = logging.root.manager.loggerDict
        sizes = len(named), len(logging._handlerList)  # type: ignore[attr-defined]
        self._looks += 1
        if (
            sizes != self._sizes
            or list(map(named.get, self._free)) != self._holders
            or self._looks % _LISTS_LAST == 0
        ):
            self._sizes = sizes
            self._look([*named.items(), ("root", logging.root)])
        found: Hooks = []
        for called, owner in compress(self._known, self._filters):
            own = [one for one in list(owner.filters) if is_own_hook(one)]
            found += [(f"<filter {i} of {called}>", one) for i, one in enumerate(own)]
        return found

    def _look(self, named: list[tuple[str, Any]]) -> None:
        self._known, self._free, self._holders = [], [], []
        for name, one in named:
            if not isinstance(one, logging.Logger):
                self._free.append(name)
                self._holders.append(one)
                continue
            self._known.append((f"logger {name}", one))
            self._known += [
                (f"handler {i} of logger {name}", handler)
                for i, handler in enumerate(list(one.handlers))
            ]
        self._filters = [one.filters for _, one in self._known]


_loggers = _Loggers()
