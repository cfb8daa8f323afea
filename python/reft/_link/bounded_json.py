"""JSON from outside this process, read within limits.

Python's parser alone recurses into what it reads, takes NaN and numbers of any length, and makes of
each byte up to 25 bytes of objects. `loads` examines the bytes before it parses them, so what a
hostile peer sends costs no more than its limits allow.

Threads: any. Errors: ValueError alone, whose text contains nothing of the input.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MOST_DEPTH = 32
MOST_VALUES = 1 << 22
_LONGEST_INTEGER = 20  # with its sign
_STRUCTURE = b'"[]{},'
_DELETED = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")


def loads(data: bytes, *, limit: int, depth: int = MOST_DEPTH, values: int = MOST_VALUES) -> Any:
    """The value in `data`, which is JSON in UTF-8.

    Integers have at most 64 bits (signed or unsigned), other numbers are finite. Strings may hold
    lone surrogates, as `json.dumps` writes file names that are no Unicode.

    Args:
        limit: most bytes.
        depth: most levels of lists and objects.
        values: most values; an empty list or object counts as two.

    Raises:
        ValueError: a limit is exceeded, or this is no JSON (then a `json.JSONDecodeError`).
    """
    if len(data) > limit:
        raise ValueError(f"JSON of {len(data)} bytes; the limit is {limit}")
    _examine(data, depth, values)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"JSON that is no UTF-8 at byte {error.start}") from None
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_constant)
    except RecursionError:  # the caller itself is too deep
        raise ValueError("no stack is left to parse JSON") from None


def _examine(data: bytes, depth: int, values: int) -> None:
    """Refuses what is deep or large, whether or not it is JSON."""
    # Without escapes, each quote begins or ends a string.
    kept = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _DELETED)
    if kept.count(b'"') > 4 * values + 1:  # of a key and a value each
        raise ValueError(f"JSON of more than {values} values")
    kept = b"".join(kept.split(b'"')[::2]).translate(_AS_BRACKETS)
    # Elements of a list are one more than its commas.
    if kept.count(b",") + kept.count(b"[") + 1 > values:
        raise ValueError(f"JSON of more than {values} values")
    kept = kept.translate(None, b",")
    for _ in range(depth):  # each round takes the innermost level off
        kept = kept.replace(b"[]", b"")
    # What never closes is cut off and for the parser to refuse: its depth, too, has a limit.
    if len(kept.strip(b"]")) > depth or b"[]" in kept:
        raise ValueError(f"JSON of more than {depth} levels")


def _integer(text: str) -> int:
    number = int(text) if len(text) <= _LONGEST_INTEGER else 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError("an integer of more than 64 bits")
    return number


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is too large")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
