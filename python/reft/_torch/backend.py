"""Builds the backend "reft" from torch's own backends.

Threads: the training thread. Errors: those of torch's own backends, and `RuntimeError` if a rank
does not join in time. A failure of snapshots or hang detection never prevents a group, unless
REFT_STRICT=1.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from reft import _C, _voice
from reft._link import agreement, settings
from reft._link.secret import Attempt, Refused, Secret, of_rank_0, share
from reft._torch import attempt, patches
from reft._torch.latecomers import Latecomers

# From torch 2.14 on, gloo and NCCL are plugins; for older versions, call their classes directly.
_BUILTIN_PLUGINS = "GLOO" in getattr(c10d.Backend, "_plugins", {})


class _Prefix:
    """Prefix of the store keys of the current default group; other groups use it, too.

    Attributes:
        value: None if the backend of the default group is not "reft".
    """

    value: str | None = None


_prefix = _Prefix()


def create_backend(options: Any, pg_options: Any) -> Any:
    """Creator of the backend "reft".

    Args:
        options: torch's ``_DistributedBackendOptions``; ``global_ranks_in_group`` is empty for the
            default group.
        pg_options: the user's options. Those of NCCL go to NCCL; others have no effect.

    Returns:
        A ``c10d.Backend`` that serves CPU tensors through gloo and, where there is a GPU, CUDA
        tensors through NCCL.
    """
    _once()
    is_default = not options.global_ranks_in_group
    rank, size = options.group_rank, options.group_size
    timeout = _timedelta(options.timeout)
    if is_default:
        _prefix.value = None
    if _prefix.value is None:
        late = _latecomers(rank, size) if is_default else None
        secret, fault = _secret(rank) if is_default else (None, "")
        entered = attempt.agree(options.store, rank, size, timeout, late, secret)
        prefix = entered.prefix
        if is_default:
            _prefix.value = prefix
    else:
        prefix = _prefix.value
    if is_default:
        attempt.withdraw_signals(options.store)
    store = dist.PrefixStore(prefix, options.store)
    cpu = cuda = None
    if c10d.is_gloo_available():
        cpu = _make_gloo(options, pg_options, dist.PrefixStore("cpu", store), timeout)
    if c10d.is_nccl_available() and torch.cuda.is_available():
        _follow_nccl()
        cuda = _make_nccl(options, pg_options, dist.PrefixStore("cuda", store), timeout)
    backend = _C.ReftBackend(
        cpu,
        cuda,
        store,
        prefix,
        str(options.group_id),
        rank,
        size,
        _plain_gloo if cpu is not None else None,
    )
    if is_default:
        _start_session(store, rank, size, replace(entered, fault=fault))
    return backend


def _latecomers(rank: int, size: int) -> Latecomers | None:
    try:
        return Latecomers(rank, size, settings.read()["hang_suspect_sec"])
    except _C.Error:  # of which the session speaks
        return None


def _timedelta(timeout: Any) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))


def _copied(options: Any, store: Any, timeout: timedelta) -> Any:
    """Returns options for one inner backend, without those that split it off an earlier group."""
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
    """Returns the CPU backend of a group that was split off another."""
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo.options.group_name = group
    return gloo


@functools.cache
def _follow_nccl() -> None:
    """Arms reft's profiler plugin, before NCCL's first communicator."""
    try:
        wanted = settings.read()["nccl_profiler"]
    except _C.Error:  # of which the session speaks
        return
    problem = _C.arm_nccl_profiler(wanted == "kernels") if wanted != "off" else ""
    if problem:
        _voice.warn(f"REFT_NCCL_PROFILER={wanted} has no effect: {problem}")


def _make_nccl(options: Any, pg_options: Any, store: Any, timeout: timedelta) -> Any:
    # torch's default timeout is 10 minutes for backend "nccl" and 30 for any other. An explicit 30
    # is indistinguishable from the default.
    if timeout == c10d.default_pg_timeout and isinstance(c10d.default_pg_nccl_timeout, timedelta):
        timeout = c10d.default_pg_nccl_timeout
    nccl_options = pg_options if isinstance(pg_options, c10d.ProcessGroupNCCL.Options) else None
    if _BUILTIN_PLUGINS:
        return c10d.Backend._plugins["NCCL"].creator_fn(
            _copied(options, store, timeout), nccl_options
        )
    if nccl_options is None:
        nccl_options = c10d.ProcessGroupNCCL.Options()
        nccl_options.is_high_priority_stream = False
    nccl_options._timeout = timeout
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    nccl_options.group_name = options.group_id
    nccl = c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, nccl_options)
    nccl._set_sequence_number_for_group()
    return nccl


def _secret(rank: int) -> tuple[Secret | None, str]:
    """Rank 0's, and why it has none."""
    if rank != 0:
        return None, ""
    try:
        return of_rank_0(os.environ), ""
    except Exception as error:
        return None, str(error) or type(error).__name__


def _start_session(store: Any, rank: int, size: int, entered: Attempt) -> None:
    """Starts everything beyond the backend. If that fails, the group still works."""
    try:
        from reft._session import current

        current.on_default_group(share(store, rank, size, entered, os.environ), rank, size)
    except Refused as error:
        if error.store is not None:
            agreement.refuse(error.store, rank, size, str(error))
        if os.environ.get("REFT_STRICT", "0") == "1":
            raise
        if error.to_say:
            _voice.warn(
                f"rank {rank}: training continues without snapshots and hang detection: {error}"
            )
    except Exception as error:
        if os.environ.get("REFT_STRICT", "0") == "1":
            raise
        _voice.warn(
            f"rank {rank}: training continues without snapshots and hang detection: {error}"
        )


@functools.cache
def _once() -> None:
    """Sets up what the first group of this process needs."""
    torch_folder = str(Path(torch.__file__).parent) + "/"
    own_folder = str(Path(__file__).parent) + "/"
    _C.install_call_sites(
        [torch_folder, own_folder, str(contextlib.__file__), str(functools.__file__)]
    )
    # The inner backends already record into torch's flight recorder. Without this, torch's hook
    # would record each op again.
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if (
        recording is not None
        and c10d.Backend.GLOO in recording
        and (not torch.cuda.is_available() or c10d.Backend.NCCL in recording)
    ):
        recording.add(patches.NAME)
    patches.install()
