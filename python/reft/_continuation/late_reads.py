"""Whether a script reads gradients after the optimizer step, before it zeroes or drops them (a norm
that is logged after the step). Then gradients are state.

It is read from the bytecode that follows the calls in progress, up to `zero_grad` or `backward`, and
from the functions of the script that are called there, as far as a variable or an attribute leads
to them.

Threads: the training thread. Cost: once in a process, some milliseconds. Errors: none; code that is
not understood reads nothing.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from reft._state.own import is_own

from .bytecode import Unsupported, analyse
from .nodes import MISSING

_ZEROES = frozenset({"zero_grad", "backward"})
_READ = frozenset({"clip_grad_norm_", "clip_grad_value_", "get_total_norm"})  # torch's
_IN_PLACE = frozenset({"zero_", "fill_", "detach_", "requires_grad_"})
_SEEN_THROUGH = frozenset({"data"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_PADDING = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL", "PRECALL"})
_DIFFERENTIATE = frozenset({"autograd", "func", "torch", "jax"})  # their `grad` is a function
_DEEPEST = 3  # how deep calls are followed


class _Act(Enum):
    READS = auto()
    ENDS = auto()


_Names = Callable[[str, str], Any]
"""Gives what an instruction that loads a name loads: (instruction, name) -> value, or MISSING."""


def late_read(frame: FrameType) -> str:
    """Gives the place (file:line) where the script reads gradients after the optimizer step whose
    frame this is; "" if it does not."""
    there: FrameType | None = frame
    while there is not None:
        if is_own(there.f_globals.get("__name__")):
            try:
                line, goes_on = _follow(there)
            except Unsupported:
                return ""
            if line:
                return f"{analyse(there.f_code).file}:{line}"
            if not goes_on:
                return ""
        there = there.f_back
    return ""


def _follow(frame: FrameType) -> tuple[int, bool]:
    """The line of a read after the call in progress (0: none), and whether the code may return, or
    yield, before gradients are zeroed."""
    analysis, names = analyse(frame.f_code), _names_of_frame(frame)
    instructions = analysis.instructions
    work, seen, goes_on = list(analysis.successors_at(frame.f_lasti)), set[int](), False
    while work:
        index = work.pop()
        if index in seen:
            continue
        seen.add(index)
        act = _act(instructions, index, names, 0)
        if instructions[index].opname == "FOR_ITER":
            act = _of_loop(instructions, index, frame.f_lasti, names)
        if act is _Act.READS:
            positions = instructions[index].positions
            return (positions.lineno if positions else None) or frame.f_lineno, True
        if act is _Act.ENDS:
            continue
        goes_on = goes_on or instructions[index].opname.startswith(("RETURN_", "YIELD_"))
        work += analysis.successors[index]
    return 0, goes_on


def _act(
    instructions: list[dis.Instruction], index: int, names: _Names, depth: int
) -> _Act | None:
    """What one instruction does with gradients."""
    instruction = instructions[index]
    op, name = instruction.opname, instruction.argval
    if op == "STORE_ATTR" and name == "grad":
        return _Act.ENDS
    if op == "LOAD_CONST":
        if isinstance(name, CodeType):  # a comprehension, or a function that is defined here
            return _first_act(name, names, depth)
        return _Act.READS if name == "grad" and _calls_getattr(instructions, index) else None
    if op in _ATTRIBUTES and name == "grad":
        return _of_use(instructions, index)
    if op in _ATTRIBUTES or op in _GLOBALS:
        if name in _ZEROES:
            return _Act.ENDS
        if name in _READ:
            return _Act.READS
    if op in _ATTRIBUTES or op.startswith("LOAD_"):
        return _of_call(_value(instructions, index, names), depth)
    return None


def _of_loop(
    instructions: list[dis.Instruction], index: int, lasti: int, names: _Names
) -> _Act | None:
    """What a `for` loop after the program point does first, if it zeroes gradients: it is taken to
    run. The loop around the program point may end."""
    end = instructions[index].argval
    if instructions[index].offset <= lasti < end:
        return None
    body = (i for i in range(index + 1, len(instructions)) if instructions[i].offset < end)
    acts = (_act(instructions, i, names, 0) for i in body)
    first = next((act for act in acts if act is not None), None)
    return first if first is _Act.ENDS else None


def _of_use(instructions: list[dis.Instruction], index: int) -> _Act | None:
    """What is done with an attribute `grad` that is loaded. One that is called is a function; one
    that is compared with None is not read."""
    instruction = instructions[index]
    if instruction.opname == "LOAD_METHOD":
        return None
    # From 3.12 on, the lowest bit of the argument says that the attribute is called.
    if "LOAD_METHOD" not in dis.opmap and (instruction.arg or 0) & 1:
        return None
    before = _beside(instructions, index, -1)
    if before is not None and before.argval in _DIFFERENTIATE:
        return None
    after = _beside(instructions, index, 1)
    at = index
    while after is not None and after.opname in _ATTRIBUTES and after.argval in _SEEN_THROUGH:
        at = instructions.index(after, at)
        after = _beside(instructions, at, 1)
    if after is None:
        return _Act.READS
    if after.opname in _ATTRIBUTES and after.argval in _IN_PLACE:
        return _Act.ENDS
    if after.opname == "LOAD_CONST" and after.argval is None:
        return None  # `is None`
    return None if after.opname.endswith("NONE") else _Act.READS


def _beside(
    instructions: list[dis.Instruction], index: int, step: int
) -> dis.Instruction | None:
    """The next instruction in a direction that does something."""
    index += step
    while 0 <= index < len(instructions):
        if instructions[index].opname not in _PADDING:
            return instructions[index]
        index += step
    return None


def _calls_getattr(instructions: list[dis.Instruction], index: int) -> bool:
    """Whether a string is the name in a call of `getattr`: that is loaded shortly before."""
    return any(one.argval == "getattr" for one in instructions[max(0, index - 8) : index])


def _value(instructions: list[dis.Instruction], index: int, names: _Names) -> Any:
    """What an instruction leaves on the stack, if it is a name or an attribute of one; MISSING for
    anything else."""
    instruction = instructions[index]
    op, name = instruction.opname, instruction.argval
    if op in _ATTRIBUTES:
        before = _beside(instructions, index, -1)
        if before is None:
            return MISSING
        return _attribute(_value(instructions, instructions.index(before), names), name)
    if isinstance(name, tuple):  # 3.13 loads two at once
        name = name[-1]
    return names(op, name) if op.startswith("LOAD_") and isinstance(name, str) else MISSING


def _attribute(value: Any, name: str) -> Any:
    """An attribute, found without running any code."""
    if value is MISSING:
        return MISSING
    held = getattr(type(value), "__dict__", {}) and getattr(value, "__dict__", None)
    for place in (held, held.get("_modules") if type(held) is dict else None):
        if type(place) is dict and name in place:
            return place[name]
    bases = [value, *value.__mro__] if isinstance(value, type) else type(value).__mro__
    for base in bases:
        if isinstance(base, type) and name in vars(base):
            found = vars(base)[name]
            function = getattr(found, "__func__", found)
            return MethodType(function, value) if isinstance(function, FunctionType) else MISSING
    return MISSING


def _of_call(value: Any, depth: int) -> _Act | None:
    """What a function of the script does first with gradients, if the value is one."""
    while isinstance(value, functools.partial):
        value = value.func
    owner = value.__self__ if isinstance(value, MethodType) else MISSING
    function = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(function, FunctionType) or depth >= _DEEPEST:
        return None
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or not is_own(function.__globals__.get("__name__")):
        return None
    if hasattr(owner, "param_groups"):
        return None  # an optimizer's step reads gradients
    return _first_act(function.__code__, _names_of_function(function, owner), depth + 1)


def _first_act(code: CodeType, names: _Names, depth: int) -> _Act | None:
    """What a function does first with gradients, line by line."""
    instructions = list(dis.get_instructions(code))
    acts = (_act(instructions, index, names, depth) for index in range(len(instructions)))
    return next((act for act in acts if act is not None), None)


def _names_of_frame(frame: FrameType) -> _Names:
    local = dict(frame.f_locals)

    def names(op: str, name: str) -> Any:
        found = MISSING if op == "LOAD_GLOBAL" else local.get(name, MISSING)
        return frame.f_globals.get(name, MISSING) if found is MISSING else found

    return names


def _names_of_function(function: FunctionType, owner: Any) -> _Names:
    code = function.__code__
    known: dict[str, Any] = {}
    if owner is not MISSING and code.co_argcount:
        known[code.co_varnames[0]] = owner
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # empty
            continue
    namespace: Mapping[str, Any] = function.__globals__

    def names(op: str, name: str) -> Any:
        return (namespace if op in _GLOBALS else known).get(name, MISSING)

    return names
