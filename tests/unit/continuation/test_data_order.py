"""What decides the order of data is found by reach from the loader, whatever its classes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

_LOOP = """
import dataclasses, functools, random
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
import probe
probe.hook_optimizers()

{source}

def main():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    loader = make()
    for epoch in range(4):
        for x in loader:
            loss = model(x.float().reshape(-1, 1)).mean()
            loss.backward()
            opt.step()
            probe.trace(epoch, x.flatten().tolist())

main()
"""

SOURCES = {
    "plain_class_sampler_shuffles_its_list": """
class Batches:
    def __init__(self):
        self.indices, self.rng = list(range(24)), random.Random(5)
    def __iter__(self):
        self.rng.shuffle(self.indices)
        for k in range(0, 24, 4):
            yield self.indices[k:k + 4]
    def __len__(self): return 6

class Items(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i): return torch.tensor([float(i)])

def make(): return DataLoader(Items(), batch_sampler=Batches(), num_workers={workers})
""",
    "large_list_shuffled_in_place": """
class Order:
    def __init__(self):
        self.indices, self.rng = list(range(20000)), np.random.RandomState(5)
    def __iter__(self):
        self.rng.shuffle(self.indices)
        return iter(self.indices[:24])
    def __len__(self): return 24

class Items(Dataset):
    def __len__(self): return 20000
    def __getitem__(self, i): return torch.tensor([float(i)])

def make(): return DataLoader(Items(), sampler=Order(), batch_size=4, num_workers={workers})
""",
    "stages_count_epochs": """
class Shuffle:
    def __init__(self): self.epoch = -1
    def run(self, source):
        self.epoch += 1
        rng, held = random.Random(self.epoch), []
        for x in source:
            held.append(x)
            if len(held) > 5:
                yield held.pop(rng.randrange(len(held)))
        yield from held

class Pipe(IterableDataset):
    def __init__(self, *stages): self.stages = list(stages)
    def __iter__(self):
        source = iter(range(24))
        for stage in self.stages:
            source = stage.run(source)
        return (torch.tensor([float(x)]) for x in source)

def make(): return DataLoader(Pipe(Shuffle()), batch_size=4, num_workers={workers}, persistent_workers={workers} > 0)
""",
    "generator_made_anew_each_epoch": """
class Sampler:
    def __init__(self): self.epoch = 0
    def __iter__(self):
        self.g = torch.Generator()
        self.g.manual_seed(self.epoch)
        self.epoch += 1
        for _ in range(24):
            yield int(torch.randint(0, 24, (1,), generator=self.g))
    def __len__(self): return 24

class Items(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i): return torch.tensor([float(i)])

def make(): return DataLoader(Items(), sampler=Sampler(), batch_size=4, num_workers={workers})
""",
    "generators_in_transforms": """
rng_of_module = random.Random(9)

class Jitter:
    __slots__ = ("rng",)
    def __init__(self): self.rng = np.random.RandomState(3)
    def __call__(self, x): return x + float(self.rng.rand())

def flip(generator, x): return x * (1 if torch.rand(1, generator=generator) > 0.5 else -1)
def scale(x): return x * rng_of_module.random()
def closed():
    legacy = np.random.default_rng(8)
    return lambda x: x + float(legacy.normal())

class Items(Dataset):
    def __init__(self):
        g = torch.Generator()
        g.manual_seed(4)
        self.transforms = [Jitter(), functools.partial(flip, g), scale, closed()]
    def __len__(self): return 24
    def __getitem__(self, i):
        x = torch.tensor([float(i)])
        for t in self.transforms: x = t(x)
        return x

def make(): return DataLoader(Items(), batch_size=4, shuffle=True, num_workers={workers})
""",
    "collate_draws_and_counts": """
class Mixup:
    def __init__(self): self.rng, self.calls = np.random.RandomState(1), 0
    def __call__(self, items):
        self.calls += 1
        x = torch.stack(items)
        lam = self.rng.beta(1, 1)
        return lam * x + (1 - lam) * x[self.rng.permutation(len(x))] + self.calls

class Items(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i): return torch.tensor([float(i)])

def make(): return DataLoader(Items(), batch_size=4, collate_fn=Mixup(), num_workers={workers}, persistent_workers={workers} > 0)
""",
    "object_of_the_module_that_the_collate_fn_replaces_parts_of": """
@dataclasses.dataclass(frozen=True)
class Count:
    n: int = 0

class Ticker:
    def __init__(self): self.count = Count()
    def __call__(self):
        self.count = dataclasses.replace(self.count, n=self.count.n + 1)
        return self.count.n

tick = Ticker()

class Items(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i): return torch.tensor([float(i)])

def collate(items): return torch.stack(items) + 1000 * tick()

def make(): return DataLoader(Items(), batch_size=4, collate_fn=collate, num_workers={workers})
""",
    "buffer_in_a_dict_of_the_dataset": """
class Items(IterableDataset):
    def __init__(self): self.state = {{"rng": random.Random(2), "round": [0]}}
    def __iter__(self):
        self.state["round"][0] += 1
        for i in range(24):
            yield torch.tensor([float(self.state["rng"].randrange(100) + 1000 * self.state["round"][0])])

def make(): return DataLoader(Items(), batch_size=4, num_workers={workers})
""",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [3, 14])
@pytest.mark.parametrize("name", SOURCES)
def test_continues(run_script: Run, name: str, at: int, workers: int) -> None:
    if workers and name == "large_list_shuffled_in_place" and at == 3:
        pytest.skip("the same as without workers")
    source = _LOOP.replace("{source}", SOURCES[name].replace("{workers}", str(workers)).replace("{{", "{").replace("}}", "}"))
    run = run_script(source, at)
    named = [one for one in run.captured["uncaptured"] if "approximated" not in one[2]]
    assert named == []
    run.check()


@pytest.mark.parametrize("settings", ["", ", persistent_workers=True"])
def test_workers_copy_globals_as_they_were_when_the_epoch_began(
    run_script: Run, settings: str
) -> None:
    source = """
CLOCK, STEPS = [0], 0
class Items(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i): return torch.tensor([float(i)])
def collate(items): return torch.stack(items) + 1000 * CLOCK[0] + 100000 * STEPS
def make(): return DataLoader(Items(), batch_size=4, collate_fn=collate, num_workers=1SETTINGS)
def main():
    global STEPS
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    loader = make()
    for epoch in range(3):
        for x in loader:
            opt.step()
            STEPS += 1
            CLOCK[0] += 1
            probe.trace(epoch, x.flatten().tolist(), STEPS, CLOCK)
main()
"""
    head = _LOOP[: _LOOP.index("{source}")]
    run_script(head + source.replace("SETTINGS", settings), 9).check()
