"""tools/check_hardening: names what a binary lacks, and is content with ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "check_hardening"
# A buffer that the protector guards and FORTIFY checks, and a function that a pointer may reach.
SOURCE = """
#include <cstdio>
#include <cstring>
int copy(const char* from) { char to[64]; std::strcpy(to, from); return std::puts(to); }
int main(int, char** argv) { return copy(argv[0]); }
"""
GOOD = ["-O2", "-fPIE", "-pie", "-fstack-protector-strong", "-fcf-protection=full", "-D_FORTIFY_SOURCE=2"]
GOOD += ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, folder], capture_output=True, text=True, check=False
    )


def compiled(folder: Path, flags: list[str]) -> Path:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or os.uname().machine != "x86_64":
        pytest.skip("no compiler for x86-64")
    (folder / "x.cc").write_text(SOURCE)
    subprocess.run([compiler, *flags, "-o", folder / "reft-agent", folder / "x.cc"], check=True)
    return folder


@pytest.mark.parametrize(
    ("flags", "lack"),
    [
        ([], None),
        (["-no-pie", "-fno-pie"], "random address"),
        (["-Wl,-z,lazy"], "full relro"),
        (["-Wl,-z,norelro"], "full relro"),
        (["-Wl,-z,execstack"], "no exec stack"),
        (["-fno-stack-protector"], "stack protector"),
        (["-U_FORTIFY_SOURCE"], "fortify"),
        (["-Wl,-rpath,/tmp/x"], "own paths"),
    ],
)
def test_what_is_lacking_is_named(flags: list[str], lack: str | None, tmp_path: Path) -> None:
    done = check(compiled(tmp_path, [*GOOD, *flags]))
    lacks = [line for line in done.stdout.splitlines() if "reft-agent lacks: " in line]
    assert [line.rpartition(": ")[2] for line in lacks] == ([lack] if lack else []), done.stdout
    assert done.returncode == 1  # the other binaries are not there
    assert "libreft.so is not there" in done.stdout


def test_what_is_no_binary_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "reft-agent").write_text("#!/bin/sh\n")
    assert "reft-agent: " in check(tmp_path).stdout
