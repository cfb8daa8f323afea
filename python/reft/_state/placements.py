"""What the placement of a DTensor says: which ranks have the same part of it, and which part a rank
has.

Threads: the training thread. Errors: `local_part` raises what a mesh does that this rank is not in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from reft import _C


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor whose memory this rank holds, and the ranks that its placement calls equal."""
    if not isinstance(tensor, DTensor):
        return tensor, ()
    mesh = tensor.device_mesh
    ranks = mesh.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(not isinstance(p, (Replicate, Shard)) for p in tensor.placements):
        return tensor._local_tensor, ()
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    members = tuple(sorted(int(r) for r in ranks[index].flatten().tolist()))
    return tensor._local_tensor, members if len(members) > 1 else ()


def equal_on(parameter: Any) -> tuple[int, ...]:
    """The ranks that the placement of a parameter calls equal; none if it has no placement."""
    try:
        return local_part(parameter)[1]
    except Exception:  # noqa: BLE001  # this rank is not in a mesh that was cut
        return ()


def counted_by(parameter: Any) -> tuple[int, ...]:
    """The ranks that count alike what an optimizer counts for a parameter (Adam's steps): those of
    its mesh, which step it together; none if it has no placement."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is None:
        return ()
    return tuple(sorted(int(rank) for rank in parameter.device_mesh.mesh.flatten().tolist()))


def shards_of(tensor: torch.Tensor) -> list[tuple[str, int, int]] | None:
    """Which part of a DTensor this rank has: (placement, number of parts, which one) of each
    dimension of the mesh over which it is divided. None if that cannot be known."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    parts = []
    for i, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) or mesh.size(i) == 1:
            continue
        if not isinstance(placement, Shard):
            return None
        parts.append((repr(placement), mesh.size(i), coordinate[i]))
    return parts


def spec_of(tensor: DTensor) -> tuple[str, list[tuple[str, int]], list[int], list[int]] | None:
    """What a DTensor is made of besides its part, as plain values: its mesh, placements, shape and
    strides. None if a placement is of another kind than `Shard` and `Replicate`."""
    placements = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            placements.append(("shard", placement.dim))
        elif type(placement) is Replicate:
            placements.append(("replicate", 0))
        else:
            return None
    return _mesh_of(tensor), placements, list(tensor.shape), list(tensor.stride())


def made_of(spec: Any, local: torch.Tensor, others: Iterable[torch.Tensor]) -> DTensor | None:
    """A DTensor of a part that this rank has; None without a spec, or if none of `others` has its
    mesh. Shares the part's memory; no rank communicates.

    Args:
        spec: from `spec_of`.
    """
    if spec is None:
        return None
    mesh, placements, shape, stride = spec
    like = next((t for t in others if isinstance(t, DTensor) and _mesh_of(t) == mesh), None)
    if like is None:
        return None
    kinds = [Shard(dim) if kind == "shard" else Replicate() for kind, dim in placements]
    with torch.no_grad():
        made = DTensor.from_local(
            local,
            like.device_mesh,
            kinds,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )
    made._local_tensor = local
    return made


def _mesh_of(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    return f"{mesh.device_type} {mesh.mesh_dim_names} {mesh.mesh.tolist()}"


def rows_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Into how many parts the rows (dim 0) of a DTensor are dealt, and which of them this rank has;
    None if it is not sharded so."""
    coordinate = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else None
    if coordinate is None or not isinstance(tensor, DTensor):
        return None
    found = None
    for i, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if found is not None or type(placement) is not Shard or placement.dim != 0:
            return None
        found = tensor.device_mesh.size(i), coordinate[i]
    return found


def split_shape(tensor: torch.Tensor, local: torch.Tensor) -> list[int] | None:
    """The shape of a tensor whose rows all ranks of the job have in turn, as `torch.chunk` deals
    them; None if it is another.

    Args:
        local: what this rank has of it.
    """
    if not isinstance(tensor, DTensor) or not dist.is_initialized() or 0 in tensor.shape:
        return None
    world, rank = dist.get_world_size(), dist.get_rank()
    if rows_of(tensor) != (world, rank) or tensor.device_mesh.size() != world:
        return None
    rows, *others = tensor.shape
    begin, end = _C.rows_of(rows, world, rank)
    if list(local.shape) != [end - begin, *others] or not local.is_contiguous():
        return None
    return list(tensor.shape)


def role(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of which part of each DTensor this rank has; "" if there are no DTensors. Plain tensors
    are taken for those of the same part of the model.

    It ends with "?" if parts of the job may have other tensors of the same names and shapes (the
    stages of a pipeline), and nothing tells which part this rank is in: no mesh that these tensors
    are on is a part of one of all ranks.

    Args:
        tensors: with their names.
    """
    found, is_known = [], True
    for name, tensor in tensors:
        if not isinstance(tensor, DTensor):
            continue
        outside = _place_outside(tensor.device_mesh)
        is_known = is_known and outside is not None
        found.append((name, list(tensor.shape), shards_of(tensor), outside))
    if not any(parts or outside for _, _, parts, outside in found):
        return ""
    text = repr(sorted(found, key=str))
    return hashlib.sha256(text.encode()).hexdigest()[:32] + ("" if is_known else "?")


def _place_outside(mesh: Any) -> list[tuple[str, int, int]] | None:
    """Where this rank is in the dimensions that a mesh of all ranks has and a part of it has not:
    (name, size, coordinate). None if it is no part of one."""
    if mesh.size() == dist.get_world_size():
        return []
    find = getattr(mesh, "_get_root_mesh", None)
    root = mesh if find is None else find()
    names, own = root.mesh_dim_names, mesh.mesh_dim_names
    if root is mesh or not names or not own or root.size() != dist.get_world_size():
        return None
    coordinate = root.get_coordinate()
    if coordinate is None or not set(own) <= set(names):
        return None
    return [(name, root.size(i), coordinate[i]) for i, name in enumerate(names) if name not in own]
