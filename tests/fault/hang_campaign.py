"""Hangs jobs in every way that needs no GPU, lets others look as if they hung, and checks who is
named.

    hang_campaign.py [--cases N] [--seed S] [--only REGEX] [--suspect SEC] [--jobs J] [--json FILE]
                     [--resume FILE] [--table FILE] [--beside] [--tools DIR] [--keep] [--list]

Each case is a job of real ranks over reft's backend (gloo inside) that trains a few steps before
`hang_worker.py` does what the case says. Ground truth is in the table below, and comes from the
injection alone: who must be named, or between whom it is right to be undecided; and the classes
that are right. The instant of injection is written by the rank that errs, on the clock that the
verdict's time is on.

Results: `exact`, `undecidable` (said where the table allows it: right; elsewhere: not reached, no
more than that), `none` (no verdict in time), `WRONG` (anybody named who is not at fault). Healthy
cases (N, S): `quiet`, or `WRONG` if a verdict of state hang was written. The exit status is that of
the worst: 1 if anything is WRONG.

The file of `--json` is written anew after every case. A case that cannot be run is one result,
`campaign failed` or `no injection`, and the campaign goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fault import hang_peers
from tests.support.launchers import Forkrun, agent_pids, kill_all, rank_pids

HERE = Path(__file__).resolve().parent


OPS = {"op_mismatch", "size_mismatch", "dtype_mismatch", "root_mismatch"}
DEFAULT_SUSPECT_SEC = 20.0
SLOW = re.compile(r"^reft: job \S+ slow, (?P<what>\w+) \(.*?^culprit: rank (?P<rank>\d+) ", re.MULTILINE | re.DOTALL)
AFTER_END_SEC = 5.0  # in which an agent whose ranks are gone says what they disagreed about
KILLERS = {"fault_exit", "fault_raise", "fault_kill", "fault_segv", "fault_abort"}


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        row: of the fault matrix.
        fault: function of the worker.
        named: who must be named; empty for healthy cases and where nobody can be.
        between: the candidates of a verdict that is rightly undecidable.
        may_be_open: undecidable is right, or as good as naming.
        classes: that are right; empty: any.
        outside: what the campaign does to the job after the injection.
        ask: `straggler`: the verdict is asked for by `reft stack`; `disagreement`: there is none,
            but the agent has to notice.
        stands: function that whoever is named has to stand in.
        says: what the sentence about it has to say.
        first_time: nobody has waited there before, so that it is taken for slow until ten times as
            long.
        slow: the rank is busy, so that the terminal has to name it as slow, and no verdict may call
            it hung.
    """

    row: str
    fault: str
    layout: str = "plain"
    world: int = 4
    rank: int = 0
    named: frozenset[int] = frozenset()
    between: frozenset[int] | None = None
    may_be_open: bool = False
    classes: frozenset[str] = frozenset()
    where: str = "between"
    hold: bool = False
    outside: str = ""
    ask: str = ""
    stands: str = ""
    says: str = ""
    healthy: bool = False
    late: bool = False
    first_time: bool = False
    slow: bool = False

    @property
    def name(self) -> str:
        place = "" if self.where == "between" else ".middle"
        outside = f".{self.outside}" if self.outside else ""
        return f"{self.row}.{self.fault}{outside}{place}.{self.layout}{self.world}.r{self.rank}"


def matrix() -> list[Case]:
    """All cases."""
    cases: list[Case] = []

    def positions(world: int) -> list[int]:
        return [0, world - 1] if world == 2 else [0, world // 2, world - 1]

    def add(row: str, fault: str, classes: str, layouts: str, ranks: Iterable[int] | None = None, **more: Any) -> None:
        """`layouts`: as "ddp2 pipe4"; `ranks`: all positions by default."""
        for layout in layouts.split():
            kind, world = layout.rstrip("0123456789"), int(re.sub(r"\D", "", layout))
            for rank in positions(world) if ranks is None else [r if r >= 0 else world + r for r in ranks]:
                case = Case(
                    row, fault, kind, world, rank, frozenset({rank}), classes=frozenset(classes.split()), **more
                )
                cases.append(case)

    # A: the host side of one rank.
    add("H01", "fault_data_sleep", "data_loading", "plain2 ddp4", [-1], says="whose worker pid")
    add("H01", "fault_data_loop", "data_loading", "pipe4", [0], says="whose worker pid", slow=True)
    add("H01", "fault_data_inline", "data_loading user_code", "ddp2", [0])
    add("H03", "fault_data_lock", "data_loading", "ddp2 plain4", [0], says="__getitem__")
    add("H04", "fault_fifo", "blocking_io", "plain2 tpdp4", [-1])
    add("H04", "fault_socket", "blocking_io", "pipe4", [1])
    add("H05", "fault_uninterruptible", "uninterruptible", "plain2 ddp4", [-1])
    add("H06", "fault_regex", "busy", "ddp2 plain4", [0], slow=True)
    add("H06", "fault_gil", "user_code", "pipe4", [2], stands="fault_gil", says="holds the GIL")
    add("H06", "fault_gil_thread", "waits_for_gil", "plain4", [3], stands="hold_gil", says="holds the GIL")
    add("H07", "fault_locks", "user_code waits_for_thread", "plain4", [2])
    add("H08", "fault_inversion", "user_code waits_for_thread", "ddp2", [-1])
    add("H09", "fault_loop", "busy", "plain2 pipe4", [-1], slow=True)
    add("H10", "fault_save", "checkpoint_io", "plain4 ddp2", [0])
    add("H11", "fault_async_save", "checkpoint_io waits_for_thread", "plain4", [0])
    add("H12", "fault_stop", "stopped", "plain2 ddp4 pipe4", [-1])
    add("H12", "fault_none", "stopped", "ddp4 plain4 tpdp4 pipe4", None, outside="stop")
    add("H13", "fault_debugger", "debugger", "plain2 ddp4", [0])
    add("H14", "fault_child", "waits_for_child", "plain4", [0])
    add("H15", "fault_left", "user_code ended_early", "plain2 ddp4", [-1])
    add("H15", "fault_shutdown", "ended_early", "plain4 pipe4", [0])
    add("H16", "fault_dead_thread", "waits_for_thread", "plain4 ddp2", [-1])
    add("H16", "fault_join", "waits_for_thread", "plain2", [0])
    add("H00", "fault_sleep", "user_code", "plain2 ddp2 ddp4 plain4")
    # D42: pipelines and layouts of several groups, where most ranks wait behind others that wait.
    add("H42", "fault_sleep", "user_code", "pipe4 tpdp4 pipedp4")
    add("H42", "fault_sleep", "user_code", "ddp4 pipe4 tpdp4 pipedp4", [1], where="middle")
    add("H42", "fault_sleep", "user_code", "pipe8 pipedp8")
    add("H42", "fault_stop", "stopped", "pipedp8", [4])
    add("H42", "fault_loop", "busy", "pipe8", [7], slow=True)
    # Eight ranks: few of each kind, as they take long.
    add("H00", "fault_sleep", "user_code", "ddp8 plain8")
    add("H42", "fault_sleep", "user_code", "pipe8", [4], where="middle")
    for layout, rank in (("ddp8", 0), ("plain8", 4), ("pipe8", -1)):
        add("H12", "fault_none", "stopped", layout, [rank], outside="stop")
    # B: dead ranks. The launcher is slow to notice, and the others' clean-up hangs.
    dead: dict[str, Any] = {"hold": True, "outside": "slow_launcher"}
    add("H20", "fault_exit", "dead", "ddp4 plain2", [-1], **dead)
    add("H20", "fault_raise", "dead", "plain4", [0], **dead)
    add("H21", "fault_kill", "dead", "plain2 ddp4 pipe4 tpdp4", None, **dead)
    add("H21", "fault_kill", "dead", "ddp4 pipe4", [2], where="middle", **dead)
    add("H21", "fault_kill", "dead", "pipedp8", [3], **dead)
    for layout, rank in (("plain8", 0), ("ddp8", 4), ("pipe8", -1)):
        add("H21", "fault_kill", "dead", layout, [rank], **dead)
    add("H22", "fault_segv", "dead", "ddp4", [1], **dead)
    add("H22", "fault_abort", "dead", "plain4", [3], **dead)
    # C: wrong use of collectives.
    for fault, row, classes in [
        ("ops_extra_barrier", "H14", "op_mismatch"),
        ("ops_extra_reduce", "H14", "size_mismatch op_mismatch"),
        ("ops_skip", "H35", "op_mismatch size_mismatch"),
        ("ops_order", "H30", "op_mismatch"),
        ("ops_size", "H31", "size_mismatch"),
        ("ops_root", "H33", "root_mismatch"),
    ]:
        add(row, fault, classes, "plain4", hold=True)
        for rank in (0, 1):
            cases.append(
                Case(
                    "H36",
                    fault,
                    "plain",
                    2,
                    rank,
                    between=frozenset({0, 1}),
                    classes=frozenset(classes.split()),
                    hold=True,
                )
            )
    add("H31", "ops_size", "size_mismatch op_mismatch", "plain8", hold=True)
    add("H32", "ops_dtype", "dtype_mismatch", "plain4", [0, 2], ask="disagreement", hold=True)
    # Named by their habit.
    add("H35", "ops_subgroup", "cycle", "plain4", hold=True)
    add("H40", "ops_two_groups", "cycle", "plain4 plain8", [0, -1], hold=True)
    everyone = frozenset(range(4))
    cases.append(Case("H40", "ops_ring", between=everyone, classes=frozenset({"cycle"})))
    cases.append(Case("H30", "ops_half", rank=1, between=everyone, classes=frozenset({"op_mismatch"}), hold=True))
    cases.append(
        Case(
            "H30",
            "ops_half",
            world=8,
            rank=6,
            between=frozenset(range(8)),
            classes=frozenset({"op_mismatch"}),
            hold=True,
        )
    )
    # D: messages.
    for rank in (0, 3):
        pair = frozenset({rank, rank ^ 1})
        for fault, row, classes in [
            ("ops_crossed_sends", "H41", "crossed_sends"),
            ("ops_crossed_recvs", "H41", "crossed_recvs"),
            ("ops_tag", "H44", "p2p_mismatch"),
        ]:
            cases.append(Case(row, fault, rank=rank, between=pair, classes=frozenset({classes})))
    add("H43", "ops_one_message_more", "p2p_count_mismatch", "plain4", [0, 3])
    add("H41", "ops_stage_leaves_a_send_out", "crossed_recvs", "pipe4", [1])
    add("H41", "ops_swap", "crossed_recvs", "plain4", [0, 3])
    cases.append(Case("H43", "ops_any_source", rank=2, between=frozenset({2}), may_be_open=True))
    add("H00", "ops_uneven_then_sleep", "user_code", "plain4")
    add("H00", "ops_object", "user_code", "plain4", [1])
    add("H00", "ops_async", "user_code", "plain2 plain4", [0, -1])
    add("H00", "ops_async_first_time", "user_code", "plain2", [0], first_time=True)
    # P7: three ranks wait for a key, the fourth for them.
    cases.append(Case("H25", "ops_store", rank=0, named=frozenset({1, 2, 3}), may_be_open=True))

    # Healthy.
    def well(row: str, fault: str, layout: str = "plain4", rank: int = 0, **more: Any) -> None:
        kind, world = layout.rstrip("0123456789"), int(re.sub(r"\D", "", layout))
        cases.append(Case(row, fault, kind, world, rank, healthy=True, **more))

    well("N01", "busy_all_compute")
    well("N02", "busy_compile")
    well("N02", "busy_compile", "ddp2", 1)
    well("N03", "busy_all_idle")
    well("N04", "busy_one_sleep_new_place")
    well("N04", "busy_one_sleep_new_place", "ddp4", 2)
    well("N05", "busy_checkpoint")
    well("N05", "busy_checkpoint", "ddp4", 3)
    well("N06", "busy_load")
    well("N07", "busy_one_compute", "ddp4")
    well("N07", "busy_one_compute_known_place", "plain4", 3)
    well("N08", "busy_data_warmup")
    well("N09", "busy_gc")
    well("N10", "busy_new_group", "plain4", 1)
    well("N13", "busy_all_idle", "ddp2")
    well("N14", "busy_teardown")
    well("N15", "fault_none", "plain4", 3, late=True)
    well("N17", "busy_all_idle", "ddp4", outside="pause_all")
    well("N18", "busy_steps", "plain4", 2, outside="trace")
    well("N20", "busy_rollouts")
    well("N21", "busy_never_again")
    well("N22", "busy_steps", "ddp4", outside="pause_agent")
    well("H24", "busy_steps", "plain4", outside="kill_agent")
    well("N03", "busy_steps", "plain2")
    well("N03", "busy_slow_steps", "plain4", 2)
    well("N05", "busy_mapped", "plain4", 1)
    # The rank that works is late at a place where the others have waited often, but never so long.
    own = ["evaluation", "gc_one", "zip", "zip_thread", "torch_save", "copy", "swap"]
    by_children = ["pool", "executor", "grandchild", "data_worker"]
    for number, work in enumerate([*own, *by_children]):
        well("N30", f"busy_{work}", "plain4" if number % 2 else "ddp4", number % 4)
    cases.append(
        Case(
            "S01",
            "busy_straggler",
            rank=2,
            named=frozenset({2}),
            classes=frozenset({"straggler"}),
            healthy=True,
            ask="straggler",
        )
    )
    cases.append(
        Case(
            "S01",
            "busy_straggler",
            world=2,
            rank=0,
            named=frozenset({0}),
            classes=frozenset({"straggler"}),
            healthy=True,
            ask="straggler",
        )
    )
    cases.append(Case("S06", "busy_jitter", healthy=True, ask="straggler"))
    seen: dict[str, Case] = {}
    for case in cases:
        seen.setdefault(case.name, case)
    return list(seen.values())


def subset(cases: list[Case]) -> list[Case]:
    """A third of the cases, of each row of the matrix at least one, with the erring rank now first,
    now in the middle, now last.

    Those with 8 ranks take long, and are left to the whole campaign.
    """
    rows: dict[str, list[Case]] = {}
    for case in cases:
        if case.world < 8 and not case.first_time:
            rows.setdefault(case.row, []).append(case)
    chosen = [row[number % len(row)] for number, row in enumerate(rows.values())]
    rest = [case for row in rows.values() for case in row if case not in chosen]
    wanted = max(0, -(-len(cases) // 3) - len(chosen))
    return chosen + [rest[number * len(rest) // wanted] for number in range(wanted)]


@dataclass
class Outcome:
    case: Case
    result: str
    right_class: bool | None = None
    found: str = ""
    named: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    after_sec: float | None = None
    problem: str = ""
    out: str = ""
    beside: list[hang_peers.Said] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return self.result.startswith("WRONG")


class Runner:
    """Runs cases one at a time; several runners may work beside each other."""

    def __init__(self, scratch: Path, suspect: float | None, deadline: float, tools: hang_peers.Tools | None) -> None:
        self.scratch, self.suspect, self.deadline, self.tools = scratch, suspect, deadline, tools
        self.launcher = Forkrun()

    def close(self) -> None:
        try:
            self.launcher.close()
        except (OSError, subprocess.TimeoutExpired):
            self.launcher.abort()

    def start_sec(self, case: Case) -> float:
        """How long a job may take until its fault."""
        return 60.0 + 15 * case.world + (90 if self.tools else 0)

    def limit_sec(self, case: Case) -> float:
        """How long all of a case may take before it is given up; well above the sum of what it waits for."""
        waits = max(self.deadline, 4 * self.suspect_sec + 60) + 10 * self.suspect_sec * case.first_time
        return self.start_sec(case) + waits + (240 if self.tools else 0) + 240

    @property
    def suspect_sec(self) -> float:
        return self.suspect or DEFAULT_SUSPECT_SEC

    def run(self, case: Case) -> Outcome:
        out = Path(tempfile.mkdtemp(prefix=f"{case.name}-", dir=self.scratch))
        job = f"hang-{os.getpid()}-{out.name.rsplit('-', 1)[1]}"
        env = {"REFT_JOB_ID": job, "REFT_RUN_DIR": str(out / "run"), "REFT_AGENT_LINGER_SEC": "1"}
        if self.suspect is not None:
            env["REFT_HANG_SUSPECT_SEC"] = str(self.suspect)
        argv = [str(HERE / "hang_worker.py"), "--layout", case.layout, "--fault", case.fault, "--rank", str(case.rank)]
        argv += ["--where", case.where, "--out", str(out), "--sec", str(2.5 * self.suspect_sec)]
        argv += ["--steps", "1000000"] * (case.outside == "stop" or case.ask == "disagreement")
        argv += ["--stop-launcher"] * (case.outside == "slow_launcher")
        argv += ["--hold"] * case.hold + ["--late", str(case.rank)] * case.late
        if self.tools and not case.healthy:
            argv += ["--beside", str(self.suspect_sec)] + (["--lm", self.tools.lm] if self.tools.lm else [])
            env |= hang_peers.environment()
        self.launcher.start(argv, env, out / "log", case.world, 0)
        over = False
        outcome = Outcome(case, "no injection", out=str(out))
        try:
            over = self._watch(case, out, job, outcome)
            if self.tools and not case.healthy:
                self._beside(self.tools, case, out, outcome)
        finally:
            try:
                if not over:
                    self._thaw(job, out)
                    self.launcher.kill()
            finally:
                kill_all(rank_pids(job))
                kill_all(agent_pids(out / "run"))
                hang_peers.clean(out, case.world)
        return outcome

    def _beside(self, tools: hang_peers.Tools, case: Case, out: Path, outcome: Outcome) -> None:
        """What the other tools say of the same job, scored as reft is."""
        if not (injected := injections(out)):
            return
        pids = pids_of(out)
        if case.fault not in KILLERS and not any(map(hang_peers.alive, pids.values())):
            outcome.problem += "\nthe other tools came when the job was over"
        wait = 2.5 * self.suspect_sec + 10
        for said in hang_peers.ask(tools, case, out, pids, max(injected), wait):
            score_said(case, said)
            outcome.beside.append(said)

    def _watch(self, case: Case, out: Path, job: str, outcome: Outcome) -> bool:
        """Fills `outcome`; true if the job is over."""
        end = time.monotonic() + self.start_sec(case)
        while not (case.late or (injected := injections(out))):
            if time.monotonic() > end:
                outcome.problem = tail(out)
                return False
            if self.launcher.poll() is not None:
                outcome.problem = "the job ended before the injection\n" + tail(out)
                return True
            time.sleep(0.01)
        if case.outside in OUTSIDE:
            OUTSIDE[case.outside](self, case, out)
        injected = injections(out) if not case.late else [time.monotonic()]
        if case.healthy:
            return self._healthy(case, out, job, outcome)
        end = time.monotonic() + self.deadline + 10 * self.suspect_sec * case.first_time
        while time.monotonic() < end:
            if case.ask == "disagreement":
                if self._told(case, out, job, outcome, max(injected)):
                    return False
            elif case.slow:
                if judge_slow(case, out, outcome, max(injected)):
                    return False
            elif judge_first(case, out, outcome, max(injected)):
                return False
            if case.outside != "slow_launcher" and self.launcher.poll() is not None:
                # Ranks that disagree may all be dead before the agent has said so.
                said_by = time.monotonic() + AFTER_END_SEC
                while first_verdict(out) is None and time.monotonic() < said_by:
                    time.sleep(0.02)
                if case.ask == "disagreement" or not judge_first(case, out, outcome, max(injected)):
                    outcome.result, outcome.problem = "none", "the job ended by itself\n" + tail(out)
                return True
            time.sleep(0.02)
        outcome.result, outcome.problem = "none", tail(out)
        return False

    def _told(self, case: Case, out: Path, job: str, outcome: Outcome, injected: float) -> bool:
        """Whether the agent has noticed by itself that ranks disagree, though nothing hangs."""
        if disagreements := (self.ask(out, job, "top", "--once") or {}).get("disagreements"):
            found = disagreements[0]
            outcome.found, outcome.named = found["class"], found["minority"]
            outcome.right_class = found["class"] in case.classes
            outcome.result = score(case, set(found["minority"]), set(found["ranks"]))
            outcome.after_sec = time.monotonic() - injected
            return True
        time.sleep(0.2)
        return False

    def ask(self, out: Path, job: str, *command: str) -> dict[str, Any] | None:
        """What `reft COMMAND --json` says of the first node."""
        done = subprocess.run(
            [sys.executable, "-m", "reft._cli.main", *command, "--json"],
            env=os.environ | {"REFT_RUN_DIR": str(out / "run"), "REFT_JOB_ID": job},
            capture_output=True,
            text=True,
            timeout=60,
        )
        agents = json.loads(done.stdout)["agents"] if done.returncode == 0 else []
        return agents[0] if agents else None

    def _healthy(self, case: Case, out: Path, job: str, outcome: Outcome) -> bool:
        end = time.monotonic() + 4 * self.suspect_sec + 60
        asked: list[str] = []
        outcome.result = "quiet"
        while (code := self.launcher.poll()) is None and time.monotonic() < end:
            if case.ask and any(out.glob("straggling.*")) and len(asked) < 3:
                time.sleep(1.5)  # into it: the log should show this phase only
                if report := self.ask(out, job, "stack"):
                    named = [culprit["rank"] for culprit in report["culprits"]]
                    asked.append(report["class"])
                    outcome.found, outcome.named = " ".join(asked), named
                    if report["state"] == "hang" or not set(named) <= case.named:
                        outcome.result = "WRONG"
                    elif named and set(named) == case.named:
                        outcome.right_class = report["class"] in case.classes
            time.sleep(0.02)
        if report := first_verdict(out):
            judge(case, report, outcome)
            outcome.result = "WRONG"
            outcome.problem = "a healthy job: " + str(report["screen"])
        if code is None:
            outcome.problem, outcome.result = "did not end\n" + tail(out), outcome.result + ", not ended"
            return False
        if code != 0:
            outcome.problem, outcome.result = f"exit status {code}\n" + tail(out), outcome.result + ", failed"
        return True

    def _thaw(self, job: str, out: Path) -> None:
        for pid in [self.launcher.pid, *rank_pids(job), *agent_pids(out / "run")]:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


# --- what is done from outside
# ---------------------------------------------------------------------------------------


def pids_of(out: Path) -> dict[int, int]:
    return {int(path.suffix[2:]): int(path.read_text()) for path in out.glob("pid.r*")}


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def stop_outside(runner: Runner, case: Case, out: Path) -> None:
    """At a random instant of a job that trains for long."""
    time.sleep(random.random() * 0.3)
    (out / "injected.outside").write_text(repr(time.monotonic()))
    os.kill(pids_of(out)[case.rank], signal.SIGSTOP)


def pause_all(runner: Runner, case: Case, out: Path) -> None:
    """As a virtual machine that is suspended: nothing runs, but the clock does."""
    pids = [*pids_of(out).values(), *agent_pids(out / "run")]
    send(pids, signal.SIGSTOP)
    time.sleep(2 * runner.suspect_sec)
    send(pids, signal.SIGCONT)


def pause_agent(runner: Runner, case: Case, out: Path) -> None:
    pids = agent_pids(out / "run")
    send(pids, signal.SIGSTOP)
    time.sleep(1.5 * runner.suspect_sec)
    send(pids, signal.SIGCONT)


def kill_agent(runner: Runner, case: Case, out: Path) -> None:
    kill_all(agent_pids(out / "run"))


def trace(runner: Runner, case: Case, out: Path) -> None:
    """A debugger is attached from outside for a while."""
    code = (
        "import ctypes, os, sys, time\n"
        "libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])\n"
        "assert libc.ptrace(16, pid, None, None) == 0, os.strerror(ctypes.get_errno())\n"
        "os.waitpid(pid, 0)\n"
        "time.sleep(float(sys.argv[2]))\n"
        "libc.ptrace(17, pid, None, None)\n"
    )
    pid = pids_of(out)[case.rank]
    subprocess.run([sys.executable, "-c", code, str(pid), str(2 * runner.suspect_sec)], check=True)


OUTSIDE: dict[str, Callable[[Runner, Case, Path], None]] = {
    "stop": stop_outside,
    "pause_all": pause_all,
    "pause_agent": pause_agent,
    "kill_agent": kill_agent,
    "trace": trace,
}


# --- judging
# -----------------------------------------------------------------------------------------------------------


def injections(out: Path) -> list[float]:
    return [float(path.read_text()) for path in out.glob("injected.*")]


def first_verdict(out: Path) -> dict[str, Any] | None:
    for path in sorted(out.glob("run/*/node-*/verdicts/*.json")):
        try:
            return dict(json.loads(path.read_text()))
        except ValueError:
            return None  # it is being written
    return None


def tail(out: Path) -> str:
    text = (out / "log").read_text(errors="replace") if (out / "log").exists() else ""
    agent = [path.read_text(errors="replace") for path in out.glob("run/*/node-*/agent.log")]
    return text[-1500:] + "\n--- agent\n" + "\n".join(agent)[-2500:]


def at_its_place(case: Case, culprit: dict[str, Any]) -> bool:
    function = (culprit["frame"] or {}).get("function", "")
    return case.stands in ("", function) and case.says in culprit["text"]


def judge(case: Case, report: dict[str, Any], outcome: Outcome) -> None:
    # A dead rank is reported as a crash, which says more, before it is as a hang.
    outcome.found = "dead" if report["state"] == "crash" else report["class"]
    outcome.named = [culprit["rank"] for culprit in report["culprits"]]
    outcome.candidates = [culprit["rank"] for culprit in report["candidates"]]
    outcome.right_class = not case.classes or outcome.found in case.classes
    outcome.result = score(case, set(outcome.named), set(outcome.candidates))
    if (
        case.named
        and outcome.result == "exact"
        and not all(at_its_place(case, culprit) for culprit in report["culprits"])
    ):
        outcome.result, outcome.problem = "exact but for the line", str(report["screen"])


def judge_first(case: Case, out: Path, outcome: Outcome, injected: float) -> bool:
    """Judges the first verdict; False if there is none yet."""
    if (report := first_verdict(out)) is None:
        return False
    judge(case, report, outcome)
    outcome.after_sec = report["now_ns"] * 1e-9 - injected
    return True


def judge_slow(case: Case, out: Path, outcome: Outcome, injected: float) -> bool:
    """Judges what the terminal shows of a slow rank; False if there is nothing yet."""
    if report := first_verdict(out):
        outcome.result, outcome.problem = "WRONG, hung too early", str(report["screen"])
        return True
    shown = SLOW.search((out / "log").read_text(errors="replace"))
    if shown is None:
        return False
    outcome.found, outcome.named = shown["what"], [int(shown["rank"])]
    outcome.right_class = outcome.found in case.classes
    outcome.result = score(case, set(outcome.named), set())
    outcome.after_sec = time.monotonic() - injected
    return True


def score(case: Case, named: set[int], candidates: set[int]) -> str:
    """The result of who names these; the same for reft and for the other tools."""
    if case.named and named == case.named:
        return "exact"
    if named:
        return "WRONG single" if len(named) == 1 else "WRONG set"
    if case.between is not None and candidates == case.between:
        return "exact"
    if case.may_be_open and (not candidates or candidates & (case.named or candidates)):
        return "undecidable, as allowed"
    if candidates and case.named and not candidates & case.named:
        return "undecidable, truth not among them"
    return "undecidable"


def score_said(case: Case, said: hang_peers.Said) -> None:
    """Sets the result of a tool that named somebody.

    Tools that know no candidates name them all; where it is between just these, that is as right as
    it gets.
    """
    named, candidates = set(said.named), set(said.candidates)
    if said.result != "not run" and (named or candidates):
        said.result = score(case, set(), named) if named == case.between else score(case, named, candidates)


def line(outcome: Outcome) -> str:
    case = outcome.case
    want = "healthy" if case.healthy else f"{sorted(case.named or case.between or [])}"
    seconds = f"{outcome.after_sec:6.1f} s" if outcome.after_sec is not None else "       -"
    got = f"{outcome.named}" if outcome.named else f"of {outcome.candidates}" if outcome.candidates else "-"
    good = {True: "", False: " (class not expected)", None: ""}[outcome.right_class]
    return f"{case.name:46} {want:18} {outcome.result:24} {seconds}  {got:12} {outcome.found}{good}"


def said_lines(outcome: Outcome) -> Iterable[str]:
    for said in outcome.beside:
        got = f"{said.named}" if said.named else f"of {said.candidates}" if said.candidates else "-"
        seen = {True: "frame seen, ", False: "frame not seen, ", None: ""}[said.frame_seen]
        stacks = f"{said.stacks} of {outcome.case.world} ranks, " if said.stacks is not None else ""
        took = f"took {said.took_sec:.1f} s, " if said.took_sec is not None else ""
        after = f"{said.after_sec:.1f} s, " if said.after_sec is not None else ""
        yield f"    {said.tool:33} {said.result:24} {got:12} {after}{seen}{stacks}{took}{said.note}"


def run_all(
    cases: list[Case], scratch: Path, suspect: float | None, jobs: int, tools: hang_peers.Tools | None = None
) -> Iterable[Outcome]:
    deadline = (suspect or DEFAULT_SUSPECT_SEC) * 2.5 + 20
    runners: queue.Queue[Runner] = queue.Queue()
    for _ in range(jobs):
        runners.put(Runner(scratch, suspect, deadline, tools))

    def one(case: Case) -> Outcome:
        runner = runners.get()
        limit = threading.Timer(runner.limit_sec(case), runner.launcher.abort)
        limit.daemon = True
        limit.start()
        try:
            return runner.run(case)
        except Exception as error:
            # Its launcher may be gone, or waits for an answer that never comes: the next case gets
            # another.
            runner.launcher.abort()
            runner = Runner(scratch, suspect, deadline, tools)
            return Outcome(case, "campaign failed", problem=repr(error))
        finally:
            limit.cancel()
            runners.put(runner)

    try:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for future in concurrent.futures.as_completed([pool.submit(one, case) for case in cases]):
                yield future.result()
    finally:
        while not runners.empty():
            runners.get().close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The tools of --beside are looked for in a virtual environment of their own:\n\n" + hang_peers.INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, help="draw so many (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="REGEX", help="names of cases")
    parser.add_argument("--quick", action="store_true", help="the tests' subset")
    parser.add_argument("--suspect", type=float, default=2.5, help="REFT_HANG_SUSPECT_SEC; 0: the default setting")
    parser.add_argument("--jobs", type=int, default=2, help="how many beside each other")
    parser.add_argument("--json", metavar="FILE", help="written after every case")
    parser.add_argument("--resume", metavar="FILE", help="skip the cases that this --json FILE has, and add to it")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="also ask py-spy, torch's flight recorder and lm-resiliency about each job that hangs, score them with the same "
        "ground truth, and print a table; a tool that is not in --tools is left out",
    )
    parser.add_argument("--tools", metavar="DIR", default="tools-venv", help="virtual environment of the tools")
    parser.add_argument("--table", metavar="FILE", help="write the table of docs/hang.md there")
    parser.add_argument("--keep", action="store_true", help="keep the files of all cases, not only of odd ones")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    args.json = args.json or args.resume
    cases = [case for case in matrix() if not args.only or re.search(args.only, case.name)]
    if args.quick:
        cases = subset(cases)
    if args.cases is not None and args.cases < len(cases):
        cases = random.Random(args.seed).sample(cases, args.cases)
    outcomes = resumed(args.resume)
    have = {outcome.case.name for outcome in outcomes}
    cases = [case for case in cases if case.name not in have]
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    tools = hang_peers.find(Path(args.tools).resolve()) if args.beside else None
    if tools and tools.absent:
        print(f"not in {args.tools}: {', '.join(tools.absent)}; to install them:\n{hang_peers.INSTALL}", flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="reft-hang-"))
    began = time.monotonic()
    for outcome in run_all(cases, scratch, args.suspect or None, args.jobs, tools):
        outcomes.append(outcome)
        print(line(outcome), flush=True)
        for text in said_lines(outcome):
            print(text, flush=True)
        fine = outcome.result in ("exact", "quiet", "undecidable, as allowed") and outcome.right_class is not False
        if outcome.problem:
            print("    " + outcome.problem.strip().replace("\n", "\n    "), flush=True)
        if not fine:
            print(f"    files: {outcome.out}", flush=True)
        elif not args.keep and outcome.out:
            shutil.rmtree(outcome.out, ignore_errors=True)
        if args.json:
            conclude(outcomes, args, time.monotonic() - began, quiet=True)
    if args.table:
        Path(args.table).write_text("\n".join(results_table(outcomes)) + "\n")
    return conclude(outcomes, args, time.monotonic() - began)


def resumed(path: str | None) -> list[Outcome]:
    """The outcomes that a file of `--json` has; those of cases that there are no more are left out."""
    if path is None or not Path(path).exists():
        return []
    known = {case.name: case for case in matrix()}
    outcomes = []
    for record in json.loads(Path(path).read_text())["outcomes"]:
        if (case := known.get(record.pop("case"))) is not None:
            beside = [hang_peers.Said(**said) for said in record.pop("beside")]
            outcomes.append(Outcome(case, beside=beside, **record))
    return outcomes


def rows_beside(outcomes: list[Outcome]) -> dict[str, list[hang_peers.Said]]:
    """What all tools said of the jobs that any was asked about, reft first."""
    rows: dict[str, list[hang_peers.Said]] = {}
    for outcome in outcomes:
        if outcome.beside:
            ours = hang_peers.Said("reft", outcome.result, outcome.named, outcome.candidates, outcome.after_sec)
            for said in [ours, *outcome.beside]:
                rows.setdefault(said.tool, []).append(said)
    return rows


def results_table(outcomes: list[Outcome]) -> list[str]:
    """The results of all cases as a table for docs/hang.md: a line for a fault, with the layouts, ranks and erring ranks it was done to."""
    faults: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.case.name):
        case = outcome.case
        extra = [case.outside] * (case.outside != "") + ["in the middle of a step"] * (case.where == "middle")
        name = case.fault.partition("_")[2] if case.fault != "fault_none" else ""
        faults.setdefault((case.row, ", ".join([name] * (name != "") + extra)), []).append(outcome)
    lines = ["| row and fault | layout, ranks, erring rank | result | class | time |", "|---|---|---|---|---|"]
    for (row, fault), found in faults.items():
        done: dict[str, list[str]] = {}
        for outcome in found:
            done.setdefault(f"{outcome.case.layout}{outcome.case.world}", []).append(f"r{outcome.case.rank}")
        where = ", ".join(f"{layout} {' '.join(ranks)}" for layout, ranks in done.items())
        results = ", ".join(f"{name} {count}" for name, count in Counter(outcome.result for outcome in found).items())
        healthy = found[0].case.healthy
        classes = sorted({outcome.found for outcome in found if outcome.found and not healthy})
        shown = ", ".join(f"`{name}`" for name in classes) + " (no rank singled out)" * any(o.candidates for o in found)
        times = [outcome.after_sec for outcome in found if outcome.after_sec is not None]
        took = f"{statistics.median(times):.1f} s" if times else "–"
        lines.append(f"| {row} {fault} | {where} | {results} | {shown or '–'} | {took} |")
    return lines


def conclude(outcomes: list[Outcome], args: argparse.Namespace, duration: float, quiet: bool = False) -> int:
    """Writes what has come out so far, and says it unless `quiet`."""
    from tests.support import report

    hangs = [outcome for outcome in outcomes if not outcome.case.healthy]
    well = [outcome for outcome in outcomes if outcome.case.healthy]
    results = Counter(outcome.result for outcome in hangs)
    table = hang_peers.table(rows_beside(outcomes))
    if not quiet:
        print()
        for name, count in results.most_common():
            print(f"hangs: {name:36} {count:4}")
        for name, count in Counter(outcome.result for outcome in well).most_common():
            print(f"healthy: {name:34} {count:4}")
        if args.beside:
            print("\n" + "\n".join(table) + "\n")
    right = results["exact"] + results["undecidable, as allowed"]
    times = [outcome.after_sec for outcome in hangs if outcome.after_sec is not None and "dead" not in outcome.found]
    dead = [outcome.after_sec for outcome in hangs if outcome.after_sec is not None and "dead" in outcome.found]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    single = [outcome for outcome in wrong if not outcome.case.healthy and len(outcome.named) == 1]
    broken = [outcome for outcome in outcomes if outcome.result in ("no injection", "campaign failed")]
    share = right / len(hangs) if hangs else 1.0
    false = sum(outcome.wrong for outcome in well)
    slow = [outcome for outcome in well if outcome.case.named]
    all_named = all(outcome.right_class is True for outcome in slow) if slow else None
    metrics = {
        "hang_cases": report.metric(len(hangs), "cases", None, ">= 60", len(hangs) >= 60),
        "healthy_cases": report.metric(len(well), "cases"),
        "right": report.metric(share, "of hang cases", None, ">= 0.95", share >= 0.95),
        "class_right": report.metric(sum(o.right_class is True for o in hangs), "cases"),
        "undecidable": report.metric(sum(n for r, n in results.items() if r.startswith("undecidable")), "cases"),
        "no_verdict": report.metric(results["none"], "cases"),
        "wrong_single": report.metric(len(single), "cases", None, "0", not single),
        "stragglers": report.metric(len(slow), "cases"),
        "stragglers_named": report.metric(
            sum(o.right_class is True for o in slow), "cases", None, "all" if slow else "", all_named
        ),
        "false_verdicts": report.metric(false, "healthy cases", None, "0", not false),
        "to_verdict_sec": report.metric(report.median(times), "s", report.mad(times)),
        "to_verdict_dead_sec": report.metric(
            report.median(dead), "s", report.mad(dead), "<= 5", report.median(dead) <= 5
        ),
        "duration_sec": report.metric(duration, "s"),
    }
    notes = [f"REFT_HANG_SUSPECT_SEC {args.suspect or 'default'}", f"seed {args.seed}"]
    notes += [line(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.case.name)]
    report.write(
        args.json,
        "tools/dev fault hang",
        metrics,
        run=len(outcomes),
        failed=len(wrong) + len(broken) + results["none"],
        notes=notes,
        more={
            "beside": table if args.beside else [],
            "outcomes": [asdict(outcome) | {"case": outcome.case.name} for outcome in outcomes],
        },
        quiet=quiet,
    )
    return 1 if wrong or broken else 0


if __name__ == "__main__":
    sys.exit(main())
