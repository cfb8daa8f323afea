"""Reads JSON that comes from outside this process.

Python's parser raises RecursionError, and C++'s copies overflow the stack, for text that is nested
deep enough; a value takes many times the memory of its text. So both are bounded before anything is
built, as in `intercept/base/json.h`.

Threads: any. Errors: `ValueError`.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 32  # kDeepestJson
LONGEST = 64 << 20  # of one message

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def loads(text: str | bytes, longest: int = LONGEST) -> Any:
    """The value of a text.

    Args:
        longest: most bytes of the text.

    Raises:
        ValueError: it is too long, nested too deep, or no JSON.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(data) > longest:
        raise ValueError(f"JSON of {len(data)} bytes: at most {longest} are read")
    if is_deep(data):
        raise ValueError(f"JSON nested deeper than {DEEPEST} levels")
    return json.loads(data)


def is_deep(data: bytes) -> bool:
    """Whether brackets are nested deeper than is read, those inside strings left out."""
    if data.count(b"[") + data.count(b"{") <= DEEPEST:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(data):
        first = found[0][:1]
        if first in b"[{":
            depth += 1
            if depth > DEEPEST:
                return True
        elif first in b"]}":
            depth -= 1
    return False
