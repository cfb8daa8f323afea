"""The script's optimizers: which ones it has, what identifies them, and what has changed in them.

`signature` identifies an optimizer in another process, where a restarted script has made it again.
Within a process, `identities` and `structure` change when the state has to be found again, and
`replaced_tensors` names hyperparameters that are other tensors than at first.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from reft._state import gradients, heap, recomputed, registry
from reft._state.constructions import of_process
from reft._state.contents import shape_of

# Tensors that stood in parameter groups when the optimizer was found, by id of the optimizer.
_first_tensors: dict[int, tuple[weakref.ref[Any], dict[tuple[int, Any], weakref.ref[Any]]]] = {}


def note_first_tensors(optimizers: list[Optimizer]) -> None:
    """Notes which tensors stand in parameter groups, once for each optimizer.

    A script may keep writing to the one that it has given (`lr = torch.tensor(0.1)`), or have the
    group hold a new one in each step.
    """
    for optimizer in optimizers:
        known = _first_tensors.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            found = {
                (g, key): weakref.ref(value)
                for g, group in enumerate(optimizer.param_groups)
                for key, value in group.items()
                if isinstance(value, torch.Tensor)
            }
            _first_tensors[id(optimizer)] = weakref.ref(optimizer), found
    for key in [key for key, (reference, _) in _first_tensors.items() if reference() is None]:
        del _first_tensors[key]


def replaced_tensors(optimizers: list[Optimizer]) -> list[str]:
    """Names of tensors in parameter groups that are not the ones of the beginning."""
    names = []
    for k, optimizer in enumerate(optimizers):
        _, first = _first_tensors.get(id(optimizer), (None, {}))
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    reference = first.get((g, key))
                    if reference is None or reference() is not value:
                        names.append(f"o{k}.g{g}.{key}")
    return names


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


def parameter_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape; (-1,) for a parameter whose module has not run yet."""
    return (-1,) if is_lazy(parameter) else tuple(parameter.shape)


def signature(optimizer: Optimizer) -> str:
    """Identifies an optimizer in another process of the same script: by its class and the shapes of
    its parameters."""
    # Sorted: a script may have collected them over a set.
    shapes = [sorted(map(parameter_shape, group["params"])) for group in optimizer.param_groups]
    kind = type(optimizer)
    return hashlib.blake2b(
        f"{kind.__module__}.{kind.__qualname__} {shapes}".encode(), digest_size=8
    ).hexdigest()


def not_yet_stepped(
    known: list[Optimizer], wanted: list[tuple[str, str]], by_key: bool = False
) -> list[Optimizer]:
    """Optimizers of the script that are not among `known`, one for each of `wanted`: signature, and
    what tells it from others of this signature (`Constructions.key_of`), if there is one by that
    name, else any (not if `by_key`). The list ends before the first that does not exist."""
    if not wanted:
        return []
    taken = set(map(id, with_inner(known)))
    everything = of_process.in_order(heap.live(Optimizer)[0], Optimizer)
    others = [o for o in everything if id(o) not in taken]
    found: list[Optimizer] = []
    for text, key in wanted:
        fitting = [
            o for o in others if all(o is not f for f in found) and signature(o) == text
        ]
        named = [o for o in fitting if of_process.key_of(o) == key]
        chosen = named or (fitting if not by_key or not key else [])
        if not chosen:
            break
        found.append(chosen[0])
    return found


def identities(optimizers: list[Optimizer]) -> tuple[int, ...]:
    """Changes when optimizers, parameters or registered objects come, go or are replaced. Cheap:
    every step calls it."""
    items: list[int] = [registry.generation, of_process.count]
    for source in with_inner(optimizers):
        items.append(id(source))
        for group in source.param_groups:
            items.extend(map(id, group["params"]))
    return tuple(items)


def structure(optimizers: list[Optimizer]) -> list[Any]:
    """Changes with what optimizers keep, but not when they put other tensors in the same places.
    Cheap: every step calls it."""
    found: list[Any] = []
    for source in with_inner(optimizers):
        found += [len(source.state), len(recomputed.of_process.held_beside(source))]
        found += map(shape_of, source.state.values())
        for group in source.param_groups:
            found += [shape_of(value) for key, value in group.items() if key != "params"]
        if gradients.of_process.outlive:
            found += [p.grad is None for group in source.param_groups for p in group["params"]]
    return found
