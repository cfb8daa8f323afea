"""Passes the live tensors to the native restore (snapshot/restore/), which writes a snapshot's
bytes into them.

A rank's own shards come from its own vault; others from other vaults on the node or, over the inner
backend, from other nodes. The restore hashes every chunk before it uses a byte of it.

Threads: the training thread. Errors: see `check` and `restore`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reft import _C
from reft._state.discovery import State


class Mismatch(Exception):
    """The live state does not match the saved state: names, shapes or types differ."""


class MissingState:
    """Saved optimizer state that does not exist yet.

    An optimizer creates its state at its first step, which may come after the first step of another
    optimizer. For a parameter that starts to train mid-run, it creates the state even later.

    `make` adds the state, with values that `restore` overwrites; `unmake` removes it.

    Args:
        orders: for each optimizer, the orders of names in the saved state.
    """

    def __init__(self, orders: list[list[tuple[str, ...]]]) -> None:
        self._orders = orders
        self._made: list[tuple[torch.optim.Optimizer, torch.Tensor, str]] = []

    def make(
        self,
        saved: list[tuple[str, str, list[int]]],
        state: State,
        strided: dict[str, torch.Tensor],
    ) -> bool:
        """Adds the missing state.

        Args:
            saved: regions of the snapshot: name, dtype, shape.
            strided: tensors of the snapshot that are not regions.

        Returns:
            Whether any state was missing; if so, the caller must discover the state again.
        """
        there = {region.name for region in state.regions} | set(state.strided)
        for name, dtype, shape in saved:
            if name not in there:
                self._add(state, name, partial(_empty_state, dtype=dtype, shape=shape))
        for name, tensor in strided.items():
            if name not in there:
                self._add(state, name, partial(_copy_of, tensor))
        for optimizer, orders in zip(state.optimizers, self._orders, strict=False):
            for made_by, parameter, _ in self._made:
                if made_by is optimizer:
                    _put_in_order(optimizer.state[parameter], orders)
        return bool(self._made)

    def unmake(self) -> None:
        for optimizer, parameter, key in self._made:
            entries = optimizer.state[parameter]
            entries.pop(key, None)
            if not entries:
                optimizer.state.pop(parameter)
        self._made = []

    def _add(
        self, state: State, name: str, make: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        matched = _STATE_NAME.fullmatch(name)
        if matched is None or int(matched[1]) >= len(state.optimizers):
            return
        optimizer = state.optimizers[int(matched[1])]
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if int(matched[2]) >= len(parameters):
            return
        parameter = parameters[int(matched[2])]
        tensor = make(parameter)
        if tensor is not None:
            optimizer.state[parameter][matched[3]] = tensor
            self._made.append((optimizer, parameter, matched[3]))


def _copy_of(saved: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return saved.clone()


def _put_in_order(entries: dict[str, Any], orders: list[tuple[str, ...]]) -> None:
    """Orders entries as the optimizer does, so that a script's own checkpoint is byte-identical."""
    order = next((names for names in orders if set(names) == set(entries)), ())
    for name in order:
        entries[name] = entries.pop(name)


_STATE_NAME = re.compile(r"o(\d+)\.p(\d+)\.([^\W\d]\w*)")


def _empty_state(parameter: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor | None:
    """Returns a tensor for an optimizer's state of a parameter, None if the dtype is unknown.

    If it has the parameter's shape, it gets the parameter's layout, as in torch's optimizers.
    """
    found = next((d for d in _DTYPES if _C.dtype_name(torch.empty(0, dtype=d)) == dtype), None)
    if found is None:
        return None
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if list(local.shape) == list(shape):
        return torch.zeros_like(
            parameter, dtype=found, memory_format=torch.preserve_format
        ).detach()
    # Scalars (step counts) stay on the host, as in torch's optimizers.
    return torch.zeros(shape, dtype=found, device=local.device if shape else "cpu")


_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


def check(restorer: _C.Restorer, state: State) -> None:
    """Compares the live tensors with the saved ones; writes nothing.

    Raises:
        Mismatch: names, shapes or types differ; the message names the first.
    """
    if difference := restorer.difference(_live(state)):
        raise Mismatch(difference)


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
        (region, first byte that differs, where the sample begins, sample of the saved bytes) of
        each piece that differs.
    """
    return restorer.compare(rank, _live(state))


def compare_unfinished(
    unfinished: _C.UnfinishedStep, state: State
) -> tuple[int, int, list[Any]]:
    """As `compare`, with a step that was not copied to its end: the rest counts as left out."""
    return unfinished.compare(_live(state))


def _live(state: State) -> list[tuple[str, torch.Tensor]]:
    return [(region.name, region.current()) for region in state.regions]


def _host_backend() -> Any:
    """Returns the backend that moves host memory between ranks: gloo, without the op log."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    return backend.inner("cpu") if isinstance(backend, _C.ReftBackend) else backend
