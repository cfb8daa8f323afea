"""What is found without a hint from the script, and under which names."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reft import _C
from reft._state import constructions, discovery, optimizers, registry
from reft._state.discovery import State


def names(state: State) -> list[str]:
    return [region.name for region in state.regions]


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made its state."""
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_names_follow_the_places_in_modules() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = adam(module)
    found = discovery.discover([optimizer])
    assert names(found)[:4] == ["m0.0.weight", "m0.0.bias", "m0.1.weight", "m0.1.bias"]
    state = [name for name in names(found) if name.startswith("o0[m0.0.weight]")]
    assert state == [f"o0[m0.0.weight].{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    buffers = [region for region in found.regions if region.place and region.early]
    assert {b.name for b in buffers} == {
        "m0.1.running_mean",
        "m0.1.running_var",
        "m0.1.num_batches_tracked",
    }
    assert all(buffer.early for buffer in buffers), "a forward may rewrite them"
    assert found.bytes == sum(region.tensor.nbytes for region in found.regions)


def test_buffers_and_hyperparameters_of_another_rank_may_stand_in() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[1].requires_grad_(False)
    optimizer = adam(module[0])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer.param_groups[0]["master"] = [torch.ones(2)]
    found = discovery.discover([optimizer])
    replaceable = {region.name for region in found.regions if region.is_replaceable}
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert replaceable == {"o0.g0.lr", *(f"m0.1.{name}" for name in buffers)}
    assert {"m0.1.weight", "o0[m0.0.weight].exp_avg"} <= set(names(found)), "frozen or trained"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """As rank 1 of four sees it: two replicas of two shards."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_the_step_of_a_parameter_is_that_of_all_who_step_it(mesh: DeviceMesh) -> None:
    placements = [Replicate(), Shard(0)]
    local = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(local))
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    module.w.grad = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)
    optimizer.step()
    sharded = DTensor.from_local(torch.ones(1), mesh, [Shard(0), Shard(0)], run_check=False)
    optimizer.state[module.w]["own"] = sharded
    ranks = {region.name: region.ranks for region in discovery.discover([optimizer]).regions}
    assert ranks["o0[m0.w].exp_avg"] == ranks["m0.w"] == (1, 3)
    assert ranks["o0[m0.w].step"] == (0, 1, 2, 3)
    assert ranks["o0[m0.w].own"] == (), "its placement says that each rank has another part"


def test_rows_that_all_ranks_have_in_turn_are_known(mesh: DeviceMesh) -> None:
    line = init_device_mesh("cpu", (4,))
    square = torch.arange(12.0).view(6, 2)
    module = torch.nn.Module()

    def put(name: str, local: torch.Tensor, on: DeviceMesh, placements: list[Any], rows: int) -> None:
        made = DTensor.from_local(
            local, on, placements, run_check=False, shape=torch.Size([rows, 2]), stride=(2, 1)
        )
        module.register_parameter(name, torch.nn.Parameter(made))

    put("even", torch.zeros(2, 2), line, [Shard(0)], 8)
    put("uneven", square[2:4].clone(), line, [Shard(0)], 6)
    put("of_one_row", torch.zeros(0, 2), line, [Shard(0)], 1)
    put("unlike_chunk", torch.zeros(3, 2), line, [Shard(0)], 8)
    put("replicated", torch.zeros(4, 2), mesh, [Replicate(), Shard(0)], 8)
    module.register_parameter("plain", torch.nn.Parameter(torch.zeros(2, 2)))
    found = discovery.discover([torch.optim.SGD(module.parameters(), lr=0.1)])
    assert {name: shape for name, (_, _, shape) in found.splits.items()} == {
        "m0.even": [8, 2],
        "m0.uneven": [6, 2],
        "m0.of_one_row": [1, 2],
    }
    assert "m0.of_one_row" not in names(found) and "m0.of_one_row" in found.saved_names()
    assert found.rows(["m0.even", "m0.uneven"]) == {(4, 1)}
    assert found.rows(["m0.replicated"]) == {(2, 1)}
    assert found.role() and found.role(["m0.plain"]) == "", "it has no placement"
    assert found.role(["m0.even"]) != found.role(["m0.replicated"])


def test_a_parameter_in_a_buffer_is_no_buffer() -> None:
    module = torch.nn.Module()
    module.register_buffer("store", torch.zeros(12))
    module.register_parameter("w", torch.nn.Parameter(module.store[:6]))
    found = discovery.discover([torch.optim.SGD(module.parameters(), 0.1)])
    assert [region.is_replaceable for region in found.regions] == [False]


def test_tied_weights_are_saved_once() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    module[1].weight = module[0].weight
    optimizer = torch.optim.SGD(
        [
            {"params": [module[0].weight]},
            {"params": [torch.nn.Parameter(module[0].weight.detach())]},
        ],
        0.1,
    )
    found = discovery.discover([optimizer])
    assert names(found) == ["m0.0.weight"]
    assert [(alias.name, alias.region) for alias in found.aliases] == [("o0.p1", "m0.0.weight")]


def test_parameters_that_no_optimizer_has_are_the_modules() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    assert names(discovery.discover([optimizer])) == ["m0.weight", "m0.bias"]


def test_a_buffer_that_was_replaced_is_the_new_one() -> None:
    module = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = discovery.discover([optimizer])
    region = next(region for region in found.regions if region.name == "m0.running_mean")
    module.running_mean = torch.full((2,), 9.0)
    assert region.current().tolist() == [9.0, 9.0]


def test_tensors_with_gaps_go_with_the_small_state() -> None:
    base = torch.arange(6.0)
    registry.objects["x"] = base[::2]
    found = discovery.discover([torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)])
    assert list(found.strided) == ["r.x"] and "r.x" not in names(found)


def test_what_cannot_be_saved_is_named() -> None:
    registry.objects["s"] = torch.eye(3).to_sparse()
    found = discovery.discover([torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)])
    ((name, why),) = found.missed
    assert name == "r.s" and "torch.sparse_coo tensor on cpu" in why


def test_device_tensors_are_not_saved_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        type = "cuda"

        def __str__(self) -> str:
            return "cuda:0"

    class OnDevice:
        device, layout, is_quantized, is_cuda = Device(), torch.strided, False, True

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    monkeypatch.setattr(discovery, "local_part", lambda tensor: (OnDevice(), ()))
    monkeypatch.setattr(_C, "cuda_absent", lambda: "libcuda.so.1 is missing")
    found = discovery.discover([optimizer])
    assert found.missed == [
        ("o0.p0", "tensor on cuda:0, but reft has no CUDA: libcuda.so.1 is missing")
    ]


def test_registered_modules_and_tensors_are_found() -> None:
    registry.objects.update(ema=torch.nn.Linear(2, 1), t=torch.zeros(4))
    found = discovery.discover([torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)])
    assert names(found) == ["o0.p0", "r.ema.weight", "r.ema.bias", "r.t"]


def test_tensor_hyperparameters_are_copied_early() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    region = next(r for r in discovery.discover([optimizer]).regions if r.name == "o0.g0.lr")
    assert region.early


def test_an_inner_optimizer_comes_behind_its_owner() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    outer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    outer.inner = inner  # type: ignore[attr-defined]
    inner.owner = outer  # type: ignore[attr-defined]
    assert optimizers.with_inner([outer]) == [outer, inner]


def test_identities_move_when_something_comes_or_goes_only() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = adam(module)
    before = optimizers.identities([optimizer]), optimizers.structure([optimizer])
    optimizer.step()
    optimizer.state[module.weight]["exp_avg"] = torch.zeros(2, 2)
    assert (optimizers.identities([optimizer]), optimizers.structure([optimizer])) == before
    optimizer.state[module.weight]["other"] = torch.zeros(2, 2)
    assert optimizers.structure([optimizer]) != before[1]
    registry.register("x", torch.zeros(1))
    assert optimizers.identities([optimizer]) != before[0]


def test_optimizers_are_known_again_by_class_and_shapes() -> None:
    def made(size: int, kind: Any = torch.optim.SGD) -> Any:
        return kind([torch.nn.Parameter(torch.zeros(size, 17))], lr=0.1)

    known, late, other = made(1), made(2), made(3)
    assert optimizers.signature(made(2)) == optimizers.signature(late)
    assert optimizers.signature(made(2, torch.optim.Adam)) != optimizers.signature(late)
    wanted = [(optimizers.signature(late), ""), (optimizers.signature(other), "")]
    gc.collect()
    assert optimizers.not_yet_stepped([known], wanted) == [late, other]
    assert optimizers.not_yet_stepped([known, late], wanted[1:]) == [other]
    assert optimizers.not_yet_stepped([known], []) == []
    # What cannot be found ends the list: later ones would get another place.
    assert optimizers.not_yet_stepped([known], [("unknown", ""), *wanted]) == []


def test_optimizers_of_one_signature_are_known_again_by_their_number() -> None:
    constructions.of_process.watch()
    known, one, other = (
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(size, 19))], lr=0.1) for size in (1, 2, 2)
    )
    wanted = [(optimizers.signature(o), constructions.of_process.key_of(o)) for o in (other, one)]
    assert optimizers.not_yet_stepped([known], wanted) == [other, one]


def test_another_tensor_in_the_same_place_is_copied_from_then_on() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = adam(module)
    found = discovery.discover([optimizer])
    region = next(r for r in found.regions if r.name == "o0[m0.weight].exp_avg")
    optimizer.state[module.weight]["exp_avg"] = torch.full((2, 2), 7.0)
    assert region.current().tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_a_module_keeps_its_name_when_it_is_wrapped() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert names(discovery.discover([optimizer])) == ["m0.weight", "m0.bias"]
    wrapper = torch.nn.Sequential(module, torch.nn.BatchNorm1d(2, affine=False))
    found = names(discovery.discover([optimizer]))
    assert found[:2] == ["m0.weight", "m0.bias"] and "m1.1.running_mean" in found
    del wrapper


def test_a_name_is_needed_to_register() -> None:
    with pytest.raises(ValueError, match="name is empty"):
        registry.register("", torch.zeros(1))
