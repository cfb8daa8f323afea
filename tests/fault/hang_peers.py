"""What other tools say about a job that hangs: adapters for the hang campaign's `--beside`.

    py-spy           `py-spy dump` of every rank once reft has said who it is. It names nobody; what
    counts is whether the frame
                     that the culprit stands in is among the stacks, of how many ranks there are
                     any, and the time it takes.
    flight recorder  torch's, and its analyser as it is. Gloo records collectives, but its dumps
    call ops `gloo:` and
                     list no members of groups, and the analyser takes neither.
    flight recorder, dumps completed
                     the same dumps with ops called `nccl:` and with the groups that the rank knows:
                     what the analyser would say. Gloo records no messages, and no start or end of
                     an op.
    lm-resiliency    its out-of-band hang detector: a daemon beside each rank, of which rank 0's
    reports. It sees functions of
                     torch.distributed that are called from Python (no messages), forward passes of
                     layers, and steps.

`InRank` is what a rank of the job runs, `ask` what the campaign runs. A tool that is absent is left
out and said so.

Errors: a tool that fails is one result `not run`; nothing is raised to the campaign for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INSTALL = """\
    python3 -m venv TOOLS
    TOOLS/bin/pip install py-spy
    TOOLS/bin/pip install --no-deps lm-resiliency    (of the same Python version as reft's; torch is taken from there)"""

SPY, RECORDER, COMPLETED, LM = "py-spy", "flight recorder", "flight recorder, dumps completed", "lm-resiliency"
# Frames of faults that are no longer in their own function when the job hangs.
STANDS_IN = {"fault_none": "train", "fault_left": "main", "fault_shutdown": "_shutdown"}


@dataclass
class Said:
    """What one tool said of one job.

    Attributes:
        result: as the campaign's, or `not run`.
        after_sec: from the injection to its answer, where it answers by itself.
        took_sec: how long the tool ran, where it is started by hand.
    """

    tool: str
    result: str = "not run"
    named: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    after_sec: float | None = None
    took_sec: float | None = None
    stacks: int | None = None
    frame_seen: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Tools:
    """Where the tools are; None for what is absent."""

    spy: str | None
    recorder: bool
    lm: str | None

    @property
    def absent(self) -> list[str]:
        return [name for name, found in ((SPY, self.spy), (RECORDER, self.recorder), (LM, self.lm)) if not found]


def find(folder: Path) -> Tools:
    """Looks for the tools in a virtual environment."""
    spy = folder / "bin" / "py-spy"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    try:
        import torch.distributed.flight_recorder.fr_trace  # noqa: F401
        from torch._C._distributed_c10d import _dump_fr_trace  # noqa: F401

        recorder = True
    except ImportError:
        recorder = False
    return Tools(
        str(spy) if os.access(spy, os.X_OK) else None,
        recorder,
        str(packages) if (packages / "lm_resiliency").is_dir() else None,
    )


def environment() -> dict[str, str]:
    """Of a job whose collectives are to be recorded."""
    return {"TORCH_FR_BUFFER_SIZE": "2000"}


# --- in a rank
# ---------------------------------------------------------------------------------------------------------


class InRank:
    """The parts of the tools that live in a rank. Made before the process group, since a daemon is forked."""

    def __init__(self, out: Path, lm: str | None, stall_sec: float) -> None:
        self.out, self.rank, self.world = out, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.instrumentation: Any = None
        self.daemon: Any = None
        if lm:
            try:
                self._fork_daemon(lm, stall_sec)
            except Exception as error:
                (out / f"lm.problem.r{self.rank}").write_text(repr(error))

    def _fork_daemon(self, packages: str, stall_sec: float) -> None:
        sys.path.append(packages)
        import lm_resiliency.detection.hang_detector  # noqa: F401  (not once more in the daemon)

        context = multiprocessing.get_context("fork")
        self.progress, self.ready = context.Event(), context.Event()
        self.daemon = context.Process(target=self._watch, args=(stall_sec,), daemon=True)
        self.daemon.start()

    def _watch(self, stall_sec: float) -> None:
        """The daemon: as lm-resiliency starts its own, but forked, which is much quicker than another import of torch."""
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # ends with its rank
        import torch.distributed as dist
        from lm_resiliency.detection.hang_detector import HangDetectionDaemon

        def report(result: Any) -> None:
            if self.rank == 0:
                text = {"said": time.monotonic(), "culprits": result.culprit_ranks or result.stage_culprit_ranks}
                text |= {"kind": result.mismatch_kind, "ops": result.op_ids, "steps": result.steps}
                part = self.out / ".lm.json"
                part.write_text(json.dumps(text))
                part.rename(self.out / "lm.json")

        dist.init_process_group("gloo", f"file://{self.out}/lm.store", rank=self.rank, world_size=self.world)
        self.ready.set()
        HangDetectionDaemon(
            self.rank,
            self.world,
            dist.group.WORLD,
            stall_threshold_s=stall_sec,
            dataloader_latency_threshold_s=stall_sec,
            checkpoint_io_latency_threshold_s=stall_sec,
            progress_event=self.progress,
            tracker_name=channel(self.out, self.rank),
        ).run(on_hang=report)

    def begin(self, model: Any) -> None:
        """Once there is a process group. `model` may be None."""
        threading.Thread(target=self._dump, name="flight-recorder", daemon=True).start()
        if self.daemon is None:
            return
        from lm_resiliency.detection.hang_instrumentation import HangInstrumentation

        if not self.ready.wait(120):
            (self.out / f"lm.problem.r{self.rank}").write_text("the daemons did not meet")
            return
        layers = [] if model is None else [layer for layer in model.modules() if not list(layer.children())]
        name = channel(self.out, self.rank)
        self.instrumentation = HangInstrumentation(
            model, layers, self.rank, progress_event=self.progress, tracker_name=name
        )

    def step(self) -> None:
        """A training step has ended."""
        if self.instrumentation is not None:
            self.instrumentation.step_boundary()

    def _dump(self) -> None:
        """Waits, asleep, until somebody opens the FIFO; then writes what was recorded, and what it lacks of groups."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import _dump_fr_trace

        gate = self.out / f"fr.gate.r{self.rank}"
        os.mkfifo(gate)
        os.close(os.open(gate, os.O_RDONLY))
        world = dist.distributed_c10d._world
        try:
            # Of the groups that this rank is in.
            ranks = {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}
            whole = pickle.dumps((_dump_fr_trace(True, False, False), ranks))
        except Exception as error:
            (self.out / f"fr.problem.r{self.rank}").write_text(repr(error))
            raise
        part = self.out / f".fr.dump.r{self.rank}"
        part.write_bytes(whole)
        part.rename(self.out / f"fr.dump.r{self.rank}")


def channel(out: Path, rank: int) -> str:
    return f"{out.name[-8:]}-{rank}"


def clean(out: Path, world: int) -> None:
    """Removes shared memory that killed ranks left."""
    for rank in range(world):
        Path("/dev/shm", channel(out, rank)).unlink(missing_ok=True)


# --- in the campaign
# ---------------------------------------------------------------------------------------------------


def ask(tools: Tools, case: Any, out: Path, pids: dict[int, int], injected: float, wait_sec: float) -> list[Said]:
    """Asks all tools about a job that hangs; the caller scores whom they name.

    Args:
        wait_sec: how long after the injection lm-resiliency may take.
    """
    said = []
    if tools.lm:  # first: the others stop ranks for a moment
        said.append(guarded(LM, lambda: _lm(out, injected, wait_sec)))
    if tools.spy:
        spy = tools.spy
        said.append(guarded(SPY, lambda: _spy(spy, case, pids)))
    if tools.recorder:
        began = time.monotonic()
        dumps = _dumps(out, pids)
        took = time.monotonic() - began
        said.append(guarded(RECORDER, lambda: _recorder(RECORDER, out / "fr", dumps, case.world, took, complete=False)))
        said.append(
            guarded(
                COMPLETED, lambda: _recorder(COMPLETED, out / "fr-completed", dumps, case.world, took, complete=True)
            )
        )
    return said


def guarded(tool: str, work: Any) -> Said:
    try:
        return work()
    except Exception as error:
        return Said(tool, note=repr(error)[:300])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _lm(out: Path, injected: float, wait_sec: float) -> Said:
    problems = [path.read_text() for path in sorted(out.glob("lm.problem.r*"))]
    if problems:
        return Said(LM, note=problems[0][:300])
    answer = out / "lm.json"
    while not answer.exists() and time.monotonic() < injected + wait_sec:
        time.sleep(0.1)
    if not answer.exists():
        return Said(LM, "none", note="no report in time")
    report = json.loads(answer.read_text())
    note = f"{report['kind'] or 'no progress, nobody differs'}; ops {report['ops']}, steps {report['steps']}"
    return Said(LM, "none", sorted(report["culprits"]), after_sec=report["said"] - injected, note=note)


def _spy(program: str, case: Any, pids: dict[int, int]) -> Said:
    began = time.monotonic()
    stacks: dict[int, str] = {}
    problems = []
    for rank, pid in sorted(pids.items()):
        if not alive(pid):
            problems.append(f"rank {rank} is gone")
            continue
        # It cannot pause a rank that is stopped; without pausing it can read it.
        for options in ([], ["--nonblocking"]):
            try:
                command = [program, "dump", *options, "--pid", str(pid)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            except subprocess.TimeoutExpired:
                problems.append(f"rank {rank}: nothing in 20 s")
                continue
            if done.returncode == 0 and re.search(r"^ {4}\S", done.stdout, re.MULTILINE):
                stacks[rank] = done.stdout
                break
            words = [line.strip() for line in done.stderr.splitlines() if re.match(r"Error|    \d: ", line)]
            problems.append(f"rank {rank}: {'; '.join(words) or 'no stack'}"[:140])
        if rank in stacks and options:
            problems.append(f"rank {rank} with --nonblocking only")
    frame = STANDS_IN.get(case.fault, case.fault)
    culprits = sorted(case.named or case.between or [])
    seen = [re.search(rf"^ +{frame} \(", stacks.get(rank, ""), re.MULTILINE) is not None for rank in culprits]
    return Said(
        SPY,
        "none" if stacks else "not run",
        took_sec=time.monotonic() - began,
        stacks=len(stacks),
        frame_seen=all(seen) if seen else None,
        note="; ".join(problems)[:400],
    )


def _dumps(out: Path, pids: dict[int, int]) -> dict[int, tuple[bytes, dict[str, list[int]]]]:
    """Of every rank that can dump: a rank that is stopped, dead, or has the GIL cannot."""
    dumped = {rank: out / f"fr.dump.r{rank}" for rank, pid in sorted(pids.items()) if alive(pid)}
    end = time.monotonic() + 6
    while (waited := [rank for rank, path in dumped.items() if not path.exists()]) and time.monotonic() < end:
        for rank in waited:
            with contextlib.suppress(OSError):  # nobody reads it: not yet there, or dumping already
                os.close(os.open(out / f"fr.gate.r{rank}", os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(0.1)
    return {rank: pickle.loads(path.read_bytes()) for rank, path in dumped.items() if path.exists()}


def _recorder(
    tool: str,
    folder: Path,
    dumps: dict[int, tuple[bytes, dict[str, list[int]]]],
    world: int,
    took: float,
    complete: bool,
) -> Said:
    """Runs torch's analyser on the dumps, `complete`d to what it takes or as they are, and reads its first report."""
    if not dumps:
        problems = [path.read_text() for path in sorted(folder.parent.glob("fr.problem.r*"))]
        return Said(tool, note="no rank could dump " + "; ".join(problems))
    folder.mkdir()
    for rank, (raw, groups) in dumps.items():
        if complete:
            trace = pickle.loads(raw)
            for entry in trace["entries"]:
                entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            # The description is that of the entries, which is the same on all ranks.
            trace["pg_config"] = {
                name: {"name": name, "desc": "", "ranks": str(members)} for name, members in groups.items()
            }
            raw = pickle.dumps(trace)
        (folder / f"rank_{rank}").write_bytes(raw)
    began = time.monotonic()
    analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", "rank_"]
    done = subprocess.run([*analyser, "--allow-incomplete-ranks"], capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    (folder.parent / f"{folder.name}.txt").write_text(text)
    said = Said(tool, "none", took_sec=took + time.monotonic() - began, stacks=len(dumps))
    said.named, said.candidates, said.note = first_report(text)
    if done.returncode and not said.named and not said.candidates:
        said.result, said.note = "not run", "its analyser failed: " + text.strip().splitlines()[-1][:200]
    if len(dumps) < world:
        said.note += f"; {len(dumps)} of {world} ranks dumped"
    return said


def first_report(text: str) -> tuple[list[int], list[int], str]:
    """Whom the analyser names first, between whom it is undecided, and in which words: what a reader acts on."""
    for line in text.splitlines():
        if found := re.search(r"^missing ranks: \{([\d, ]+)\}", line):
            return numbers(found[1]), [], line
        if culprits := re.findall(r"Culprit rank (\d+)", line):
            return sorted({int(rank) for rank in culprits}), [], line[:160]
        if found := re.search(r"missed FR dumps from ranks \(\{([\d, ]+)\}\)", line):
            return [], numbers(found[1]), f"no dumps from {found[1]}"
    return [], [], "nothing found"


def numbers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


# --- the table
# ---------------------------------------------------------------------------------------------------------

COLUMNS = ["exact", "undecidable", "no rank", "WRONG", "not run"]


def column(result: str) -> str:
    """Of the table, for a result of the campaign or of a tool."""
    for name in ("exact", "undecidable", "WRONG"):
        if result.startswith(name):
            return name
    return "no rank" if result == "none" else "not run"


def table(rows: dict[str, list[Said]]) -> list[str]:
    """Lines, in the form of a Markdown table; `rows`: by tool, reft among them."""

    def middle(values: list[float]) -> str:
        return f"{sorted(values)[len(values) // 2]:.1f} s" if values else "–"

    lines = [
        "| tool | cases | " + " | ".join(COLUMNS) + " | to its answer | runs for | more |",
        "|---" * (len(COLUMNS) + 5) + "|",
    ]
    for tool, said in rows.items():
        counts = [str(sum(column(one.result) == name for one in said)) for name in COLUMNS]
        frames = [one.frame_seen for one in said if one.frame_seen is not None]
        more = f"culprit's frame among the stacks in {sum(frames)} of {len(frames)}" if frames else ""
        after = middle([one.after_sec for one in said if one.after_sec is not None])
        took = middle([one.took_sec for one in said if one.took_sec is not None])
        lines.append(f"| {tool} | {len(said)} | {' | '.join(counts)} | {after} | {took} | {more} |")
    return lines
