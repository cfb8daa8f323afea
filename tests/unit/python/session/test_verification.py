"""What a verification may excuse, and what not."""

from __future__ import annotations

from reft._session.verification import _is_part


def test_a_value_that_is_named_as_lost_excuses_what_it_holds_and_what_holds_it() -> None:
    lost = ["main:model.cache"]
    assert _is_part("main:model.cache", lost)
    assert _is_part("main:model.cache[3]", lost)
    assert _is_part("main:model.cache.size", lost)
    assert _is_part("main:model", lost)


def test_it_excuses_no_other_value_whose_name_begins_alike() -> None:
    assert not _is_part("main:loss_total", ["main:loss"])
    assert not _is_part("main:loss", ["main:loss_total"])
    assert not _is_part("o0.p1", ["o0.p10"])
