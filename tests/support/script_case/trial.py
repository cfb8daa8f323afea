"""Runs a script undisturbed and killed once, and says what was claimed and what was true."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launchers import Forkrun, agent_pids, kill_all

CLASSES = {
    "exact": "exact, and claimed",
    "unclaimed": "exact, and not claimed: a value named, a part refused, or a check that failed",
    "named": "not exact, and named before or at the resume",
    "SILENT": "not exact, and nothing said",
    "FALSE": "not exact, and called bit-identical",
    "stopped": "a value named, without which the restarted script failed",
    "CRASHED": "the restarted job failed, and nothing was said",
    "not killed": "the fault point was not reached",
    "unusable": "the undisturbed script fails, or two undisturbed runs differ",
}
FAULTS = {"SILENT", "FALSE", "CRASHED"}
_NAMED = [
    r"not restorable: .*", r"place in the loop not restored.*", r".*is not resumed.*", r".*was not restored.*",
    r"resumed at step \d+: state, .*", r"the resume is not exact.*", r".*approximated.*", r".*NOT protected.*",
    r"resumed at step \d+: .*(?:except|but for).*", r".*not restored:.*", r"gradients of step .* save gradients from step.*",
    r".*training starts from its beginning.*", r".*refused.*", r"an iteration now ends when.*",
]  # fmt: skip


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        verdict: a key of CLASSES.
        differs: first lines that differ, in words.
        named: what reft named.
        resumed: the line of the resume, "" without one.
    """

    verdict: str
    differs: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    resumed: str = ""
    said: str = ""
    sec: float = 0.0


class Trials:
    """Runs scripts, one at a time, with a server of its own."""

    def __init__(self, ranks: int = 2, deadline_sec: float = 250.0) -> None:
        self._launcher = Forkrun()
        self._ranks, self._deadline = ranks, deadline_sec

    def close(self) -> None:
        self._launcher.close()

    def run(self, script: str, fault: str = "", **env: str) -> tuple[int | None, str]:
        """Exit status, None past the deadline; and what all ranks said."""
        folder = Path(tempfile.mkdtemp(prefix="reft-sc-"))
        path, log = folder / "script.py", folder / "log"
        path.write_text(script)
        settings = {
            "REFT_JOB_ID": folder.name,
            "REFT_RUN_DIR": str(folder / "run"),
            "REFT_AGENT_LINGER_SEC": "30",
            "PYTHONWARNINGS": "ignore",
            **({"REFT_FAULT": fault + ":kill"} if fault else {}),
            **env,
        }
        try:
            self._launcher.start([str(path)], settings, log, self._ranks, 2)
            end = time.monotonic() + self._deadline
            while (code := self._launcher.poll()) is None and time.monotonic() < end:
                time.sleep(0.02)
            if code is None:
                self._launcher.kill()
            return code, log.read_text(errors="replace")
        finally:
            kill_all(agent_pids(folder / "run"))
            with contextlib.suppress(OSError):
                shutil.rmtree(folder, ignore_errors=True)

    def judge(self, script: str, fault: str) -> Outcome:
        began = time.monotonic()
        code, plain = self.run(script, REFT_DISABLE="1")
        if code != 0 or len(finals(plain)) != self._ranks:
            return Outcome("unusable", said=plain)
        code, said = self.run(script, fault)
        outcome = compared(plain, said, code, self._ranks)
        if outcome.verdict in (*FAULTS, "named"):
            _, again = self.run(script, REFT_DISABLE="1")
            if steps(again) != steps(plain) or finals(again) != finals(plain):
                outcome.verdict = "unusable"
        outcome.sec = time.monotonic() - began
        return outcome


def finals(said: str) -> dict[str, dict[str, str]]:
    """Parts of the final digest, by rank."""
    return {
        rank: dict(word.split("=") for word in words.split())
        for rank, words in re.findall(r"^(r\d+) final (.*)$", said, re.MULTILINE)
    }


def steps(said: str) -> dict[tuple[str, str], set[str]]:
    """What was printed of each step, by rank and step."""
    found: dict[tuple[str, str], set[str]] = {}
    for rank, step, rest in re.findall(r"^(r\d+) step (\d+) (.*)$", said, re.MULTILINE):
        found.setdefault((rank, step), set()).add(rest)
    return found


def names(said: str) -> list[str]:
    """What reft said that it does not restore, or restores otherwise."""
    lines = [line for line in said.splitlines() if re.match(r"^(\[\w+\] )?reft[:\[ ]", line)]
    found = []
    for line in lines:
        for pattern in _NAMED:
            if match := re.search(pattern, line):
                found.append(match[0][:300])
                break
    return list(dict.fromkeys(found))


def compared(plain: str, said: str, code: int | None, ranks: int) -> Outcome:
    """What a killed run came to."""
    outcome = Outcome("", named=names(said), said=said)
    if found := re.findall(r"reft: (resumed at step .*)", said):
        outcome.resumed = found[-1]
    if "fault point " not in said:
        outcome.verdict = "not killed"
        return outcome
    expected = steps(plain)
    for key, lines in steps(said).items():
        if lines != expected.get(key):
            outcome.differs.append(f"{' '.join(key)}: {sorted(lines)} instead of {sorted(expected.get(key, set()))}")
    if missing := set(expected) - set(steps(said)):
        outcome.differs.append(f"missing: {sorted(missing)[:4]}")
    wanted, got = finals(plain), finals(said)
    wrong: set[str] = set()
    for rank in sorted(wanted):
        parts = [name for name, value in wanted[rank].items() if got.get(rank, {}).get(name) != value]
        wrong.update(parts)
        if parts:
            outcome.differs.append(f"final {rank}: {' '.join(parts)}")
    tail = said.partition("fault point ")[2]
    if code != 0 or "Traceback" in tail and len(got) < ranks:
        outcome.verdict = "stopped" if outcome.named else "CRASHED"
    elif not outcome.differs:
        outcome.verdict = "unclaimed" if outcome.named else "exact"
    elif outcome.named:
        outcome.verdict = "named"
    else:
        claims = " ".join(re.findall(r"bit-identical.*", said))
        _, _, left_out = claims.partition(" but for ")  # named as what was not compared
        is_left_out = bool(wrong) and all(name in left_out for name in wrong)
        outcome.verdict = "named" if is_left_out else "FALSE" if claims else "SILENT"
    return outcome


def fault_of(rng_point: str, rank: int, step: int) -> str:
    return f"{rank}:{step}:{rng_point}"


def plain_environment() -> None:
    """Removes settings of reft that come from outside."""
    for name in [name for name in os.environ if name.startswith("REFT_") and name != "REFT_AGENT_PATH"]:
        del os.environ[name]
