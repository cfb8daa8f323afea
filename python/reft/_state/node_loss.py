"""What the loss of nodes would cost, as far as the groups of this rank tell.

Threads: any. Errors: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reft import _C, _voice
from reft._link.job_identity import Layout
from reft._link.mesh import keepers
from reft._link.protection import is_copied, placement
from reft._state.discovery import State


@dataclass(frozen=True)
class Survival:
    """Attributes:
    nodes: how many may be lost, whichever, without loss of a shard of this rank's state.
    why: a lost node is not survived, and this is why; "" if `nodes` is positive.
    """

    nodes: int
    why: str = ""


def survival(state: State, layout: Layout, protection: str) -> Survival:
    """How many nodes may be lost.

    Args:
        state: of this rank, with the ranks that share each region.
        protection: a value of REFT_SNAPSHOT_PROTECTION.
    """
    found = _survival(state, layout, placement(protection))
    if not is_copied(protection) or found.nodes > 0:
        return found
    if not keepers(layout):
        return Survival(0, "all ranks are on one node")
    return Survival(1)  # whichever it is, another one has what its ranks stored


def _survival(state: State, layout: Layout, protection: str) -> Survival:
    known = state.regions
    alone = [region.name for region in known if not (region.ranks or region.is_replaceable)]
    if alone := alone + sorted(state.strided.keys() - state.replaceable):
        what = _voice.plural(len(alone), "tensor")
        return Survival(0, f"no other rank has {what} of this rank (first: {alone[0]})")
    if why := parity_hindrance(state, protection):
        return Survival(0, f"{why}: use REFT_SNAPSHOT_PROTECTION=arc")
    least = wanted(layout, protection)
    for ranks in sorted({region.ranks for region in known if region.ranks}):
        nodes, weakest = _C.survival(protection, [layout.domain_of[rank] for rank in ranks])
        if nodes == 0:
            there = _voice.ranks(sorted(ranks[member] for member in weakest))
            if len(weakest) == 1:
                return Survival(0, f"{there} keeps the only copy of a shard")
            return Survival(0, f"{there} are on one node, and a shard is lost with them")
        least = min(least, nodes)
    return Survival(least)


def parity_hindrance(state: State, protection: str) -> str:
    """Why a rank with this state stores no parities although the protection has them; "": it
    does, or the protection has none."""
    if not _C.has_parities(protection):
        return ""
    devices = sorted({_device(region.tensor) for region in state.regions})
    why = _C.parity_hindrance(devices)
    return f"no parities can be made of this rank's state ({why})" if why else ""


def _device(tensor: torch.Tensor) -> int:
    return tensor.get_device() if tensor.is_cuda else -1


def wanted(layout: Layout, protection: str) -> int:
    """Lost nodes that the protection survives if each replica is on a node of its own."""
    losses = _C.survivable_losses(placement(protection), layout.world)
    return max(losses, 1) if is_copied(protection) else losses
