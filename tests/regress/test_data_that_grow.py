"""Loaders over data that grow (active learning, replay): a new one each round, or the same one over
a list that is appended to. The place in the loop was refused at the restart, and had been claimed."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
from torch.utils.data import DataLoader, Subset, TensorDataset

model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
BEGIN
for _ in range(4):
    ROUND
    for x in loader:
        x = x[0] if type(x) is list else x
        opt.zero_grad()
        (model(x) - x).square().mean().backward()
        opt.step()
    END
final(*model.parameters())
"""

LISTS = (
    "data = [torch.randn(4) for _ in range(16)]",
    "loader = DataLoader(data, 4, shuffle=True)",
    "data.extend(torch.randn(4) for _ in range(4))",
)
SUBSETS = (
    "pool, chosen = TensorDataset(torch.randn(64, 4)), list(range(8))",
    "loader = DataLoader(Subset(pool, chosen), 4, shuffle=True)",
)
KINDS = {
    "a new loader over a list": LISTS,
    "the same loader over a list": (LISTS[0] + "\n" + LISTS[1], "pass", LISTS[2]),
    "the same loader with workers over a list": (
        LISTS[0] + "\n" + LISTS[1].replace("True", "True, num_workers=2"), "pass", LISTS[2]
    ),
    "a long list": (
        LISTS[0].replace("16", "5000") + "\nloader = DataLoader(data, 1000, shuffle=True)",
        "pass",
        LISTS[2],
    ),
    "a new subset": (*SUBSETS, "chosen = chosen + torch.randperm(64)[:4].tolist()"),
    "the same subset": (
        "\n".join(SUBSETS), "pass", "chosen += torch.randperm(64)[:4].tolist()"
    ),
}


@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("name", KINDS)
def test_the_place_in_the_data_comes_back(jobs: Runner, name: str, verify: str) -> None:
    script = SCRIPT
    for mark, text in zip(("BEGIN", "ROUND", "END"), KINDS[name], strict=True):
        script = script.replace(mark, text)
    said = jobs.same(script, REFT_RESUME_VERIFY=verify)
    assert "is not exact" not in said and "not restored" not in said, said


SAMPLER = """
from torch.utils.data import DataLoader, Sampler, TensorDataset

class Steps(Sampler):
    def __len__(self):
        return 40

    def __iter__(self):
        at = 0
        for _ in range(40):
            at = (at + int(torch.randint(40, (1,)))) % 40
            yield at

model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(40, 4)), 4, sampler=Steps())
for _ in range(2):
    for (x,) in loader:
        opt.zero_grad()
        (model(CHANGED) - x).square().mean().backward()
        opt.step()
final(*model.parameters())
"""


def test_a_sampler_that_alone_draws_from_a_global_generator_comes_back(jobs: Runner) -> None:
    said = jobs.same(SAMPLER.replace("CHANGED", "x"))
    assert "not restor" not in said, said


def test_a_loader_that_draws_once_an_epoch_is_not_named(jobs: Runner) -> None:
    """Whatever else draws from the global generator meanwhile."""
    once = SAMPLER.replace("CHANGED", "torch.nn.functional.dropout(x)").replace(
        "sampler=Steps()", "shuffle=True"
    )
    said = jobs.same(once, kill="0:9:before_seal", REFT_RESUME_VERIFY="always")
    assert "not restor" not in said and "but for" not in said, said


def test_another_generator_does_not_matter(jobs: Runner) -> None:
    own = SAMPLER.replace("int(torch.randint(40, (1,)))", "random.randrange(40)")
    said = jobs.same(
        "import random; random.seed(1)\n"
        + own.replace("CHANGED", "torch.nn.functional.dropout(x)")
    )
    assert "not restor" not in said, said


def test_a_sampler_that_shares_it_is_named_before_the_restart(jobs: Runner) -> None:
    said = jobs.run(SAMPLER.replace("CHANGED", "torch.nn.functional.dropout(x)"))
    assert "its sampler draws from a global generator at each batch" in said, said
