"""Patches the places in torch that know backends by name, so that they accept backend "reft".

Groups of other backends see no change.

Threads: the training thread. Errors: none; skips places that this torch does not have.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from reft import _C

NAME = "reft"
_WORKERS = "pt_gloo"  # prefix of the names of gloo's threads


def backend_of(group: Any) -> Any:
    """Returns the `ReftBackend` of a process group (None: the default group), or None without one.

    Unwraps it first: torch wraps backends at some debug levels.
    """
    group = group or c10d._get_default_group()
    if not isinstance(group, c10d.ProcessGroup):
        return None
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            continue
        backend = _unwrapped(backend)
        if isinstance(backend, _C.ReftBackend):
            return backend
    return None


def _unwrapped(backend: Any) -> Any:
    wrapper = getattr(c10d, "_ProcessGroupWrapper", None)
    while wrapper is not None and isinstance(backend, wrapper):
        backend = backend.wrapped_pg
    return backend


def _wrap(owner: Any, name: str, make: Callable[[Any], Any], *others: Any) -> None:
    """Replaces `owner.name` once, and in `others` the same object under the same name."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_reft_original"):
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement._reft_original = original
    for place in (owner, *others):
        if getattr(place, name, None) is original:
            setattr(place, name, replacement)


def install() -> None:
    """Replaces the functions. Idempotent."""
    _watch_exit()
    _wrap(c10d, "monitored_barrier", _monitored_barrier, dist)
    _wrap(c10d, "destroy_process_group", _destroy, dist)
    _wrap(c10d, "_set_pg_timeout", _set_pg_timeout, dist)
    _wrap(c10d, "_add_ephemeral_timeout_for_all_pgs", _add_ephemeral_timeout, dist)
    _wrap(c10d.ProcessGroup, "_get_sequence_number_for_group", _sequence_number)
    _wrap(c10d.ProcessGroup, "_set_sequence_number_for_group", _set_sequence_number)
    _wrap(c10d.ProcessGroup, "shutdown", functools.partial(_closing, "shutdown"))
    _wrap(c10d.ProcessGroup, "abort", functools.partial(_closing, "abort"))
    _wrap(torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", _ddp_logging_data)
    with contextlib.suppress(ImportError, AttributeError):
        _patch_all_gather_base()
    with contextlib.suppress(ImportError, AttributeError):
        _patch_gloo_options()


@functools.cache
def _watch_exit() -> None:
    atexit.register(_let_workers_finish)


def _let_workers_finish() -> None:
    """At exit, gives gloo's threads time to release the tensors of finished ops.

    A thread that drops the last reference to a tensor with a Python object takes the GIL. At
    interpreter shutdown, Python terminates such a thread inside a destructor, which aborts the
    process: a successful training run then fails and is restarted. Plain gloo has the same bug if
    something still refers to the group (a device mesh, a reference cycle).
    """
    end, quiet = time.monotonic() + 2, 0
    while quiet < 3 and time.monotonic() < end:
        time.sleep(0.001)  # releases the GIL, so that they can take it
        quiet = (
            0
            if any(_is_runnable(task) for task in Path("/proc/self/task").iterdir())
            else quiet + 1
        )


def _is_runnable(task: Path) -> bool:
    try:
        name, state = (task / "stat").read_text().split(" (", 1)[1].rsplit(") ", 1)
    except (OSError, IndexError, ValueError):
        return False
    return name.startswith(_WORKERS) and state[0] == "R"


def _destroy(original: Any) -> Any:
    def destroy_process_group(group: Any = None) -> None:
        of_default = group is None or group == c10d.GroupMember.WORLD
        original(group)
        if of_default:
            from reft._session import current

            current.on_default_group_gone()

    return destroy_process_group


def _monitored_barrier(original: Any) -> Any:
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        if (
            c10d._rank_not_in_group(group)
            or backend_of(group) is None
            or dist.get_backend(group) != NAME
        ):
            return original(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d.default_pg_timeout
        elif isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        c10d._check_valid_timeout(timeout)
        group = group or c10d._get_default_group()
        return group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(original: Any) -> Any:
    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        backend = None if c10d._rank_not_in_group(group) else backend_of(group)
        if backend is None:
            original(timeout, group)
        else:
            backend._set_default_timeout(timeout)

    return _set_pg_timeout


def _add_ephemeral_timeout(original: Any) -> Any:
    def _add_ephemeral_timeout_for_all_pgs(timeout: timedelta) -> None:
        original(timeout)
        for group in c10d._world.pg_map:
            # In newer torch, the original has already called a virtual method of every backend.
            if (
                not hasattr(c10d.ProcessGroup, "_add_ephemeral_timeout")
                and (backend := backend_of(group)) is not None
            ):
                backend._add_ephemeral_timeout(timeout)

    return _add_ephemeral_timeout_for_all_pgs


def _sequence_number(original: Any) -> Any:
    def _get_sequence_number_for_group(self: Any) -> int:
        backend = backend_of(self)
        return int(original(self) if backend is None else backend._get_sequence_number_for_group())

    return _get_sequence_number_for_group


def _set_sequence_number(original: Any) -> Any:
    def _set_sequence_number_for_group(self: Any) -> None:
        backend = backend_of(self)
        if backend is None:
            original(self)
        else:
            backend._set_sequence_number_for_group()

    return _set_sequence_number_for_group


def _closing(name: str, original: Any) -> Any:
    def close(self: Any) -> None:
        original(self)
        # The debug wrapper of some versions forwards neither shutdown nor abort.
        backend = backend_of(self)
        if backend is not None and not backend.closed:
            getattr(backend, name)()

    return close


def _ddp_logging_data(original: Any) -> Any:
    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        data: dict[str, Any] = original(self)
        # C++ reports every unknown backend as "custom".
        if data.get("backend_name") == "custom" and backend_of(self.process_group) is not None:
            data["backend_name"] = NAME
        return data

    return _get_ddp_logging_data


def _patch_all_gather_base() -> None:
    from torch.distributed.nn import functional

    cls = functional._AllGatherBase
    original = cls.backward
    if hasattr(original, "_reft_original"):
        return

    @functools.wraps(original)
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        if backend_of(ctx.group) is None:
            return original(ctx, grad_output)
        size = dist.get_world_size(group=ctx.group)
        shape = list(grad_output.size())
        if shape[0] % size != 0:
            raise RuntimeError(
                f"Tensor with dimensions: {shape} does not have first dimension divisible by"
                f" world_size: {size}"
            )
        grad_input = torch.empty(
            [shape[0] // size, *shape[1:]], device=grad_output.device, dtype=grad_output.dtype
        )
        dist.reduce_scatter_tensor(
            grad_input, grad_output.contiguous(), dist.ReduceOp.SUM, ctx.group
        )
        return None, grad_input, None

    backward._reft_original = original  # type: ignore[attr-defined]
    cls.backward = staticmethod(backward)


def _patch_gloo_options() -> None:
    """Adds deep copy to gloo's options: split_group() deep-copies those of the parent."""
    options = c10d.ProcessGroupGloo._Options
    if "__deepcopy__" in vars(options):
        return

    def deepcopy(self: Any, _memo: Any) -> Any:
        copy = options()
        for name in ("_timeout", "_threads", "_devices", "group_name", "global_ranks_in_group"):
            with contextlib.suppress(AttributeError):
                setattr(copy, name, getattr(self, name))
        return copy

    options.__deepcopy__ = deepcopy
