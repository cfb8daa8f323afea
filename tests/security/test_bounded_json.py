"""JSON of a hostile peer costs what its limits allow, and ends in ValueError alone."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from reft._link import bounded_json

MiB = 1 << 20


def read(text: str | bytes, **limits: int) -> object:
    data = text if isinstance(text, bytes) else text.encode()
    return bounded_json.loads(data, **{"limit": MiB, **limits})


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -1, 2**64 - 1, -(2**63), 0.5, 1e300, True, None, {}], "b": {"c": [[], [[]]]}},
        'brackets in strings "[[[{{{" and \\\\"[ \\ ]\\',
        "caf\u00e9 \u4e2d \U0001f600 \x1b[31m",
        "file name that is no Unicode: \udcff",
        [],
        "",
        0,
    ],
)
def test_what_json_writes_is_read(value: object) -> None:
    assert read(json.dumps(value)) == value
    if "\udcff" not in str(value):
        assert read(json.dumps(value, ensure_ascii=False, indent=1)) == value


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


def test_depth_has_a_limit() -> None:
    assert read(nested(32)) is not None
    assert read(json.dumps([nested(1000)])) == [nested(1000)]  # a string has no depth
    for deep in (nested(33), nested(200_000), "[" * 200_000, '[{"a":' * 20 + "0" + "}]" * 20):
        with pytest.raises(ValueError, match="more than 32 levels"):
            read(deep)
    with pytest.raises(ValueError, match="more than 2 levels"):
        read("[[], [[1]]]", depth=2)


@pytest.mark.parametrize(
    "hidden",
    [
        '"\\"" ,' + nested(200_000),  # the quote in the string is escaped
        '"\\\\" ,' + nested(200_000),  # the backslash is, and the quote ends the string
        '"\\\\\\"" ,' + nested(200_000),
        '"\\n" ,' + nested(200_000),
    ],
)
def test_no_string_hides_depth(hidden: str) -> None:
    with pytest.raises(ValueError, match="more than 32 levels"):
        read("[" + hidden + "]")


def test_size_has_a_limit_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="JSON of 1048577 bytes; the limit is 1048576"):
        read(b"0" * (MiB + 1))


@pytest.mark.parametrize("item", ["[]", "{}", '""', "0", '{"a":0}'])
def test_the_number_of_values_has_a_limit(item: str) -> None:
    many = "[" + ",".join([item] * 100_000) + "]"
    assert read(many) is not None
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 10000 values"):
            read(many, values=10_000)
        assert tracemalloc.get_traced_memory()[1] < 8 * MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "wrong",
    [
        "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, str(2**64), str(-(2**63) - 1), "[1,", "]", "{]", "",
        "\ufeff[]", '"\x01"', b"\xff", "[]".encode("utf-16"), "[" .encode("utf-32") * 200_000, "{'a': 1}", '"' * 9999,
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_value_error(wrong: str | bytes) -> None:
    with pytest.raises(ValueError):
        read(wrong)


def test_a_cut_report_is_left_to_the_parser_to_name() -> None:
    with pytest.raises(json.JSONDecodeError):
        read('{"a": [{"b": "c')
