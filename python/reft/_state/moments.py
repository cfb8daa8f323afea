"""What Adam, AdamW and SGD keep of a parameter, advanced without the step of the parameter.

Parameters are on all ranks; a rank that computes what another one keeps needs no step of them. What
is left (running means of gradients and of their squares, a momentum buffer, a counter) are sums and
products, which `_C.advance_adam` and `_C.advance_momentum` do in one pass over memory, rounding
where torch rounds: the result is that of torch.optim bit for bit, so nothing drifts and nothing has
to be brought back. `second_state.py` compares it with torch's own before it relies on it.

A rule is there for settings of which torch's arithmetic is known. Others (fused, capturable,
differentiable, settings that are tensors, other kinds of numbers) are for torch itself.

Threads: any that does not share the tensors. Errors: those of torch, for tensors that do not fit.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from reft import _C

Entry = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""A parameter, its gradient and what is kept of it."""

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_DTYPES = (torch.float32, torch.float64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rule:
    """How one parameter group is advanced.

    Attributes:
        path: what chooses the arithmetic; two rules of one path differ in numbers alone.
        decay: what the optimizer adds to gradients, as a share of the parameters.
        maximize: as the optimizer's.
    """

    path: tuple[Any, ...]
    decay: float
    maximize: bool

    @abstractmethod
    def fits(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> bool:
        """Whether what is kept of a parameter can be advanced."""

    @abstractmethod
    def advance(self, entries: list[Entry]) -> None:
        """Advances what is kept, in its place."""

    def _read(self, entries: list[Entry]) -> list[torch.Tensor]:
        """The parameters, if they are read."""
        return [entry[0] for entry in entries] if self.decay else []


@dataclass(frozen=True)
class _AdamRule(Rule):
    """Of Adam and AdamW."""

    beta1: float
    beta2: float
    amsgrad: bool
    foreach: bool

    def fits(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> bool:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else [])]
        if not isinstance(state, dict) or not {"step", *names} <= state.keys():
            return False
        step = state["step"]
        is_counter = type(step) is torch.Tensor and step.shape == () and step.device.type == "cpu"
        kept = [state[name] for name in names]
        if not is_counter or step.requires_grad:
            return False
        return _lie_alike(parameter, gradient, kept)

    def advance(self, entries: list[Entry]) -> None:
        states = [state for _, _, state in entries]
        squares = [state["exp_avg_sq"] for state in states]
        most = [state["max_exp_avg_sq"] for state in states] if self.amsgrad else []
        incomplete = _C.advance_adam(
            [gradient for _, gradient, _ in entries],
            self._read(entries),
            [state["exp_avg"] for state in states],
            squares,
            most,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.decay,
            self.maximize,
        )
        for k in incomplete:  # where one is undefined, the result depends on its place
            if self.foreach:
                torch._foreach_maximum_([most[k]], [squares[k]])
            else:
                torch.maximum(most[k], squares[k], out=most[k])
        torch._foreach_add_([state["step"] for state in states], 1)


@dataclass(frozen=True)
class _MomentumRule(Rule):
    """Of SGD, with momentum or without."""

    momentum: float
    dampening: float

    def fits(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> bool:
        if self.momentum == 0:  # it keeps nothing, and leaves what is there
            return bool(gradient.layout == torch.strided)
        buffer = state.get("momentum_buffer") if isinstance(state, dict) else None
        return buffer is not None and _lie_alike(parameter, gradient, [buffer])

    def advance(self, entries: list[Entry]) -> None:
        if self.momentum != 0:
            _C.advance_momentum(
                [gradient for _, gradient, _ in entries],
                self._read(entries),
                [state["momentum_buffer"] for _, _, state in entries],
                self.momentum,
                1 - self.dampening,
                self.decay,
                self.maximize,
            )


def rule_of(kind: type[Optimizer], group: dict[str, Any]) -> Rule | None:
    """The rule of a parameter group; None where torch has to step.

    Args:
        kind: the optimizer's class.
        group: the settings, as they are at the step.
    """
    if any(group.get(name) for name in ("fused", "capturable", "differentiable")):
        return None
    flags = tuple(bool(group.get(name)) for name in ("maximize", "foreach"))
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        numbers = [*group["betas"], group["weight_decay"]]
        if not all(map(_is_number, numbers)):
            return None
        beta1, beta2, decay = map(float, numbers)
        if group.get("decoupled_weight_decay", kind is torch.optim.AdamW):
            decay = 0.0
        amsgrad = bool(group["amsgrad"])
        path = ("adam", *flags, amsgrad, decay != 0, 1 - beta1 < 0.5)
        return _AdamRule(path, decay, flags[0], beta1, beta2, amsgrad, flags[1])
    if kind is torch.optim.SGD:
        numbers = [group[name] for name in ("momentum", "dampening", "weight_decay")]
        if not all(map(_is_number, numbers)):
            return None
        momentum, dampening, decay = map(float, numbers)
        decay = decay if momentum != 0 else 0.0  # nothing is kept that it could change
        path = ("sgd", *flags, momentum != 0, decay != 0, bool(group["nesterov"]))
        return _MomentumRule(path, decay, flags[0], momentum, dampening)
    return None


def may_have_rules(kind: type[Optimizer], parameters: list[torch.Tensor]) -> bool:
    """Whether there are rules for a class and these kinds of numbers, with some settings."""
    return kind in _KINDS and all(parameter.dtype in _DTYPES for parameter in parameters)


def clone(state: dict[str, Any] | None) -> dict[str, Any]:
    """The same with tensors of its own."""
    items = ({} if state is None else state).items()
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in items}


def is_equal(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two states have the same entries with the same bits."""
    one, other = one or {}, other or {}
    return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        as_bits = _INTEGERS.get(a.element_size())
        if as_bits is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bool(torch.equal(a.view(as_bits), b.view(as_bits)))
    return type(a) is type(b) and bool(a == b)


def _lie_alike(parameter: torch.Tensor, gradient: torch.Tensor, kept: list[Any]) -> bool:
    if not all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in kept):
        return False
    return _C.lie_alike([parameter, gradient, *kept])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
