"""The library that observes calls of CUDA's driver, as a value for LD_PRELOAD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reft._cli import agents


def library() -> Path:
    """The file, whether or not it exists: it is built for x86-64 only."""
    return Path(__file__).resolve().parent.parent / "lib" / "libreft_preload.so"


def with_library(environment: Mapping[str, str]) -> str:
    """LD_PRELOAD of these variables with the library in front, once.

    Raises:
        Failure: there is no library, or LD_PRELOAD cannot hold its path.
    """
    path = str(library())
    if not library().is_file():
        raise agents.Failure(f"--preload: there is no {path}", agents.EXIT_NOTHING)
    if any(separator in path for separator in ": "):
        raise agents.Failure(
            f"--preload: LD_PRELOAD cannot hold a path with a space or a colon: {path}",
            agents.EXIT_WRONG,
        )
    there = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    return ":".join([path, *(name for name in there if name != path)])
