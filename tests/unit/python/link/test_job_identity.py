"""Which job a rank belongs to: equal over restarts, different for two jobs."""

from __future__ import annotations

import re

from reft._link import job_identity

TORCHRUN = {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "2",
    "TORCHELASTIC_RUN_ID": "a_b.c",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_torchrun_names_job_node_and_attempt() -> None:
    job = job_identity.identify(9, 12, "", TORCHRUN)
    assert (job.id, job.node, job.local_rank, job.local_world, job.attempt, job.nodes) == (
        "run-a_b.c",
        2,
        1,
        4,
        3,
        3,
    )


def test_explicit_id_wins_and_is_made_safe_for_paths() -> None:
    assert job_identity.identify(0, 1, "my.job-7_b", TORCHRUN).id == "my.job-7_b"
    assert re.fullmatch(
        r"_\.\._etc-[0-9a-f]{8}", job_identity.identify(0, 1, "../../etc", TORCHRUN).id
    )


def test_ids_that_are_made_safe_stay_different() -> None:
    given = [
        "a_b",
        "a/b",
        "a b",
        "a\nb",
        ".a_b",
        "..a_b",
        "..",
        "...",
        "/",
        "é",
        "\udcff",
        *("x" * 200 + end for end in "yz"),
    ]
    made = [job_identity.identify(0, 1, text, {}).id for text in given]
    assert len(set(made)) == len(given)
    assert made == [job_identity.identify(1, 2, text, {}).id for text in given]
    assert all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", text) for text in made)


def test_without_a_launcher_the_parent_process_names_the_job() -> None:
    assert job_identity.identify(0, 1, "", {}).id == job_identity.identify(1, 2, "", {}).id


def test_two_ports_are_two_jobs() -> None:
    one = job_identity.identify(0, 1, "", {"MASTER_ADDR": "h", "MASTER_PORT": "1"})
    two = job_identity.identify(0, 1, "", {"MASTER_ADDR": "h", "MASTER_PORT": "2"})
    assert one.id != two.id


def test_slurm() -> None:
    env = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "3",
    }
    job = job_identity.identify(7, 8, "", env)
    assert (job.id, job.node, job.local_rank, job.nodes) == ("slurm-77.0", 3, 1, 4)


def test_restarts_left() -> None:
    assert job_identity.identify(0, 1, "", TORCHRUN).restarts_left == 0
    assert (
        job_identity.identify(0, 1, "", TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "5"}).restarts_left
        == 2
    )
