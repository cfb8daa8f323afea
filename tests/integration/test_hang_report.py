"""What a hang looks like from outside: stacks of a process that never frees the GIL, and who holds up a job."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
_C = pytest.importorskip("reft._C", reason="needs the native module")

HEADER = struct.Struct("<IHHII")
MAGIC, VERSION = 0x57544652, 3
HELLO, WELCOME, STACK_REQUEST, STACK_REPLY = 1, 2, 40, 41

RANK = """
import ctypes, json, sys, threading, time
import torch
from reft import _C
from reft._link import hang_replies

client = _C.AgentClient(sys.argv[1], json.dumps({"role": "rank", "rank": 3}), 10000)
hang_replies.install(client, 3)


def helper():
    time.sleep(600)


def python_loop():
    while True:
        pass


def without_gil():
    time.sleep(600)


def with_gil():
    ctypes.PyDLL(None).sleep(600)


def another_loop():
    while True:
        pass


def gil_of_another():
    threading.Thread(target=another_loop, daemon=True).start()
    threading.Thread(target=with_gil, daemon=True).start()
    while True:
        pass


threading.Thread(target=helper, daemon=True).start()
print("ready", flush=True)
globals()[sys.argv[2]]()
"""


class PlayedAgent:
    """The agent's side of one connection."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(60)
        self._peer: socket.socket | None = None

    def __enter__(self) -> PlayedAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()

    def welcome(self) -> None:
        self._peer, _ = self._listener.accept()
        self._peer.settimeout(30)
        assert self.receive()[0] == HELLO
        self.send(WELCOME, {"agent_pid": os.getpid(), "version": "0.1.0", "run_dir": "", "linger_sec": 1})

    def send(self, kind: int, payload: dict[str, Any]) -> None:
        assert self._peer is not None
        body = json.dumps(payload).encode()
        self._peer.sendall(HEADER.pack(MAGIC, VERSION, kind, len(body), 0) + body)

    def receive(self) -> tuple[int, dict[str, Any]]:
        assert self._peer is not None
        magic, _, kind, size, _ = HEADER.unpack(self._peer.recv(HEADER.size, socket.MSG_WAITALL))
        assert magic == MAGIC
        return kind, json.loads(self._peer.recv(size, socket.MSG_WAITALL) if size else b"{}")


@contextmanager
def rank_that(does: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    package = str(Path(_C.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(path), does], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("does", ["python_loop", "without_gil", "with_gil"])
def test_a_rank_tells_its_stacks_whatever_its_main_thread_does(does: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with PlayedAgent(path) as agent, rank_that(does, path) as process:
        agent.welcome()
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # from "ready" into the function
        for request in range(3):
            asked = time.monotonic()
            agent.send(STACK_REQUEST, {"id": request})
            kind, reply = agent.receive()
            assert kind == STACK_REPLY
            assert time.monotonic() - asked < 2.0
            assert (reply["id"], reply["rank"], reply["pid"]) == (request, 3, process.pid)
            assert reply["error"] == ""
            threads = _C.parse_stacks(reply["text"])
            (main,) = [thread for thread in threads if thread["main"]]
            assert does in [frame["function"] for frame in main["frames"]]
            assert any(frame["function"] == "helper" for thread in threads for frame in thread["frames"])
            assert "Native thread" in reply["text"]
        assert process.poll() is None


@pytest.mark.parametrize("does", ["without_gil", "with_gil", "gil_of_another"])
def test_a_rank_tells_who_holds_its_gil(does: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with PlayedAgent(path) as agent, rank_that(does, path) as process:
        agent.welcome()
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while True:  # until it is in the function
            agent.send(STACK_REQUEST, {"id": 1})
            _, reply = agent.receive()
            stands = {
                frame["function"]: thread for thread in _C.parse_stacks(reply["text"]) for frame in thread["frames"]
            }
            if does in stands and (does != "gil_of_another" or "with_gil" in stands):
                break
            assert time.monotonic() < deadline
    main = next(thread for thread in stands.values() if thread["main"])
    holders = [thread["thread"] for thread in stands.values() if thread["holds_gil"]]
    if does == "without_gil":
        assert not holders and not main["awaits_gil_of"]
    else:
        holder = stands["with_gil"]
        assert set(holders) == {holder["thread"]}
        assert holder["main"] == (does == "with_gil")
        assert main["awaits_gil_of"] == ("" if holder["main"] else holder["thread"])
        if does == "gil_of_another":  # of any thread, as any may be the one that trains
            assert stands["another_loop"]["awaits_gil_of"] == holder["thread"]
            assert not stands["helper"]["awaits_gil_of"]


def test_a_frozen_rank_does_not_answer_but_goes_on_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with PlayedAgent(path) as agent, rank_that("without_gil", path) as process:
        agent.welcome()
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        agent.send(STACK_REQUEST, {"id": 1})
        assert agent._peer is not None
        agent._peer.settimeout(1.5)
        with pytest.raises(TimeoutError):
            agent.receive()
        process.send_signal(signal.SIGCONT)
        agent._peer.settimeout(30)
        assert agent.receive()[1]["id"] == 1


def test_stacks_of_this_process_by_each_way() -> None:
    here = "test_stacks_of_this_process_by_each_way"
    with ThreadPoolExecutor(1) as another:  # the main thread waits with bytecode: politely
        for text, error in (_C.dump_stacks(), another.submit(_C.dump_stacks).result()):
            assert error == ""
            threads = _C.parse_stacks(text)
            assert here in [frame["function"] for thread in threads for frame in thread["frames"]]
            assert text.count("Main thread ") <= 1


CHURN = """
import threading
import torch
from reft import _C

over = False


def deep(depth):  # frames, code and generators that come and go
    if depth:
        made = {}
        exec(compile(f"def made(more): return more({depth - 1})", f"<{depth}>", "exec"), made)
        made["made"](deep)
        return sum(number for number in range(depth))


def churn():
    while not over:
        deep(60)


threads = [threading.Thread(target=churn) for _ in range(4)]
for thread in threads:
    thread.start()
dumps = [_C.dump_stacks(40)[0] for _ in range(60)]
over = True
assert all("<module>" in text for text in dumps) and any("churn" in text for text in dumps)
print("lives", flush=True)
"""


def test_threads_that_run_python_meanwhile_do_not_end_the_process() -> None:
    """The main thread, in the dump, runs no bytecode. CPython's printer would follow pointers that
    the other threads free."""
    package = str(Path(_C.__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHURN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_a_rank_takes_one_signal_for_itself(tmp_path: Path) -> None:
    """The one that parks the main thread before an abort. A second one, which had faulthandler print
    stacks, interrupted system calls of the script."""
    path = tmp_path / "agent.sock"
    with PlayedAgent(path) as agent, rank_that("with_gil", path) as process:
        agent.welcome()
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        agent.send(STACK_REQUEST, {"id": 1})
        assert agent.receive()[1]["error"] == ""
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
        taken = [number for number in signal.valid_signals() if caught >> (number - 1) & 1]
        assert len([number for number in taken if number >= signal.SIGRTMIN]) == 1


SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("reft")
rank = dist.get_rank()


def load_batch(step):
    if rank == 2 and step == 5:
        time.sleep(600)


for step in range(100):
    load_batch(step)
    dist.all_reduce(torch.ones(4))
    if step == 4:
        open(os.path.join(sys.argv[1], f"ready{rank}"), "w").close()
"""


def test_stack_names_the_rank_that_holds_up_the_job(tmp_path: Path) -> None:
    package = Path(_C.__file__).resolve().parent
    if not os.access(os.environ.get("REFT_AGENT_PATH") or package / "bin" / "reft-agent", os.X_OK):
        pytest.skip("needs reft-agent")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        name: value for name, value in os.environ.items() if name == "REFT_AGENT_PATH" or "REFT_" not in name
    }
    environment.update(REFT_RUN_DIR=str(tmp_path / "run"), REFT_JOB_ID="hang", REFT_AGENT_LINGER_SEC="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(package.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    job = subprocess.Popen([*command, str(script), str(tmp_path)], env=environment)
    try:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(3)):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.1)
        time.sleep(1)  # into the next step
        done = subprocess.run(
            [sys.executable, "-m", "reft._cli.main", "stack", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (report,) = json.loads(done.stdout)["agents"]
        assert report["state"] in ("slow", "hang"), report["text"]
        assert report["confidence"] == "certain", report["text"]
        (culprit,) = report["culprits"]
        assert culprit["rank"] == 2 and culprit["reason"] == "user_code"
        assert culprit["frame"]["line"] == 12 and culprit["frame"]["function"] == "load_batch"
        assert report["victims"] == [0, 1] and report["op"] == "all_reduce"
        assert "train.py:12 load_batch" in report["screen"]
        assert max(map(len, report["text"].splitlines())) <= 80
    finally:
        job.terminate()  # torchrun ends its ranks, which have sessions of their own
        try:
            job.wait(timeout=40)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
