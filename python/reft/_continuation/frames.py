"""Captures the loop frames of an unchanged script and restores them in the process that takes its
place.

Frames are the same if their code hashes and the instruction in progress are. Then locals, cells,
the globals that the loop touches and the value stack (loop iterators, half-evaluated expressions)
are plain data to copy out and write in.

Threads: the training thread. Errors: `FrameMismatch`, always before the first write.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from operator import is_not
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
)
from typing import Any

from reft._state.own import is_made, is_own

from . import calls
from .births import Stateless
from .bytecode import (
    CO_OPTIMIZED,
    CodeAnalysis,
    Point,
    Unsupported,
    analyse,
    global_names,
    mentions,
)
from .capture_walk import CaptureWalk
from .nodes import (
    KEEP,
    MISSING,
    UNBOUND,
    Refusal,
    Stray,
    function_in,
    index_of,
    is_bound,
    is_pythons,
    native,
)
from .restore_walk import RestoreWalk

# Frames of these packages are on the path but hold nothing of the script's.
_INTERNAL = frozenset(
    {
        "torch",
        "asyncio",
        "contextlib",
        "functools",
        "runpy",
        "importlib",
        "threading",
        "multiprocessing",
    }
)
_OPEN: tuple[type, ...] = (GeneratorType, contextlib.ExitStack, contextlib._GeneratorContextManager)
_PROCESS_ENTRY = BaseProcess.__dict__["_bootstrap"].__code__
_NAMED = (ModuleType, FunctionType, BuiltinFunctionType, type)
# What a closure returned to torch's wrapper of `step`: the script gets it from there.
_RESULTS = frozenset({"out"})
_RETURNED = "<returned>"


_LATER = "did not exist in the first iteration: a resume would refuse the place in the loop"


class FrameMismatch(Refusal):
    """The restarted script stands elsewhere than the captured one; the message says why."""


class OtherCode(FrameMismatch):
    """The script was edited."""


Path = list[tuple[FrameType, bool, FrameType | None]]


def frames_from(start: FrameType) -> Path:
    """Gives the frames from the main module in to `start`, each with whether it is the user's and
    which one it called.

    Frames of reft are left out. In a forked process, the frames that were there at the fork are the
    launcher's: the path begins where the process does.
    """
    path: Path = []
    main: int | None = None
    outermost = 0
    frame: FrameType | None = start
    callee: FrameType | None = None
    while frame is not None and frame.f_code is not _PROCESS_ENTRY:
        module = str(frame.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if root != "reft":
            path.append((frame, root not in _INTERNAL, callee))
        # The outermost one of the script: it may run a part of itself by `exec`. Around it may be
        # what runs scripts: a notebook, a profiler, which have globals of their own.
        if (
            module == "__main__"
            and frame.f_code.co_name == "<module>"
            and main in (None, id(frame.f_globals))
        ):
            main, outermost = id(frame.f_globals), len(path)
        frame, callee = frame.f_back, frame
    if outermost:
        del path[outermost:]
    path.reverse()  # outermost first: its names for shared objects are the ones that last
    return path


def encode_path(walk: CaptureWalk, start: FrameType) -> list[dict[str, Any]]:
    path: list[dict[str, Any]] = []
    modules: set[int] = set()
    for frame, user, callee in frames_from(start):
        code = frame.f_code
        if not user:
            path.append(
                {
                    "user": False,
                    "name": code.co_qualname,
                    "results": _encode_results(walk, frame, callee is None),
                }
            )
            continue
        record = _encode_frame(walk, frame, code.co_qualname, walk.encode_standing)
        if callee is not None and not walk.note_births:
            record["refused"] = _blocker(frame, callee)
            if record["refused"]:
                walk.lost(
                    f"{code.co_qualname}:{frame.f_lineno}", "place in the loop", record["refused"]
                )
        if id(frame.f_globals) not in modules:
            modules.add(id(frame.f_globals))
            names = _module_names(frame.f_globals)
            if not code.co_flags & CO_OPTIMIZED:
                names = _joined(names, analyse(code).nested_names)
            record["globals"] = _encode_names(walk, frame.f_globals, names, "global ")
        _note_variables(walk, record, frame)
        path.append(record)
    return path


def variables_at(start: FrameType) -> set[str]:
    """Places of the variables of a path's frames that have a value."""
    found: set[str] = set()
    for frame, user, _ in frames_from(start):
        if not user:
            continue
        code, prefix = frame.f_code, f"{frame.f_code.co_qualname}:"
        if not code.co_flags & CO_OPTIMIZED:
            found.update(prefix + name for name in frame.f_locals)
        analysis = analyse(code)
        slots = native().frame_slots(frame, analysis.slot_count, UNBOUND)
        places = analysis.places_of(code.co_qualname)
        found.update(places[i] for i, value in enumerate(slots) if value is not UNBOUND)
    return found


def calls_of(start: FrameType) -> list[tuple[str, int]]:
    """Where each frame of a path stands: the same in two processes of a script, and at two steps, if
    one can be put back at the place of the other."""
    return [
        (frame.f_code.co_qualname, _offset_of(frame) if user else -1)
        for frame, user, _ in frames_from(start)
    ]


def _offset_of(frame: FrameType) -> int:
    try:
        return analyse(frame.f_code).point(frame.f_lasti).offset
    except Exception:  # noqa: BLE001  # a capture reports it
        return frame.f_lasti


def lines_of(start: FrameType) -> list[str]:
    """The lines of a path, outermost frame first; "" where a frame is not the script's own."""
    return [
        f"{analyse(frame.f_code).file}:{frame.f_lineno}" if user else ""
        for frame, user, _ in frames_from(start)
    ]


def _note_variables(walk: CaptureWalk, record: dict[str, Any], frame: FrameType) -> None:
    """At the first program point, notes which variables have a value; later, reports those for
    which `plan_frame` would refuse the place in the loop."""
    analysis, known = analyse(frame.f_code), walk.births.variables
    places, prefix = analysis.places_of(record["name"]), f"{record['name']}:"
    if walk.note_births:
        known.update(places[i] for i, encoded in record["fast"] if encoded != UNBOUND)
        known.update(prefix + name for name, encoded in record["names"] if encoded != UNBOUND)
        return
    fast = [(places[i], encoded) for i, encoded in record["fast"] if type(encoded) is tuple]
    named = [(prefix + name, it) for name, it in record["names"] if type(it) is tuple]
    for place, encoded in fast + named:
        if place in known or (index := index_of(encoded)) is None:
            continue
        name = place[len(prefix) :]
        if name not in analysis.read_from(record["offset"]) or name in analysis.cells:
            continue
        if walk.graph.needs_live(encoded):
            walk.lost(place, walk.graph.types[index], _LATER)


def _blocker(frame: FrameType, callee: FrameType) -> str | None:
    """Says why C code between two frames keeps the place in the loop from being put back."""
    if not native().frame_entered_from_c(callee):
        return None
    analysis = analyse(frame.f_code)
    point = analysis.point(frame.f_lasti)
    count = analysis.slot_count
    # Operands of the call in progress are still there: C code borrows them from the frame.
    slots = native().frame_slots(frame, count + calls.operands_end(point), UNBOUND)
    return calls.blocker(point, slots[count:], UNBOUND)


def _encode_results(
    walk: CaptureWalk, frame: FrameType, is_innermost: bool
) -> list[tuple[str, Any]]:
    """Encodes what a wrapper of the optimizer's step, or of a compiled function around it, is about
    to return to the script."""
    if is_innermost and _is_compiled(frame) and not walk.note_births:
        slots = _slots_and_stack(frame)[1]
        return [(_RETURNED, walk.encode(slots[0], f"result of {frame.f_code.co_qualname}"))]
    if _RESULTS.isdisjoint(frame.f_code.co_varnames) or walk.note_births:
        return []
    module = str(frame.f_globals.get("__name__", ""))
    if not module.startswith("torch.optim"):
        return []
    analysis = analyse(frame.f_code)
    slots = native().frame_slots(frame, analysis.slot_count, UNBOUND)
    return [
        (name, walk.encode(value, f"result of {frame.f_code.co_qualname}"))
        for name, value in zip(analysis.slot_names, slots, strict=True)
        if name in _RESULTS and value is not UNBOUND
    ]


def _is_compiled(frame: FrameType) -> bool:
    """Whether a frame is that of Dynamo around a compiled function that has returned."""
    where = (frame.f_globals.get("__name__"), frame.f_code.co_name)
    return where == ("torch._dynamo.eval_frame", "compile_wrapper")


def _slots_and_stack(frame: FrameType) -> tuple[int, list[Any]]:
    """The number of a frame's variables, and its value stack. The result of a `return` waits at the
    bottom of it while `finally` runs."""
    analysis = analyse(frame.f_code)
    count = analysis.slot_count
    depth = analysis.point(frame.f_lasti).stack_depth
    slots = native().frame_slots(frame, count + depth, UNBOUND)
    return count, slots[count:]


def plan_results(walk: RestoreWalk, record: dict[str, Any], frame: FrameType) -> None:
    if not record["results"]:
        return
    analysis = analyse(frame.f_code)
    slots = native().frame_slots(frame, analysis.slot_count, UNBOUND)
    for name, encoded in record["results"]:
        if name == _RETURNED and _is_compiled(frame):
            count, stack = _slots_and_stack(frame)
            _plan_slot(walk, encoded, frame, count, stack[0], f"result of {record['name']}")
        if name in analysis.slot_names:
            i = analysis.slot_names.index(name)
            _plan_slot(walk, encoded, frame, i, slots[i], f"result of {record['name']}")


def _point(analysis: CodeAnalysis, frame: Any, created: bool) -> Point:
    """Returns the place where a frame stands.

    A generator that was never asked for an item has no instruction in progress.
    """
    return (
        Point(-1, 0, frozenset(analysis.slot_names), analysis.read_from(-1))
        if created
        else analysis.point(frame.f_lasti)
    )


def _encode_frame(
    walk: CaptureWalk,
    frame: FrameType,
    place: str,
    encode: Callable[[Any, str], Any],
    created: bool = False,
) -> dict[str, Any]:
    """Encodes one frame's locals, by `encode`, and value stack."""
    code = frame.f_code
    analysis = analyse(code)
    point = _point(analysis, frame, created)
    count = analysis.slot_count
    slots = native().frame_slots(frame, count + point.stack_depth, UNBOUND)
    fast: list[tuple[int, Any]] = []
    places = analysis.places_of(place)
    for i, _, is_cell in analysis.every_slot if walk.note_births else analysis.live_slots(point):
        value = slots[i]
        if is_cell:
            fast.append((i, _encode_cell(encode, value, places[i])))
        else:
            fast.append((i, UNBOUND if value is UNBOUND else encode(value, places[i])))
    names: list[tuple[str, Any]] = []
    if not code.co_flags & CO_OPTIMIZED:
        every = frozenset(frame.f_locals) if walk.note_births else point.live
        names = _encode_names(walk, frame.f_locals, every, f"{place}:")
    stack = [
        UNBOUND if value is UNBOUND else walk.encode(value, f"{place}<stack {i}>")
        for i, value in enumerate(slots[count:])
    ]
    return {
        "user": True,
        "name": code.co_qualname,
        "file": analysis.file,
        "line": code.co_firstlineno,
        "digest": analysis.digest,
        "offset": point.offset,
        "fast": fast,
        "names": names,
        "stack": stack,
        "globals": [],
        "refused": None,
    }


@functools.lru_cache(256)  # they are the same objects each step, which keep their hashes
def _joined(names: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    return names | others


@functools.lru_cache(256)
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in sorted(names) if not is_pythons(name))


def _encode_cell(encode: Callable[[Any, str], Any], cell: Any, place: str) -> Any:
    try:
        return encode(cell.cell_contents, place)
    except (ValueError, AttributeError):  # empty, or not made yet
        return UNBOUND


def _encode_names(
    walk: CaptureWalk, namespace: dict[str, Any], names: frozenset[str], prefix: str
) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    ordered, kept = _in_order(names), walk.births.stateless.get((prefix, names))
    # Most are modules and functions that a name has meant all the time.
    is_as_before = kept is not None and not any(
        map(is_not, map(namespace.get, kept.names), kept.values)
    )
    if kept is not None and is_as_before:
        ordered = kept.others
    stateless: dict[str, Any] = {}
    for name in ordered:
        value = namespace.get(name, UNBOUND)
        if issubclass(type(value), _NAMED) and _is_stateless(walk, value, prefix + name):
            stateless[name] = value
        elif value is not UNBOUND:
            result.append((name, walk.encode(value, prefix + name)))
        elif name not in _BUILTIN_NAMES:
            result.append((name, UNBOUND))
    if not is_as_before and not walk.note_births:
        others = tuple(name for name in ordered if name not in stateless)
        known = Stateless(list(stateless), list(stateless.values()), others)
        walk.births.stateless[prefix, names] = known
    return result


def _is_stateless(walk: CaptureWalk, value: Any, place: str) -> bool:
    """Whether a module, a function or a class is one that the restarted script has, too."""
    if type(value) is ModuleType and not is_made(value):
        return True
    has_state = (
        value.__closure__ if type(value) is FunctionType else is_bound(value) or is_made(value)
    )
    return not has_state and not walk.is_switched(value, place)


def capture_generator(
    walk: CaptureWalk, generator: GeneratorType[Any, Any, Any], place: str
) -> dict[str, Any]:
    frame: Any = generator.gi_frame
    unit, state = native().generator_position(generator)
    created = inspect.getgeneratorstate(generator) == inspect.GEN_CREATED
    record = _encode_frame(
        walk, frame, place, walk.encode, created
    )  # it may have to be made anew, with nothing in it
    record["position"] = (unit, state)
    record["module"] = str(frame.f_globals.get("__name__", ""))
    return record


def plan_generator(walk: RestoreWalk, record: dict[str, Any], generator: Any, place: str) -> Any:
    """Plans the writes to a suspended generator, wherever it stands now; makes it if there is none.

    Returns:
        The generator, None if it cannot be made.
    """
    if generator is not MISSING and analyse(generator.gi_code).digest != record["digest"]:
        generator = MISSING  # the variable means a generator of another function by now
    made = generator is MISSING
    if made:
        generator = _make_generator(record)
        if generator is None:
            return None
    frame = generator.gi_frame
    position = tuple(native().generator_position(generator))
    if position == tuple(record["position"]) and record["offset"] >= 0 and not made:
        plan_frame(walk, record, frame, place)
        return generator
    _compare_code(record, frame)
    analysis = analyse(frame.f_code)
    slots = native().frame_slots(frame, analysis.slot_count, UNBOUND)
    if made:  # its arguments are None, which stands for nothing
        for i, name in enumerate(analysis.slot_names):
            if name not in analysis.cells:
                slots[i] = MISSING
            elif type(slots[i]) is CellType:
                del slots[i].cell_contents
    _plan_locals(walk, record, frame, analysis, slots, place)
    stack: list[Any] = []
    for i, encoded in enumerate(record["stack"]):
        value = (
            UNBOUND if encoded == UNBOUND else walk.resolve(encoded, MISSING, f"{place}<stack {i}>")
        )
        if value is KEEP or value is UNBOUND:
            raise FrameMismatch(
                f"{place}: it is suspended at another `yield`, and a value that it holds there"
                " cannot be restored"
            )
        stack.append(value)
    unit, state = record["position"]
    walk.write(lambda: native().generator_set_position(generator, unit, state, stack))
    return generator


def _make_generator(record: dict[str, Any]) -> Any:
    """Makes a generator of the recorded function, without running any of its code."""
    module = sys.modules.get(record["module"])
    function: Any = module
    for part in record["name"].split("."):
        function = getattr(function, part, None)
    function = getattr(function, "__func__", function)
    if (
        type(function) is not FunctionType
        or analyse(function.__code__).digest != record["digest"]
    ):
        return None
    code = function.__code__
    cells = tuple(CellType() for _ in code.co_freevars)
    bare = FunctionType(code, function.__globals__, code.co_name, None, cells)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = [None] * code.co_argcount
    made = bare(*positional, **dict.fromkeys(names[code.co_argcount :]))
    return made if isinstance(made, GeneratorType) else None


def _module_names(namespace: dict[str, Any]) -> frozenset[str]:
    """Returns the global names that a module's functions write; for the user's own, read, too."""
    found = _module_names_cache.get(id(namespace))
    if found is not None and found[0] is namespace and found[1] == len(namespace):
        return found[2]
    file = str(namespace.get("__file__") or "")
    own = "site-packages" not in file and "dist-packages" not in file
    names: set[str] = set()
    for function in _functions_of(namespace):
        reads, writes = global_names(function.__code__)
        names |= (reads | writes) if own else writes
    names &= namespace.keys()
    frozen = frozenset(names)
    _module_names_cache[id(namespace)] = (namespace, len(namespace), frozen)
    return frozen


def _functions_of(namespace: dict[str, Any]) -> list[FunctionType]:
    found: list[FunctionType] = []
    for value in list(namespace.values()):
        members = (
            vars(value).values()
            if issubclass(type(value), type) and value.__module__ == namespace.get("__name__")
            else (value,)
        )
        for member in members:
            function = function_in(member)
            if type(function) is FunctionType and function.__globals__ is namespace:
                found.append(function)
    return found


def script_mentions(name: str, frame: FrameType) -> bool:
    """Whether code of the script has a name: that of the frames around `frame`, or of a function or
    method of its modules."""
    codes = []
    above: FrameType | None = frame
    while above is not None:
        codes.append(above.f_code)
        above = above.f_back
    modules = [module for own, module in list(sys.modules.items()) if is_own(own)]
    codes += [one.__code__ for module in modules for one in _functions_of(vars(module))]
    return any(mentions(name, code) for code in codes)


_module_names_cache: dict[int, tuple[dict[str, Any], int, frozenset[str]]] = {}
_BUILTIN_NAMES = frozenset(dir(__import__("builtins")))


def compare_paths(path: list[dict[str, Any]], live: Path) -> None:
    there = [record["name"] for record in path]
    here = [frame.f_code.co_qualname for frame, _, _ in live]
    if there != here:
        raise FrameMismatch(f"call path was {' > '.join(there)}, is {' > '.join(here)}")
    # Innermost first: the hash of a module covers the functions in it, and the function is the
    # better name.
    for record, (frame, user, _) in zip(reversed(path), reversed(live), strict=True):
        if record["user"] != user:
            raise FrameMismatch(f"{record['name']} is defined in another module")
        if user:
            where = _compare_frame(record, frame)
            if record["refused"]:
                raise FrameMismatch(f"{where}: {record['refused']}")


def _compare_code(record: dict[str, Any], frame: Any) -> str:
    where = f"{record['file']}:{record['line']} {record['name']}"
    if analyse(frame.f_code).digest != record["digest"]:
        raise OtherCode(f"{where}: the code has changed")
    return where


def _compare_frame(record: dict[str, Any], frame: Any) -> str:
    where = _compare_code(record, frame)
    code = frame.f_code
    try:
        offset = analyse(code).point(frame.f_lasti).offset
    except Unsupported as error:
        raise FrameMismatch(f"{where}: {error}") from error
    if offset != record["offset"]:
        then, now = _line_at(code, record["offset"]), _line_at(code, offset)
        lines = f"was in line {then}, is in line {now}"
        if then == now:
            lines = f"was another one of line {then}"
        raise FrameMismatch(f"{where}: the call in progress {lines}")
    return where


def _line_at(code: CodeType, offset: int) -> int:
    for begin, end, line in code.co_lines():
        if line and begin <= offset < end:
            return int(line)
    return code.co_firstlineno


def plan_frame(walk: RestoreWalk, record: dict[str, Any], frame: Any, place: str) -> None:
    """Plans the writes to one frame."""
    _compare_frame(record, frame)
    analysis = analyse(frame.f_code)
    point = analysis.point(frame.f_lasti)
    count = analysis.slot_count
    slots = native().frame_slots(frame, count + point.stack_depth, UNBOUND)
    _plan_locals(walk, record, frame, analysis, slots, place)
    if len(record["stack"]) != point.stack_depth:
        raise FrameMismatch(
            f"{place}: stack depth was {len(record['stack'])}, is {point.stack_depth}"
        )
    for i, encoded in enumerate(record["stack"]):
        where = f"{place}<stack {i}>"
        lost = walk.lost_reason(encoded)
        there = slots[count + i]
        if lost is not None and (hasattr(there, "__next__") or hasattr(there, "__anext__")):
            raise FrameMismatch(f"{where}: {lost}")
        other = walk.other_block(encoded, there)
        if other is not None:
            raise FrameMismatch(f"{place}: {other}")
        try:
            value = _plan_slot(walk, encoded, frame, count + i, there, where)
        except Stray as error:
            raise FrameMismatch(str(error)) from error
        if value is KEEP and walk.is_position(encoded):
            raise FrameMismatch(
                f"{where}: the position of {type(there).__name__} cannot be restored"
            )


def _plan_locals(
    walk: RestoreWalk,
    record: dict[str, Any],
    frame: Any,
    analysis: CodeAnalysis,
    slots: list[Any],
    place: str,
) -> None:
    _plan_names(walk, record["globals"], frame.f_globals, "global ", frozenset())
    read = analysis.read_from(record["offset"])
    for i, encoded in record["fast"]:
        name = analysis.slot_names[i]
        if name in analysis.cells:
            _plan_cell(walk, encoded, slots[i], f"{place}:{name}")
        else:
            _plan_slot(walk, encoded, frame, i, slots[i], f"{place}:{name}", name in read)
    if record["names"]:
        _plan_names(walk, record["names"], frame.f_locals, f"{place}:", read)
    captured = {i for i, _ in record["fast"]}
    for i, value in enumerate(slots[: analysis.slot_count]):
        # Nobody reads it any more, but when it goes, what it has open in the discarded iteration is
        # left: better now than later.
        if i not in captured and issubclass(type(value), _OPEN):
            walk.write(partial(native().frame_set_slot, frame, i, None, UNBOUND))


def _plan_slot(
    walk: RestoreWalk,
    encoded: Any,
    frame: Any,
    index: int,
    live: Any,
    place: str,
    is_read: bool = True,
) -> Any:
    if encoded == UNBOUND:
        value: Any = UNBOUND
    else:
        there = MISSING if live is UNBOUND else live
        value = _resolve_variable(walk, encoded, there, place, is_read)
    if value is KEEP:
        return KEEP
    if value is not live:
        walk.write(lambda: native().frame_set_slot(frame, index, value, UNBOUND))
    return None


def _plan_cell(walk: RestoreWalk, encoded: Any, cell: Any, place: str) -> None:
    try:
        live = cell.cell_contents
    except ValueError:
        live = MISSING
    except AttributeError:
        return
    if encoded == UNBOUND:
        return
    value = walk.resolve(encoded, live, place)
    if value is not KEEP:
        walk.write(lambda: setattr(cell, "cell_contents", value))


def _plan_names(
    walk: RestoreWalk,
    names: list[tuple[str, Any]],
    namespace: dict[str, Any],
    prefix: str,
    read: frozenset[str],
) -> None:
    """`read`: the names that the frame's code may read before it assigns them."""
    for name, encoded in names:
        if encoded == UNBOUND:
            if name in namespace:
                walk.write(partial(namespace.pop, name, None))
            continue
        there = namespace.get(name, MISSING)
        value = _resolve_variable(walk, encoded, there, prefix + name, name in read)
        if value is not KEEP:
            walk.write(partial(namespace.__setitem__, name, value))


def _resolve_variable(
    walk: RestoreWalk, encoded: Any, live: Any, place: str, is_read: bool
) -> Any:
    """Resolves a variable.

    Args:
        is_read: the loop may read it before it assigns it.

    Raises:
        FrameMismatch: It is read and would have no value. The script would fail on it, in every
            attempt.
    """
    before = len(walk.problems)
    value = walk.resolve(encoded, live, place)
    if is_read and value is KEEP and live is MISSING:
        why = walk.lost_reason(encoded)
        if why is None:
            reasons = [reason for _, _, reason in walk.problems[before:]]
            why = reasons[0] if reasons else "made after the first step"
        raise FrameMismatch(f"{place} did not exist yet and cannot be restored: {why}")
    return value
