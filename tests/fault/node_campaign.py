"""Loses nodes of a job at every point of a snapshot's life that has a name, and checks what comes
back.

    tools/dev fault node [--cases N] [--seed S] [--only I …] [--ranks 8] [--nodes 4]
    [--protections P …] [--states S …] [--minutes M] [--no-netns] [--json FILE] [--keep DIR]
    [--verbose]

Each node has a launcher (torchrun), a network namespace, a host name and a run directory of its own
(tests/support/nodes.py). Eight ranks on four nodes train `node_worker.py`. At the point, a rank of
the node stops; then all that runs on the node is killed at once, and its launcher, as a replacement
would, starts new ranks and a new agent. In one of six cases (`shrink`), nothing takes the node's
place, and the job goes on with the nodes that are left. Every case is drawn from (seed, number,
ranks, nodes) alone, so `--only` repeats it.

Truth is what the same script gives under plain gloo without a loss. Verdicts:

    exact            resumed, and all losses and final hashes are those of the truth
    beginning        reft said that training starts from its beginning; it did, and ended as the truth
    announced        the end differs, and reft said why: random state is that of a replica
    wrong            the end differs without a word
    unexpected_loss  the scheme promised more than a start from the beginning
    silent           it started from its beginning without a word
    hang, failed     no end before the deadline; a launcher gave up
    untouched        the point was never reached

With fewer nodes, `exact` is what `node_shrink.py` says, and a start from the beginning ends as the
truth of as many ranks as are left.

`wrong`, `unexpected_loss`, `silent`, `hang` and `failed` fail the campaign, and so does what
`Campaign._broken` finds. What a scheme promises is in `promised`. Needs root; --no-netns does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fault.node_shrink import Expected, Rows, read_rows
from tests.support.launchers import free_port
from tests.support.nodes import Network, NodesJob, Server, network_of, state_of, why_no_namespaces

HERE = Path(__file__).resolve().parent
STEPS = 16
DEALT_BATCH = 32  # of node_worker.py
MAX_RESTARTS = 6
DEADLINE_SEC = 120.0
STOP_SEC = 2.0  # for the other nodes of a loss to reach their points

EXACT, REPLICA, ANY, REFUSED = "exact", "replica", "any", "refused"

PROTECTIONS = {"peer": 6, "arc+peer": 3, "aec+peer": 2, "arc:2+peer": 3, "arc": 2, "arc:2": 2, "aec": 2, "aor": 3, "none": 1}
STATES = ["replicas", "dropout", "own", "fsdp", "sharded"]
POINTS = ["capture", "mid_chunk", "before_seal", "after_seal", "after_vote", "gate", "after_commit", "after_seal", "before_seal", "after_vote",
          "collective", "random"]  # fmt: skip
RESTORE_POINTS = ["restore_agree", "restore_copy", "restore_done"]
# What is lost, and the weights of these kinds. In all but `ranks` and `moved`, a node's agent goes, too.
KINDS = {
    "node": 8,  # all but the launcher
    "first": 3,  # as `node`, node 0, whose launcher has the store
    "cut": 2,  # as `node`, and the network hears nothing of it
    "launcher": 2,  # with the launcher, which is started again
    "store": 1,  # with that of node 0: all launchers end, and all are started again
    "power": 1,  # with launcher and network: no packet says that the node is gone
    "ranks": 3,  # only the ranks
    "moved": 2,  # ranks and launcher, which are started again on another host; the agent lives
    "agent": 2,  # only the agent, from which training is to notice nothing
    "agent_then_node": 2,  # the agent of one node, and some steps later another node
    "pair": 4,  # two nodes at once
    "twice": 4,  # a second loss some steps after the first
    "restore": 4,  # a second loss while the ranks restore what the first one left
}
# A case of its own generator: with it among KINDS, all other cases would be others than before.
SHRINK, SHRINK_SHARE = "shrink", 1 / 6
SHRINK_STEPS, SHRINK_DELAY = 24, 0.02  # to the end of an epoch; so that no rank ends before a loss
# As `launcher` and `ranks`, and the launcher is not started again. `excluded`: the agent lives on.
SHRINKS = {"gone": 3, "excluded": 1}
SHRINK_STATES = {"replicas": 4, "dropout": 4, "own": 1, "fsdp": 1, "sharded": 1}
WHOLE = ("replicas", "dropout")  # each rank has all of the model, so fewer can go on
BEGINNING = re.compile(r"starts? from its beginning|Training starts from its beginning")
WHY_REFUSED = re.compile(r"no step can be resumed \(\S|step \d+ is not resumed[,:] \S")
FROM_THE_FIRST_STEP = re.compile(r"resumed at step 1:|computed again from step 1 ")
OF_REPLICAS = "whose small state is that of replicas"
BEHIND, AGAIN = "snapshots do not reach another node", "snapshots reach another node again"
LATE, THERE = "snapshots are not on another node yet", "snapshots are on another node from step"
FAILURES = {"wrong", "unexpected_loss", "silent", "hang", "failed"}


def promised(case: Case, nodes: int) -> str:
    """What has to come back.

    | lost                                     | protection      | state            | promise |
    |------------------------------------------|-----------------|------------------|---------|
    | ranks, or an agent alone                 | any             | any              | exact   |
    | ranks that go on on another host         | any             | any              | exact   |
    | one node                                 | peer, *+peer    | any              | exact   |
    | one node                                 | arc, arc:2, aec | replicas         | exact   |
    | one node                                 | arc, arc:2, aec | dropout          | replica |
    | one node                                 | aor             | sharded          | exact   |
    | two nodes, neither keeps the other's     | peer, *+peer    | any              | exact   |
    | two nodes                                | arc:2 (+peer)   | replicas         | exact   |
    | two nodes                                | arc:2 (+peer)   | dropout          | replica |
    | one after the other, with steps between  | as one node     | as one node      | as one  |
    | one, and one in the restore              | as two nodes, or the same node twice       |         |
    | all else                                 |                 |                  | any     |

    `replica`: resumed, but the lost ranks' random state may be that of a replica, and reft says so.
    `any`: exact, or from the beginning with a word. Nothing is ever allowed to be wrong.
    """
    if case.kind == SHRINK:
        return promised_to_fewer(case, nodes)
    if case.kind in ("ranks", "agent", "moved"):
        return EXACT
    ranks_store, peer = case.protection.replace("+peer", ""), "peer" in case.protection
    by_replicas = {"replicas": EXACT, "dropout": REPLICA}.get(case.state, ANY)
    if ranks_store == "aor" and case.state == "sharded":
        by_replicas = EXACT
    survives = {"none": 0, "peer": 0, "arc": 1, "aec": 1, "aor": 1, "arc:2": 2}[ranks_store]
    lost = [set(loss.nodes) for loss in case.losses if loss.how != "agent"]
    at_once = [set.union(*lost)] if case.kind in ("pair", "restore") else lost
    found = EXACT
    for group in at_once:
        keeps_own = all((node + 1) % nodes not in group for node in group)
        if peer and (keeps_own and len(group) > 0):
            continue
        if len(group) > survives or nodes <= survives:
            return ANY
        found = by_replicas if found == EXACT or by_replicas == ANY else found
    return found


def promised_to_fewer(case: Case, nodes: int) -> str:
    """What has to come back if nothing takes the place of a lost node.

    | lost                       | protection                      | state             | promise |
    |----------------------------|---------------------------------|-------------------|---------|
    | a node                     | any                             | own, sharded      | refused |
    | ranks; their agent lives   | any                             | the others        | exact   |
    | a node                     | with peer                       | fsdp              | exact   |
    | a node                     | else                            | fsdp              | any     |
    | a node                     | any but none, nor arc:2 alone   | replicas, dropout | exact   |
    |                            | on two nodes                    |                   |         |
    | a node                     | else                            | replicas, dropout | any     |

    `refused`: from the beginning, and reft says why.
    """
    if case.state not in (*WHOLE, "fsdp"):
        return REFUSED
    if any(loss.how == "excluded" for loss in case.losses) or "peer" in case.protection:
        return EXACT
    if case.state == "fsdp":
        return ANY
    survives = {"none": 0, "arc:2": 2}.get(case.protection, 1)
    return EXACT if 0 < survives < nodes else ANY


@dataclass
class Loss:
    """What happens to nodes, and when: once a rank of each has stopped at the point of the step in
    start `start` of the ranks; `random`: `delay` seconds after any rank has logged that step."""

    nodes: list[int]
    point: str
    step: int | None
    start: int = 0
    how: str = "node"
    delay: float = 0.0


@dataclass
class Case:
    number: int
    kind: str
    protection: str
    state: str
    env: dict[str, str]
    losses: list[Loss] = field(default_factory=list)
    promise: str = ANY

    @property
    def leaving(self) -> set[int]:
        """Nodes whose place nothing takes."""
        return {node for loss in self.losses if loss.how in SHRINKS for node in loss.nodes}

    @property
    def told(self) -> bool:
        """Whether the ranks log all that `node_shrink.Row` has."""
        return self.kind == SHRINK

    def __str__(self) -> str:
        what = "; ".join(
            f"{'+'.join(f'n{n}' for n in loss.nodes)} at {loss.point}"
            + (f" of step {loss.step}" if loss.step is not None else "")
            for loss in self.losses
        )
        return f"{self.number:4} {self.kind:15} {self.protection:10} {self.state:8} {what}"


def draw(
    seed: int, number: int, nodes: int, protections: list[str] | None = None,
    states: list[str] | None = None, isolated: bool = True,
) -> Case:  # fmt: skip
    """Case `number` of a campaign."""
    rng = random.Random(f"{seed}:{number}:{nodes}:{SHRINK}")
    if rng.random() < SHRINK_SHARE:
        return _draw_shrink(rng, number, nodes, protections, states)
    rng = random.Random(f"{seed}:{number}:{nodes}")
    kinds = {kind: weight for kind, weight in KINDS.items() if nodes > 2 or kind != "pair"}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if not isolated:  # these need a network of their own
        kind = {"cut": "node", "power": "launcher"}.get(kind, kind)
    names = protections or list(PROTECTIONS)
    protection = rng.choices(names, [PROTECTIONS[name] for name in names])[0]
    if kind == "pair" and protections is None:
        protection = rng.choice(["peer", "arc:2", "arc:2+peer", "arc+peer"])
    fitting = {"aor": ["sharded", "sharded", "dropout"]} | dict.fromkeys(
        ("arc", "arc:2", "aec"), ["replicas", "replicas", "dropout"]
    )
    state = rng.choice(states or fitting.get(protection, STATES))
    env = _draw_settings(rng, number)
    if kind in ("launcher", "power", "moved"):
        # Without it, torch 2.11 tells a new launcher in a later round no MASTER_ADDR.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    case = Case(number, kind, protection, state, env)
    step, point, delay = rng.randrange(4, STEPS - 8), rng.choice(POINTS), rng.random() * 0.1
    first, other = rng.sample(range(nodes), 2)
    if kind in ("first", "store"):
        first, other = 0, rng.randrange(1, nodes)
    if kind in ("launcher", "power", "moved") and first == 0:
        first, other = other, 0
    how = {"cut": "cut", "launcher": "launcher", "store": "launcher", "power": "power", "ranks": "ranks",
           "moved": "moved", "agent": "agent"}.get(kind, "node")  # fmt: skip
    if kind == "pair":
        case.losses = [Loss([first, other], point, step)]
    elif kind == "agent":
        case.losses = [Loss([first], "random", step, how="agent", delay=delay)]
    elif kind == "agent_then_node":
        case.losses = [Loss([other], "random", step, how="agent", delay=delay), Loss([first], point, step + 6, delay=delay)]
    else:
        case.losses = [Loss([first], point, step, how=how, delay=delay)]
    if kind == "twice":
        second = rng.randrange(nodes)
        case.losses.append(Loss([second], rng.choice(POINTS), step + 4, start=1, delay=delay))
    elif kind == "restore":
        second = rng.choice([first, first, other, (first + 2) % nodes])
        case.losses.append(Loss([second], rng.choice(RESTORE_POINTS), None, start=1))
    case.promise = promised(case, nodes)
    return case


def _draw_settings(rng: random.Random, number: int) -> dict[str, str]:
    return {
        "REFT_SNAPSHOT_SLOTS": rng.choice(["2", "2", "3"]),
        "REFT_SNAPSHOT_CHUNK_BYTES": rng.choice(["64K", "4M"]),
        "REFT_MESH_BYTES_PER_SEC": rng.choice(["0", "0", "1M"]),
        "REFT_MESH_TLS": ("off", "on")[number % 2],
        "REFT_RESUME_VERIFY": rng.choice(["off", "off", "auto"]),
    }


def _draw_shrink(
    rng: random.Random,
    number: int,
    nodes: int,
    protections: list[str] | None,
    states: list[str] | None,
) -> Case:
    """One node is lost for good. Node 0 has the store, so without it all launchers end, and those
    of the other nodes are started again."""
    names, kept = protections or list(PROTECTIONS), states or STATES
    protection = rng.choices(names, [PROTECTIONS[name] for name in names])[0]
    state = rng.choices(kept, [SHRINK_STATES[name] for name in kept])[0]
    env = _draw_settings(rng, number)
    if rng.random() < 0.5:  # else the ranks use the launchers' store
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    how = rng.choices(list(SHRINKS), list(SHRINKS.values()))[0]
    node, step = rng.randrange(nodes), rng.randrange(4, STEPS - 8)
    loss = Loss([node], rng.choice(POINTS), step, how=how, delay=rng.random() * 0.1)
    case = Case(number, SHRINK, protection, state, env, [loss])
    case.promise = promised(case, nodes)
    return case


Losses = dict[int, str]


def read_log(path: Path) -> list[tuple[int, str]]:
    """(step, loss) of each whole line."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except OSError:
        return []
    return [(int(step), loss) for step, loss, *_ in (line.split() for line in lines)]


class Campaign:
    def __init__(self, scratch: Path, network: Network, nodes: int, ranks: int) -> None:
        self.scratch, self.network, self.nodes, self.ranks = scratch, network, nodes, ranks
        self.local = ranks // nodes
        self.server = Server()
        self.secret = scratch / "secret"
        self.secret.write_bytes(os.urandom(32))
        self.secret.chmod(0o600)
        self._references: dict[Path, tuple[list[Losses], list[str]]] = {}

    def close(self) -> None:
        self.server.close()

    def _job(self, out: Path, case: Case, backend: str, nodes: int) -> NodesJob:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        faults: dict[str, list[str]] = defaultdict(list)
        for loss in case.losses:
            if loss.point != "random":
                step = "*" if loss.step is None else str(loss.step)
                faults[str(loss.start)] += [f"{rank}:{step}:{loss.point}:stop" for rank in self._stopped(loss)]
        env = {name: value for name, value in os.environ.items()
               if not name.startswith(("REFT_", "TORCHELASTIC")) or name == "REFT_AGENT_PATH"}  # fmt: skip
        env |= {
            "REFT_JOB_ID": f"node-{os.getpid()}-{out.name}",
            "REFT_JOB_SECRET_FILE": str(self.secret),
            "REFT_SNAPSHOT_PROTECTION": case.protection,
            "REFT_AGENT_LINGER_SEC": "60",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "NODE_FAULTS": json.dumps({start: ";".join(specs) for start, specs in faults.items()}),
        } | case.env
        script = [str(HERE / "node_worker.py"), "--backend", backend, "--state", case.state,
                  "--steps", str(SHRINK_STEPS if case.told else STEPS), "--out", str(out)]  # fmt: skip
        if case.told:
            script += ["--deal", str(self._items), "--delay", str(SHRINK_DELAY)]
        return NodesJob(self.server, self.network, out, script, env, nodes, self.local, free_port(),
                        MAX_RESTARTS, fewest=nodes - len(case.leaving))  # fmt: skip

    @property
    def _items(self) -> int:
        """Of an epoch of a case that logs them: six steps of all ranks."""
        return 6 * DEALT_BATCH * self.ranks

    def _stopped(self, loss: Loss) -> list[int]:
        """The first rank of each node stops at the point; those of `ranks` all do."""
        last = self.local if loss.how == "ranks" else 1
        return [node * self.local + i for node in loss.nodes for i in range(last)]

    def _reference_folder(self, state: str, told: bool, nodes: int) -> Path:
        return self.scratch / f"reference-{state}-{nodes}{'-told' * told}"

    def reference(self, state: str, told: bool, nodes: int) -> tuple[list[Losses], list[str]]:
        """Losses and final hashes by rank of a run that knows nothing of reft."""
        out = self._reference_folder(state, told, nodes)
        if out not in self._references:
            case = Case(0, SHRINK if told else "reference", "none", state, {})
            job = self._job(out, case, "gloo", nodes)
            trouble = self._run(job, case)
            logs = [dict(read_log(out / f"r{rank}.s0.log")) for rank in range(nodes * self.local)]
            steps = SHRINK_STEPS if told else STEPS
            if trouble or any(job.codes) or any(len(log) != steps for log in logs):
                raise RuntimeError(f"the reference run failed ({trouble}, {job.codes}):\n{job.said[-3000:]}")
            self._references[out] = logs, self._finals(out)[: nodes * self.local]
        return self._references[out]

    def _finals(self, out: Path) -> list[str]:
        paths = [out / f"r{rank}.final" for rank in range(self.ranks)]
        return [path.read_text() if path.exists() else "" for path in paths]

    def _run(self, job: NodesJob, case: Case) -> str:
        """Runs a job to its end; what went wrong: "" or "hang"."""
        end = time.monotonic() + DEADLINE_SEC
        pending = list(case.losses)
        restarts_left = sum(
            loss.how in ("launcher", *SHRINKS) and 0 in loss.nodes for loss in case.losses
        )
        job.start()
        try:
            while not job.poll() or restarts_left:
                if time.monotonic() > end:
                    return "hang"
                if pending and self._reached(job, pending[0]):
                    self._lose(job, pending.pop(0))
                if restarts_left and job.poll():
                    # The store went with its launcher, and so did all launchers.
                    restarts_left -= 1
                    if any(job.codes):
                        job.start(case.leaving)
                time.sleep(0.003 if pending else 0.02)
            return ""
        finally:
            job.end()

    def _reached(self, job: NodesJob, loss: Loss) -> bool:
        if loss.point == "random":
            logs = [read_log(job.folder / f"r{rank}.s{loss.start}.log") for rank in range(self.ranks)]
            return any(log and log[-1][0] >= (loss.step or 0) for log in logs)
        return any(self._is_stopped(job, rank, loss.start) for rank in self._stopped(loss))

    @staticmethod
    def _is_stopped(job: NodesJob, rank: int, start: int) -> bool:
        try:
            pid = int((job.folder / f"r{rank}.s{start}.pid").read_text())
        except (OSError, ValueError):
            return False
        return state_of(pid) == "T"

    def _lose(self, job: NodesJob, loss: Loss) -> None:
        if loss.point == "random":
            time.sleep(loss.delay)  # the instant is drawn
        else:
            until = time.monotonic() + STOP_SEC
            while time.monotonic() < until and not all(
                self._is_stopped(job, rank, loss.start) for rank in self._stopped(loss)
            ):
                time.sleep(0.002)
        for node in loss.nodes:
            if loss.how == "cut":
                self.network.cut(node, True)
            elif loss.how == "power":
                self.network.unplug_cable(node)
        for node in loss.nodes:
            if loss.how == "ranks":
                job.kill_ranks(node)
            elif loss.how == "agent":
                job.kill_agent(node)
            elif loss.how == "moved":
                job.move(node)
            elif loss.how == "excluded":
                job.leave(node)
            else:
                job.kill_node(node, launcher=loss.how in ("launcher", "power", "gone"))
        (job.folder / f"lost-{loss.start}").touch()
        for node in loss.nodes:
            if loss.how == "cut":
                self.network.cut(node, False)
            elif loss.how == "power":
                self.network.replace(node)
            if loss.how in ("launcher", "power", "moved") and node != 0:
                job.start_node(node)

    def run(self, case: Case) -> dict[str, Any]:
        """Runs and judges one case."""
        losses, finals = self.reference(case.state, case.told, self.nodes)
        out = self.scratch / f"case-{case.number}"
        began = time.monotonic()
        job = self._job(out, case, "reft", self.nodes)
        trouble = self._run(job, case)
        said = job.said
        result: dict[str, Any] = {"case": case, "out": out, "sec": time.monotonic() - began, "problems": []}
        problems: list[str] = result["problems"]
        runs = self._starts(out)
        # reft has said that it cannot keep it, or not yet.
        behind = said.count(BEHIND) > said.count(AGAIN) or said.count(LATE) > said.count(THERE)
        done = len(list(out.glob("lost-*")))
        says_so = BEGINNING.search(said) and (WHY_REFUSED.search(said) or not case.leaving)
        result["lost"], from_start = self._lost(runs)
        # The first line of a start is the one of the step that it went on from.
        from_start = from_start and not FROM_THE_FIRST_STEP.search(said)
        result["starts"] = len(runs)
        codes: list[int | None] = job.codes
        wrong = [
            f"loss of step {step} of rank {rank} in start {start}"
            for start, logs in enumerate(runs)
            for rank, log in enumerate(logs)
            for step, loss in log
            if losses[rank].get(step) != loss
        ]
        if case.leaving and done:
            wrong = self._unlike_fewer(case, out, len(runs), behind, said)
            codes = [code for node, code in enumerate(codes) if node not in case.leaving]
        elif self._finals(out) != finals:
            differ = [rank for rank, final in enumerate(self._finals(out)) if final != finals[rank]]
            wrong.append(f"final state of ranks {differ}")
        if trouble:
            verdict = "hang"
        elif any(codes):
            verdict = "failed"
            problems.append(f"exit statuses {codes}")
        elif wrong and OF_REPLICAS in said:
            verdict = "announced"
        elif wrong:
            verdict = "wrong"
        elif from_start and not says_so:
            verdict = "silent"
        elif from_start:
            verdict = "beginning"
        elif not done:
            verdict = "untouched"
        else:
            verdict = "exact"
        if verdict == "wrong":
            problems.append(f"differs: {wrong[0]}, and {len(wrong) - 1} more")
        if case.promise == EXACT and verdict in ("beginning", "announced") and not behind:
            problems.append(f"was {verdict}, promised: {case.promise}")
            verdict = "unexpected_loss"
        if case.promise == REPLICA and verdict == "beginning":
            verdict = "unexpected_loss"
        if case.promise == REFUSED and verdict == "exact":
            problems.append("went on with fewer ranks, although each had a part of its own")
        problems += self._broken(case, job, said, runs)
        result["verdict"] = verdict
        result["failed"] = verdict in FAILURES or bool(problems)
        return result

    def _unlike_fewer(self, case: Case, out: Path, starts: int, behind: bool, said: str) -> list[str]:
        """What is not as it has to be of a job that went on without a node."""
        left = self.nodes - len(case.leaving)
        now = range(left * self.local)
        lost = {
            rank for rank in range(self.ranks)
            if case.losses[0].how == "gone" and rank // self.local in case.leaving
        }  # fmt: skip
        # The small state of a rank is with its copy. Without one, it is that of any rank left.
        if "peer" in case.protection and not behind:
            lost.clear()
        others = set(range(self.ranks)) - lost
        rows = [
            [read_rows(out / f"r{rank}.s{start}.log") for rank in range(self.ranks)]
            for start in range(starts)
        ]
        expected = Expected(
            truth=self._told(case.state, self.nodes),
            fewer=[],
            sources=[others if rank in lost else {rank} for rank in now],
            steps=SHRINK_STEPS,
            items=self._items,
            newest=case.promise == EXACT and not behind,
            anew=not FROM_THE_FIRST_STEP.search(said),
        )
        if not expected.anew or not any(1 in of_rank for start in rows[1:] for of_rank in start):
            return expected.differences(rows)
        expected.fewer = self._told(case.state, left)
        _, finals = self.reference(case.state, True, left)
        differ = self._finals(out)[: len(now)] != finals
        return expected.differences(rows) or ["final state"] * differ

    def _told(self, state: str, nodes: int) -> list[Rows]:
        """Rows by rank of a run that knows nothing of reft."""
        self.reference(state, True, nodes)
        folder = self._reference_folder(state, True, nodes)
        return [read_rows(folder / f"r{rank}.s0.log") for rank in range(nodes * self.local)]

    def _broken(self, case: Case, job: NodesJob, said: str, runs: list[list[list[tuple[int, str]]]]) -> list[str]:
        """What is wrong although it ended well."""
        found = []
        if "the resume is not exact" in said and OF_REPLICAS not in said:
            found.append("a resume was called inexact: " + said[said.index("the resume is not exact") :][:300])
        if case.kind == "agent" and len(runs) > 1:
            found.append("training was restarted, although only an agent was killed")
        if case.promise == EXACT and "a lost node is NOT survived" in said and case.kind not in (
            "ranks", "agent", "moved", SHRINK  # of which too few nodes may be left
        ):  # fmt: skip
            found.append("reft said that a lost node is not survived")
        for line in said.splitlines():
            if line.startswith("reft") and ("training continues without" in line or "Traceback" in line):
                found.append(line[:200])
        return found

    def _starts(self, out: Path) -> list[list[list[tuple[int, str]]]]:
        """Logs of each rank in each start."""
        last = max((int(path.stem.split(".s")[1]) for path in out.glob("r*.s*.pid")), default=0)
        return [
            [read_log(out / f"r{rank}.s{start}.log") for rank in range(self.ranks)] for start in range(last + 1)
        ]

    @staticmethod
    def _lost(runs: list[list[list[tuple[int, str]]]]) -> tuple[int, bool]:
        """Most steps that a restart computed again, and whether any went back to the beginning. Ranks
        may differ in the number of their starts; then a start with fewer logs is left out."""
        completed, most, from_start = 0, 0, False
        for start, logs in enumerate(runs):
            if any(logs) and start and completed > 2:
                first = min(log[0][0] for log in logs if log)
                from_start = from_start or first == 1
                most = max(most, 0 if first == 1 else completed - first + 1)
            if all(logs):
                completed = max(completed, min(log[-1][0] for log in logs))
        return most, from_start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=4, help="divides the number of ranks; two or more")
    parser.add_argument("--protections", nargs="+", choices=list(PROTECTIONS), help="draw from these only (other cases)")
    parser.add_argument("--states", nargs="+", choices=STATES, help="draw from these only (other cases)")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="run a case up to N times more whose point was not reached")
    parser.add_argument("--no-netns", action="store_true", help="nodes share this machine's network and host name")
    parser.add_argument("--minutes", type=float, help="begin no case after that time")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder that keeps the files of all cases")
    parser.add_argument("--verbose", action="store_true", help="print what reft said in each case")
    args = parser.parse_args()
    if args.nodes < 2 or args.ranks % args.nodes:
        parser.error("--nodes: two or more, and a divisor of --ranks")
    if not args.no_netns and (why := why_no_namespaces()):
        print(f"{why}; --no-netns runs without", file=sys.stderr)
        return 2
    from tests.support import report

    if args.keep:
        args.keep.mkdir(parents=True)
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="reft-node-"))
    numbers = args.only if args.only is not None else list(range(args.cases))
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with network_of(args.nodes, not args.no_netns) as network:
        campaign = Campaign(scratch, network, args.nodes, args.ranks)
        try:
            for number in numbers:
                if args.minutes and time.monotonic() - began > args.minutes * 60:
                    break
                case = draw(args.seed, number, args.nodes, args.protections, args.states, not args.no_netns)
                for left in range(args.again, -1, -1):
                    result = campaign.run(case)
                    show(result, args)
                    repeated = result["verdict"] == "untouched" and left > 0
                    if repeated or not (result["failed"] or args.keep):
                        shutil.rmtree(result["out"], ignore_errors=True)
                    if not repeated:
                        break
                results.append(result)
        finally:
            campaign.close()
    if not args.keep and not any(result["failed"] for result in results):
        shutil.rmtree(scratch, ignore_errors=True)
    return conclude(results, args, time.monotonic() - began, report)


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    case, out = result["case"], result["out"]
    print(f"{case}: {'FAILED ' if result['failed'] else ''}{result['verdict']} (promised {case.promise}),"
          f" {result['starts']} starts, {result['lost']} lost, {result['sec']:.1f} s", flush=True)  # fmt: skip
    for problem in result["problems"]:
        print(f"       {problem}", flush=True)
    if result["failed"] or args.verbose:
        for log in sorted(out.glob("node*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(("reft", "start ")):
                    print(f"       {log.stem}: {line[:240]}", flush=True)
    if result["failed"]:
        kinds = f" --ranks {args.ranks} --nodes {args.nodes}" + " --no-netns" * args.no_netns
        kinds += f" --protections {' '.join(args.protections)}" if args.protections else ""
        kinds += f" --states {' '.join(args.states)}" if args.states else ""
        print(f"       files: {out}; again: tools/dev fault node --only {case.number} --seed {args.seed}{kinds}", flush=True)


def conclude(results: list[dict[str, Any]], args: argparse.Namespace, sec: float, report: Any) -> int:
    """Prints the table of verdicts and writes the file."""
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        table[result["case"].protection, result["case"].kind][result["verdict"]] += 1
    print(f"\n{'protection':10} {'lost':15} verdicts")
    for (protection, kind), row in sorted(table.items()):
        print(f"{protection:10} {kind:15} " + ", ".join(f"{count} {name}" for name, count in sorted(row.items())))
    verdicts = Counter(result["verdict"] for result in results)
    kinds = Counter(result["case"].kind for result in results)
    print("\ncases: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    failed = [result["case"].number for result in results if result["failed"]]
    metrics = {name: report.metric(verdicts[name], "cases") for name in ("exact", "beginning", "announced", "untouched")}
    for name in sorted(FAILURES):
        metrics[name] = report.metric(verdicts[name], "cases", None, "0", verdicts[name] == 0)
    metrics["steps_lost_most"] = report.metric(max((result["lost"] for result in results), default=0), "steps")
    metrics["duration_sec"] = report.metric(sec, "s")
    notes = [f"seed {args.seed}, {args.ranks} ranks on {args.nodes} nodes"]
    notes += ["without network namespaces"] * args.no_netns
    notes += [f"failed cases: {failed}"] * bool(failed)
    more = {"kinds": dict(sorted(kinds.items())),
            "verdicts": [{"number": result["case"].number, "kind": result["case"].kind,
                          "protection": result["case"].protection, "state": result["case"].state,
                          "promise": result["case"].promise, "verdict": result["verdict"],
                          "problems": result["problems"]} for result in results]}  # fmt: skip
    report.write(args.json, "fault node", metrics, run=len(results), failed=len(failed),
                 skipped=verdicts["untouched"], notes=notes, more=more)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
