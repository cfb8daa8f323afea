"""Puts the tensors of a snapshot back into the live ones: own shard from own vault, the rest from
wherever it is.

Sources of one node are read through the agent's descriptors; what lies on another node is sent by
one holder over the inner backend. Every chunk is hashed before a byte of it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reft import _C
from reft._link import agent_protocol
from reft._state.discovery import State


@dataclass
class RestorePoint:
    """What the job agreed to resume from.

    Attributes:
        own: the rank whose small state and private regions this rank takes (itself, unless its
            vault is lost).
    """

    step: int
    incarnation: int
    node_of_rank: list[int]
    slot_of_rank: dict[int, int]
    donor: dict[int, int]
    holders: dict[str, list[list[int]]]
    rejected: list[str] = field(default_factory=list)

    def sender(self, holder: int, local_world: int) -> int:
        """The rank that reads the vault of `holder` for other nodes: itself, or the first rank of the node that has it."""
        home = self.node_of_rank[holder]
        return holder if holder // local_world == home else home * local_world

    @staticmethod
    def from_agreement(agreement: dict[str, Any]) -> RestorePoint:
        return RestorePoint(
            agreement["step"],
            agreement["incarnation"],
            agreement["node_of_rank"],
            agreement["slot_of_rank"],
            agreement["donor"],
            agreement["holders"],
            agreement["rejected"],
        )


class Mismatch(Exception):
    """The live state does not look like the saved one: names, shapes or types differ."""


@dataclass
class Table:
    """The tensor table of a slot that lies on another node; the attributes are those of ``_C.SlotSource``."""

    regions: list[tuple[str, str, list[int], int, int]]
    groups: list[tuple[str, list[int]]]
    pieces: list[tuple[int, int, int, int, int]]


def vault_of(client: _C.AgentClient, rank: int) -> tuple[str, int]:
    """What the agent says of a rank's vault, and a descriptor of it, -1 if it has none; the caller closes it."""
    return client.request(agent_protocol.VAULT_GET, json.dumps({"rank": rank}), agent_protocol.VAULT_FD)


class Sources:
    """Slots of this node's vaults that hold the agreed step, and tables of others that were sent."""

    def __init__(self, client: Any, point: RestorePoint, rank: int, node: int) -> None:
        self._client, self._point, self._rank, self._node = client, point, rank, node
        self._open: dict[int, Any] = {}
        self.tables: dict[int, Table] = {}

    def table(self, rank: int) -> Any:
        """Regions, groups and pieces of a rank's slot."""
        return self.slot(rank) if self.local(rank) else self.tables[rank]

    def local(self, rank: int) -> bool:
        return self._point.node_of_rank[rank] == self._node

    def slot(self, rank: int) -> Any:
        if rank not in self._open:
            payload, fd = vault_of(self._client, rank)
            if fd < 0:
                raise _C.Unavailable(f"the agent has no vault of rank {rank}: {payload!r}")
            try:
                self._open[rank] = _C.SlotSource(
                    fd, self._point.slot_of_rank[rank], self._point.step, self._point.incarnation
                )
            finally:
                os.close(fd)
        return self._open[rank]


def saved_objects(sources: Sources, point: RestorePoint, rank: int) -> bytes:
    """The small state that this rank resumes with."""
    own = point.donor.get(rank, rank)
    if not sources.local(own):
        raise _C.Unavailable(f"the small state of rank {own} lies on node {point.node_of_rank[own]}, not on this one")
    return bytes(sources.slot(own).objects)


def group_ranks(gid: str) -> list[int]:
    """Members of a sharding group, from its id."""
    return [int(r) for r in gid[1:].split("-")]


def _moves_of(slot: Any, gid: str, shard: int) -> list[tuple[str, int, int, int]]:
    """(region name, begin, end, payload offset) of one shard in a slot; gid "": of its private regions."""
    regions, gids = slot.regions, [g for g, _ in slot.groups]
    found = []
    for index, piece_shard, begin, end, offset in slot.pieces:
        name, _, _, _, group = regions[index]
        if (piece_shard == shard and gids[group] == gid) if group >= 0 else gid == "":
            found.append((name, begin, end, offset))
    return found


class MissingState:
    """Optimizer state that was saved and does not exist yet: an optimizer makes its own at its
    first step, which may come later in the script than the first step of another one, or, for a
    parameter that begins to train in mid-run, later than its own.

    `make` adds it, with values that `restore_regions` overwrites; `unmake` takes it out again.

    Args:
        orders: of each optimizer, the orders of names in the saved state.
    """

    def __init__(self, orders: list[list[tuple[str, ...]]]) -> None:
        self._orders = orders
        self._made: list[tuple[torch.optim.Optimizer, torch.Tensor, str]] = []

    def make(
        self, sources: Sources, point: RestorePoint, state: State, rank: int, strided: dict[str, torch.Tensor]
    ) -> bool:
        """Makes what is missing. Returns whether there was any: the state is to be discovered anew then."""
        there = {region.name for region in state.regions} | set(state.strided)
        for name, dtype, shape, _, _ in sources.table(point.donor.get(rank, rank)).regions:
            if name not in there:
                self._add(state, name, partial(_empty_state, dtype=dtype, shape=shape))
        for name, saved in strided.items():
            if name not in there:
                self._add(state, name, partial(_copy_of, saved))
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

    def _add(self, state: State, name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        matched = _STATE_NAME.fullmatch(name)
        if matched is None or int(matched[1]) >= len(state.optimizers):
            return
        optimizer = state.optimizers[int(matched[1])]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
    """As the optimizer would have it: what a script saves of it is the same then, byte for byte."""
    order = next((names for names in orders if set(names) == set(entries)), ())
    for name in order:
        entries[name] = entries.pop(name)


_STATE_NAME = re.compile(r"o(\d+)\.p(\d+)\.([^\W\d]\w*)")


def _empty_state(parameter: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor | None:
    """A tensor for an optimizer's state of a parameter: laid out like it if it has its shape, as torch's optimizers do it."""
    found = next((d for d in _DTYPES if _C.dtype_name(torch.empty(0, dtype=d)) == dtype), None)
    if found is None:
        return None
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if list(local.shape) == list(shape):
        return torch.zeros_like(parameter, dtype=found, memory_format=torch.preserve_format).detach()
    # Scalars (step counts) stay on the host, as torch's optimizers keep them there.
    return torch.zeros(shape, dtype=found, device=local.device if shape else "cpu")


_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


def check(sources: Sources, point: RestorePoint, state: State, rank: int) -> None:
    """Compares the live tensors with the saved ones; writes nothing.

    Raises:
        Mismatch: names, shapes or types differ; the message names the first.
    """
    live = {region.name: region.current() for region in state.regions}
    saved = sources.table(point.donor.get(rank, rank)).regions
    for name, dtype, shape, nbytes, _ in saved:
        tensor = live.get(name)
        if tensor is None:
            raise Mismatch(f"{name} ({dtype} {list(shape)}) was saved and does not exist now")
        if list(tensor.shape) != list(shape) or tensor.nbytes != nbytes or _C.dtype_name(tensor) != dtype:
            raise Mismatch(f"{name} was {dtype} {list(shape)} and is {_C.dtype_name(tensor)} {list(tensor.shape)} now")
    extra = sorted(set(live) - {row[0] for row in saved})
    if extra:
        raise Mismatch(
            f"{extra[0]} exists now and was not saved" + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
        )


def restore_regions(sources: Sources, point: RestorePoint, state: State, rank: int, local_world: int) -> int:
    """Writes every region of `state`, which `check` has accepted on all ranks. Collective where
    parts lie on other nodes.

    Returns:
        Bytes written.

    Raises:
        Corruption: a chunk's checksum does not match; regions are then partly written and training
            must not go on.
    """
    own = point.donor.get(rank, rank)
    source = sources.table(own)
    live = {region.name: region.current() for region in state.regions}
    saved = source.regions
    moves: dict[int, list[tuple[int, int, torch.Tensor, int]]] = {}
    written = 0
    for index, _, begin, end, offset in source.pieces if sources.local(own) else []:
        name, _, _, _, group = saved[index]
        if group < 0:
            moves.setdefault(own, [])
            moves[own].append((offset, end - begin, live[name], begin))
            written += end - begin
    for gid, _ in source.groups:
        for shard, holders in enumerate(point.holders[gid]):
            near = [holder for holder in holders if sources.local(holder)]
            if near:
                holder = own if own in near else near[shard % len(near)]
                for name, begin, end, offset in _moves_of(sources.slot(holder), gid, shard):
                    moves.setdefault(holder, []).append((offset, end - begin, live[name], begin))
                    written += end - begin
    for holder, wanted in moves.items():
        sources.slot(holder).copy_into(wanted)
    written += _exchange(sources, point, live, rank, local_world)
    for tensor in live.values():
        torch.autograd.graph.increment_version(tensor)
    return written


def _exchange(sources: Sources, point: RestorePoint, live: dict[str, torch.Tensor], rank: int, local_world: int) -> int:
    """Sends shards to ranks whose node has none. All ranks walk one list in the same order, so sends and receives pair up."""
    written = 0
    for receiver in range(len(point.node_of_rank)):
        node = receiver // local_world
        owner = point.donor.get(receiver, receiver)
        if point.node_of_rank[owner] != node:  # a lost rank, or one that lives on another node now
            if rank == point.sender(owner, local_world):
                _send_shard(sources.slot(owner), "", 0, receiver)
            elif rank == receiver:
                written += _receive_shard(live, point.sender(owner, local_world))
        for gid in sorted(point.holders):
            if receiver not in group_ranks(gid):
                continue
            for shard, holders in enumerate(point.holders[gid]):
                if any(point.node_of_rank[holder] == node for holder in holders):
                    continue
                holder = holders[receiver % len(holders)]
                if rank == point.sender(holder, local_world):
                    _send_shard(sources.slot(holder), gid, shard, receiver)
                elif rank == receiver:
                    written += _receive_shard(live, point.sender(holder, local_world))
    return written


def _send_shard(slot: Any, gid: str, shard: int, receiver: int) -> None:
    parts = _moves_of(slot, gid, shard)
    payload = torch.empty(sum(end - begin for _, begin, end, _ in parts), dtype=torch.uint8)
    at, wanted = 0, []
    for _, begin, end, offset in parts:
        wanted.append((offset, end - begin, payload, at))
        at += end - begin
    if wanted:
        slot.copy_into(wanted)
    meta = torch.frombuffer(bytearray(json.dumps([part[:3] for part in parts]).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([meta.numel(), payload.numel()]), receiver)
    dist.send(meta, receiver)
    if payload.numel():
        dist.send(payload, receiver)


def _receive_shard(live: dict[str, torch.Tensor], sender: int) -> int:
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.recv(sizes, sender)
    meta = torch.empty(int(sizes[0]), dtype=torch.uint8)
    dist.recv(meta, sender)
    payload = torch.empty(int(sizes[1]), dtype=torch.uint8)
    if payload.numel():
        dist.recv(payload, sender)
    at = 0
    for name, begin, end in json.loads(bytes(meta.tolist())):
        flat = torch.empty(0, dtype=torch.uint8, device=live[name].device).set_(live[name].detach().untyped_storage())
        start = live[name].storage_offset() * live[name].element_size()
        flat[start + begin : start + end].copy_(payload[at : at + end - begin])
        at += end - begin
    return at
