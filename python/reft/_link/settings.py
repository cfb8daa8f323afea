"""The settings of this process: what its REFT_* variables say.

Threads: any. Errors: `_C.InvalidArgument`.
"""

from __future__ import annotations

import os
from typing import Any

from reft import _C

_PREFIX = b"REFT_"


def read() -> dict[str, Any]:
    """Parsed values by member name (`intercept/base/env.h`).

    Raises:
        InvalidArgument: a value is not allowed, or is not UTF-8.
    """
    try:
        return _C.environment()
    except UnicodeDecodeError as error:
        raise _C.InvalidArgument(_not_utf8() or f"REFT_* variables: {error}") from error


def unknown() -> list[tuple[str, str]]:
    """The REFT_* variables that are no settings, each with the nearest one that is, or ""."""
    names = [_shown(name) for name in os.environb if name.startswith(_PREFIX)]
    return _C.env_unknown(names)


def _not_utf8() -> str:
    for name, value in sorted(os.environb.items()):
        if name.startswith(_PREFIX) and not _C.env_unknown([_shown(name)]):
            try:
                value.decode()
            except UnicodeDecodeError:
                return f"{_shown(name)} is '{_shown(value)}'; allowed: text in UTF-8"
    return ""


def _shown(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
