"""Faults that are not of reft's copies reach the handlers that were there before, or end the
process as without reft."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BEGIN = """
import ctypes, faulthandler, os, signal, torch
from reft import _C
before = torch.ones(1 << 16)
def copies():
    return _C.content_hash(before) == _C.content_hash(before)
"""
FAULT = "assert copies()\nctypes.string_at(8)\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_faulthandler_prints_its_stacks(order: str) -> None:
    first = "assert copies()\n" if order == "after" else ""
    done = run(f"{first}faulthandler.enable()\n{FAULT}")
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "string_at" in done.stderr


def test_a_fault_ends_the_process() -> None:
    done = run(FAULT)
    assert done.returncode == -signal.SIGSEGV and done.stderr == ""


def test_a_handler_of_the_script_hears_of_what_is_sent() -> None:
    done = run(
        "signal.signal(signal.SIGBUS, lambda *_: print('heard', flush=True))\n"
        "assert copies()\nos.kill(os.getpid(), signal.SIGBUS)\nassert copies()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")


def test_memory_that_is_gone_ends_nothing() -> None:
    """Under reft's handler, and under one of faulthandler that came later."""
    done = run("""
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
at = libc.mmap(None, 1 << 20, 3, 0x22, -1, 0)
gone = torch.frombuffer((ctypes.c_float * (1 << 18)).from_address(at), dtype=torch.float32)
assert _C.content_hash(gone) == _C.content_hash(gone)
libc.munmap(at + (1 << 19), 1 << 19)
for later in (False, True):
    if later:
        faulthandler.enable()
    assert _C.content_hash(gone) != _C.content_hash(gone)  # equal to nothing
""")
    assert (done.returncode, done.stderr) == (0, "")
