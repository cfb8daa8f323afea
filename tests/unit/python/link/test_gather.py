"""A round through the store: everybody gets everybody's text, or learns who refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from reft._link import gather
from tests.support.jobs import job, trusted


def joined(texts: list[str]) -> str:
    return json.dumps(sorted(word for text in texts for word in json.loads(text)))


def run(
    world: int, local_world: int, refusing: dict[int, str] | None = None
) -> list[gather.Gathered]:
    """All ranks take part at a time, but for those that refuse. Returns the results of the others."""
    store = trusted()
    jobs = [job(rank, world, local_world) for rank in range(world)]
    refusing = refusing or {}
    for rank, reason in refusing.items():
        gather.refuse(jobs[rank], store, "round", reason)
    with ThreadPoolExecutor(world) as pool:
        calls = [
            pool.submit(gather.gather, one, store, "round", json.dumps([one.rank]), joined)
            for one in jobs
            if one.rank not in refusing
        ]
        return [call.result(timeout=60) for call in calls]


@pytest.mark.parametrize(("world", "local_world"), [(1, 1), (4, 4), (4, 1), (6, 2), (7, 3)])
def test_every_rank_gets_all_texts(world: int, local_world: int) -> None:
    wanted = gather.Gathered(json.dumps(list(range(world))), {})
    assert run(world, local_world) == [wanted] * world


def test_a_refusal_reaches_all_beside_the_texts_of_the_others() -> None:
    wanted = gather.Gathered("[0, 1, 2, 4, 5]", {3: "no memory"})
    assert run(6, 2, {3: "no memory"}) == [wanted] * 5


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_merges_may_refuse_too(rank: int) -> None:
    results = run(4, 2, {rank: "no agent"})
    assert len({result.text for result in results}) == 1
    assert [result.refusals for result in results] == [{rank: "no agent"}] * 3


def test_what_was_written_already_stays() -> None:
    store = trusted()
    one = job(0, 1, 1)
    before = gather.gather(one, store, "round", "[0]", joined)
    gather.refuse(one, store, "round", "too late")
    assert gather._Reader(store, 1 << 20)("round/job", 0, 1) == before
    assert gather.refusal_of_the_first(store, "round") is None


def test_answers_by_rank_are_merged_and_bounded() -> None:
    texts = ['{"10": "c"}', '{"2": "b", "0": "a"}', "{}"]
    assert json.loads(gather.merge_by_rank(texts)) == {"0": "a", "2": "b", "10": "c"}
    assert json.loads(gather.merge_by_rank(texts, 2)) == {"0": "a", "2": "b"}
