"""Decides which step is computed again to verify a resume, from which one, and with what it is
compared.

Two cases:

- The vaults hold the newest committed step s whole and the step before it: s is computed again
  from that step, and compared with all of s.
- The job died while it copied the step after s: that step is computed again from s, and compared
  with what had been copied. The small state is written first, so it is there nearly always.

Threads: the training thread, before training. Errors: what the store raises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from reft import _C, _voice
from reft._continuation import plain
from reft._link import gather, job_identity
from reft._session.startup import VERIFY, Source

_DECISION = f"{VERIFY}/decision"
_NOT_NEEDED = "-"


@dataclass(frozen=True)
class Recomputation:
    """A step that is computed again.

    Attributes:
        step: its number.
        base: the step from which it is computed.
        unfinished: what this rank had copied of it, None for nothing. Used if `whole` is False.
        saved: the small state of `unfinished`, as it was pickled; None if there is none.
        whole: whether all of the step was saved: it is the one that training goes on from then.
    """

    step: int
    base: Source
    unfinished: _C.UnfinishedStep | None
    saved: dict[str, Any] | None
    whole: bool


def agree(
    env: dict[str, Any],
    job: job_identity.Job,
    store: Any,
    client: _C.AgentClient,
    newest: Source,
    inventory: str,
    own_fd: int,
    circumstances: str,
) -> tuple[Recomputation | None, str]:
    """Decides the same on all ranks.

    Args:
        newest: the step that training goes on from.
        inventory: of all vaults.
        own_fd: descriptor of this rank's vault, -1 for none.
        circumstances: see `verification.circumstances`.

    Returns:
        None, and why, if there is nothing to compute; "" if a verification is not wanted.
    """
    if env["resume_verify"] == "off" or env["resume"] != "exact":
        return None, ""
    unfinished = None
    if own_fd >= 0:
        unfinished = _C.step_after(own_fd, newest.plan.step, newest.plan.incarnation)
    answer = {
        "changed": newest.saved.get("verified") != circumstances,
        "after": -1 if unfinished is None else unfinished.step,
    }
    gathered = gather.gather(job, store, VERIFY, json.dumps(answer), _merge)
    if gathered.refusals:
        return None, f"rank {min(gathered.refusals)} does not take part"
    all_ranks = json.loads(gathered.text)
    base, _, _ = _C.plan_restore(inventory, job.layout.node_of, newest.plan.step)
    if job.rank == 0:
        decision = _NOT_NEEDED
        if env["resume_verify"] == "always" or all_ranks["changed"]:
            decision = _why_not(env, job, newest, base, all_ranks["after"], own_fd)
        store.set(_DECISION, decision)
    decided = bytes(store.get(_DECISION)).decode()
    if decided:
        return None, "" if decided == _NOT_NEEDED else decided
    if base is not None:
        restorer = _C.Restorer(client, base, job.rank)
        source = Source(base, restorer, plain.loads(restorer.objects_of(job.rank)))
        return Recomputation(newest.plan.step, source, None, None, True), ""
    if unfinished is not None and unfinished.step != all_ranks["after"]:
        unfinished = None
    objects = b"" if unfinished is None else unfinished.objects
    saved = plain.loads(objects) if objects else None
    return Recomputation(all_ranks["after"], newest, unfinished, saved, False), ""


def _merge(texts: list[str]) -> str:
    """Whether a rank wants the verification, and the first step that any rank has begun."""
    answers = [json.loads(text) for text in texts]
    after = [one["after"] for one in answers if one["after"] >= 0]
    merged = {"changed": any(one["changed"] for one in answers), "after": min(after, default=-1)}
    return json.dumps(merged)


def _why_not(
    env: dict[str, Any],
    job: job_identity.Job,
    newest: Source,
    base: _C.RestorePlan | None,
    after: int,
    own_fd: int,
) -> str:
    """Why the resume is not verified, "" if it is."""
    saved, step = newest.saved, newest.plan.step
    if base is None and after < 0:
        return "neither the step before it nor a part of the step after it is left"
    for plan in (newest.plan, base):
        if plan is not None and (
            plan.donor or not all(plan.is_near(r, r) for r in range(job.world))
        ):
            return "not every rank has its own vault on its node"
    if "frames" not in saved or not saved["frames"]["exact"]:
        return "the place in the loop is not restored"
    count = after - step if base is None else step - base.step
    seconds = count * _step_seconds(own_fd)
    if seconds > env["resume_verify_sec"]:
        steps = _voice.plural(count, "step")
        return f"computing {steps} again takes {seconds:.0f} s (REFT_RESUME_VERIFY_SEC)"
    return ""


def _step_seconds(fd: int) -> float:
    """The length of the newest step before the restart; 0 if it is not known."""
    return float(_C.list_vault(fd)["step_ns"]) * 1e-9 if fd >= 0 else 0.0
