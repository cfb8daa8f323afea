"""Gives the memory of the vault back before the kernel ends a process for want of it.

A vault takes memory that the job may need later. If little is left, or the processes of a control
group wait for memory, the slot goes that a restart does not need, and snapshots end; if that does
not help, the other slots and the copies of other nodes' snapshots go. If the kernel has ended a
process of the control group all the same,
the next attempt resumes, and then does without snapshots; if it happens there as well, the attempt
after that keeps nothing once it has resumed.

Threads: the training thread. Errors: none besides those of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from reft import _C, _voice
from reft._link import host_memory, job_identity, vault_place
from reft._link.mesh import Copies
from reft._state import recomputed

_LOOK_SEC = 1.0
_SETTLE_SEC = 20.0  # the kernel's figure is of the last ten seconds, so it is late


class MemoryWatch:
    """Of one rank.

    Args:
        oom_kills: as in `startup.Agreed`.
        copies: what this node keeps for others.

    Attributes:
        given_up: why no snapshots are taken; "": they are.
    """

    def __init__(
        self,
        env: dict[str, Any],
        job: job_identity.Job,
        engine: _C.Rank,
        oom_kills: int,
        copies: Copies | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._engine, self._copies, self._clock = job, engine, copies, clock
        self._watches = vault_place.in_memory(env["vault_dir"])
        self._look_at = self._settled_at = 0.0
        self._to_release = oom_kills > 0  # once nothing reads the older slots any more
        self._everything = oom_kills > 1
        self._stage = 0  # 1: one slot is left at most; 2: none
        self.given_up = ""
        if oom_kills:
            self.given_up = "the kernel has ended a process of this job for want of memory"
            if job.rank == 0:
                _voice.warn(
                    f"{self.given_up}: this attempt trains WITHOUT snapshots. To have them, raise"
                    " the memory limit, or set REFT_VAULT_DIR (vaults on a disk) or"
                    " REFT_SNAPSHOT_HOST_BYTES (memory that they may take)"
                )
        engine.set_memory_marks(host_memory.oom_mark(), bool(oom_kills))

    def point(self) -> None:
        """At a program point, when the resume is over."""
        if self._to_release:
            self._to_release = False
            self._stage = 2 if self._everything else 1
            self._give_back()
        if self.given_up:
            recomputed.of_process.forget()
        now = self._clock()
        if not self._watches or self._stage == 2 or now < self._look_at:
            return
        self._look_at = now + _LOOK_SEC
        if host_memory.is_short():
            self._shrink("memory is short")
        elif now >= self._settled_at and host_memory.is_stalled():
            self._shrink("processes wait for memory")
        else:
            return
        self._settled_at = now + _SETTLE_SEC

    def end(self, why: str) -> None:
        """Snapshots have ended for another reason. What is not needed for a restart goes at once;
        the rest may have to go later."""
        self.given_up = self.given_up or why
        if self._stage == 0:
            self._stage = 1
            self._engine.give_back(False)

    def _give_back(self) -> int:
        """Bytes of this rank's vault that are free now. Other nodes' copies go last, too."""
        if self._stage == 2 and self._copies is not None:
            self._copies.drop()
        return self._engine.give_back(self._stage == 2)

    def _shrink(self, why: str) -> None:
        self._stage += 1
        freed = self._give_back()
        self.given_up = self.given_up or why
        self._engine.set_memory_marks(host_memory.oom_mark(), True)
        room = host_memory.tightest()
        left = "" if room is None else f" ({_voice.size(room.most)} {room.what})"
        kept = (
            "the newest snapshot stays" if self._stage == 1 else "no snapshot of this rank is left"
        )
        _voice.warn(
            f"rank {self._job.rank}: {why}{left}: snapshots have ended and gave"
            f" {_voice.size(freed)} back; {kept}"
        )
