"""Hooks that a script has registered: on modules, their parameters, optimizers, on all of them, and
for the communication of gradients.

What a hook keeps (a closure, the object whose method it is) is often held by nothing else. Only
hooks that are the script's own are looked at: those of packages belong to what the restarted script
builds.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
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


def of_all() -> Hooks:
    """Gives the hooks that hold for all modules or all optimizers."""
    found: Hooks = []
    for module, kinds in _OF_ALL.items():
        if module in sys.modules:
            _collect(found, "", sys.modules[module], kinds)
    return found


def _collect(found: Hooks, name: str, owner: Any, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        registered = getattr(owner, kind, None)
        if registered:
            own = filter(is_own_hook, list(registered.values()))
            found.extend((f"{name}<{kind.strip('_')} {i}>", hook) for i, hook in enumerate(own))


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
