"""State that is advanced without the parameters: the bits of torch.optim, proven before it is relied on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from reft import _C
from reft._state import moments, second_state
from reft._state.second_state import SecondState

pytestmark = pytest.mark.exact
# Elsewhere torch rounds in other places, which the first steps show, and goes on alone: what is
# computed still has its bits, but no rule works.
_FUSED = platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "DEFAULT"
needs_rules = pytest.mark.skipif(not _FUSED, reason="torch has no fused operations on this host")
STEPS = 1000

VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1}),
    "sgd foreach": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "maximize": True, "foreach": True}),
    "adam": (torch.optim.Adam, {}),
    "l2": (torch.optim.Adam, {"weight_decay": 0.02}),
    "l2 maximize": (torch.optim.Adam, {"weight_decay": 0.02, "maximize": True}),
    "low betas": (torch.optim.Adam, {"betas": (0.3, 0.5)}),
    "no betas": (torch.optim.Adam, {"betas": (0.0, 0.0), "amsgrad": True}),
    "decoupled": (torch.optim.Adam, {"weight_decay": 0.02, "decoupled_weight_decay": True}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "amsgrad foreach": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    "foreach": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    "maximize foreach": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (7,), (8, 5), (3, 4, 5, 6), (33, 31), (2, 0)]


class Pair:
    """An optimizer of the script, and what another rank computes of it, step by step."""

    def __init__(self, kind: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self.random = torch.Generator().manual_seed(5)
        self.parameters = [nn.Parameter(self.draw(shape, dtype)) for shape in SHAPES]
        image = self.draw((2, 3, 4, 4), dtype).contiguous(memory_format=torch.channels_last)
        self.parameters.append(nn.Parameter(image))
        groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": 1e-2}]
        self.optimizer = kind(groups, lr=1e-3, **settings)
        self.second = SecondState(kind, lambda groups: kind(groups, lr=1e-3, **settings), self.optimizer.param_groups)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = 10.0 ** float(torch.randint(-12, 3, (1,), generator=self.random))
        return torch.randn(shape, generator=self.random, dtype=dtype) * size

    def give_gradients(self, step: int) -> None:
        for i, parameter in enumerate(self.parameters):
            gradient = self.draw(tuple(parameter.shape), parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
            if i == step % 11:
                parameter.grad = None
        nn.utils.clip_grad_norm_(self.parameters, 0.5)

    def step(self, has_denormals: bool = True) -> None:
        self.second.prepare(self.optimizer.param_groups, has_denormals)
        reads = self.second.reads_parameters
        if reads:
            self.second.step()
        self.optimizer.step()
        if not reads:
            self.second.step()  # by now, the parameters are others

    def compare(self) -> None:
        held = {parameter: holder[key] for parameter, holder, key in self.second.held()}
        kept = self.optimizer.state
        assert held.keys() == {p for p in kept if kept[p]}
        for parameter, state in held.items():
            assert moments.is_equal(state, kept[parameter]), (tuple(parameter.shape), state, kept[parameter])


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        (torch.float32, STEPS // 5),
        (torch.float64, STEPS // 5),
        pytest.param(torch.float32, STEPS, marks=pytest.mark.more),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_has_the_bits_of_torch_at_each_of_many_steps(name: str, dtype: torch.dtype, steps: int) -> None:
    pair = Pair(*VARIANTS[name], dtype)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(pair.optimizer, STEPS)
    for step in range(steps):
        pair.give_gradients(step)
        if step % 97 != 41:  # as after a loss scale that was too high
            pair.step()
        schedule.step()
        if step < 10 or step % 25 == 0 or step == steps - 1:
            pair.compare()
    if _FUSED:
        assert pair.second.advanced > (steps - 40) * (len(SHAPES) - 1), "else torch has done it"


@needs_rules
def test_settings_may_change_within_a_run() -> None:
    """Betas by a schedule are other numbers; another path is proven again."""
    pair = Pair(torch.optim.Adam, {"betas": (0.9, 0.99)})
    schedule = torch.optim.lr_scheduler.OneCycleLR(pair.optimizer, max_lr=0.1, total_steps=60, base_momentum=0.45)
    for step in range(40):
        pair.give_gradients(step)
        pair.step()
        schedule.step()
        if step == 20:
            pair.optimizer.param_groups[0]["weight_decay"] = 0.1
        if step == 25:
            pair.optimizer.param_groups[1]["betas"] = (0.2, 0.9)
        pair.compare()
    assert len(pair.second._proven) >= 3


@needs_rules
def test_it_needs_no_copies_of_the_parameters() -> None:
    pair = Pair(torch.optim.AdamW, {})
    for step in range(5):
        pair.give_gradients(step)
        pair.step()
    assert pair.second._copies is None and not pair.second.reads_parameters
    assert not pair.second._single.state and not pair.second._single.param_groups[0]["params"]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("kind", "settings"), [
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}), (torch.optim.Adam, {"maximize": True, "weight_decay": 1}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}), (torch.optim.AdamW, {"amsgrad": True, "betas": (0.4, 0.9)}),
])  # fmt: skip
@needs_rules
def test_odd_numbers_come_out_as_those_of_torch(kind: Any, settings: dict[str, Any], foreach: bool) -> None:
    """Tiny, infinite and undefined ones; of the last, also which of two it is."""
    pair = Pair(kind, settings | {"foreach": foreach})
    odd = [1e-41, -1e-44, float("inf"), -float("inf"), 3e38, -0.0, 1e-20]
    undefined = torch.tensor([0x7FC00001, -0x3FFFFE], dtype=torch.int32).view(torch.float32)
    for step in range(30):
        pair.give_gradients(step)
        if step > 4:
            for parameter in pair.parameters:
                if parameter.grad is not None and parameter.numel():
                    places = torch.rand(parameter.shape, generator=pair.random)
                    parameter.grad[places < 0.1] = odd[step % len(odd)]
                    if step > 14:
                        parameter.grad[places > 0.95] = undefined[step % 2]
                    if step == 20:
                        parameter.data[places > 0.8] = undefined[0]
        pair.step()
        pair.compare()
    assert pair.second.advanced > 100 and not pair.second._differs


def wrong(original: Callable[..., Any]) -> Callable[..., Any]:
    def advance(gradients: Any, parameters: Any, means: Any, *more: Any) -> Any:
        found = original(gradients, parameters, means, *more)
        for mean in means:
            if mean.numel() > 100:
                mean.view(-1)[77] = torch.nextafter(mean.view(-1)[77], torch.tensor(1e9))
        return found

    return advance


@pytest.mark.parametrize(("name", "function"), [("adamw", "advance_adam"), ("momentum", "advance_momentum")])
def test_a_rule_with_one_wrong_bit_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> None:
    monkeypatch.setattr(moments._C, function, wrong(getattr(_C, function)))
    pair = Pair(*VARIANTS[name])
    for step in range(20):
        pair.give_gradients(step)
        pair.step()
        pair.compare()
    assert pair.second.advanced == 0 and pair.second._copies is not None


@pytest.mark.parametrize(("kind", "settings", "dtype"), [
    (torch.optim.AdamW, {"fused": True}, torch.float32), (torch.optim.SGD, {"fused": True}, torch.float32),
    (torch.optim.Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}, torch.float32),
    (torch.optim.AdamW, {}, torch.bfloat16),
    (torch.optim.RMSprop, {}, torch.float32), (torch.optim.Adagrad, {}, torch.float32),
])  # fmt: skip
def test_what_has_no_rule_is_stepped_by_torch(kind: Any, settings: dict[str, Any], dtype: torch.dtype) -> None:
    pair = Pair(kind, settings, dtype)
    for step in range(20):
        pair.give_gradients(step)
        pair.step()
        pair.compare()
    assert pair.second.advanced == 0 and pair.second._copies is not None


@needs_rules
def test_gradients_that_lie_otherwise_are_for_torch() -> None:
    pair = Pair(torch.optim.AdamW, {})
    for step in range(8):
        pair.give_gradients(20)
        gradient = pair.parameters[4].grad
        assert gradient is not None
        pair.parameters[4].grad = gradient.t().contiguous().t()
        count = pair.second.advanced
        pair.step()
        pair.compare()
        if step > 3:
            assert pair.second.advanced - count == len(pair.parameters) - 1


def test_a_thread_that_rounds_tiny_numbers_to_zero_leaves_them_to_torch() -> None:
    pair = Pair(torch.optim.AdamW, {})
    assert torch.set_flush_denormal(True)
    try:
        for step in range(6):
            pair.give_gradients(step)
            pair.step(has_denormals=False)
            pair.compare()
    finally:
        torch.set_flush_denormal(False)
    assert pair.second.advanced == 0 and pair.second._copies is None


def test_a_sparse_gradient_is_for_torch() -> None:
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    second = SecondState(torch.optim.SGD, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
                         optimizer.param_groups)  # fmt: skip
    for step in range(6):
        optimizer.zero_grad()
        table(torch.tensor([step, 2])).sum().backward()
        second.prepare(optimizer.param_groups, True)
        second.step()
        optimizer.step()
        ((_, holder, key),) = second.held()
        ours, theirs = holder[key]["momentum_buffer"], optimizer.state[table.weight]["momentum_buffer"]
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert second.advanced == 0


@needs_rules
def test_writes_count_as_those_of_torch() -> None:
    """A snapshot tells by the version counter that a tensor was written meanwhile."""
    pair = Pair(torch.optim.AdamW, {"amsgrad": True})
    for _ in range(8):
        pair.give_gradients(20)  # all of them
        kept = [tensor for _, holder, key in pair.second.held() for tensor in holder[key].values()]
        versions = [tensor._version for tensor in kept]
        pair.step()
        assert all(tensor._version > old for tensor, old in zip(kept, versions, strict=True))
    assert pair.second.advanced and kept


def test_tensors_that_do_not_lie_alike_are_refused() -> None:
    a, b = torch.ones(4), torch.ones(5)
    for tensors in ([a, b], [a, a.double()], [a, torch.ones(8)[::2]], [torch.ones(4, dtype=torch.int32)], []):
        assert not _C.lie_alike(tensors)
    assert not _C.lie_alike([torch.ones(4, 1).expand(4, 4)]) and not _C.lie_alike([torch.ones(4).to_sparse()])
    assert not _C.lie_alike([torch.complex(a, a).conj().imag]) and _C.lie_alike([a, a.clone()])
    with pytest.raises(ValueError, match="parameter 0"):
        _C.advance_momentum([a], [], [b], 0.9, 1.0, 0.0, False)
    with pytest.raises(ValueError, match="one for each gradient"):
        _C.advance_adam([a], [], [a.clone(), a.clone()], [a.clone()], [], 0.1, 0.9, 0.1, 0.0, False)
    with pytest.raises(ValueError, match="missing"):
        _C.advance_momentum([a], [], [a.clone()], 0.9, 1.0, 0.5, False)
    _C.advance_momentum([], [], [], 0.9, 1.0, 0.0, False)


@needs_rules
def test_every_thread_takes_a_part() -> None:
    torch.manual_seed(1)
    gradient, mean, square = (torch.randn(300_001) for _ in range(3))
    one, many = ([mean.clone(), square.clone()] for _ in range(2))
    threads = torch.get_num_threads()
    try:
        for count, (m, v) in ((1, one), (3, many)):
            torch.set_num_threads(count)
            _C.advance_adam([gradient], [], [m], [v], [], 0.1, 0.999, 0.001, 0.0, False)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])
    assert torch.equal(one[0], mean.lerp(gradient, 0.1))


@needs_rules
def test_proofs_are_of_steps_in_which_something_is_kept() -> None:
    pair = Pair(torch.optim.AdamW, {})
    pair.give_gradients(20)
    pair.step()
    assert not pair.second._proven
    for _ in range(second_state._PROOFS):
        pair.step()
    assert list(pair.second._proven.values()) == [second_state._PROOFS] and pair.second.advanced == 0


PROGRAM = """
from tests.unit.python.state.test_second_state import Pair, VARIANTS
for name in ("dampening", "adamw", "amsgrad", "l2 maximize"):
    pair = Pair(*VARIANTS[name])
    for step in range(20):
        pair.give_gradients(step)
        pair.step()
        pair.compare()
    print(pair.second.advanced)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere, torch has no code without fused operations")
def test_a_torch_that_rounds_elsewhere_is_noticed() -> None:
    """Its code for processors without fused operations rounds products before it adds them."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 4, "else reft's arithmetic is relied on, which differs"
