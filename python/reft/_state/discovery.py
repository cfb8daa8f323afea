"""Finds the training state: parameters, optimizer state, buffers, schedulers, scalers.

Names are positional where the script gives no stable ones (optimizer 0, parameter 12), so that a
restarted script, which builds the same objects in the same order, finds each tensor again.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from reft import _C
from reft._state import registry
from reft._state.constructions import SCHEDULERS, of_process


@dataclass
class Region:
    """One tensor to save.

    Attributes:
        tensor: the local tensor whose bytes are copied; dense.
        owner: the DTensor that `tensor` is the local part of, None for plain tensors.
        place: the module's dict and key that hold the tensor, where a script may put another one
            without the optimizer's knowledge (`self.mean = 0.9 * self.mean + …` replaces a buffer
            in every forward).
        ranks: ranks that should hold equal bytes; empty: private to this rank.
        early: copied before the optimizer step returns (forward may rewrite it, or it was caught
            being rewritten).
    """

    name: str
    tensor: torch.Tensor
    ranks: tuple[int, ...] = ()
    early: bool = False
    owner: DTensor | None = None
    place: tuple[dict[str, Any], str] | None = None

    def current(self) -> torch.Tensor:
        """The tensor to copy now: since it was found, a DTensor may have got another local part, a
        module another tensor."""
        if self.place is not None:
            there = self.place[0].get(self.place[1])
            if isinstance(there, torch.Tensor):
                return there._local_tensor if isinstance(there, DTensor) else there.detach()
        return self.tensor if self.owner is None else self.owner._local_tensor


@dataclass
class State:
    """What was found.

    Attributes:
        strided: tensors that are not dense in memory: saved by value with the small state.
        missed: (what, why) of state that cannot be saved.
    """

    regions: list[Region] = field(default_factory=list)
    strided: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(region.tensor.nbytes for region in self.regions)


_Class = type[Any] | tuple[type[Any], ...]


def live(*classes: _Class) -> list[list[Any]]:
    """Live instances of each class, in no particular order.

    One walk over the collector's heap, some ten milliseconds: for the first step and changed plans
    only.
    """
    found: list[list[Any]] = [[] for _ in classes]
    # By the id of the type: a metaclass may define what hashing and comparing its classes do.
    wanted_by: dict[int, tuple[list[Any], ...]] = {}
    for obj in gc.get_objects():
        # type(), not isinstance(): the latter asks __class__ of proxies, which may warn, compute or
        # raise.
        kind = type(obj)
        lists = wanted_by.get(id(kind))
        if lists is None:
            lists = tuple(
                instances
                for instances, cls in zip(found, classes, strict=True)
                if issubclass(kind, cls)
            )
            wanted_by[id(kind)] = lists
        for instances in lists:
            instances.append(obj)
    return found


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
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


def discover(optimizers: list[Optimizer], extra_modules: Iterable[torch.nn.Module] = ()) -> State:
    """Lists the state around `optimizers`, the outermost ones in the order of their first step."""
    optimizers = with_inner(optimizers)
    state = State(optimizers=list(optimizers))
    seen: dict[tuple[int, int], str] = {}
    parameter_home: dict[int, tuple[int, ...]] = {}  # id(parameter) → ranks of its DDP wrapper
    modules, schedulers, scalers = live(torch.nn.Module, SCHEDULERS, torch.amp.GradScaler)
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and dist.is_initialized():
            try:
                ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
            except (KeyError, ValueError, RuntimeError):
                continue  # of a process group that was destroyed
            for parameter in module.parameters():
                parameter_home[id(parameter)] = ranks if len(ranks) > 1 else ()

    def add(
        name: str,
        tensor: torch.Tensor,
        ranks: tuple[int, ...] = (),
        early: bool = False,
        place: tuple[dict[str, Any], str] | None = None,
    ) -> None:
        local, placed = _local(tensor)
        if (
            local.device.type not in ("cpu", "cuda")
            or local.layout is not torch.strided
            or local.is_quantized
        ):
            state.missed.append(
                (
                    name,
                    f"{local.layout} tensor on {local.device}: only dense CPU and CUDA tensors are"
                    " saved",
                )
            )
            return
        if local.is_cuda and (absent := _C.cuda_absent()):
            state.missed.append((name, f"tensor on {local.device}, but reft has no CUDA: {absent}"))
            return
        if local.numel() == 0:
            return
        key = (local.data_ptr(), local.nbytes)
        if key in seen:
            return  # one memory, two names: tied weights
        if not _C.is_dense(local):
            state.strided[name] = local
            return
        seen[key] = name
        owner = tensor if isinstance(tensor, DTensor) else None
        state.regions.append(Region(name, local, placed or ranks, early, owner, place))

    for k, optimizer in enumerate(optimizers):
        position = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                home = parameter_home.get(id(parameter), ())
                add(f"o{k}.p{position}", parameter, home)
                for key, value in sorted(
                    state_of(optimizer, parameter).items(), key=lambda item: str(item[0])
                ):
                    if isinstance(value, torch.Tensor):
                        add(f"o{k}.p{position}.{key}", value, home)
                position += 1
        for g, group in enumerate(optimizer.param_groups):
            for key, value in sorted(group.items(), key=lambda item: str(item[0])):
                if key != "params" and isinstance(value, torch.Tensor):
                    add(f"o{k}.g{g}.{key}", value, early=True)

    owned = {
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    position_of: dict[int, tuple[int, int]] = {}
    for k, optimizer in enumerate(optimizers):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            position_of.setdefault(id(p), (k, i))
    children = {id(child) for module in modules for child in module.children()}
    roots = [
        m for m in modules if id(m) not in children and any(id(p) in owned for p in m.parameters())
    ]
    roots.sort(
        key=lambda m: (
            min(position_of[id(p)] for p in m.parameters() if id(p) in owned),
            type(m).__qualname__,
        )
    )
    for module in extra_modules:
        if all(module is not root for root in roots) and not any(
            module is part for root in roots for part in root.modules()
        ):
            roots.append(module)
    state.modules = roots
    for j, root in enumerate(roots):
        for fqn, held, key in _held(root, "_buffers"):
            add(f"m{j}.{fqn}", held[key], early=True, place=(held, key))
        for fqn, held, key in _held(root, "_parameters"):
            if id(held[key]) not in owned:
                add(
                    f"m{j}.{fqn}",
                    held[key],
                    parameter_home.get(id(held[key]), ()),
                    place=(held, key),
                )
    for name, obj in registry.objects.items():
        if isinstance(obj, torch.Tensor):
            add(f"r.{name}", obj)
        elif isinstance(obj, torch.nn.Module):
            for fqn, tensor in [*obj.named_parameters(), *obj.named_buffers()]:
                add(f"r.{name}.{fqn}", tensor)
    state.schedulers = of_process.in_order(schedulers, SCHEDULERS)
    state.scalers = of_process.in_order(scalers, torch.amp.GradScaler)
    return state


def _held(root: torch.nn.Module, kind: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(full name, dict that holds it, key) of each buffer or parameter of a module, each once."""
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        held: dict[str, Any] = getattr(module, kind)
        for key, tensor in held.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{key}" if prefix else key, held, key


def state_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[Any, Any]:
    # .get, not []: the state is a defaultdict, and an observer adds nothing to it.
    found = optimizer.state.get(parameter, {})
    return found if isinstance(found, dict) else {}


def _inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers that this one holds as attributes and steps itself: ZeroRedundancyOptimizer, SAM,
    Lookahead."""
    return [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer) and value is not optimizer
    ]


def with_inner(optimizers: list[Optimizer]) -> list[Optimizer]:
    """The optimizers, then those that they hold, each once."""
    found = list(optimizers)
    for optimizer in found:  # which grows
        found += [
            inner
            for inner in _inner_optimizers(optimizer)
            if all(inner is not known for known in found)
        ]
    return found


def signature(optimizer: Optimizer) -> str:
    """Identifies an optimizer in another process of the same script: by its class and the shapes of
    its parameters."""
    shapes = [
        [tuple(parameter.shape) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    kind = type(optimizer)
    return hashlib.blake2b(
        f"{kind.__module__}.{kind.__qualname__} {shapes}".encode(), digest_size=8
    ).hexdigest()


def state_keys(optimizer: Optimizer) -> list[tuple[str, ...]]:
    """The orders in which an optimizer keeps the names of its state; usually one for all
    parameters."""
    found = dict.fromkeys(
        tuple(map(str, entries))
        for entries in optimizer.state.values()
        if isinstance(entries, dict)
    )
    return list(found)


def not_yet_stepped(known: list[Optimizer], wanted: list[str]) -> list[Optimizer]:
    """Optimizers of the script that are not among `known`, one for each signature in `wanted`. The
    list ends before the first that does not exist."""
    if not wanted:
        return []
    taken = set(map(id, with_inner(known)))
    others = [o for o in of_process.in_order(live(Optimizer)[0], Optimizer) if id(o) not in taken]
    found: list[Optimizer] = []
    for text in wanted:
        match = next(
            (o for o in others if all(o is not f for f in found) and signature(o) == text), None
        )
        if match is None:
            break
        found.append(match)
    return found


def fingerprint(optimizers: list[Optimizer]) -> tuple[int, ...]:
    """Changes when optimizers, parameters or state tensors are replaced, added or removed. Cheap:
    every step calls it."""
    items: list[int] = [registry.generation, of_process.count]
    for source in with_inner(optimizers):
        items.append(id(source))
        for group in source.param_groups:
            items.extend(map(id, group["params"]))
        for value in source.state.values():
            if isinstance(value, dict):
                for entry in value.values():
                    if isinstance(entry, torch.Tensor):
                        items.append(id(entry))
    return tuple(items)


def wait_for_devices(state: State) -> None:
    """Waits until every device that holds regions is idle."""
    devices = {region.tensor.get_device() for region in state.regions if region.tensor.is_cuda}
    for index in sorted(devices):
        torch.cuda.synchronize(index)
