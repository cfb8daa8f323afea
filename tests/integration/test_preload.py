"""libreft_preload.so in the processes of a job: programs that have nothing to do with CUDA, and a torch job on stand-in devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from reft._cli.preload import library
from tests.fakes.cuda import environment as cuda

ROOT = Path(__file__).resolve().parents[2]
TESTS = next(ROOT.glob("build*/tests/unit/preload/preload_test"), None)

pytestmark = pytest.mark.skipif(not library().is_file(), reason="the library is built for x86-64 only")
on_stand_in = pytest.mark.skipif(
    os.environ.get("REFT_REQUIRE_CUDA") == "1" or bool(cuda.missing()), reason="needs the stand-in devices"
)


def run(words: Sequence[str], preloaded: bool, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with or without the library, in front of what is preloaded by `settings`."""
    environment = os.environ | {"LC_ALL": "C"} | settings
    if preloaded:
        environment["LD_PRELOAD"] = ":".join(filter(None, [str(library()), settings.get("LD_PRELOAD")]))
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)


PROGRAMS = {
    "ls": ["ls", "/"],
    "a pipeline": ["sh", "-c", "printf 'b\\na\\n' | sort | tr a-z A-Z; exit 3"],
    "gcc": ["sh", "-c", "echo 'int main(){return 7;}' | gcc -x c - -o $0 && $0; echo $?; rm -f $0"],
    "python": [sys.executable, "-c", "import ctypes, json, ssl, sqlite3; print(json.dumps([1]))"],
    "a missing symbol": [sys.executable, "-c", "import ctypes; ctypes.CDLL(None).cuLaunchKernel"],
    "an exec": [sys.executable, "-c", "import os; os.execv('/bin/echo', ['echo', 'after'])"],
    "a fork": [sys.executable, "-c", "import os; p = os.fork(); p or os._exit(4); print(os.waitpid(p, 0)[1])"],
    "a signal": ["sh", "-c", "kill -9 $$"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_programs_do_not_notice(program: str, tmp_path: Path) -> None:
    words = [*PROGRAMS[program], *([str(tmp_path / "built")] if program == "gcc" else [])]
    if program == "gcc" and shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    with_it, without = run(words, True), run(words, False)
    assert with_it.stdout == without.stdout
    assert with_it.returncode == without.returncode
    # The loader words the same error after another object.
    if program == "a missing symbol":
        assert "undefined symbol: cuLaunchKernel" in with_it.stderr and "undefined symbol: cuLaunchKernel" in without.stderr
    else:
        assert with_it.stderr == without.stderr


def test_a_library_that_asks_for_nothing_new() -> None:
    """The children of a job may be of any kind: no library but libc, which is there, and no thread."""
    text = subprocess.run(["readelf", "-dW", library()], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
    assert set(needed) <= {"libc.so.6", "ld-linux-x86-64.so.2"}, needed
    maps = run([sys.executable, "-c", "print(open('/proc/self/maps').read(), len(__import__('os').listdir('/proc/self/task')))"], True)
    assert "libreft_preload" in maps.stdout and "libreft_intercept" not in maps.stdout
    assert maps.stdout.split()[-1] == "1"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_programs_with_a_sanitizer_start(sanitizer: str, tmp_path: Path) -> None:
    """Its run time replaces functions of libc and looks the real ones up by dlsym, before any of them works."""
    program = tmp_path / "program"
    made = run(["sh", "-c", f"echo 'int main(){{return 7;}}' | gcc -fsanitize={sanitizer} -x c - -o {program}"], False)
    if made.returncode or run([str(program)], False).returncode != 7:
        pytest.skip(f"gcc cannot build, or this kernel cannot run, a program with -fsanitize={sanitizer}")
    settings = {}
    if sanitizer == "address":  # its run time refuses every library before it
        runtime = run(["gcc", "-print-file-name=libasan.so"], False).stdout.strip()
        settings["LD_PRELOAD"] = f"{runtime}:{library()}"
    done = run([str(program)], not settings, **settings)
    assert done.returncode == 7, done.stderr


def test_many_children_at_once() -> None:
    code = """
import subprocess
children = [subprocess.Popen(["sh", "-c", f"exit {i % 5}"]) for i in range(200)]
print([child.wait() for child in children] == [i % 5 for i in range(200)])
"""
    assert run([sys.executable, "-c", code], True).stdout == "True\n"


def test_torch_on_the_cpu_computes_the_same() -> None:
    code = """
import torch
torch.manual_seed(3)
model = torch.nn.Linear(16, 16)
for _ in range(3):
    model(torch.randn(4, 16)).sum().backward()
print(model.weight.grad.sum().item().hex())
from reft import _C
print(_C.device_activity()["counts"]["launch"], torch.cuda.is_available())
"""
    settings = {"REFT_DISABLE": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with_it, without = run([sys.executable, "-c", code], True, **settings), run([sys.executable, "-c", code], False, **settings)
    assert with_it.returncode == 0, with_it.stderr
    assert with_it.stdout == without.stdout


JOB = """
import json
import torch
from reft import _C
before = _C.device_activity()
a = torch.ones(64, 64, device="cuda")
for _ in range(10):
    a = torch.relu(a)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    event = torch.cuda.Event()
    event.record()
event.synchronize()
torch.cuda.current_stream().synchronize()
after = _C.device_activity()
print(json.dumps([before, after, a.sum().item()]))
"""


@on_stand_in
@pytest.mark.timeout(300)
def test_launches_of_a_torch_job_are_counted_and_named() -> None:
    settings = {**cuda.environment(1), "REFT_INTERCEPT": "1"}
    done = run([sys.executable, "-c", JOB], True, **settings)
    assert done.returncode == 0, done.stderr[-4000:]
    before, after, total = json.loads(done.stdout)
    assert total == 64 * 64
    assert after["state"] == "armed"
    counted = {kind: after["counts"][kind] - before["counts"][kind] for kind in after["counts"]}
    assert counted["launch"] >= 11  # ten of relu, and the fill
    assert counted["event record"] >= 1 and counted["event sync"] >= 1 and counted["stream sync"] >= 1
    assert after["launch"]["kernel"] == "aten::relu"
    assert after["in_call"] == [] and after["untracked"] == 0


@on_stand_in
@pytest.mark.timeout(300)
@pytest.mark.parametrize("switch", [{"REFT_INTERCEPT": "0"}, {"REFT_DISABLE": "1"}])
def test_the_switch_turns_it_off(switch: dict[str, str]) -> None:
    done = run([sys.executable, "-c", JOB], True, **cuda.environment(1), **switch)
    assert done.returncode == 0, done.stderr[-4000:]
    _, after, total = json.loads(done.stdout)
    assert total == 64 * 64
    assert after["state"] == "off" and after["hooked"] == 0
    assert sum(after["counts"].values()) == 0


@pytest.mark.skipif(TESTS is None, reason="needs the C++ tests")
@pytest.mark.parametrize("other", ["libother_dlsym.so", "libearly_malloc.so"])
def test_beside_other_preloaded_libraries(other: str) -> None:
    """One that replaces dlsym itself, and an allocator that calls dlsym in its first malloc."""
    assert TESTS is not None
    library_there = TESTS.parent / "libraries" / other
    words = [str(TESTS), "--gtest_filter=Lookup.EachCopyOfTheRuntimeIsSeen"]
    done = run(words, False, LD_PRELOAD=str(library_there))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 test" in done.stdout
    # Before the library: lookups are the other's, and may get past the hooks; nothing breaks.
    first = run(["ls", "/"], False, LD_PRELOAD=f"{library_there}:{library()}")
    assert first.returncode == 0, first.stderr
