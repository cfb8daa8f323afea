"""Checks of the sources: layers, exports, thread safety, formats, types."""

from __future__ import annotations

import concurrent.futures
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from .build import clang_definitions, configure_plain
from .machine import LINT_PACKAGES, ROOT, apt, jobs, python, run
from .results import Counts

PYTHON_LINT = [("ruff", ["ruff", "check", "."]), ("mypy", ["mypy"])]


def checks(counts: Counts) -> None:
    """What CI runs of this. Clang checks the lock rules as it compiles what asan and fuzz run."""
    tools = ROOT / "tools"
    steps: list[tuple[str, list[str | Path]]] = [
        ("layers", [sys.executable, tools / "check_layers"]),
        ("exports", [sys.executable, tools / "check_exports", ROOT / "python" / "reft" / "lib"]),
        *((name, [python(), "-m", *words]) for name, words in PYTHON_LINT),
    ]
    for name, words in steps:
        started = time.monotonic()
        counts.add_exit_code(name, run(words, check=False), started)


def clang_tree() -> Path:
    """A configured tree whose compile commands are clang's, for its analyses. Nothing is built."""
    return configure_plain("clang", "-DREFT_BATCH=OFF", "-DREFT_CCACHE=OFF", *clang_definitions())


def compile_commands(tree: Path) -> list[dict[str, str]]:
    """The compile commands of the product's sources, each source once."""
    entries = json.loads((tree / "compile_commands.json").read_text())
    of_file = {entry["file"]: entry for entry in entries}
    tests = str(ROOT / "tests")
    return [entry for name, entry in sorted(of_file.items()) if not name.startswith(tests)]


def thread_safety(counts: Counts) -> None:
    """Clang's analysis of GUARDED_BY and the like, in all folders without torch."""
    started = time.monotonic()
    wrong = unsafe_sources(clang_tree())
    for text in wrong:
        print(text)
    counts.failures += [f"-- thread-safety: {text}" for text in wrong]
    counts.add_exit_code("thread-safety", int(bool(wrong)), started)


def unsafe_sources(tree: Path) -> list[str]:
    """What clang says of each source that breaks a lock rule."""

    def examine(entry: dict[str, str]) -> str:
        words = shlex.split(entry["command"])
        words = words[: words.index("-o")] + words[words.index("-o") + 2 :]
        words += ["-fsyntax-only", "-O0", "-Wthread-safety", "-Werror"]
        done = subprocess.run(
            words, cwd=entry["directory"], capture_output=True, text=True, check=False
        )
        return done.stderr if done.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(jobs()) as pool:
        return [text for text in pool.map(examine, compile_commands(tree)) if text]


def lint(counts: Counts) -> None:
    """All checks, and those of formats and of clang-tidy."""
    apt(LINT_PACKAGES)
    checks(counts)
    thread_safety(counts)
    listed = subprocess.run(
        ["git", "ls-files", "*.cc", "*.h"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tree = clang_tree()
    # torch's headers take clang-tidy a minute each: the folders without torch.
    tidy = [entry["file"] for entry in compile_commands(tree)]
    steps: list[tuple[str, list[str | Path]]] = [
        ("clang-format", ["clang-format", "--dry-run", "-Werror", *listed.stdout.split()]),
        ("clang-tidy", ["clang-tidy", "--quiet", "-p", tree, *tidy]),
    ]
    for name, words in steps:
        started = time.monotonic()
        counts.add_exit_code(name, run(words, check=False), started)
