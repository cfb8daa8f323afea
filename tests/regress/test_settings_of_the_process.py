"""A resume silently lost settings that change numbers: torch's faster kernel for attention,
denormals, how modules are converted, garbage collection, what is printed."""

from __future__ import annotations

import pytest
import torch

from tests.support.killed import Runner

SCRIPT = """
import gc, sys
import numpy as np
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
held = torch.tensor([1e-39])
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    if k == 2:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_flush_denormal(True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.sparse.check_sparse_tensor_invariants.enable()
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_warn_always(True)
        torch.set_printoptions(precision=2)
        torch.backends.opt_einsum.enabled = False
        np.set_printoptions(precision=3)
        gc.set_threshold(500, 7, 7)
        gc.disable()
        sys.set_int_max_str_digits(5000)
        sys.setswitchinterval(0.01)
final(
    *model.parameters(), fast=torch.backends.mha.get_fastpath_enabled(), tiny=(held * 1).item(),
    swap=torch.__future__.get_swap_module_params_on_conversion(),
    checks=torch.sparse.check_sparse_tensor_invariants.is_enabled(),
    fills=torch.utils.deterministic.fill_uninitialized_memory, warns=torch.is_warn_always_enabled(),
    said=str(torch.tensor([1 / 3])), einsum=torch.backends.opt_einsum.enabled,
    numpy=str(np.array([1 / 3])), gc=(gc.get_threshold(), gc.isenabled()),
    digits=sys.get_int_max_str_digits(), interval=sys.getswitchinterval(),
)
"""


def test_they_come_back(jobs: Runner) -> None:
    jobs.same(SCRIPT, 1, "0:8:before_seal")


def test_those_that_change_later_are_as_at_first(jobs: Runner) -> None:
    jobs.same(SCRIPT, 1, "0:2:before_seal")


UNTOUCHED = """
import gc
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
final(*model.parameters(), on=gc.isenabled(), threshold=gc.get_threshold())
"""


def test_the_collector_is_on_after_a_resume(jobs: Runner) -> None:
    """Captures have it off."""
    said = jobs.same(UNTOUCHED, 1, "0:8:before_seal")
    assert "'on': True" in said, said[-3000:]


NAMED = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
total = torch.zeros(2, 3, names=("n", "c"))
plain = torch.zeros(2, names=("n",))
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    total = total + k
    if k == 4:
        plain = plain.rename(None)
final(*model.parameters(), total=total.sum("c").rename(None).tolist(), names=plain.names)
"""


@pytest.mark.skipif(not hasattr(torch.Tensor, "has_names"), reason="torch has no named tensors")
def test_names_of_dimensions_come_back(jobs: Runner) -> None:
    """Each restarted attempt ended with an error, until the launcher gave up."""
    jobs.same(NAMED, 1, "0:8:before_seal")
