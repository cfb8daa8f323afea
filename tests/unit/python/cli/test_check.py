"""`reft check`: what a terminal shows, exit codes, commands for Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reft._check import node
from reft._check.evidence import (
    Fault,
    Part,
    Report,
    Verdict,
    link_unit,
    nic_unit,
    node_unit,
)
from reft._check.meeting import Gone
from reft._check.node import Options, Outcome
from reft._cli import check
from reft._cli.main import cli

OWN = Report(0, "gpu-a00", (Part("cpu matmul", "cpu matmul X", 90.0, "GFLOP/s"),), ())
CARD = Fault(nic_unit(1, 0), "lossy", "4.8 % of the segments lost, with all 3 nodes that it was measured with")
LINK = Fault(link_unit(0, 2, 0), "dead", "no connection")
NODE = Fault(node_unit(3), "slow", "gpu 3 matmul bf16: 301 TFLOP/s, others 688")


def options(nodes: int = 4, me: int = 0) -> Options:
    return Options(me, nodes, ("10.0.0.1",), Path("/tmp"), False, 1.0)


def outcome(verdict: Verdict, nodes: int = 4) -> Outcome:
    hosts = {number: f"gpu-a{number:02}" for number in range(nodes)}
    return Outcome(verdict, hosts, OWN, 5)


def shown(verdict: Verdict, nodes: int = 4, drain: dict[int, list[str]] | None = None) -> list[str]:
    lines = check.lines(options(nodes), outcome(verdict, nodes), 42.0, drain or {})
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines if "scontrol" not in line), lines
    return lines


def test_each_node_has_a_line_and_each_fault_what_to_do() -> None:
    lines = shown(Verdict((CARD, LINK, NODE), (), (1, 3)))
    assert lines[0] == "reft check: 4 nodes, 1 rail, 5 rounds of pairs, 42 s"
    assert lines[1].split() == ["node", "0", "gpu-a00", "ok"]
    assert any(line.startswith("node 1    gpu-a01          CARD LOSSY: 4.8 %") for line in lines)
    assert any("NODE" not in line and "SLOW: gpu 3 matmul bf16" in line for line in lines)
    assert "link 0-2: DEAD: no connection" in lines
    assert "-> start without node 1 (gpu-a01), 3 (gpu-a03)" in lines
    assert any("routes and switches" in line for line in lines)


def test_an_open_question_lists_its_alternatives() -> None:
    cards = tuple((Fault(nic_unit(number, 0), "dead", "no connection"),) for number in (0, 1))
    lines = shown(Verdict((), ((*cards, (Fault(link_unit(0, 1, 0), "dead", "no connection"),)),)), 2)
    assert "undecidable between: card of node 0, or card of node 1, or link 0-1" in lines
    assert any("no node is excluded" in line for line in lines)


@pytest.mark.parametrize("nodes", [1, 2, 16, 500])
def test_many_nodes_and_faults_fit_a_terminal(nodes: int) -> None:
    cards = tuple(Fault(nic_unit(number, 0), "slow", "x" * 190) for number in range(nodes))
    wires = tuple(Fault(link_unit(0, number, 0), "slow", "y " * 90) for number in range(1, nodes))
    drain = {number: ["scontrol", "update"] for number in range(nodes)}
    lines = shown(Verdict((*cards, *wires), (), tuple(range(nodes))), nodes, drain)
    if nodes > 2:
        assert any("more lines" in line for line in lines)
    assert any(line.startswith("-> start without node 0") for line in lines)


def played(monkeypatch: pytest.MonkeyPatch, verdict: Verdict | Exception, me: int = 0) -> list[str]:
    """Has `reft check` come to this verdict; returns its arguments."""

    def together(given: Options, store: Any, measure: Any = None) -> Outcome:
        if isinstance(verdict, Exception):
            raise verdict
        return outcome(verdict)

    monkeypatch.setattr(node, "together", together)
    monkeypatch.setattr(check, "_connect", lambda *a: None)
    return ["check", "--nodes", "4", "--node-rank", str(me), "--store", "localhost:29400", "--nic", "lo"]


@pytest.mark.parametrize(
    ("verdict", "me", "code"),
    [
        (Verdict(), 0, 0),
        (Verdict((CARD,), (), (1,)), 1, 3),
        (Verdict((CARD,), (), (1,)), 0, 1),
        (Verdict((LINK,)), 2, 1),
        (Verdict((), (((CARD,), (LINK,)),)), 1, 1),
        (Gone("the store does not answer"), 1, 4),
        (node.Unusable("eth9 is neither"), 1, 2),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, verdict: Any, me: int, code: int) -> None:
    result = CliRunner().invoke(cli, played(monkeypatch, verdict, me))
    assert result.exit_code == code, result.output


def test_json_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli, [*played(monkeypatch, Verdict((CARD,), (), (1,)), 1), "--json"])
    found = json.loads(result.stdout)
    assert (found["result"], found["excluded"], found["exclude"]) == ("fault", True, [1])
    assert found["faults"][0]["unit"] == {"kind": "nic", "node": 1, "rail": 0, "peer": -1}
    assert found["parts"][0]["name"] == "cpu matmul" and found["hosts"]["2"] == "gpu-a02"


@pytest.mark.parametrize(
    "words",
    [["--nodes", "2"], ["--nodes", "2", "--node-rank", "2", "--store", "h:1"],
     ["--nodes", "2", "--node-rank", "1", "--store", "h"], ["--nodes", "2", "--node-rank", "1", "--store", "h:0"]],
)  # fmt: skip
def test_wrong_usage(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["check", *words]).exit_code == 2


def test_torchruns_variables_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"GROUP_WORLD_SIZE": "3", "GROUP_RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h0", "MASTER_PORT": "77"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert check._place(None, None, None) == (2, 3, ("h0", 77), False)
    monkeypatch.setenv("GROUP_RANK", "0")
    assert check._place(None, None, None) == (0, 3, ("h0", 77), True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert check._place(None, None, None) == (0, 3, ("h0", 77), False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert check._place(None, None, None) is None


def test_slurm_drains_by_a_command_that_is_shown_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[list[str]] = []

    def run(command: list[str], **how: Any) -> Any:
        done.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(check.subprocess, "run", run)
    bad = Fault(node_unit(1), "wrong", "gpu 0: wrong; $(reboot) `x` 'y'")
    words = played(monkeypatch, Verdict((bad,), (), (1,)))
    assert "scontrol" not in CliRunner().invoke(cli, words).output
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    text = CliRunner().invoke(cli, words).output
    assert "scontrol update nodename=gpu-a01 state=drain 'reason=reft check: wrong: gpu 0:" in text
    assert "$(" not in text.split("scontrol")[1] and not done
    monkeypatch.setenv("REFT_CHECK_DRAIN", "run")
    assert CliRunner().invoke(cli, words).exit_code == 1
    assert not done, "node 0 drains no other node"
    result = CliRunner().invoke(cli, played(monkeypatch, Verdict((bad,), (), (1,)), 1))
    assert result.exit_code == 3
    assert [command[:4] for command in done] == [["scontrol", "update", "nodename=gpu-a01", "state=drain"]]
    monkeypatch.setenv("REFT_CHECK_DRAIN", "maybe")
    assert CliRunner().invoke(cli, words).exit_code == 2


def test_a_node_that_passes_its_check_starts_and_one_that_does_not_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "alone", lambda given: outcome(Verdict(), 1))
    check.preflight()
    assert "check passed: cpu matmul 90 GFLOP/s" in capsys.readouterr().err
    bad = Verdict((Fault(node_unit(0), "wrong", "memory: does not hold"),), (), (0,))
    monkeypatch.setattr(node, "alone", lambda given: outcome(bad, 1))
    with pytest.raises(SystemExit) as ended:
        check.preflight()
    assert ended.value.code == 3 and "memory: does not hold" in capsys.readouterr().err
