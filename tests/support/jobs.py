"""Identities of ranks, for tests in which nobody agrees on them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from reft import _C
from reft._link.agreement import Agreed
from reft._link.job_identity import Job, Layout
from reft._link.trusted_store import TrustedStore


def job(rank: int = 0, world: int = 1, local_world: int | None = None, **more: Any) -> Job:
    """A rank of a job called `job`, on nodes of `local_world` ranks each; default: on one node."""
    return Job("job", Layout.in_blocks(world, local_world or world), rank, **more)


def agreed(rank: int = 0, world: int = 1, overhead_percent: int = 0) -> Agreed:
    """What such a rank knows after the exchange."""
    return Agreed(job(rank, world), 9, overhead_percent)


def trusted(store: Any = None, secret: bytes = bytes(32), attempt: str = "one") -> TrustedStore:
    """A store whose values ranks of one job have sealed; default: an empty one in memory."""
    return TrustedStore(
        dist.HashStore() if store is None else store,
        _C.ValueSeal(secret, attempt, 0),
        _C.ValueSeal(secret, "all attempts", 0),
    )
