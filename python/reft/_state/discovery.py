"""Finds the training state: parameters, optimizer state, buffers, schedulers, scalers.

Tensors are called by what a restarted script finds again: parameters and buffers by their place in
a module (`m0.encoder.weight`), state by its optimizer and parameter
(`o0[m0.encoder.weight].exp_avg`). Only a parameter that no module has is called by its position in
the optimizer (`o0.p3`), which means another one where a script collects parameters over a set.

Every tensor and every module is looked at on its own: what cannot be saved is named, and costs the
others nothing.

Threads: the training thread. Errors: none of its own; `State.missed` names what cannot be saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reft import _C
from reft._state import gradients, heap, naming, recomputed, registry
from reft._state.constructions import SCHEDULERS, of_process
from reft._state.contents import Place, below, tensors_in
from reft._state.optimizers import note_first_tensors, parameter_shape, with_inner
from reft._state.placements import counted_by, equal_on, local_part, role, rows_of, split_shape

# What torch's optimizers count for each parameter, from the settings and the steps alone.
_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})
_OF_OPTIMIZER = re.compile(r"o\d+[.\[]")


@dataclass
class Region:
    """One tensor to save.

    Attributes:
        tensor: the local tensor whose bytes are copied; dense.
        owner: the DTensor that `tensor` is the local part of, None for plain tensors.
        place: the container and key that hold the tensor, where a script or an optimizer may put
            another one (`self.mean = 0.9 * self.mean + …` replaces a buffer in every forward).
        ranks: ranks that should hold equal bytes; empty: private to this rank.
        early: copied before the optimizer step returns (forward may rewrite it, or it was caught
            being rewritten).
        is_replaceable: a buffer, or a hyperparameter of an optimizer: if this rank is lost, another
            rank's value may stand in.
    """

    name: str
    tensor: torch.Tensor
    ranks: tuple[int, ...] = ()
    early: bool = False
    owner: DTensor | None = None
    place: Place | None = None
    is_replaceable: bool = False

    def current(self) -> torch.Tensor:
        """The tensor to copy now: since it was found, a DTensor may have got another local part, a
        module or an optimizer another tensor."""
        if self.place is not None:
            there = _standing(self.place)
            if isinstance(there, torch.Tensor):
                self.tensor = there._local_tensor if isinstance(there, DTensor) else there
            return self.tensor
        return self.tensor if self.owner is None else self.owner._local_tensor


@dataclass
class Alias:
    """A tensor that begins where a region begins, and is saved with it: tied weights."""

    name: str
    region: str
    tensor: torch.Tensor
    place: Place | None = None

    def current(self) -> torch.Tensor:
        """As Region's."""
        there = self.tensor if self.place is None else _standing(self.place)
        return there if isinstance(there, torch.Tensor) else self.tensor


@dataclass
class State:
    """What was found.

    Attributes:
        strided: tensors that are not dense in memory: saved by value with the small state.
        aliases: further names of regions.
        parameters: of the optimizers, by name.
        empty: places of buffers that are None, by name.
        missed: (what, why) of state that cannot be saved.
        replaceable: names of buffers and hyperparameters (`Region.is_replaceable`), also of those
            that are no regions.
        splits: (name of the dtype, bytes of an item, shape of all ranks' rows together), by name, of
            tensors whose rows of dim 0 all ranks of the job have in turn, as `torch.chunk` deals
            them. Those of which this rank has rows are regions.
    """

    regions: list[Region] = field(default_factory=list)
    strided: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: list[Alias] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    empty: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)
    replaceable: set[str] = field(default_factory=set)
    splits: dict[str, tuple[str, int, list[int]]] = field(default_factory=dict)
    _wrappers: set[str] = field(default_factory=set)
    _ambiguous: set[str] = field(default_factory=set)
    _lazy: list[torch.Tensor] = field(default_factory=list)
    _given_back: list[torch.Tensor] = field(default_factory=list)
    _dicts: list[dict[str, Any]] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _holders: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(region.tensor.nbytes for region in self.regions)

    def saved_names(self) -> set[str]:
        """Names of all tensors that come back."""
        names = {region.name for region in self.regions} | {alias.name for alias in self.aliases}
        names |= self.strided.keys() | self.splits.keys() | self._wrappers
        return names - self._ambiguous

    def has_same_modules(self) -> bool:
        """Whether the modules have the parts, parameters and buffers that were found."""
        return list(map(len, self._dicts)) == self._sizes

    def stands(self) -> bool:
        """Whether tensors that had no memory, or shared it, still do. Cheap: every step calls
        it."""
        if any(held.get(key) is not None for held, key in self.empty.values()):
            return False
        if any(not is_lazy(parameter) for parameter in self._lazy):
            return False
        if any(not _problem(tensor) for tensor in self._given_back):
            return False
        if self.aliases:
            at = {region.name: region.current().data_ptr() for region in self.regions}
            for alias in self.aliases:
                if _address(alias.current()) != at[alias.region]:
                    return False
        return True

    def note_holders(self) -> None:
        """Notes what `follow` compares with."""
        self._holders = _holders_in(self.optimizers)

    def follow(self) -> bool:
        """Whether every place in what optimizers keep is known. The dicts that hold the tensors may
        be other ones since (`optimizer.state.clear()`, `load_state_dict`): then the places are looked
        for in the new ones. Cheap where they are not: every step calls it."""
        holders = _holders_in(self.optimizers)
        if holders == self._holders:
            return True
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        places: dict[str, Place] = {}
        for held in _held_by(self.optimizers, names):
            found_in = tensors_in(held.holder[held.key], held.name, held.place, held.label)
            places.update((found, place) for found, _, place in found_in)
        all_of_them: list[Region | Alias] = [*self.regions, *self.aliases]
        moved = [one for one in all_of_them if _OF_OPTIMIZER.match(one.name)]
        if any(one.place is not None and one.name not in places for one in moved):
            return False
        for one in moved:
            one.place = places.get(one.name)
        self._holders = holders
        return True

    def role(self, names: Collection[str] | None = None) -> str:
        """Which part of the model this rank has (`placements.role`).

        Args:
            names: of parameters that matter; by default all.
        """
        known = self.parameters.items()
        return role((name, one) for name, one in known if names is None or name in names)

    def role_among_some(self) -> str:
        """As `role`, of what some ranks share and others have not."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        return self.role({r.name for r in self.regions if 1 < len(r.ranks) < world})

    def rows(self, names: Collection[str]) -> set[tuple[int, int]]:
        """Into how many parts the rows of parameters are dealt, and which of them this rank has;
        (0, 0) for one that is not dealt so."""
        found = [rows_of(one) for name, one in self.parameters.items() if name in names]
        return {one or (0, 0) for one in found}

    def wait_for_devices(self) -> None:
        """Waits until every device that holds regions is idle."""
        devices = {region.tensor.get_device() for region in self.regions if region.tensor.is_cuda}
        for index in sorted(devices):
            torch.cuda.synchronize(index)

    def note_modules(self) -> None:
        """Notes what `has_same_modules` compares with."""
        self._dicts = [
            held
            for root in self.modules
            for module in root.modules()
            for held in (module._parameters, module._buffers, module._modules)
        ]
        self._sizes = list(map(len, self._dicts))


def _holders_in(optimizers: list[Optimizer]) -> list[int]:
    """The identities of the dicts in which optimizers keep their state and settings."""
    found = []
    for optimizer in optimizers:
        found += [id(optimizer.state), *map(id, optimizer.state.values())]
        found += map(id, optimizer.param_groups)
        found += [id(h[k]) for _, h, k in recomputed.of_process.held_beside(optimizer)]
    return found


@dataclass
class _Held:
    """One entry of what an optimizer keeps.

    Attributes:
        name: of the entry.
        holder: the dict that has it.
        key: its key there.
        parameter: whose state it is; None if it is of none.
        ranks: that have it; None if that is for the parameter to say.
        is_setting: it is of a parameter group.
        label: how a key stands in names.
    """

    name: str
    holder: dict[Any, Any]
    key: Any
    parameter: Any
    ranks: tuple[int, ...] | None
    is_setting: bool
    label: Callable[[Any], str]

    @property
    def place(self) -> Place:
        return self.holder, self.key


def _held_by(optimizers: list[Optimizer], names: dict[int, str]) -> Iterator[_Held]:
    """What optimizers keep, in an order that is the same on all ranks that have it: state of
    parameters in the order of `names`, other state by name, then the parameter groups.

    Args:
        names: of the parameters, by id.
    """

    def label(key: Any) -> str:
        return f"[{names.get(id(key), '?')}]" if isinstance(key, torch.Tensor) else str(key)

    at = {identity: i for i, identity in enumerate(names)}
    numbered = list(enumerate(optimizers))
    # Who keeps tensors gives them their names.
    numbered.sort(key=lambda pair: recomputed.of_process.repeats(pair[1]))
    for k, optimizer in numbered:
        ranks = recomputed.of_process.ranks_of(optimizer) or None
        state = [(key, optimizer.state, key) for key in optimizer.state]
        state += recomputed.of_process.held_beside(optimizer)
        of_parameters = [entry for entry in state if id(entry[0]) in at]
        for key, holder, where in sorted(of_parameters, key=lambda entry: at[id(entry[0])]):
            yield _Held(below(f"o{k}", label(key)), holder, where, key, ranks, False, label)
        others = [entry for entry in state if id(entry[0]) not in at]
        for key, holder, where in sorted(others, key=lambda entry: label(entry[0])):
            yield _Held(below(f"o{k}", label(key)), holder, where, None, (), False, label)
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for key in sorted(group, key=str):
                if key != "params":
                    yield _Held(f"o{k}.g{g}.{key}", group, key, None, (), True, label)


def _standing(place: Place) -> Any:
    container, key = place
    if isinstance(container, dict):
        return container.get(key)  # a defaultdict must not make an entry
    try:
        return container[key]
    except LookupError:
        return None


def _address(tensor: torch.Tensor) -> int:
    return int((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr())


def discover(
    optimizers: list[Optimizer],
    extra_modules: Iterable[torch.nn.Module] = (),
    before: State | None = None,
) -> State:
    """Lists the state around `optimizers`, the outermost ones in the order of their first step.

    Args:
        before: what was found last, if no module, scheduler or scaler has been made since; else
            all objects of the process are looked at.
    """
    optimizers = with_inner(optimizers)
    if before is None:
        modules, schedulers, scalers, others = heap.live(
            torch.nn.Module, SCHEDULERS, torch.amp.GradScaler, Optimizer
        )
        of_process.in_order(others, Optimizer)  # from now on they have keys
        found_schedulers = of_process.in_order(schedulers, SCHEDULERS)
        found_scalers = of_process.in_order(scalers, torch.amp.GradScaler)
        roots = _roots(modules, optimizers, extra_modules)
    else:
        roots = before.modules
        modules = [module for root in roots for module in root.modules()]
        found_schedulers, found_scalers = before.schedulers, before.scalers
    naming.of_process.add(roots)
    found = _Finder(State(optimizers=list(optimizers), modules=roots), modules)
    found.parameters()
    found.buffers()
    found.optimizer_state()
    found.registered()
    note_first_tensors(optimizers)
    state = found.state
    state.schedulers, state.scalers = list(found_schedulers), list(found_scalers)
    for obj in (*found_schedulers, *found_scalers):
        if of_process.is_twin(obj):
            why = (
                "nothing tells it from another one that was made before init_process_group: hold it"
                " in a variable or attribute, or make it later"
            )
            state.missed.append((type(obj).__qualname__, why))
    state.note_modules()
    state.note_holders()
    return state


def _roots(
    modules: list[torch.nn.Module],
    optimizers: list[Optimizer],
    extra_modules: Iterable[torch.nn.Module],
) -> list[torch.nn.Module]:
    """Modules that hold parameters of `optimizers` and are no part of another one, in an order that
    does not depend on that of parameters inside a group, if their classes and shapes tell them
    apart."""
    position_of: dict[int, tuple[int, int]] = {}
    for k, optimizer in enumerate(optimizers):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            position_of.setdefault(id(p), (k, i))
    children: set[int] = set()
    for module in modules:
        children.update(map(id, getattr(module, "_modules", {}).values()))
    found = []
    for module in modules:
        if id(module) in children:
            continue
        try:
            owned = [p for p in module.parameters() if id(p) in position_of]
        except Exception:  # noqa: BLE001, S112  # half made, or not a module in earnest
            continue
        if owned:
            places = [position_of[id(p)] for p in owned]
            shapes = sorted(parameter_shape(p) for p in owned)
            key = (min(places)[0], type(module).__qualname__, str(shapes), min(places))
            found.append((key, module))
    found.sort(key=lambda pair: pair[0])
    roots = [module for _, module in found]
    for module in extra_modules:
        if all(module is not root for root in roots) and not any(
            module is part for root in roots for part in root.modules()
        ):
            roots.append(module)
    return roots


class _Finder:
    """Fills a `State`."""

    def __init__(self, state: State, modules: list[torch.nn.Module]) -> None:
        self.state = state
        self._at: dict[int, Region] = {}  # by address
        self._names: set[str] = set()
        self._names_of: dict[int, str] = {}  # of parameters, by id
        self._found: dict[Any, tuple[int, ...]] = {}
        self._homes: dict[int, tuple[int, ...]] = {}  # id(parameter) → ranks of its DDP wrapper
        if dist.is_initialized():
            for module in modules:
                self._note_home(module)

    def _note_home(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return
        try:
            ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
        except (KeyError, ValueError, RuntimeError):
            return  # of a process group that was destroyed
        for parameter in module.parameters():
            self._homes[id(parameter)] = ranks if len(ranks) > 1 else ()

    def parameters(self) -> None:
        """Those of modules, in the modules' order, then those that only an optimizer has."""
        optimizers = self.state.optimizers
        owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for root in self.state.modules:
            for name, held, key in naming.held(root, "_parameters"):
                parameter = held[key]
                if parameter is None or id(parameter) in self._names_of:
                    continue
                self._names_of[id(parameter)] = name
                is_owned = id(parameter) in owned
                place = None if is_owned else (held, key)
                self._parameter(name, parameter, is_owned, place)
        for k, optimizer in enumerate(optimizers):
            everything = (p for group in optimizer.param_groups for p in group["params"])
            for i, parameter in enumerate(everything):
                if id(parameter) not in self._names_of:
                    self._names_of[id(parameter)] = f"o{k}.p{i}"
                    self._parameter(f"o{k}.p{i}", parameter, True, None)

    def _parameter(
        self, name: str, parameter: torch.Tensor, is_owned: bool, place: Place | None
    ) -> None:
        home = self._homes.get(id(parameter), ())
        if is_owned:
            self.state.parameters[name] = parameter
        self.add(name, parameter, home, place=place)
        if is_owned and gradients.of_process.outlive and parameter.grad is not None:
            self.add(
                f"g[{name}]", parameter.grad, home, True, place=(gradients.Holder(parameter), 0)
            )

    def buffers(self) -> None:
        for root in self.state.modules:
            seen: set[int] = set()
            for name, held, key in naming.held(root, "_buffers"):
                buffer = held[key]
                if buffer is None:
                    self.state.empty[name] = held, key
                elif id(buffer) not in seen:
                    seen.add(id(buffer))
                    self.add(name, buffer, early=True, place=(held, key), is_replaceable=True)

    def optimizer_state(self) -> None:
        for held in _held_by(self.state.optimizers, self._names_of):
            home = self._homes.get(id(held.parameter), ())
            self._contents(held, home if held.ranks is None else held.ranks)

    def _contents(self, held: _Held, ranks: tuple[int, ...]) -> None:
        """Adds the tensors in a part of what an optimizer keeps. What has no placement of its own is
        as equal as the parameter, but what torch's optimizers count (Adam's step) is that of all who
        step it. A number in a parameter group is a hyperparameter, which schedules set on all
        ranks alike."""
        placed = self._found_for(equal_on, held.parameter)
        for name, tensor, place in tensors_in(
            held.holder[held.key], held.name, held.place, held.label
        ):
            claimed = ranks
            if not claimed and not isinstance(tensor, DTensor):
                is_count = tensor.numel() == 1 and place[1] in _COUNTS
                claimed = self._found_for(counted_by, held.parameter) if is_count else placed
            is_replaceable = held.is_setting and tensor.numel() == 1
            self.add(name, tensor, claimed, held.is_setting, place, is_replaceable)

    def _found_for(self, of: Callable[[Any], tuple[int, ...]], parameter: Any) -> tuple[int, ...]:
        """What `of` finds of a parameter, looked for once for each mesh and placement."""
        if not isinstance(parameter, DTensor):
            return of(parameter)
        key = of, id(parameter.device_mesh), parameter.placements
        if key not in self._found:
            self._found[key] = of(parameter)
        return self._found[key]

    def registered(self) -> None:
        for name, obj in registry.objects.items():
            if isinstance(obj, torch.Tensor):
                self.add(f"r.{name}", obj)
            elif isinstance(obj, torch.nn.Module):
                for fqn, tensor in obj.named_parameters():
                    self.add(f"r.{name}.{fqn}", tensor)
                for fqn, tensor in obj.named_buffers():
                    self.add(f"r.{name}.{fqn}", tensor, is_replaceable=True)

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        ranks: tuple[int, ...] = (),
        early: bool = False,
        place: Place | None = None,
        is_replaceable: bool = False,
    ) -> None:
        """Adds a tensor: as a region, as another name of one, by value, or to what is missed."""
        if name in self._names:
            self.state.missed.append((name, "another tensor has the same name"))
            self.state._ambiguous.add(name)
            return
        self._names.add(name)
        if is_replaceable:
            self.state.replaceable.add(name)
        try:
            self._add(name, tensor, ranks, early, place, is_replaceable)
        except Exception as error:  # noqa: BLE001  # a class of somebody's own may do anything
            kind = type(tensor).__qualname__
            self.state.missed.append((name, f"{kind}: {type(error).__name__}: {error}"))

    def _add(
        self,
        name: str,
        tensor: torch.Tensor,
        ranks: tuple[int, ...],
        early: bool,
        place: Place | None,
        is_replaceable: bool,
    ) -> None:
        state = self.state
        if is_lazy(tensor):
            state.missed.append((name, "not initialized yet, as its module has not run"))
            state._lazy.append(tensor)
            return
        if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
            parts, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            state._wrappers.add(name)
            for part in parts:
                inside = (vars(tensor), part) if part in vars(tensor) else None
                self.add(
                    f"{name}.{part}", getattr(tensor, part), ranks, early, inside, is_replaceable
                )
            return
        local, placed = local_part(tensor)
        if problem := _problem(local):
            state.missed.append((name, problem))
            if problem == _GIVEN_BACK:
                state._given_back.append(local)
            return
        whole = split_shape(tensor, local)
        split = whole and (_C.dtype_name(local), local.element_size(), whole)
        if local.numel() == 0:
            if split and not (placed or ranks):
                state.splits[name] = split
            return
        if not _C.is_dense(local):
            state.strided[name] = local
            return
        owner = tensor if isinstance(tensor, DTensor) else None
        region = Region(name, local, placed or ranks, early, owner, place, is_replaceable)
        known = self._at.setdefault(local.data_ptr(), region)
        if known is region:
            state.regions.append(region)
            if split and not region.ranks:
                state.splits[name] = split
            return
        # A parameter that begins where a buffer does.
        known.is_replaceable = region.is_replaceable = known.is_replaceable and is_replaceable
        if local.nbytes <= known.tensor.nbytes:
            state.aliases.append(Alias(name, known.name, tensor, place))
        else:  # the region is a part of this one
            self._at[local.data_ptr()] = region
            state.splits.pop(known.name, None)
            if split and not region.ranks:
                state.splits[name] = split
            state.regions[state.regions.index(known)] = region
            state.aliases.append(Alias(known.name, name, known.owner or known.tensor, known.place))
            for alias in state.aliases:
                if alias.region == known.name:
                    alias.region = name


_GIVEN_BACK = "its memory has been given back"


def _problem(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be saved, "" if it can."""
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    if tensor.device.type not in ("cpu", "cuda") or not dense:
        where = f"{tensor.layout} tensor on {tensor.device}"
        return f"{where}: only dense CPU and CUDA tensors are saved"
    if tensor.is_cuda and (absent := _C.cuda_absent()):
        return f"tensor on {tensor.device}, but reft has no CUDA: {absent}"
    if tensor.numel() == 0:
        return ""
    begin = tensor.storage_offset() * tensor.element_size()
    # The least that a dense tensor takes; those with gaps are copied by torch, which checks them.
    if begin + tensor.nbytes > tensor.untyped_storage().nbytes() and _C.is_dense(tensor):
        return _GIVEN_BACK
    return ""
