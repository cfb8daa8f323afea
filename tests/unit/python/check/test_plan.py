"""Rounds of `reft check`: every pair once, nobody twice at a time, and as few as the module proves."""

from __future__ import annotations

import itertools
import random

import pytest

from reft._check import plan
from reft._check.plan import Edge


def assert_rounds(rounds: list[list[Edge]]) -> None:
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)), "a node has two measurements at one time"


@pytest.mark.parametrize("nodes", range(1, 34))
def test_every_pair_meets_once_in_as_few_rounds_as_possible(nodes: int) -> None:
    names = [3 * node + 1 for node in range(nodes)]
    rounds = plan.tournament(names)
    assert_rounds(rounds)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == sorted(itertools.combinations(names, 2))
    pairs, at_a_time = nodes * (nodes - 1) // 2, nodes // 2
    assert len(rounds) == (0 if nodes < 2 else -(-pairs // at_a_time)) == plan.most_rounds(nodes)[0]


@pytest.mark.parametrize("nodes", [4, 5, 8, 9, 100, 1001])
def test_a_short_plan_lets_every_node_meet_as_many_others_as_wanted(nodes: int) -> None:
    rounds = plan.tournament(range(nodes), 3)
    assert_rounds(rounds)
    assert len(rounds) == (3 if nodes % 2 == 0 else 4)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert all(sum(node in pair for pair in met) >= 3 for node in range(nodes))


def spoiled(nodes: int, cards: tuple[int, ...], links: tuple[Edge, ...]) -> set[Edge]:
    pairs = itertools.combinations(range(nodes), 2)
    return {pair for pair in pairs if set(pair) & set(cards) or pair in links}


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 7, 12])
def test_two_faults_are_confirmed_in_the_rounds_that_are_promised(nodes: int) -> None:
    pairs = list(itertools.combinations(range(nodes), 2))
    each = (plan.most_rounds(nodes)[1] - plan.SHARED_ROUNDS * (nodes == 3)) // plan.CONFIRMATIONS
    units: list[int | Edge] = [*range(nodes), *pairs]
    for chosen in itertools.combinations(units, 2):
        cards = tuple(unit for unit in chosen if isinstance(unit, int))
        links = tuple(unit for unit in chosen if not isinstance(unit, int))
        bad = spoiled(nodes, cards, links)
        rounds = plan.confirmation(pairs, bad)
        assert_rounds(rounds)
        assert len(rounds) <= each
        again = {pair for one in rounds for pair in one}
        assert again >= {link for link in links if not set(link) & set(cards)}
        for card in cards:
            assert sum(card in pair for pair in again) >= min(nodes - 1, plan.FAULTS + 1)


def test_nothing_is_measured_again_without_suspicion() -> None:
    assert plan.confirmation(itertools.combinations(range(6), 2), []) == []


def test_the_few_good_measurements_of_a_bad_card_are_repeated() -> None:
    pairs = list(itertools.combinations(range(6), 2))
    bad = {(0, 1), (0, 2), (0, 3), (0, 4)}
    again = {pair for one in plan.confirmation(pairs, bad) for pair in one}
    assert (0, 5) in again


def test_greedy_rounds_are_at_most_twice_the_degree() -> None:
    generator = random.Random(4)
    for _ in range(200):
        pairs = list(itertools.combinations(range(9), 2))
        edges = generator.sample(pairs, generator.randint(1, 20))
        degree = max(sum(node in pair for pair in edges) for node in range(9))
        rounds = plan.greedy(edges)
        assert_rounds(rounds)
        assert sorted(pair for one in rounds for pair in one) == sorted(edges)
        assert len(rounds) <= 2 * degree - 1
