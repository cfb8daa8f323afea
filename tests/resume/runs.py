"""Runs one script undisturbed and killed, and compares what it printed.

What a script has to be: each line that it prints begins with `r<rank> `; the first line says `#
ranks: N; kills: A B C`, the program points at which the three runs are killed. How it is compared,
    for each rank on its own:

* undisturbed (plain gloo, see UNDISTURBED) it prints the lines R;
* killed, the first attempt prints R[:m];
* the restarted attempt prints R[:d] + V + R[k:], with k <= m. R[:d] is what the one discarded
iteration (and what comes before the loop) says: lines before reft's "verifying the resume" line. V
is what the step that is computed again says, once or twice, between that line and "resumed at
step": R[k-v:k]. Without one, V is empty. On rank 0, which says those lines, all of them and no
other; other ranks may be past their resume by then, so for them: not more than these.

So all lines from the resumed step on are bit-identical, final variables and hashes among them, and
each line of an undisturbed run is there once more or less: none is missing, and what is there twice
beside V was printed before the kill. No resume may be called inexact.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.launchers import agent_pids, kill_all

HERE = Path(__file__).resolve().parent
DEADLINE_SEC = 200
BESIDE = {path.stem for path in HERE.glob("scripts/*.py")}  # modules that scripts import from their own folder
# Scripts that cannot be continued at some of their kills, and what reft says then: all lines are as
# undisturbed from the first on.
KNOWN = {
    "grid_search": (
        r"step \d+ is not resumed, the script has changed: m0\.module\.0\.weight was .* starts from its beginning"
    ),
}
# What an undisturbed run has in its environment: it runs on plain gloo. Lightning averages integers
# under another name than gloo's by an operation that gloo lacks and reft has.
PLAIN = {"REFT_DISABLE": "1"}
UNDISTURBED = {"lightning_trainer": {"REFT_SNAPSHOT": "0", "REFT_RESUME": "off"}}
# Where in the life of a snapshot each of the three kills falls.
POINTS = ("capture", "before_seal", "after_vote")
# Programs that make things after the first step on which nothing depends (a loader for evaluation,
# signatures of metrics, a cache of file systems): reft names them.
NAMED = {"hf_datasets_stream", "hf_trainer", "lightning_trainer"}
# Scripts that write tensors after the step: a snapshot that met such a write is dropped (and reft
# says so), so it may not live to the later points, and the resume may be earlier by as many steps.
DROPPING = {"gradient_hooks"}


@dataclasses.dataclass(frozen=True)
class Script:
    """A script with what its first line says."""

    path: Path
    ranks: int
    kills: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def scripts(folder: str) -> list[Script]:
    """All scripts of a folder, by name; what is imported by them has no header."""
    found = []
    for path in sorted((HERE / folder).glob("*.py")):
        header = re.match(r"# ranks: (\d); kills: ([\d ]+)\n", path.read_text())
        if header:
            found.append(Script(path, int(header[1]), tuple(map(int, header[2].split()))))
    return found


@dataclasses.dataclass
class Run:
    """What a run said: all lines in their order."""

    code: int
    said: str

    def attempts(self) -> list[list[str]]:
        """Lines of each attempt: rank 0 says the job's name when it starts, and all ranks of the attempt before are gone then."""
        lines = self.said.splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"reft: job \S+: \d+ ranks?", line)]
        return [lines[begin:end] for begin, end in zip(starts, [*starts[1:], len(lines)], strict=False)]


def missing(script: Script) -> list[str]:
    """Packages that a script imports and that are not installed."""
    names = set()
    for node in ast.walk(ast.parse(script.path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(name for name in names - BESIDE if importlib.util.find_spec(name) is None)


def run(launcher: Any, script: Script, max_restarts: int = 3, grace_sec: float | None = None, **env: str) -> Run:
    """Runs a script to its end.

    Args:
        grace_sec: how long the job may take to end once all its ranks have said their final line;
            it is ended then.
        env: more of its environment; REFT_JOB_ID names the job for a later run of it.

    Raises:
        TimeoutError: it did not end; all of it is gone.
    """
    folder = Path(tempfile.mkdtemp(prefix="reft-rs-"))
    job = f"rs-{os.getpid()}-{folder.name[-6:]}"
    log = folder / "log"
    environment = {"REFT_JOB_ID": job, "REFT_RUN_DIR": str(folder / "run"), "REFT_AGENT_LINGER_SEC": "60"} | env
    try:
        launcher.start([str(script.path)], environment, log, script.ranks, max_restarts)
        end = time.monotonic() + DEADLINE_SEC
        finished = False
        while (code := launcher.poll()) is None:
            if (
                grace_sec is not None
                and not finished
                and log.exists()
                and has_finished(log.read_text(errors="replace"), script.ranks)
            ):
                finished, end = True, time.monotonic() + grace_sec
            if time.monotonic() > end and finished:
                launcher.kill()
                code = 1
                break
            if time.monotonic() > end:
                launcher.kill()
                raise TimeoutError(f"{script.name} has not ended:\n{log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.005)
        # Progress bars of one rank move the cursor in the middle of what another one prints.
        return Run(int(code), re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", log.read_text(errors="replace")))
    finally:
        kill_all(agent_pids(folder / "run"))
        shutil.rmtree(folder, ignore_errors=True)


def has_finished(said: str, ranks: int) -> bool:
    """Whether all ranks have said their final line."""
    return all(re.search(rf"^r{rank} final .*\n", said, re.MULTILINE) for rank in range(ranks))


def of_rank(lines: list[str], rank: int) -> list[str]:
    return [line for line in lines if line.startswith(f"r{rank} ")]


def compare(reference: Run, killed: Run, ranks: int, kill: int, named: bool = False) -> list[str]:
    """What differs, in words; nothing if all is as it must be.

    Args:
        named: Values may be reported as not restored.
    """
    attempts = killed.attempts()
    if len(attempts) != 2:
        return [f"{len(attempts)} attempts instead of 2"]
    before, after = attempts
    at = [i for i, line in enumerate(after) if re.search(r"reft: resumed at step \d+", line)]
    if len(at) != 1:
        return [f"reft said {len(at)} times that it resumed"]
    found = re.search(r"resumed at step (\d+): (.*?),", after[at[0]])
    assert found is not None
    begun = [i for i, line in enumerate(after) if re.search(r"reft: verifying the resume: ", line)]
    wrong = [line for line in after if "the resume is not exact" in line]
    dropped = killed.said.count("dropped that snapshot")
    if not kill - 1 - dropped <= int(found[1]) <= kill:
        wrong.append(f"killed at step {kill}, resumed at step {found[1]}")
    complete = r"state and place in the loop" + (r"( except \d+ values?)?" if named else "")
    if not re.fullmatch(complete, found[2]):
        wrong.append(f"resumed with {found[2]} only")
    for rank in range(ranks):
        expected = of_rank(reference.said.splitlines(), rank)
        first, second = of_rank(before, rank), of_rank(after, rank)
        discarded = len(of_rank(after[: at[0]], rank))
        if expected[: len(first)] != first:
            wrong.append(f"rank {rank}, before the kill: {difference(expected, first)}")
            continue
        d = len(of_rank(after[: begun[0]], rank)) if begun else discarded
        possible = [(d, discarded - d)]
        if rank != 0:
            longest = discarded if begun else 0
            possible = [(d, v) for d in range(discarded + 1) for v in range(min(longest, discarded - d) + 1)]
        if not any(_continues(expected, first, second, d, v) for d, v in possible):
            d = discarded
            k = len(expected) - len(second) + d
            wrong.append(
                f"rank {rank}, {d} lines before the resume, {len(second) - d} after it; "
                + difference(expected[k:] if k >= 0 else expected, second[d:])
            )
    return wrong


def compare_from_the_beginning(reference: Run, killed: Run, ranks: int) -> list[str]:
    """As `compare`, for a run that was not resumed and said why."""
    attempts = killed.attempts()
    if len(attempts) != 2:
        return [f"{len(attempts)} attempts instead of 2"]
    pairs = [(of_rank(reference.said.splitlines(), rank), of_rank(attempts[1], rank)) for rank in range(ranks)]
    return [difference(expected, found) for expected, found in pairs if expected != found]


def _continues(expected: list[str], first: list[str], second: list[str], d: int, v: int) -> bool:
    """Whether the lines of a restarted rank are `d` discarded ones, `v` of a step that was computed
    again, and the rest."""
    repeated, tail = second[d : d + v], second[d + v :]
    k = len(expected) - len(tail)
    if not (second[:d] == expected[:d] and 0 <= k <= len(first) and tail == expected[k:] and tail):
        return False
    once = len(repeated) // 2
    if repeated[:once] == repeated[once:]:  # computed twice
        repeated = repeated[:once]
    return repeated == expected[max(0, k - len(repeated)) : k]


def difference(expected: list[str], found: list[str]) -> str:
    """The first line that differs."""
    for i, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"line {i} is\n    {b}\n  instead of\n    {a}"
    return f"{len(found)} lines instead of {len(expected)}, first {found[:1]}, last {found[-1:]}; expected first {expected[:1]}"


def reference(launcher: Any, script: Script, known: dict[str, Run]) -> Run:
    """The undisturbed run, made once: what it prints counts, not how it ends.

    A thread of plain gloo may let go of the last tensor while Python ends, which aborts or hangs
    the process (torch 2.11, when DistributedDataParallel has a communication hook written in
    Python; one run of five of `hook_state`).

    Raises:
        ValueError: the script does not print what could be compared.
    """
    if script.name not in known:
        done = run(launcher, script, max_restarts=0, grace_sec=10, **UNDISTURBED.get(script.name, PLAIN))
        for rank in range(script.ranks):
            lines = of_rank(done.said.splitlines(), rank)
            if len(lines) < 8 or len(set(lines)) != len(lines) or not lines[-1].startswith(f"r{rank} final "):
                raise ValueError(f"{script.name}, undisturbed, exit code {done.code}:\n{done.said[-6000:]}")
        known[script.name] = done
    return known[script.name]


def check(launcher: Any, script: Script, which: int, known: dict[str, Run]) -> str:
    """Runs a script with one of its kills. Says what is wrong, with all that was said; nothing if it is as it must be."""
    expected = reference(launcher, script, known)
    kill, point = script.kills[which], POINTS[0 if script.name in DROPPING else which]
    fault = f"{which % script.ranks}:{kill}:{point}:kill"
    killed = run(launcher, script, REFT_FAULT=fault)
    reason = KNOWN.get(script.name, "")
    if reason and re.search(reason, killed.said):
        wrong = compare_from_the_beginning(expected, killed, script.ranks)
    else:
        wrong = compare(expected, killed, script.ranks, kill, script.name in NAMED)
    if killed.code:
        wrong.insert(0, f"exit code {killed.code}")
    if f"fault point {point} of step {kill}: kill" not in killed.said:
        wrong.insert(0, "was not killed")
    return "\n".join([script.name, fault, *wrong, "", killed.said[-8000:]]) if wrong else ""
