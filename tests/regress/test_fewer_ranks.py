"""An attempt with fewer ranks leaves the snapshots alone that its message asks to come back for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks


@pytest.mark.timeout(300)
@pytest.mark.parametrize("files", [False, True])
def test_all_ranks_together_continue_after_an_attempt_with_fewer(
    tmp_path: Path, files: bool
) -> None:
    settings = {"REFT_VAULT_DIR": str(tmp_path)} if files else {}
    with ranks.bench(REFT_JOB_ID="job", **settings) as bench:
        killed = bench.ranks("--kill", "1:5", world=3)
        assert len(ranks.losses(killed, 1)) == 6, killed
        (bench.folder / "killed").unlink()
        fewer = bench.ranks("--kill", "1:6", world=2)
        assert "start as many as before to resume from it" in fewer, fewer
        assert len(ranks.losses(fewer, 1)) == 7 and not ranks.resumed_at(fewer), fewer
        again = bench.ranks("--kill", "1:5", world=3)
        assert ranks.resumed_at(again) in ([5], [6]), again
        assert ranks.committed(again) == [8, 8, 8], again
        assert not files or not list((tmp_path / "job").glob("*-of-2.vault"))
