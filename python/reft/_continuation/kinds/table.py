"""Which kind captures the objects of a class: the first rule that takes the class.

Threads: the training thread. Errors: none; a class that no rule takes is reported as unknown.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import inspect
import io
import logging
import re
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any

from ..foreign import TRACKERS, is_plain_class
from ..nodes import Node
from ..rng import is_bit_generator
from . import (
    containers,
    elsewhere,
    files,
    functions,
    holders,
    iterators,
    loaders,
    modules,
    objects,
    randoms,
    tables,
    temporaries,
    tensors,
    wrappers,
)
from .constants import EnumMember, Pattern, Pickled, Range, TorchConstant

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk

Capture = Callable[[Any, str, int, "CaptureWalk"], Node]
"""Captures (value, place, how many containers are around it, walk)."""

# Things with an owner, or without state of their own.
_OWNED: tuple[type, ...] = (
    MethodWrapperType,
    WrapperDescriptorType,
    MemberDescriptorType,
    GetSetDescriptorType,
    GenericAlias,
    CodeType,
    FrameType,
    TracebackType,
    CellType,
    type,
    property,
    staticmethod,
    classmethod,
    weakref.ReferenceType,
)
_QUEUES = frozenset({"queue", "_queue", "asyncio.queues", "multiprocessing.queues"})
_PICKLED_MODULES = frozenset({"datetime", "decimal", "fractions", "uuid", "pathlib", "zoneinfo"})
# Loggers and their like: what they hold lives outside of the process.
_PLAIN_TORCH = (
    "torch.distributed.algorithms.",  # states of hooks: PowerSGD and the like
    "torch.distributions.",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How the objects of some classes are captured."""

    takes: Callable[[type], bool]
    capture: Capture
    is_born: bool = True
    """Whether such an object has an identity worth keeping across processes."""
    is_outsider: bool = False
    """Whether one outside of the frames is left alone if its class is an installed package's."""
    is_left_alone: bool = False
    """Whether the restarted script has its own."""
    is_constant: bool = False
    """Whether such an object never changes."""


def _is(*kinds: type) -> Callable[[type], bool]:
    return lambda kind: kind in kinds


def _extends(*kinds: type) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, kinds)


def _named(module: str, *names: str) -> Callable[[type], bool]:
    return lambda kind: kind.__module__ == module and kind.__qualname__ in names


def _torch_is(*names: str) -> Callable[[type], bool]:
    """Takes a class of torch by its name; nothing as long as torch is not imported."""
    return lambda kind: kind in _torch_kind(*names)


def _torch_extends(*names: str) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, _torch_kind(*names))


def _torch_kind(*names: str) -> tuple[type, ...]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return ()
    found: list[type] = []
    for name in names:
        module, _, last = name.rpartition(".")
        value = getattr(sys.modules.get(f"torch.{module}" if module else "torch"), last, None)
        if isinstance(value, type):
            found.append(value)
    return tuple(found)


def _numpy_is(*names: str) -> Callable[[type], bool]:
    def takes(kind: type) -> bool:
        if _root(kind) != "numpy":
            return False
        found = []
        for name in names:
            value: Any = sys.modules["numpy"]
            for part in name.split("."):
                value = getattr(value, part, None)
            found.append(value)
        return kind in found

    return takes


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_array(kind: type) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or _root(kind) != "numpy":
        return False
    return kind is numpy.ndarray or issubclass(kind, numpy.generic)


def _is_dtensor(kind: type) -> bool:
    named = kind.__name__ == "DTensor" and _root(kind) == "torch"
    return named and issubclass(kind, _torch_kind("Tensor"))


def _is_queue(kind: type) -> bool:
    return kind.__module__ in _QUEUES and hasattr(kind, "empty")


def _is_foreign(kind: type) -> bool:
    return functions.is_foreign(_root(kind))


# In this order: the first that takes a class decides.
_RULES: tuple[Rule, ...] = (
    Rule(iterators.is_reduced, iterators.Iterator.capture, is_born=False),
    Rule(_is(*iterators.ADVANCED), iterators.Advanced.capture),
    Rule(_is(GeneratorType), iterators.Generator.capture),
    Rule(_is(AsyncGeneratorType), objects.capture_unknown, is_outsider=True),
    Rule(_extends(enum.Enum), EnumMember.capture, is_constant=True),
    Rule(_is(FunctionType), functions.Function.capture),
    Rule(_extends(BuiltinFunctionType, type), functions.NamedObject.capture),
    Rule(_is(memoryview), containers.MemoryView.capture),
    Rule(_is(*wrappers.WEAK_REFERENCES), wrappers.WeakReference.capture, is_born=False),
    Rule(_named("array", "array"), containers.Numbers.capture),
    Rule(_is(MethodType), functions.Method.capture, is_born=False),
    Rule(_is(MethodWrapperType), functions.capture_bound),
    Rule(_is(functools.partial), functions.Partial.capture, is_born=False),
    Rule(_is(functools.partialmethod), objects.Instance.capture),
    Rule(_is(threading.Event), objects.Event.capture),
    Rule(_extends(threading.local), holders.ThreadLocal.capture),
    Rule(_is(contextvars.ContextVar), holders.ContextValue.capture),
    Rule(_is(contextvars.Context), holders.Context.capture),
    Rule(_named("decimal", "Context"), holders.DecimalContext.capture),
    Rule(_named("decimal", "ContextManager"), holders.capture_block, is_left_alone=True),
    Rule(_is(logging.LoggerAdapter), objects.Instance.capture),
    Rule(holders.is_shared_numbers, holders.SharedNumbers.capture),
    Rule(_is(ModuleType), wrappers.capture_module, is_left_alone=True),
    Rule(
        _is(logging.Logger, logging.RootLogger),
        wrappers.Logger.capture,
        is_left_alone=True,
    ),
    Rule(_is(inspect.Signature), wrappers.Signature.capture),
    Rule(_is(CoroutineType), wrappers.capture_coroutine, is_left_alone=True),
    Rule(_is(MappingProxyType), wrappers.Proxy.capture),
    Rule(_is(*wrappers.DICT_VIEWS), wrappers.DictView.capture, is_born=False),
    Rule(_is(*wrappers.WEAK), wrappers.WeakContainer.capture),
    Rule(_is(threading.Semaphore, threading.BoundedSemaphore), wrappers.Semaphore.capture),
    Rule(_extends(BaseException), wrappers.Raised.capture),
    Rule(_extends(*_OWNED), objects.Owned.capture, is_left_alone=True),
    Rule(_is(io.BytesIO, io.StringIO), files.Buffer.capture),
    Rule(_extends(tempfile.SpooledTemporaryFile), temporaries.Spooled.capture),
    Rule(_extends(io.IOBase), files.File.capture),
    Rule(_extends(tempfile.TemporaryDirectory), temporaries.TemporaryDirectory.capture),
    Rule(_named("tempfile", "_TemporaryFileWrapper"), temporaries.capture_file),
    Rule(_named("concurrent.futures._base", "Future"), files.capture_future),
    Rule(_is_queue, files.capture_queue),
    Rule(elsewhere.leads_elsewhere, elsewhere.capture, is_left_alone=True),
    Rule(lambda kind: kind.__module__ in _QUEUES, objects.Owned.capture, is_left_alone=True),
    # torch
    Rule(_torch_is("Tensor", "nn.Parameter"), tensors.Tensor.capture),
    Rule(_is_dtensor, tensors.DTensor.capture),
    Rule(_torch_extends("Tensor"), tensors.capture_subclass),
    Rule(_torch_is("Generator"), randoms.Random.capture),
    Rule(_torch_extends("Stream"), objects.capture_stream, is_left_alone=True),
    Rule(
        _torch_is("dtype", "device", "memory_format", "layout"),
        TorchConstant.capture,
        is_constant=True,
    ),
    # Sizes, results of `topk` and the like, packed sequences.
    Rule(_extends(tuple), containers.Tuple.capture),
    Rule(
        _torch_extends("utils.data.dataloader._BaseDataLoaderIter"),
        loaders.LoaderIterator.capture,
    ),
    Rule(tables.is_table, tables.Table.capture),
    Rule(_torch_extends("utils.data.Sampler", "utils.data.Dataset"), loaders.Shallow.capture),
    Rule(_torch_extends("utils.data.DataLoader"), loaders.Loader.capture),
    Rule(_torch_extends("nn.Module"), modules.Module.capture),
    Rule(
        lambda kind: _root(kind) == "torch" and issubclass(kind, _torch_kind("optim.Optimizer")),
        modules.capture_torch_optimizer,
    ),
    Rule(_torch_extends("optim.Optimizer"), modules.capture_optimizer),
    Rule(
        _torch_extends("optim.lr_scheduler.LRScheduler"),
        modules.capture_scheduler,
        is_left_alone=True,
    ),
    Rule(
        lambda kind: kind.__module__.startswith(_PLAIN_TORCH) and is_plain_class(kind),
        objects.Instance.capture,
        is_outsider=True,
    ),
    Rule(
        lambda kind: _root(kind) == "torch" and hasattr(kind, "__next__"),
        objects.capture_unknown,
        is_outsider=True,
    ),
    Rule(lambda kind: _root(kind) == "torch", objects.capture_foreign, is_left_alone=True),
    Rule(_torch_extends("amp.GradScaler"), modules.capture_scaler),
    # NumPy
    Rule(_is_array, tensors.Array.capture),
    Rule(_numpy_is("ufunc"), functions.Ufunc.capture),
    Rule(_numpy_is("memmap"), tensors.capture_mapped),
    Rule(_numpy_is("ma.MaskedArray"), tensors.capture_masked),
    Rule(_numpy_is("random.SeedSequence"), randoms.SeedSequence.capture),
    Rule(_numpy_is("random.Generator", "random.RandomState"), randoms.Random.capture),
    Rule(is_bit_generator, randoms.Random.capture),
    Rule(
        lambda kind: _root(kind) == "numpy" and hasattr(kind, "__next__"),
        objects.capture_unknown,
        is_outsider=True,
    ),
    Rule(lambda kind: _root(kind) == "numpy", objects.capture_foreign, is_left_alone=True),
    # Python
    Rule(_is(deque), containers.Deque.capture),
    Rule(_extends(list), containers.List.capture),
    Rule(_extends(dict), containers.Mapping.capture),
    Rule(lambda kind: kind is frozenset or issubclass(kind, set), containers.Set.capture),
    Rule(_is(bytearray), containers.ByteArray.capture),
    Rule(_is(range), Range.capture, is_born=False, is_constant=True),
    Rule(_is(re.Pattern), Pattern.capture, is_constant=True),
    Rule(
        lambda kind: kind is slice or _root(kind) in _PICKLED_MODULES,
        Pickled.capture,
        is_born=False,
        is_constant=True,
    ),
    Rule(_named("random", "Random"), randoms.Random.capture),
    Rule(lambda kind: _root(kind) in TRACKERS, objects.Owned.capture, is_left_alone=True),
    Rule(
        lambda kind: _is_foreign(kind) and hasattr(kind, "__next__"),
        objects.capture_unknown,
        is_outsider=True,
    ),
    Rule(_is_foreign, objects.capture_foreign, is_left_alone=True),
    Rule(_is(SimpleNamespace), objects.Instance.capture, is_outsider=True),
    Rule(is_plain_class, objects.Instance.capture, is_outsider=True),
    Rule(lambda kind: True, objects.capture_unknown, is_outsider=True),
)


def _first_rule(kind: type) -> Rule:
    return next(rule for rule in _RULES if rule.takes(kind))


rule_of: Callable[[type], Rule] = functools.cache(_first_rule)
"""Returns the rule for the objects of a class; it is found once for each class."""
