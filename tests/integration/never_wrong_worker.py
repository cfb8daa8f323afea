"""Runs one misbehaving training loop and compares every sealed snapshot with a clone taken at its
program point.

    never_wrong_worker.py SCENARIO OUT.json        (under torchrun, backend reft)

The clone is made by an optimizer post-hook that is registered before reft's. After each following
gate, and once more at the end, the sealed slots of this rank's vault are read through its
descriptor and their bytes compared.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 14


class Checker:
    """Clones the state at the return of each optimizer step; reads what was sealed.

    What is compared are bytes: each sealed region has to equal one of the tensors that were
    alive at its step and have its shape, as far as this rank's shard covers it.
    """

    def __init__(self, roots: Callable[[], list[Any]]) -> None:
        self._roots = roots
        self.clones: dict[int, list[torch.Tensor]] = {}
        self.verified: dict[int, int] = {}
        self.wrong: list[str] = []
        self.step = 0
        self.calls = 0

    def post_hook(self, *_: Any) -> None:
        from reft._session import current

        # If this is a program point of reft's, it gets the next number; if not, the next
        # optimizer's clone takes this one's place.
        session = current.session()
        assert session is not None
        self.calls += 1
        self.step = session.step + 1
        self.clones[self.step] = [tensor.detach().clone() for tensor in self.tensors()]
        self.clones.pop(self.step - 4, None)

    def pre_hook(self, *_: Any) -> None:
        # Runs after reft's gate, because it was registered later.
        self.check()

    def tensors(self) -> Iterator[torch.Tensor]:
        for root in self._roots():
            if isinstance(root, nn.Module):
                yield from root.parameters()
                yield from root.buffers()
            elif isinstance(root, torch.optim.Optimizer):
                for group in root.param_groups:
                    for parameter in group["params"]:
                        yield from (v for v in root.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))

    def check(self) -> None:
        from reft import _C
        from reft._session import current

        session = current.session()
        assert session is not None and session.engine is not None, "no session"
        for slot in _C.list_vault(session.engine.fd)["slots"]:
            step = slot["step"]
            if step not in self.clones:
                continue
            try:
                regions = _C.read_slot(session.engine.fd, slot["slot"], step, int(slot["incarnation"], 16))
                found = self._compare(regions, step)
            except _C.Corruption as error:
                self.wrong.append(f"step {step}: {error}")
                continue
            self.verified[step] = max(self.verified.get(step, 0), found)

    def _compare(self, regions: list[Any], step: int) -> int:
        """Bytes of the snapshot that were compared."""
        clones = self.clones[step]
        compared = 0
        for name, dtype, shape, nbytes, pieces in regions:
            hit = False
            for clone in clones:
                if not hit and clone.nbytes == nbytes and list(clone.shape) == list(shape):
                    flat = (
                        clone.contiguous().reshape(-1).view(torch.uint8)
                        if clone.numel()
                        else clone.new_zeros(0, dtype=torch.uint8)
                    )
                    found = flat.numpy()
                    hit = all(found[b : b + len(saved)].tobytes() == saved for b, saved in pieces)
            if not hit:
                self.wrong.append(
                    f"step {step}: region {name} {dtype}{list(shape)} equals no tensor at its program point"
                )
            compared += sum(len(saved) for _, saved in pieces)
        return compared


def small(norm: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(64, 256)]
    if norm:
        layers.append(nn.BatchNorm1d(256))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))


class Loop:
    """A plain DDP loop with places to misbehave in."""

    def __init__(self, norm: bool = True, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.net = model if model is not None else small(norm)
        self.ddp: nn.Module = DistributedDataParallel(self.net)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)
        self.others: list[Any] = []
        self.batch = 16

    def roots(self) -> list[Any]:
        return [self.net, self.optimizer, *self.others]

    def forward_backward(self, step: int) -> None:
        x = torch.randn(self.batch, 64)
        self.ddp(x).square().mean().backward()

    def after(self, step: int) -> None:
        """Between the optimizer step and the next forward."""

    def before(self, step: int) -> None:
        """Between backward and the optimizer step."""

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            self.optimizer.zero_grad()
            self.forward_backward(step)
            self.before(step)
            self.optimizer.step()
            self.after(step)


class Quiet(Loop):
    """Nothing is done wrong: nothing may be dropped."""


class Whole(Loop):
    """No buffers: all state is equal on both ranks, each saves half."""

    def __init__(self) -> None:
        super().__init__(norm=False)


class Clip(Loop):
    """In-place clipping after the step: seen by version counters."""

    def after(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.02, 0.02)


class Bulky(nn.Module):
    """Parameters too large for samples to see a write of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1 << 18)) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[:10].sum() for part in self.parts]) * x.mean()


class SlowWrite(Loop):
    """An op that writes few elements and is under way while its tensor is copied: the counter moves when it has ended."""

    def __init__(self) -> None:
        super().__init__(model=Bulky())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        rows = torch.randint(0, 1 << 18, (40,))
        self.rows, self.values = rows[torch.randint(0, 40, (4_000_000,))], torch.ones(4_000_000)

    def after(self, step: int) -> None:
        # In each of the first steps another tensor, which is not yet one of those that are copied
        # at once.
        with torch.no_grad():
            self.net.parts[step % 5].index_add_(0, self.rows, self.values)  # type: ignore[index,operator,union-attr]


class Data(Loop):
    """Writes through .data, which no version counter sees."""

    def after(self, step: int) -> None:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.999)


class DataNow(Loop):
    """The same, only in one step, of one large tensor, wholly."""

    def after(self, step: int) -> None:
        if step == 6:
            self.net[3].weight.data.zero_()  # type: ignore[operator,union-attr,index]


class DataOne(Loop):
    """One element by .data: only full verification promises to see it."""

    def after(self, step: int) -> None:
        self.net[3].weight.data[step, step] += 1.0  # type: ignore[operator,union-attr,index]


class Ema(Loop):
    """EMA weights swapped in for evaluation and out again, in the open or by .data."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = copy.deepcopy(self.net)
        for parameter in self.ema.parameters():
            parameter.requires_grad_(False)

    def after(self, step: int) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        if step % 3 == 0:
            kept = [parameter.detach().clone() for parameter in self.net.parameters()]
            for parameter, average in zip(self.net.parameters(), self.ema.parameters(), strict=True):
                parameter.data.copy_(average)
            self.net.eval()
            self.net(torch.randn(8, 64))
            self.net.train()
            for parameter, value in zip(self.net.parameters(), kept, strict=True):
                parameter.data.copy_(value)


class EmaPointers(Ema):
    """EMA swapped in by exchanging storage: the tensors' memory is another one for a while."""

    def after(self, step: int) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        if step % 3 == 0:
            for parameter, average in zip(self.net.parameters(), self.ema.parameters(), strict=True):
                parameter.data, average.data = average.data, parameter.data
            self.net(torch.randn(8, 64))
            for parameter, average in zip(self.net.parameters(), self.ema.parameters(), strict=True):
                parameter.data, average.data = average.data, parameter.data


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.last = nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


class Tie(Loop):
    """Tied weights, tied again after each step by copying over themselves."""

    def __init__(self) -> None:
        super().__init__(model=Tied())

    def after(self, step: int) -> None:
        self.net.last.weight = self.net.first.weight  # type: ignore[union-attr]
        if step % 4 == 0:
            self.net.last.weight.data.copy_(self.net.first.weight.data * 0.5)  # type: ignore[union-attr,operator]


class Buffers(Loop):
    """BatchNorm buffers change in every forward, and twice where there are two forwards."""

    def forward_backward(self, step: int) -> None:
        with torch.no_grad():
            self.net(torch.randn(4, 64))
        super().forward_backward(step)


class HiddenBuffer(Loop):
    """A buffer that forward overwrites by .data, in a module the optimizer does not know."""

    def __init__(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = small()
                self.register_buffer("memory", torch.zeros(20000))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.memory.data.add_(1.0)
                return self.inner(x)

        super().__init__(model=Counting())


class ReplacedBuffer(Loop):
    """A running average that forward replaces by another tensor."""

    def __init__(self) -> None:
        class Averaging(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = small()
                self.register_buffer("mean", torch.zeros(20000))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
                return self.inner(x)

        super().__init__(model=Averaging())


class ReplaceParameter(Loop):
    """A parameter becomes another tensor in mid-run, with another shape."""

    def after(self, step: int) -> None:
        if step in (5, 9):
            torch.manual_seed(step)
            width = 8 if step == 9 else 12
            self.net[-1] = nn.Linear(512, width)  # type: ignore[operator]
            self.ddp = DistributedDataParallel(self.net)
            self.optimizer.param_groups[0]["params"] = list(self.ddp.parameters())
            self.optimizer.state = type(self.optimizer.state)(
                self.optimizer.state.default_factory,
                {p: s for p, s in self.optimizer.state.items() if any(p is q for q in self.net.parameters())},
            )
            gc.collect()


class ReplaceOptimizer(Loop):
    """AdamW, then SGD with momentum, then AdamW."""

    def after(self, step: int) -> None:
        if step == 5:
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-2, momentum=0.9)
            gc.collect()
        elif step == 10:
            self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3, amsgrad=True)
            gc.collect()


class Batches(Loop):
    """Batch shapes change."""

    def forward_backward(self, step: int) -> None:
        self.batch = 3 + 7 * (step % 5)
        super().forward_backward(step)


class Reallocate(Loop):
    """Memory of parameters and of optimizer state is freed and allocated anew, and old memory is scribbled over by others."""

    def after(self, step: int) -> None:
        for parameter in self.net.parameters():
            old = parameter.data
            parameter.data = old.clone()
            del old
        for state in self.optimizer.state.values():
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.clone()
        scribble = [torch.full((4096,), float("nan")) for _ in range(50)] + [
            torch.full((512, 256), float("nan")) for _ in range(4)
        ]
        del scribble


class Resize(Loop):
    """Parameters are resized to nothing and back, as sharded training does."""

    def after(self, step: int) -> None:
        storage = self.net[3].weight.untyped_storage()  # type: ignore[operator,union-attr,index]
        kept = self.net[3].weight.detach().clone()  # type: ignore[operator,union-attr,index]
        if step % 2 == 0:
            storage.resize_(0)
            noise = torch.randn(512, 256)
            storage.resize_(kept.nbytes)
            self.net[3].weight.data.copy_(kept)  # type: ignore[operator,union-attr,index]
            del noise


class Two(Loop):
    """Two optimizers, one after the other; the second's step comes between the first's and the program point."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.optim.SGD(self.net[-1].parameters(), lr=1e-2, momentum=0.5)  # type: ignore[operator,union-attr,index]
        self.optimizer.param_groups[0]["params"] = list(self.net[:-1].parameters())  # type: ignore[operator,union-attr,index]
        self.others = [self.second]

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            self.optimizer.zero_grad()
            self.second.zero_grad()
            self.forward_backward(step)
            self.optimizer.step()
            self.second.step()


class Skipped(Loop):
    """Steps without gradients for some parameters, and skipped steps."""

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            self.optimizer.zero_grad()
            self.forward_backward(step)
            if step % 4 == 2:
                for parameter in self.net[0].parameters():  # type: ignore[operator,union-attr,index]
                    parameter.grad = None
            if step % 5:
                self.optimizer.step()


SCENARIOS: dict[str, type[Loop]] = {
    "quiet": Quiet,
    "whole": Whole,
    "clip": Clip,
    "slow_write": SlowWrite,
    "data": Data,
    "data_now": DataNow,
    "data_one": DataOne,
    "ema": Ema,
    "ema_pointers": EmaPointers,
    "tie": Tie,
    "buffers": Buffers,
    "hidden_buffer": HiddenBuffer,
    "replaced_buffer": ReplacedBuffer,
    "replace_parameter": ReplaceParameter,
    "replace_optimizer": ReplaceOptimizer,
    "batches": Batches,
    "reallocate": Reallocate,
    "resize": Resize,
    "two": Two,
    "skipped": Skipped,
}


def init_checked() -> list[Checker]:
    """Makes the process group, with hooks around reft's own that call every checker in the list that is returned."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    checkers: list[Checker] = []

    def post(*args: Any) -> None:
        for checker in checkers:
            checker.post_hook(*args)

    def pre(*args: Any) -> None:
        for checker in checkers:
            checker.pre_hook(*args)

    register_optimizer_step_post_hook(post)  # before init_process_group: runs before reft's
    dist.init_process_group("reft")
    register_optimizer_step_pre_hook(pre)  # after it: runs after reft's gate
    return checkers


def main() -> None:
    scenario, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checkers = init_checked()
    loop = SCENARIOS[scenario]()
    checker = Checker(loop.roots)
    checkers.append(checker)
    torch.manual_seed(10 + dist.get_rank())
    loop.run()
    import reft

    reft.snapshot_now(10)
    checker.check()
    status = reft.status()
    compared = torch.tensor([checker.verified.get(checker.step, 0)])
    dist.all_reduce(compared)
    if dist.get_rank() == 0:
        result = {
            "compared_by_all": int(compared),
            "alive_bytes": sum(t.nbytes for t in checker.clones[checker.step]),
            "steps": checker.step,
            "optimizer_steps": checker.calls,
            "verified": checker.verified,
            "wrong": checker.wrong,
            "captured": status["captured"],
            "sealed": status["sealed"],
            "dropped": status["dropped"],
            "skipped": status["skipped"],
            "errors": status["errors"],
            "state_bytes": status["state_bytes"],
            "payload_bytes": status["payload_bytes"],
            "early_bytes": status["early_bytes"],
        }
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
