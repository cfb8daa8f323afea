"""What a module tree holds beside the weights that an optimizer owns: averaged copies, counters,
modes.

Weights that belong to an optimizer are saved elsewhere. A tree is looked at in full once; after
that each step only checks that it still has the same parts. Tensors that nobody owns (an averaged
copy, a teacher) are copied once one of them has changed since the first program point; a teacher
that never changes costs a look at a few numbers per step.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterator
from itertools import repeat
from numbers import Number
from operator import is_not
from types import BuiltinFunctionType, FunctionType
from typing import Any

from reft._state.raw import bytes_of

from . import attachments, hooks
from .births import is_light
from .nodes import ATOMS, is_same_atom, type_name

# Their classes keep configuration in attributes, nothing that training moves.
_STATIC_ROOTS = frozenset(
    {
        "torch",
        "builtins",
        "typing",
        "abc",
        "transformers",
        "timm",
        "torchvision",
        "diffusers",
        "peft",
    }
)
# Parts of these keep what they do themselves in attributes.
_MACHINERY = ("torch.distributed.", "torch.nn.parallel.", "torch.fx.", "torch._dynamo.")
_UNKNOWN, _GONE = object(), object()
_CONTAINERS = frozenset({list, dict})
_MOST_ITEMS = 64  # of a container that counts as a setting
_SAMPLED_PER_STEP = 8
_SAMPLE_ELEMENTS = 16
_SAMPLE_ALL_BYTES = 4096
_SAMPLE_STRIDED = 64


class Tree:
    """The parts of one module tree, valid as long as `is_current` says so.

    Attributes:
        modules: All modules, the root first.
        module_names: Their full names, in the same order.
        classes: A hash of the names of their classes, the same in every process.
        own: (index, module) of those whose class may keep state in plain attributes.
        names: Full name of each tensor.
        tensors: Parameters and buffers, in the same order.
        replaced: (name, module) of those that have taken another one's place since the first look.
        switched: (index, class) of those that have another class than at the first look.
    """

    __slots__ = (
        "_children",
        "_counts",
        "_cursor",
        "_empty",
        "_first",
        "_first_kinds",
        "_kinds",
        "_holders",
        "_ids",
        "_hook_count",
        "_hooks",
        "_attached",
        "_attached_count",
        "_attached_ever",
        "_samples",
        "_settings",
        "_stock",
        "_versions",
        "changed",
        "classes",
        "module_names",
        "modules",
        "names",
        "own",
        "replaced",
        "switched",
        "tensors",
    )

    def __init__(self, root: Any, before: Tree | None = None) -> None:
        """`before`: the tree of the same root that is not current any more."""
        named = list(root.named_modules())
        self.module_names = [name for name, _ in named]
        self.modules = [module for _, module in named]
        self._ids = frozenset(map(id, self.modules))
        self._kinds = list(map(type, self.modules))
        self.classes = zlib.crc32("\n".join(map(type_name, self._kinds)).encode())
        self.own = [
            (i, module) for i, module in enumerate(self.modules) if _has_own_code(type(module))
        ]
        self._counts = [(m._parameters, m._buffers, m._modules, _count(m)) for m in self.modules]
        self._children = [
            (m._modules, name, child) for m in self.modules for name, child in m._modules.items()
        ]
        first = None if before is None else before._first
        self._first: dict[str, weakref.ref[Any]]
        self._first = first or {name: weakref.ref(module) for name, module in named}
        self.replaced = [
            (name, module)
            for name, module in named
            if name in self._first and self._first[name]() is not module
        ]
        by_name = dict(zip(self.module_names, self._kinds, strict=True))
        self._first_kinds: dict[str, type] = by_name if before is None else before._first_kinds
        self.switched = [
            (i, self._kinds[i])
            for i, (name, module) in enumerate(named)
            if name in self._first
            and self._first[name]() is module
            and self._first_kinds.get(name) is not self._kinds[i]
        ]
        self.names: list[str] = []
        self.tensors: list[Any] = []
        self._holders: list[tuple[dict[str, Any], str, Any]] = []
        self._empty: list[tuple[dict[str, Any], str]] = []  # parameters and buffers that are None
        seen: set[int] = set()
        for prefix, module in named:
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is None:
                        self._empty.append((holder, name))
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    self.names.append(f"{prefix}.{name}" if prefix else name)
                    self.tensors.append(tensor)
                    self._holders.append((holder, name, tensor))
        own = {i for i, _ in self.own}
        self._stock = [
            (i, module, module.__dict__) for i, module in enumerate(self.modules) if i not in own
        ]
        earlier: _Settings | None = None if before is None else before._settings
        self._settings: _Settings = _Settings(self._stock, earlier)
        self._attached: list[tuple[int, str, dict[str, Any]]] = []
        self._attached_count = -1
        self._attached_ever: dict[tuple[int, str], dict[str, Any]] = {}
        self._hooks: hooks.Hooks = []
        self._hook_count = -1
        self.changed = False
        self._versions = [_version(tensor) for tensor in self.tensors]
        self._samples: dict[int, bytes] = {}
        self._cursor = 0

    def holds(self, module: Any) -> bool:
        """Says whether a module is part of the tree."""
        return id(module) in self._ids

    def is_current(self) -> bool:
        """Says whether the tree still has these parts."""
        for parameters, buffers, modules, count in self._counts:
            if len(parameters) + len(buffers) + len(modules) != count:
                return False
        if any(map(is_not, map(type, self.modules), self._kinds)):
            return False
        if any(holder.get(name) is not None for holder, name in self._empty):
            return False
        if any(modules.get(name) is not child for modules, name, child in self._children):
            return False
        return all(holder.get(name) is tensor for holder, name, tensor in self._holders)

    def sample_all(self) -> None:
        """Notes a few numbers of each tensor, to tell later whether it has changed."""
        self._samples = {i: _sample(tensor) for i, tensor in enumerate(self.tensors)}

    def has_changed(self, unowned: list[int]) -> bool:
        """Says whether one of some tensors has changed since `sample_all`; once true, always true.

        Args:
            unowned: Positions of the tensors to look at.
        """
        if self.changed or not self._samples:
            return True
        versions, tensors = self._versions, self.tensors
        self.changed = any(_version(tensors[i]) != versions[i] for i in unowned)
        for _ in range(min(_SAMPLED_PER_STEP, len(unowned))):
            self._cursor = (self._cursor + 1) % len(unowned)
            i = unowned[self._cursor]
            self.changed = self.changed or _sample(tensors[i]) != self._samples.get(i)
        return self.changed

    def training(self) -> bytes:
        """The training mode of each module."""
        return bytes([module.training for module in self.modules])

    def requires_grad(self) -> bytes:
        """Whether each tensor takes part in autograd."""
        return bytes([tensor.requires_grad for tensor in self.tensors])

    def own_hooks(self) -> hooks.Hooks:
        """The script's hooks on these modules and tensors."""
        count = hooks.count()
        if (
            self._hooks or count != self._hook_count
        ):  # those that there are may have been taken away
            self._hook_count = count
            named = zip(self.module_names, self.modules, strict=True)
            self._hooks = hooks.of_tree(named, zip(self.names, self.tensors, strict=True))
        return self._hooks

    def attributes(self) -> list[tuple[int, str, Any]]:
        """Plain attributes of modules with code of their own.

        Of other modules, what was attached to them, and settings that were moved.

        Returns:
            (module's index, name, value) of each.
        """
        standard = _standard_names()
        found = [
            (i, name, value)
            for i, module in self.own
            for name, value in list(module.__dict__.items())
            if name not in standard
        ]
        found += self._settings.moved()
        found += [
            (i, name, held[name]) for i, name, held in self._attached_attributes() if name in held
        ]
        return [one for one in found if not one[1].startswith(_OF_THIS_PROCESS)]

    def _attached_attributes(self) -> list[tuple[int, str, dict[str, Any]]]:
        count = sum([len(held) for _, _, held in self._stock])
        if count != self._attached_count:
            self._attached_count = count
            standard = _standard_names()
            self._attached = [
                (i, name, held)
                for i, module, held in self._stock
                for name in _attached_to(module)
                if name not in standard
            ]
            self._attached_ever.update({(i, name): held for i, name, held in self._attached})
        return self._attached

    def detached(self) -> list[tuple[int, str]]:
        """What `attributes` has found attached to modules, and has been deleted since: module's
        index, name."""
        gone = [key for key, held in self._attached_ever.items() if key[1] not in held]
        return [one for one in gone if not one[1].startswith(_OF_THIS_PROCESS)]


def _attached_to(module: Any) -> list[str]:
    """Names of what a script has attached to a module, or given it to call: `avg_fn` of an
    `AveragedModel`, the activation of a layer."""
    found = [name for name, _ in attachments.attributes(module, _STATIC_ROOTS)]
    return found + [
        name
        for name, item in list(vars(module).items())
        if name not in found and hooks.is_own_hook(item) and attachments.is_kept(item)
    ]


class _Settings:
    """Numbers, strings, tuples of them, functions, classes and small containers in modules without
    code of the script's own (a dropout's `p`, a layer's activation), and which of them are not as
    they began.

    A look costs about 60 ns for each.
    """

    def __init__(
        self, stock: list[tuple[int, Any, dict[str, Any]]], before: _Settings | None
    ) -> None:
        standard = _standard_names()
        known = {} if before is None else before._begun_by_place()
        self._places: list[tuple[int, str]] = []
        self._held: list[dict[str, Any]] = []
        self._seen: list[Any] = []
        self._begun: list[Any] = []
        self._containers: list[tuple[int, str, dict[str, Any], Any]] = []
        for i, module, held in stock:
            if type(module).__module__.startswith(_MACHINERY):
                continue
            for name, value in held.items():
                if name in standard or name.startswith("_"):
                    continue
                if type(value) in _CONTAINERS and _is_small(value):
                    first = _copied(value) if before is None else before._copy(held, name)
                    self._containers.append((i, name, held, first))
                    continue
                if not _is_setting(value):
                    continue
                self._places.append((i, name))
                self._held.append(held)
                self._seen.append(value)
                first = value if before is None else known.get((id(held), name), _UNKNOWN)
                self._begun.append(first)
        self._names = [name for _, name in self._places]
        self._moved = self._compare()

    def moved(self) -> list[tuple[int, str, Any]]:
        """(module's index, name, value) of each that is not as it began, or whose beginning is not
        known."""
        now = map(dict.get, self._held, self._names, repeat(_GONE))
        if any(map(is_not, now, self._seen)):
            self._seen = list(map(dict.get, self._held, self._names, repeat(_GONE)))
            self._moved = self._compare()
        if not self._containers:
            return self._moved
        return self._moved + [
            (i, name, held[name])
            for i, name, held, first in self._containers
            if name in held and not _is_equal(held[name], first)
        ]

    def _copy(self, holder: dict[str, Any], name: str) -> Any:
        """The contents of a container when they began; nothing is equal to those of an unknown one."""
        for _, known, held, first in self._containers:
            if held is holder and known == name:
                return first
        return _UNKNOWN

    def _compare(self) -> list[tuple[int, str, Any]]:
        return [
            (*place, value)
            for place, value, begun in zip(self._places, self._seen, self._begun, strict=True)
            if value is not begun
            and not _is_equal(value, begun)
            and (_is_setting(value) or hooks.is_own_hook(value))
        ]

    def _begun_by_place(self) -> dict[tuple[int, str], Any]:
        pairs = zip(self._held, self._names, strict=True)
        return {
            (id(held), name): begun for (held, name), begun in zip(pairs, self._begun, strict=True)
        }


def tree_of(root: Any) -> Tree:
    """Gives the tree of a module, looked at anew only if its parts have changed."""
    found = _trees.get(id(root))
    if found is not None and found[0]() is root:
        if found[1].is_current():
            return found[1]
        tree = Tree(root, found[1])
        tree.changed = True  # parts came or went: nothing to compare with
    else:
        tree = Tree(root)
    _trees[id(root)] = (weakref.ref(root), tree)
    return tree


def all_tensors() -> Iterator[Any]:
    """The parameters and buffers of all trees."""
    for _, tree in _trees.values():
        yield from tree.tensors


def forget() -> None:
    """Drops all trees: they hold the modules."""
    _trees.clear()


# Where torch keeps the state of FSDP2 and the like: a name with a random number, beside an object of
# its own that the restarted script makes, too.
_OF_THIS_PROCESS = "__composable_api_state_key_"
_trees: dict[int, tuple[weakref.ref[Any], Tree]] = {}
_own_code: dict[type, bool] = {}
_standard: frozenset[str] = frozenset()


def _is_setting(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_setting, value))
    # NumPy's numbers are registered as such.
    return value is None or isinstance(value, (str, Number, FunctionType, BuiltinFunctionType, type))


def _is_small(container: Any) -> bool:
    """Whether a list or dict has a few settings and light values only."""
    items = container.values() if type(container) is dict else container
    return len(items) <= _MOST_ITEMS and all(_is_setting(item) or is_light(item) for item in items)


def _copied(value: Any) -> Any:
    """A copy of a list, a dict or a light value."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _is_equal(value: Any, first: Any) -> bool:
    try:
        if type(value) in ATOMS:
            return is_same_atom(value, first)
        return type(value) is type(first) and bool(value == first)
    except Exception:  # a comparison of the script's may raise anything
        return False


def _has_own_code(kind: type) -> bool:
    found = _own_code.get(kind)
    if found is None:
        found = any(base.__module__.partition(".")[0] not in _STATIC_ROOTS for base in kind.__mro__)
        _own_code[kind] = found
    return found


def _standard_names() -> frozenset[str]:
    global _standard
    if not _standard:
        torch: Any = sys.modules["torch"]
        _standard = frozenset(torch.nn.Module().__dict__)
    return _standard


def _count(module: Any) -> int:
    return len(module._parameters) + len(module._buffers) + len(module._modules)


def _version(tensor: Any) -> int:
    return int(tensor._version) if not tensor.is_inference() else 0


def _sample(tensor: Any) -> bytes:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.device.type == "meta" or local.numel() == 0:
        return b""
    torch: Any = sys.modules["torch"]
    if local.numel() * local.element_size() <= _SAMPLE_ALL_BYTES:
        picked = local.reshape(-1)
    else:
        row = local[tuple([-1] * max(0, local.dim() - 1))][:_SAMPLE_ELEMENTS]
        flat = local.reshape(-1) if local.is_contiguous() else row
        picked = torch.cat([row, flat[:: flat.numel() // _SAMPLE_STRIDED + 1]])
    return bytes_of(picked)
