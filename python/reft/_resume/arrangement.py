"""Gives a restarted script the tensors that a snapshot holds, so that the restore can write them.

At its first step, a script may lack what the job had later: state that an optimizer makes at a
later step, a buffer that is None at first, a gradient. It may lay tensors out in another way
(`.to(memory_format=torch.channels_last)` came later), or share memory that was not shared any more,
or the reverse. `make` makes all of that as it was, and sets what optimizers keep beside tensors;
`unmake` takes it back.

Threads: the training thread. Errors: whatever is raised by `make` leaves the script as it was.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reft import _C
from reft._resume.restorer import strides_of
from reft._state import contents, discovery, gradients, naming, object_pickles, recomputed
from reft._state.discovery import State

Row = tuple[str, str, list[int], list[int]]  # name, dtype, shape, strides

_STATE = re.compile(r"o\d+\[(.*?)\].*")
_ENTRY = re.compile(r"(o\d+\[.*?\])\.(\w+)")
_GRADIENT = re.compile(r"g\[(.*)\]")
# By the names that the tensor table has.
DTYPES = {
    _C.dtype_name(torch.empty(0, dtype=dtype)): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class Arrangement:
    """What was made for one restore.

    Args:
        regions: of the snapshot.
        saved: its small state, opened (`saved.Saved`).
        find: gives what a reference in it stands for.
        foreign: it is another rank's, which stands in for this one's.
    """

    def __init__(
        self, regions: list[Row], saved: Any, find: object_pickles.Find, foreign: bool = False
    ) -> None:
        self._saved, self._find, self._foreign = saved, find, foreign
        self._regions = {row[0]: row for row in regions}
        self._aliases = {alias[0]: alias for alias in saved["aliases"]}
        self._replaced = set(saved["replaced"])
        self._builder = contents.Builder(self._tensor, self._find)
        self._parameters: dict[str, torch.Tensor] = {}
        self._outlived = gradients.of_process.outlive

    def make(self, state: State, optimizers: list[torch.optim.Optimizer]) -> State:
        """Arranges everything.

        Args:
            state: what the script has.
            optimizers: the outermost ones.

        Returns:
            What it has now.
        """
        self._parameters = state.parameters
        recomputed.of_process.prepare(state.optimizers)
        try:
            self._optimizers(state)
            self._second_states(state)
            self._buffers(state)
            self._gradients()
            state = discovery.discover(optimizers, before=state)
            if self._untie(state) | self._lay_out(state):
                state = discovery.discover(optimizers, before=state)
            if self._tie(state):
                state = discovery.discover(optimizers, before=state)
        except BaseException:
            self.unmake()
            raise
        return state

    def unmake(self) -> None:
        self._builder.undo()
        gradients.of_process.outlive = self._outlived

    def _optimizers(self, state: State) -> None:
        for optimizer, encoded, groups in zip(
            state.optimizers, self._saved["plain_state"], self._saved["groups"], strict=True
        ):
            # A sharded one keeps the state of other parameters there.
            if not (self._foreign and _is_of_a_sharded(optimizer)):
                self._builder.put_items(encoded[1], optimizer.state)
            for group, items in zip(optimizer.param_groups, groups, strict=True):
                # Others have been deleted: they are the script's, and not of a newer torch.
                known = {"params", *optimizer.defaults, *(group if self._foreign else ())}
                kept = [key for key in group if key in known]
                self._builder.put_items(list(items.items()), group, kept)

    def _second_states(self, state: State) -> None:
        """Gives what is computed of other ranks' optimizers the entries that were saved."""
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        saved: dict[str, dict[str, Row]] = {}
        for name, row in self._regions.items():
            if matched := _ENTRY.fullmatch(name):
                saved.setdefault(matched[1], {})[matched[2]] = row
        for k, optimizer in enumerate(state.optimizers):
            beside = recomputed.of_process.places_beside(optimizer)
            if self._foreign:  # its own part is one that the donor has beside
                beside += [(key, optimizer.state, key) for key in self._own_of(optimizer)]
            rows = [saved.get(f"o{k}[{names.get(id(p))}]", {}) for p, _, _ in beside]
            if beside and not any(rows) and any(key.startswith(f"o{k}[") for key in saved):
                recomputed.of_process.drop(optimizer, "the snapshot was taken without it")
                continue
            for (parameter, holder, key), wanted in zip(beside, rows, strict=True):
                entry = holder.get(key)
                if wanted.keys() == (entry or {}).keys():
                    continue
                self._builder.note(holder)
                if not wanted:
                    del holder[key]
                    continue
                holder[key] = {
                    name: entry[name] if entry and name in entry else _empty(row, "cpu", parameter)
                    for name, row in wanted.items()
                }

    @staticmethod
    def _own_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        if not recomputed.of_process.ranks_of(optimizer):
            return []
        return [p for group in optimizer.param_groups for p in group["params"]]

    def _tensor(self, name: str, device: str, live: Any) -> Any:
        """The tensor for a place in what an optimizer keeps: the one that is there, if it fits."""
        row = self._regions.get(name) or self._row_of_another(name)
        if row is None:  # of a class that is made of several tensors
            if isinstance(live, torch.Tensor):
                return live
            raise LookupError(f"{name} was saved and cannot be made")
        _, dtype, shape, strides = row
        if isinstance(live, torch.Tensor) and name not in self._replaced:
            local = live._local_tensor if isinstance(live, DTensor) else live
            if list(local.shape) == shape and _C.dtype_name(local) == dtype:
                return live
        if dtype not in DTYPES:
            raise LookupError(f"{name} was saved as {dtype} and cannot be made")
        matched = _STATE.fullmatch(name)
        parameter = self._parameters.get(matched[1]) if matched else None
        if isinstance(parameter, DTensor) and list(parameter._local_tensor.shape) == shape:
            return torch.zeros_like(parameter, dtype=DTYPES[dtype]).detach()
        return _empty(row, device, live if isinstance(live, torch.Tensor) else parameter)

    def _row_of_another(self, name: str) -> Row | None:
        """Of an alias, or of a tensor that is saved by value."""
        if name in self._aliases:
            _, _, dtype, shape, strides = self._aliases[name]
            called = _C.dtype_name(torch.empty(0, dtype=getattr(torch, dtype)))
            return name, called, list(shape), list(strides)
        value = self._saved["strided"].get(name)
        if isinstance(value, torch.Tensor):
            return name, _C.dtype_name(value), list(value.shape), list(value.stride())
        return None

    def _buffers(self, state: State) -> None:
        """Makes those that were none or had another shape, and takes those that were none then."""
        modules = {
            naming.of_process.get(module): module
            for root in state.modules
            for module in root.modules()
        }
        there = state.saved_names()
        for name, row in self._regions.items():
            path, _, key = name.rpartition(".")
            module = modules.get(path)
            if module is None or row[1] not in DTYPES:
                continue
            grown = self._saved["reshaped"].get(name)
            if grown is not None and (live := module._buffers.get(key)) is not None:
                if list(live.shape) == grown and type(live) is torch.Tensor:
                    self._builder.note(module._buffers)
                    module._buffers[key] = _empty(row, "", live)
                continue
            if name in there:
                continue
            if module._buffers.get(key) is None and key not in module._parameters:
                self._builder.note(module._buffers)
                beside = [*module.parameters(), *module.buffers(), *self._parameters.values()]
                module._buffers[key] = _empty(row, "", beside[0] if beside else None)
        for name in self._saved["empty"]:
            path, _, key = name.rpartition(".")
            module = modules.get(path)
            if module is not None and module._buffers.get(key) is not None:
                self._builder.note(module._buffers)
                module._buffers[key] = None

    def _gradients(self) -> None:
        """If the snapshot has gradients, it has all that there were."""
        names = {name for name in self._regions if _GRADIENT.fullmatch(name)}
        names |= {name for name in self._aliases if _GRADIENT.fullmatch(name)}
        gradients.of_process.outlive = bool(names)
        if not names:
            return
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if (f"g[{name}]" in names) == (gradient is not None):
                continue
            self._builder.on_undo(partial(setattr, parameter, "grad", gradient))
            parameter.grad = torch.zeros_like(parameter) if gradient is None else None

    def _untie(self, state: State) -> bool:
        """Gives memory of its own to what shares it now and did not."""
        regions = {region.name: region for region in state.regions}
        changed = False
        for alias in state.aliases:
            saved_with = self._aliases.get(alias.name)
            if saved_with is not None and saved_with[1] == alias.region:
                continue
            apart = alias.name in self._regions or saved_with is not None
            tensor, other = alias.current(), regions[alias.region]
            if not apart:
                continue
            changed = True
            if tensor is (other.owner or other.current()):
                # One object at two places: they have to become two.
                if alias.place is None or isinstance(tensor, torch.nn.Parameter):
                    raise LookupError(f"{alias.name} is the same tensor as {alias.region} now")
                container, key = alias.place
                self._builder.note(container)
                container[key] = tensor.detach().clone()
            else:
                self._put_memory(tensor, _local(tensor).detach().clone())
        return changed

    def _lay_out(self, state: State) -> bool:
        """Gives tensors the strides that they had."""
        changed = False
        for region in state.regions:
            row, tensor = self._regions.get(region.name), region.current()
            if row is None or strides_of(tensor) == row[3] or list(tensor.shape) != row[2]:
                continue
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                continue  # a part of something: `restorer.check` names it
            self._put_memory(tensor, _empty((row[0], *row[1:]), "", tensor).copy_(tensor.detach()))
            changed = True
        return changed

    def _tie(self, state: State) -> bool:
        """Lets share memory what shared it."""
        regions = {region.name: region for region in state.regions}
        changed = False
        for name, with_region, dtype, shape, strides in self._aliases.values():
            mine, other = regions.get(name), regions.get(with_region)
            if mine is None or other is None:
                continue  # shares it now, or is not there: then the regions do not match
            whole, tensor = other.current(), mine.current()
            if str(tensor.dtype)[6:] != dtype or whole.dtype != tensor.dtype:
                continue
            if tensor.shape != tuple(shape):
                continue  # another rank's part of it
            view = torch.empty(0, dtype=tensor.dtype, device=whole.device)
            view.set_(whole.untyped_storage(), whole.storage_offset(), tuple(shape), tuple(strides))
            self._put_memory(tensor, view)
            changed = True
        return changed

    def _put_memory(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        local = _local(tensor)
        before = local.detach()
        self._builder.on_undo(lambda: setattr(local, "data", before))
        local.data = memory


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _empty(row: Row, device: str, like: torch.Tensor | None) -> torch.Tensor:
    """A tensor of the given type, shape and strides, on the device of `like` unless that is of
    another kind."""
    _, dtype, shape, strides = row
    where: Any = device or "cpu"
    if like is not None and device in ("", like.device.type):
        where = _local(like).device
    made = torch.zeros(shape, dtype=DTYPES[dtype], device=where)
    if not strides:
        return made
    return torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device=where).copy_(made)


def _is_of_a_sharded(optimizer: torch.optim.Optimizer) -> bool:
    found = recomputed.of_process
    return found.repeats(optimizer) or bool(found.ranks_of(optimizer))
