"""Finds optimizer steps inside functions that were given to torch.compile.

Such a step runs without its hooks: Dynamo traces them once, as code in which
`torch.compiler.is_compiling()` holds. `traced` is what the hook calls there; Dynamo calls it, too,
because it is marked as a constant. It looks for the outermost compiled function that is being
called and has Dynamo report when that is called and when it returns: between the two, parameters
that have changed tell which optimizers have stepped.

Threads: the training thread. Errors: `traced` never raises, as Dynamo would; `watcher.failed` gets
what goes wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch.optim import Optimizer

_LOOKED_AT = 8  # parameters of an optimizer
_WRAPPER = ("torch._dynamo.eval_frame", "compile_wrapper")


class Watcher(Protocol):
    """Receives what `CompiledSteps` finds, on the training thread."""

    def optimizers_now(self) -> list[Optimizer]:
        """All optimizers of the script, in an order that is the same in every process."""

    def compiled_gate(self) -> None:
        """Optimizers are about to write."""

    def compiled_steps(self, stepped: list[Optimizer], frame: FrameType) -> None:
        """A compiled function has returned in which optimizers have stepped; `frame` is that of
        Dynamo's wrapper around it."""

    def compiled_unseen(self) -> None:
        """An optimizer steps in a compiled function whose calls cannot be seen."""

    def failed(self, what: str, error: Exception) -> None:
        """Something has failed; training continues."""


class CompiledSteps:
    """Watches the compiled functions of one session.

    Args:
        watcher: gets the steps; None once the session is over.

    Attributes:
        running: how many of them are running. A step whose hooks do run inside one (Dynamo gives up
            after some compilations) counts when the function returns, too.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.watcher: Watcher | None = watcher
        self.running = 0
        self._contexts: list[Any] = []
        self._versions: dict[int, list[int]] = {}

    def found(self) -> None:
        """Dynamo traces an optimizer step."""
        watcher = self.watcher
        if watcher is None:
            return
        try:
            wrapper = _outermost_wrapper()
            context = None if wrapper is None else wrapper.f_locals.get("self")
            if any(context is known for known in self._contexts):
                return
            hooks = getattr(context, "enter_exit_hooks", None)
            running = None if wrapper is None else wrapper.f_locals.get("cleanups")
            if type(hooks) is not list or type(running) is not list:
                watcher.compiled_unseen()
                return
            self._contexts.append(context)
            hooks.append(self._enter)
            running.append(self._enter())  # the call that is under way
        except Exception as error:
            watcher.failed("torch.compile", error)

    def remove(self) -> None:
        """Looks at no more calls, and drops all references."""
        self.watcher = None
        for context in self._contexts:
            if self._enter in context.enter_exit_hooks:
                context.enter_exit_hooks.remove(self._enter)
        self._contexts, self._versions, self.running = [], {}, 0

    def _enter(self) -> Callable[[], None]:
        watcher = self.watcher
        if watcher is not None:
            try:
                watcher.compiled_gate()
                self._versions = {id(o): _versions(o) for o in watcher.optimizers_now()}
            except Exception as error:
                watcher.failed("gate", error)
        handled = sys.exc_info()[1]
        self.running += 1

        def leave() -> None:
            self.running = max(0, self.running - 1)
            if self.watcher is None or sys.exc_info()[1] is not handled:
                return  # the function has raised
            try:
                stepped = [
                    o
                    for o in self.watcher.optimizers_now()
                    if self._versions.get(id(o), _versions(o)) != _versions(o)
                ]
                if stepped:
                    self.watcher.compiled_steps(stepped, sys._getframe(1))
            except Exception as error:
                self.watcher.failed("step", error)

        return leave


def traced() -> bool:
    """What a hook calls while Dynamo traces it: then it runs once, and not when the step does."""
    for steps in _sessions:
        steps.found()
    return True


traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
_sessions: list[CompiledSteps] = []


def watch(watcher: Watcher) -> CompiledSteps:
    """Begins to look for compiled steps, until `unwatch`."""
    steps = CompiledSteps(watcher)
    _sessions.append(steps)
    return steps


def unwatch(steps: CompiledSteps) -> None:
    """Ends what `watch` began. Idempotent."""
    steps.remove()
    if steps in _sessions:
        _sessions.remove(steps)


def _outermost_wrapper() -> FrameType | None:
    """Inside it, frames are those of code that Dynamo has made."""
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _WRAPPER:
            found = frame
        frame = frame.f_back
    return found


def _versions(optimizer: Optimizer) -> list[int]:
    found: list[int] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                found.append(parameter._version)
                if len(found) == _LOOKED_AT:
                    return found
    return found
