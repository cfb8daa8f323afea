"""A DDP job that restores its own snapshot again and again, as a restart would: for benchmarks.

Used in the ranks, after `init_process_group(backend="reft")`.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reft
from reft import _C
from reft._resume import restorer
from reft._session import current

WIDTH = 1024
BYTES_PER_VALUE = 12  # a parameter and the two moments of AdamW


class Restored:
    """Trains two steps and saves a snapshot. Collective, as all of its methods are.

    Attributes:
        model: not its DistributedDataParallel.
        tensors: the live ones that a snapshot holds.
        total: their bytes.
    """

    def __init__(self, state_mb: int) -> None:
        count = max(1, state_mb * 1_000_000 // (BYTES_PER_VALUE * WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
        self._ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self._ddp.parameters(), lr=1e-4)
        for _ in range(2):
            self._ddp(torch.randn(2, WIDTH)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert reft.snapshot_now() == 2
        session = current.session()
        assert session is not None and session.engine is not None and session.planner is not None
        state = session.planner.state
        assert state is not None and session.client is not None
        self._client, self._state = session.client, state
        self.tensors = [region.current() for region in state.regions]
        self._wanted = [tensor.clone() for tensor in self.tensors]
        self.total = sum(tensor.nbytes for tensor in self.tensors)
        dist.barrier()
        text, faults = _C.inventory_of(session.engine.fd, 0)
        assert not faults
        self._inventories = [""] * dist.get_world_size()
        dist.all_gather_object(self._inventories, text)

    def plan(self, lost: Collection[int] = ()) -> _C.RestorePlan:
        """The plan of a restart on one node, made from the live vaults of all ranks but `lost`."""
        left = [text for rank, text in enumerate(self._inventories) if rank not in lost]
        merged = _C.merge_inventories(left)
        plan, rejected, _ = _C.plan_restore(merged, [0] * dist.get_world_size())
        assert plan is not None, rejected
        return plan

    def restore(self, plan: _C.RestorePlan) -> float:
        """Seconds in which all of the state comes back on this rank; checks its bytes."""
        for tensor in self.tensors:
            tensor.detach().fill_(7)
        dist.barrier()
        begin = time.perf_counter()
        restorer.restore(_C.Restorer(self._client, plan, dist.get_rank()), self._state, 1)
        took = time.perf_counter() - begin
        dist.barrier()  # the check of one rank slows down no other one
        self.check()
        return took

    def copy(self) -> float:
        """Seconds in which memcpy writes the same bytes to the same place."""
        dist.barrier()
        begin = time.perf_counter()
        for tensor, wanted in zip(self.tensors, self._wanted, strict=True):
            tensor.detach().copy_(wanted)
        return time.perf_counter() - begin

    def check(self) -> None:
        """The live state is bit for bit that of the snapshot."""
        assert all(torch.equal(a, b) for a, b in zip(self.tensors, self._wanted, strict=True))
