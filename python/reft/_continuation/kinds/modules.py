"""Module trees and optimizers: what they hold beside weights and state, which are saved elsewhere.

Threads: the training thread. Errors: `Stray` for a module that has other parts than the saved one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from reft._state.own import is_own

from .. import attachments, hooks
from ..module_tree import Tree, tree_of
from ..nodes import ATOMS, KEEP, MISSING, UNBOUND, At, Named, Node, Stray, kind, type_name
from .loaders import Shallow
from .objects import OWNED, Instance, Owned, encode_hooks
from .tensors import Tensor, tags_of

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
_FEW_BYTES = 4096  # of the parameters of an optimizer that has not stepped
_PLAIN = ATOMS | {tuple, list, dict}
_CLASS = "__class__"
_OPTIMIZERS_OWN = frozenset({"param_groups", "state"})
# What torch and its schedulers attach to each optimizer, besides its hooks.
_OPTIMIZERS_PRIVATE = frozenset(
    {
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_opt_called",
        "_step_supports_amp_scaling",
        "step",
    }
)


@kind
class Module(Node):
    """A module tree that has lived since the first program point."""

    is_live_only = True
    count: int
    """Number of modules in the tree."""
    classes: int
    """A hash of the names of their classes."""
    training: bytes
    """Mode of each module."""
    requires_grad: bytes
    """Whether each tensor takes part in autograd."""
    attributes: list[tuple[int, str, Any]]
    """Index of a module, name, value."""
    tensors: Named
    """Tensors that no optimizer owns and that have changed, or have attributes attached."""
    hooks: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            _note(value, place, depth, walk)
            return OWNED
        if walk.births.place(value) is None:
            if _is_trained(value.parameters(), walk):
                walk.successors.append(place)
            if type(value).__name__ in _WRAPPERS:
                return Wrapper.capture(value, place, depth, walk)
            return Instance.capture(value, place, depth, walk)
        tree = tree_of(value)
        if _is_trained(tree.tensors, walk):
            walk.births.trained.add(value)
            walk.trained[walk.births.place(value) or place] = value
        elif value in walk.births.trained:
            walk.finished.append(place)
        for name, module in tree.replaced:
            why = "has taken the place of another module, which a restarted script has there"
            walk.lost(f"{place}.{name}", type_name(type(module)), why)
        tensors = _changed_tensors(value, tree, place, depth, walk)
        attributes = [
            (i, name, walk.encode(item, where, depth + 1))
            for i, name, item, where in _attributes(tree, place, walk)
        ]
        attributes += [(i, name, UNBOUND) for i, name in tree.detached()]
        attributes += [
            (i, _CLASS, walk.encode(kind, f"{place}.{tree.module_names[i]}.{_CLASS}", depth + 1))
            for i, kind in tree.switched
        ]
        known = {name for name, _ in tensors}
        # Of tensors that had attributes at the first program point, all may be gone by now.
        tagged = walk.births.tagged.get(place, frozenset())
        tensors += [
            (name, walk.encode(tensor, f"{place}.{name}", depth))
            for name, tensor in zip(tree.names, tree.tensors, strict=True)
            if (tensor.__dict__ or name in tagged)
            and name not in known
            and (name in tagged or tags_of(tensor))
        ]
        found = encode_hooks(tree.own_hooks(), place, depth, walk)
        count, modes, grads = len(tree.modules), tree.training(), tree.requires_grad()
        return cls(count, tree.classes, modes, grads, attributes, tensors, found)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        place = at.place
        target = walk.target(at, live)
        if target is MISSING and live is not MISSING and walk.is_claimed(live):
            why = "a model that came later has taken the place of this one"
            return walk.problem(at, why)
        if target is MISSING:
            return KEEP if live is not MISSING else walk.came_later(at)
        walk.stands(at, target)
        tree = tree_of(target)
        if len(tree.modules) != self.count or len(tree.tensors) != len(self.requires_grad):
            raise Stray(f"{place}: the module has other parts than the saved one")
        # What is written now is not what this process began with.
        tree.changed = tree.changed or any(
            isinstance(walk.graph.node(item), Tensor) for _, item in self.tensors
        )
        tensor_of = dict(zip(tree.names, tree.tensors, strict=True))
        walk.fix(*tree.tensors)
        for name, item in self.tensors:
            _put_tensor(item, tensor_of.get(name, MISSING), f"{place}.{name}", at, walk)
        for i, name, item in self.attributes:
            holder = tree.modules[i].__dict__
            there = holder.get(name, MISSING)
            if item == UNBOUND:
                walk.contents.append(functools.partial(holder.pop, name, None))
                continue
            value = walk.resolve(item, there, _place_of(tree, i, name, place))
            if name == _CLASS and value is not KEEP:
                walk.contents.append(functools.partial(setattr, tree.modules[i], _CLASS, value))
            elif value is not KEEP:
                walk.contents.append(functools.partial(holder.__setitem__, name, value))
        # Not in a tree with other modules, and not for another rank, which may never have had them.
        if self.classes == tree.classes and not walk.is_foreign:
            captured, own = {(i, name) for i, name, _ in self.attributes}, {i for i, _ in tree.own}
            for i, name, _ in tree.attributes():
                if i in own and (i, name) not in captured:  # deleted
                    holder = tree.modules[i].__dict__
                    walk.contents.append(functools.partial(holder.pop, name, None))
        walk.put_hooks(self.hooks, tree.own_hooks(), place)

        def modes() -> None:
            for module, mode in zip(tree.modules, self.training, strict=True):
                module.training = bool(mode)
            _set_requires_grad(tree.tensors, self.requires_grad)

        walk.contents.append(modes)
        return target


@kind
class TorchOptimizer(Node):
    """An optimizer of torch's. Settings and state of one that has stepped are saved elsewhere."""

    is_live_only = True
    attributes: Named
    hooks: Named
    requires_grad: bytes
    """Whether each parameter takes part in autograd: one may belong to no module."""
    groups: list[Named]
    """Settings of each parameter group: of one that has stepped, only objects of the script's, which
    variables may share."""
    parameters: list[Any]
    """Those of one that has not stepped, if they are few: they may belong to no module."""

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = Owned(self.attributes, self.hooks).restore(at, live, walk)
        if target is KEEP:
            return KEEP
        _put_groups(target, self.groups, self.requires_grad, at, walk)
        there = list(_parameters(target))
        if len(there) == len(self.parameters):
            for i, (item, parameter) in enumerate(zip(self.parameters, there, strict=True)):
                _put_tensor(item, parameter, f"{at.place}.parameters[{i}]", at, walk)
        return target


@kind
class OwnOptimizer(Node):
    """An optimizer of a class of the script's own that has stepped."""

    is_live_only = True
    attributes: Named
    """All but its settings and state, which are saved elsewhere."""
    hooks: Named
    requires_grad: bytes
    """As of a `TorchOptimizer`."""
    groups: list[Named]

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = Shallow(self.attributes, [], self.hooks, []).restore(at, live, walk)
        if target is not KEEP:
            _put_groups(target, self.groups, self.requires_grad, at, walk)
        return target


def _put_groups(
    optimizer: Any, saved: list[Named], requires_grad: bytes, at: At, walk: RestoreWalk
) -> None:
    """Plans the writes to an optimizer's parameter groups and to the flags of its parameters."""
    parameters = list(_parameters(optimizer))
    if len(parameters) == len(requires_grad):
        walk.contents.append(lambda: _set_requires_grad(parameters, requires_grad))
    there = optimizer.param_groups
    if len(there) != len(saved):
        walk.problem(at, f"had {len(saved)} parameter groups, and has {len(there)} now")
        return
    for g, (group, settings) in enumerate(zip(there, saved, strict=True)):
        for name, item in settings:
            place = f"{at.place}.param_groups[{g}].{name}"
            value = walk.resolve(item, group.get(name, MISSING), place)
            if value is not KEEP:
                walk.contents.append(functools.partial(group.__setitem__, name, value))


@kind
class Wrapper(Node):
    """A DDP or FSDP that was made after the first step."""

    requires_grad: bytes
    module: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        inner = walk.encode(value.module, f"{place}.module", depth + 1)
        return cls(tree_of(value).requires_grad(), inner)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        """Takes the live one if it communicates for the same parameters, and stands for no other."""
        name = at.type_name.rpartition(".")[2]
        if live is not MISSING and walk.is_claimed(live):
            raise Stray(
                f"{at.place}: a model was wrapped by {name} after the first step, and the one that"
                " stood there is still held"
            )
        if (
            live is MISSING
            or type_name(type(live)) != at.type_name
            or tree_of(live).requires_grad() != self.requires_grad
        ):
            raise Stray(
                f"{at.place}: a model was wrapped by {name} after the first step, for other"
                " parameters"
            )
        walk.stands(at, live)
        walk.claim(live)
        walk.resolve(self.module, live.module, f"{at.place}.module")
        return live


def _is_trained(tensors: Iterable[Any], walk: CaptureWalk) -> bool:
    return any(walk.is_owned(tensor) for tensor in tensors)


def _put_tensor(item: Any, there: Any, place: str, at: At, walk: RestoreWalk) -> None:
    """Plans the write to a tensor that stands in a module or an optimizer."""
    value = walk.resolve(item, there, place)
    if value is not KEEP and value is not there and not walk.becomes(item, value, there):
        walk.problem(at, "has another shape, type or device", place)


def _place_of(tree: Tree, i: int, name: str, place: str) -> str:
    """The place of an attribute of the module `i` of the tree at `place`."""
    module = tree.module_names[i]
    return f"{place}.{module}.{name}" if module else f"{place}.{name}"


def _attributes(
    tree: Tree, place: str, walk: CaptureWalk
) -> Iterator[tuple[int, str, Any, str]]:
    """The attributes of a tree that are captured: index of the module, name, value, place.

    A module of the tree that still stands where it did is not, nor is a large parameter that has
    not changed; of the script's own modules, all are: what is not there then was deleted.
    """
    torch: Any = sys.modules["torch"]
    own = {i for i, _ in tree.own}
    for i, name, item in tree.attributes():
        where = _place_of(tree, i, name, place)
        if i not in own:
            if isinstance(item, torch.nn.Module) and tree.holds(item):
                if walk.note_births:
                    walk.births.hung[where] = weakref.ref(item)
                if where in walk.births.hung and walk.births.hung[where]() is item:
                    continue
            elif not walk.without_still([(name, item)], where.rpartition(".")[0]):
                continue
        yield i, name, item, where


def _changed_tensors(value: Any, tree: Tree, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes the tensors that no optimizer owns, once one of them has changed."""
    unowned = [i for i, tensor in enumerate(tree.tensors) if not walk.is_owned(tensor)]
    if not unowned or not tree.has_changed(unowned):
        return []
    size = sum(tree.tensors[i].nbytes for i in unowned)
    if size > walk.bytes_left:
        why = (
            f"weights of no optimizer: {walk.too_big(size)}; raise it, or call"
            ' reft.register("name", module)'
        )
        walk.lost(place, type_name(type(value)), why)
        return []
    return [
        (tree.names[i], walk.encode(tree.tensors[i], f"{place}.{tree.names[i]}", depth))
        for i in unowned
    ]


def _note(value: Any, place: str, depth: int, walk: CaptureWalk) -> None:
    """Notes where the parts of a tree stand at the first program point."""
    tree = tree_of(value)
    tree.sample_all()
    for prefix, module in value.named_modules():
        walk.births.note(module, f"{place}.{prefix}")
    for name, tensor in zip(tree.names, tree.tensors, strict=True):
        walk.births.note(tensor, f"{place}.{name}")
    tagged = [
        (name, tensor)
        for name, tensor in zip(tree.names, tree.tensors, strict=True)
        if tensor.__dict__ and tags_of(tensor)
    ]
    walk.births.tagged[place] = frozenset(name for name, _ in tagged)
    for name, tensor in tagged:
        walk.encode(tensor, f"{place}.{name}", depth)
    for _, _, item, where in _attributes(tree, place, walk):
        walk.encode(item, where, depth + 1)
    encode_hooks(tree.own_hooks(), place, depth, walk)


def capture_optimizer(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures what an optimizer class of the script's own keeps beside its state and groups."""
    saved = _OPTIMIZERS_OWN if id(value) in walk.owned else frozenset()
    own = [
        (name, item)
        for name, item in list(vars(value).items())
        if name not in saved
        and name not in _OPTIMIZERS_PRIVATE
        and not name.startswith("_optimizer_")
    ]
    attributes = walk.encode_named(own, place, depth)
    own_hooks = encode_hooks(hooks.of_optimizer(value), place, depth, walk)
    if not saved:
        return Shallow(attributes, [], own_hooks, [])
    groups = _encode_groups(value, place, depth, walk)
    return OwnOptimizer(attributes, own_hooks, _flags_of(value), groups)


def _flags_of(optimizer: Any) -> bytes:
    return bytes(parameter.requires_grad for parameter in _parameters(optimizer))


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _set_requires_grad(tensors: Iterable[Any], flags: bytes) -> None:
    for tensor, flag in zip(tensors, flags, strict=True):
        if tensor.requires_grad != bool(flag):
            tensor.requires_grad_(bool(flag))


def capture_torch_optimizer(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures the hooks of an optimizer and what a script has attached to it; the settings, too,
    of one that has not stepped yet."""
    attached = _encode_attached(value, place, depth, walk)
    attached.append(("defaults", walk.encode(value.defaults, f"{place}.defaults", depth + 1)))
    found = encode_hooks(hooks.of_optimizer(value), place, depth, walk)
    groups = _encode_groups(value, place, depth, walk)
    parameters: list[Any] = []
    loose = [] if id(value) in walk.owned else list(_parameters(value))
    if sum(parameter.nbytes for parameter in loose) <= _FEW_BYTES:
        parameters = [
            walk.encode(parameter, f"{place}.parameters[{i}]", depth + 1)
            for i, parameter in enumerate(loose)
        ]
    return TorchOptimizer(attached, found, _flags_of(value), groups, parameters)


def capture_scheduler(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures of a scheduler, which is saved elsewhere, what no pickle of it has: functions of the
    script's that it calls, objects of the script's, which variables may share, and an optimizer that
    has not stepped yet. It may be reached from here alone, as inner schedulers may."""
    kept = [
        (name, item)
        for name, item in list(vars(value).items())
        if (
            id(item) not in walk.owned
            if name == "optimizer"
            else any(map(_is_of_script, item.values() if type(item) is dict else item))
            if type(item) in (list, tuple, dict)
            else _is_of_script(item)
        )
    ]
    return Owned(walk.encode_named(kept, place, depth), None) if kept else OWNED


def _is_of_script(item: Any) -> bool:
    """Whether a part of a scheduler is a function or an object of the script's, or one that no
    pickle of a scheduler has."""
    if type(item) in ATOMS or isinstance(item, type):
        return False
    return hooks.is_own_hook(item) or attachments.is_object(item)


def _encode_groups(value: Any, place: str, depth: int, walk: CaptureWalk) -> list[Named]:
    """Encodes the settings of an optimizer's parameter groups."""
    all_of_them = id(value) not in walk.owned  # no snapshot has a table for it
    return [
        [
            (name, walk.encode(item, f"{place}.param_groups[{g}].{name}", depth + 1))
            for name, item in list(group.items())
            if name != "params"
            and (
                all_of_them
                or _is_object_of_script(item)
                or _is_tagged(item, f"{place}.param_groups[{g}].{name}", walk)
            )
        ]
        for g, group in enumerate(value.param_groups)
    ]


def _is_tagged(item: Any, place: str, walk: CaptureWalk) -> bool:
    """Whether a setting is a tensor to which the script has attached something. Its contents are
    saved elsewhere."""
    torch: Any = sys.modules["torch"]
    if type(item) in _PLAIN or not isinstance(item, torch.Tensor):
        return False
    return bool(item.__dict__ and tags_of(item)) or place in walk.births.attached


def _is_object_of_script(item: Any) -> bool:
    return type(item) not in _PLAIN and is_own(type(item).__module__)


def capture_scaler(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures what a class of the script's own keeps beside a GradScaler's state."""
    return Owned(_encode_attached(value, place, depth, walk), None)


def _encode_attached(value: Any, place: str, depth: int, walk: CaptureWalk) -> Named:
    attached = attachments.attributes(value)
    kept = [(name, item) for name, item in attached if name not in _OPTIMIZERS_PRIVATE]
    return walk.encode_attached(kept, value, place, depth)
