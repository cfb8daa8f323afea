"""The native module in commands: loaded with torch, and only if it fits that torch."""

from __future__ import annotations

from reft._cli import agents


def need() -> None:
    """Makes `from reft import _C` work.

    Raises:
        Failure: it does not load; the message gives the reason and the fix.
    """
    try:
        import torch  # noqa: F401  (the native module needs its libraries)
    except ImportError as error:
        raise agents.Failure(f"torch cannot be imported: {error}", agents.EXIT_WRONG) from error
    import reft_autoload

    if why := reft_autoload.unfit():
        raise agents.Failure(why, agents.EXIT_WRONG)
