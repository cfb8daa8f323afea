"""Notices autograd graphs that a script computes before a program point and differentiates after
it.

The values of such a tensor come back, its graph does not: it holds activations of the iteration
that is thrown away. Whether the script will call `backward` through it cannot be read from its
frames. So the tensors that stand in them at the point carry a hook on their node until the next
point, and the first gradient that arrives reports itself.

Threads: `watch` and `forget` on the training thread; hooks on those of autograd. Errors: none.
"""

from __future__ import annotations

from typing import Any

_MOST = 64  # tensors that are watched at a point


class GraphWatch:
    """Watches the graphs of the tensors that stand in the frames at a program point."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._used: str | None = None

    def watch(self, tensors: list[tuple[Any, str]]) -> None:
        """Watches the graphs of these tensors, and those of an earlier point no more.

        Args:
            tensors: Tensors that have a graph, each with its place. They are not kept alive.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for tensor, place in tensors[:_MOST]:
            self._hooks.append(tensor.grad_fn.register_prehook(_Hook(self, place)))

    def used(self) -> str | None:
        """Returns the place of the first tensor whose graph was used after its point, if any."""
        return self._used

    def note_use(self, place: str) -> None:
        """Notes that a gradient has reached the graph of a watched tensor."""
        self._used = self._used or place

    def forget(self) -> None:
        """Forgets what was used: another program point was chosen."""
        self._used = None


def refusal(place: str) -> str:
    """Says why the place in the loop cannot be put back."""
    return (
        f"{place} is computed before the optimizer step and differentiated after it:"
        " compute it anew after the step"
    )


class _Hook:
    def __init__(self, watch: GraphWatch, place: str) -> None:
        self._watch = watch
        self._place = place

    def __call__(self, gradients: Any) -> None:
        self._watch.note_use(self._place)
