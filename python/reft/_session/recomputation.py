"""Decides which step is computed again to verify a resume, from which one, and with what it is
compared.

Two cases:

- The vaults hold the newest committed step s whole and the step before it: s is computed again
  from that step, and compared with all of s.
- The job died while it copied the step after s: that step, which training computes next anyway, is
  compared with what had been copied. The small state is written first, so it is there nearly
  always.

A verification must not end a job. A script may fail when it repeats what it has done (a file that
exists now), so s is computed again only while the launcher can start the ranks once more, and not
after an attempt that ended over it.

Threads: the training thread, before training. Errors: what the store raises.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from reft import _C, _voice
from reft._continuation import plain
from reft._link import gather, job_identity, launch
from reft._link.trusted_store import TrustedStore
from reft._session.startup import VERIFY, Source

_SLOWEST_BYTES_PER_SEC = 1e9
_READINGS = 3  # of a snapshot, more than a resume has without: put back twice, compared twice


@dataclass(frozen=True)
class Recomputation:
    """A step that is computed again.

    Attributes:
        step: its number.
        base: the step from which it is computed.
        unfinished: what this rank had copied of it, None for nothing. Used if `whole` is False.
        whole: whether all of the step was saved: it is the one that training goes on from then.
    """

    step: int
    base: Source
    unfinished: _C.UnfinishedStep | None
    whole: bool

    def unfinished_small_state(self) -> dict[str, Any] | None:
        """The small state of `unfinished`, as it was pickled; None if it was not copied."""
        objects = b"" if self.unfinished is None else self.unfinished.objects
        return plain.loads(objects) if objects else None


@dataclass(frozen=True)
class Agreed:
    """What all ranks do about a verification.

    Attributes:
        recomputed: None if nothing is computed again.
        unverified: why not; "" if a verification is not wanted.
        given_up: whether it is not to be tried again under these circumstances.
    """

    recomputed: Recomputation | None = None
    unverified: str = ""
    given_up: bool = False


@dataclass
class _Own:
    """What one rank knows of the steps around the newest one.

    Attributes:
        plan: of the step before it, None if the vaults do not hold one.
        base: that step, if this rank's own vault has it.
        unfinished: what it had copied of the step after it.
        fault: why it cannot read them, "" if it can.
        died_at: the step that it computed again when it died, 0 for none.
        seconds: length of its newest step before the restart.
        restore_seconds: longest time that reading a snapshot may take.
    """

    plan: _C.RestorePlan | None = None
    base: Source | None = None
    unfinished: _C.UnfinishedStep | None = None
    fault: str = ""
    died_at: int = 0
    seconds: float = 0.0
    restore_seconds: float = 0.0


def agree(
    env: dict[str, Any],
    job: job_identity.Job,
    store: TrustedStore,
    client: _C.AgentClient,
    newest: Source,
    inventory: str,
    own_fd: int,
    circumstances: str,
) -> Agreed:
    """Decides the same on all ranks.

    Args:
        newest: the step that training goes on from.
        inventory: of all vaults.
        own_fd: descriptor of this rank's vault, -1 for none.
        circumstances: see `verification.circumstances`.
    """
    if env["resume_verify"] == "off" or env["resume"] != "exact":
        if job.world > 1:
            # Settings may differ between nodes. Others do not wait for this rank, nor it for them.
            is_off = env["resume_verify"] == "off"
            why = "REFT_RESUME_VERIFY=off" if is_off else f"REFT_RESUME={env['resume']}"
            gather.refuse(job, store, VERIFY, why)
        return Agreed()
    own = _own(job, client, newest, inventory, own_fd)
    answer = {
        "changed": newest.saved.get("verified") != circumstances,
        "after": -1 if own.unfinished is None else own.unfinished.step,
        "died_at": own.died_at,
        "fault": own.fault and f"rank {job.rank}: {own.fault}",
        "seconds": own.seconds,
        "restore_seconds": own.restore_seconds,
    }
    conclude = partial(_concluded, env, job, newest, own)
    gathered = gather.gather(job, store, VERIFY, json.dumps(answer), _merge, conclude)
    if gathered.refusals:
        rank = min(gathered.refusals)
        return Agreed(unverified=f"rank {rank} does not take part: {gathered.refusals[rank]}")
    decided = gather.parsed(gathered.text)
    if decided["whole"] and own.base is not None:
        return Agreed(Recomputation(newest.plan.step, own.base, None, True))
    if not decided["after"]:
        return Agreed(None, decided["why"], decided["died_at"] > 0)
    after, unfinished = newest.plan.step + 1, own.unfinished
    if unfinished is not None and unfinished.step != after:
        unfinished = None
    recomputed = Recomputation(after, newest, unfinished, False)
    return Agreed(recomputed, given_up=decided["died_at"] > 0)


def _own(
    job: job_identity.Job, client: _C.AgentClient, newest: Source, inventory: str, own_fd: int
) -> _Own:
    own, plan = _Own(), newest.plan
    try:
        if own_fd >= 0:
            listing = _C.list_vault(own_fd)
            own.died_at = int(listing["recomputing_step"])
            own.seconds = float(listing["step_ns"]) * 1e-9
            largest = max((slot["payload_bytes"] for slot in listing["slots"]), default=0)
            own.restore_seconds = largest / _SLOWEST_BYTES_PER_SEC
            own.unfinished = _C.step_after(own_fd, plan.step, plan.incarnation)
        own.plan, _, _ = _C.plan_restore(inventory, job.layout.node_of, plan.step)
        if own.plan is not None and own.plan.takes_own(job.rank):
            restorer = _C.Restorer(client, own.plan, job.rank)
            own.base = Source(own.plan, restorer, plain.loads(restorer.objects_of(job.rank)))
    except Exception as error:  # noqa: BLE001  # the resume itself is not in question
        own.fault = f"{type(error).__name__}: {error}"[:200]
    return own


def _merge(texts: list[str]) -> str:
    """Whether a rank wants the verification, the first step that any rank has begun, what stands
    against it, and the longest time."""
    answers = [gather.parsed(text) for text in texts]
    after = [one["after"] for one in answers if one["after"] >= 0]
    merged = {
        "changed": any(one["changed"] for one in answers),
        "after": min(after, default=-1),
        "died_at": max((one["died_at"] for one in answers), default=0),
        "fault": next((one["fault"] for one in answers if one["fault"]), ""),
        "seconds": max((one["seconds"] for one in answers), default=0.0),
        "restore_seconds": max((one["restore_seconds"] for one in answers), default=0.0),
    }
    return json.dumps(merged)


def _concluded(
    env: dict[str, Any], job: job_identity.Job, newest: Source, own: _Own, merged: str
) -> str:
    """The decision of rank 0, which never raises: all ranks wait for it."""
    answers = gather.parsed(merged)
    decision = {"whole": False, "after": False, "why": "", "died_at": 0}
    try:
        if env["resume_verify"] == "always" or answers["changed"]:
            why = _why_nothing(job, newest, answers)
            why_not_whole = why or _why_not_whole(env, job, newest, own, answers)
            decision["whole"] = not why_not_whole
            decision["after"] = not why and answers["after"] == newest.plan.step + 1
            decision["why"] = why_not_whole
            decision["died_at"] = answers["died_at"]
    except Exception as error:  # noqa: BLE001
        decision["why"] = f"{type(error).__name__}: {error}"[:200]
    return json.dumps(decision)


def _why_nothing(job: job_identity.Job, newest: Source, answers: dict[str, Any]) -> str:
    """Why the resume is not verified in any way, "" if it may be."""
    if answers["fault"]:
        return str(answers["fault"])
    if newest.plan.saved_by != job.world:
        return f"{newest.plan.saved_by} ranks computed it, and {job.world} would compute another"
    if not _is_at_home(newest.plan, job):
        return _AWAY
    if "frames" not in newest.saved or not newest.saved["frames"]["exact"]:
        return "the place in the loop is not restored"
    return ""


def _why_not_whole(
    env: dict[str, Any],
    job: job_identity.Job,
    newest: Source,
    own: _Own,
    answers: dict[str, Any],
) -> str:
    """Why the newest step is not computed again, "" if it is."""
    if answers["died_at"] > 0:
        return f"the attempt before ended while it computed step {answers['died_at']} again"
    if own.plan is None:
        return "neither the step before it nor a part of the step after it is left"
    if not _is_at_home(own.plan, job):
        return _AWAY
    if env["resume_verify"] == "auto" and launch.is_last_start(os.environ):
        return "the launcher has no restart left, should the script fail to repeat a step"
    count = newest.plan.step - own.plan.step
    seconds = count * answers["seconds"] + _READINGS * answers["restore_seconds"]
    if seconds > env["resume_verify_sec"]:
        steps = _voice.plural(count, "step")
        return f"computing {steps} again takes {seconds:.0f} s (REFT_RESUME_VERIFY_SEC)"
    return ""


_AWAY = "not every rank has its own vault on its node"


def _is_at_home(plan: _C.RestorePlan, job: job_identity.Job) -> bool:
    return not plan.donor and all(plan.takes_own(rank) for rank in range(job.world))
