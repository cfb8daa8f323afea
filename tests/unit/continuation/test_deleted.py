"""Variables that the rest of a script only deletes: it fails where they are not there."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

Run = Callable[..., Any]

_HEAD = f"""
import torch
import probe
probe.hook_optimizers()
{LEARN}
"""

CASES = {
    "a local": """
        def main():
            for k in range(9):
                learn()
                if k == 1: cache = [k]
                if k == 6: del cache
                probe.trace(k)
        main()
    """,
    "a name of the module": """
        for k in range(9):
            learn()
            if k == 1: cache = [k]
            if k == 6: del cache
            probe.trace(k)
    """,
    "a global": """
        def main():
            global cache
            for k in range(9):
                learn()
                if k == 1: cache = [k]
                if k == 6: del cache
                probe.trace(k, "cache" in globals())
        main()
    """,
    "a local that may be gone": """
        def main():
            for k in range(9):
                learn()
                if k == 1: cache = [k]
                if k == 3: del cache
                try:
                    if k == 6: del cache
                except UnboundLocalError as error:
                    probe.trace("gone")
                probe.trace(k)
        main()
    """,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_is_there_to_be_deleted(run_script: Run, name: str) -> None:
    run_script(_HEAD + textwrap.dedent(CASES[name]), 4).check()
