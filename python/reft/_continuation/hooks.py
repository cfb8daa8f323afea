"""Hooks that a script has registered: on modules, their parameters, optimizers, on all of them, and
for the communication of gradients. Those of autograd's nodes are in `node_hooks`.

What a hook keeps (a closure, the object whose method it is) is often held by nothing else. Only
hooks that are the script's own are looked at: those of packages belong to what the restarted script
builds. Where torch registers a function of its own that calls the script's, as for
`register_multi_grad_hook`, the script's one counts.

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
_OF_TORCH = "torch."  # modules whose functions stand for those of a script
_DEEPEST = 3  # of functions in closures of functions


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


def lists_of_all() -> list[Any]:
    """The dicts in which these are."""
    return [
        getattr(sys.modules.get(module), name, None)
        for module, names in _OF_ALL.items()
        for name in names
    ]


def lists_of_tensor(tensor: Any) -> list[Any]:
    """The dicts in which those of a tensor are."""
    return [getattr(tensor, name, None) for name in _OF_TENSORS]


def _collect(found: Hooks, name: str, owner: Any, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        registered = getattr(owner, kind, None)
        if registered:
            own = [one for hook in list(registered.values()) for one in own_in(hook)]
            found.extend((f"{name}<{kind.strip('_')} {i}>", hook) for i, hook in enumerate(own))


def own_in(hook: Any, depth: int = 0) -> list[Any]:
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
            found += own_in(cell.cell_contents, depth + 1)
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
    return is_own(hook.__module__ if type(hook) is FunctionType else type(hook).__module__)
