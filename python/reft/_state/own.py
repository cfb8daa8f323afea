"""Which modules are the script's own: those whose file is neither the interpreter's nor that of an
installed package. A package that was installed from a folder of this machine (`pip install .`) is
the script's own, too: pip notes where it comes from (PEP 610).

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import sys
import sysconfig
import urllib.parse
import weakref
from types import ModuleType
from typing import Any

_NOT_OWN = frozenset(
    {"torch", "reft", "reft_autoload", "numpy", "triton", "sitecustomize", "usercustomize"}
)
# Modules by name and whether they are own: asked for some thirty times a step.
_known: dict[str, tuple[weakref.ref[ModuleType], bool]] = {}
# Modules that are imported, by identity.
_found: dict[int, ModuleType] = {}
_INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages
_LONGEST_URL = _LONGEST_RECORD = 1 << 16
_MOST_FILES = 200  # of a project of the user's
_INTERPRETER = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib"))


def is_own(name: str | None) -> bool:
    """Says whether the module of that name, as imported, is one of the script's."""
    if name == "__main__":
        return True
    if name is None:
        return False
    module: Any = sys.modules.get(name)
    known = _known.get(name)
    if known is not None and known[0]() is module:
        return known[1]
    is_one = _is_own(name, module)
    if type(module) is ModuleType:  # a lazy one may become another
        _known[name] = weakref.ref(module), is_one
    return is_one


def _is_own(name: str, module: Any) -> bool:
    # A lazy module must not be made to load: a class of module is asked nothing. One that a module
    # has given itself is the script's own work.
    kind = type(module)
    if not issubclass(kind, ModuleType) or (kind is not ModuleType and kind.__module__ != name):
        return False
    names = ModuleType.__getattribute__(module, "__dict__")
    if names.get("__name__") != name or name.partition(".")[0] in _NOT_OWN:
        return False
    file = names.get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    folders = file.split(os.sep)
    at = max((i for i, folder in enumerate(folders) if folder in _INSTALLED), default=-1)
    if at < 0:
        return not file.startswith(_INTERPRETER)
    return name.partition(".")[0] in _projects_in(os.sep.join(folders[: at + 1]))


@functools.cache
def _projects_in(folder: str) -> frozenset[str]:
    """The modules in a folder of installed packages that come from folders which are still there.
    (Those of conda's packages are not.)"""
    found: set[str] = set()
    for path in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "direct_url.json")):
        try:
            with open(path, "rb") as file:
                source = json.loads(file.read(_LONGEST_URL))
            parts = urllib.parse.urlsplit(source["url"])
            where = urllib.parse.unquote(parts.path)
            if parts.scheme != "file" or "dir_info" not in source or not os.path.isdir(where):
                continue
            with open(os.path.join(os.path.dirname(path), "RECORD")) as record:
                files = [one.split(",")[0] for one in record.read(_LONGEST_RECORD).splitlines()]
            if sum(one.endswith(".py") for one in files) > _MOST_FILES:
                continue  # a library that was built here
            names = {one.split("/")[0] for one in files}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        found.update(name.removesuffix(".py") for name in names)
    return frozenset(found) - _NOT_OWN


def is_made(value: Any) -> bool:
    """Says whether a module or a class is one that the script's code has made at run time: no name
    leads to it."""
    if isinstance(value, ModuleType):
        if _found.get(id(value)) is value:
            return False
        there = vars(value)
        has_source = there.get("__spec__") is not None or there.get("__file__") is not None
        name = str(there.get("__name__", ""))
        if has_source and sys.modules.get(name) is value:
            _found[id(value)] = value  # modules stay
        if has_source:  # a file that was run as a module and left no name: many read settings so
            return name not in sys.modules and _is_own(name, value)
        return name != "__main__"
    if not isinstance(value, type) or not is_own(value.__module__):
        return False
    found: Any = sys.modules[value.__module__]
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not value
