"""Starts jobs of several ranks for tests: under torchrun, or under `forkrun.py`, which is quicker.
Finds agents.

The environment of a job has to name it by REFT_JOB_ID.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
FAULT = HERE.parent / "fault"


def job_environment(root: Path, **settings: str) -> dict[str, str]:
    """Of a job whose run directory is under `root`: nothing of REFT_* from outside but the agent.
    Resumes are not verified: tests count the steps and lines of a resumed job."""
    import reft

    environment = {
        name: value
        for name, value in os.environ.items()
        if name == "REFT_AGENT_PATH" or "REFT_" not in name
    }
    environment.update(
        {
            "REFT_RUN_DIR": str(root / "run"),
            "REFT_JOB_ID": "job",
            "REFT_AGENT_LINGER_SEC": "1",
            "REFT_RESUME_VERIFY": "off",
            **settings,
        }
    )
    package = str(Path(reft.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    return environment


def torchrun(
    script: Path | str, *arguments: str, ranks: int, options: Sequence[str] = ("--standalone",)
) -> list[str]:
    """The command that runs a script; lines that ranks print stay whole.

    torchrun itself would say `python -u`, with which `print` writes a line and its end apart, as
    with PYTHONUNBUFFERED.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={ranks}"]
    return [
        *command,
        "--no-python",
        "env",
        "-u",
        "PYTHONUNBUFFERED",
        sys.executable,
        str(script),
        *arguments,
    ]


def free_port() -> int:
    """A port that is free now. It is not of the ephemeral range, so the kernel gives it to no
    connection later on."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, min(lowest, 32_768)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise OSError("no port is free")


def node_launchers(
    script: Path,
    *arguments: str,
    ranks: int,
    job: str,
    env: dict[str, str],
    outputs: Sequence[Path],
    max_restarts: int = 0,
    per_node: Sequence[Mapping[str, str]] = (),
) -> list[subprocess.Popen[bytes]]:
    """Starts a job of several nodes with `ranks` each, all on this machine: a launcher, and so an
    agent, for each.

    Args:
        job: id of the rendezvous.
        outputs: files that get what a node says, one for each node.
        per_node: what of the environment is another one on the first nodes.
    """
    port = free_port()
    launchers = []
    for node, output in enumerate(outputs):
        options = [f"--nnodes={len(outputs)}", f"--node-rank={node}", f"--max-restarts={max_restarts}", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={job}"]  # fmt: skip
        command = torchrun(script, *arguments, ranks=ranks, options=options)
        with output.open("wb") as sink:
            launchers.append(
                subprocess.Popen(
                    command,
                    env=env | dict(per_node[node] if node < len(per_node) else {}),
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                )
            )
    return launchers


class Forkrun:
    """The server that starts jobs quickly, one at a time. One that is closed waits for the next
    Forkrun of this process.

    Args:
        environment: of the server, whose libraries those of all ranks are.
    """

    _idle: ClassVar[dict[tuple[tuple[str, str], ...], list[subprocess.Popen[str]]]] = {}

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._key: tuple[tuple[str, str], ...] = ()
        self._running = False
        self.pid = 0

    def start(
        self, argv: list[str], env: dict[str, str], log: Path, nproc: int, max_restarts: int
    ) -> None:
        """`argv`: a script and its arguments; `log` gets what all ranks say."""
        if self._process is None:
            self._take_server()
        request = {
            "script": argv[0],
            "argv": argv[1:],
            "env": env,
            "nproc": nproc,
            "max_restarts": max_restarts,
            "run_id": env["REFT_JOB_ID"],
            "log": str(log),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self.pid = self._answer()["pid"]
        self._running = True

    def _take_server(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | self._environment
        environment.pop("PYTEST_CURRENT_TEST", None)
        self._key = tuple(sorted(environment.items()))
        if idle := self._idle.get(self._key):
            self._process = idle.pop()
            return
        self._process = subprocess.Popen(
            ["env", "-u", "PYTHONUNBUFFERED", sys.executable, str(HERE / "forkrun.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self._answer()

    def run(
        self,
        argv: list[str],
        env: dict[str, str],
        log: Path,
        nproc: int,
        timeout_sec: float,
        max_restarts: int = 0,
    ) -> str:
        """Runs a job to its end; gives what all ranks said.

        Raises:
            AssertionError: It failed, or had not ended in time and was killed.
        """
        self.start(argv, env, log, nproc, max_restarts)
        deadline = time.monotonic() + timeout_sec
        code = None
        while code is None and time.monotonic() < deadline:
            time.sleep(0.02)
            code = self.poll()
        if code is None:
            self.kill()
        said = log.read_text(errors="replace")
        assert code == 0, said[-4000:]
        return said

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("forkrun ended")
        return dict(json.loads(line))

    def poll(self) -> int | None:
        """Exit status of the job, None while it runs."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = "Z"
        return self._exit() if state == "Z" else None

    def _exit(self) -> int:
        code = int(self._answer()["exit"])
        self._running = False
        return code

    def kill(self) -> None:
        """Ends launcher and ranks, unless they have ended and poll() has said so."""
        if not self._running:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._exit()

    def close(self) -> None:
        """Keeps the server for the next Forkrun, unless it has ended or still runs a job."""
        if self._process is None:
            return
        if self._running or self._process.poll() is not None:
            self.abort()
        else:
            self._idle.setdefault(self._key, []).append(self._process)
        self._process = None

    def abort(self) -> None:
        """Ends the server and the job at once, from any thread; pending calls get a RuntimeError."""
        if self._process is not None:
            self._process.kill()
        if self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def said_under_torchrun(
    script: Path, environment: Mapping[str, str], ranks: int, max_restarts: int
) -> str:
    """Runs a job to its end under torchrun, and asserts that it ended well; what it said."""
    options = ("--standalone", f"--max-restarts={max_restarts}")
    done = subprocess.run(
        torchrun(script, ranks=ranks, options=options),
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Torchrun:
    """The real one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._job = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(
        self, argv: list[str], env: dict[str, str], log: Path, nproc: int, max_restarts: int
    ) -> None:
        """As Forkrun's."""
        options = ["--standalone", f"--max-restarts={max_restarts}", "--monitor-interval=0.1"]
        command = torchrun(*argv, ranks=nproc, options=options)
        self._job = env["REFT_JOB_ID"]
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        kill_all(rank_pids(self._job))  # ranks lead sessions of their own
        self._process.wait()

    def close(self) -> None:
        pass


def rank_pids(job: str) -> list[int]:
    """Processes that have REFT_JOB_ID=job in their environment and are no agent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            agent = b"reft-agent" in (path.parent / "cmdline").read_bytes().split(b"\0")[0]
            if not agent and f"REFT_JOB_ID={job}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def agent_pids(run_dir: Path) -> list[int]:
    """Agents whose sockets are under `run_dir`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words and words[0].endswith(b"reft-agent") and str(run_dir).encode() in words:
            found.append(int(path.parent.name))
    return found


def kill_all(pids: list[int]) -> int:
    """SIGKILL; returns how many were there."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except ProcessLookupError:
            pass
    return count


class TrainJob:
    """One run of `train_worker.py`, or of another script of tests/fault, in a directory of its own.
    Its resumes are not verified: tests count the steps of a resumed run.

    Attributes:
        out: what the worker wrote: logs, process ids, final hashes.
        said: file with all that was said.
        run: REFT_RUN_DIR of the job.
    """

    def __init__(
        self,
        launcher: Any,
        folder: Path,
        job: str,
        nproc: int = 2,
        max_restarts: int = 0,
        out: Path | None = None,
        script: str = "train_worker.py",
    ) -> None:
        self.script = script
        self.launcher, self.folder, self.job, self.nproc, self.max_restarts = (
            launcher,
            folder,
            job,
            nproc,
            max_restarts,
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.out = out or Path(tempfile.mkdtemp(prefix="out-", dir=folder))
        self._over = True
        self.log, self.run = self.out / "log", folder / "run"

    def start(self, *arguments: str, backend: str = "reft", **env: str) -> TrainJob:
        """`arguments`: more of the worker's own."""
        environment = {
            "REFT_JOB_ID": self.job,
            "REFT_RUN_DIR": str(self.run),
            "REFT_AGENT_LINGER_SEC": "2",
            "REFT_RESUME_VERIFY": "off",
        } | env
        argv = [str(FAULT / self.script), "--backend", backend, "--out", str(self.out), *arguments]
        self.launcher.start(argv, environment, self.log, self.nproc, self.max_restarts)
        self._over = False
        return self

    def end(self) -> None:
        """Whatever is left of the job and of its agents."""
        if not self._over:
            self.launcher.kill()
            self._over = True
        kill_all(self.agents)

    def wait(self, deadline_sec: float = 60) -> int:
        """Exit status.

        Raises:
            TimeoutError: the job was not over in time; it has been ended.
        """
        end = time.monotonic() + deadline_sec
        while (code := self.launcher.poll()) is None:
            if time.monotonic() > end:
                self.end()
                raise TimeoutError(f"not finished after {deadline_sec} s:\n{self.said[-4000:]}")
            time.sleep(0.01)
        self._over = True
        return int(code)

    def until_step(self, step: int, attempt: int = 0, deadline_sec: float = 60) -> TrainJob:
        """Waits until some rank has completed `step`."""
        end = time.monotonic() + deadline_sec
        while not any(
            log and log[-1][0] >= step
            for log in (self.losses(r, attempt) for r in range(self.nproc))
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"step {step} was not reached:\n{self.said[-4000:]}")
            time.sleep(0.002)
        return self

    def until_said(self, words: str, deadline_sec: float = 60) -> TrainJob:
        """Waits until somebody has said `words`."""
        end = time.monotonic() + deadline_sec
        while words not in self.said:
            if time.monotonic() > end:
                raise TimeoutError(f"nobody said {words!r}:\n{self.said[-4000:]}")
            time.sleep(0.01)
        return self

    def losses(self, rank: int, attempt: int = 0) -> list[tuple[int, str]]:
        """(step, loss) of each whole line that a rank logged."""
        path = self.out / f"r{rank}.a{attempt}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(step), loss) for step, loss in (line.split() for line in lines)]

    def pid(self, rank: int, attempt: int = 0) -> int:
        return int((self.out / f"r{rank}.a{attempt}.pid").read_text())

    def kill_ranks(self, *ranks: int, attempt: int = 0) -> None:
        kill_all([self.pid(rank, attempt) for rank in ranks or range(self.nproc)])

    @property
    def agents(self) -> list[int]:
        return agent_pids(self.run)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def lines(self, *words: str) -> list[str]:
        """Lines that reft said and that have all `words` in them."""
        return [
            line
            for line in self.said.splitlines()
            if "reft" in line and all(word in line for word in words)
        ]

    def finals(self) -> list[str]:
        """Hash of all that training changed, by rank."""
        return [(self.out / f"r{rank}.final").read_text() for rank in range(self.nproc)]
