"""A job that starts again with another number of ranks goes on from memory: the weights are those
of the step, and each item that is left of the epoch comes once."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.elastic_worker import BATCH, ITEMS
from tests.support import ranks
from tests.support.launchers import agent_pids, free_port
from tests.support.nodes import NodesJob, Server, network_of, wait_for

WORKER = Path(__file__).with_name("elastic_worker.py")
WIDTH = 16384
# What each of four ranks stores of such a model: parameters and two tensors of the optimizer.
SHARD_BYTES = 3 * 4 * 17 * WIDTH // 4


@dataclass
class Row:
    """What a rank has logged of one step."""

    rank: int
    epoch: int
    step: int
    loss: str
    items: list[int]


def logged(folder: Path) -> list[Row]:
    rows = []
    for path in folder.glob("log-[0-9]*"):
        for line in path.read_text().splitlines():
            rank, epoch, _, step, loss, _, _, *items = line.split()
            rows.append(Row(int(rank), int(epoch), int(step), loss, list(map(int, items))))
    return rows


class Attempts:
    """Starts of one job, one after the other."""

    def __init__(self, bench: ranks.Bench, *arguments: str) -> None:
        self.bench, self.arguments = bench, arguments
        self.rows: list[Row] = []
        self.said = ""
        self.states: dict[int, set[str]] = {}  # by step: hashes that ranks found at this start

    def start(self, world: int, steps: int, kill: str = "") -> int:
        """Returns the step at which it resumed, 0 for none. Keeps the rows that are not repeated."""
        folder = self.bench.folder / f"start-{len(list(self.bench.folder.glob('start-*')))}"
        folder.mkdir()
        environment = {"LOG": str(folder / "log"), "STEPS": str(steps), "KILL": kill}
        self.said = self.bench.ranks(*self.arguments, world=world, script=WORKER, **environment)
        resumed = (ranks.resumed_at(self.said) or [0])[0]
        self.rows = [row for row in self.rows if row.step <= resumed]
        self.rows += [row for row in logged(folder) if row.step > resumed]
        self.states = {}
        for path in folder.glob("log-state-*"):
            for line in path.read_text().splitlines():
                self.states.setdefault(int(line.split()[0]), set()).add(line.split()[1])
        return resumed

    def items_of(self, epoch: int) -> Counter[int]:
        return Counter(item for row in self.rows if row.epoch == epoch for item in row.items)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("workers", "killed_again"),
    [
        (0, False),
        (2, True),
        pytest.param(0, True, marks=pytest.mark.more),
        pytest.param(2, False, marks=pytest.mark.more),
    ],
)
def test_each_item_comes_once_when_ranks_leave_and_come_back(workers: int, killed_again: bool) -> None:
    with ranks.bench(forked=True, REFT_JOB_ID="job", REFT_RESUME_VERIFY="always") as bench:
        job = Attempts(bench, "--workers", str(workers))
        assert job.start(4, 60, kill="1:9") == 0, job.said
        first = job.start(3, 60, kill="2:13")
        assert first in (8, 9), job.said
        assert "; 4 ranks saved it, 3 go on: what ranks from 3 up kept for themselves" in job.said, job.said
        assert "not verified: 4 ranks computed it, and 3 would compute another" in job.said, job.said
        if killed_again:  # in an epoch that has been dealt twice
            assert job.start(3, 60, kill="0:16") in (12, 13), job.said
            assert "bit-identical" in job.said, job.said
        second = job.start(4, 50)
        assert second in ((15, 16) if killed_again else (12, 13)), job.said
        assert "3 ranks saved it, 4 go on: ranks from 3 up have copies of what those" in job.said, job.said

        # Of the first epoch: what three ranks, and then four, had to be given to have equally many.
        of_three = ITEMS - first * 4 * BATCH
        of_four = of_three + -of_three % 3 - (second - first) * 3 * BATCH - -of_three % 3
        counts = job.items_of(0)
        assert set(counts) == set(range(ITEMS)), set(range(ITEMS)) - set(counts)
        assert sum(counts.values()) == ITEMS + -of_four % 4, counts.most_common(5)
        assert job.items_of(1) == Counter(range(ITEMS))
        assert sorted({row.step for row in job.rows}) == list(range(1, 51))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("arguments", "worlds"),
    [
        (("--fsdp", "--width", "16"), (4, 3, 4)),
        (("--fsdp", "--width", "5"), (4, 2, 1, 3)),
        (("--parts", "2", "--width", "5"), (4, 2, 4)),
        (("--fsdp", "--average", "registered"), (3, 2)),
    ],
)
def test_parts_of_a_model_are_dealt_to_more_or_fewer_ranks(
    arguments: tuple[str, ...], worlds: tuple[int, ...]
) -> None:
    """FSDP2: each rank has some rows of each tensor, or every second one has the same (HSDP). With
    a width of 5, the last of four ranks has none of some. The state that goes on is that of the
    step."""
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, *arguments)
        resumed = 0
        last = 5 * len(worlds)
        for i, world in enumerate(worlds, 1):
            before = job.states
            is_last = i == len(worlds)
            step = job.start(world, last if is_last else 60, kill="" if is_last else f"0:{5 * i}")
            assert (step > resumed) == bool(before), job.said
            resumed = step
            if before:
                assert "state and place in the loop, " in job.said, job.said
                assert len(before[step]) == 1 and job.states[step] == before[step], (step, job.said)
        assert max(job.items_of(0).values()) == 1, "no item comes twice"
        assert sorted({row.step for row in job.rows}) == list(range(1, last + 1))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "order"), [(2, "10"), (4, "0213")])
def test_a_rank_that_has_another_part_of_the_model_now_takes_none(world: int, order: str) -> None:
    """Its parameters have the same names and shapes."""
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, "--parts", "2")
        assert job.start(4, 60, kill="1:9") == 0, job.said
        job.arguments += ("--order", order)
        assert job.start(world, 3) == 0, job.said
        assert "another part of the model" in job.said, job.said
        assert "is not resumed" in job.said, job.said


@pytest.mark.timeout(300)
def test_parts_of_tensors_in_variables_do_not_follow_the_ranks_and_are_named() -> None:
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, "--fsdp", "--average", "list")
        assert job.start(3, 60, kill="1:9") == 0, job.said
        assert job.start(2, 12) in (8, 9), job.said
        assert "except 4 values" in job.said, job.said
        assert re.search(r"not restored: main:average\[0\] .*other ranks had other parts", job.said), (
            job.said
        )


@pytest.mark.timeout(300)
def test_a_number_of_ranks_share_that_is_a_descriptors_number_too_follows_the_ranks() -> None:
    """Of 240 items, each of four ranks has 60, and each of three has to get 80."""
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, "--hold", "60")
        assert job.start(4, 60, kill="1:9") == 0, job.said
        assert job.start(3, 30) in (8, 9), job.said
        assert "does not match num_samples" not in job.said, job.said
        assert set(job.items_of(0)) == set(range(ITEMS))
        assert sorted({row.step for row in job.rows}) == list(range(1, 31))


@pytest.mark.timeout(300)
def test_items_that_no_sampler_deals_to_the_ranks_are_named() -> None:
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, "--sampler", "own")
        assert job.start(2, 60, kill="1:9") == 0, job.said
        assert job.start(3, 20) in (8, 9), job.said
        assert "no DistributedSampler deals its items to the ranks of now" in job.said, job.said


@pytest.mark.timeout(300)
def test_a_batch_that_all_ranks_share_is_shared_by_more_or_fewer() -> None:
    """Each rank has the part of it that follows from their number: 12 items of 48 in a step, then 16."""
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, "--share", "48")
        assert job.start(4, 60, kill="1:7") == 0, job.said
        first = job.start(3, 60, kill="2:9")  # in the second epoch
        assert first in (6, 7) and "state and place in the loop" in job.said, job.said
        assert job.start(4, 14) in (8, 9) and "state and place in the loop" in job.said, job.said
        assert {len(row.items) for row in job.rows if row.step <= first} == {12}
        assert {len(row.items) for row in job.rows if first < row.step <= 8} == {16}
        for epoch in (0, 1):
            assert job.items_of(epoch) == Counter(range(ITEMS)), f"epoch {epoch}"


@pytest.mark.timeout(300)
def test_one_rank_grows_to_two_and_shrinks_again() -> None:
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench)
        assert job.start(1, 90, kill="0:20") == 0, job.said
        assert job.start(2, 90, kill="0:30") in (19, 20), job.said
        assert job.start(1, 80) in (29, 30), job.said
        assert set(job.items_of(0)) == set(range(ITEMS)) and sum(job.items_of(0).values()) <= ITEMS + 1
        assert set(job.items_of(1).values()) == {1}


@pytest.mark.timeout(300)
def test_a_script_that_builds_another_model_keeps_both_lines() -> None:
    """What the ranks cannot take is seen at their first program point only."""
    with ranks.bench(forked=True, REFT_JOB_ID="job") as bench:
        job = Attempts(bench, "--wide")
        assert job.start(3, 60, kill="1:9") == 0, job.said
        assert job.start(2, 60, kill="1:12") == 0 and "is not resumed" in job.said, job.said
        assert job.start(2, 60, kill="0:15") in (10, 11, 12), job.said
        assert job.start(3, 12) in (8, 9), job.said


@contextlib.contextmanager
def under_torchrun(folder: Path, script: list[str], fewest: int, **settings: str) -> Iterator[NodesJob]:
    """A job on four nodes with a rank each, with `arc` by default, under torchrun's `--nnodes=<fewest>:4`."""
    env = os.environ | {"REFT_JOB_ID": f"elastic-{free_port()}", "REFT_SNAPSHOT_PROTECTION": "arc",
                        "LOG": str(folder / "log"), "STEPS": "400", "DELAY": "0.05",
                        "OMP_NUM_THREADS": "1", "REFT_AGENT_LINGER_SEC": "30",
                        # Without it, torch 2.11 tells a launcher that comes later no MASTER_ADDR.
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
    env |= settings
    env.pop("REFT_VAULT_DIR", None)
    server = Server()
    with network_of(4, isolated=False) as network:
        words = [str(WORKER), *script]
        job = NodesJob(server, network, folder, words, env, 4, 1, free_port(), 3, fewest=fewest)
        try:
            job.start()
            yield job
        finally:
            job.end()
            server.close()


@pytest.mark.timeout(300)
def test_parts_go_on_where_their_replicas_are_when_two_nodes_are_lost(tmp_path: Path) -> None:
    """HSDP: each second rank has the same part of the model, and all have the same counts."""
    settings = {"STEPS": "40", "REFT_SNAPSHOT_PROTECTION": "arc:2"}
    with under_torchrun(tmp_path, ["--parts", "2", "--width", "5"], 2, **settings) as job:
        assert wait_for(lambda: last_step(tmp_path) >= 15, 90, 0.05), job.said
        for node in (2, 3):
            job.kill_node(node, launcher=True)
        assert wait_for(job.poll, 120, 0.1), job.said
        assert job.codes[:2] == [0, 0], job.said
    assert "4 ranks saved it, 2 go on" in job.said, job.said
    resumed = max(ranks.resumed_at(job.said))
    for rank in (0, 1):  # which notes the state of the step from which it goes on once more
        lines = (tmp_path / f"log-state-{rank}").read_text().splitlines()
        states = [line.split()[1] for line in lines if int(line.split()[0]) == resumed]
        assert len(states) == 2 and states[0] == states[1], (resumed, lines, job.said)


@pytest.mark.timeout(300)
def test_torchrun_goes_on_without_a_lost_node_and_takes_a_new_one_in(tmp_path: Path) -> None:
    """`--nnodes=3:4`, one rank each; the lost node's shards are on the node before it. No resume
    reads what it restores from a disk: no file holds it, and what processes read is less."""
    script = ["--width", str(WIDTH)]
    with under_torchrun(tmp_path, script, 3, READS=str(tmp_path / "reads")) as job:
        assert wait_for(lambda: last_step(tmp_path) >= 20, 90, 0.05), job.said
        job.kill_node(3, launcher=True)
        assert wait_for(lambda: "4 ranks saved it, 3 go on" in job.said, 90, 0.05), job.said
        assert wait_for(lambda: last_step(tmp_path) >= 60, 90, 0.05), job.said
        for node in range(3):
            vaults, files = large_files(job, node)
            assert f"reft-vault-{node}" in vaults and not files, (vaults, files)
        job.start_node(3)
        assert wait_for(lambda: "3 ranks saved it, 4 go on" in job.said, 90, 0.05), job.said
        assert wait_for(job.poll, 120, 0.1) and not any(job.codes), job.said
    assert "starts from its beginning" not in job.said, job.said
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_size >= SHARD_BYTES]
    texts = [path.read_text() for path in tmp_path.glob("reads-*")]
    reads_of = [[list(map(int, line.split())) for line in text.splitlines()] for text in texts]
    whole = [reads for reads in reads_of if len(reads) > 1]  # of ranks that took a step
    assert len(whole) >= 4 + 3 + 4, reads_of
    resumes = 0
    for before, after, *_ in whole:
        assert after[0] - before[0] < SHARD_BYTES, reads_of
        _, from_memory, from_storage, from_others = after  # which have read it from their vaults
        assert from_storage == 0, reads_of
        resumes += from_memory + from_others > 0
    assert resumes >= 3 + 4, reads_of
    newest = {(row.rank, row.step): row for row in logged(tmp_path)}  # what is repeated, comes later
    counts: dict[int, Counter[int]] = {}
    for row in newest.values():
        counts.setdefault(row.epoch, Counter()).update(row.items)
    # A rank that ended between a step and its log line has trained on items that no line names.
    saved = re.findall(r"resumed at step (\d+): .*; (\d) ranks saved it", job.said)
    ended = {(rank, int(step)) for step, world in saved for rank in range(int(world))}
    unlogged = BATCH * len(ended - newest.keys())
    for epoch in sorted(counts)[:-1]:
        assert set(counts[epoch]) <= set(range(ITEMS)), f"epoch {epoch}"
        missing = set(range(ITEMS)) - set(counts[epoch])
        assert len(missing) <= unlogged, f"epoch {epoch}: {sorted(missing)}, {job.said}"


def large_files(job: NodesJob, node: int) -> tuple[set[str], list[str]]:
    """What the agents and ranks of a node have open that is as large as a shard: names of what is
    in memory, and paths of what is not."""
    memory, files = set(), []
    for pid in [*agent_pids(job.run_dir(node)), *job.rank_pids(node)]:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has been closed
                path, status = os.readlink(descriptor), descriptor.stat()
                if not stat.S_ISREG(status.st_mode) or status.st_size < SHARD_BYTES:
                    continue
                if path.startswith("/memfd:"):
                    memory.add(path.removeprefix("/memfd:").removesuffix(" (deleted)"))
                else:
                    files.append(path)
    return memory, files


def last_step(folder: Path) -> int:
    return max((row.step for row in logged(folder)), default=0)
