"""NumPy's generators spawn from a SeedSequence. A resume kept that of the generator that the restarted
script had in its place, and made two of one that a variable has, too."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import numpy as np
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
shared = np.random.SeedSequence(9)
both, drawn = np.random.default_rng(shared), []
parent = np.random.default_rng(3)
for epoch in range(4):
    rng = np.random.default_rng([7, epoch])
    for k in range(4):
        opt.zero_grad()
        noise = torch.from_numpy(rng.normal(size=(3, 4))).float()
        model(noise).square().mean().backward()
        opt.step()
    (validation,) = rng.spawn(1)
    (one,), (other,) = both.spawn(1), shared.spawn(1)
    (parent,) = parent.spawn(1)
    drawn += [validation.random(), one.random(), np.random.default_rng(other).random(), parent.random()]
final(*model.parameters(), drawn=drawn, spawned=shared.n_children_spawned)
"""


def test_what_they_spawn_is_what_it_would_have_been(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:11:before_seal", REFT_RESUME_VERIFY="always")
    assert "bit-identical" in said and "not exact" not in said, said[-3000:]
