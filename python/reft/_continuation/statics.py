"""What a script keeps outside of its frames: globals of its other modules, attributes of classes
and functions, defaults, hooks for all of torch's modules.

Looked at are the script's own modules (`own`). Of the main module, only numbers, strings, functions,
classes and modules that it has made: its objects belong to the frames, which know those that the
code still uses; all of it, if the code may reach its globals by other ways than their names
(`globals()["history"]`). Classes that a function has made, and that no name leads to, are looked at
like those of modules: their methods may keep variables of that function. Numbers, strings,
functions and classes that are what they were at the first program point are not copied: the
restarted script has set them, perhaps to something new on purpose.

Threads: the training thread. Errors: none of its own; what cannot be captured or put back is
    reported by the coders.
"""

from __future__ import annotations

import builtins
import enum
import gc
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from functools import cached_property, partial, partialmethod, singledispatchmethod
from operator import is_not
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from reft._state.own import is_made, is_own

from . import attachments, hooks, logger_filters, node_hooks, registries
from .births import is_light
from .bytecode import attributes_set, reads_in, special_names
from .capture_walk import CaptureWalk
from .kinds.functions import has_state
from .kinds.objects import encode_hooks
from .nodes import (
    ATOMS,
    KEEP,
    MISSING,
    UNBOUND,
    function_in,
    is_pythons,
    is_same_atom,
    plain_key,
    type_name,
)
from .registries import Registries
from .restore_walk import RestoreWalk

_MOST_MODULES = 256
_TORCH = "torch"  # in reports
_HOOKS_OF = "<hooks> of "  # and the package: as no module is called
_REGISTERED = "<registered>"
_BESIDE = "runs at the same time: its variables, and batches that it holds, are not restored"
_MAIN_PREFIX = "__main__:"
_MOST_CHARS = 1024  # of a string of the main module
_DYNAMOS = ("__compiled_fn_", "__resume_at_")  # names of globals that torch.compile makes
_SWITCHED = "another one than after the first step, and reft does not put such an attribute back"
_FINAL = frozenset({"_fields_", "_pack_", "_anonymous_"})  # of a structure of ctypes
# What `enum` keeps of a member. `_value_` is a script's, too, if it can change.
_ENUMS = frozenset({"_value_", "_name_", "_sort_order_", "__objclass__", "_inverted_"})
# With these, a script reaches globals whose names its code does not mention.
_BY_TEXT = frozenset(
    {"globals", "locals", "eval", "exec", "sys.modules", "import __main__", ".__globals__"}
)
_BUILTINS = frozenset(vars(builtins))  # before the script adds others
_HASHED = "its results for text and bytes are others in each process: set PYTHONHASHSEED=0"
HASHES_DIFFER = not os.environ.get("PYTHONHASHSEED", "").isdecimal()
_STATELESS = (ModuleType, BuiltinFunctionType, FunctionType, type)

# Methods with special names that a script writes; others are made by decorators, with closures that
# hold nothing.
_SPECIAL = frozenset({"__init__", "__call__", "__getitem__", "__iter__", "__next__", "__len__"})

Named = list[tuple[str, Any]]


class _Names:
    """Names of a module, or of a class, that the script may set.

    Attributes:
        values: those of values that are captured.
        fixed: those of functions, classes and modules.
        meant: what each of these meant at the first program point.
    """

    __slots__ = ("_gone", "_known", "_size", "fixed", "meant", "values")

    def __init__(self) -> None:
        self._size = -1
        self._known: set[str] = set()
        self._gone: set[str] = set()
        self.values: list[str] = []
        self.fixed: list[str] = []
        self.meant: list[Any] = []

    def look(
        self, namespace: Mapping[str, Any], is_class: bool, special: frozenset[str]
    ) -> None:
        """Adds the names that have come since the last look. Those that are gone stay: what is
        deleted is deleted in the restarted script, too.

        Args:
            special: Names with two underscores on both sides that the module's code mentions:
                others are Python's, or a package's.
        """
        if len(namespace) == self._size:
            return
        is_first = not self._known
        self._size = len(namespace)
        members = namespace.get("_member_map_") if is_class else None  # of an enumeration
        for name, value in list(namespace.items()):
            if name in self._known or (
                _is_special(name) and not (name in special and _is_data(name, value))
            ):
                continue
            if name.startswith("_abc_" if is_class else _DYNAMOS) or (is_class and name in _FINAL):
                continue
            if members is not None and (name in members or _is_enums(name)):
                continue
            self._known.add(name)
            # A class or module that the script has made has no other name to be found by.
            stateless = is_first and issubclass(type(value), _STATELESS) and not is_made(value)
            if stateless or (is_class and _is_descriptor(value)):
                self.fixed.append(name)
                self.meant.append(value)
            else:
                self.values.append(name)

    def lacks(self, name: str) -> None:
        """Notes a name that is gone: if another one has come, the size is the same."""
        if name not in self._gone:
            self._gone.add(name)
            self._size = -1


class _Module:
    """One module of the script's own, as it was when it had `size` names."""

    __slots__ = (
        "_enums",
        "_enums_size",
        "_members_names",
        "classes",
        "foreign",
        "functions",
        "hashes",
        "is_open",
        "members",
        "name",
        "names",
        "namespace",
        "size",
        "special",
    )

    def __init__(self, name: str, namespace: dict[str, Any], before: _Module | None) -> None:
        self.name = name
        self.namespace = namespace
        self.size = len(namespace)
        self.names: _Names = _Names() if before is None else before.names
        self.classes: list[_Class] = []
        self.functions: list[tuple[str, FunctionType]] = []
        self._enums: list[tuple[str, enum.Enum]] = []
        self._enums_size = -1, 0
        self._members_names: dict[str, dict[str, None]] = (
            {} if before is None else before._members_names
        )
        # Members of enumerations that have attributes of the script's, and the names of these.
        self.members: list[tuple[str, enum.Enum, dict[str, None]]] = []
        known = {} if before is None else {id(one.kind): one for one in before.classes}
        for key, value in list(namespace.items()):
            # All by their classes: an object's own `__class__` may be code of the script's.
            is_class = issubclass(type(value), type)
            if is_class and value.__module__ == name and key == value.__qualname__:
                self._add_class(value, 0, known)
            elif type(value) is FunctionType and (
                value.__globals__ is namespace or value.__module__ == name
            ):
                self.functions.append((key, value))
        codes = _codes_of(name, namespace, self.functions)
        self.special = frozenset[str]().union(*map(special_names, codes))
        reads = frozenset[str]().union(*map(reads_in, codes))
        self.is_open = not _BY_TEXT.isdisjoint(reads)
        self.hashes = "hash" in reads and "hash" not in namespace
        self.foreign = _foreign_attributes(namespace, codes)

    def look_at_members(self) -> None:
        """Notes which members of enumerations have attributes that the script has given them.
        Names that are gone stay: what is deleted is deleted in the restarted script, too."""
        size = sum([len(vars(member)) for _, member in self._enums])
        gone = sum([name not in vars(one) for _, one, names in self.members for name in names])
        if (size, gone) == self._enums_size:  # one that is gone may have another in its place
            return
        self._enums_size = size, gone
        known = self._members_names
        for key, member in self._enums:
            for name, value in vars(member).items():
                if name not in _ENUMS or (name == "_value_" and not plain_key(value)):
                    known.setdefault(key, {})[name] = None
        self.members = [(key, one, known[key]) for key, one in self._enums if key in known]

    def still_has(self, key: str, function: FunctionType) -> bool:
        """Whether a function is still what its name means: one that a loop defines anew is not."""
        return "." in key or self.namespace.get(key) is function

    def _add_class(self, kind: type, depth: int, known: dict[int, _Class]) -> None:
        if issubclass(kind, enum.Enum):
            named = kind.__members__.items()
            self._enums += [(f"{kind.__qualname__}.{key}", member) for key, member in named]
        self.classes.append(known.get(id(kind)) or _Class(kind))
        self.functions += [(f"{kind.__qualname__}.{key}", one) for key, one in _functions_of(kind)]
        for key, value in list(vars(kind).items()):
            if (
                issubclass(type(value), type)
                and depth < 2
                and value.__qualname__ == f"{kind.__qualname__}.{key}"
            ):
                self._add_class(value, depth + 1, known)


class _Class:
    """One class, and those of its attributes that may be state."""

    __slots__ = ("is_plain", "kind", "names")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.names = _Names()
        # The metaclass of a package keeps its own attributes there.
        self.is_plain = type(kind).__module__ in ("abc", "builtins") or is_own(type(kind).__module__)


class _Made:
    """A class that a function has made.

    Attributes:
        called: what it is called in its module, the same in every process of the script.
        kind: gives it, while it lives.
    """

    __slots__ = ("called", "kind")

    def __init__(self, called: str, kind: type) -> None:
        self.called, self.kind = called, weakref.ref(kind)

    def functions(self) -> list[tuple[str, FunctionType]]:
        kind = self.kind()
        return [] if kind is None else _functions_of(kind)


def _functions_of(kind: type) -> list[tuple[str, FunctionType]]:
    """The functions behind a class's own methods and properties, by name."""
    found: list[tuple[str, Any]] = []
    for key, value in list(vars(kind).items()):
        if _is_special(key) and key not in _SPECIAL:
            continue
        if isinstance(value, property):
            found += [(key, value.fget), (f"{key}.fset", value.fset), (f"{key}.fdel", value.fdel)]
        elif isinstance(value, cached_property):
            found.append((key, value.func))
        elif isinstance(value, singledispatchmethod):
            registered = value.dispatcher.registry.items()
            found += [(f"{key}.{type_name(first)}", one) for first, one in registered]
        else:
            found.append((key, function_in(value)))
    return [(key, one) for key, one in found if type(one) is FunctionType]


def _made_classes() -> dict[str, list[_Made]]:
    """The classes of own modules to which no name leads, by module. Slow: once."""
    if _all_made():
        gc.collect()  # those that are gone are still there in one process and not in another
    numbers: Counter[str] = Counter()
    made: dict[str, list[_Made]] = {}
    for kind in _all_made():
        name = f"{kind.__module__}:{kind.__qualname__}"
        one = _Made(f"{kind.__qualname__}#{numbers[name]}", kind)
        made.setdefault(kind.__module__, []).append(one)
        numbers[name] += 1
    return made


def _all_made() -> list[type]:
    found: list[type] = []
    seen, work = {id(object)}, deque([object])
    while work:
        for kind in type.__subclasses__(work.popleft()):
            if id(kind) in seen:
                continue
            seen.add(id(kind))
            work.append(kind)
            try:
                if not issubclass(kind, enum.Enum) and is_own(kind.__module__) and is_made(kind):
                    found.append(kind)
            except Exception:  # noqa: BLE001, S112  # a metaclass may do anything
                continue
    return found


class Statics:
    """The script's own modules, as they were found last."""

    def __init__(self) -> None:
        self._known: list[_Module] = []
        self._made: dict[str, list[_Made]] = {}
        self._registries = Registries()
        self._count = -1  # of all modules that were imported then

    def capture(self, walk: CaptureWalk) -> list[tuple[str, Named, list[tuple[str, Named]], Named]]:
        """Encodes the state of all own modules.

        Returns:
            (module, its globals, attributes by class, functions) of each.

        Args:
            walk: What has encoded the frames.
        """
        found: list[tuple[str, Named, list[tuple[str, Named]], Named]] = []
        if walk.note_births:
            self._made = _made_classes()
        modules = self._own_modules(walk)
        if HASHES_DIFFER and any(module.hashes for module in modules):
            walk.lost("hash()", "builtin_function_or_method", _HASHED)
        with walk.outside({module.name for module in modules}):
            for module in modules:
                name = module.name
                names = _capture_names(
                    walk,
                    module.names,
                    module.namespace,
                    f"{name}:",
                    module.special,
                    is_open=module.is_open,
                )
                classes: list[tuple[str, Named]] = []
                for known in module.classes:
                    place = f"{name}:{known.kind.__qualname__}."
                    special = module.special if known.is_plain else frozenset[str]()
                    attributes = _capture_names(
                        walk, known.names, vars(known.kind), place, special, is_class=True
                    )
                    if attributes:
                        classes.append((known.kind.__qualname__, attributes))
                functions = [
                    (key, walk.encode(function, f"{name}:{key}"))
                    for key, function in module.functions
                    if has_state(function, walk) and module.still_has(key, function)
                ]
                for made in self._made.get(name, ()):
                    kind, place = made.kind(), f"{name}:{made.called}"
                    if kind is None:
                        continue
                    functions.append((made.called, walk.encode(kind, place)))
                    functions += [
                        (f"{made.called}.{key}", walk.encode(function, f"{place}.{key}"))
                        for key, function in made.functions()
                        if has_state(function, walk)
                    ]
                module.look_at_members()
                for key, member, kept in module.members:
                    place, held = f"{name}:{key}.", vars(member)
                    attributes = []
                    for attribute in kept:
                        value = held.get(attribute, MISSING)
                        _capture_value(walk, attribute, value, place, attributes)
                    if attributes:
                        classes.append((key, attributes))
                if names or classes or functions:
                    found.append((name, names, classes, functions))
            found += _capture_foreign(walk, modules)
            for package, there in _hooks_of_all(walk.note_births).items():
                encoded = encode_hooks(there, package, 0, walk) if there else []
                if package == _TORCH:
                    encoded += [(name, UNBOUND) for name in node_hooks.gone()]
                found.append((_HOOKS_OF + package, [], [], encoded))  # none: what is there has come
            there = self._registries.own()
            registered = encode_hooks(there, registries.PLACE, 0, walk) if there else []
            found.append((_REGISTERED, [], [], registered))
        return found

    def forget(self) -> None:
        """A training has ended: nothing of it is held."""
        self._made, self._known, self._count = {}, [], -1

    def _find(self, module: ModuleType, qualname: str) -> Any:
        called, _, key = qualname.rpartition(".")
        for made in self._made.get(module.__name__, ()):
            if qualname == made.called:
                return made.kind() or MISSING
            if called == made.called:
                return dict(made.functions()).get(key, MISSING)
        return _find(module, qualname)

    def plan(
        self, walk: RestoreWalk, captured: list[tuple[str, Named, list[tuple[str, Named]], Named]]
    ) -> None:
        """Plans the writes that give own modules, classes and functions what `capture` took."""
        for name, names, classes, functions in captured:
            if name.startswith(_HOOKS_OF):
                package = name.removeprefix(_HOOKS_OF)
                walk.put_hooks(functions, _hooks_of_all().get(package, []), package)
                continue
            if name == _REGISTERED:
                walk.put_hooks(functions, self._registries.own(), registries.PLACE)
                continue
            module = sys.modules.get(name)
            if module is None:
                walk.problems.append((name, "module", "imported after the first step"))
                continue
            namespace = vars(module)
            for key, encoded in names:
                if encoded == UNBOUND:
                    walk.write(partial(namespace.pop, key, None))
                    continue
                value = walk.resolve(encoded, namespace.get(key, MISSING), f"{name}:{key}")
                if value is not KEEP and value is not namespace.get(key, MISSING):
                    walk.write(partial(namespace.__setitem__, key, value))
            for qualname, attributes in classes:
                kind = self._find(module, qualname)
                if not isinstance(kind, (type, enum.Enum)):
                    walk.problems.append((f"{name}:{qualname}", "class", "not found"))
                    continue
                for key, encoded in attributes:
                    live = vars(kind).get(key, MISSING)
                    if encoded == UNBOUND:
                        if live is not MISSING:
                            walk.write(partial(delattr, kind, key))
                        continue
                    value = walk.resolve(encoded, live, f"{name}:{qualname}.{key}")
                    if value is not KEEP and value is not live:
                        where = f"{name}:{qualname}.{key}"
                        walk.write(partial(_set, walk, where, kind, key, value))
            for key, encoded in functions:
                walk.resolve(encoded, self._find(module, key), f"{name}:{key}")

    def _own_modules(self, walk: CaptureWalk) -> list[_Module]:
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            namespaces = {
                name: vars(sys.modules[name]) for name in list(sys.modules) if is_own(name)
            }
            before = {module.name: module for module in self._known}
            self._known = []
            for name, namespace in namespaces.items():
                module = before.get(name)
                self._known.append(
                    module
                    if module is not None and module.namespace is namespace
                    else _Module(name, namespace, None)
                )
        for i, module in enumerate(self._known):
            if len(module.namespace) != module.size:
                self._known[i] = _Module(module.name, module.namespace, module)
        if len(self._known) > _MOST_MODULES:
            walk.lost(
                self._known[_MOST_MODULES].name,
                "module",
                f"the script has more than {_MOST_MODULES} modules of its own",
            )
            return self._known[:_MOST_MODULES]
        return self._known


def _hooks_of_all(is_first: bool = False) -> dict[str, hooks.Hooks]:
    """By package: hooks that hold for all modules or all optimizers, and those of autograd's nodes;
    filters of loggers. `is_first`: this is the first program point."""
    return {
        _TORCH: [*hooks.of_all(), *node_hooks.of_nodes(is_first)],
        "logging": logger_filters.of_script(),
    }


def report_threads(walk: CaptureWalk) -> bool:
    """Reports the threads that run functions of the script: what they hold is not captured. Not the
    main thread, which waits where another one trains.

    Returns:
        Whether there are any.
    """
    found = False
    here, main = threading.current_thread(), threading.main_thread()
    for thread in threading.enumerate():
        # A timer calls its `function`.
        run = getattr(thread, "_target", None) or getattr(thread, "function", type(thread).run)
        if thread not in (here, main) and hooks.is_own_hook(run):
            place = f"thread {getattr(hooks.behind(run), '__qualname__', type(thread).__name__)}"
            walk.lost(place, type_name(type(thread)), _BESIDE)
            found = True
    return found


def _capture_names(
    walk: CaptureWalk,
    names: _Names,
    namespace: Mapping[str, Any],
    prefix: str,
    special: frozenset[str],
    is_class: bool = False,
    is_open: bool = True,
) -> Named:
    names.look(namespace, is_class, special)
    if walk.note_births:
        places = [prefix + name for name in names.fixed]
        walk.births.named.update(zip(places, names.meant, strict=True))
    found: Named = []
    # Most are what they were: their names are not looked at one by one.
    if any(map(is_not, map(namespace.get, names.fixed), names.meant)):
        for name, meant in zip(names.fixed, names.meant, strict=True):
            value = namespace.get(name, MISSING)
            if value is MISSING:
                names.lacks(name)
                found.append((name, UNBOUND))
            elif value is not meant:
                found.append((name, _capture_switched(walk, value, prefix + name)))
    done = 0
    while True:
        for name in names.values[done:]:
            value = namespace.get(name, MISSING)
            if value is MISSING:
                names.lacks(name)
            _capture_value(walk, name, value, prefix, found, is_open)
        done = len(names.values)
        names.look(namespace, is_class, special)
        if len(names.values) == done:  # names that are gone may have others in their place
            return found


def _capture_value(
    walk: CaptureWalk, name: str, value: Any, prefix: str, found: Named, is_open: bool = True
) -> None:
    """Args:
    is_open: more than the main module's code uses by name may be read.
    """
    kind = type(value)
    if kind in ATOMS:
        first, place = walk.births.constants, prefix + name
        if prefix == _MAIN_PREFIX and kind in (str, bytes) and len(value) > _MOST_CHARS:
            return
        if walk.note_births:
            first[place] = value
            walk.encode(value, place)  # it may be a handle
        elif place not in first or not is_same_atom(first[place], value):
            found.append((name, walk.encode(value, place)))
    elif value is MISSING:
        found.append((name, UNBOUND))
    # The frames have captured the objects that the main module's code still uses.
    elif (
        is_open
        or prefix != _MAIN_PREFIX
        or issubclass(type(value), (FunctionType, ModuleType, type))
    ):
        found.append((name, walk.encode(value, prefix + name)))


def _capture_switched(walk: CaptureWalk, value: Any, place: str) -> Any:
    """Captures what a name has come to mean that meant a function, a class or a module before."""
    if _is_descriptor(value):
        walk.lost(place, type_name(type(value)), _SWITCHED)
        return KEEP
    return walk.encode(value, place)


def _is_descriptor(value: Any) -> bool:
    """Whether it is a property, a class method and the like. Those of the script's own classes may
    hold values."""
    kind = type(value)
    if kind is partialmethod:
        return all(type(part) in ATOMS for part in (*value.args, *value.keywords.values()))
    return kind is not FunctionType and hasattr(kind, "__get__") and not is_own(kind.__module__)


def _capture_foreign(
    walk: CaptureWalk, modules: list[_Module]
) -> list[tuple[str, Named, list[tuple[str, Named]], Named]]:
    """Captures what own modules set in modules that are not the script's (`sys.steps = 1`)."""
    found: dict[str, Named] = {}
    wanted = dict.fromkeys(one for module in modules for one in module.foreign)
    there = vars(builtins)
    if len(there) != len(_BUILTINS):  # in all modules, names may mean what is there
        added = [name for name in there if name not in _BUILTINS and not _is_special(name)]
        kept = [name for name in added if name != "_" and attachments.is_kept(there[name])]
        wanted.update(dict.fromkeys(("builtins", name) for name in kept))
    for name, attribute in wanted:
        other = sys.modules.get(name)
        value = MISSING if other is None else vars(other).get(attribute, MISSING)
        _capture_value(walk, attribute, value, f"{name}:", found.setdefault(name, []))
    return [(name, named, [], []) for name, named in found.items() if named]


def _codes_of(
    name: str, namespace: dict[str, Any], functions: list[tuple[str, FunctionType]]
) -> list[CodeType]:
    """The code of an own module: that of its functions, and of the main module itself."""
    codes = [function.__code__ for _, function in functions]
    frame: Any = sys._getframe() if name == "__main__" else None
    while frame is not None:
        if frame.f_globals is namespace and frame.f_code.co_name == "<module>":
            codes.append(frame.f_code)
        frame = frame.f_back
    return codes


def _foreign_attributes(
    namespace: dict[str, Any], codes: list[CodeType]
) -> list[tuple[str, str]]:
    """Names of the modules of others, and of the attributes of these, that an own module's code
    sets. Not reft's: a restore must not replace parts of what carries it out."""
    found: list[tuple[str, str]] = []
    for key, attribute in sorted(frozenset[tuple[str, str]]().union(*map(attributes_set, codes))):
        imported = key.removeprefix("import ")
        other: Any = _module_of(imported, sys.modules if imported != key else namespace)
        if not issubclass(type(other), ModuleType):
            continue
        name: str = other.__name__
        is_others = sys.modules.get(name) is other and not is_own(name) and not is_made(other)
        if is_others and name.partition(".")[0] != "reft":
            found.append((name, attribute))
    return found


def _module_of(name: str, namespace: Mapping[str, Any]) -> Any:
    """What a name with dots means, if all that it leads through are modules."""
    for end in range(len(name), 0, -1):
        if end < len(name) and name[end] != ".":
            continue
        value: Any = namespace.get(name[:end], MISSING)
        if value is MISSING:
            continue
        for part in name[end + 1 :].split(".") if end < len(name) else ():
            value = vars(value).get(part) if issubclass(type(value), ModuleType) else None
        return value
    return None


def _set(walk: RestoreWalk, where: str, kind: Any, key: str, value: Any) -> None:
    try:
        setattr(kind, key, value)
    except Exception as error:  # noqa: BLE001  # a class may do anything
        walk.problems.append((where, type(error).__name__, str(error)))


def _is_enums(name: str) -> bool:
    """Whether a name with one underscore on both sides is one that `enum` keeps for itself."""
    return name.startswith("_") and name.endswith("_")


def _find(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    parts = qualname.split(".")
    for i, part in enumerate(parts):
        if issubclass(type(value), type):
            function = dict(_functions_of(value)).get(".".join(parts[i:]))
            if function is not None:
                return function
            if issubclass(value, enum.Enum) and part in value.__members__:
                value = value.__members__[part]
                continue
        value = vars(value).get(part, MISSING) if hasattr(value, "__dict__") else MISSING
        if value is MISSING:
            return MISSING
    return function_in(value)


def _is_data(name: str, value: Any) -> bool:
    """Whether a name with two underscores on both sides is the script's, for a plain value."""
    return not is_pythons(name) and value is not None and is_light(value)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
