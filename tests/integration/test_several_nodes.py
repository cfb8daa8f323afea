"""Several nodes on one machine: a launcher and an agent each, one job. Votes and shards cross
between them."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.launchers import free_port, node_launchers

pytestmark = pytest.mark.exact
ROOT = Path(__file__).resolve().parents[2]


TRAIN = ROOT / "python" / "examples" / "gpt" / "train_ddp.py"
STEPS = 14


class Job:
    def __init__(self, tmp_path: Path, ranks: int = 1, nodes: int = 2, **env: str) -> None:
        self.id = f"several-nodes-{free_port()}"
        self.log = tmp_path / "loss.jsonl"
        self.outputs = [tmp_path / f"node{n}.txt" for n in range(nodes)]
        environment = os.environ | {
            "REFT_RUN_DIR": str(tmp_path / "run"),
            "REFT_JOB_ID": self.id,
            "REFT_AGENT_LINGER_SEC": "30",
        }
        environment |= {"OMP_NUM_THREADS": "1"} | env
        arguments = ["--steps", str(STEPS), "--layers", "1", "--width", "32", "--dropout", "0", "--step-delay-ms", "50"]
        arguments += ["--loss-log", str(self.log)]
        self.nodes = node_launchers(
            TRAIN, *arguments, ranks=ranks, job=self.id, env=environment, outputs=self.outputs, max_restarts=3
        )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.log.exists() and f'"step": {step}' in self.log.read_text():
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} did not come:\n{self.text}")

    def lose_node(self, *ranks: str) -> None:
        """Kills the agent of node 1 and its ranks once step 5 is there."""
        self.wait_for_step(5)
        agents = processes("reft-agent", self.id, "--node 1")
        found = [pid for pid in processes(str(TRAIN), str(self.log)) if rank_of(pid) in ranks]
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

    @property
    def text(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs)


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
def test_lost_node_comes_back_from_parities_with_aec(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    reference = final(Job(tmp_path / "reference", nodes=3).finish())
    job = Job(tmp_path, nodes=3, REFT_SNAPSHOT_PROTECTION="aec")
    job.lose_node("1")
    text = job.finish()
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
