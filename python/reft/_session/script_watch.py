"""What a script does that decides what its snapshots have to have, seen while it runs: gradients
that it reads or adds to after the optimizer step, process groups whose ops reft does not see.

Threads: the training thread. Errors: none but those of what it calls.
"""

from __future__ import annotations

from types import CodeType, FrameType

import torch.distributed.distributed_c10d as c10d
from torch.optim import Optimizer

from reft import _continuation
from reft._session.announcer import Announcer
from reft._session.boundary import Boundary
from reft._state import gradients
from reft._state.optimizers import with_inner
from reft._state.own import is_own

_UNSEEN = ("fake", "undefined")  # backends without ops


class ScriptWatch:
    """Looks at each program point, before the snapshot, and before each optimizer step."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        # Where optimizers step, by the identity of the code, which is kept with it.
        self._looked_at: dict[tuple[tuple[int, int], ...], list[CodeType]] = {}
        self._groups = 0

    def look_for_reads(self, frame: FrameType, optimizers: list[Optimizer]) -> None:
        """At a program point, before the plan: whether the script reads gradients after the step.
        Asked once for each place of a step in the script's code.

        Args:
            optimizers: those of the script.
        """
        if gradients.of_process.outlive:
            return
        path: list[tuple[int, int]] = []
        codes: list[CodeType] = []
        there: FrameType | None = frame
        while there is not None:
            if is_own(there.f_globals.get("__name__")):
                path.append((id(there.f_code), there.f_lasti))
                codes.append(there.f_code)
            there = there.f_back
        path.append((len(optimizers), 0))
        if tuple(path) in self._looked_at:
            return
        self._looked_at[tuple(path)] = codes
        if where := _continuation.late_read(frame, with_inner(optimizers)):
            gradients.of_process.outlive = True
            self._announcer.gradients_read(where)

    def look_at_groups(self) -> None:
        """Reports process groups of other backends, once there are any."""
        there = c10d._world.pg_map
        if len(there) == self._groups:
            return
        self._groups = len(there)
        names, configs = c10d._world.pg_names, c10d._world.pg_backend_config
        others = {
            names.get(group, "?"): str(backend)
            for group, (backend, _) in there.items()
            if "reft" not in f"{backend} {configs.get(group)}" and backend not in _UNSEEN
        }
        if others:
            self._announcer.other_backends(others)

    def look_at_gradients(self, step: int, optimizers: list[Optimizer], boundary: Boundary) -> None:
        """Whether another optimizer gathers gradients over several iterations.

        Args:
            step: the one that has just ended.
            optimizers: those of the script.
        """
        gathering = gradients.of_process.added_to(optimizers)
        if gathering:
            known = with_inner(boundary.optimizers)
            boundary.know([o for o in gathering if all(o is not k for k in known)])
            self._announcer.gradients_outlive(step - 1)
            self._added_after_resume()

    def about_to_step(self, optimizer: Optimizer, step: int) -> None:
        """Before an optimizer step: whether gradients are used that a snapshot has not."""
        if gradients.of_process.steps_without(optimizer):
            self._announcer.resumed_without_gradients(
                step, f"a {type(optimizer).__name__} steps without those from before it"
            )
        elif gradients.of_process.about_to_step(optimizer):
            self._announcer.gradients_outlive(step)
            self._added_after_resume()

    def _added_after_resume(self) -> None:
        """The script has added to gradients, which may be those of a discarded iteration."""
        step = gradients.of_process.resumed_at
        if step > 1:
            why = "the script has added to those of the iteration that the resume discarded"
            self._announcer.resumed_without_gradients(step, why)
