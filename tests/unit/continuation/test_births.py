"""What is remembered of the first program point."""

from __future__ import annotations

import pickle
import zlib

import pytest

from reft._continuation.births import Births


def test_numbers_and_strings_are_known_by_their_first_place() -> None:
    births = Births()
    for value, place in [(1, "main:world"), (2, "main:world"), ("x" * 300, "main:text"), (3, "main:items[0]")]:
        births.note_first(value, place)
    births.note_first(0.5, "main:config['lr']")
    births.note_first(7, 'main:config["it\'s"]')
    found = Births.first_unpacked(births.first_packed())
    assert found == {"main:world": 1, "main:config['lr']": 0.5, 'main:config["it\'s"]': 7}


@pytest.mark.parametrize("packed", [b"", b"junk", zlib.compress(b"junk"), zlib.compress(bytes(1 << 26))])
def test_what_cannot_be_unpacked_is_refused(packed: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        Births.first_unpacked(packed)
