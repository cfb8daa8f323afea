"""What a code object says about itself: its digest, the depth of its value stack and which names
are still needed.

All of it is read from the bytecode, never guessed: an instruction that this module does not know
makes the point `Unsupported`. Results are cached per code object. Threads: any, with the GIL.
Errors: `Unsupported`.
"""

from __future__ import annotations

import dis
import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any


class Unsupported(Exception):
    """The bytecode at this point is not understood, so the frame cannot be captured."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a code object where a call is in progress."""

    offset: int
    """Offset of the instruction in progress, the same for specialised and plain bytecode."""
    stack_depth: int
    """Slots of the value stack that hold live values while the instruction is in progress."""
    live: frozenset[str]
    """Fast locals (or, in a module, names) that may be read before they are assigned again; all of
    them where code can see every name."""
    read: frozenset[str]
    """Those that the code itself may read by name."""
    name: str = ""
    """Of the instruction in progress."""
    callables: tuple[int, int] = (-1, -1)
    """Two slots of the value stack above `stack_depth`; one of them holds what a call calls."""


# Code that can see every name makes each of them live.
_SEES_ALL = frozenset({"locals", "vars", "exec", "eval", "globals", "dir"})
# With an argument, they look at that alone.
_OF_ONE = frozenset({"vars", "dir"})
# Called without arguments, they let code look a global up by a string.
_LOOK_UP = frozenset({"globals", "vars"})

_ENDS = frozenset(
    {
        "RETURN_VALUE",
        "RETURN_CONST",
        "RAISE_VARARGS",
        "RERAISE",
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
        "INTERPRETER_EXIT",
    }
)

CO_OPTIMIZED = 1  # flag of code whose variables lie in slots, not in a dict

# Instructions in progress, by what they leave: their operands are dead, results are not there yet.
_ONE_RESULT = frozenset(
    {
        "CALL",
        "CALL_KW",
        "CALL_FUNCTION_EX",
        "CALL_INTRINSIC_1",
        "CALL_INTRINSIC_2",
        "BINARY_OP",
        "BINARY_SUBSCR",
        "BINARY_SLICE",
        "COMPARE_OP",
        "CONTAINS_OP",
        "IS_OP",
        "UNARY_NOT",
        "UNARY_NEGATIVE",
        "UNARY_POSITIVE",
        "UNARY_INVERT",
        "TO_BOOL",
        "GET_ITER",
        "GET_YIELD_FROM_ITER",
        "GET_AWAITABLE",
        "IMPORT_NAME",
        "YIELD_VALUE",
        "FORMAT_VALUE",
        "FORMAT_SIMPLE",
        "FORMAT_WITH_SPEC",
        "BUILD_STRING",
    }
)
_NO_RESULT = frozenset(
    {
        "POP_TOP",
        "STORE_ATTR",
        "STORE_SUBSCR",
        "STORE_SLICE",
        "STORE_FAST",
        "STORE_NAME",
        "STORE_GLOBAL",
        "STORE_DEREF",
        "DELETE_ATTR",
        "DELETE_SUBSCR",
        "DELETE_FAST",
        "DELETE_NAME",
        "LIST_EXTEND",
        "LIST_APPEND",
        "SET_UPDATE",
        "SET_ADD",
        "DICT_UPDATE",
        "DICT_MERGE",
        "MAP_ADD",
        "POP_JUMP_IF_TRUE",
        "POP_JUMP_IF_FALSE",
        "POP_JUMP_FORWARD_IF_TRUE",
        "POP_JUMP_FORWARD_IF_FALSE",
        "POP_JUMP_BACKWARD_IF_TRUE",
        "POP_JUMP_BACKWARD_IF_FALSE",
        "END_FOR",
        "END_SEND",
    }
)
# The top operand is consumed, however many results come.
_TAKES_TOP = frozenset(
    {"LOAD_ATTR", "LOAD_METHOD", "BEFORE_WITH", "UNPACK_SEQUENCE", "UNPACK_EX", "SEND"}
)
# Nothing is consumed: the iterator (or __exit__) stays where it is.
_PEEKS = frozenset({"FOR_ITER", "WITH_EXCEPT_START", "RESUME", "NOP", "LOAD_GLOBAL", "LOAD_NAME"})

_MOST_PREFIXES = 64
_RETURN_GENERATOR = dis.opmap["RETURN_GENERATOR"]


class CodeAnalysis:
    """Everything about one code object, computed once.

    Args:
        code: The code object; kept alive by this analysis.
    """

    def __init__(self, code: CodeType) -> None:
        self.code = code
        nlocals = set(code.co_varnames)
        self.slot_count = (
            len(code.co_varnames)
            + sum(name not in nlocals for name in code.co_cellvars)
            + len(code.co_freevars)
        )
        name_of: Any = code._varname_from_oparg  # type: ignore[attr-defined]
        self.slot_names: tuple[str, ...] = tuple(name_of(i) for i in range(self.slot_count))
        self.cells = frozenset(code.co_cellvars) | frozenset(code.co_freevars)
        self.file = os.path.basename(code.co_filename)
        self.every_slot = [(i, name, name in self.cells) for i, name in enumerate(self.slot_names)]
        self._points: dict[int, Point] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        self._live_slots: dict[int, list[tuple[int, str, bool]]] = {}

    @cached_property
    def digest(self) -> bytes:
        """Hash of bytecode, constants and names; equal in processes that run the same source."""
        hasher = hashlib.blake2b(digest_size=16)
        _hash_code(self.code, hasher)
        return hasher.digest()

    @cached_property
    def sees_all(self) -> bool:
        """Whether the code may look at all names: `model.eval()` does not."""
        return not _SEES_ALL.isdisjoint(self.code.co_names) and any(
            instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            and instruction.argval in _SEES_ALL
            and (instruction.argval not in _OF_ONE or _is_called_bare(self.instructions, i))
            for i, instruction in enumerate(self.instructions)
        )

    def read_from(self, offset: int) -> frozenset[str]:
        """`Point.read` of the instruction at an offset; -1: before the code has started."""
        if offset >= 0:
            return self.point(offset).read
        live_in, names = self._liveness
        return _named(live_in[0], names)

    @cached_property
    def nested_names(self) -> frozenset[str]:
        """Global names that functions and classes defined in this code read or write."""
        names: set[str] = set()
        for constant in self.code.co_consts:
            if isinstance(constant, CodeType):
                reads, writes = global_names(constant)
                names |= reads | writes
        return frozenset(names)

    def point(self, lasti: int) -> Point:
        """Gives the stack depth and the live names while the instruction at `lasti` is in progress.

        Args:
            lasti: A frame's `f_lasti`; may point into an instruction's inline cache.

        Raises:
            Unsupported: The instruction or the stack there is not understood.
        """
        found = self._points.get(lasti)
        if found is None:
            found = self._points[lasti] = self._compute_point(lasti)
        return found

    def live_slots(self, point: Point) -> list[tuple[int, str, bool]]:
        """Returns the cells, and the fast locals that are live at a point.

        Returns:
            (slot, name, whether it is a cell) of each.
        """
        found = self._live_slots.get(point.offset)
        if found is None:
            found = self._live_slots[point.offset] = [
                slot for slot in self.every_slot if slot[2] or slot[1] in point.live
            ]
        return found

    def places_of(self, prefix: str) -> tuple[str, ...]:
        """Returns the place of each slot's variable, in a frame that stands at `prefix`."""
        found = self._places.get(prefix)
        if found is None:
            if len(self._places) > _MOST_PREFIXES:
                self._places.clear()
            found = self._places[prefix] = tuple(f"{prefix}:{name}" for name in self.slot_names)
        return found

    def _compute_point(self, lasti: int) -> Point:
        index = bisect_right(self._offsets, lasti) - 1
        if lasti < 0 or index < 0:
            raise Unsupported(f"{self.code.co_qualname} has not started")
        if self.instructions[index].opname == "PRECALL":
            index += 1
        if self.instructions[index].opname == "RESUME" and index and self._is_yield(index - 1):
            index -= 1  # 3.13 points a suspended generator at what runs next
        instruction = self.instructions[index]
        depth = self._depths.get(index)
        if depth is None:
            raise Unsupported(f"{self.code.co_qualname} offset {lasti} is not reachable")
        name = instruction.opname
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if name in _ONE_RESULT:
            during = depth + effect - 1
        elif name in _NO_RESULT:
            during = depth + effect
        elif name in _TAKES_TOP:
            during = depth - 1
        elif name in _PEEKS:
            during = depth
        else:
            raise Unsupported(f"{self.code.co_qualname} offset {lasti}: a call inside {name}")
        if not 0 <= during <= self.code.co_stacksize:
            raise Unsupported(f"{self.code.co_qualname} offset {lasti}: stack depth {during}")
        live_in, names = self._liveness
        after = 0
        for successor in (*self.successors[index], *self._handlers[index]):
            after |= live_in[successor]
        read = _named(after, names)
        live = frozenset(names) if self.sees_all else read
        if (
            index and self.instructions[index - 1].opname == "PRECALL"
        ):  # counted as if it took the arguments
            depth = self._depths[index - 1]
        callables = _callables(name, depth, instruction.arg or 0)
        return Point(instruction.offset, during, live, read, name, callables)

    def successors_at(self, lasti: int) -> tuple[int, ...]:
        """Positions in `instructions` of what may run after the call in progress at `lasti`."""
        return self.successors[bisect_right(self._offsets, lasti) - 1]

    def _is_yield(self, index: int) -> bool:
        return self.instructions[index].opname == "YIELD_VALUE"

    @cached_property
    def instructions(self) -> list[dis.Instruction]:
        """All instructions, in their order."""
        return list(dis.get_instructions(self.code))

    @cached_property
    def _offsets(self) -> list[int]:
        return [instruction.offset for instruction in self.instructions]

    @cached_property
    def successors(self) -> list[tuple[int, ...]]:
        """Of each instruction, the positions of those that may follow it; not handlers."""
        index_of = {offset: index for index, offset in enumerate(self._offsets)}
        result: list[tuple[int, ...]] = []
        jumps = set(dis.hasjrel) | set(dis.hasjabs)
        for index, instruction in enumerate(self.instructions):
            targets: list[int] = []
            if instruction.opname not in _ENDS and index + 1 < len(self.instructions):
                targets.append(index + 1)
            if instruction.opcode in jumps:
                targets.append(index_of[instruction.argval])
            result.append(tuple(targets))
        return result

    @cached_property
    def _handler_entries(self) -> list[tuple[int, int, int, int]]:
        """Exception table: (first index, index after the last, handler's index, stack depth)."""
        parse: Any = dis._parse_exception_table  # type: ignore[attr-defined]
        entries: list[tuple[int, int, int, int]] = []
        for entry in parse(self.code):
            first = bisect_right(self._offsets, entry.start - 1)
            last = bisect_right(self._offsets, entry.end - 1)
            target = bisect_right(self._offsets, entry.target) - 1
            entries.append((first, last, target, entry.depth + int(entry.lasti) + 1))
        return entries

    @cached_property
    def _handlers(self) -> list[tuple[int, ...]]:
        handlers: list[tuple[int, ...]] = [()] * len(self.instructions)
        for first, last, target, _ in self._handler_entries:
            for index in range(first, last):
                handlers[index] = (*handlers[index], target)
        return handlers

    @cached_property
    def _depths(self) -> dict[int, int]:
        """Stack depth before each reachable instruction."""
        depths: dict[int, int] = {}
        work: list[tuple[int, int]] = [(0, 0)]
        work += [(target, depth) for _, _, target, depth in self._handler_entries]
        while work:
            index, depth = work.pop()
            known = depths.get(index)
            if known is not None:
                if known != depth:
                    raise Unsupported(
                        f"{self.code.co_qualname}: stack depths {known} and {depth} meet"
                    )
                continue
            depths[index] = depth
            instruction = self.instructions[index]
            falls = instruction.opname not in _ENDS
            for successor in self.successors[index]:
                jump = not (falls and successor == index + 1)
                effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)
                if instruction.opcode == _RETURN_GENERATOR:
                    effect = 1  # the value sent to start the generator
                work.append((successor, depth + effect))
        return depths

    @cached_property
    def _liveness(self) -> tuple[list[int], tuple[str, ...]]:
        """Live names before each instruction as bit sets, and the name of each bit."""
        bits: dict[str, int] = {}

        def bit(name: str) -> int:
            return 1 << bits.setdefault(name, len(bits))

        uses: list[int] = []
        kills: list[int] = []
        for instruction in self.instructions:
            use = kill = 0
            op = instruction.opname
            if op.startswith(("LOAD_FAST", "STORE_FAST", "DELETE_FAST")):
                for verb, name in zip(_fast_verbs(op), self._fast_names(instruction), strict=True):
                    if verb != "STORE":  # what is deleted has to be there
                        use |= bit(name) & ~kill
                    if verb != "LOAD":
                        kill |= bit(name)
                if op == "LOAD_FAST_AND_CLEAR":
                    kill |= use
            elif op in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL"):
                use = bit(instruction.argval)
            elif op in ("STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                kill = bit(instruction.argval)
                use = kill if op.startswith("DELETE") else 0
            uses.append(use)
            kills.append(kill)
        live = [0] * len(self.instructions)
        changed = True
        while changed:
            changed = False
            for index in range(len(live) - 1, -1, -1):
                out = 0
                for successor in self.successors[index]:
                    out |= live[successor]
                value = uses[index] | (out & ~kills[index])
                for handler in self._handlers[index]:
                    value |= live[handler]
                if value != live[index]:
                    live[index] = value
                    changed = True
        return live, tuple(bits)

    def _fast_names(self, instruction: dis.Instruction) -> tuple[str, ...]:
        if len(_fast_verbs(instruction.opname)) == 2:
            argument = instruction.arg or 0
            return (self.slot_names[argument >> 4], self.slot_names[argument & 15])
        return (self.slot_names[instruction.arg or 0],)


def _named(bits: int, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for bit, name in enumerate(names) if bits >> bit & 1)


def _callables(name: str, depth: int, argument: int) -> tuple[int, int]:
    """Where the operands of a call instruction begin, given the stack depth before it."""
    if (
        name == "CALL_FUNCTION_EX"
    ):  # NULL, callable, positional arguments[, keywords]; 3.13: callable, NULL, …
        first = depth - 3 - (argument & 1)
    elif name in ("CALL", "CALL_KW"):
        first = depth - argument - 2 - (name == "CALL_KW")  # the names of CALL_KW lie on top
    else:
        return (-1, -1)
    return (first, first + 1)


def _fast_verbs(op: str) -> tuple[str, ...]:
    words = op.split("_")
    return tuple(words[i] for i in range(len(words) - 1) if words[i + 1] == "FAST")


def _hash_code(code: CodeType, hasher: Any) -> None:
    hasher.update(code.co_code)
    hasher.update(
        repr((code.co_qualname, code.co_names, code.co_varnames, code.co_freevars)).encode()
    )
    hasher.update(repr((code.co_cellvars, code.co_firstlineno, code.co_flags)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _hash_code(constant, hasher)
        elif isinstance(constant, frozenset):
            hasher.update(repr(sorted(map(repr, constant))).encode())
        else:
            hasher.update(repr(constant).encode())


def _is_called_bare(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Whether what an instruction loads is called at once, without arguments."""
    for after in instructions[index + 1 :]:
        if after.opname == "CALL":
            return after.arg == 0
        if after.opname not in ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG"):
            return False
    return False


def mentions(name: str, code: CodeType) -> bool:
    """Whether a code object, or code nested in it, has a global name or an attribute's."""
    return name in code.co_names or any(
        mentions(name, one) for one in code.co_consts if isinstance(one, CodeType)
    )


def global_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Gives the global names that a code object, and all code nested in it, reads and writes; its
    strings count as read where it looks names up by strings."""
    key = id(code)
    found = _global_names.get(key)
    if found is None:
        reads: set[str] = set()
        writes: set[str] = set()
        looked_up = False
        instructions = list(dis.get_instructions(code))
        for i, instruction in enumerate(instructions):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                reads.add(instruction.argval)
                is_look_up = instruction.argval in _LOOK_UP
                looked_up = looked_up or (is_look_up and _is_called_bare(instructions, i))
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                writes.add(instruction.argval)
        if looked_up:
            reads |= {one for one in code.co_consts if isinstance(one, str)}
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                inner_reads, inner_writes = global_names(constant)
                reads |= inner_reads
                writes |= inner_writes
        found = (code, frozenset(reads), frozenset(writes))
        _global_names[key] = found
    return found[1], found[2]


def attributes_set(code: CodeType) -> frozenset[tuple[str, str]]:
    """Gives the attributes that a code object, and all code nested in it, sets of what a global
    name, or a module that it imports, means: (name, attribute) for `sys.steps = 1` and `sys.steps
    += 1`, or `setattr(sys, "steps", 1)`. What a name means may be a part of a module (`torch.nn`).
    A module that it imports is named as `import sys`."""
    known = _attributes_set.get(id(code))
    if known is not None:
        return known[1]
    found: set[tuple[str, str]] = set()
    imported: dict[str, str] = {}
    module, has_list = "", False  # that was imported last, and whether `from` imports it
    last = ["", "", ""]  # "=" and the name that an instruction loads, or what it does
    constant: Any = None
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, str(instruction.argval)
        if op in ("EXTENDED_ARG", "CACHE", "PUSH_NULL", "PRECALL"):
            continue
        if op in ("SWAP", "POP_TOP") and last[-1].startswith("import "):
            continue  # what leads to a part of a package
        if op.startswith("STORE_") and last[-1].startswith("import "):
            # `import torch.nn` gives the name `torch` to what is called so.
            is_root = module.startswith(f"{name}.") and last[-1] == f"import {module}"
            imported[name] = f"import {name}" if is_root and last[-2] != "as" else last[-1]
        if op == "LOAD_CONST":
            if last[-1].startswith("=") and last[-2] == "=setattr":
                found.add((last[-1][1:], name))
            constant = instruction.argval
        if op == "STORE_ATTR" and last[-1].startswith("="):
            found.add((last[-1][1:], name))
        if op == "LOAD_ATTR" and last[-1] == "COPY" and last[-2].startswith("="):
            found.add((last[-2][1:], name))  # it is loaded to be set
        loads = op in ("LOAD_GLOBAL", "LOAD_NAME") or (op.startswith("LOAD_") and name in imported)
        done = f"={imported.get(name, name)}" if loads else op
        if op in ("LOAD_ATTR", "LOAD_METHOD") and last[-1].startswith("="):
            done = f"{last[-1]}.{name}"
        if op == "IMPORT_NAME":
            module, has_list = name, constant is not None
            done = f"import {name}"
        if op == "IMPORT_FROM":
            last[-1] = "as"
            done = f"import {module}.{name}" if has_list else f"import {module}"
        last = [*last[1:], done]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= attributes_set(constant)
    _attributes_set[id(code)] = code, frozenset(found)
    return _attributes_set[id(code)][1]


def special_names(code: CodeType) -> frozenset[str]:
    """Gives the names with two underscores on both sides that a code object, and all code nested in
    it, mentions."""
    known = _special_names.get(id(code))
    if known is not None:
        return known[1]
    found = {name for name in code.co_names if name.startswith("__") and name.endswith("__")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= special_names(constant)
    _special_names[id(code)] = code, frozenset(found)
    return _special_names[id(code)][1]


def reads_in(code: CodeType) -> frozenset[str]:
    """Gives the globals and builtins that a code object, and all code nested in it, reads by name,
    without what `__hash__` itself reads; `sys.modules`, `.__globals__` and `import __main__` as
    they stand there."""
    known = _reads_in.get(id(code))
    if known is not None:
        return known[1]
    found: set[str] = set()
    before: Any = None
    for instruction in () if code.co_name == "__hash__" else dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            found.add(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if name == "__globals__":
                found.add(".__globals__")
            elif name == "modules" and before is not None and before.argval == "sys":
                found.add("sys.modules")
        elif instruction.opname == "IMPORT_NAME" and name == "__main__":
            found.add("import __main__")
        before = instruction
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= reads_in(constant)
    _reads_in[id(code)] = code, frozenset(found)
    return _reads_in[id(code)][1]


def analyse(code: CodeType) -> CodeAnalysis:
    """Gives the analysis of a code object, computed at most once."""
    found = _analyses.get(id(code))
    if found is None:
        found = _analyses[id(code)] = CodeAnalysis(code)
    return found


# By identity: hashing a code object hashes all of its constants. The value keeps the key's object
# alive.
_analyses: dict[int, CodeAnalysis] = {}
_reads_in: dict[int, tuple[CodeType, frozenset[str]]] = {}
_attributes_set: dict[int, tuple[CodeType, frozenset[tuple[str, str]]]] = {}
_special_names: dict[int, tuple[CodeType, frozenset[str]]] = {}
_global_names: dict[int, tuple[CodeType, frozenset[str], frozenset[str]]] = {}
