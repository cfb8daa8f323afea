"""`reft stack --pid`: the stacks of Python processes that have never loaded reft, alive, stopped, or out of reach."""

from __future__ import annotations

import ctypes
import json
import os
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
from tests.support.pythons import MINORS, need

pytest.importorskip("torch")  # the native module needs its libraries
pytest.importorskip("click")
_C = pytest.importorskip("reft._C", reason="needs the native module")


PACKAGE = Path(_C.__file__).resolve().parent

# Frames of many kinds; the program writes itself what it sees of them, and stands still (stopped,
# if asked for) in the same line.
SCRIPT = """
import ctypes, faulthandler, functools, os, signal, sys, threading, time

kind, path = sys.argv[1:]

class Loader:
    def __iter__(self):
        for item in map(self.fetch, range(3)):  # Python called from C
            yield item

    def fetch(
        self, item
    ):
        numbers = [
            item,
            self.wäit(
                item,
                again=3,
            ),
        ]
        return numbers

    def wäit(self, item, again):
        if again:
            return self.wäit(item, again - 1)
        return (lambda: stand_still())()


def stand_still():
    while sum(frame.f_code.co_filename == "<made up>" for frame in sys._current_frames().values()) < 3:
        time.sleep(0.01)
    out = os.open(path, os.O_WRONLY | os.O_CREAT)
    if kind == "closed":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: not even for its own user
    faulthandler.dump_traceback(out, all_threads=True); os.rename(path, path + ".done"); stop() if kind == "stopped" else for_ever()


stop = functools.partial(os.kill, os.getpid(), signal.SIGSTOP)
for_ever = functools.partial(time.sleep, 600)


def thread(lock):
    exec(compile("lock.acquire()", "<made up>", "exec"), {"lock": lock})


lock = threading.Lock()
lock.acquire()
for _ in range(3):
    threading.Thread(target=thread, args=(lock,), daemon=True).start()
for item in Loader():
    pass
"""


def reft(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)


@contextmanager
def running(python: str, kind: str, folder: Path) -> Iterator[tuple[int, str]]:
    """(pid, what it says of itself) of a program that stands where it will stay."""
    script, said = folder / "prögram.py", folder / "said"
    script.write_text(SCRIPT, encoding="utf-8")
    process = subprocess.Popen([python, "-X", "utf8", str(script), kind, str(said)])
    try:
        done = folder / "said.done"
        until(done.exists, process)
        state = "T" if kind == "stopped" else "S"
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1][0] == state, process)
        yield process.pid, done.read_text(errors="replace")
    finally:
        process.kill()
        process.wait()


def threads_of(found: list[dict[str, Any]]) -> dict[str, list[tuple[str, int, str]]]:
    def short(name: str) -> str:  # faulthandler escapes what is not ASCII
        return name.encode("ascii", "backslashreplace").decode()

    return {
        thread["thread"]: [
            (short(frame["file"]), frame["line"], short(frame["function"])) for frame in thread["frames"]
        ]
        for thread in found
    }


@pytest.mark.parametrize("kind", ["stopped", "sleeping"])
@pytest.mark.parametrize("minor", MINORS)
def test_stacks_are_those_that_the_process_sees_itself(minor: int, kind: str, tmp_path: Path) -> None:
    with running(need(minor), kind, tmp_path) as (pid, said):
        done = reft("stack", "--pid", pid, "--json")
        text = reft("stack", "--pid", pid).output
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["pid"], found["python"], found["error"]) == (pid, f"3.{minor}", "")
    assert found["state"] == ("T" if kind == "stopped" else "S")
    expected = threads_of(_C.parse_stacks(said))
    assert len(expected) == 4 and threads_of(found["threads"]) == expected
    (main,) = (thread for thread in found["threads"] if thread["main"])
    assert [frame["function"] for frame in main["frames"][-4:]] == ["wäit", "fetch", "__iter__", "<module>"]
    # It stops itself with the GIL, and sleeps without.
    assert [thread["main"] for thread in found["threads"] if thread["holds_gil"]] == [True] * (kind == "stopped")
    assert len(found["native_threads"]) == 4
    assert "prögram.py" in text and "main thread 0x" in text and f"CPython 3.{minor}" in text


# A thread has the GIL in C, or shares it with the main thread.
GIL = """
import ctypes, sys, threading

library = ctypes.PyDLL(None)


def crunch():
    library.usleep(600_000_000)


def loop():
    while True:
        pass


threading.Thread(target={"kept": crunch, "shared": loop}[sys.argv[1]], daemon=True).start()
print("begun", flush=True)
loop()
"""


@contextmanager
def with_gil(python: str, kind: str) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen([python, "-c", GIL, kind], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("minor", MINORS)
def test_who_keeps_the_gil_from_the_main_thread_is_told(minor: int) -> None:
    with with_gil(need(minor), "kept") as process:
        found: dict[str, Any] = {}

        def awaited() -> bool:
            found.update(json.loads(reft("stack", "--pid", process.pid, "--json").output))
            return any(thread["awaits_gil_of"] for thread in found["threads"])

        until(awaited, process)
        text = reft("stack", "--pid", process.pid).output
    main, other = sorted(found["threads"], key=lambda thread: not thread["main"])
    assert main["main"] and not main["holds_gil"] and main["awaits_gil_of"] == other["thread"]
    assert other["holds_gil"] and other["awaits_gil_of"] == ""
    assert (other["frames"][0]["function"], other["frames"][0]["line"]) == ("crunch", 8)
    headings = [line for line in text.splitlines() if line.endswith("newest call first")]
    assert headings[0].startswith("main thread 0x") and headings[0].endswith(", waits for the GIL, newest call first")
    assert headings[1].startswith(f"thread {other['thread']}") and headings[1].endswith(
        ", holds the GIL, newest call first"
    )


@pytest.mark.parametrize("minor", MINORS)
def test_the_gil_that_threads_share_is_kept_from_nobody(minor: int) -> None:
    with with_gil(need(minor), "shared") as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        held = 0
        for _ in range(200):
            found = json.loads(reft("stack", "--pid", process.pid, "--json").output)
            holders = [thread for thread in found["threads"] if thread["holds_gil"]]
            assert len(holders) <= 1 and not any(thread["awaits_gil_of"] for thread in found["threads"])
            held += len(holders)
            if held == 5:
                break
        assert held == 5


@pytest.mark.parametrize("minor", MINORS)
def test_stacks_are_those_that_py_spy_sees(minor: int, tmp_path: Path) -> None:
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        pytest.skip("no py-spy here")
    with running(need(minor), "sleeping", tmp_path) as (pid, _):
        command = [spy, "dump", "--pid", str(pid), "--json", "--nonblocking"]
        spied = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = json.loads(reft("stack", "--pid", pid, "--json").output)
    if spied.returncode != 0:
        pytest.skip(f"py-spy cannot: {spied.stderr.strip()[-200:]}")

    def comparable(frames: list[dict[str, Any]], name: str, file: str) -> list[tuple[str, str, int]]:
        # It prints qualified names.
        return [(frame[name].rsplit(".", 1)[-1], frame[file], frame["line"]) for frame in frames]

    theirs = {
        thread["thread_id"]: comparable(thread["frames"], "name", "filename") for thread in json.loads(spied.stdout)
    }
    ours = {int(thread["thread"], 16): comparable(thread["frames"], "function", "file") for thread in found["threads"]}
    assert ours == theirs and len(ours) == 4


LAYOUT = """
#define Py_BUILD_CORE 1
#include <Python.h>
#include <stddef.h>
#include <stdio.h>
#include "internal/pycore_runtime.h"
#include "internal/pycore_interp.h"
#include "internal/pycore_frame.h"
#include "internal/pycore_code.h"
#include "internal/pycore_gil.h"
#define P(name, value) printf("%s %zu\\n", #name, (size_t)(value))
int main(void) {
#if PY_MINOR_VERSION < 13  // which says these itself
  P(runtime_interpreters, offsetof(_PyRuntimeState, interpreters.head));
  P(interpreter_next, offsetof(PyInterpreterState, next));
  P(interpreter_threads, offsetof(PyInterpreterState, threads.head));
  P(thread_next, offsetof(PyThreadState, next));
  P(thread_interpreter, offsetof(PyThreadState, interp));
  P(thread_id, offsetof(PyThreadState, thread_id));
  P(thread_native_id, offsetof(PyThreadState, native_thread_id));
  P(thread_frame, offsetof(PyThreadState, cframe));
  P(cframe_frame, offsetof(_PyCFrame, current_frame));
  P(frame_code, offsetof(_PyInterpreterFrame, f_code));
  P(frame_previous, offsetof(_PyInterpreterFrame, previous));
  P(frame_instruction, offsetof(_PyInterpreterFrame, prev_instr));
  P(frame_owner, offsetof(_PyInterpreterFrame, owner));
#if PY_MINOR_VERSION == 11
  P(frame_is_entry, offsetof(_PyInterpreterFrame, is_entry));
  P(runtime_gil, offsetof(_PyRuntimeState, ceval.gil));
#else
  P(interpreter_gil, offsetof(PyInterpreterState, ceval.gil));
#endif
  P(code_filename, offsetof(PyCodeObject, co_filename));
  P(code_name, offsetof(PyCodeObject, co_name));
  P(code_linetable, offsetof(PyCodeObject, co_linetable));
  P(code_first_line, offsetof(PyCodeObject, co_firstlineno));
  P(code_first_traceable, offsetof(PyCodeObject, _co_firsttraceable));
  P(code_instructions, offsetof(PyCodeObject, co_code_adaptive));
  P(unicode_length, offsetof(PyASCIIObject, length));
  P(unicode_state, offsetof(PyASCIIObject, state));
  P(unicode_ascii_size, sizeof(PyASCIIObject));
  P(unicode_compact_size, sizeof(PyCompactUnicodeObject));
  P(bytes_size, offsetof(PyVarObject, ob_size));
  P(bytes_data, offsetof(PyBytesObject, ob_sval));
  P(object_type, offsetof(PyObject, ob_type));
#endif
  P(gil_holder, offsetof(struct _gil_runtime_state, last_holder));
  P(gil_locked, offsetof(struct _gil_runtime_state, locked));
  P(gil_switches, offsetof(struct _gil_runtime_state, switch_number));
  P(gil_condition, offsetof(struct _gil_runtime_state, cond));
  return 0;
}
"""


@pytest.mark.parametrize("minor", MINORS)
def test_the_table_of_layouts_is_that_of_the_headers(minor: int, tmp_path: Path) -> None:
    python = need(minor)
    ask = "import sysconfig; print(sysconfig.get_path('include'))"
    include = Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not (include / "internal" / "pycore_frame.h").exists():
        pytest.skip(f"no compiler, or no headers of CPython 3.{minor}")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(LAYOUT)
    subprocess.run([compiler, "-w", f"-I{include}", "-o", str(program), str(source)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert _C.python_layout(minor) == {name: int(value) for name, value in map(str.split, lines)}


def test_without_the_right_to_read_the_text_says_whose_it_is(tmp_path: Path) -> None:
    def without_rights() -> None:
        # CAP_SYS_PTRACE, out of the set that an exec may give; root only, and only root has it.
        ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    with running(sys.executable, "closed", tmp_path) as (pid, _):
        program = "import sys; from reft._cli.main import cli; sys.argv[0] = 'reft'; cli()"
        command = [sys.executable, "-c", program, "stack", "--pid", str(pid)]
        done = subprocess.run(command, env=environment, preexec_fn=without_rights, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"no right to read the memory of process {pid}: be its user, or have CAP_SYS_PTRACE" in done.stderr
    assert f"process {pid}: sleeping" in done.stdout and "4 threads in all" in done.stdout


def test_of_what_is_no_python_the_kernels_threads_are_left() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        done = reft("stack", "--pid", process.pid, "--json")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert "is no CPython 3.11, 3.12 or 3.13" in found["error"]
    assert found["threads"] == [] and [thread["tid"] for thread in found["native_threads"]] == [process.pid]


def test_of_nobody_there_is_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    done = reft("stack", "--pid", process.pid)
    assert done.exit_code == 3 and "there is no process" in done.output


def test_a_process_is_not_a_job() -> None:
    done = reft("stack", "--pid", 1, "--rank", 0)
    assert done.exit_code == 2 and "--pid is about one process" in done.output
