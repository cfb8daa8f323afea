"""JSON nested 200,000 levels deep, in each text that ranks read at their start: C++'s copies of it
overflowed the stack, and that ended every rank."""

from __future__ import annotations

import pytest

from reft import _C
from reft._link import agreement, gather

DEEP = ["[" * 200_000, "[" * 200_000 + "1" + "]" * 200_000, '{"groups": ' + "[" * 100_000]


@pytest.mark.parametrize("text", DEEP)
def test_no_parser_recurses_as_deep_as_the_text(text: str) -> None:
    with pytest.raises(_C.Corruption):
        _C.merge_inventories([text])
    with pytest.raises(_C.Corruption):
        _C.plan_restore(text, [0, 0])
    for parse in (gather.parsed, lambda given: gather.merge_by_rank([given])):
        with pytest.raises(ValueError):
            parse(text)
    with pytest.raises(ValueError):
        agreement.parse(text, 2)
    with pytest.raises(ValueError):
        agreement.parse_members(text, 2)
