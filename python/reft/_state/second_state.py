"""What another rank keeps of an optimizer, computed here.

Where there is a rule for an optimizer (`moments.py`), what it keeps is advanced without a step of
the parameters. The rule is not trusted: for each kind of arithmetic that it needs, the first steps are
computed twice, by the rule and by torch's own optimizer on a copy of one parameter after the other,
and what torch makes is kept. Once both have been equal bit for bit, the rule works alone. If they
ever differ there, or if there is no rule, torch's own optimizer steps copies of all parameters.

Threads: `step` may run in another thread than the rest, not at the same time. Errors: those of
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from reft import _voice
from reft._state import moments
from reft._state.constructions import of_process as constructions

_PROOFS = 2  # steps that a rule and torch compute both; in the first one, all may be zero

Held = tuple[torch.Tensor, dict[Any, Any], Any]
"""The parameter of the script, and the dict and key where its second state is."""
_Groups = list[dict[str, Any]]
_Prepared = tuple[
    dict[str, Any], moments.Rule, list[tuple[torch.Tensor, torch.Tensor]]
]  # a group, its rule, and its parameters with their gradients
_Make = Callable[[_Groups], Optimizer]


class SecondState:
    """What one other rank keeps of an optimizer.

    Args:
        kind: the optimizer's class.
        make: makes one of it.
        groups: the other rank's parameter groups, with the parameters of the script.

    Attributes:
        size: numbers that its parameters have.
        advanced: how often a rule has advanced what is kept of a parameter without torch.
        reads_parameters: whether the step that is prepared needs the parameters as they are before
            it.
    """

    def __init__(self, kind: type[Optimizer], make: _Make, groups: _Groups) -> None:
        self._parameters = [p for group in groups for p in group["params"]]
        self._kind, self._make = kind, make
        self._groups = [dict(group) for group in groups]
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        self._proven: Counter[Any] = Counter()  # steps, by path of a rule and kind of numbers
        self._differs = False
        self._prepared: list[_Prepared] = []
        self._has_denormals = True
        self._copies: _Copies | None = None
        self.size = sum(p.numel() for p in self._parameters)
        self.advanced = 0
        self.reads_parameters = False
        with constructions.own():
            nothing = torch.nn.Parameter(torch.empty(0))
            self._single = make([{**groups[0], "params": [nothing]}])
        if not moments.may_have_rules(kind, self._parameters):
            self._copy_all()

    def places(self) -> Iterator[Held]:
        """Where it keeps what it has of each parameter."""
        return ((parameter, self._state, parameter) for parameter in self._parameters)

    def held(self) -> Iterator[Held]:
        """What it keeps of each parameter."""
        return (place for place in self.places() if place[2] in self._state)

    def load(self, state: dict[torch.Tensor, Any]) -> None:
        """Takes over what a checkpoint has of its parameters."""
        self._state |= {p: state[p] for p in self._parameters if p in state}

    def prepare(self, settings: _Groups, has_denormals: bool) -> None:
        """Takes gradients and settings as they are right before the step.

        Args:
            settings: of the parameter groups.
            has_denormals: the step does not round tiny numbers to zero.
        """
        for group, now in zip(self._groups, settings, strict=True):
            for key, value in now.items():
                if key != "params":
                    group[key] = value.clone() if isinstance(value, torch.Tensor) else value
        rules = None if self._copies is not None else self._rules()
        if rules is None:
            if self._copies is None:
                self._copy_all()
            assert self._copies is not None
            self._copies.prepare(self._groups)
            self.reads_parameters = False  # they are copied now
            return
        self._prepared = [
            (group, rule, [(p, p.grad) for p in group["params"] if p.grad is not None])
            for group, rule in zip(self._groups, rules, strict=True)
        ]
        self._has_denormals = has_denormals
        # Without decay, nothing that is kept depends on them, even where torch steps a copy.
        self.reads_parameters = any(rule.decay != 0 for rule in rules)

    def step(self) -> None:
        """Steps, without the hooks of the script and of this package."""
        if self._copies is not None:
            self._copies.step(self._state)
            return
        prepared, self._prepared = self._prepared, []
        tried: set[Any] = set()
        for group, rule, pairs in prepared:
            entries: list[moments.Entry] = []
            for parameter, gradient in pairs:
                state, path = self._state.get(parameter), (rule.path, parameter.dtype)
                # Threads of torch may differ in what they do with tiny numbers.
                if not (self._has_denormals and rule.fits(parameter, gradient, state)):
                    self._step_one(group, parameter, gradient)
                elif self._proven[path] < _PROOFS:
                    self._try(group, rule, parameter, gradient)
                    tried.add(path)
                else:
                    entries.append((parameter, gradient, {} if state is None else state))
            if entries:
                rule.advance(entries)
                self.advanced += len(entries)
        self._proven.update(tried)

    def _rules(self) -> list[moments.Rule] | None:
        """The rule of each group; None if torch has to step all of them."""
        if self._differs:
            return None
        rules = [moments.rule_of(self._kind, group) for group in self._groups]
        found = [rule for rule in rules if rule is not None]
        return found if len(found) == len(rules) else None

    def _try(
        self,
        group: dict[str, Any],
        rule: moments.Rule,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """Computes a step both ways, and keeps what torch makes."""
        trial = moments.clone(self._state.get(parameter))
        rule.advance([(parameter, gradient, trial)])
        self._step_one(group, parameter, gradient)
        if not (self._differs or moments.is_equal(trial, self._state.get(parameter))):
            self._differs = True
            _voice.debug(
                f"{self._kind.__qualname__} with {rule.path}: the state that torch makes here has"
                " other bits; torch computes it from now on"
            )

    def _step_one(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Steps a copy of one parameter by torch, which is all the memory that this needs."""
        twin = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        twin.grad = gradient
        optimizer = self._single
        optimizer.param_groups[:] = [{**group, "params": [twin]}]
        if parameter in self._state:
            optimizer.state[twin] = self._state[parameter]
        try:
            _step(optimizer)
            if twin in optimizer.state:
                self._state[parameter] = optimizer.state[twin]
        finally:
            optimizer.state.clear()
            optimizer.param_groups[0]["params"] = []

    def _copy_all(self) -> None:
        self._copies = _Copies(self._make, self._groups)
        self._copies.put_into(self._state)  # some kinds have it before their first step


class _Copies:
    """torch's own optimizer, on copies of the parameters of the script."""

    def __init__(self, make: _Make, groups: _Groups) -> None:
        self._parameters = [p for group in groups for p in group["params"]]
        self._copies = [
            torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in self._parameters
        ]
        copies = iter(self._copies)
        with constructions.own():
            self._optimizer = make(
                [{**group, "params": [next(copies) for _ in group["params"]]} for group in groups]
            )

    def prepare(self, groups: _Groups) -> None:
        """Takes parameters, gradients and settings as they are now."""
        for own, group in zip(self._optimizer.param_groups, groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._parameters)
        for parameter, twin in zip(self._parameters, self._copies, strict=True):
            twin.grad = parameter.grad

    def step(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Args:
        state: by parameter of the script.
        """
        kept = self._optimizer.state
        for parameter, twin in zip(self._parameters, self._copies, strict=True):
            if parameter in state:
                kept[twin] = state[parameter]
            else:
                kept.pop(twin, None)
        try:
            _step(self._optimizer)
        finally:
            for twin in self._copies:
                twin.grad = None
        self.put_into(state)

    def put_into(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Notes what the optimizer keeps under the parameters of the script."""
        kept = self._optimizer.state
        for parameter, twin in zip(self._parameters, self._copies, strict=True):
            if twin in kept:
                state[parameter] = kept[twin]


def _step(optimizer: Optimizer) -> None:
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
