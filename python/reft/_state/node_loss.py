"""What the loss of one node would cost, as far as the groups of this rank tell.

Threads: any. Errors: none.
"""

from __future__ import annotations

from reft import _C, _voice
from reft._link.job_identity import Layout
from reft._state.discovery import State


def weakness(state: State, layout: Layout, protection: str) -> str:
    """Says why a rank of a lost node might not come back; "" if each shard of this rank's state is
    on two nodes.

    Args:
        state: of this rank, with the ranks that share each region.
        protection: a value of REFT_SNAPSHOT_PROTECTION.
    """
    known = state.regions
    alone = [region.name for region in known if not (region.ranks or region.is_replaceable)]
    if alone := alone + sorted(state.strided.keys() - state.replaceable):
        what = _voice.plural(len(alone), "tensor")
        return f"no other rank has {what} of this rank (first: {alone[0]})"
    for ranks in sorted({region.ranks for region in known if region.ranks}):
        for node in sorted({layout.node_of[rank] for rank in ranks}):
            lost = [layout.node_of[rank] == node for rank in ranks]
            if not _C.survives_loss(protection, lost):
                there = [rank for rank, is_lost in zip(ranks, lost, strict=True) if is_lost]
                return f"{_voice.ranks(there)} of one node keep the only copies of a shard"
    return ""
