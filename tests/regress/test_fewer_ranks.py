"""An attempt with fewer ranks leaves the snapshots alone that its message asks to come back for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks

# Of `short_training.py`, and a part that each rank has for itself.
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import reft
import short_training as common


class Model(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.shared = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.own = torch.nn.Parameter(torch.full((4,), float(rank)))

    def forward(self, x):
        return self.shared(x) * self.own


def train(options):
    dist.init_process_group("reft", init_method=options.init)
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        x = torch.randn(4, 4)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        common.say(f"r{rank} {step} {loss.item().hex()}")
        if options.kill == f"{rank}:{step}":
            common.kill_once()
    common.say(f"r{rank} final {loss.item().hex()}, committed {reft.snapshot_now(10)}")
    dist.destroy_process_group()


train(common.arguments())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("files", [False, True])
def test_all_ranks_together_continue_after_an_attempt_with_fewer(
    tmp_path: Path, files: bool
) -> None:
    settings = {"REFT_VAULT_DIR": str(tmp_path)} if files else {}
    with ranks.bench(REFT_JOB_ID="job", **settings) as bench:
        script = bench.folder / "own_part.py"
        script.write_text(SCRIPT)
        killed = bench.ranks("--kill", "1:5", world=3, script=script)
        assert len(ranks.losses(killed, 1)) == 6, killed
        (bench.folder / "killed").unlink()
        fewer = bench.ranks("--kill", "1:6", world=2, script=script)
        assert "is a part that no other rank has: start 3 ranks to resume from it" in fewer, fewer
        assert len(ranks.losses(fewer, 1)) == 7 and not ranks.resumed_at(fewer), fewer
        again = bench.ranks("--kill", "1:5", world=3, script=script)
        assert ranks.resumed_at(again) in ([5], [6]), again
        assert ranks.committed(again) == [8, 8, 8], again
        assert not files or not list((tmp_path / "job").glob("*-of-2.vault"))
