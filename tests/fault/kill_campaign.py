"""Kills ranks and agents with SIGKILL at every point that has a name and at random instants, and
checks what comes back.

    kill_campaign.py --cases 300 [--seed N] [--only CASE …] [--kinds KIND …] [--models MODEL …]
    [--json FILE] [--keep]

Four ranks train `train_worker.py`. Every case is drawn from (seed, case number) alone, so `--only
CASE --seed N` repeats it. A case passes if the job ends with status 0 before its deadline, every
logged loss and the final hash of every rank equal those of a run under plain gloo bit for bit, no
verified resume is called inexact, and no restart went back further than the case's promise (design: at most one step; an agent that dies
together with its ranks and without REFT_VAULT_DIR: to the beginning, said aloud).

REFT_SNAPSHOT_POLICY and other settings that no case draws are taken from the environment.

Nine cases of ten run under `forkrun.py`, which restarts ranks as torchrun does but quicker; the
tenth under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.launchers import Forkrun, Torchrun, agent_pids, kill_all

HERE = Path(__file__).resolve().parent


WORLD = 4
STEPS = 24
MAX_RESTARTS = 3
MODELS = ["ddp", "fsdp", "plain", "two"]
POINTS = [
    "capture",
    "early_copy",
    "mid_chunk",
    "before_seal",
    "after_seal",
    "after_vote",
    "gate",
    "after_commit",
    "collective",
]
RESTORE_POINTS = ["restore_agree", "restore_copy", "restore_done"]
# Weights of the kinds of cases.
KINDS = {
    "one@point": 8,
    "subset@point": 6,
    "all@point": 5,
    "one@random": 5,
    "subset@random": 4,
    "all@random": 3,
    "startup": 2,
    "twice": 3,
    "restore": 6,
    "restore@random": 3,
    "agent": 3,
    "agent_then_rank": 3,
    "agent+all": 2,
    "agent+all:files": 3,
    "agent+subset:files": 2,
    "one@point:files": 2,
}
BEGINNING = "training starts from its beginning"  # what is said when a restarted job finds no snapshot


@dataclass
class Kill:
    """SIGKILL from outside, `delay` seconds after a trigger: the newest step in the log of attempt `attempt`, or its start."""

    attempt: int
    step: int | None
    delay: float
    ranks: list[int]
    agent: bool = False


@dataclass
class Case:
    number: int
    kind: str
    model: str
    launcher: str
    env: dict[str, str]
    kills: list[Kill] = field(default_factory=list)
    point: str = ""
    most_lost: int | None = 1  # None: anything, as far as the beginning

    def __str__(self) -> str:
        what = self.env.get("REFT_FAULT", "")
        for kill in self.kills:
            who = ["agent"] * kill.agent + [f"r{r}" for r in kill.ranks]
            when = f"step {kill.step}" if kill.step is not None else "start"
            what += f" {'+'.join(who)} in attempt {kill.attempt} {kill.delay * 1e3:.0f} ms after {when}"
        return f"{self.number:4} {self.kind:18} {self.model:5} {self.launcher:8} {what.strip()}"


def draw(seed: int, number: int, kinds: list[str] | None = None, models: list[str] | None = None) -> Case:
    """Case `number` of a campaign."""
    rng = random.Random(f"{seed}:{number}")
    names = kinds or list(KINDS)
    kind = rng.choices(names, [KINDS[name] for name in names])[0]
    case = Case(number, kind, rng.choice(models or MODELS), "torchrun" if rng.random() < 0.1 else "forkrun", {})
    case.env["REFT_SNAPSHOT_SLOTS"] = rng.choice(["2", "2", "3"])
    case.env["REFT_SNAPSHOT_THREADS"] = rng.choice(["1", "1", "2"])
    case.env["REFT_SNAPSHOT_CHUNK_BYTES"] = rng.choice(["64K", "64K", "4M"])
    step = rng.randrange(4, STEPS - 4)
    subset = rng.sample(range(WORLD), rng.randrange(2, WORLD))
    one = [rng.randrange(WORLD)]
    everyone = list(range(WORLD))
    delay = rng.random() * 0.04
    who, _, rest = kind.partition("@")
    ranks = {"one": one, "subset": subset, "all": everyone}.get(who, one)
    if kind.endswith(":files"):
        case.env["REFT_VAULT_DIR"] = "vaults"  # made absolute when the case runs
    if rest.startswith("point"):
        case.point = rng.choice(POINTS)
        if case.point == "early_copy" and models is None:
            case.model = rng.choice(["ddp", "plain"])  # they have buffers that forward writes
        targets = ["*"] if who == "all" else [str(r) for r in ranks]
        case.env["REFT_FAULT"] = ";".join(f"{t}:{step}:{case.point}:kill" for t in targets)
    elif rest == "random" and who in ("one", "subset", "all"):
        case.kills = [Kill(0, step, delay, ranks)]
    elif kind == "startup":
        case.kills = [Kill(0, None, rng.random() * 0.8, rng.choice([one, subset, everyone]))]
    elif kind == "twice":
        case.kills = [
            Kill(0, step, delay, rng.choice([one, subset, everyone])),
            Kill(1, min(STEPS - 2, step + rng.randrange(1, 4)), delay, one),
        ]
    elif kind == "restore":
        case.point = rng.choice(RESTORE_POINTS)
        case.kills = [Kill(0, step, delay, rng.choice([one, subset, everyone]))]
        victims = rng.choice([one, subset, everyone])
        case.env["REFT_FAULT"] = ";".join(f"{r}:*:{case.point}:kill" for r in victims)
        case.env["REFT_FAULT_ATTEMPT"] = "1"
    elif kind == "restore@random":
        case.kills = [
            Kill(0, step, delay, rng.choice([one, everyone])),
            Kill(1, None, rng.random() * 0.8, rng.choice([one, subset])),
        ]
    elif kind == "agent":
        case.kills = [Kill(0, step, delay, [], agent=True)]
        case.most_lost = 0
    elif kind == "agent_then_rank":
        case.kills = [
            Kill(0, step - 2, delay, [], agent=True),
            Kill(0, step + 3, rng.random() * 0.04, rng.choice([one, subset])),
        ]
        case.most_lost = None  # until the new agent has every vault, it is as if the agent died with the rank
    elif kind.startswith("agent+"):
        case.kills = [Kill(0, step, delay, everyone if "all" in kind else subset, agent=True)]
        if "REFT_VAULT_DIR" not in case.env:
            case.most_lost = None
    return case


Losses = dict[int, str]


def is_verified(said: str, attempt: int) -> bool:
    """Whether an attempt has computed a step again to verify its resume. Its first line is that of
    the step before then: it stands between the two program points."""
    part = said.partition(f"attempt {attempt}\n")[2].partition(f"attempt {attempt + 1}\n")[0]
    return "reft: verifying the resume: " in part


def read_log(path: Path) -> list[tuple[int, str]]:
    """(step, loss) of each whole line."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except OSError:
        return []
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


class Campaign:
    def __init__(self, scratch: Path, deadline: float) -> None:
        self.scratch, self.deadline = scratch, deadline
        self.launchers: dict[str, Any] = {"forkrun": Forkrun(), "torchrun": Torchrun()}
        self._references: dict[str, tuple[list[Losses], list[str]]] = {}

    def close(self) -> None:
        for launcher in self.launchers.values():
            launcher.close()

    def _environment(self, out: Path, case: Case) -> dict[str, str]:
        env = {
            "REFT_JOB_ID": f"kill-{os.getpid()}-{out.name}",
            "REFT_RUN_DIR": str(out / "run"),
            "REFT_AGENT_LINGER_SEC": "60",
            "REFT_HANG_SUSPECT_SEC": "20",
            "PYTHONUNBUFFERED": "1",
        } | case.env
        if "REFT_VAULT_DIR" in env:
            env["REFT_VAULT_DIR"] = str(out / env["REFT_VAULT_DIR"])
            Path(env["REFT_VAULT_DIR"]).mkdir()
        return env

    def reference(self, model: str) -> tuple[list[Losses], list[str]]:
        """Losses and final hashes by rank of a run that knows nothing of reft."""
        if model not in self._references:
            case = Case(0, "reference", model, "forkrun", {})
            out = self.scratch / f"reference-{model}"
            code, trouble, _ = self._run(case, out, "gloo")
            logs = [dict(read_log(out / f"r{rank}.a0.log")) for rank in range(WORLD)]
            if code != 0 or trouble or any(len(log) != STEPS for log in logs):
                raise RuntimeError(
                    f"the reference run failed ({code}, {trouble}):\n{(out / 'log').read_text()[-2000:]}"
                )
            self._references[model] = logs, [(out / f"r{rank}.final").read_text() for rank in range(WORLD)]
        return self._references[model]

    def _run(self, case: Case, out: Path, backend: str) -> tuple[int | None, str, int]:
        """Exit status (None: past the deadline), what went wrong with the killing, and how many were killed."""
        out.mkdir()
        env = self._environment(out, case)
        argv = [
            str(HERE / "train_worker.py"),
            "--backend",
            backend,
            "--model",
            case.model,
            "--steps",
            str(STEPS),
            "--out",
            str(out),
        ]
        launcher = self.launchers[case.launcher]
        launcher.start(argv, env, out / "log", WORLD, MAX_RESTARTS)
        end = time.monotonic() + self.deadline * (3 if case.launcher == "torchrun" else 1)
        pending, killed = list(case.kills), 0
        while True:
            code = launcher.poll()
            if code is not None:
                break
            if time.monotonic() > end:
                launcher.kill()
                return None, "", killed
            if pending and self._triggered(out, pending[0]):
                kill = pending.pop(0)
                time.sleep(kill.delay)
                pids = agent_pids(out / "run") if kill.agent else []
                if kill.agent and not pids:
                    # Right if the job has ended in the meantime; the instant was then not reached.
                    grace = time.monotonic() + 10
                    while (code := launcher.poll()) is None and time.monotonic() < grace:
                        time.sleep(0.01)
                    if code is not None:
                        break
                    launcher.kill()
                    return -1, "no agent to kill", killed
                for rank in kill.ranks:
                    try:
                        pids.append(int((out / f"r{rank}.a{kill.attempt}.pid").read_text()))
                    except (OSError, ValueError):
                        pass  # not yet started: then it is not killed
                killed += kill_all(pids)
            time.sleep(0.001 if pending else 0.01)
        return code, "", killed

    @staticmethod
    def _triggered(out: Path, kill: Kill) -> bool:
        if kill.step is None:
            return (out / f"r{WORLD - 1}.a{kill.attempt}.pid").exists()
        # In the first attempt any rank's line counts; after a restart the steps of the resumed run.
        for rank in range(WORLD):
            log = read_log(out / f"r{rank}.a{kill.attempt}.log")
            if log and log[-1][0] >= kill.step:
                return True
        return False

    def run(self, case: Case) -> dict[str, Any]:
        """Runs and judges one case."""
        losses, finals = self.reference(case.model)
        out = self.scratch / f"case-{case.number}"
        shutil.rmtree(out, ignore_errors=True)
        began = time.monotonic()
        code, trouble, killed = self._run(case, out, "reft")
        result: dict[str, Any] = {"case": case, "sec": time.monotonic() - began, "lost": 0, "problems": [], "out": out}
        problems: list[str] = result["problems"]
        said = (out / "log").read_text(errors="replace")
        kill_all(agent_pids(out / "run"))
        if trouble:
            problems.append(trouble)
        if code is None:
            problems.append(f"hang: not finished after {result['sec']:.0f} s")
        elif code != 0:
            problems.append(f"exit status {code}")
        fired = said.count("fault point ")
        result["killed"] = killed + fired
        attempts = 1 + max((int(p.stem.split(".a")[1]) for p in out.glob("r*.a*.pid")), default=0)
        result["restarts"] = attempts - 1
        result["fired"] = killed + fired > 0 and (not case.point or fired > 0)
        if case.kind == "agent" and attempts > 1:
            problems.append("training was restarted, although only the agent was killed")
        completed, from_start = 0, False
        for attempt in range(attempts):
            logs = [read_log(out / f"r{rank}.a{attempt}.log") for rank in range(WORLD)]
            for rank, log in enumerate(logs):
                wrong = [step for step, loss in log if losses[rank].get(step) != loss]
                if wrong:
                    problems.append(
                        f"wrong bits: rank {rank} attempt {attempt}: loss of step {wrong[0]} (and {len(wrong) - 1} more)"
                    )
                steps = [step for step, _ in log]
                if steps != list(range(steps[0], steps[0] + len(steps)) if steps else []):
                    problems.append(f"rank {rank} attempt {attempt}: steps are not in sequence: {steps}")
            if is_verified(said, attempt):
                logs = [log[1:] for log in logs]
            first = {log[0][0] for log in logs if log}
            if len(first) > 1:
                problems.append(f"attempt {attempt}: ranks resumed at different steps {sorted(first)}")
            # Ranks that had done all steps may have said bye before the kill: the snapshots of a
            # job that is over are let go.
            if attempt and first and 0 < completed < STEPS:
                lost = completed - min(first)
                result["lost"] = max(result["lost"], lost)
                from_start = from_start or (min(first) == 1 and completed > 2)
                if case.most_lost is not None and lost > case.most_lost:
                    problems.append(f"{lost} steps lost: all ranks had completed {completed}, resumed at {min(first)}")
            completed = max(completed, min((log[-1][0] if log else 0) for log in logs))
        result["from_start"] = from_start
        if "the resume is not exact" in said:
            problems.append("a resume was called inexact: " + said[said.index("the resume is not exact") :][:300])
        result["verified"] = said.count("reft: verifying the resume")
        if "training continues without snapshots" in said:
            problems.append(
                "a rank trained without snapshots: "
                + said[said.index("training continues without") :].split("\n")[0][:200]
            )
        # A gate that need not wait is passed without stopping there.
        if case.point and not fired and case.point != "gate":
            problems.append(f"the fault point {case.point} was not reached")
        for path in out.glob("run/*/node-*/verdicts/*.json"):
            named = json.loads(path.read_bytes())["class"]
            if named.endswith("_mismatch"):  # the ranks agree about every op, whoever dies
                problems.append(f"false verdict: {named}, {path}")
        if from_start and BEGINNING not in said:
            problems.append("started from the beginning without saying so")
        if code == 0:
            for rank in range(WORLD):
                path = out / f"r{rank}.final"
                if not path.exists() or path.read_text() != finals[rank]:
                    problems.append(f"wrong bits: final state of rank {rank} differs")
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), help="draw from these kinds only (other numbers, other cases)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*MODELS, "pipe"],
        help="draw from these only (other cases; `pipe` is in no other)",
    )
    parser.add_argument("--deadline", type=float, default=45, help="seconds; three times as long under torchrun")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="keep the files of all cases, not only of failed ones")
    args = parser.parse_args()
    from tests.support import report

    scratch = Path(tempfile.mkdtemp(prefix="reft-kill-"))
    campaign = Campaign(scratch, args.deadline)
    numbers = args.only if args.only is not None else list(range(args.cases))
    failed, unfired, lost, restarts = [], [], [], 0
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    wrong_bits = hangs = kills = torchrun = from_start = verified = 0
    began = time.monotonic()
    try:
        for number in numbers:
            case = draw(args.seed, number, args.kinds, args.models)
            result = campaign.run(case)
            problems = result["problems"]
            if problems:
                verdict = "FAILED"
                failed.append(number)
            elif not result["fired"]:
                verdict = "no kill"
                unfired.append(number)
            else:
                verdict = "ok"
            by_kind[case.kind][verdict] += 1
            by_kind[case.kind]["lost"] = max(by_kind[case.kind]["lost"], 0 if result["from_start"] else result["lost"])
            print(
                f"{case}: {verdict}, {result['restarts']} restarts, {result['lost']} lost, {result['sec']:.1f} s",
                flush=True,
            )
            for problem in problems:
                print(f"       {problem}", flush=True)
            if problems:
                kinds = f" --kinds {' '.join(args.kinds)}" if args.kinds else ""
                kinds += f" --models {' '.join(args.models)}" if args.models else ""
                print(
                    f"       files: {result['out']}; again: tools/dev fault kill --only {number} --seed {args.seed}{kinds}",
                    flush=True,
                )
            elif not args.keep:
                shutil.rmtree(result["out"], ignore_errors=True)
            wrong_bits += any("wrong bits" in p for p in problems)
            hangs += any("hang" in p for p in problems)
            kills += result["killed"]
            restarts += result["restarts"]
            from_start += result["from_start"]
            verified += result["verified"]
            torchrun += case.launcher == "torchrun"
            if case.most_lost is not None:
                lost.append(result["lost"])
    finally:
        campaign.close()
    if not failed and not args.keep:
        shutil.rmtree(scratch, ignore_errors=True)

    print(f"\n{'kind':20} {'ok':>4} {'no kill':>8} {'FAILED':>7} {'most lost':>10}")
    for kind in sorted(by_kind):
        row = by_kind[kind]
        print(f"{kind:20} {row['ok']:4} {row['no kill']:8} {row['FAILED']:7} {row['lost']:10}")
    ran = len(numbers)
    metrics = {
        "cases": report.metric(ran, "cases"),
        "under_torchrun": report.metric(torchrun, "cases"),
        "kills": report.metric(kills, "processes"),
        "restarts": report.metric(restarts, "restarts"),
        "steps_lost_most": report.metric(max(lost, default=0), "steps", None, "<= 1", max(lost, default=0) <= 1),
        "wrong_bits": report.metric(wrong_bits, "cases", None, "0", wrong_bits == 0),
        "hangs": report.metric(hangs, "cases", None, "0", hangs == 0),
        "verified": report.metric(verified, "resumes"),
        "from_beginning": report.metric(from_start, "cases"),
        "duration_sec": report.metric(time.monotonic() - began, "s"),
    }
    notes = [
        f"seed {args.seed}",
        f"policy {os.environ.get('REFT_SNAPSHOT_POLICY', 'gap')}",
        f"failed cases: {failed}" if failed else "",
        f"the fault point was never reached: {unfired}" if unfired else "",
    ]
    report.write(
        args.json,
        "fault kill",
        metrics,
        run=ran,
        failed=len(failed),
        skipped=len(unfired),
        notes=[n for n in notes if n],
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
