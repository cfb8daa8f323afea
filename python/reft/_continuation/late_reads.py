"""Whether a script reads gradients after the optimizer step, before it zeroes or drops them (a norm
that is logged after the step). Then gradients are state.

It is read from the bytecode that follows the calls in progress, up to `zero_grad` or `backward`, and
from the functions of the script that are called there, as far as a variable, an attribute or a list
leads to them. Where a script has several optimizers, one that zeroes its gradients ends nothing for
those of the others, and whose gradients are zeroed, or read, is followed as far as it is known.

Threads: the training thread. Cost: once for each place of a step, some milliseconds; what needs more
than `_MOST_INSTRUCTIONS` is not followed. Errors: none; code that is not understood reads nothing.
No code of the script is run.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from reft._state.own import is_own

from .bytecode import CodeAnalysis, analyse
from .nodes import MISSING, UNBOUND, native

_ZEROES, _BACKWARD, _PARAMETERS = "zero_grad", "backward", "parameters"
_READ = frozenset({"clip_grad_norm_", "clip_grad_value_", "get_total_norm"})  # torch's
_IN_PLACE = frozenset({"zero_", "fill_", "detach_", "requires_grad_"})
_SEEN_THROUGH = frozenset({"data"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_PADDING = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL", "PRECALL"})
_DIFFERENTIATE = frozenset({"autograd", "func", "torch", "jax"})  # their `grad` is a function
_CALLED_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_DEEPEST = 8  # how deep calls are followed
_MOST_INSTRUCTIONS = 20_000
_MOST_ITEMS = 64  # of a list that a loop calls


_Live = frozenset[int]
"""Identities of the parameters whose gradients are still those of the step."""
_READS: Any = object()
_UNKNOWN: _Live = frozenset({0})  # for a script whose optimizers are not known


_Names = Callable[[str, str], Any]
"""Gives what an instruction that loads a name loads: (instruction, name) -> value, or MISSING."""


class _Each(list[Any]):
    """The values that a loop's variable takes."""


class _Mixed(_Each):
    """Those of several loops: one of them has some."""


def late_read(frame: FrameType, optimizers: Iterable[Any] = ()) -> str:
    """Gives the place (file:line) where the script reads gradients after the optimizer step whose
    frame this is; "" if it does not.

    Args:
        frame: the innermost one of the script.
        optimizers: all that it has.
    """
    try:
        return _Reader([_of_optimizer(optimizer) for optimizer in optimizers]).path(frame)
    except Exception:  # code, or an object, that is not understood
        return ""


class _Reader:
    """One look, with what it has found out about functions.

    Args:
        owned: the parameters of each optimizer.
    """

    def __init__(self, owned: list[_Live]) -> None:
        self._left = _MOST_INSTRUCTIONS
        self._all = frozenset[int]().union(*owned) or _UNKNOWN
        # Then what zeroes gradients is taken to zero those of one of them, unless it is known.
        most = max(owned, key=len, default=_UNKNOWN)
        self._several = any(one and not one & most for one in owned)
        self._known: dict[tuple[int, int, _Live], tuple[Any, Any]] = {}

    def path(self, frame: FrameType) -> str:
        there: FrameType | None = frame
        live = self._all
        while there is not None:
            if is_own(there.f_globals.get("__name__")):
                analysis, names = analyse(there.f_code), _names_of_frame(there)
                begin = analysis.successors_at(there.f_lasti)
                act, at = self._follow(analysis, begin, there.f_lasti, names, 0, live)
                if act is _READS:
                    positions = analysis.instructions[at].positions
                    line = (positions.lineno if positions else None) or there.f_lineno
                    return f"{analysis.file}:{line}"
                if not act:
                    return ""
                live = act
            there = there.f_back
        return ""

    def _follow(
        self,
        analysis: CodeAnalysis,
        begin: Iterable[int],
        lasti: int,
        names: _Names,
        depth: int,
        live: _Live,
    ) -> tuple[Any, int]:
        """Follows code on all paths.

        Returns:
            `_READS` if one of them reads gradients of `live`, and where; else those of which one
            path returns, or yields, before it zeroes them.
        """
        instructions = analysis.instructions
        names = self._with_loops(instructions, names)
        work = [(index, live) for index in begin]
        seen, left = set[tuple[int, _Live]](), frozenset[int]()
        while work:
            index, live = step = work.pop()
            if step in seen:
                continue
            seen.add(step)
            self._left -= 1
            if self._left < 0:
                raise OverflowError("too much code")
            if instructions[index].opname == "FOR_ITER":
                act = self._of_loop(instructions, index, lasti, names, depth, live)
            else:
                act = self._act(instructions, index, names, depth, live)
            if act is _READS:
                return act, index
            if not act:
                continue
            if instructions[index].opname.startswith(("RETURN_", "YIELD_")):
                left |= act
            work += [(after, act) for after in analysis.successors[index]]
        return left, 0

    def _act(
        self,
        instructions: list[dis.Instruction],
        index: int,
        names: _Names,
        depth: int,
        live: _Live,
    ) -> Any:
        """What one instruction does with gradients: `_READS`, or those that are left after it."""
        instruction = instructions[index]
        op, name = instruction.opname, instruction.argval
        if op == "STORE_ATTR" and name == "grad":
            owner = _value(instructions, _beside(instructions, index, -1), names)
            return self._without(owner, live)
        if op == "LOAD_CONST":
            if isinstance(name, CodeType) and name.co_name in _CALLED_AT_ONCE:
                return self._first_act(name, names, depth, live)
            reads = name == "grad" and _calls_getattr(instructions, index)
            return _READS if reads else live
        if op in _ATTRIBUTES and name == "grad":
            return self._of_use(instructions, index, names, live)
        if op in _ATTRIBUTES or op in _GLOBALS:
            if name == _ZEROES:
                before = _beside(instructions, index, -1) if op in _ATTRIBUTES else -1
                return self._without(_value(instructions, before, names), live)
            if name == _BACKWARD:
                return live if self._several else frozenset()
            if name in _READ:
                value = _value(instructions, index, names)
                if _is_own_function(value):
                    return self._of_call(value, depth, live)
                read = _argument(instructions, index, names)
                return live if self._are_gone(read, live) else _READS
        if not op.startswith("LOAD_"):
            return live
        return self._of_call(_value(instructions, index, names), depth, live)

    def _without(self, owner: Any, live: _Live) -> _Live:
        """What is left of `live` when the gradients of an optimizer, a module or a tensor are
        zeroed, or those of what is not known."""
        of = None if type(owner) is _Mixed else _parameters(owner)
        if of is None:
            return live if self._several else frozenset()
        return frozenset() if live is _UNKNOWN and not _is_tensor(owner) else live - of

    def _are_gone(self, owner: Any, live: _Live) -> bool:
        """Whether all gradients of a tensor, or of a module, have been zeroed."""
        of = _parameters(owner)
        return of is not None and bool(of) and of <= self._all - live

    def _of_use(
        self, instructions: list[dis.Instruction], index: int, names: _Names, live: _Live
    ) -> Any:
        """What is done with an attribute `grad` that is loaded. One that is called is a function;
        one that is compared with None is not read."""
        instruction = instructions[index]
        if instruction.opname == "LOAD_METHOD":
            return live
        # From 3.12 on, the lowest bit of the argument says that the attribute is called.
        if "LOAD_METHOD" not in dis.opmap and (instruction.arg or 0) & 1:
            return live
        before, owner = _beside(instructions, index, -1), MISSING
        if before >= 0:
            if instructions[before].argval in _DIFFERENTIATE:
                return live
            owner = _value(instructions, before, names)
            is_known = owner is not MISSING and not isinstance(owner, _Each)
            if is_known and not _is_tensor(owner):
                return live
        reads = live if self._are_gone(owner, live) else _READS
        at = _beside(instructions, index, 1)
        while at >= 0 and instructions[at].opname in _ATTRIBUTES:
            if instructions[at].argval in _IN_PLACE:
                return self._without(owner, live)
            if instructions[at].argval not in _SEEN_THROUGH:
                return reads
            at = _beside(instructions, at, 1)
        if at < 0:
            return reads
        after = instructions[at]
        if after.opname == "LOAD_CONST" and after.argval is None:
            return live  # `is None`
        return live if after.opname.endswith("NONE") else reads

    def _of_loop(
        self,
        instructions: list[dis.Instruction],
        index: int,
        lasti: int,
        names: _Names,
        depth: int,
        live: _Live,
    ) -> _Live:
        """What a `for` loop after the program point leaves, if it zeroes gradients first: it is
        taken to run. The loop around the program point may end."""
        end = instructions[index].argval
        if instructions[index].offset <= lasti < end:
            return live
        index += 1
        while index < len(instructions) and instructions[index].offset < end:
            act = self._act(instructions, index, names, depth, live)
            if act is _READS:
                return live
            if act != live:
                return frozenset(act)
            index += 1
        return live

    def _of_call(self, value: Any, depth: int, live: _Live) -> Any:
        """What a function of the script does first with gradients, if the value is one."""
        if isinstance(value, _Each):
            acts = [self._of_call(one, depth, live) for one in value]
            return _READS if _READS in acts else live
        while type(value) is functools.partial:
            value = value.func
        owner = value.__self__ if type(value) is MethodType else MISSING
        function = value.__func__ if type(value) is MethodType else value
        if type(function) is not FunctionType:
            function, owner = _called(value), value
        function = _unwrapped(function)
        if not _is_own_function(function) or _is_optimizer(owner):
            return live  # an optimizer's step reads gradients
        if depth >= _DEEPEST:
            return frozenset()  # nothing is known beyond
        key = id(function), id(owner), live
        if key not in self._known:
            self._known[key] = live, (function, owner)  # it may call itself
            names = _names_of(function, owner)
            act = self._first_act(function.__code__, names, depth + 1, live)
            self._known[key] = act, (function, owner)
        return self._known[key][0]

    def _first_act(self, code: CodeType, names: _Names, depth: int, live: _Live) -> Any:
        """What a function does: `_READS` if it may read gradients before it zeroes them; else what
        it may leave."""
        return self._follow(analyse(code), (0,), -1, names, depth, live)[0]

    def _with_loops(self, instructions: list[dis.Instruction], names: _Names) -> _Names:
        """Adds what the variables of loops over lists mean."""
        found: dict[str, _Each] = {}
        for index, instruction in enumerate(instructions):
            if instruction.opname != "FOR_ITER" or index < 2:
                continue
            stored = _beside(instructions, index, 1)
            before = _beside(instructions, index, -1)
            if stored < 0 or before < 1 or instructions[before].opname != "GET_ITER":
                continue
            if not instructions[stored].opname.startswith("STORE_"):
                continue
            items = _value(instructions, _beside(instructions, before, -1), names)
            if items is MISSING:
                items = _parameters_called(instructions, _beside(instructions, before, -1), names)
            name = str(instructions[stored].argval)
            if type(items) in (list, tuple) and len(items) <= _MOST_ITEMS:
                found[name] = _Mixed([*found[name], *items]) if name in found else _Each(items)
            elif name in found:
                del found[name]
        if not found:
            return names

        def more(op: str, name: str) -> Any:
            return found[name] if name in found and op != "LOAD_GLOBAL" else names(op, name)

        return more


def _beside(instructions: list[dis.Instruction], index: int, step: int) -> int:
    """Position of the next instruction in a direction that does something; -1: there is none."""
    index += step
    while 0 <= index < len(instructions):
        if instructions[index].opname not in _PADDING:
            return index
        index += step
    return -1


def _argument(instructions: list[dis.Instruction], index: int, names: _Names) -> Any:
    """The module whose `parameters()` a function that is loaded is given; MISSING if that is not
    how it is called."""
    at = _beside(instructions, index, 1)
    while at >= 0 and instructions[at].opname.startswith("LOAD_"):
        if instructions[at].opname in _ATTRIBUTES and instructions[at].argval == _PARAMETERS:
            return _value(instructions, _beside(instructions, at, -1), names)
        at = _beside(instructions, at, 1)
    return MISSING


def _parameters_called(instructions: list[dis.Instruction], index: int, names: _Names) -> Any:
    """What a call of a module's `parameters()` without arguments gives, if one ends there."""
    if index < 1 or not instructions[index].opname.startswith("CALL") or instructions[index].arg:
        return MISSING
    at = _beside(instructions, index, -1)
    if instructions[at].opname not in _ATTRIBUTES or instructions[at].argval != _PARAMETERS:
        return MISSING
    owner = _value(instructions, _beside(instructions, at, -1), names)
    return _of_module(owner) if _is_module(owner) else MISSING


def _parameters(owner: Any) -> _Live | None:
    """The parameters of an optimizer, of a module or of several; a tensor itself. None for anything
    else. No code of the script is run."""
    if isinstance(owner, _Each):
        of = [_parameters(one) for one in owner]
        known = [one for one in of if one is not None]
        return frozenset[int]().union(*known) if len(known) == len(of) else None
    if owner is MISSING:
        return None
    if _is_optimizer(owner):
        return _of_optimizer(owner)
    if _is_module(owner):
        return frozenset(map(id, _of_module(owner)))
    return frozenset({id(owner)}) if _is_tensor(owner) else None


def _of_optimizer(optimizer: Any) -> _Live:
    groups = optimizer.__dict__.get("param_groups", ())
    return frozenset(id(parameter) for group in groups for parameter in group["params"])


def _of_module(module: Any) -> list[Any]:
    found: list[Any] = []
    work, seen = [module], set[int]()
    while work:
        held = work.pop().__dict__
        if id(held) in seen:
            continue
        seen.add(id(held))
        found += [one for one in held.get("_parameters", {}).values() if one is not None]
        work += [one for one in held.get("_modules", {}).values() if one is not None]
    return found


def _calls_getattr(instructions: list[dis.Instruction], index: int) -> bool:
    """Whether a string is the name in a call of `getattr`: that is loaded shortly before."""
    return any(one.argval == "getattr" for one in instructions[max(0, index - 8) : index])


def _value(instructions: list[dis.Instruction], index: int, names: _Names) -> Any:
    """What an instruction leaves on the stack, if it is a name or an attribute of one; MISSING for
    anything else."""
    chain: list[str] = []
    while index >= 0 and instructions[index].opname in _ATTRIBUTES:
        chain.append(instructions[index].argval)
        index = _beside(instructions, index, -1)
    if index < 0:
        return MISSING
    op, name = instructions[index].opname, instructions[index].argval
    if type(name) is tuple:  # 3.13 loads two at once
        name = name[-1]
    if not op.startswith("LOAD_") or op == "LOAD_CONST" or type(name) is not str:
        return MISSING
    value = names(op, name)
    for attribute in reversed(chain):
        value = _attribute(value, attribute)
    return value


def _attribute(value: Any, name: str) -> Any:
    """An attribute, found without running any code."""
    if isinstance(value, _Each):
        all_of_them = [_attribute(one, name) for one in value]
        return type(value)(one for one in all_of_them if one is not MISSING)
    kind: Any = type(value)
    plain: Any = object.__getattribute__
    if value is MISSING or (kind.__getattribute__ is not plain and kind not in _KNOWN):
        return MISSING
    held = object.__getattribute__(value, "__dict__") if _has_dict(kind) else {}
    for place in (held, held.get("_modules"), held.get("_parameters")):
        if type(place) is dict and name in place:
            return place[name]
    bases = [value, *value.__mro__] if issubclass(kind, type) else kind.__mro__
    for base in bases:
        there: Any = type.__dict__["__dict__"].__get__(base)
        if name in there:
            found: Any = there[name]
            if type(found) is property:
                found = found.fget
            function = found.__func__ if type(found) in (staticmethod, classmethod) else found
            return MethodType(function, value) if type(function) is FunctionType else MISSING
    return MISSING


_KNOWN = frozenset({type, ModuleType})


def _has_dict(kind: type) -> bool:
    return kind.__dictoffset__ != 0 and kind is not type


def _called(value: Any) -> Any:
    """The `__call__` of an object of the script's own class."""
    return next(
        (vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None
    )


def _unwrapped(function: Any) -> Any:
    for _ in range(_DEEPEST):
        if type(function) is not FunctionType or "__wrapped__" not in function.__dict__:
            break
        function = function.__dict__["__wrapped__"]
    return function


def _is_own_function(value: Any) -> bool:
    if type(value) is MethodType:
        value = value.__func__
    return type(value) is FunctionType and is_own(value.__globals__.get("__name__"))


def _is_optimizer(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.optim.Optimizer)


def _is_module(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Module)


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is None or issubclass(type(value), torch.Tensor)


def _names_of_frame(frame: FrameType) -> _Names:
    """The names in a frame. `f_locals` of a function would keep what they mean alive (3.11, 3.12)."""
    local: dict[str, Any] = {}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        analysis = analyse(frame.f_code)
        slots = native().frame_slots(frame, analysis.slot_count, UNBOUND)
        for name, value in zip(analysis.slot_names, slots, strict=True):
            if type(value) is CellType and name in analysis.cells:
                try:
                    value = value.cell_contents
                except ValueError:  # empty
                    continue
            if value is not UNBOUND:
                local[name] = value
    else:
        local = frame.f_locals
    namespace = frame.f_globals

    def names(op: str, name: str) -> Any:
        found = MISSING if op == "LOAD_GLOBAL" else local.get(name, MISSING)
        return namespace.get(name, MISSING) if found is MISSING else found

    return names


def _names_of(function: FunctionType, owner: Any) -> _Names:
    """The names in a function: its globals, its closure and, of a method, its object."""
    code = function.__code__
    known: dict[str, Any] = {}
    if owner is not MISSING and code.co_argcount:
        known[code.co_varnames[0]] = owner
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # empty
            continue
    namespace = function.__globals__

    def names(op: str, name: str) -> Any:
        return (namespace if op in _GLOBALS else known).get(name, MISSING)

    return names
