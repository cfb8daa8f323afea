"""JSON from outside: as deep and as long as it has to be, and no more."""

from __future__ import annotations

import json

import pytest

from reft import _C
from reft._link import agreement, json_text


def nested(depth: int, begin: str = "[", end: str = "]") -> str:
    return begin * depth + "1" + end * depth


def test_what_reft_writes_is_read() -> None:
    value = {"a": [1, "[[[[" * 20, {"b\\": None}], "ü": "\\\""}
    assert json_text.loads(json.dumps(value)) == value
    assert json_text.loads(json.dumps(value, ensure_ascii=False).encode()) == value
    assert json_text.loads(nested(json_text.DEEPEST))
    many = [[n] for n in range(100_000)]
    assert json_text.loads(json.dumps(many)) == many, "wide is not deep"


@pytest.mark.parametrize(
    "text",
    [
        nested(json_text.DEEPEST + 1),
        nested(json_text.DEEPEST + 1, '{"a":', "}"),
        nested(200_000),
        "[" * 200_000,
        nested(100_000, '[{"a":', "}]"),
        '"' + '","' * 50 + "[" * 40,
        "",
        "[1",
    ],
)
def test_anything_else_is_an_error_of_one_kind(text: str) -> None:
    with pytest.raises(ValueError):
        json_text.loads(text)
    with pytest.raises(ValueError):
        json_text.loads(text.encode())


def test_long_text_is_not_parsed() -> None:
    assert json_text.loads("[1, 2]", 6) == [1, 2]
    with pytest.raises(ValueError, match="6 bytes"):
        json_text.loads("[1, 2]", 5)


@pytest.mark.parametrize("text", [nested(200_000), "[" * 200_000, f'{{"groups": {nested(100_000)}}}'])
def test_no_parser_of_a_start_recurses_as_deep_as_the_text(text: str) -> None:
    """C++'s ended the process by a stack overflow, once the value was copied."""
    with pytest.raises(_C.Corruption):
        _C.merge_inventories([text])
    with pytest.raises(_C.Corruption):
        _C.plan_restore(text, [0, 0])
    with pytest.raises(ValueError):
        agreement.parse(text, 2)
    with pytest.raises(ValueError):
        agreement.parse_members(text, 2)
