"""Keeps the operations of this package out of modes that a script has entered: a mode that counts
operations, or draws random numbers for each, must not see them.

Threads: any. Errors: none of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


def outside_modes(do: Callable[P, T]) -> Callable[P, T]:
    """Has a function run outside of the script's `TorchFunctionMode` and `TorchDispatchMode`."""
    functions, dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

    @wraps(do)
    def outside(*args: P.args, **options: P.kwargs) -> T:
        if not functions() and not dispatches():
            return do(*args, **options)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return do(*args, **options)

    return outside
