"""Whether gradients outlive the optimizer step: then they are state.

Usually a step's gradients are dropped or zeroed before the next ones are computed. Where they are
not, each step adds to those of the steps before (gradients that are never zeroed, or only every few
steps, or of an optimizer that steps only every few iterations), and a snapshot has to have them.

A snapshot that was taken before this came out has none. A resume from it leaves the gradients of the
discarded iteration there: right for step 1, and for a script that zeroes them next; `about_to_step`
tells of any other. So does `steps_without`, for an optimizer that was still to step with gradients
from before the snapshot.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from reft._state.modes import outside_modes


class Gradients:
    """What one process knows of its gradients.

    Attributes:
        outlive: whether they were seen to be added to after a step.
        resumed_at: step at which this process was resumed, until it has taken another one; 0 if it
            was not.
    """

    def __init__(self) -> None:
        self.outlive = False
        self.resumed_at = 0
        self._watching = False
        # Ids of optimizers that were to step with gradients which the resume did not bring back.
        self._awaited: set[int] = set()
        # By id of an optimizer, the gradient that it has stepped with last, and its version then.
        self._used: dict[int, tuple[weakref.ref[Any], int]] = {}
        # One gradient of each optimizer, by id, as the last step has left it, and its version then.
        # Without those that `zero_grad` has zeroed since.
        self._left: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], int]] = {}

    def watch(self) -> None:
        """Notes calls of `zero_grad` from now on. Idempotent."""
        if not self._watching:
            self._watching = True
            self._watch(Optimizer)
            self._watch(torch.nn.Module)

    def _watch(self, cls: Any) -> None:
        original = cls.zero_grad

        @functools.wraps(original)
        def zero_grad(obj: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # A constant there: the graph is as without this wrapper, and has no guards on what
                # it notes, which is new in each step.
                return original(obj, *args, **kwargs)
            before = self._before_zeroing(obj)
            result = original(obj, *args, **kwargs)
            self._zeroed(before)
            return result

        # torch's own for optimizers is not traced. This imports nothing that it does not import.
        disable: Any = torch._disable_dynamo
        cls.zero_grad = disable(zero_grad) if cls is Optimizer else zero_grad

    @outside_modes
    def _before_zeroing(self, obj: Any) -> dict[int, int]:
        """Gives the versions of the gradients that the last step has left."""
        try:
            self._awaited = self._awaited - {id(obj)} if isinstance(obj, Optimizer) else set()
            return {key: _version(left[1]) for key, left in self._left.items()}
        except Exception:  # an observer may go blind, it may not break training
            return {}

    @outside_modes
    def _zeroed(self, before: dict[int, int]) -> None:
        try:
            self._left = {
                key: left
                for key, left in self._left.items()
                if _version(left[1]) == before.get(key)
            }
        except Exception:
            self._left = {}

    def has_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        found = _first(optimizer)
        self._used.pop(id(optimizer), None)
        if found is not None:
            self._used[id(optimizer)] = weakref.ref(found[1]), found[1]._version

    def waiting(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """At a program point: those of `optimizers` that have gradients with which no optimizer has
        stepped yet, and that the snapshot does not have."""
        if self.outlive:
            return []
        used = {(id(reference()), version) for reference, version in self._used.values()}
        found = [(o, _first(o)) for o in optimizers]
        return [o for o, first in found if first and (id(first[1]), first[1]._version) not in used]

    def resumed(self, waiting: list[Optimizer], step: int) -> None:
        """The process was resumed at a step at which these were `waiting`."""
        self.resumed_at = step
        self._awaited = set(map(id, waiting)) if step > 1 else set()

    def steps_without(self, optimizer: Optimizer) -> bool:
        """Before an optimizer step: whether it lacks gradients since the resume, said once."""
        lacks = id(optimizer) in self._awaited
        self._awaited.discard(id(optimizer))
        return lacks

    def added_to(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """At a program point, before the snapshot: those of `optimizers` that have not stepped since
        the last point, and whose gradients have been added to."""
        if self.outlive:
            return []
        found = [o for o in optimizers if self._has_grown(self._left.get(id(o)))]
        self.outlive = bool(found)
        return found

    def stepped(self, optimizers: list[Optimizer]) -> None:
        """At a program point: notes the gradients that are there."""
        self._left = {}
        if self.outlive:
            return
        for optimizer in optimizers:
            found = _first(optimizer)
            if found is not None:
                parameter, gradient = found
                left = weakref.ref(parameter), weakref.ref(gradient), gradient._version
                self._left[id(optimizer)] = left

    def about_to_step(self, optimizer: Optimizer) -> bool:
        """Before an optimizer step: whether it has come out that gradients outlive the step."""
        left = self._left.pop(id(optimizer), None)
        if self.outlive or left is None:
            return False
        self.outlive = self._has_grown(left)
        return self.outlive

    @staticmethod
    def _has_grown(left: tuple[weakref.ref[Any], weakref.ref[Any], int] | None) -> bool:
        if left is None:
            return False
        parameter, gradient = left[0](), left[1]()
        return (
            parameter is not None
            and gradient is not None
            and parameter.grad is gradient
            and gradient._version != left[2]
        )

    def forget(self) -> None:
        """A new training begins."""
        self.outlive = False
        self.resumed_at = 0
        self._awaited, self._used, self._left = set(), {}, {}


class Holder:
    """The place of a parameter's gradient."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __getitem__(self, key: Any) -> torch.Tensor | None:
        return self._parameter.grad


def _first(optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter, parameter.grad
    return None


def _version(reference: weakref.ref[Any]) -> int:
    gradient = reference()
    return -1 if gradient is None else int(gradient._version)


of_process = Gradients()
