"""Finds the program point: the return of the last optimizer step of an iteration.

A loop may step several optimizers (GAN: discriminator, then generator) or one of them several times. The *closing* optimizer
is the one whose step came right before the first optimizer stepped again: from then on each of its steps ends an iteration.
With a single optimizer alive that is known at once. Every optimizer step, closing or not, is a gate: it may overwrite
what is being copied.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any, Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from reft import _discovery


class Boundary:
    """Calls back on gates and program points.

    Threads: the training thread. Errors: hooks never raise; `on_error` gets what the callbacks raise.

    Attributes:
        optimizers: outermost optimizers in the order of their first step.
        closing: index of the closing optimizer, None until it is known.
    """

    def __init__(
        self,
        on_gate: Callable[[], None],
        on_point: Callable[[FrameType], None],
        on_error: Callable[[str, Exception], None],
        expected_closing: Callable[[], int | None],
    ) -> None:
        self.optimizers: list[Optimizer] = []
        self.closing: int | None = None
        self._on_gate, self._on_point, self._on_error = on_gate, on_point, on_error
        self._expected_closing = expected_closing
        self._last = -1
        self._nesting: list[int] = []  # ids of optimizers whose step is running: ZeRO's outer step calls an inner one
        self._handles = [register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post)]

    def remove(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            if id(optimizer) in self._nesting:  # an earlier step raised and never came to its post-hook
                del self._nesting[self._nesting.index(id(optimizer)) :]
            self._nesting.append(id(optimizer))
            self._on_gate()
        except Exception as error:
            self._on_error("gate", error)

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            if id(optimizer) in self._nesting:
                del self._nesting[self._nesting.index(id(optimizer)) :]
            if self._nesting or torch.compiler.is_compiling():
                return
            if self._ends_iteration(optimizer):
                self._on_point(sys._getframe(1))
        except Exception as error:
            self._on_error("step", error)

    def _ends_iteration(self, optimizer: Optimizer) -> bool:
        index = next((i for i, known in enumerate(self.optimizers) if known is optimizer), -1)
        if index < 0:
            self.optimizers.append(optimizer)
            index = len(self.optimizers) - 1
            if self.closing is None:
                expected = self._expected_closing()
                if expected is not None:
                    self.closing = expected if index == expected else None
                elif index == 0 and self._alone(optimizer):
                    self.closing = 0
        elif self.closing is None:
            self.closing = self._last  # `optimizer` begins the second round
        self._last = index
        return index == self.closing

    @staticmethod
    def _alone(optimizer: Optimizer) -> bool:
        inner = {id(o) for o in _discovery._inner_optimizers(optimizer)}

        def others() -> bool:
            found = [o for o in _discovery.live(Optimizer) if o is not optimizer and id(o) not in inner]
            return any(group["params"] for other in found for group in other.param_groups)

        if not others():
            return True
        gc.collect()  # one that was replaced may be dead and not yet collected
        return not others()
