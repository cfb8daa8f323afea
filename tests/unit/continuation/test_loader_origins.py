"""What iterators note of their draws never reaches the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reft._continuation import loader_origins  # noqa: E402
from reft._continuation.loader_origins import ORIGIN, Origin  # noqa: E402


def hash_of(*drawn: Any) -> int:
    origin = object.__new__(Origin)
    origin.indices, origin._random = 0, None
    for index in drawn:
        origin.drew(index)
    return origin.indices


@pytest.mark.parametrize("index", [[3, {"a": 1}, 7], [3, "a", 7], [3, [1], 7], [], "a", {"a": 1}])
def test_what_is_not_all_numbers_is_not_hashed(index: Any) -> None:
    assert hash_of(index) == 0


def test_a_large_batch_is_known_by_its_size_and_a_sample() -> None:
    many = list(range(100_000))
    assert hash_of(many) == hash_of(many) != hash_of(many[::-1])
    assert len({hash_of(many), hash_of(many[:-1]), hash_of([*many[:-1], -1][::-1])}) == 3
    assert hash_of([1, 2], [3]) != hash_of([1], [2, 3]) != hash_of(1, 2, 3)


@pytest.fixture
def installed() -> Iterator[None]:
    loader_origins.uninstall()
    loader_origins.install()
    yield
    loader_origins.uninstall()


@pytest.mark.parametrize("name", ["before_draw", "drew", "drawn"])
def test_what_fails_leaves_the_iterator_without_an_origin(
    installed: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(self: Origin, *arguments: Any) -> None:
        raise TypeError("of an observer")

    monkeypatch.setattr(Origin, name, fail)
    iterator = iter(torch.utils.data.DataLoader([1, 2, 3, 4], batch_size=2))
    assert hasattr(iterator, ORIGIN)
    assert [batch.tolist() for batch in iterator] == [[1, 2], [3, 4]]
    assert not hasattr(iterator, ORIGIN)
