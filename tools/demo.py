"""Trains a small GPT on real text, kills a rank with SIGKILL, and compares the resumed run with an
undisturbed one.

    tools/dev demo [--json FILE]

The training script, python/examples/gpt/train_ddp.py, names reft as its backend and has no other
change. It runs under torchrun on two ranks: undisturbed, with a snapshot at every step; with a rank
killed from outside; and without snapshots. The cost of snapshots is what the first run spent on
them: processor time of the copy threads and time of the training thread. Exit status 0 only if at
most one step was lost and every loss and the final hash of weights and optimizer equal those of the
undisturbed run bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "python" / "examples" / "gpt" / "train_ddp.py"

WORLD = 2
STEPS = 40
WARM_UP = 5  # steps at the start that are not measured
BLOCK_STEPS = 5  # steps between two samples of the cost, at least
# Restarted ranks import torch for longer than this: later lines of the log are theirs.
RESTART_SEC = 1.0


@dataclass
class Line:
    """One line of the loss log."""

    rank: int
    step: int
    loss: str
    time: float


@dataclass
class Spent:
    """What snapshots have taken of a rank so far: seconds of its training thread (gate and capture)
    and processor seconds of its copy threads."""

    steps: int
    training_sec: float
    copy_sec: float


@dataclass
class Kill:
    """What was done from outside."""

    rank: int
    pid: int
    at: float
    step: int


def say(text: str) -> None:
    print(text, flush=True)


def read(path: Path) -> list[Line]:
    """The whole lines of a loss log."""
    if not path.exists():
        return []
    rows = [json.loads(text) for text in path.read_text().split("\n")[:-1]]
    return [Line(row["rank"], row["step"], row["loss"], row["time"]) for row in rows]


def rank_pid(launcher: int, rank: int) -> int | None:
    """The process that runs a rank: a child of the launcher with that RANK in its environment."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (
                path.parent / "environ"
            ).read_bytes().split(b"\0"):
                return int(path.parent.name)
        except (OSError, IndexError, ValueError):
            continue
    return None


def spent(run_dir: Path, launcher: int) -> Spent | None:
    """Of rank 0, from the agent's counters and from /proc; None while the rank starts or ends."""
    from reft._link import agent_protocol as protocol

    pid = rank_pid(launcher, 0)
    try:
        path = next(protocol.find_agents(run_dir))
        with protocol.AgentConnection(path) as connection:
            _, status, _ = connection.request(protocol.STATUS_REQUEST, {})
        stats = next(rank["stats"] for rank in status["ranks"] if rank["rank"] == 0)
        copy = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "comm").read_text().startswith("reft-copy"):
                copy += int((task / "schedstat").read_text().split()[0])
        training = int(stats["gate_ns"]) + int(stats["capture_ns"])
        return Spent(int(stats["steps"]), training * 1e-9, copy * 1e-9)
    except (OSError, ValueError, KeyError, IndexError, StopIteration):
        return None


class Run:
    """One launch of the training script."""

    def __init__(self, scratch: Path, name: str, snapshots: bool, steps: int) -> None:
        self.log, self.out = scratch / f"{name}.loss", scratch / f"{name}.out"
        self.steps = steps
        self._said = 0
        self.run_dir = scratch / "run"
        self.samples: list[Spent] = []
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "REFT_SNAPSHOT": str(int(snapshots)),
            "REFT_RUN_DIR": str(self.run_dir),
            "PYTHONUNBUFFERED": "1",
        }
        self.command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={WORLD}",
            "--max-restarts=3",
            str(SCRIPT),
            "--steps",
            str(steps),
            "--samples",
            "4096",
            "--loss-log",
            str(self.log),
        ]
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(
                self.command,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def tell(self, every: int = 10) -> None:
        """Says how far rank 0 is, and what reft says itself."""
        text = self.out.read_text(errors="replace") if self.out.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        for line in lines[self._said :]:
            if line.startswith("reft: "):
                say(f"      | {line}")
            elif line.startswith("step ") and int(line.split()[1]) % every == 0:
                say(f"      {line}")
        self._said = len(lines)

    def sample(self) -> None:
        """Adds what snapshots have taken, once every BLOCK_STEPS steps after the first ones."""
        now = spent(self.run_dir, self.process.pid)
        due = self.samples[-1].steps + BLOCK_STEPS if self.samples else WARM_UP
        if now is not None and now.steps >= due:
            self.samples.append(now)

    def wait(
        self, kill_at: int | None = None, measure: bool = False, deadline: float = 150.0
    ) -> Kill | None:
        """Until the end; kills a rank once its log shows step `kill_at`."""
        end = time.monotonic() + deadline
        kill, killed = kill_at, None
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.terminate()
                raise RuntimeError(
                    f"not finished after {deadline:.0f} s:\n{self.out.read_text(errors='replace')[-3000:]}"
                )
            lines = read(self.log)
            self.tell()
            if measure:
                self.sample()
            if kill is not None and any(line.step >= kill for line in lines):
                time.sleep(random.random() * 0.05)  # any instant of the step
                rank = random.randrange(WORLD)
                pid = rank_pid(self.process.pid, rank)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    at = time.time()
                    done = read(self.log)
                    completed = min(
                        max((line.step for line in done if line.rank == r), default=0)
                        for r in range(WORLD)
                    )
                    killed, kill = Kill(rank, pid, at, completed), None
                    say(
                        f"      kill -9 {pid} (rank {rank}) after step {completed}; torchrun starts the ranks again …"
                    )
            time.sleep(0.01 if kill is not None else 0.1)
        self.tell()
        if self.process.returncode:
            raise RuntimeError(f"the run failed:\n{self.out.read_text(errors='replace')[-3000:]}")
        return killed

    def cost_sec(self) -> tuple[list[float], list[float]]:
        """Seconds a step of the training thread, and of the copy threads, by block of steps."""
        training, copy = [], []
        for a, b in zip(self.samples, self.samples[1:], strict=False):
            training.append((b.training_sec - a.training_sec) / (b.steps - a.steps))
            copy.append((b.copy_sec - a.copy_sec) / (b.steps - a.steps))
        return training, copy

    def losses(self) -> dict[tuple[int, int], str]:
        return {(line.rank, line.step): line.loss for line in read(self.log)}

    def final(self) -> str:
        """Hash of weights and optimizer at the end, as the script prints it."""
        found = [
            text.split()[1]
            for text in self.out.read_text(errors="replace").splitlines()
            if text.startswith("final ")
        ]
        return found[-1] if found else "none"

    def resumed(self) -> tuple[int, str]:
        """The step that the run was resumed at, and what its verification found."""
        text = self.out.read_text(errors="replace")
        found = re.search(r"reft: resumed at step (\d+): [^;]*(?:; (.*))?", text)
        return (int(found[1]), found[2] or "no") if found else (-1, "no")

    def step_sec(self) -> float:
        """Median time of a step of rank 0."""
        from tests.support import report

        times = [line.time for line in read(self.log) if line.rank == 0]
        return report.median(
            [b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as one JSON object")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    from tests.support import report

    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="reft-demo-"))
    say(
        f'A GPT learns the sources of Python\'s standard library: {WORLD} ranks, {args.steps} steps, backend="reft".'
    )
    try:
        kill_at = args.steps // 2
        say(
            f"1. Run A, undisturbed, a snapshot of everything at every step:\n      $ {' '.join(['torchrun', '--standalone', *_shown()])}"
        )
        undisturbed = Run(scratch, "a0", True, args.steps)
        undisturbed.wait(measure=True)
        say(f"2. Run B, the same, but a rank gets SIGKILL at step {kill_at}:")
        disturbed = Run(scratch, "b", True, args.steps)
        kill = disturbed.wait(kill_at)
        say("3. Run C, undisturbed, without snapshots (REFT_SNAPSHOT=0):")
        plain = Run(scratch, "c", False, args.steps)
        plain.wait()
        same = plain.final() == undisturbed.final()
    except RuntimeError as error:
        say(f"demo: {error}")
        say(f"demo: files are in {scratch}")
        return 1

    if kill is None:
        say("demo: the run ended before the rank could be killed: try more --steps")
        return 1
    later = [line for line in read(disturbed.log) if line.time > kill.at + RESTART_SEC]
    resumed, verified = disturbed.resumed()
    lost = kill.step - resumed
    fresh = [line.time for line in later if line.step > kill.step]
    to_new_step = min(fresh) - kill.at if fresh else float("nan")
    expected, got = undisturbed.losses(), disturbed.losses()
    wrong = sorted(
        {
            line.step
            for line in read(disturbed.log)
            if expected.get((line.rank, line.step)) != line.loss
        }
    )
    identical = (
        not wrong
        and set(got) == set(expected)
        and disturbed.final() == undisturbed.final() != "none"
    )
    step_sec = plain.step_sec()
    training, copy = undisturbed.cost_sec()
    costs = [100 * (a + b) / step_sec for a, b in zip(training, copy, strict=True)]
    if not costs:
        say("demo: the run was too short to measure what snapshots cost: try more --steps")
        return 1
    cost, spread = report.median(costs), report.mad(costs)
    parts = f"training thread {1e3 * report.median(training):.2f} ms, "
    parts += f"copy threads {1e3 * report.median(copy):.2f} ms of processor time"

    restart = f"rank {kill.rank} by SIGKILL, {len(later)} lines of the loss log after it"
    rows = [
        ("step killed", f"{kill.step} ({restart})"),
        ("step resumed", str(resumed)),
        ("steps lost", f"{lost}"),
        ("resume verified", verified),
        (
            "trajectory bit-identical",
            ("yes" if identical else "NO")
            + f": {len(got)} losses, final hash {disturbed.final()[:16]}",
        ),
        ("kill to next new step", f"{to_new_step:.2f} s"),
        ("snapshot cost", f"{cost:.1f} % ± {spread:.1f} of a {1e3 * step_sec:.1f} ms step"),
        ("", f"({parts}, a step)"),
    ]
    say("")
    for name, value in rows:
        say(f"  {name:26}{value}")
    if wrong:
        say(f"  losses that differ: steps {wrong[:10]}")
    say(f"  {'time':26}{time.monotonic() - began:.0f} s\n")
    good = 0 <= lost <= 1 and identical and same
    notes = [
        f"step killed {kill.step}, resumed {resumed}",
        f"cost: {len(costs)} blocks of {BLOCK_STEPS} steps or more; spread is the median absolute "
        "deviation",
    ]
    if not same:
        notes.append("the undisturbed runs A and C differ")
    metrics = {
        "steps_lost": report.metric(lost, "steps", None, "<= 1", 0 <= lost <= 1),
        "bit_identical": report.metric(identical, "", None, "true", identical),
        "kill_to_new_step_sec": report.metric(to_new_step, "s"),
        "snapshot_cost_percent": report.metric(cost, "%", spread),
    }
    report.write(args.json, "demo", metrics, run=1, failed=int(not good), notes=notes)
    if good:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0 if good else 1


def _shown() -> list[str]:
    return [f"--nproc-per-node={WORLD}", "--max-restarts=3", str(SCRIPT.relative_to(ROOT))]


if __name__ == "__main__":
    sys.exit(main())
