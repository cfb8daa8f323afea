"""`reft stack --native`: native and Python frames of processes that run, are stopped, hold the GIL in C, or end meanwhile."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from reft._cli.main import cli
from tests.support.launchers import job_environment, torchrun
from tests.support.pythons import MINORS, need

pytest.importorskip("torch")  # the native module needs its libraries
pytest.importorskip("click")
_C = pytest.importorskip("reft._C", reason="needs the native module")


PACKAGE = Path(_C.__file__).resolve().parent
UNWINDER = Path(os.environ.get("REFT_AGENT_PATH") or PACKAGE / "bin" / "reft-agent").with_name("reft-unwind")
PTRACE_SEIZE = 0x4206
FRAME = {"file": "train.py", "line": 7, "function": "work"}

# Python calls Python, and Python through C (map, list, sorted) calls Python; then it stands still,
# in C.
SCRIPT = """
import ctypes, functools, os, signal, sys, threading, time

kind, path = sys.argv[1:]
library = ctypes.PyDLL(None)


def stand_still(_):
    open(path, "w").close()
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "holds the GIL":
        library.usleep(600_000_000)
    elif kind == "runs":
        while True:
            pass
    time.sleep(600)


def through_c():
    for _ in map(stand_still, [0]):
        pass


def generator():
    yield through_c()


def outer():
    sorted([0], key=lambda _: list(generator()))


lock, started = threading.Lock(), threading.Event()
lock.acquire()
threading.Thread(target=lambda: (started.set(), lock.acquire()), daemon=True).start()
started.wait()
outer()
"""
CALLS = ["stand_still", "through_c", "generator", "<lambda>", "outer", "<module>"]


def reft(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def read(pid: int) -> dict[str, Any]:
    done = reft("stack", "--pid", pid, "--native", "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.output))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]


def tracer_of(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("TracerPid"))
    return int(line.split()[1])


def until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)


@contextmanager
def running(python: str, kind: str, folder: Path) -> Iterator[subprocess.Popen[Any]]:
    """A program that stands where it will stay."""
    script, there = folder / "program.py", folder / "there"
    script.write_text(SCRIPT)
    process = subprocess.Popen([python, str(script), kind, str(there)])
    try:
        until(there.exists, process)
        state = {"stopped": "T", "runs": "R"}.get(kind, "S")
        until(lambda: state_of(process.pid) == state, process)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _can_unwind(request: pytest.FixtureRequest) -> None:
    if "monkeypatch" in request.fixturenames:
        return  # it has its own reader
    done = subprocess.run([UNWINDER, str(os.getpid())], capture_output=True, text=True, timeout=120)
    error = json.loads(done.stdout)["native"]["error"]
    if "without libunwind" in error or "no right to read" in error:
        pytest.skip(error)


def plain(name: str) -> str:
    """A function's name without what tells its aliases and parts apart: __GI___nanosleep, __nanosleep, f.constprop.0."""
    name = re.sub(r"^_*(GI_)?_*", "", re.sub(r"[@.(].*", "", name))
    return name.removesuffix("_impl")


def main_of(found: dict[str, Any]) -> dict[str, Any]:
    (main,) = (thread for thread in found["native"]["threads"] if thread["main"])
    return dict(main)


def functions(frames: list[dict[str, Any]], kind: str) -> list[str]:
    return [frame["function"] for frame in frames if frame["kind"] == kind]


@pytest.mark.parametrize("kind", ["sleeps", "stopped", "holds the GIL"])
@pytest.mark.parametrize("minor", MINORS)
def test_python_frames_stand_between_the_native_frames_that_call_them(minor: int, kind: str, tmp_path: Path) -> None:
    with running(need(minor), kind, tmp_path) as process:
        found = read(process.pid)
        text = reft("stack", "--pid", process.pid, "--native").output
        assert state_of(process.pid) == ("T" if kind == "stopped" else "S") and tracer_of(process.pid) == 0
    assert (found["pid"], found["python"], found["error"], found["native"]["error"]) == (
        process.pid,
        f"3.{minor}",
        "",
        "",
    )
    threads = found["native"]["threads"]
    assert [thread["matched"] for thread in threads] == [True, True]
    assert [thread["tid"] for thread in threads] == sorted(thread["tid"] for thread in found["native_threads"])
    main = main_of(found)
    assert (main["tid"], main["state"], main["problem"]) == (process.pid, "T" if kind == "stopped" else "S", "")
    # It stops itself with the GIL, too.
    assert [thread["tid"] for thread in threads if thread["holds_gil"]] == [process.pid] * (kind != "sleeps")
    assert text.count(", holds the GIL") == (kind != "sleeps")
    frames = main["frames"]
    # Python's frames are those that are read without native ones, and no loop of the interpreter is
    # left among the native.
    (python,) = (thread for thread in found["threads"] if thread["main"])
    assert [{**frame, "kind": "python"} for frame in python["frames"]] == [f for f in frames if f["kind"] == "python"]
    assert functions(frames, "python") == CALLS
    assert not any("_PyEval_EvalFrame" in name for name in functions(frames, "native"))
    # What it stands in is the newest; what C code called has C code below it, what Python called
    # has not.
    newest = [plain(frame["function"]) for frame in frames[: [frame["kind"] for frame in frames].index("python")]]
    assert ("kill" if kind == "stopped" else "usleep" if kind == "holds the GIL" else "clock_nanosleep") in newest
    below = {frame["function"]: frames[i + 1]["kind"] for i, frame in enumerate(frames) if frame["kind"] == "python"}
    assert below["stand_still"] == below["generator"] == below["<lambda>"] == below["<module>"] == "native"
    assert below["through_c"] == below["outer"] == "python"
    assert plain(frames[-1]["function"]) == "start" and frames[-1]["object"].startswith("/")
    assert re.fullmatch(r"0x[0-9a-f]+", frames[-1]["offset"])
    assert f"program.py:{python['frames'][0]['line']} stand_still" in text and "~ " in text and "main thread" in text


# Real frames only: no functions that the compiler put into others, no calls in the last place,
# which left no frame.
GDB = """
frame = gdb.newest_frame()
while frame is not None:
    if frame.type() == gdb.NORMAL_FRAME:
        print("frame", frame.name() or "?")
    frame = frame.older()
"""


def test_native_frames_are_those_that_gdb_sees(tmp_path: Path) -> None:
    gdb = shutil.which("gdb")
    if gdb is None:
        pytest.skip("no gdb here")
    walk = tmp_path / "walk.py"
    walk.write_text(GDB)
    with running(sys.executable, "holds the GIL", tmp_path) as process:
        frames = main_of(read(process.pid))["frames"]
        command = [gdb, "-p", str(process.pid), "-batch", "-nx", "-x", str(walk)]
        seen = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    theirs = [line.split()[1] for line in seen.stdout.splitlines() if line.startswith("frame ")]
    if not theirs:
        pytest.skip(f"gdb cannot: {seen.stderr.strip()[-200:]}")
    theirs = [name for name in theirs if name != "_PyEval_EvalFrameDefault"]
    ours = functions(frames, "native")
    assert len(ours) == len(theirs)
    # gdb may know less, or more, by files of debug information.
    pairs = [(plain(our), plain(their)) for our, their in zip(ours, theirs, strict=True) if our and their != "?"]
    assert [our for our, _ in pairs] == [their for _, their in pairs] and len(pairs) >= 10


def test_what_runs_goes_on(tmp_path: Path) -> None:
    with running(sys.executable, "runs", tmp_path) as process:

        def used() -> int:
            return int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()[11])

        for _ in range(3):
            assert functions(main_of(read(process.pid))["frames"], "python") == CALLS
            before = used()
            until(lambda before=before: used() > before, process)  # type: ignore[misc]
        assert tracer_of(process.pid) == 0


def test_a_reader_that_is_killed_leaves_nobody_stopped(tmp_path: Path) -> None:
    with running(sys.executable, "sleeps", tmp_path) as process:
        for wait in range(10):
            reader = subprocess.Popen([UNWINDER, str(process.pid)], stdout=subprocess.DEVNULL)
            time.sleep(wait * 0.002)
            reader.kill()
            reader.wait()
            until(lambda: tracer_of(process.pid) == 0 and state_of(process.pid) == "S", process)
        assert functions(main_of(read(process.pid))["frames"], "python") == CALLS


def test_where_a_debugger_is_attached_that_is_said_and_python_frames_are_there(tmp_path: Path) -> None:
    attach = (
        "import ctypes, os, sys, time\n"
        "for task in os.listdir(f'/proc/{sys.argv[2]}/task'):\n"
        "    print(ctypes.CDLL(None).ptrace(int(sys.argv[1]), int(task), 0, 0), flush=True)\n"
        "time.sleep(600)"
    )
    with running(sys.executable, "sleeps", tmp_path) as process:
        command = [sys.executable, "-c", attach, str(PTRACE_SEIZE), str(process.pid)]
        debugger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert debugger.stdout is not None
            assert [debugger.stdout.readline().strip() for _ in range(2)] == ["0", "0"]
            done = reft("stack", "--pid", process.pid, "--native", "--json")
        finally:
            debugger.kill()
            debugger.communicate()
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert f"(process {debugger.pid}) is attached to process {process.pid}" in found["native"]["error"]
    assert [frame["function"] for frame in main_of(found)["frames"]] == CALLS
    assert not any(functions(thread["frames"], "native") for thread in found["native"]["threads"])


def test_without_the_right_to_read_that_is_said_once(tmp_path: Path) -> None:
    def without_rights() -> None:
        # CAP_SYS_PTRACE, out of the set that an exec may give; root only, and only root has it.
        ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    closed = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", closed], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        program = "import sys; from reft._cli.main import cli; sys.argv[0] = 'reft'; cli()"
        command = [sys.executable, "-c", program, "stack", "--pid", str(process.pid), "--native"]
        done = subprocess.run(command, env=environment, preexec_fn=without_rights, capture_output=True, text=True)
    finally:
        process.kill()
        process.communicate()
    assert done.returncode == 1
    assert done.stderr.count(f"no right to read the memory of process {process.pid}: be its user") == 1


def test_what_is_no_python_has_native_frames() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        until(
            lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n" and state_of(process.pid) == "S", process
        )
        done = reft("stack", "--pid", process.pid, "--native", "--json")
    finally:
        process.kill()
        process.wait()
    found = json.loads(done.output)
    assert done.exit_code == 1 and "is no CPython" in found["error"] and found["native"]["error"] == ""
    (thread,) = found["native"]["threads"]
    assert any("nanosleep" in name for name in functions(thread["frames"], "native")), thread


@pytest.mark.parametrize("ending", ["exits", "begins another program"])
def test_a_process_that_is_no_more_what_it_was_is_never_waited_for(ending: str) -> None:
    """Whatever the moment: a stack, or why there is none."""
    program = "import os, sys, time; time.sleep(float(sys.argv[1])); "
    again = "os.execv(sys.executable, [sys.executable, '-c', sys.argv[2], sys.argv[1], sys.argv[2]])"
    program += again if ending != "exits" else "os._exit(0)"
    for wait in range(8):
        process = subprocess.Popen([sys.executable, "-c", program, str(0.01 * wait), program])
        try:
            done = reft("stack", "--pid", process.pid, "--native", "--json")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        found = json.loads(done.output)
        if done.exit_code == 3:
            assert "there is no process" in found["error"]
        elif done.exit_code == 0:
            assert found["native"]["threads"] and all(thread["frames"] for thread in found["native"]["threads"])
        else:
            assert done.exit_code == 1 and (found["error"] or found["native"]["error"])


@pytest.mark.parametrize(
    "error", ["this reft was built without libunwind", "there is no"]
)
def test_without_native_frames_pythons_are_printed_and_why(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = {"pid": os.getpid(), "python": "3.11", "native_threads": [], "error": ""}
    read["threads"] = [{"thread": "0x1", "name": "", "main": True, "truncated": False, "frames": [FRAME]}]
    if "libunwind" in error:
        read["native"] = {"threads": [], "error": error}
    reader = tmp_path / ("reft-unwind" if "libunwind" in error else "reft-agent")
    reader.write_text(f"#!/bin/sh\necho {shlex.quote(json.dumps(read))}\n")
    reader.chmod(0o700)
    monkeypatch.setenv("REFT_AGENT_PATH", str(tmp_path / "reft-agent"))
    done = reft("stack", "--pid", os.getpid(), "--native")
    assert done.exit_code == 1 and error in done.output and "train.py:7 work" in done.output


JOB = """
import ctypes, torch
import torch.distributed as dist

dist.init_process_group("reft")


def work():
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).usleep(600_000_000)


work()
dist.all_reduce(torch.ones(4))
"""


def test_of_a_job_each_rank_has_native_frames(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    run = tmp_path / "run"
    with (tmp_path / "output").open("wb") as sink:
        job = subprocess.Popen(torchrun(script, ranks=2), env=job_environment(tmp_path), stdout=sink, stderr=sink)
        try:

            def ask() -> list[dict[str, Any]]:
                done = reft("stack", "--run-dir", run, "--native", "--json")
                return [] if done.exit_code != 0 else json.loads(done.output)["agents"][0]["ranks"]

            ranks: list[dict[str, Any]] = []

            def stand_still() -> bool:
                ranks[:] = ask()
                calls = [
                    functions(main_of(rank)["frames"], "python") if rank["native"]["threads"] else [] for rank in ranks
                ]
                return len(calls) == 2 and "all_reduce" in calls[0] and "work" in calls[1]

            until(stand_still, job)
            text = reft("stack", "--run-dir", run, "--native", "--rank", 1).output
        finally:
            job.terminate()
            try:
                job.wait(timeout=40)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
    assert "usleep" in map(plain, functions(main_of(ranks[1])["frames"], "native"))
    # Threads of torch and reft that have no Python.
    names = [thread["name"] for thread in ranks[0]["native"]["threads"] if not functions(thread["frames"], "python")]
    assert "reft-agent-io" in names
    assert all(rank["native"]["error"] == "" for rank in ranks)
    assert (
        "rank 1 (process" in text
        and "rank 0 (process" not in text
        and "~ usleep" in text
        and "train.py:10 work" in text
    )
