"""A path between two nodes that carries nothing: the verdict names the pair, and no rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import free_port, job_environment
from tests.support.nodes import NodesJob, Server, network_of, why_no_namespaces

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

WORKER = Path(__file__).with_name("network_hang_worker.py")
WHY_NOT = why_no_namespaces()
NODES = 3
SUSPECT_SEC = 5
FAULT_STEP = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces"),
]


def verdicts(job: NodesJob) -> list[dict[str, Any]]:
    """Of all nodes. The text of each is written after its JSON."""
    texts = [path for node in range(NODES) for path in job.run_dir(node).glob("*/node-*/verdicts/*.txt")]
    return [json.loads(path.with_suffix(".json").read_bytes()) for path in sorted(texts)]


def until(happened: Any, what: str, job: NodesJob, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what}\n{job.said[-6000:]}"
        assert not job.poll(), job.said[-6000:]
        time.sleep(0.02)


@pytest.mark.timeout(300)
def test_the_pair_between_which_nothing_passes_is_named(folder: Path) -> None:
    """In a ring of three, any two are neighbours. Node 0, which has the store, hears both."""
    environment = job_environment(
        folder, REFT_JOB_ID=f"net-{free_port()}", REFT_HANG_SUSPECT_SEC=str(SUSPECT_SEC)
    )
    server = Server()
    with network_of(NODES, isolated=True) as network:
        script = [str(WORKER), str(folder)]
        job = NodesJob(server, network, folder, script, environment, NODES, 1, free_port(), 0)
        try:
            job.start()

            def trained() -> bool:
                steps = [folder / f"{rank}.step" for rank in range(NODES)]
                return all(path.exists() and int(path.read_text() or 0) >= FAULT_STEP for path in steps)

            until(trained, "no training", job)
            network.part(1, 2)
            until(lambda: verdicts(job), "no verdict", job)
            verdict = verdicts(job)[0]
        finally:
            job.end()
            server.close()
    assert (verdict["state"], verdict["class"]) == ("hang", "network"), verdict["screen"]
    assert verdict["culprits"] == [] and verdict["confidence"] == "likely"
    # Which rank runs on which node, torchrun decides.
    node_of = {rank["rank"]: int(rank["host"].removeprefix("node")) for rank in verdict["ranks"]}
    pairs = {tuple(sorted((node_of[path["from"]], node_of[path["to"]]))) for path in verdict["dead_paths"]}
    assert pairs == {(1, 2)}, verdict["screen"]
    assert "the network, and no rank" in verdict["screen"]
