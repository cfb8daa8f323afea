"""Several nodes on one machine: a launcher and an agent each, one job. Votes and shards cross
between them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from reft._link import agent_protocol
from tests.support.launchers import free_port, kill_all, node_launchers

pytestmark = pytest.mark.exact
ROOT = Path(__file__).resolve().parents[2]


TRAIN = ROOT / "python" / "examples" / "gpt" / "train_ddp.py"
OWN_STATE = ROOT / "tests" / "fault" / "node_worker.py"
STEPS = 14
ENDLESS = 100_000
BEHIND = "snapshots do not reach another node"
AGAIN = "snapshots reach another node again"


class Job:
    script = TRAIN

    def __init__(
        self, tmp_path: Path, ranks: int = 1, nodes: int = 2, steps: int = STEPS, name: str = "",
        per_node: Sequence[Mapping[str, str]] = (), **env: str,
    ) -> None:  # fmt: skip
        self.folder = tmp_path
        self.id = name or f"several-nodes-{free_port()}"
        self.log = tmp_path / "loss.jsonl"
        self.outputs = [tmp_path / f"{name}node{n}.txt" for n in range(nodes)]
        environment = os.environ | {
            "REFT_RUN_DIR": str(tmp_path / "run"),
            "REFT_JOB_ID": self.id,
            "REFT_AGENT_LINGER_SEC": "30",
        }
        environment |= {"OMP_NUM_THREADS": "1"} | env
        self.nodes = node_launchers(
            self.script, *self.arguments(steps), ranks=ranks, job=self.id, env=environment,
            outputs=self.outputs, max_restarts=3, per_node=per_node,
        )  # fmt: skip

    def arguments(self, steps: int) -> list[str]:
        return ["--steps", str(steps), "--layers", "1", "--width", "32", "--dropout", "0", "--step-delay-ms", "50",
                "--loss-log", str(self.log)]  # fmt: skip

    def newest_step(self) -> int:
        """That rank 0 has logged."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [int(step) for line in lines for step in re.findall(r'"step": (\d+)', line)]
        return max(found, default=0)

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.newest_step() >= step, f"step {step}")

    def until(self, happened: Callable[[], Any], what: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.text}"
            time.sleep(0.02)

    def agent(self, node: int) -> int:
        """Its pid, once there is one."""
        found: list[int] = []
        self.until(lambda: found.extend(processes("reft-agent", self.id, f"--node {node}")) or found,
                   f"the agent of node {node}")  # fmt: skip
        return found[0]

    def committed(self, node: int) -> int:
        """The newest step that the agent of a node knows to be committed; -1: none."""
        newest = self.status(node)["newest_committed"]
        return int(newest["step"]) if newest else -1

    def mesh(self, node: int) -> dict[str, Any]:
        """How the agent of a node is connected to others."""
        return dict(self.status(node)["mesh"])

    def status(self, node: int) -> dict[str, Any]:
        socket = self.folder / "run" / self.id / f"node-{node}" / "agent.sock"
        with agent_protocol.AgentConnection(socket, timeout_sec=10) as connection:
            _, status, _ = connection.request(agent_protocol.STATUS_REQUEST)
        return dict(status)

    def lose_node(self, *ranks: str) -> None:
        """Kills the agent of node 1 and its ranks once step 5 is there."""
        self.wait_for_step(5)
        agents = processes("reft-agent", self.id, "--node 1")
        found = [pid for pid in self.processes() if rank_of(pid) in ranks]
        assert agents and len(found) == len(ranks), self.text
        for pid in agents + found:
            os.kill(pid, signal.SIGKILL)

    def finish(self) -> str:
        try:
            codes = [node.wait(180) for node in self.nodes]
        finally:
            for node in self.nodes:
                node.kill()
        assert not any(codes), self.text
        return self.text

    def processes(self) -> list[int]:
        """Those of the ranks, and their launchers."""
        return processes(str(self.script), str(self.folder))

    def end(self) -> None:
        """Whatever is left of it."""
        for node in self.nodes:
            node.kill()
        kill_all(self.processes() + processes("reft-agent", self.id))
        for node in self.nodes:
            node.wait()

    @property
    def text(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs)


class OwnStateJob(Job):
    """Each rank draws random numbers of its own, and has a layer with an optimizer of its own."""

    script = OWN_STATE

    def arguments(self, steps: int) -> list[str]:
        return ["--state", "own", "--steps", str(steps), "--delay", "0.05", "--out", str(self.folder)]

    def newest_step(self) -> int:
        logs = [path.read_text() for path in self.folder.glob("r0.s*.log")]
        return max((int(step) for log in logs for step in re.findall(r"^(\d+) ", log, re.M)), default=0)

    def finals(self) -> list[str]:
        return [(self.folder / f"r{rank}.final").read_text() for rank in range(2)]


def processes(*words: str) -> list[int]:
    """Processes whose command line has all the words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(int(entry.name))
    return found


def rank_of(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((v.partition(b"=")[2].decode() for v in variables if v.startswith(b"RANK=")), "")


@contextlib.contextmanager
def ended(job: Job) -> Iterator[Job]:
    """A job that does not end by itself."""
    try:
        yield job
    finally:
        job.end()


@contextlib.contextmanager
def stopped_thread(pid: int, name: str) -> Iterator[None]:
    """Stops one thread of a process, as a debugger does."""
    attach, detach, only_thread = 16, 17, 0x40000000
    tid = next(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()
               if (task / "comm").read_text().strip() == name)  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(attach, tid, None, None) != 0:
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    os.waitpid(tid, only_thread)
    try:
        yield
    finally:
        libc.ptrace(detach, tid, None, None)


def final(text: str) -> str:
    found = re.search(r"^final (\w+)$", text, re.M)
    assert found, text
    return found[1]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return final(Job(tmp_path_factory.mktemp("reference")).finish())


@pytest.mark.slow
def test_killed_rank_resumes_with_shards_from_the_other_node(tmp_path: Path, reference: str) -> None:
    text = Job(tmp_path, REFT_FAULT="1:6:before_seal:kill").finish()
    assert "resumed at step 5" in text, text
    assert final(text) == reference


@pytest.mark.slow
def test_lost_node_comes_back_from_its_replicas_with_arc(tmp_path: Path, reference: str) -> None:
    job = Job(tmp_path, REFT_SNAPSHOT_PROTECTION="arc")
    job.lose_node("1")
    text = job.finish()
    assert re.search(r"resumed at step \d+", text), text
    assert "without the vaults of rank 1, whose small state is that of replicas" in text, text
    assert final(text) == reference  # no dropout: nothing depends on the lost rank's random state


@pytest.mark.slow
def test_copies_lie_on_the_other_node_when_nodes_have_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    reference = final(Job(tmp_path / "reference", ranks=2).finish())
    job = Job(tmp_path, ranks=2, REFT_SNAPSHOT_PROTECTION="arc")
    job.lose_node("2", "3")
    text = job.finish()
    assert "each shard of rank 0's state survives the loss of any node" in text, text
    assert re.search(r"resumed at step \d+", text), text
    assert "without the vaults of ranks 2 3, whose" in text, text
    assert final(text) == reference


@pytest.mark.slow
@pytest.mark.parametrize("protection", ["aec", "auto"])
def test_lost_node_comes_back_from_parities(tmp_path: Path, protection: str) -> None:
    (tmp_path / "reference").mkdir()
    reference = final(Job(tmp_path / "reference", nodes=3).finish())
    job = Job(tmp_path, nodes=3, REFT_SNAPSHOT_PROTECTION=protection)
    job.lose_node("1")
    text = job.finish()
    assert ("REFT_SNAPSHOT_PROTECTION=auto: aec\n" in text) == (protection == "auto"), text
    assert "each shard of rank 0's state survives the loss of any node" in text, text
    assert re.search(r"resumed at step \d+", text), text
    assert "without the vaults of rank 1, whose small state is that of replicas" in text, text
    assert final(text) == reference


@pytest.mark.slow
def test_lost_node_without_protection_starts_over_and_says_so(tmp_path: Path, reference: str) -> None:
    job = Job(tmp_path)
    job.lose_node("1")
    text = job.finish()
    assert "training starts from its beginning" in text, text
    assert final(text) == reference


@pytest.mark.slow
@pytest.mark.parametrize(("protection", "tls"), [("peer", "off"), ("peer", "on"), ("auto", "off")])
def test_lost_node_comes_back_exactly_from_its_copy(tmp_path: Path, protection: str, tls: str) -> None:
    """State that only the lost rank had, and its random state."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "lost").mkdir()
    undisturbed = OwnStateJob(tmp_path / "reference")
    undisturbed.finish()
    job = OwnStateJob(tmp_path / "lost", REFT_SNAPSHOT_PROTECTION=protection, REFT_MESH_TLS=tls)
    job.wait_for_step(1)
    assert job.mesh(0)["tls"] == job.mesh(1)["tls"] == (tls == "on")
    job.lose_node("1")
    text = job.finish()
    chosen = "REFT_SNAPSHOT_PROTECTION=auto: peer; not aec, arc, aor: no other rank has"
    assert (chosen in text) == (protection == "auto"), text
    assert "each shard of rank 0's state survives the loss of any node" in text, text
    assert re.search(r"resumed at step \d+", text), text
    assert "NOT survived" not in text and "small state is that of replicas" not in text, text
    assert job.finals() == undisturbed.finals()


@pytest.mark.slow
def test_nodes_whose_settings_of_tls_differ_train_without_copies_and_say_why(tmp_path: Path, reference: str) -> None:
    settings = [{"REFT_MESH_TLS": "on"}, {}]
    text = Job(tmp_path, REFT_SNAPSHOT_PROTECTION="peer", per_node=settings).finish()
    differs = "NOT survived: copies of snapshots cannot go to another node: REFT_MESH_TLS differs between the nodes"
    assert f"node 0: a lost node is {differs} (node 0: on, node 1: off): set it to the same" in text, text
    assert f"node 1: a lost node is {differs} (node 1: off, node 0: on): set it to the same" in text, text
    assert final(text) == reference


@pytest.mark.slow
def test_a_copy_stays_in_use_after_its_rank_has_come_to_its_node_with_peer(tmp_path: Path) -> None:
    """All ends, node 1 is lost, and the launcher puts both ranks on node 0. There they die once more
    before anything is committed: what rank 1 has there by then is a vault without a step."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "lost").mkdir()
    undisturbed = OwnStateJob(tmp_path / "reference")
    undisturbed.finish()
    with ended(OwnStateJob(tmp_path / "lost", REFT_SNAPSHOT_PROTECTION="peer")) as before:
        before.wait_for_step(3)
        before.until(lambda: before.committed(0) >= 5, "a commit")
        for node in before.nodes:
            node.kill()
        kill_all(before.processes() + processes("reft-agent", before.id, "--node 1"))
        step = before.newest_step()  # the resumed one is this one or a neighbour
        faults = ";".join(f"1:{after}:capture:kill" for after in range(step - 1, step + 4))
        job = OwnStateJob(before.folder, ranks=2, nodes=1, name=before.id, NODE_FAULTS=json.dumps({"1": faults}),
                          REFT_SNAPSHOT_PROTECTION="peer", REFT_RESUME_VERIFY="off")  # fmt: skip
        text = job.finish()
    assert len(resumed := re.findall(r"resumed at step (\d+)", text)) == 2, text
    assert resumed[0] == resumed[1], text
    assert job.finals() == undisturbed.finals()


@pytest.mark.slow
def test_training_goes_on_while_the_keepers_agent_is_stopped_with_peer(tmp_path: Path) -> None:
    """Nothing is committed meanwhile, as that agent counts the votes of its own node, too. Whether a
    copy is missing then depends on the moment: the newest one may have arrived."""
    with ended(Job(tmp_path, steps=ENDLESS, REFT_SNAPSHOT_PROTECTION="peer")) as job:
        job.wait_for_step(5)
        agent = job.agent(1)
        os.kill(agent, signal.SIGSTOP)
        try:
            job.wait_for_step(job.newest_step() + 50)
        finally:
            os.kill(agent, signal.SIGCONT)
        if f"copies of node 0's {BEHIND}" in job.text:
            job.until(lambda: f"copies of node 0's {AGAIN}" in job.text, "the end of the warning", 60)
        step = job.newest_step()
        job.until(lambda: job.committed(0) > step and job.committed(1) > step, "a commit", 60)


@pytest.mark.slow
def test_steps_are_committed_while_copies_do_not_arrive_with_peer(tmp_path: Path) -> None:
    with ended(Job(tmp_path, steps=ENDLESS, REFT_SNAPSHOT_PROTECTION="peer")) as job:
        job.wait_for_step(5)
        with stopped_thread(job.agent(1), "reft-mesh"):
            job.until(lambda: f"copies of node 0's {BEHIND}" in job.text, "the warning", 60)
            step = job.newest_step()
            job.until(lambda: job.committed(0) > step, "a commit without a copy", 60)
        job.until(lambda: f"copies of node 0's {AGAIN}" in job.text, "the end of the warning", 60)
        step = job.newest_step()
        job.until(lambda: job.committed(0) > step and job.committed(1) > step, "a commit", 60)


@pytest.mark.slow
def test_peer_on_one_node_says_that_there_is_no_other(tmp_path: Path) -> None:
    text = Job(tmp_path, ranks=2, nodes=1, REFT_SNAPSHOT_PROTECTION="peer").finish()
    assert "a lost node is NOT survived (REFT_SNAPSHOT_PROTECTION=peer): all ranks are on one node" in text, text
    assert final(text)


@pytest.mark.slow
def test_vaults_of_a_host_whose_ranks_run_elsewhere_are_fetched(tmp_path: Path) -> None:
    """An accelerator fails: the ranks of its host go on on another one, and its agent lives. Without
    protection, each rank's own state and random numbers are nowhere else."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "moved").mkdir()
    undisturbed = OwnStateJob(tmp_path / "reference")
    undisturbed.finish()
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    env = {"REFT_JOB_SECRET_FILE": str(secret), "REFT_RESUME_VERIFY": "off"}
    with ended(OwnStateJob(tmp_path / "moved", **env)) as before:
        before.wait_for_step(3)
        before.until(lambda: before.committed(0) >= 5, "a commit")
        for node in before.nodes:
            node.kill()
        kill_all(before.processes())
        # The new ranks of node 1 are on a host that knows nothing of its agent.
        elsewhere = [{}, {"REFT_RUN_DIR": str(tmp_path / "elsewhere")}]
        job = OwnStateJob(before.folder, name=before.id, per_node=elsewhere, **env)
        text = job.finish()
    assert "vaults of rank 1 came from the agent of a node that has no rank any more" in text, text
    assert len(resumed := re.findall(r"resumed at step (\d+)", text)) == 1, text
    assert int(resumed[0]) >= 5
    assert job.finals() == undisturbed.finals()
