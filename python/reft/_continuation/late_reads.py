"""Whether a script reads gradients after the optimizer step, before it zeroes or drops them (a norm
that is logged after the step). Then gradients are state.

It is read from the bytecode that follows the calls in progress, up to the call of `zero_grad` or
`backward`, and from the functions of the script that are called there by a name.

Threads: the training thread. Cost: once in a process, some milliseconds. Errors: none; code that is
not understood reads nothing.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from enum import Enum, auto
from types import CodeType, FrameType, FunctionType
from typing import Any

from reft._state.own import is_own

from .bytecode import Unsupported, analyse
from .nodes import function_in

_ZEROES = frozenset({"zero_grad", "backward"})
_IN_PLACE = frozenset({"zero_", "fill_", "detach_"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_OF_CONTAINERS = frozenset(name for kind in (dict, list, set, str) for name in dir(kind))
_ROUNDS = 3  # how deep calls are followed


class _Act(Enum):
    READS = auto()
    ENDS = auto()


_Known = dict[str, _Act]
"""By name, what a function of the script does first with gradients."""


def late_read(frame: FrameType) -> str:
    """Gives the place (file:line) where the script reads gradients after the optimizer step whose
    frame this is; "" if it does not."""
    known: _Known | None = None
    there: FrameType | None = frame
    while there is not None:
        if is_own(there.f_globals.get("__name__")):
            if known is None:
                known = _known_functions()
            try:
                line, goes_on = _follow(there, known)
            except Unsupported:
                return ""
            if line:
                return f"{analyse(there.f_code).file}:{line}"
            if not goes_on:
                return ""
        there = there.f_back
    return ""


def _follow(frame: FrameType, known: _Known) -> tuple[int, bool]:
    """The line of a read after the call in progress (0: none), and whether the code may return
    before gradients are zeroed."""
    analysis = analyse(frame.f_code)
    instructions = analysis.instructions
    work, seen, goes_on = list(analysis.successors_at(frame.f_lasti)), set[int](), False
    while work:
        index = work.pop()
        if index in seen:
            continue
        seen.add(index)
        act = _act(instructions, index, known)
        if act is _Act.READS:
            positions = instructions[index].positions
            return (positions.lineno if positions else None) or frame.f_lineno, True
        if act is _Act.ENDS:
            continue
        goes_on = goes_on or instructions[index].opname.startswith("RETURN_")
        work += analysis.successors[index]
    return 0, goes_on


def _act(instructions: list[dis.Instruction], index: int, known: _Known) -> _Act | None:
    """What one instruction does with gradients."""
    instruction = instructions[index]
    op, name = instruction.opname, instruction.argval
    if op in _ATTRIBUTES:
        if name == "grad":
            return _of_use(instructions[index + 1 : index + 3])
        if name in _ZEROES:
            return _Act.ENDS
        return None if name in _OF_CONTAINERS else known.get(name)
    if op in _GLOBALS:
        return known.get(name)
    if op == "STORE_ATTR" and name == "grad":
        return _Act.ENDS
    if op == "LOAD_CONST" and isinstance(name, CodeType):
        return _first_act(name, known)
    return None


def _of_use(after: list[dis.Instruction]) -> _Act | None:
    """What is done with a gradient that has been loaded. One that is compared with None is not
    read."""
    first = after[0]
    if first.opname in _ATTRIBUTES and first.argval in _IN_PLACE:
        return _Act.ENDS
    is_none = first.opname == "LOAD_CONST" and first.argval is None and after[-1].opname == "IS_OP"
    return None if is_none or first.opname.endswith("NONE") else _Act.READS


def _first_act(code: CodeType, known: _Known) -> _Act | None:
    """What a function does first with gradients, line by line."""
    instructions = list(dis.get_instructions(code))
    acts = (_act(instructions, index, known) for index in range(len(instructions)))
    return next((act for act in acts if act is not None), None)


def _known_functions() -> _Known:
    functions = list(_functions())
    known: _Known = {}
    for _ in range(_ROUNDS):
        known = {
            function.__name__: act
            for function in functions
            if (act := _first_act(function.__code__, known)) is not None
        }
    return known


def _functions() -> Iterator[FunctionType]:
    """The script's functions and methods; not those of optimizers, which read gradients in their
    step."""
    torch: Any = sys.modules["torch"]
    for name in [name for name in list(sys.modules) if is_own(name)]:
        for value in list(vars(sys.modules[name]).values()):
            is_class = issubclass(type(value), type) and value.__module__ == name
            if is_class and issubclass(value, torch.optim.Optimizer):
                continue
            for member in vars(value).values() if is_class else (value,):
                function = function_in(member)
                if isinstance(function, FunctionType) and function.__module__ == name:
                    yield function
