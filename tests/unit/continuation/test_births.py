"""What is remembered of the first program point."""

from __future__ import annotations

import pickle
import zlib

import pytest

from reft._continuation.births import FULL, Births


def test_numbers_and_strings_are_known_by_their_first_place() -> None:
    births = Births()
    for value, place in [(1, "main:world"), (2, "main:world"), ("x" * 300, "main:text"), (3, "main:items[0]")]:
        births.note_first(value, place)
    births.note_first_items({"lr": 0.5, "it's": 7, "model": object()}, "main:config")
    births.note_first_items((0, 4), "main:me")
    births.note_first_items([0, object()], "main:mixed")
    births.note_first_items(list(range(100)), "main:many")
    found = Births.first_unpacked(births.first_packed())
    names = {"main:config['lr']": 0.5, 'main:config["it\'s"]': 7, "main:me[]": [0, 4]}
    assert found == {"main:world": 1, **names}


def test_it_says_if_there_were_too_many() -> None:
    births = Births()
    for i in range(20_000):
        births.note_first(i, f"main:v{i}")
    assert Births.first_unpacked(births.first_packed())[FULL] is True


@pytest.mark.parametrize("packed", [b"", b"junk", zlib.compress(b"junk"), zlib.compress(bytes(1 << 26))])
def test_what_cannot_be_unpacked_is_refused(packed: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        Births.first_unpacked(packed)
