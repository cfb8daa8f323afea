"""The exchange of identities: any answers of ranks give one layout, and strange values give none."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reft._link import agreement, gather, launch, trusted_store
from reft._link.agreement import Agreement, layout_of, parse
from reft._link.job_identity import Layout, Origin
from reft._link.launch import Host, Launch
from reft._link.trusted_store import TrustedStore
from tests.support.jobs import trusted

Settings = Callable[..., dict[str, Any]]
HOST = Host("node 1-2", "pid:[1]", "mnt:[1]", 1000, "/run/reft", "64:1", "")


def on(*names: str, **more: str) -> list[Host]:
    """Ranks on hosts with these names, each with a run directory of its own."""
    made = {}
    for name in names:
        made[name] = replace(HOST, boot=name, run_dir_id=f"64:{name}", **more)
    return [made[name] for name in names]


# -- the layout


def test_ranks_of_one_host_are_one_node_whatever_launched_them() -> None:
    assert layout_of(on(*"aaaa")) == Layout(((0, 1, 2, 3),), (0,))


def test_nodes_may_differ_in_size() -> None:
    assert layout_of(on(*"aab")) == Layout(((0, 1), (2,)), (0, 1))


def test_ranks_may_be_dealt_round() -> None:
    assert layout_of(on(*"ababa")) == Layout(((0, 2, 4), (1, 3)), (0, 1))


def test_two_launchers_on_a_host_are_two_nodes_of_it() -> None:
    hosts = [replace(HOST, group=group) for group in "1010"]
    assert layout_of(hosts) == Layout(((0, 2), (1, 3)), (0, 0))


def test_containers_that_share_the_run_directory_are_one_node() -> None:
    hosts = [replace(HOST, mounts=f"mnt:[{n}]") for n in range(3)]
    assert layout_of(hosts) == Layout(((0, 1, 2),), (0,))
    apart = [replace(host, run_dir_id=str(n)) for n, host in enumerate(hosts)]
    assert layout_of(apart) == Layout(((0,), (1,), (2,)), (0, 1, 2))


def test_an_agent_serves_one_user_and_one_view_of_processes() -> None:
    others = [replace(HOST, user=0), replace(HOST, pids="pid:[2]"), replace(HOST, boot="x")]
    assert len(layout_of([HOST, *others]).nodes) == 4


def test_who_knows_nothing_of_its_host_is_a_node_of_its_own() -> None:
    unknown = replace(HOST, mounts="", run_dir_id="")
    assert len(layout_of([unknown, unknown]).nodes) == 2


def randomly_placed(random_source: random.Random) -> list[Host]:
    """Up to 40 ranks on up to 6 hosts, in blocks, dealt round or anyhow."""
    world, names = random_source.randint(1, 40), "abcdef"[: random_source.randint(1, 6)]
    size = random_source.randint(1, 8)
    where = random_source.choice(
        [
            lambda rank: names[rank // size % len(names)],
            lambda rank: names[rank % len(names)],
            lambda rank: random_source.choice(names),
        ]
    )
    return [replace(h, mounts=random_source.choice(["", "mnt:[1]", "mnt:[2]"]))
            for h in on(*(where(rank) for rank in range(world)))]  # fmt: skip


@pytest.mark.parametrize("seed", range(50))
def test_any_layout_covers_the_ranks_once_and_survives_the_store(seed: int) -> None:
    hosts = randomly_placed(random.Random(seed))
    layout = layout_of(hosts)
    assert sorted(rank for ranks in layout.nodes for rank in ranks) == list(range(len(hosts)))
    assert [ranks[0] for ranks in layout.nodes] == sorted(ranks[0] for ranks in layout.nodes)
    for node, ranks in enumerate(layout.nodes):
        assert {hosts[rank].boot for rank in ranks} == {hosts[ranks[0]].boot}
        assert list(ranks) == sorted(ranks)
        for rank in ranks:
            assert layout.node_of[rank] == node
    # Equal run directories join ranks, so each host is one node here.
    assert len(layout.nodes) == len({host.boot for host in hosts})
    agreed = Agreement("job", Origin.COMMAND, layout, (("/run", "1:2"),) * len(layout.nodes), 5, 0, "arc+peer")
    assert parse(agreement.dump(agreed), len(hosts)) == agreed


def test_blocks_and_dealt_ranks_take_three_numbers_a_node() -> None:
    nodes = tuple(tuple(range(node, 10_000, 1250)) for node in range(1250))
    agreed = Agreement(
        "job", Origin.GIVEN, Layout(nodes, tuple(range(1250))), (("", ""),) * 1250, 1, 0, "arc"
    )
    assert len(agreement.dump(agreed)) < 60_000


def slurm(rank: int, world: int, node: int, local: int) -> dict[str, str]:
    """Without SLURM_NTASKS_PER_NODE, as `srun` alone sets it."""
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world),
        "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local),
    }  # fmt: skip


def open_mpi(rank: int, world: int, node: int, local: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}


def lightning(rank: int, world: int, node: int, local: int) -> dict[str, str]:
    variables = {"NODE_RANK": str(node), "WORLD_SIZE": str(world)}
    return variables | ({} if rank == 0 else {"LOCAL_RANK": str(local)})


def torchrun(rank: int, world: int, node: int, local: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": str(node), "LOCAL_RANK": str(local)}


def slurm_shell(rank: int, world: int, node: int, local: int) -> dict[str, str]:
    """Of an outer step with one task."""
    return slurm(0, 1, 0, 0) | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "1"}


def nonsense(rank: int, world: int, node: int, local: int) -> dict[str, str]:
    return {"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "0", "GROUP_RANK": "x", "SLURM_NODEID": "²"}


@pytest.mark.parametrize(
    "variables", [slurm, open_mpi, lightning, torchrun, slurm_shell, nonsense, lambda *_: {}]
)
@pytest.mark.parametrize(
    "where", ["aaaa", "aabb", "aaab", "abab", "abcabca", "aabbb", "abbba", "abcd"]
)
def test_the_layout_is_that_of_the_hosts_under_any_launcher(
    variables: Callable[[int, int, int, int], dict[str, str]], where: str, tmp_path: Path
) -> None:
    names = sorted(set(where), key=where.index)
    hosts = []
    for rank, name in enumerate(where):
        env = variables(rank, len(where), names.index(name), where[:rank].count(name))
        found = launch.host(tmp_path, env)
        hosts.append(replace(found, boot=name, run_dir_id=name))
    wanted = tuple(tuple(r for r, name in enumerate(where) if name == node) for node in names)
    assert layout_of(hosts) == Layout(wanted, tuple(range(len(names))))


# -- what the store holds


GOOD = ["job", "given", [[[0, 2, 1]]], [0], [["/run", "1:2"]], 7, 0, "arc"]


def test_an_agreement_is_read() -> None:
    assert parse(json.dumps(GOOD), 2).layout == Layout(((0, 1),), (0,))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, "../../etc"),
        (0, 5),
        (1, "anything"),
        (2, [[[0, 1, 1]]]),  # rank 1 is missing
        (2, [[[0, 3, 1]]]),
        (2, [[[0, 10**9, 1]]]),
        (2, [[[0, 2, 0]]]),
        (2, [[[1, 1, 1], [0, 1, 1]]]),
        (2, [[[0, 1, 1]], [[0, 1, 1]]]),
        (2, [[[1, 1, 1]], [[0, 1, 1]]]),
        (2, [[]]),
        (2, [[[0, 2]]]),
        (2, [[[True, 2, 1]]]),
        (2, "nodes"),
        (3, [7]),
        (3, []),
        (4, []),
        (4, [["/run", 5]]),
        (5, 0),
        (5, 2**64),
        (5, 1.5),
        (6, 101),
        (7, 5),
        (7, "arc\n"),
    ],
)
def test_a_strange_agreement_is_refused(at: int, value: Any) -> None:
    values = [*GOOD]
    values[at] = value
    with pytest.raises(ValueError):
        parse(json.dumps(values), 2)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"0": []}', '{"1": 5}', '{"0": ["a","b","c",1,"d","e","f","g","",7]}']
)
def test_strange_identities_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        agreement.parse_members(text, 1)


# -- the exchange


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"run_dir": str(tmp_path), "job_id": "", "snapshot_overhead_percent": 3, "snapshot_protection": "arc"}


def agree_all(store: TrustedStore, world: int, settings: dict[str, Any]) -> list[agreement.Agreed]:
    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(agreement.agree, store, r, world, settings) for r in range(world)]
        found = [call.result(60) for call in calls]
    assert all(refusals == {} for _, refusals in found)
    return [agreed for agreed, _ in found if agreed is not None]


def test_all_ranks_agree(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under variables of a Slurm shell with one task, which say otherwise."""
    for name, value in {"JOB_ID": "4711", "LOCALID": "0", "NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    agreed = agree_all(trusted(), 20, settings)
    assert [one.job.rank for one in agreed] == list(range(20))
    assert [one.job.local_rank for one in agreed] == list(range(20))
    assert len({(one.job.id, one.job.layout, one.incarnation) for one in agreed}) == 1
    assert agreed[7].overhead_percent == 3 and agreed[7].protection == "arc" and agreed[7].job.run_dir == Path(settings["run_dir"])
    assert agreed[0].job.id.startswith("slurm-4711.0-")


def test_ranks_whose_protection_differs_have_that_of_rank_0(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    store, other = trusted(), settings | {"snapshot_protection": "none"}
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(agreement.agree, store, r, 3, other if r else settings) for r in range(3)]
        agreed = [call.result(60)[0] for call in calls]
    assert [one.protection for one in agreed if one is not None] == ["arc"] * 3
    said = capsys.readouterr().err
    assert said.count("REFT_SNAPSHOT_PROTECTION differs between ranks (arc on rank 0, none on rank 1)") == 1


def test_a_rank_that_refuses_is_known_to_all(settings: dict[str, Any]) -> None:
    store = trusted()
    agreement.refuse(store, 1, 2, "no such setting")
    assert agreement.agree(store, 0, 2, settings) == (None, {1: "no such setting"})
    store = trusted()
    agreement.refuse(store, 0, 2, "no such setting")
    assert agreement.agree(store, 1, 2, settings) == (None, {0: "no such setting"})


@pytest.mark.parametrize(
    "value", ["[" * 200_000, '["", {}', '["", []]', "[5, {}]", '["", {"x": ""}]']
)
def test_a_strange_value_of_another_rank_is_an_error(settings: dict[str, Any], value: str) -> None:
    store = trusted()
    store.put("round", "identity/1", 1, value)
    with pytest.raises(ValueError):
        agreement.agree(store, 0, 2, settings)


def test_a_value_that_is_too_long_is_not_parsed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = trusted()
    monkeypatch.setattr(trusted_store, "_PATIENCE_SEC", 0)
    store.put("round", "identity/1", 1, json.dumps(["x" * (1 << 20), {}]))
    with pytest.raises(ValueError, match="not that of rank 1"):
        agreement.agree(store, 0, 2, settings)
    assert gather.first_key(agreement.ROUND) == "identity/0"


# -- the name


def named(store: TrustedStore, settings: dict[str, Any]) -> tuple[str, Origin]:
    raw = dist.PrefixStore(os.urandom(4).hex(), store.raw)
    agreed, _ = agreement.agree(trusted(raw), 0, 1, settings)
    assert agreed is not None
    return agreed.job.id, agreed.job.origin


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_to(command: str | None, place: str = "shell", label: str = "train") -> None:
        monkeypatch.setattr(launch, "launch", lambda env: Launch(command, place, label))

    return set_to


def test_the_same_command_is_the_same_job(
    settings: dict[str, Any], run: Callable[..., None]
) -> None:
    run("a" * 32)
    first, origin = named(trusted(), settings)
    assert origin is Origin.COMMAND and first.startswith("train-")
    assert named(trusted(), settings)[0] == first
    run("b" * 32)
    assert named(trusted(), settings)[0] != first
    run("a" * 32, "another shell")
    assert named(trusted(), settings)[0] != first


def test_a_command_that_cannot_be_compared_continues_nothing(
    settings: dict[str, Any], run: Callable[..., None]
) -> None:
    run(None)
    first, origin = named(trusted(), settings)
    assert origin is Origin.ALONE and named(trusted(), settings)[0] != first


def test_a_launcher_that_keeps_its_store_keeps_the_name(
    settings: dict[str, Any], run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rank 0 is on another host now, and where the command cannot be compared."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = trusted()
    run(None)
    first, _ = named(store, settings)
    run(None, "another host")
    assert named(store, settings) == (first, Origin.LAUNCH)


def test_a_record_of_another_command_is_not_this_jobs(
    settings: dict[str, Any], run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of one launcher's name may have one secret, and an outsider can move what is sealed."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = trusted()
    run("a" * 32)
    first, _ = named(store, settings)
    run("a" * 32, "another host")
    assert named(store, settings) == (first, Origin.LAUNCH)
    run("b" * 32)
    assert named(store, settings)[0] != first


def test_a_file_that_an_earlier_run_left_is_not_a_launchers_store(
    settings: dict[str, Any], run: Callable[..., None]
) -> None:
    store = trusted()
    run("a" * 32)
    first, _ = named(store, settings)
    run("b" * 32)
    assert named(store, settings)[0] != first


def test_a_name_in_the_store_that_no_folder_can_have_is_ignored(
    settings: dict[str, Any], run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    run("a" * 32)
    store = trusted()
    first, _ = named(store, settings)
    (key,) = [key for key in store.raw.list_keys() if key.startswith("reft/launch")]
    for value in ("../../etc x", b"\xff", b""):
        store.raw.set(key, value)
        assert named(store, settings) == (first, Origin.COMMAND), "no rank of this job wrote it"
    assert store.lasting is not None
    store.raw.set(key, store.lasting.seal("name", key, 0, b"../../etc x"))
    assert named(store, settings) == (first, Origin.COMMAND)


def test_an_explicit_name_is_taken(settings: dict[str, Any]) -> None:
    settings["job_id"] = "my job"
    name, origin = named(trusted(), settings)
    assert name.startswith("my_job-") and origin is Origin.GIVEN
