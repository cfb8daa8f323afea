"""`reft check` of nodes in network namespaces, whose cards and links are slow, lossy or dead; and
whole commands on one host."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from reft._check import plan
from tests.support.nodes import Network, network_of
from tests.support.shaping import Card, cards, why_no_shaping

NODES = Path(__file__).resolve().parents[1] / "support" / "checknodes.py"
WHY_NOT = why_no_shaping()
in_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
slow, more = pytest.mark.slow, pytest.mark.more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_nodes(out: Path, network: Network, nodes: int, **more: Any) -> dict[int, dict[str, Any]]:
    """What each node says in the end."""
    asked = {
        "addresses": [network.address(node) for node in range(nodes)],
        "namespaces": [network.namespace(node) for node in range(nodes)],
        "port": free_port(), "out": str(out), "quick": False, **more,
    }  # fmt: skip
    done = subprocess.run([sys.executable, str(NODES), json.dumps(asked)], capture_output=True, text=True, timeout=240)
    found = {int(path.stem): json.loads(path.read_text()) for path in out.glob("*.json")}
    assert found, done.stdout + done.stderr
    for node, result in found.items():
        assert "error" not in result, f"node {node}: {result}\n{done.stderr}"
    return found


Break = Callable[[list[Card], Network], None]


def check(tmp_path: Path, nodes: int, damage: Break, **more: Any) -> tuple[dict[str, Any], int]:
    """The verdict, which all nodes have, and the number of rounds."""
    with network_of(nodes, True) as network:
        damage(cards(network, nodes), network)
        found = run_nodes(tmp_path, network, nodes, **more)
    verdicts = {json.dumps(result["verdict"], sort_keys=True) for result in found.values()}
    assert len(verdicts) == 1
    return found[0]["verdict"], found[0]["rounds"]


def named(faults: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(f["unit"]["kind"], f["unit"]["node"], f["unit"]["peer"], f["how"]) for f in faults]


@in_namespaces
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_healthy_nodes_are_good_in_as_many_rounds_as_planned(tmp_path: Path, nodes: int) -> None:
    verdict, rounds = check(tmp_path, nodes, lambda cards, network: None)
    assert not verdict["faults"] and not verdict["between"] and not verdict["exclude"], verdict
    first, more = plan.most_rounds(nodes)
    assert first <= rounds <= first + more


@slow
@more
@in_namespaces
def test_a_slow_card_of_four_nodes(tmp_path: Path) -> None:
    verdict, _ = check(tmp_path, 4, lambda cards, network: cards[2].slow(40))
    assert named(verdict["faults"]) == [("nic", 2, -1, "slow")], verdict
    assert verdict["exclude"] == [2] and not verdict["between"]


@in_namespaces
def test_a_slow_card_of_three_nodes_is_told_from_two_slow_links(tmp_path: Path) -> None:
    """On a busy machine, the two may never be measured in the same time; then it says so."""
    verdict, _ = check(tmp_path, 3, lambda cards, network: cards[1].slow(40))
    likely = verdict["between"][0][0] if verdict["between"] else verdict["faults"]
    assert named(likely) == [("nic", 1, -1, "slow")], verdict
    assert verdict["exclude"] == [1]


@slow
@more
@in_namespaces
def test_two_slow_links_of_three_nodes_are_told_from_a_slow_card(tmp_path: Path) -> None:
    def damage(cards: list[Card], network: Network) -> None:
        cards[1].slow(40, network.address(0))
        cards[1].slow(40, network.address(2))

    verdict, _ = check(tmp_path, 3, damage)
    likely = verdict["between"][0][1] if verdict["between"] else verdict["faults"]
    assert named(likely) == [("link", 0, 1, "slow"), ("link", 1, 2, "slow")], verdict


@slow
@more
@in_namespaces
def test_a_lossy_card_of_four_nodes(tmp_path: Path) -> None:
    verdict, _ = check(tmp_path, 4, lambda cards, network: cards[3].lose(0.05))
    assert named(verdict["faults"]) == [("nic", 3, -1, "lossy")], verdict
    assert verdict["exclude"] == [3]


@slow
@in_namespaces
def test_a_lossy_card_of_three_nodes_excludes_its_node(tmp_path: Path) -> None:
    verdict, _ = check(tmp_path, 3, lambda cards, network: cards[2].lose(0.05))
    assert verdict["exclude"] == [2] and not verdict["faults"], verdict
    (question,) = verdict["between"]
    assert [named(one) for one in question][0] == [("nic", 2, -1, "lossy")]


@slow
@in_namespaces
def test_a_dead_link_between_two_nodes_of_three(tmp_path: Path) -> None:
    def damage(cards: list[Card], network: Network) -> None:
        cards[1].cut(network.address(2))
        cards[2].cut(network.address(1))

    verdict, _ = check(tmp_path, 3, damage)
    assert named(verdict["faults"]) == [("link", 1, 2, "dead")], verdict
    assert verdict["exclude"] == [] and not verdict["between"]


@slow
@in_namespaces
def test_a_slow_link_of_two_nodes_is_undecidable(tmp_path: Path) -> None:
    verdict, _ = check(tmp_path, 2, lambda cards, network: cards[0].slow(20))
    assert verdict["exclude"] == [] and not verdict["faults"], verdict
    (question,) = verdict["between"]
    assert [named(one)[0][:3] for one in question] == [("link", 0, 1), ("nic", 0, -1), ("nic", 1, -1)]


@slow
@in_namespaces
def test_a_dead_link_and_a_slow_card_of_four_nodes(tmp_path: Path) -> None:
    def damage(cards: list[Card], network: Network) -> None:
        cards[3].slow(40)
        cards[1].cut(network.address(2))

    verdict, _ = check(tmp_path, 4, damage)
    assert named(verdict["faults"]) == [("link", 1, 2, "dead"), ("nic", 3, -1, "slow")], verdict
    assert verdict["exclude"] == [3]


@slow
@in_namespaces
def test_a_node_that_dies_in_a_round_and_one_that_never_comes(tmp_path: Path) -> None:
    verdict, _ = check(tmp_path, 4, lambda cards, network: None, silent=[3], absent=[1], wait=5.0)
    assert named(verdict["faults"]) == [("node", 1, -1, "dead"), ("node", 3, -1, "dead")], verdict
    assert verdict["exclude"] == [1, 3]


@slow
@more
@in_namespaces
def test_dead_rails_do_not_spoil_the_next_one(tmp_path: Path) -> None:
    with network_of(2, True) as network:
        shaped = cards(network, 2)
        for node in (0, 1):
            inside = ["ip", "-n", network.namespace(node).rpartition("/")[2], "addr", "add"]
            for rail in (0, 1):
                subprocess.run([*inside, f"10.231.9{rail}.{node + 1}/24", "dev", "eth0"], check=True)
        for rail in (0, 1):
            shaped[0].cut(f"10.231.9{rail}.2")
        rails = [[f"10.231.90.{n}", f"10.231.91.{n}", network.address(n - 1)] for n in (1, 2)]
        verdict = run_nodes(tmp_path, network, 2, cards=rails)[0]["verdict"]
    bad = {fault["unit"]["rail"] for question in verdict["between"] for one in question for fault in one}
    assert bad == {0, 1}, verdict
    assert not verdict["faults"]


@in_namespaces
def test_a_card_without_a_cable_is_named_with_two_nodes(tmp_path: Path) -> None:
    """The other card of the node reaches the store, as a network for management does."""
    with network_of(2, True) as network:
        inside = ["ip", "-n", network.namespace(1).rpartition("/")[2]]
        for words in (["link", "add", "name", "rail0", "type", "veth", "peer", "name", "far0"],
                      ["addr", "add", "10.231.8.2/24", "dev", "rail0"], ["link", "set", "dev", "rail0", "up"]):  # fmt: skip
            subprocess.run([*inside, *words], check=True)  # the far end stays down: no carrier
        verdict = run_nodes(tmp_path, network, 2, cards=[[network.address(0)], ["rail0"]])[0]["verdict"]
    assert named(verdict["faults"]) == [("nic", 1, -1, "dead")], verdict
    assert verdict["exclude"] == [1] and not verdict["between"]


# -- whole commands


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REFT_", "SLURM"))}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def reft(*words: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reft", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more)
    )


@pytest.mark.timeout(300)
def test_two_nodes_on_one_host(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    nodes = [
        reft("check", "--quick", "--json", "--nodes", "2", "--node-rank", str(node), "--store", at, "--nic", "127.0.0.1",
             REFT_JOB_SECRET_FILE=str(secret))
        for node in (0, 1)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240) for node in nodes]
    for node, (out, err) in enumerate(outputs):
        found = json.loads(out)
        assert found["node"] == node and found["nodes"] == 2 and found["rounds"] >= 1, err
        assert found["result"] in ("ok", "fault"), "the two share cores; one may be slower"
        assert {part["name"] for part in found["parts"]} >= {"cpu matmul", "memory", "disk", "loopback"}
        code = 0 if found["result"] == "ok" else 3 if found["excluded"] else 1
        assert nodes[node].returncode == code


@pytest.mark.timeout(300)
def test_one_node_fits_a_terminal() -> None:
    process = reft("check", "--quick")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    lines = out.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert re.search(r"cpu matmul +\d", out) and "-> nothing is at fault" in out


@pytest.mark.timeout(300)
def test_torchrun_starts_a_check(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "reft", "check", "--quick"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reft check: 1 node") == 1


@pytest.mark.timeout(300)
def test_the_launchers_of_two_nodes_start_a_check_of_both() -> None:
    at = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
               "--rdzv-backend=c10d", f"--rdzv-endpoint={at}", "--rdzv-id=check", "--local-addr=127.0.0.1",
               "--max-restarts=0", "-m", "reft", "check", "--quick", "--json"]  # fmt: skip
    nodes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=240) for node in nodes]
    found = [json.loads(out[out.index("{") : out.rindex("}") + 1]) for out, _ in outputs]
    assert sorted(one["node"] for one in found) == [0, 1], outputs
    assert all(one["nodes"] == 2 and one["rounds"] >= 1 and len(one["hosts"]) == 2 for one in found)
    assert found[0]["faults"] == found[1]["faults"], "one verdict"


@pytest.mark.timeout(300)
def test_a_node_at_fault_does_not_start_a_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("# reft\nprint('started')\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'reft._check.local' in ' '.join(sys.orig_argv):\n"
        "    import torch\n"
        "    whole = torch.Tensor.sum\n"
        "    torch.Tensor.sum = lambda self, *a: whole(self, *a) + 1\n"
    )
    bad = reft("run", "--check", "--", "torchrun", "--standalone", str(script), PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    out, err = bad.communicate(timeout=240)
    assert bad.returncode == 3 and "started" not in out, err
    assert "cpu matmul: wrong result" in err and "does not start" in err
    good = reft("run", "--check", "--", "torchrun", "--standalone", str(script))
    out, err = good.communicate(timeout=240)
    assert good.returncode == 0 and "started" in out and "check passed" in err, err


def test_without_a_store_it_ends_with_its_own_code() -> None:
    process = reft("check", "--nodes", "2", "--node-rank", "1", "--store", f"127.0.0.1:{free_port()}", "--wait", "2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 4 and "store" in err, out + err
