"""Which step is computed again is the decision of all ranks, whatever each of them is set to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reft._link import gather
from reft._link.trusted_store import TrustedStore
from reft._session import recomputation, startup
from reft._session.recomputation import Agreed
from tests.support import jobs
from tests.support.jobs import trusted

EXACT = {"resume_verify": "auto", "resume": "exact", "resume_verify_sec": 60}


def agree(store: Any, world: int, rank: int, env: dict[str, Any]) -> Agreed:
    plan = SimpleNamespace(step=7, incarnation=1, donor={}, saved_by=world, takes_own=lambda rank: True)
    saved = {"frames": {"exact": True}}
    newest = startup.Source(cast(Any, plan), cast(Any, None), saved)
    job = jobs.job(rank, world)
    return recomputation.agree(env, job, store, cast(Any, None), newest, "", -1, "circumstances")


@pytest.fixture
def store() -> TrustedStore:
    made = trusted()
    made.raw.set_timeout(timedelta(seconds=5))  # how long a rank that is waited for is waited for
    return made


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"resume_verify": "off"}, "REFT_RESUME_VERIFY=off"),
        ({"resume": "state"}, "REFT_RESUME=state"),
    ],
)
@pytest.mark.parametrize("other", [0, 1])
def test_a_rank_that_verifies_nothing_is_not_waited_for(
    store: TrustedStore, setting: dict[str, Any], why: str, other: int
) -> None:
    envs = [EXACT, EXACT]
    envs[other] = {**EXACT, **setting}
    with ThreadPoolExecutor(2) as pool:
        agreed = list(pool.map(lambda rank: agree(store, 2, rank, envs[rank]), range(2)))
    assert agreed[other] == Agreed()
    assert agreed[1 - other] == Agreed(unverified=f"rank {other} does not take part: {why}")


def test_where_no_rank_verifies_none_waits_for_another(store: TrustedStore) -> None:
    off = {**EXACT, "resume_verify": "off"}
    assert agree(store, 2, 1, off) == Agreed(), "alone"


def test_a_single_rank_that_verifies_nothing_tells_nobody(store: TrustedStore) -> None:
    assert agree(store, 1, 0, {**EXACT, "resume_verify": "off"}) == Agreed()
    assert not store.has(gather.first_key(startup.VERIFY))


@pytest.mark.parametrize("died_at", [0, 7])
def test_an_attempt_that_died_over_its_verification_counts_when_a_part_is_compared(
    store: TrustedStore, monkeypatch: pytest.MonkeyPatch, died_at: int
) -> None:
    own = recomputation._Own(unfinished=cast(Any, SimpleNamespace(step=8)), died_at=died_at)
    monkeypatch.setattr(recomputation, "_own", lambda *_: own)
    agreed = agree(store, 1, 0, EXACT)
    assert agreed.recomputed is not None and agreed.recomputed.step == 8
    assert agreed.given_up == (died_at > 0)
