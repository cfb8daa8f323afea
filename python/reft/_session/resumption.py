"""How one session resumes: what all ranks have agreed on, made ready.

Threads: the training thread, before training. Errors: what the store raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from reft import _C
from reft._link import gather, job_identity
from reft._link.trusted_store import TrustedStore
from reft._session import notes, recomputation, startup
from reft._session.restore_ways import Way
from reft._session.resumer import Resumer
from reft._session.step_comparison import Capture
from reft._session.verification import VerifiedResume


def agree(
    env: dict[str, Any],
    job: job_identity.Job,
    store: TrustedStore,
    client: _C.AgentClient,
    agreed: startup.Agreed,
    circumstances: str,
    capture: Capture,
    mark: Callable[[int], None],
    found: notes.Notes,
) -> tuple[VerifiedResume, str]:
    """Agrees with the other ranks on a verification, and on how long the scripts wait.

    Args:
        agreed: what they have agreed on before; there is a step to resume.
        circumstances: see `verification.circumstances`.
        capture, mark, found: as of `VerifiedResume`.

    Returns:
        The resume, and what snapshots are to keep as `Saved.verified`.
    """
    newest = agreed.newest
    assert newest is not None
    exact = env["resume"] == "exact" and agreed.way is not Way.STATE
    decided = recomputation.agree(
        env if exact else {**env, "resume": "state"},
        job,
        store,
        client,
        newest,
        agreed.inventory,
        agreed.own_fd,
        circumstances,
    )
    resumer = Resumer(job, store, newest, exact, found)
    resumer.waits = _wait_alike(job, store, resumer)  # with ranks of other settings, too
    base, again = None, decided.recomputed
    if again is not None:
        base = Resumer(job, store, again.base, exact, found, quiet=True)
    resume = VerifiedResume(
        job,
        store,
        resumer,
        base,
        again,
        decided.unverified,
        float(env["resume_verify_sec"]),
        capture,
        mark,
        found,
    )
    verified = circumstances if decided.given_up else newest.saved.get("verified", "")
    return resume, verified


def _wait_alike(job: job_identity.Job, store: TrustedStore, resumer: Resumer) -> bool:
    """Whether all ranks wait for as many optimizer steps after the first one, and for the same
    reasons. A rank that waited alone would be waited for."""
    position = resumer.position
    has_place = resumer.exact and position["at"]
    place = max(0, position["at"] - position["first"]) if has_place else -1
    complete = max(0, position["complete"] - position["first"])
    both = [place, complete]
    gathered = gather.gather(job, store, startup.WAIT, json.dumps([both, both]), _widest)
    if gathered.refusals:
        return False
    least, most = json.loads(gathered.text)
    return bool(least == most)


def _widest(texts: list[str]) -> str:
    """The least and the most of both numbers."""
    ranges = [json.loads(text) for text in texts if text]
    if not ranges:
        return ""
    least = [min(numbers) for numbers in zip(*(r[0] for r in ranges), strict=True)]
    most = [max(numbers) for numbers in zip(*(r[1] for r in ranges), strict=True)]
    return json.dumps([least, most])
