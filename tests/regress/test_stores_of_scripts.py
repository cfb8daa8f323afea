"""Numbers that a script kept in a store of torch.distributed silently started again at a resume."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
import tempfile
store = STORE
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    store.add("seen", 1)
final(*model.parameters())
"""
NAMED = "what the script keeps in a store is not restored"


@pytest.mark.parametrize("store", ["dist.HashStore()", "dist.PrefixStore('a', dist.FileStore(tempfile.mktemp(), 1))"])
def test_a_store_of_the_script_is_named(jobs: Runner, store: str) -> None:
    said = jobs.run(SCRIPT.replace("STORE", store), 1, "0:8:before_seal")
    assert NAMED in said[: said.index("resuming at")], said[-3000:]
    assert "place in the loop except 1 value" in said, said[-3000:]


def test_that_of_a_process_group_is_not(jobs: Runner) -> None:
    store = "dist.PrefixStore('a', dist.distributed_c10d._get_default_store())"
    said = jobs.run(SCRIPT.replace("STORE", store), 1, "0:8:before_seal")
    assert NAMED not in said, said[-3000:]
