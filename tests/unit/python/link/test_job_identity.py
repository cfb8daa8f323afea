"""Names of jobs as folders can have them, and what a layout says about its ranks."""

from __future__ import annotations

import re
from pathlib import Path

from reft._link.job_identity import Layout, default_run_dir, digest, safe_id
from tests.support.jobs import job


def test_a_name_that_folders_can_have_stays() -> None:
    assert safe_id("my.job-7_b") == "my.job-7_b"
    assert re.fullmatch(r"_\.\._etc-[0-9a-f]{8}", safe_id("../../etc"))


def test_names_that_are_made_safe_stay_different() -> None:
    given = ["a_b", "a/b", "a b", "a\nb", ".a_b", "..a_b", "..", "...", "/", "é", "\udcff"]
    given += ["x" * 200 + end for end in "yz"]
    made = [safe_id(text) for text in given]
    assert len(set(made)) == len(given)
    assert all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", text) for text in made)


def test_a_digest_keeps_parts_apart() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")


def test_blocks_of_ranks() -> None:
    layout = Layout.in_blocks(7, 3)
    assert layout.nodes == ((0, 1, 2), (3, 4, 5), (6,))
    assert layout.node_of == (0, 0, 0, 1, 1, 1, 2) and layout.world == 7
    one = job(6, 7, 3)
    assert (one.node, one.nodes, one.local_rank, one.local_world, one.world) == (2, 3, 0, 1, 7)


def test_neighbours_share_a_host() -> None:
    layout = Layout(((0, 2), (1,), (3,)), (0, 1, 0))
    assert layout.neighbours(0) == layout.neighbours(2) == [0, 2]
    assert layout.neighbours(1) == [1]


def test_the_run_directory_is_the_users_own(tmp_path: Path) -> None:
    assert default_run_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "reft"
    assert default_run_dir({"XDG_RUNTIME_DIR": str(tmp_path / "none")}).name.startswith("reft-")
