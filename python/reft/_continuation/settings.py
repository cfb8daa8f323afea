"""Settings of the whole process that a script may change in mid-run: default dtype and device,
precision, determinism, autocast, threads, kernels that torch may use, denormals, what torch checks
and prints, errors and printing of NumPy, digits of decimal, environment variables, working
directory, limits of Python, garbage collection. Handlers of signals are only named.

Only what has changed since the first program point is captured, so that a restarted script's own
beginning counts otherwise.

Threads: the training thread (grad mode and autocast belong to it). Errors: none; a torch without a
    setting is without it here.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from . import collector

Problem = tuple[str, str, str]  # (where, type, reason)
_Setting = tuple[str, Callable[[], Any], Callable[[Any], None]]
_ENVIRONMENT = "environment"
_LATER = "set after the first step"
_OF_MATMUL = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_OF_PRINTING = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
_TINY, _ONE = 1e-310, 1.0  # a denormal, and itself times this
_DIRECTORY, _DEVICE = "working directory", "default device"
# `signal.getsignal` makes an enumeration's member of each answer.
_handler_of = getattr(sys.modules["_signal"], "getsignal")  # noqa: B009
_SIGNALS = sorted(signal.valid_signals())
# What launchers set, and what leads to processes and ports: another value in each attempt.
_OF_AN_ATTEMPT = re.compile(
    rb"(TORCHELASTIC|MASTER|GROUP|ROLE|SLURM|WANDB)_|.*_(SERVICE|PID|PORT|SOCKET|ADDR|ADDRESS|URL)$"
)


class Settings:
    """Follows how the settings of this process have changed since the first program point."""

    def __init__(self) -> None:
        self._known: list[_Setting] | None = None
        self._at_first: dict[str, Any] = {}
        self._variables: dict[Any, Any] = {}
        self._handlers: list[Any] = []

    def note_first(self) -> None:
        """Notes how they stand at the first program point."""
        self._at_first = {}
        for name, get, _ in self._found():
            try:
                self._at_first[name] = get()
            except Exception:  # noqa: BLE001  # one of two names of a precision
                continue
        self._variables = dict(_variables())
        self._handlers = _handlers()

    def capture(self, lost: Callable[[str, str, str], object], alone: bool) -> dict[str, Any]:
        """Returns those that have changed since `note_first`, as plain values by name.

        Args:
            lost: Called with (name, type, reason) of one that has changed and is not captured.
            alone: No other thread of the script runs.
        """
        first = self._at_first
        if not first:
            return {}
        self._name_handlers(lost)
        changed: dict[str, Any] = {}
        for name, get, _ in self._found():
            try:
                value = get()
            except Exception:  # one of two names of a precision, once the script has used the other
                continue
            if name in first and value != first[name]:
                changed[name] = value
        if not alone and _DIRECTORY in changed:
            del changed[_DIRECTORY]
            lost(_DIRECTORY, "str", "another thread of the script runs, which may change it back")
        now = _variables()
        if self._variables and now and now != self._variables:
            changed[_ENVIRONMENT] = _differences(self._variables, now)
        return changed

    def _name_handlers(self, lost: Callable[[str, str, str], object]) -> None:
        now = _handlers()
        if now != self._handlers:
            for number, first, handler in zip(_SIGNALS, self._handlers, now, strict=True):
                if handler != first:
                    lost(f"handler of {_name_of_signal(number)}", type(handler).__name__, _LATER)

    def restore(self, captured: dict[str, Any], foreign: bool = False) -> list[Problem]:
        """Sets what `capture` returned, in another rank if `foreign`: its environment, directory
        and device are not this one's.

        Returns:
            What was not set: a directory that is gone, or another rank's.
        """
        problems = []
        for name, get, put in self._found():
            if name not in captured:
                # As at first, which it need not be in this process any more.
                if name != _DIRECTORY and name in self._at_first:
                    _put(get, put, self._at_first[name])
                continue
            if foreign and name in (_DIRECTORY, _DEVICE):
                problems.append((name, "str", "known of another rank only"))
                continue
            try:
                if get() != captured[name]:
                    put(captured[name])
            except Exception as error:  # the others are still worth having
                problems.append((name, type(error).__name__, str(error)))
        environment = {} if foreign else captured.get(_ENVIRONMENT, {})
        if self._variables and _variables() and not foreign:
            back = _differences(_variables(), self._variables)
            environment = {**back, **environment}
        for variable, text in environment.items():
            if text is None:
                os.environb.pop(variable, None)
            else:
                os.environb[variable] = text
        return problems

    def _found(self) -> list[_Setting]:
        if self._known is None:
            torch: Any = sys.modules.get("torch")
            is_there = torch is not None and hasattr(torch, "get_default_dtype")
            parts = (_of_torch, _of_kernels, _of_debugging) if is_there else ()
            found = [setting for part in parts for setting in part(torch)]
            found += [*_of_numbers(), *_OF_PROCESS]
            self._known = list(filter(_is_readable, found))
        return self._known


def _put(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> None:
    """Sets what is another one; a name that cannot be read is left alone."""
    try:
        if get() != value:
            put(value)
    except Exception:  # noqa: BLE001  # one of two names of a precision
        pass


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {int(number)}"


def _handlers() -> list[Any]:
    return [_handler_of(number) for number in _SIGNALS]


def _variables() -> dict[Any, Any]:
    """The environment as `os.environ` keeps it (a comparison of it takes 2 us, one of `os.environ`
    100); empty if the script has put something else in its place."""
    variables: dict[Any, Any] = getattr(os.environ, "_data", {})
    return variables


def _differences(first: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    """The variables that have another value now; None: it is gone."""
    return {
        name: now.get(name)
        for name in {**first, **now}
        if now.get(name) != first.get(name) and not _OF_AN_ATTEMPT.match(name)
    }


def _of_torch(torch: Any) -> list[_Setting]:
    found: list[_Setting] = [
        _dtype_setting(torch, "default dtype", torch.get_default_dtype, torch.set_default_dtype),
        (
            "matmul precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (
            "deterministic",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
        ),
    ]
    for device in ("cpu", "cuda"):
        get, put = (
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
        found.append(_dtype_setting(torch, f"autocast dtype on {device}", get, put))
        get, put = (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        found.append((f"autocast on {device}", get, put))
    found.append(("threads", torch.get_num_threads, torch.set_num_threads))
    # `torch.get_default_device` names a device with an index where the script gave none.
    context = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    if context is not None:
        found.append((_DEVICE, partial(_default_device, context), torch.set_default_device))
    return found


def _of_kernels(torch: Any) -> list[_Setting]:
    """Which kernels torch may use: they round differently."""
    cudnn, cuda, mkldnn = torch.backends.cudnn, torch.backends.cuda, torch.backends.mkldnn
    found: list[_Setting] = [
        (f"cudnn.{name}", partial(getattr, cudnn, name), partial(setattr, cudnn, name))
        for name in ("benchmark", "deterministic", "enabled", "allow_tf32")
    ]
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        get, put = getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")
        found.append((f"{name} attention", get, put))
    found.append(("mkldnn", lambda: mkldnn.enabled, mkldnn.set_flags))
    found += _attributes(torch, "backends.cuda.matmul", _OF_MATMUL)
    found += _attributes(torch, "backends.opt_einsum", ("enabled", "strategy"))
    found += _attributes(torch, "backends.quantized", ("engine",))
    found += _of_pairs(torch, "backends.mha", "get_fastpath_enabled", "set_fastpath_enabled")
    found.append(("flush denormals", _flushes_denormals, torch.set_flush_denormal))
    return found


def _of_debugging(torch: Any) -> list[_Setting]:
    """What torch checks, fills, converts and prints."""
    invariants = _find(torch, "sparse.check_sparse_tensor_invariants")
    found = [
        *_attributes(torch, "utils.deterministic", ("fill_uninitialized_memory",)),
        *_attributes(torch, "_tensor_str.PRINT_OPTS", _OF_PRINTING),
        *_of_pairs(torch, "_C", "_is_multithreading_enabled", "_set_multithreading_enabled"),
        ("warn always", torch.is_warn_always_enabled, torch.set_warn_always),
    ]
    for name in ("overwrite", "swap"):
        ends = f"{name}_module_params_on_conversion"
        found += _of_pairs(torch, "__future__", f"get_{ends}", f"set_{ends}")
    if invariants is not None:
        found.append(
            (
                "invariants of sparse tensors",
                invariants.is_enabled,
                lambda on: (invariants.enable if on else invariants.disable)(),
            )
        )
    return found


def _find(torch: Any, path: str) -> Any:
    """What names in torch lead to; None if a release has no such thing."""
    return functools.reduce(lambda owner, name: getattr(owner, name, None), path.split("."), torch)


def _attributes(torch: Any, path: str, names: tuple[str, ...]) -> list[_Setting]:
    owner = _find(torch, path)
    return [
        (f"{path}.{name}", partial(getattr, owner, name), partial(setattr, owner, name))
        for name in names
        if owner is not None
    ]


def _of_pairs(torch: Any, path: str, get: str, put: str) -> list[_Setting]:
    """A setting that two functions read and write."""
    owner = _find(torch, path)
    pair = getattr(owner, get, None), getattr(owner, put, None)
    return [] if None in pair else [(f"{path}.{put}", *pair)]  # type: ignore[list-item]


def _flushes_denormals() -> bool:
    """The processor rounds tiny numbers of this thread to zero: Python's, too."""
    return _TINY * _ONE == 0.0


def _of_numbers() -> list[_Setting]:
    found: list[_Setting] = []
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found.append(("errors of NumPy", numpy.geterr, lambda how: numpy.seterr(**how)))
        get, put = numpy.get_printoptions, numpy.set_printoptions
        found.append(("printing of NumPy", get, lambda how: put(**how)))
    decimal: Any = sys.modules.get("decimal")
    if decimal is not None:
        for name in ("prec", "rounding"):
            get = partial(_of_context, decimal, name)
            found.append((f"decimal {name}", get, partial(_to_context, decimal, name)))
    return found


def _directory() -> str:
    """The working directory; "" if it is gone, which nothing can change to."""
    try:
        return os.getcwd()
    except OSError:
        return ""


_OF_PROCESS: list[_Setting] = [
    ("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    ("digits of int", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    ("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ("threshold of gc", gc.get_threshold, lambda numbers: gc.set_threshold(*numbers)),
    ("gc", lambda: collector.off.is_ours or gc.isenabled(), collector.off.set),
    (_DIRECTORY, _directory, os.chdir),
]


def _of_context(decimal: Any, name: str) -> Any:
    return getattr(decimal.getcontext(), name)


def _to_context(decimal: Any, name: str, value: Any) -> None:
    setattr(decimal.getcontext(), name, value)


def _is_readable(setting: _Setting) -> bool:
    """Whether it can be asked for here. Old and new names of precisions exclude each other."""
    try:
        setting[1]()
        return True
    except Exception:  # noqa: BLE001  # a release of torch without it
        return False


def _dtype_setting(
    torch: Any, name: str, get: Callable[[], Any], put: Callable[[Any], Any]
) -> _Setting:
    """A setting that is a dtype, by the dtype's name."""
    return name, lambda: _name_of(get()), lambda dtype: put(getattr(torch, dtype))


@functools.cache  # asked for at each step
def _name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def _default_device(context: Any) -> str | None:
    """What `torch.set_default_device` was given; None: nothing."""
    mode = getattr(context, "device_context", None)
    return None if mode is None else str(mode.device)
