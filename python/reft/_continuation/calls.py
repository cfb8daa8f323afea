"""C code between two frames of a loop.

Python code that calls Python code leaves everything that it still needs on its own frame, where a
restore finds it. C code in between keeps its part in C variables: `list(map(step, loader))` has a
list that nobody can reach, `for i, x in zip(a, steps())` the item of `a` that was already taken.
Where what it keeps decides how the loop goes on, the place in the loop is refused; calls that only
pass through (`next`, `functools.partial`, a class, `obj()`) keep nothing.

Threads: any, with the GIL. Errors: none.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import sys
from types import (
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

from .bytecode import Point

_TRANSPARENT = frozenset(
    id(getattr(builtins, name))
    for name in (
        "next", "iter", "exec", "eval", "__import__", "__build_class__", "getattr", "setattr",
        "hasattr", "len", "isinstance", "issubclass", "super",
    )
)  # fmt: skip
_TRANSPARENT_OWNERS = (GeneratorType, CoroutineType, contextvars.Context)
# These operate on one object with one call of its method.
_TRANSPARENT_WRAPPERS = frozenset(
    {"__call__", "__next__", "__iter__", "__enter__", "__exit__", "__getitem__", "__setattr__"}
)
# Instructions that may run an iterator to its end, or look at each item (`+=` of a list, slices that
# are assigned), and how many operands they have on the value stack.
_OPERANDS = {"CONTAINS_OP": 2, "BINARY_OP": 2, "STORE_SUBSCR": 3, "STORE_SLICE": 4}
_OPERATORS = tuple(
    f"__{side}{name}__"
    for name in (
        *("add", "and", "floordiv", "lshift", "matmul", "mul", "mod", "or", "pow", "rshift"),
        *("sub", "truediv", "xor"),
    )
    for side in ("i", "", "r")
)  # fmt: skip
# Instructions that run an iterator to its end, or compare as they go.
_ITERATING = frozenset(
    {
        "LIST_EXTEND",
        "SET_UPDATE",
        "DICT_UPDATE",
        "DICT_MERGE",
        "UNPACK_SEQUENCE",
        "UNPACK_EX",
    }
)
_PACKAGES = frozenset({"numpy", "pandas", "scipy", "optree", "cytoolz"})
_LOOPS_OF_TORCH = frozenset({"apply_", "map_", "map2_"})  # methods of tensors
_STEPPING = frozenset({"FOR_ITER", "SEND"})
_HINT = "use a `for` loop"


def blocker(point: Point, stack: list[Any], unbound: object) -> str | None:
    """Says why the place in a loop cannot be put back: C code was called at `point`, and that
    called the next frame.

    Args:
        point: Where the frame stands.
        stack: Its value stack with the operands of the instruction in progress.
        unbound: What stands for an empty slot in `stack`.

    Returns:
        None if nothing is kept there.
    """
    operands = stack[point.stack_depth : point.stack_depth + _OPERANDS.get(point.name, 0)]
    if point.name in _ITERATING or (operands and not _asks_once(point.name, operands)):
        return f"the training step runs while C code consumes an iterable: {_HINT}"
    if point.name in _STEPPING:
        return _iterator_blocker(stack[point.stack_depth - 1] if point.stack_depth else unbound)
    first, second = point.callables
    if first < 0:
        return None
    called = stack[first] if stack[first] is not unbound else stack[second]
    return _callable_blocker(called)


def operands_end(point: Point) -> int:
    """How many slots of the value stack `blocker` needs."""
    return max(point.stack_depth + _OPERANDS.get(point.name, 0), point.callables[1] + 1)


def _asks_once(name: str, operands: list[Any]) -> bool:
    """Whether an instruction is one call of a method in Python, and no loop over items."""
    if name == "CONTAINS_OP":
        return _has_in_python(operands[1], "__contains__")
    if name == "BINARY_OP":
        # Of other packages' objects, as tensors, code in C is taken to pass calls through.
        return any(
            _has_in_python(operand, operator) for operand in operands for operator in _OPERATORS
        ) or not any(_is_known(type(operand).__module__) for operand in operands)
    container = operands[1]
    if name == "STORE_SUBSCR" and type(operands[2]) is not slice:
        return True
    is_known = _is_known(type(container).__module__)
    return not is_known or _has_in_python(container, "__setitem__")


def _has_in_python(value: Any, method: str) -> bool:
    return isinstance(getattr(type(value), method, None), FunctionType)


def _iterator_blocker(iterator: Any) -> str | None:
    kind = type(iterator)
    # `map` keeps only what it has handed over as arguments.
    if kind in (GeneratorType, CoroutineType, map) or isinstance(
        getattr(kind, "__next__", None), FunctionType
    ):
        return None
    if not _is_known(kind.__module__):
        return None
    return (
        f"the training step runs inside an iterable of `{kind.__name__}`, and the items that"
        f" `{kind.__name__}` has taken are kept in C: {_HINT} around that iterable"
    )


def _callable_blocker(called: Any) -> str | None:
    kind = type(called)
    if kind in (FunctionType, functools._lru_cache_wrapper) or id(called) in _TRANSPARENT:
        return None
    if kind is functools.partial:
        return _callable_blocker(called.func)
    if kind is MethodType:
        return _callable_blocker(called.__func__)
    if isinstance(called, type):
        kinds = (called.__init__, called.__new__)  # type: ignore[misc]
        made_in_python = any(type(one) is FunctionType for one in kinds)
        return None if made_in_python or not _iterates(called) else _refusal(called.__qualname__)
    if kind is BuiltinFunctionType or kind is MethodWrapperType:
        owner = type(called.__self__)
        module = (
            called.__module__
            if kind is BuiltinFunctionType and called.__module__
            else owner.__module__
        )
    elif kind is MethodDescriptorType or kind is WrapperDescriptorType:
        owner, module = called.__objclass__, called.__objclass__.__module__
    else:  # an object that is called, as a `ufunc` of NumPy
        in_c = not isinstance(getattr(kind, "__call__", None), FunctionType)  # noqa: B004  # which
        loops = in_c and kind.__module__.partition(".")[0] in _PACKAGES
        return _refusal(kind.__qualname__) if loops else None
    if called.__name__ in _LOOPS_OF_TORCH and owner.__module__.partition(".")[0] == "torch":
        return _refusal(called.__qualname__)
    passes = owner in _TRANSPARENT_OWNERS or owner.__module__ == "_asyncio"
    if kind in (MethodWrapperType, WrapperDescriptorType):
        passes = passes or called.__name__ in _TRANSPARENT_WRAPPERS
    return None if passes or not _is_known(str(module)) else _refusal(called.__qualname__)


def _iterates(kind: type) -> bool:
    """Whether making an object of a class loops over its argument, as containers of Python do."""
    return any(_is_known(base.__module__) for base in kind.__mro__ if base is not object)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _known_roots()


@functools.cache
def _known_roots() -> frozenset[str]:
    """Python's own C code, and that of packages whose functions call one for each item.

    Other packages' code is taken to pass calls through, as autograd does.
    """
    return frozenset(sys.stdlib_module_names | {"builtins"} | _PACKAGES)


def _refusal(name: str) -> str:
    return f"a loop that `{name}` runs in C: {_HINT}"
