"""Builds the backend "reft" out of torch's own, and mends the places in torch that know backends by
name.

Threads: the training thread. Errors: what torch's own backends raise; a failure of the rest of reft
never prevents a group, unless REFT_STRICT=1.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from reft import _C, _voice

_NAME = "reft"
# torch 2.14 made gloo and NCCL plugins like any other; before that the classes are called directly.
_BUILTIN_PLUGINS = "GLOO" in getattr(c10d.Backend, "_plugins", {})

_attempt_prefix: str | None = None  # of the store keys of the present default group; None: it is not ours


def create_backend(options: Any, pg_options: Any) -> Any:
    """Creator of the backend "reft".

    Args:
        options: torch's ``_DistributedBackendOptions``; ``global_ranks_in_group`` is empty for the
            default group.
        pg_options: the user's; options of NCCL go to NCCL, those of gloo to gloo.

    Returns:
        A ``c10d.Backend`` that serves CPU tensors through gloo and, where there is a GPU, CUDA
        tensors through NCCL.
    """
    global _attempt_prefix
    _once()
    is_default = not options.global_ranks_in_group
    rank, size = options.group_rank, options.group_size
    timeout = _timedelta(options.timeout)
    if is_default:
        _attempt_prefix = None
    if _attempt_prefix is None:
        prefix = agree_on_prefix(options.store, rank, size, timeout)
        if is_default:
            _attempt_prefix = prefix
    else:
        prefix = _attempt_prefix
    if is_default:
        _withdraw_signals(options.store)
    store = dist.PrefixStore(prefix, options.store)
    cpu = cuda = None
    if c10d.is_gloo_available():
        cpu = _make_gloo(options, pg_options, dist.PrefixStore("cpu", store), timeout)
    if c10d.is_nccl_available() and torch.cuda.is_available():
        cuda = _make_nccl(options, pg_options, dist.PrefixStore("cuda", store), timeout)
    backend = _C.ReftBackend(
        cpu, cuda, store, prefix, str(options.group_id), rank, size, _plain_gloo if cpu is not None else None
    )
    if is_default:
        _start_session(store, rank, size)
    return backend


def agree_on_prefix(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Agrees on a key prefix that no earlier attempt of the job has used.

    torchrun keeps one store over restarts, with the addresses of dead ranks in it, and its restart
    count is neither equal on all nodes nor changed by every restart (elastic membership). So rank 0
    makes up a number, and hands it to each rank in answer to a number of that rank's own: an answer
    to a dead rank's number is not taken for one's own.

    Raises:
        RuntimeError: some rank did not come before the timeout.
    """
    if size == 1:
        return f"reft/{secrets.token_hex(8)}/"
    keys = dist.PrefixStore("reft/agree", store)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        own = secrets.token_hex(8)
        keys.set(f"ask/{rank}", own)
        pause = 0.001
        while True:
            if keys.check([f"answer/{rank}"]):
                asked, _, number = bytes(keys.get(f"answer/{rank}")).decode().partition(" ")
                if asked == own:
                    keys.add(f"taken/{number}", 1)
                    return f"reft/{number}/"
            _pause(deadline, pause, "rank 0 does not answer")
            pause = min(pause * 1.5, 0.05)
    number = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    pause = 0.001
    while keys.add(f"taken/{number}", 0) < size - 1:
        for other in range(1, size):
            # Asked again and again: what was read may have been left by a dead rank.
            if keys.check([f"ask/{other}"]):
                question = bytes(keys.get(f"ask/{other}"))
                if answered.get(other) != question:
                    keys.set(f"answer/{other}", question.decode() + " " + number)
                    answered[other] = question
                    pause = 0.001
        missing = [other for other in range(1, size) if other not in answered]
        _pause(deadline, pause, f"ranks {missing} did not come" if missing else "some ranks did not take the answer")
        pause = min(pause * 1.5, 0.05)
    return f"reft/{number}/"


def _pause(deadline: float, seconds: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"backend reft: {what} before the timeout of the process group; is every rank running, and with the same REFT_DISABLE?"
        )
    time.sleep(seconds)


def _withdraw_signals(store: Any) -> None:
    """Deletes what the watchdogs of an earlier attempt have left in the launcher's store, before
    this attempt's look there.

    ProcessGroupNCCL tells all ranks of a failure under one key past every prefix, so torchrun's
    store still has it after the
    restart: each rank would dump its flight recorder and end 8 minutes later
        (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC), whatever it does.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for key in ("exception_dump", "remote_error"):
        with contextlib.suppress(RuntimeError):  # of a store that cannot delete
            store.delete_key(key)


def _timedelta(timeout: Any) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))


def _copied(options: Any, store: Any, timeout: timedelta) -> Any:
    """Options for one inner backend; nothing of an earlier group is split for it."""
    copy = c10d._DistributedBackendOptions()
    for name in (
        "group_rank",
        "group_size",
        "group_id",
        "global_ranks_in_group",
        "process_group",
        "enable_reconfigure",
    ):
        with contextlib.suppress(AttributeError):
            setattr(copy, name, getattr(options, name))
    copy.store = store
    copy.timeout = timeout
    return copy


def _make_gloo(options: Any, pg_options: Any, store: Any, timeout: timedelta) -> Any:
    if _BUILTIN_PLUGINS:
        return c10d.Backend._plugins["GLOO"].creator_fn(_copied(options, store, timeout), None)
    gloo = c10d.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    gloo._set_sequence_number_for_group()
    return gloo


def _plain_gloo(store: Any, rank: int, size: int, timeout: timedelta, group: str) -> Any:
    """CPU half of a group that was split off another."""
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo.options.group_name = group
    return gloo


def _make_nccl(options: Any, pg_options: Any, store: Any, timeout: timedelta) -> Any:
    # torch gives 10 minutes to a group of name "nccl" and 30 to any other. 30 that were asked for
    # cannot be told from these.
    if timeout == c10d.default_pg_timeout and isinstance(c10d.default_pg_nccl_timeout, timedelta):
        timeout = c10d.default_pg_nccl_timeout
    nccl_options = pg_options if isinstance(pg_options, c10d.ProcessGroupNCCL.Options) else None
    if _BUILTIN_PLUGINS:
        return c10d.Backend._plugins["NCCL"].creator_fn(_copied(options, store, timeout), nccl_options)
    if nccl_options is None:
        nccl_options = c10d.ProcessGroupNCCL.Options()
        nccl_options.is_high_priority_stream = False
    nccl_options._timeout = timeout
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    nccl_options.group_name = options.group_id
    nccl = c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, nccl_options)
    nccl._set_sequence_number_for_group()
    return nccl


def _start_session(store: Any, rank: int, size: int) -> None:
    """Everything beyond the backend. Its failure leaves a working group."""
    try:
        from reft._session import current

        current.on_default_group(store, rank, size)
    except Exception as error:
        if os.environ.get("REFT_STRICT", "0") == "1":
            raise
        _voice.warn(
            f"rank {rank}: training continues without snapshots and hang detection: {error}"
        )


@functools.cache
def _once() -> None:
    """First use in this process."""
    torch_folder = str(Path(torch.__file__).parent) + "/"
    own_folder = str(Path(__file__).parent) + "/"
    _C.install_call_sites([torch_folder, own_folder, str(contextlib.__file__), str(functools.__file__)])
    # The inner backends record into torch's flight recorder; a second recording by torch's hook
    # would double it.
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if (
        recording is not None
        and c10d.Backend.GLOO in recording
        and (not torch.cuda.is_available() or c10d.Backend.NCCL in recording)
    ):
        recording.add(_NAME)
    install_patches()


# -- what torch knows by name
# ---------------------------------------------------------------------------------------------------


def backend_of(group: Any) -> Any:
    """The `ReftBackend` of a process group (None: default), behind whatever torch wrapped around it; None if it has none."""
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
    """Replaces `owner.name` once, and the same object wherever `others` have it under that name."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_reft_original"):
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement._reft_original = original
    for place in (owner, *others):
        if getattr(place, name, None) is original:
            setattr(place, name, replacement)


def install_patches() -> None:
    """Makes torch's name and type checks accept groups of backend "reft". Again is harmless; other groups see no change."""
    global _watching_exit
    if not _watching_exit:
        _watching_exit = True
        atexit.register(_let_workers_finish)
    _wrap(c10d, "monitored_barrier", _monitored_barrier, dist)
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


_WORKERS = "pt_gloo"  # how the names of gloo's threads begin
_watching_exit = False


def _let_workers_finish() -> None:
    """At exit, gives gloo's threads time to let go of the tensors of finished ops. Nothing runs
    after it that they could need.

    A thread that drops the last reference to a tensor which Python has seen takes the GIL. When the
    interpreter is ending, Python ends such a thread in the midst of a destructor, and that aborts
    the process: training that has succeeded then fails, and is restarted. Plain gloo has the same
    fault if something still refers to the group (a device mesh, a cycle).
    """
    end, quiet = time.monotonic() + 2, 0
    while quiet < 3 and time.monotonic() < end:
        time.sleep(0.001)  # without the GIL: now they can have it
        quiet = 0 if any(_is_runnable(task) for task in Path("/proc/self/task").iterdir()) else quiet + 1


def _is_runnable(task: Path) -> bool:
    try:
        name, state = (task / "stat").read_text().split(" (", 1)[1].rsplit(") ", 1)
    except (OSError, IndexError, ValueError):
        return False
    return name.startswith(_WORKERS) and state[0] == "R"


def _monitored_barrier(original: Any) -> Any:
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if c10d._rank_not_in_group(group) or backend_of(group) is None or dist.get_backend(group) != _NAME:
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
            # Newer torch calls a virtual of every backend, which the original has just done.
            if not hasattr(c10d.ProcessGroup, "_add_ephemeral_timeout") and (backend := backend_of(group)) is not None:
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
        # C++ calls every backend that it does not know "custom".
        if data.get("backend_name") == "custom" and backend_of(self.process_group) is not None:
            data["backend_name"] = _NAME
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
                f"Tensor with dimensions: {shape} does not have first dimension divisible by world_size: {size}"
            )
        grad_input = torch.empty([shape[0] // size, *shape[1:]], device=grad_output.device, dtype=grad_output.dtype)
        dist.reduce_scatter_tensor(grad_input, grad_output.contiguous(), dist.ReduceOp.SUM, ctx.group)
        return None, grad_input, None

    backward._reft_original = original  # type: ignore[attr-defined]
    cls.backward = staticmethod(backward)


def _patch_gloo_options() -> None:
    """split_group() copies the parent's options deeply; those of gloo do not know how."""
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
