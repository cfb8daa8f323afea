"""Hooks that a script has registered on nodes of autograd.

Nodes do not show their hooks. Torch registers all of them through one function, which `watch`
replaces. A node is called by the number of nodes that had hooks before it, which a restarted script
repeats up to the first program point. Nodes of the graph of an iteration end with it: what is
registered on them in each iteration is registered again. One that has come later and stays is the
gradient accumulator of a parameter, as a rule.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from . import hooks

NAMED = "<hook of autograd node "
"""How the names of these hooks begin."""
_STAYS = 3  # iterations after which a node that has come late is no iteration's


def of_nodes(is_first: bool) -> hooks.Hooks:
    """Gives the script's hooks; not those of an iteration that has come since the first program
    point.

    Args:
        is_first: This is that point.
    """
    return _nodes.of_script(is_first)


def gone() -> list[str]:
    """Names of those that were there at the first program point and were removed since. A node that
    is gone has none."""
    return _nodes.gone()


def watch() -> None:
    """Notes from now on which autograd nodes get hooks, and looks once for those that have some."""
    torch: Any = sys.modules["torch"]
    mixin = getattr(torch.autograd.function, "_HookMixin", None)
    if mixin is None or hasattr(mixin, "_reft_original"):
        return
    original = mixin._reft_original = mixin._register_hook

    def register(there: Any, hook: Any) -> Any:
        registered = original(there, hook)
        with contextlib.suppress(Exception):  # the script is served
            if hooks.own_in(hook):
                _nodes.add(registered[0])
        return registered

    mixin._register_hook = staticmethod(register)
    if hooks.count():
        _nodes.find_earlier()


class _Node:
    """What an autograd node calls.

    Attributes:
        hooks: gives the dict of its hooks, while it lives.
        first: how many of the script's it had at the first program point.
        seen: after how many iterations it was seen.
    """

    __slots__ = ("first", "hooks", "seen")

    def __init__(self, there: weakref.ref[Any]) -> None:
        self.hooks = there
        self.first = self.seen = 0

    def own(self) -> list[Any] | None:
        """The script's hooks; None if the node is gone."""
        there = self.hooks()
        if there is None:
            return None
        return [own for hook in list(there.values()) for own in hooks.own_in(hook)]


class _Nodes:
    """The autograd nodes that live and have, or had, hooks of the script's."""

    def __init__(self) -> None:
        self._count = 0  # of all that ever had one
        self._first = 0  # as of the first program point
        self._newest = -1  # of the nodes that this thread has made
        self._known: dict[int, _Node] = {}  # by number
        self._numbers: dict[int, int] = {}  # by identity of the dict of hooks

    def add(self, there: Any) -> None:
        """Adds the node with a dict of hooks, unless it is known."""
        identity, number = id(there), self._count
        if identity in self._numbers:
            return

        def drop(_: Any) -> None:
            self._known.pop(number, None)
            if self._numbers.get(identity) == number:
                del self._numbers[identity]

        self._count += 1
        self._numbers[identity] = number
        self._known[number] = _Node(weakref.ref(there, drop))

    def find_earlier(self) -> None:
        """Adds the nodes that had hooks before registrations were watched. Slow: once."""
        torch: Any = sys.modules["torch"]
        found: dict[int, Any] = {}
        for one in gc.get_objects():
            if type(one) is OrderedDict and one:
                items = list(one.items())
                if all(type(key) is int and callable(hook) for key, hook in items):
                    found[id(one)] = one
        if not found:
            return
        holders = (torch.nn.Module, torch.optim.Optimizer)
        for one in gc.get_objects():
            if issubclass(type(one), holders):
                for held in list(vars(one).values()):
                    found.pop(id(held), None)
            elif issubclass(type(one), torch.Tensor):
                for held in hooks.lists_of_tensor(one):
                    found.pop(id(held), None)
        for held in hooks.lists_of_all():
            found.pop(id(held), None)
        for there in sorted(found.values(), key=min):
            if any(hooks.own_in(hook) for hook in list(there.values())):
                self.add(there)

    def of_script(self, is_first: bool) -> hooks.Hooks:
        """As `of_nodes`."""
        if is_first:
            self._first = self._count
        found: hooks.Hooks = []
        if not self._known:
            return found
        newest = _numbered()
        has_run, self._newest = newest != self._newest, newest
        for number, node, own in self._alive():
            if is_first:
                node.first = len(own)
            if number >= self._first:
                node.seen += has_run
                if node.seen < _STAYS:
                    continue
            found += [(f"{NAMED}{number}: {i}>", hook) for i, hook in enumerate(own)]
        return found

    def gone(self) -> list[str]:
        return [
            f"{NAMED}{number}: {i}>"
            for number, node, own in self._alive()
            for i in range(len(own), node.first)
        ]

    def _alive(self) -> Iterator[tuple[int, _Node, list[Any]]]:
        for number in list(self._known):
            node = self._known.get(number)
            own = None if node is None else node.own()
            if node is not None and own is not None:
                yield number, node, own


_nodes = _Nodes()


def _numbered() -> int:
    """How many nodes this thread has made."""
    return int(sys.modules["torch"]._C._autograd._get_sequence_nr())
