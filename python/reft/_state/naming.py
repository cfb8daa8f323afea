"""Names of modules that are the same in every process of a script.

A module is called by its path from a root, `m0.encoder.layer.3`, and keeps that name while it lives:
a script may wrap its model in another one later, and a restarted script has not done so yet at its
first step.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch


class ModuleNames:
    """What the modules of one process are called."""

    def __init__(self) -> None:
        # By id: a module of the script's own may compare and hash as it likes.
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def add(self, roots: list[torch.nn.Module]) -> None:
        """Names roots and their parts, unless they have a name."""
        used = set()
        for root in roots:
            names = filter(None, map(self.get, root.modules()))
            used |= {name.partition(".")[0] for name in names}
        numbers = (f"m{number}" for number in itertools.count())
        free = (number for number in numbers if number not in used)
        for root in roots:
            number = ""
            for path, module in root.named_modules():
                if self.get(module) is None:
                    number = number or next(free)
                    self._name(module, f"{number}.{path}" if path else number)

    def get(self, module: torch.nn.Module) -> str | None:
        found = self._known.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def _name(self, module: torch.nn.Module, name: str) -> None:
        key = id(module)
        known = self._known

        def forget(reference: weakref.ref[Any]) -> None:
            if known.get(key, (None,))[0] is reference:
                del known[key]

        known[key] = weakref.ref(module, forget), name


of_process = ModuleNames()


def held(root: torch.nn.Module, kind: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(full name, dict that holds it, key) of each place for a buffer or parameter of a named
    module; what stands there may be None."""
    for _, module in root.named_modules():
        prefix = of_process.get(module)
        if prefix is None:
            continue
        there: dict[str, Any] = getattr(module, kind)
        for key in there:
            yield f"{prefix}.{key}", there, key
