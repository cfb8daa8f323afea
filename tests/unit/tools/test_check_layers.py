"""tools/check_layers fails on what points up: between folders, between rooms, and in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "check_layers"
TREE = {
    "intercept/base/error.h": "#pragma once\n#include <string>\n",
    "intercept/link/wire.h": '#include "intercept/base/error.h"\n',
    "snapshot/vault/vault.h": '#include "intercept/base/error.h"\n',
    "snapshot/engine/engine.h": '#include "snapshot/vault/vault.h"\n',
    "hang_detect/verdict/verdict.h": '#include "intercept/link/wire.h"\n',
    "agent/agent.cc": '#include "hang_detect/verdict/verdict.h"\n#include "snapshot/vault/vault.h"\n',
    "python/reft/_link/agent_protocol.py": "import json\n",
    "python/reft/_session/session.py": "from reft._link import agent_protocol\n",
}


def plant(root: Path) -> tuple[int, str]:
    """Writes the small tree; returns the tool's exit code and output."""
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return check(root)


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, TOOL, root], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_tree_that_points_down_passes(tmp_path: Path) -> None:
    code, out = plant(tmp_path)
    assert code == 0, out


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("intercept/base/error.h", '#include "snapshot/vault/vault.h"'),
        ("snapshot/vault/vault.h", '#include "hang_detect/verdict/verdict.h"'),
        ("snapshot/vault/vault.h", '#include "snapshot/engine/engine.h"'),
        ("intercept/base/error.h", "  #  include <intercept/link/wire.h>"),
        ("snapshot/vault/vault.h", "#include <torch/torch.h>"),
        ("agent/agent.cc", "#include <Python.h>"),
        ("python/reft/_link/agent_protocol.py", "from reft._session import session"),
        ("python/reft/_link/agent_protocol.py", "import reft._session.session"),
        ("python/reft/_link/agent_protocol.py", "from .._session import session"),
        ("python/reft/_link/agent_protocol.py", "def late():\n    from reft import _session"),
    ],
    ids=[
        "folder above",
        "folder beside",
        "room above",
        "spaces",
        "torch",
        "python",
        "from",
        "import",
        "relative",
        "in a function",
    ],  # fmt: skip
)
def test_a_planted_include_that_points_up_fails(tmp_path: Path, file: str, line: str) -> None:
    plant(tmp_path)
    (tmp_path / file).write_text(TREE[file] + line + "\n")
    code, out = check(tmp_path)
    assert code == 1 and f"{file}:" in out and "1 wrong include\n" in out


@pytest.mark.parametrize("file", ["snapshot/attic/old.h", "python/reft/_attic/old.py"])
def test_a_file_outside_of_the_rooms_fails(tmp_path: Path, file: str) -> None:
    plant(tmp_path)
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("")
    code, out = check(tmp_path)
    assert code == 1 and f"{file}:1: " in out and "is not a room" in out
