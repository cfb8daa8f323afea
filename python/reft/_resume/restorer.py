"""Passes the live tensors to the native restore (snapshot/restore/), which writes a snapshot's
bytes into them.

A rank's own shards come from its own vault; others from other vaults on the node or, over the inner
backend, from other nodes. The restore hashes every chunk that it takes a byte of.

Threads: the training thread. Errors: see `check` and `restore`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from reft import _C
from reft._state.discovery import State


class Mismatch(Exception):
    """The live state does not match the saved state: names, shapes or types differ."""


def check(restorer: _C.Restorer, state: State) -> None:
    """Compares the live tensors with the saved ones; writes nothing.

    Raises:
        Mismatch: names, shapes, types or layouts differ; the message names the first.
    """
    if difference := restorer.difference(_live(state)):
        raise Mismatch(difference)
    saved = {name: strides for name, _, _, strides in restorer.regions}
    for name, tensor in _live(state):
        if strides_of(tensor) != saved[name]:
            was, now = saved[name] or "none", strides_of(tensor) or "none"
            raise Mismatch(
                f"{name} had strides {was} and has {now} now (none: row by row), in memory that it"
                " shares with others"
            )


def restore(restorer: _C.Restorer, state: State, nodes: int) -> int:
    """Writes every region of `state`, which `check` has accepted on all ranks. Collective if parts
    are on other nodes.

    Args:
        nodes: number of nodes of the job.

    Returns:
        Bytes written.

    Raises:
        Corruption: a chunk's checksum does not match; regions are then partly written, and training
            must not continue.
    """
    live = _live(state)
    written = restorer.restore(live, _host_backend() if nodes > 1 else None)
    for _, tensor in live:
        torch.autograd.graph.increment_version(tensor)
    return written


def compare(restorer: _C.Restorer, rank: int, state: State) -> tuple[int, int, list[Any]]:
    """Compares the live tensors with what the vault of `rank`, on this node, holds of them.

    Returns:
        Bytes compared; bytes that could not be, because they are damaged or have no counterpart;
        (region, first byte that differs, where the sample begins, sample of the saved bytes,
        whether these are certainly the bytes of the program point) of each piece that differs.
    """
    return restorer.compare(rank, _live(state))


def compare_unfinished(
    unfinished: _C.UnfinishedStep, state: State
) -> tuple[int, int, list[Any]]:
    """As `compare`, with a step that was not copied to its end: the rest counts as left out."""
    return unfinished.compare(_live(state))


def strides_of(tensor: torch.Tensor) -> list[int]:
    """As the tensor table has them: empty for a tensor that lies row by row."""
    return [] if tensor.is_contiguous() else list(tensor.stride())


def _live(state: State) -> list[tuple[str, torch.Tensor]]:
    return [(region.name, region.current()) for region in state.regions]


def _host_backend() -> Any:
    """Returns the backend that moves host memory between ranks: gloo, without the op log."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    return backend.inner("cpu") if isinstance(backend, _C.ReftBackend) else backend
