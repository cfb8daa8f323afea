"""Hooks that a script has registered: on modules, their parameters, optimizers, on all of them, on
nodes of autograd, and for the communication of gradients; filters of loggers, which are like them.

What a hook keeps (a closure, the object whose method it is) is often held by nothing else. Only
hooks that are the script's own are looked at: those of packages belong to what the restarted script
builds. Where torch registers a function of its own that calls the script's, as for
`register_multi_grad_hook`, the script's one counts.

Nodes of autograd do not show their hooks. Torch registers all of them through one function, which
`watch_nodes` replaces. A node is called by the number of nodes that had hooks before it, which a
restarted script repeats up to the first program point. Nodes of the graph of an iteration end with
it: what is registered on them in each iteration is registered again. One that has come later and
stays is the gradient accumulator of a parameter, as a rule.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import compress
from types import FunctionType, MethodType
from typing import Any

from reft._state.own import is_own

Hooks = list[
    tuple[str, Any]
]  # where it is registered, the same in every process; the hook, or the state that is passed to it

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL = {
    "torch.nn.modules.module": (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}
_OF_TORCH = "torch."  # modules whose functions stand for those of a script
_DEEPEST = 3  # of functions in closures of functions
_LISTS_LAST = 64  # looks for which a logger is trusted to keep its lists
_STAYS = 3  # iterations after which a node that has come late is no iteration's
ON_NODE = "<hook of autograd node "
"""How the names of hooks on nodes begin."""


def count() -> int:
    """A number that grows with each hook that is registered; removals do not change it."""
    torch: Any = sys.modules["torch"]
    return int(torch.utils.hooks.RemovableHandle.next_id)


def of_tree(modules: Iterable[tuple[str, Any]], tensors: Iterable[tuple[str, Any]]) -> Hooks:
    """Gives the hooks of a module tree.

    Args:
        modules: Full name and module.
        tensors: Full name and parameter or buffer.
    """
    found: Hooks = []
    for name, module in modules:
        _collect(found, name, module, _OF_MODULES)
        for i, (hook, state) in enumerate(module.__dict__.get("_comm_hooks", ())):
            if is_own_hook(hook):
                found.append((f"{name}<comm hook {i}>", hook))
            found.append((f"{name}<comm hook {i}>.state", state))
    for name, tensor in tensors:
        _collect(found, name, tensor, _OF_TENSORS)
    return found


def of_optimizer(optimizer: Any) -> Hooks:
    """Gives the hooks of an optimizer's steps."""
    found: Hooks = []
    _collect(found, "", optimizer, _OF_OPTIMIZERS)
    return found


def of_tensor(tensor: Any) -> Hooks:
    """Gives the hooks of a tensor."""
    found: Hooks = []
    _collect(found, "", tensor, _OF_TENSORS)
    return found


def of_all(is_first: bool = False) -> dict[str, Hooks]:
    """Gives, by package, the hooks that hold for all modules or all optimizers, those of autograd
    nodes, and the filters of loggers.

    Args:
        is_first: This is the first program point.
    """
    found: Hooks = []
    for module, kinds in _OF_ALL.items():
        if module in sys.modules:
            _collect(found, "", sys.modules[module], kinds)
    found += _nodes.hooks(is_first)
    return {"torch": found, "logging": _loggers.filters()}


def gone() -> list[str]:
    """Names of the hooks on nodes that were there at the first program point and were removed
    since. A node that is gone has none."""
    return _nodes.gone()


def watch_nodes() -> None:
    """Notes from now on which autograd nodes get hooks, and looks once for those that have some."""
    torch: Any = sys.modules["torch"]
    mixin = getattr(torch.autograd.function, "_HookMixin", None)
    if mixin is None or hasattr(mixin, "_reft_original"):
        return
    original = mixin._reft_original = mixin._register_hook

    def register(hooks: Any, hook: Any) -> Any:
        registered = original(hooks, hook)
        if _own_in(hook):
            _nodes.add(registered[0])
        return registered

    mixin._register_hook = staticmethod(register)
    if count():
        _nodes.find_earlier()


class _Node:
    """What an autograd node calls.

    Attributes:
        hooks: gives the dict of its hooks, while it lives.
        first: how many of the script's it had at the first program point.
        seen: after how many iterations it was seen.
    """

    __slots__ = ("first", "hooks", "seen")

    def __init__(self, hooks: weakref.ref[Any]) -> None:
        self.hooks = hooks
        self.first = self.seen = 0

    def own(self) -> list[Any] | None:
        """The script's hooks; None if the node is gone."""
        there = self.hooks()
        if there is None:
            return None
        return [own for hook in list(there.values()) for own in _own_in(hook)]


class _Nodes:
    """The autograd nodes that live and have, or had, hooks of the script's."""

    def __init__(self) -> None:
        self._count = 0  # of all that ever had one
        self._first = 0  # as of the first program point
        self._newest = -1  # of the nodes that this thread has made
        self._known: dict[int, _Node] = {}  # by number
        self._numbers: dict[int, int] = {}  # by identity of the dict of hooks

    def add(self, hooks: Any) -> None:
        """Adds a node, unless it is known."""
        identity, number = id(hooks), self._count
        if identity in self._numbers:
            return

        def drop(_: Any) -> None:
            self._known.pop(number, None)
            if self._numbers.get(identity) == number:
                del self._numbers[identity]

        self._count += 1
        self._numbers[identity] = number
        self._known[number] = _Node(weakref.ref(hooks, drop))

    def find_earlier(self) -> None:
        """Adds the nodes that had hooks before registrations were watched. Slow: once."""
        torch: Any = sys.modules["torch"]
        found: dict[int, Any] = {}
        for one in gc.get_objects():
            if type(one) is OrderedDict and one and all(type(key) is int for key in list(one)):
                found[id(one)] = one
        if not found:
            return
        holders = (torch.nn.Module, torch.optim.Optimizer)
        for one in gc.get_objects():
            if issubclass(type(one), holders):
                for held in list(vars(one).values()):
                    found.pop(id(held), None)
            elif issubclass(type(one), torch.Tensor):
                for name in _OF_TENSORS:
                    found.pop(id(getattr(one, name, None)), None)
        for module, names in _OF_ALL.items():
            for name in names:
                found.pop(id(getattr(sys.modules.get(module), name, None)), None)
        for hooks in sorted(found.values(), key=min):
            if any(_own_in(hook) for hook in list(hooks.values())):
                self.add(hooks)

    def hooks(self, is_first: bool) -> Hooks:
        """Gives the script's hooks; not those of an iteration that has come since the first program
        point."""
        if is_first:
            self._first = self._count
        found: Hooks = []
        if not self._known:
            return found
        newest = sys.modules["torch"]._C._autograd._get_sequence_nr()
        has_run, self._newest = newest != self._newest, newest
        for number, node, own in self._alive():
            if is_first:
                node.first = len(own)
            if number >= self._first:
                node.seen += has_run
                if node.seen < _STAYS:
                    continue
            found += [(f"{ON_NODE}{number}: {i}>", hook) for i, hook in enumerate(own)]
        return found

    def gone(self) -> list[str]:
        return [
            f"{ON_NODE}{number}: {i}>"
            for number, node, own in self._alive()
            for i in range(len(own), node.first)
        ]

    def _alive(self) -> Iterator[tuple[int, _Node, list[Any]]]:
        for number in list(self._known):
            node = self._known.get(number)
            own = None if node is None else node.own()
            if node is not None and own is not None:
                yield number, node, own


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


_nodes, _loggers = _Nodes(), _Loggers()


def _collect(found: Hooks, name: str, owner: Any, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        registered = getattr(owner, kind, None)
        if registered:
            own = [one for hook in list(registered.values()) for one in _own_in(hook)]
            found.extend((f"{name}<{kind.strip('_')} {i}>", hook) for i, hook in enumerate(own))


def _own_in(hook: Any, depth: int = 0) -> list[Any]:
    """The script's functions in a hook: itself, or those that a function of torch's calls. What
    torch's one keeps for itself is of this process (numbers of backward passes)."""
    called = behind(hook)
    if (
        type(called) is not FunctionType
        or not called.__closure__
        or not str(called.__globals__.get("__name__")).startswith(_OF_TORCH)
    ):
        return [hook] if is_own_hook(hook) else []
    found: list[Any] = []
    for cell in called.__closure__ if depth < _DEEPEST else ():
        try:
            held = behind(cell.cell_contents)
        except ValueError:  # empty
            continue
        if type(held) in (FunctionType, MethodType):
            found += _own_in(cell.cell_contents, depth + 1)
        elif callable(held) and not isinstance(held, _never_hooks()) and is_own_hook(held):
            found.append(cell.cell_contents)
    return found


def _never_hooks() -> tuple[type, ...]:
    """Classes whose objects are called and are no hooks."""
    torch: Any = sys.modules["torch"]
    return (type, torch.nn.Module, torch.optim.Optimizer)


def behind(hook: Any) -> Any:
    """What a partial call calls."""
    while type(hook) is functools.partial:
        hook = hook.func
    return hook


def is_own_hook(hook: Any) -> bool:
    """Whether a function, method or object that is called is one of the script's."""
    hook = behind(hook)
    if type(hook) is MethodType:
        hook = hook.__self__
    return is_own(hook.__module__ if isinstance(hook, FunctionType) else type(hook).__module__)
