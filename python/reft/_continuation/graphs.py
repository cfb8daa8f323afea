"""Notices autograd graphs that a script computes before a program point and differentiates after
it.

The values of such a tensor come back, its graph does not: it holds activations of the iteration
that is thrown away. Whether the script will call `backward` through it cannot be read from its
frames, so the tensors that stand in them at the point carry a hook on their node until the next
point, and the first gradient that comes by says so.

Threads: `watch` and `forget` on the training thread; hooks on those of autograd. Errors: none.
"""

from __future__ import annotations

from typing import Any

_MOST = 64  # tensors that are watched at a point

_hooks: list[Any] = []
_used: list[str] = []


def watch(tensors: list[tuple[Any, str]]) -> None:
    """Watches the graphs of these tensors, and those of an earlier point no more.

    Args:
        tensors: Tensors that have a graph, each with its place. They are not kept alive.
    """
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    for tensor, place in tensors[:_MOST]:
        _hooks.append(tensor.grad_fn.register_prehook(_Hook(place)))


def used() -> str | None:
    """Gives the place of the first tensor whose graph was used after the point at which it was watched; None if none was."""
    return _used[0] if _used else None


def forget() -> None:
    """What was used is of no importance any more: another program point was chosen."""
    _used.clear()


def refusal(place: str) -> str:
    """Says why the place in the loop cannot be put back."""
    return f"{place} is computed before the optimizer step and differentiated after it: compute it anew after the step"


class _Hook:
    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, gradients: Any) -> None:
        if not _used:
            _used.append(self._place)
