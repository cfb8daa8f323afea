"""Finds the program point: the return of the last optimizer step of an iteration.

A loop may step several optimizers (GAN: discriminator, then generator), or one of them several
times. The *closing* optimizer is the one that stepped right before the first optimizer stepped
again: from then on each of its steps ends an iteration. If only one optimizer is alive, it is the
closing one at once. If a round passes without a step of the closing optimizer, `Boundary` chooses a
new one.

It avoids optimizers whose steps are *crossed*: a graph is built before such a step and used after
it (`fake = G(z)`, the step of D, then G's loss on `fake`), or gradients are (one backward for two
optimizers). A restarted script cannot resume between the two. Every optimizer step, closing or not,
is a gate: it may overwrite memory that is being copied.

Steps inside functions that were given to torch.compile count when such a function returns
(`compiled_steps`).
"""

from __future__ import annotations

import gc
import sys
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from reft._session import compiled_steps
from reft._session.sites import Sites
from reft._state import gradients, heap, recomputed
from reft._state.constructions import of_process
from reft._state.modes import outside_modes
from reft._state.optimizers import with_inner

# Rounds without the closing optimizer, after which crossed steps may end iterations, too.
_PATIENCE = 64


def _first_gradient(optimizer: Optimizer) -> Any:
    return next(
        (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None),
        None,
    )


class Awaited(Protocol):
    """A program point of another process."""

    @property
    def position(self) -> dict[str, Any]:
        """What `Boundary.position` gave there."""

    @property
    def exact(self) -> bool:
        """Whether the place in the loop is restored."""

    @property
    def waits(self) -> bool:
        """Whether the script waits for that place, and for optimizers that it makes later."""

    @property
    def most_optimizers(self) -> int:
        """How many optimizers it had."""

    def has_optimizers(self, known: list[Optimizer]) -> bool:
        """Returns whether the script has made all optimizers that it had there; `known` have
        stepped."""


class Listener(Protocol):
    """Receives the reports of a `Boundary`, on the training thread, inside a hook."""

    def gate(self, optimizer: Optimizer | None = None) -> None:
        """An optimizer is about to write; None: some may."""

    def optimizers_now(self) -> list[Optimizer]:
        """Returns all optimizers of the script, those that have not stepped, too."""

    def compiled_step(self, is_seen: bool) -> None:
        """An optimizer steps inside a compiled function, whose calls are seen or not."""

    def program_point(self, frame: FrameType, gated: bool = True) -> None:
        """An iteration has ended; `frame` is the frame of the optimizer's step.

        Args:
            gated: whether `gate` is called before the state is written again.
        """

    def possible_point(self, frame: FrameType) -> None:
        """This step may turn out to be the first one that ends an iteration."""

    def failed(self, what: str, error: Exception) -> None:
        """A hook has failed with `error`; `what` is "gate" or "step"."""

    def awaited(self) -> Awaited | None:
        """Returns what the script is yet to be put back to; None if it is not."""

    def optimizers_replaced(self) -> None:
        """Optimizers may have been replaced: the listener must drop its references to them."""

    def graph_crosses(self) -> bool:
        """Returns whether a graph in the frames of the last point or possible point was used."""

    def step_crossed(self, instead: int) -> None:
        """Steps like the last point or possible point are crossed, by a graph or by gradients.

        Args:
            instead: index of the last optimizer whose steps are not crossed, -1 if all are.
        """

    def iteration_lengthened(self, crossed: Optimizer, closing: Optimizer) -> None:
        """Iterations now end with steps of `closing`, because those of `crossed` are crossed."""


class Boundary:
    """Reports gates and program points to its listener.

    Args:
        listener: gets the reports.
        exact: whether the place in the loop is saved.

    Threads: the training thread. Errors: hooks never raise; exceptions go to the listener's
    `failed`.

    Attributes:
        closing: index of the closing optimizer, None until it is known.
        sites: where steps end.
        early: how many optimizers a restarted script makes while it may wait.
    """

    def __init__(self, listener: Listener, exact: bool = True) -> None:
        self._listener = listener
        # None: an optimizer that was replaced and freed. The others keep their index.
        self._known: list[Optimizer | None] = []
        self.closing: int | None = None
        self._crossed: set[int] = set()
        # One gradient of each other optimizer at the last `_look`, and its version then.
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._looked_at = -1  # the optimizer whose step was the last point or possible point
        self._waited = 0  # rounds without the closing optimizer
        self._lengthening_reported = False
        self._steps: list[int] = []  # optimizers in the order of their last steps
        self._last = -1
        self._has_unseen = False  # steps in compiled functions
        self._round: set[int] = set()  # optimizers that stepped since the last program point
        # Ids of optimizers whose step is running: ZeRO's outer step calls an inner one.
        self._nesting: list[int] = []
        self.sites = Sites(exact)
        self.early = 0
        # By optimizer, the step at which it was first there; of those that are made early.
        self._there_at: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._has_point = False  # whether a program point was reported
        self._compiled = compiled_steps.watch(self)
        self._handles = [
            register_optimizer_step_pre_hook(self._pre),
            register_optimizer_step_post_hook(self._post),
        ]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Outermost optimizers in the order of their first step."""
        return [optimizer for optimizer in self._known if optimizer is not None]

    def position(self, frame: FrameType) -> dict[str, Any]:
        """What decides where the next iterations end, for `put_back` in a restarted script.

        Args:
            frame: of the program point that is saved.
        """
        alive = [i for i, optimizer in enumerate(self._known) if optimizer is not None]
        place = {index: k for k, index in enumerate(alive)}
        return {
            "closing": None if self.closing is None else place.get(self.closing),
            "last": place.get(self._last, -1),
            "steps": [place[i] for i in self._steps if i in place],
            "round": sorted(place[i] for i in self._round if i in place),
            "crossed": sorted(place[i] for i in self._crossed if i in place),
            "waited": self._waited,
            "lengthened": self._lengthening_reported,
            "early": self.early,
            "complete": max(
                (self._noted_at(o) or self.sites.count for o in self.optimizers), default=0
            ),
            **self.sites.saved(frame),
        }

    def put_back(self, position: dict[str, Any], has_place: bool) -> None:
        """The state is that of when another process, or this one, gave `position`; all optimizers
        of then are known.

        Args:
            has_place: whether the script stands there, too; else its loops start again.
        """
        alive = [i for i, optimizer in enumerate(self._known) if optimizer is not None]
        index = dict(enumerate(alive))
        self.closing = index.get(position["closing"])
        self._last = index.get(position["last"], -1)
        self._steps = [index[k] for k in position["steps"] if k in index]
        self._round = {index[k] for k in position["round"] if k in index}
        self._crossed = {index[k] for k in position["crossed"] if k in index}
        self._waited = position["waited"]
        self._lengthening_reported = position["lengthened"]
        self.early = max(self.early, position["early"])
        if has_place:
            step = position["complete"]
            self._there_at = {id(o): (weakref.ref(o), step) for o in self.optimizers}
            self.sites.put_back(position)
        self._look()

    def why_no_point(self) -> str:
        """Why nothing was protected, if there was no program point; "" if that has been said."""
        if self._has_unseen:
            return ""
        if not self._known:
            return (
                "nothing was protected: no torch.optim.Optimizer has stepped. A loop without one"
                " calls reft.step() after each training step"
            )
        return (
            f"nothing was protected: which of {len(self._known)} optimizers ends an iteration shows"
            " when one steps again"
        )

    @property
    def steps_waited(self) -> int:
        """Steps of this process since the first one at which it could be put back."""
        return max(0, self.sites.count - max(1, self.sites.first))

    def know(self, others: list[Optimizer]) -> None:
        """Adds optimizers that have not stepped in this process, but did in the previous one."""
        self._known += others

    def remove(self) -> None:
        """Removes the hooks, and forgets all optimizers."""
        for handle in self._handles:
            handle.remove()
        compiled_steps.unwatch(self._compiled)
        recomputed.of_process.forget()
        self._handles = []
        self._known, self._steps, self._gradients = [], [], {}

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            compiled_steps.traced()
            return
        if of_process.is_own(optimizer):
            return
        try:
            begun = self._nesting.count(id(optimizer))
            if begun and begun != self._running_steps(optimizer, sys._getframe(1)):
                # An earlier step raised and never reached its post-hook.
                del self._nesting[self._nesting.index(id(optimizer)) :]
            self._nesting.append(id(optimizer))
            self._begin(optimizer, (*args[1:], *kwargs.values()))
        except Exception as error:
            self._listener.failed("gate", error)

    @outside_modes
    def _begin(self, optimizer: Optimizer, arguments: tuple[Any, ...]) -> None:
        self._listener.gate(optimizer)
        recomputed.of_process.begin(optimizer, arguments)

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or of_process.is_own(optimizer):
            return
        try:
            self._end(optimizer)
            if id(optimizer) in self._nesting:
                last = len(self._nesting) - 1 - self._nesting[::-1].index(id(optimizer))
                del self._nesting[last:]
            if self._nesting:
                gradients.of_process.has_stepped(optimizer)  # an inner one, with its own gradients
            elif not self._compiled.running:
                self._stepped([optimizer], sys._getframe(1))
        except Exception as error:
            self._listener.failed("step", error)

    @outside_modes
    def _end(self, optimizer: Optimizer) -> None:
        recomputed.of_process.end(optimizer)

    @outside_modes
    def _stepped(self, optimizers: list[Optimizer], frame: FrameType) -> None:
        """Optimizers have stepped, one after the other, before the program is at `frame`."""
        self.sites.note(frame)
        for optimizer in optimizers:
            gradients.of_process.has_stepped(optimizer)
        if self.sites.is_early:
            self._note_optimizers(optimizers)
        if (awaited := self._listener.awaited()) is not None:
            self._stepped_before_resume(optimizers, frame, awaited)
            return
        ends = [self._ends_iteration(optimizer) for optimizer in optimizers]
        if any(ends):
            self._look()
            self._point(frame)
        elif self.closing is None:
            self._look()
            if not self._has_point:
                self.sites.choose(frame)
                self._listener.possible_point(frame)

    def _point(self, frame: FrameType, gated: bool = True) -> None:
        if not self.sites.first:
            self.sites.choose(frame)
        self._has_point = True
        self._listener.program_point(frame, gated)

    @outside_modes
    def explicit_point(self, frame: FrameType) -> None:
        """The script says that an iteration ends."""
        self.sites.note(frame)
        if (awaited := self._listener.awaited()) is not None:
            self._stepped_before_resume([], frame, awaited)
            return
        self._point(frame, gated=False)

    def _note_optimizers(self, stepped: list[Optimizer]) -> None:
        """Notes which optimizers there are now."""
        everything = [*self._listener.optimizers_now(), *stepped]
        if self.sites.count == 1:  # those from before the process group have no number yet
            everything += heap.live(Optimizer)[0]
        now = {id(optimizer): optimizer for optimizer in everything}
        self.early = max(self.early, len(now))
        for key, optimizer in now.items():
            if self._noted_at(optimizer) is None:
                self._there_at[key] = weakref.ref(optimizer), self.sites.count

    def _noted_at(self, optimizer: Optimizer) -> int | None:
        reference, step = self._there_at.get(id(optimizer), (None, 0))
        return step if reference is not None and reference() is optimizer else None

    def _stepped_before_resume(
        self, optimizers: list[Optimizer], frame: FrameType, awaited: Awaited
    ) -> None:
        """As `_stepped`, until the script is put back."""
        for optimizer in optimizers:
            self._note_step(self._index_of(optimizer))
        position = awaited.position
        if self.sites.count == max(1, position["first"]):
            self.sites.choose(frame)
            self._listener.possible_point(frame)
        if not self.sites.is_at(frame, position, awaited.waits and awaited.exact):
            return
        comes_later = awaited.waits and position["complete"] > position["first"]
        if comes_later and self.sites.is_early and not awaited.has_optimizers(self.optimizers):
            return
        if len(self.optimizers) > awaited.most_optimizers:
            self._forget_replaced({self._last})
        self._has_point = True
        self._listener.program_point(frame)

    # What `CompiledSteps` calls.

    def optimizers_now(self) -> list[Optimizer]:
        """All optimizers of the script."""
        return self._listener.optimizers_now()

    @outside_modes
    def compiled_gate(self) -> None:
        """Optimizers are about to write."""
        self._listener.compiled_step(is_seen=True)
        self._listener.gate()

    def compiled_steps(self, stepped: list[Optimizer], frame: FrameType) -> None:
        """Optimizers have stepped inside a compiled function that has returned."""
        self._stepped(stepped, frame)

    def compiled_unseen(self) -> None:
        """An optimizer steps in a compiled function whose calls cannot be seen."""
        self._has_unseen = True
        self._listener.compiled_step(is_seen=False)

    def failed(self, what: str, error: Exception) -> None:
        """Something has failed; training continues."""
        self._listener.failed(what, error)

    @staticmethod
    def _running_steps(optimizer: Optimizer, hook_caller: FrameType) -> int:
        """Counts the running steps of `optimizer` around this one: a class may call its base's
        step, which is hooked, too."""
        running, frame = 0, hook_caller.f_back
        while frame is not None:
            running += (
                frame.f_code is hook_caller.f_code and frame.f_locals.get("self") is optimizer
            )
            frame = frame.f_back
        return running

    def _ends_iteration(self, optimizer: Optimizer) -> bool:
        count = len(self._known)
        index = self._index_of(optimizer)
        if index == count:
            if index == 0 and self._alone(optimizer):
                self.closing = 0
        elif self.closing is None or (index in self._round and self.closing not in self._round):
            # `optimizer` begins the second round, or a whole round passed without the closing one,
            # which was replaced or is idle.
            self._choose()
        self._note_step(index)
        if (
            self._looked_at >= 0
            and self._looked_at not in self._crossed
            and (self._listener.graph_crosses() or self._is_old(index))
        ):
            self._cross(self._looked_at)
        if index != self.closing:
            return False
        self._round.clear()
        self._waited = 0
        return True

    def _index_of(self, optimizer: Optimizer) -> int:
        """Its index; it is added if it is new."""
        for i, known in enumerate(self._known):
            if known is optimizer:
                return i
        self._known.append(optimizer)
        return len(self._known) - 1

    def _note_step(self, index: int) -> None:
        self._last = index
        self._steps = [i for i in self._steps if i != index] + [index]
        self._round.add(index)

    def _look(self) -> None:
        """Notes the gradients that the other optimizers have at this step."""
        self._looked_at = self._last
        self._gradients = {}
        for i, other in enumerate(self._known):
            gradient = None if other is None or i == self._last else _first_gradient(other)
            if gradient is not None:
                self._gradients[i] = (weakref.ref(gradient), gradient._version)

    def _is_old(self, index: int) -> bool:
        """Returns whether an optimizer has stepped with gradients from before the last `_look`: a
        restarted script would have those of its first iteration instead."""
        noted, optimizer = self._gradients.get(index), self._known[index]
        if noted is None or optimizer is None:
            return False
        gradient = noted[0]()
        return (
            gradient is not None
            and gradient is _first_gradient(optimizer)
            and gradient._version == noted[1]
        )

    def _choose(self) -> None:
        """Chooses the closing optimizer: the one that stepped last, or the last one whose steps are
        not crossed."""
        before = self.closing
        if before is not None:
            # After a lengthening, the closing optimizer normally pauses and returns. Only a much
            # longer pause suggests that it was replaced.
            if not self._lengthening_reported or self._waited == _PATIENCE // 8:
                self._forget_replaced(self._round)
            self._waited += 1
            if self._waited > _PATIENCE:
                self._crossed.clear()
        self._round.clear()
        free = self._not_crossed()
        self.closing = free[-1] if self._crossed and free else self._last
        if before is not None and self.closing == before:
            self._report_lengthening(self._last)

    def _cross(self, index: int) -> None:
        """Marks an optimizer's steps as crossed, by a graph or by gradients: they end no iteration
        while steps of another one do."""
        self._crossed.add(index)
        free = self._not_crossed()
        if free and self.closing == index:
            self.closing = free[-1]
            self._report_lengthening(index)
        self._listener.step_crossed(free[-1] if free else -1)

    def _not_crossed(self) -> list[int]:
        return [i for i in self._steps if i not in self._crossed and self._known[i] is not None]

    def _report_lengthening(self, crossed: int) -> None:
        assert self.closing is not None
        one, other = self._known[crossed], self._known[self.closing]
        if one is not None and other is not None and not self._lengthening_reported:
            self._lengthening_reported = True
            self._listener.iteration_lengthened(one, other)

    def _forget_replaced(self, kept: set[int]) -> None:
        """Drops optimizers, but for those of these indices, that only this object refers to.
        Snapshots no longer save their state."""
        self._listener.optimizers_replaced()
        idle = {
            i: weakref.ref(o)
            for i, o in enumerate(self._known)
            if o is not None and i not in kept
        }
        for i in idle:
            self._known[i] = None
        gc.collect()  # so that all ranks keep the same ones
        for i, reference in idle.items():
            self._known[i] = reference()

    @staticmethod
    def _alone(optimizer: Optimizer) -> bool:
        inner = {id(o) for o in with_inner([optimizer])}

        def others() -> bool:
            found = [
                o for o in heap.live(Optimizer)[0] if o is not optimizer and id(o) not in inner
            ]
            # A wrapper of it (Accelerate's) steps no parameters of its own.
            found = [o for o in found if all(value is not optimizer for value in vars(o).values())]
            return any(group["params"] for other in found for group in other.param_groups)

        if not others():
            return True
        gc.collect()  # a replaced one may be garbage that is not collected yet
        return not others()
