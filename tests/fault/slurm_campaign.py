"""Launches under a real Slurm: each has to commit and to continue after a kill, or to be refused in
one line, and no job may continue another one's state.

    tools/dev fault slurm [--only NAME ...] [--json FILE] [--keep DIR]

Starts a Slurm of its own with three nodes on this machine, from Debian's packages (slurmctld,
slurmd, slurm-client, munge), as root: ranks of different nodes get host names of their own, so that
reft takes them for different machines. Nothing of an installed Slurm is touched.

Truth is what the same ranks print without a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launchers import free_port

HERE = Path(__file__).resolve().parent
TRAINING = HERE.parent / "support" / "short_training.py"
PROGRAMS = ["slurmctld", "slurmd", "srun", "sbatch", "munged", "unshare"]
NODES = 3
WAIT_SEC = 240
RANK = """#!/bin/sh
# A rank as a user's wrapper starts it: Slurm's variables become torch's.
if [ -z "$RANK" ] && [ -z "$AS_LAUNCHER" ]; then
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
fi
exec unshare --uts sh -c 'hostname "$SLURMD_NODENAME"; exec "$@"' rank "$@"
"""


@dataclass
class Outcome:
    name: str
    right: bool = False
    remarks: list[str] = field(default_factory=list)
    sec: float = 0.0


class Cluster:
    """A Slurm of three nodes, all of them this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.daemons: list[subprocess.Popen[bytes]] = []
        host = os.uname().nodename
        for folder in ("state", "log", "spool", *(f"spool/n{n}" for n in range(NODES))):
            (root / folder).mkdir()
        self.rank = root / "rank.sh"
        self.rank.write_text(RANK)
        self.rank.chmod(0o755)
        socket, key = root / "munge.socket", root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.munge = ["munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}",
                      f"--pid-file={root}/munge.pid", f"--log-file={root}/munge.log",
                      f"--seed-file={root}/munge.seed"]  # fmt: skip
        nodes = "\n".join(
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8"
            for n in range(NODES)
        )
        (root / "slurm.conf").write_text(f"""
ClusterName=reft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=3
MessageTimeout=60
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/%n.pid
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/log/ctld
SlurmdLogFile={root}/log/%n
{nodes}
PartitionName=p Nodes=ALL Default=YES State=UP
""")
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "REFT_", "TORCHELASTIC")) or name == "REFT_AGENT_PATH"
        } | {
            "SLURM_CONF": str(root / "slurm.conf"),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "REFT_RUN_DIR": str(root / "run"),
            "REFT_AGENT_LINGER_SEC": "60",
            "PYTHONPATH": os.pathsep.join(sys.path[1:]),
        }

    def start(self) -> None:
        commands = [self.munge, ["slurmctld", "-D"]]
        commands += [["slurmd", "-D", "-N", f"n{n}"] for n in range(NODES)]
        for number, command in enumerate(commands):
            log = (self.root / "log" / f"daemon{number}").open("wb")
            self.daemons.append(
                subprocess.Popen(command, env=self.env, stdout=log, stderr=log, process_group=0)
            )
            if number == 0:
                self.until(lambda: (self.root / "munge.socket").exists(), "munged")
        self.until(lambda: self.said("sinfo", "-h", "-o", "%D %t").split() == [str(NODES), "idle"], "slurmd")

    def stop(self) -> None:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for daemon in self.daemons:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for daemon in self.daemons:
                    daemon.wait(timeout=10)

    def said(self, *words: str) -> str:
        return subprocess.run(words, env=self.env, capture_output=True, text=True).stdout.strip()

    def until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_SEC
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come in {WAIT_SEC} s; logs: {self.root}/log")
            time.sleep(0.2)

    def job(self, name: str, script: str, *options: str, **env: str) -> str:
        """Runs a batch script to its end; what it said."""
        output = self.root / f"{name}.out"
        batch = self.root / f"{name}.sh"
        batch.write_text(f"#!/bin/bash\nexport MASTER_PORT={free_port()}\n{script}\n")
        said = subprocess.run(
            ["sbatch", "--parsable", "-o", str(output), "--open-mode=append", *options, str(batch)],
            env=self.env | env | {"KILLED": str(self.root / f"{name}.killed")},
            cwd=self.root,
            capture_output=True,
            text=True,
        )
        if said.returncode:
            raise RuntimeError(f"sbatch: {said.stderr}")
        number = said.stdout.strip()
        self.until(lambda: self.said("squeue", "-h", "-t", "all", "-j", number, "-o", "%t")
                   not in ("PD", "R", "CG", "CF", "RQ"), f"the end of {name}")  # fmt: skip
        return output.read_text(errors="replace")


def losses(output: str) -> dict[tuple[int, int], set[str]]:
    """What each rank printed in each step."""
    found: dict[tuple[int, int], set[str]] = {}
    for rank, step, loss in re.findall(r"^(?:\d+: )?r(\d+) (\d+) (\S+)$", output, re.MULTILINE):
        found.setdefault((int(rank), int(step)), set()).add(loss)
    return found


def finals(output: str) -> set[str]:
    return set(re.findall(r"r\d+ final \S+?(?=,)", output))


class Matrix:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.train = f"{cluster.rank} {sys.executable} {TRAINING} --steps 10"

    def continues(
        self, outcome: Outcome, script: str, *options: str, refused: str = "", **env: str
    ) -> None:
        """`{kill}` of the script kills a rank once; the same without gives the truth.

        Args:
            refused: what the job has to say if it does not continue; "": it has to.
        """
        truth = self.cluster.job(f"{outcome.name}-truth", script.format(kill=""), *options, REFT_JOB_ID="truth", **env)
        output = self.cluster.job(outcome.name, script.format(kill="--kill 1:6"), *options, **env)
        if not finals(truth):
            outcome.remarks.append(f"undisturbed, it did not end: {truth[-300:]}")
            return
        wanted, got = losses(truth), losses(output)
        wrong = [key for key in wanted if got.get(key, set()) != wanted[key]]
        resumed = re.findall(r"resumed at step (\d+)", output)
        outcome.remarks += [f"resumed at step {resumed[0]}" if resumed else "did not continue"]
        outcome.remarks += [f"{len(wrong)} steps printed otherwise, as {wrong[0]}"] if wrong else []
        outcome.right = bool(resumed) and not wrong and finals(truth) == finals(output)
        if refused and not outcome.right:
            # Nothing of the old attempt is left, as the job says, and it trains anew.
            found = [line for line in output.splitlines() if refused in line]
            outcome.remarks += found[:1]
            outcome.right = bool(found) and not resumed and not wrong and finals(truth) == finals(output)
        if not outcome.right:
            outcome.remarks += [line for line in output.splitlines() if "reft" in line][-6:]

    def separate(self, outcome: Outcome, script: str, trials: int, *options: str) -> None:
        """Trials that do not share anything: none continues another one's state."""
        output = self.cluster.job(outcome.name, script, *options)
        ended = re.findall(r"trial (\S+) ended: (\d+)", output)
        mixed = re.findall(r"(?:resumed at|continues job).*", output)
        first = [key for key in losses(output) if key[1] == 0]
        outcome.remarks += [f"{len(ended)} of {trials} ended", *mixed]
        outcome.right = len(ended) == trials and all(code == "0" for _, code in ended) and not mixed and bool(first)
        if not outcome.right:
            outcome.remarks += output.splitlines()[-8:]

    def cases(self) -> dict[str, Callable[[Outcome], None]]:
        again = "for attempt in 1 2; do srun -l -K {layout} " + self.train + " {{kill}} && break; done"

        def srun(layout: str, *options: str) -> Callable[[Outcome], None]:
            script = again.format(layout=layout)
            # Each srun is a step of its own, so that the user has to name the job.
            return lambda outcome: self.continues(
                outcome, f"export REFT_JOB_ID=${{{{REFT_JOB_ID:-{outcome.name}}}}}\n{script}", *options
            )

        torchrun = (f"AS_LAUNCHER=1 srun {{layout}} {self.cluster.rank} {sys.executable} -m torch.distributed.run"
                    f" --max-restarts=2 --local-addr=127.0.0.1 {{options}} {TRAINING} --steps 10")  # fmt: skip
        two = torchrun.format(layout="-N1 -n1 --exclusive -w n{node}", options="--standalone --nproc-per-node=2")
        node = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:$MASTER_PORT --rdzv-id=$SLURM_JOB_ID"
        requeue = f"srun -l -K -n4 {self.train} {{kill}} || scontrol requeue $SLURM_JOB_ID"
        return {
            "block": srun("-N2 -n4 --ntasks-per-node=2 -m block", "-N2", "-n4"),
            "cyclic": srun("-N2 -n4 --ntasks-per-node=2 -m cyclic", "-N2", "-n4"),
            "no_tasks_per_node": srun("-N2 -n4", "-N2", "-n4"),
            "cyclic_no_tasks_per_node": srun("-N2 -n4 -m cyclic", "-N2", "-n4"),
            "uneven": srun("-N2 -n3", "-N2", "-n3"),
            "uneven_cyclic": srun("-N3 -n5 -m cyclic", "-N3", "-n5"),
            "one_node": srun("-N1 -n2", "-N1", "-n2"),
            "torchrun": lambda outcome: self.continues(
                outcome, torchrun.format(layout="-N2 -n2 --ntasks-per-node=1", options=node) + " {kill}", "-N2", "-n2",
            ),
            # Slurm starts a requeued job two minutes later, or kills all of its processes: vaults have
            # to be files.
            "requeue": lambda outcome: self.continues(
                outcome, requeue, "-N2", "-n4", "--requeue", REFT_VAULT_DIR=str(self.cluster.root / "vaults"),
            ),
            "requeue_memory": lambda outcome: self.continues(
                outcome, requeue, "-N2", "-n4", "--requeue", refused="no snapshot of an earlier attempt is left",
            ),
            "two_torchruns": lambda outcome: self.separate(
                outcome,
                "\n".join(f"({two.format(node=n)} --lr 0.{n + 1}; echo trial {n} ended: $?) &" for n in range(2)) + "\nwait",
                2, "-N2", "-n2",
            ),  # fmt: skip
            "sweep": lambda outcome: self.separate(
                outcome,
                f"for lr in 0.1 0.2; do srun -l -N2 -n4 {self.train} --lr $lr; echo trial $lr ended: $?; done",
                2, "-N2", "-n4",
            ),  # fmt: skip
        }


@contextlib.contextmanager
def folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep
        return
    made = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a new folder that keeps logs and outputs")
    arguments = parser.parse_args()
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root and {', '.join(PROGRAMS)}; missing: {', '.join(missing) or 'root'}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    with folder(arguments.keep) as root:
        cluster = Cluster(root)
        try:
            cluster.start()
            for name, run in Matrix(cluster).cases().items():
                if arguments.only and name not in arguments.only:
                    continue
                outcome = Outcome(name)
                started = time.monotonic()
                try:
                    run(outcome)
                except (TimeoutError, RuntimeError, OSError) as problem:
                    outcome.remarks.append(str(problem))
                outcome.sec = time.monotonic() - started
                outcomes.append(outcome)
                print(f"{'ok  ' if outcome.right else 'WRONG'} {name:26} {outcome.sec:5.0f} s  "
                      + "; ".join(outcome.remarks), flush=True)  # fmt: skip
        finally:
            cluster.stop()
    right = sum(outcome.right for outcome in outcomes)
    print(f"{right} of {len(outcomes)} launches right")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
