"""What can change in place comes back into the right memory: what was shared is shared again, and nobody else's is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.learning import LEARN

pytest.importorskip("torch")

Run = Callable[..., Any]

HEADER = """
import collections, itertools
import numpy as np
import probe, torch
from torch.utils.data import DataLoader, Dataset
probe.hook_optimizers()
torch.manual_seed(7)
""" + LEARN

SCRIPTS = {
    # The pieces of one storage of which none is all of it, held by the loop of a suspended
    # generator.
    "pieces_of_a_permutation": """
def batches(seed):
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 50, (64, 9), generator=g)
    while True:
        for idx in torch.randperm(64, generator=g).split(8):
            b = data[idx]
            yield b[:, :-1], b[:, 1:]
def pieces(seed):
    random = np.random.default_rng(seed)
    while True:
        for idx in np.split(random.permutation(30), [7, 11, 20]):
            yield idx
        for idx in torch.arange(10).split([3, 5, 2]):
            yield idx.numpy()
def train():
    for i, (x, y), z, lr in zip(range(20), batches(1), pieces(2), itertools.count()):
        learn()
        probe.trace(i, x.tolist(), y.tolist(), z.tolist(), lr)
        yield i
def main():
    for i in train():
        pass
main()
""",
    "overlapping_views": """
def main():
    base = torch.zeros(4, 4)
    row, column, odd, even, same = base[1], base[:, 1], base[:, 1::2], base[:, ::2], base.t()
    flat = np.zeros(16)
    front, back, reverse, both = flat[:10], flat[6:], flat[::-1], torch.from_numpy(flat)
    late = None
    for step in range(9):
        learn()
        row += 1; column *= 1 + step; odd -= 2; even += step; same[0, 0] += 1
        front += 1; back *= 2; reverse[0] += step; both[3] -= 1
        if step == 1:
            whole = torch.arange(12.0)
            late = [whole[2:8], whole[5:], whole.view(torch.int32)[:3], whole.numpy()[4:6], whole[:1].expand(5), whole[:6].unfold(0, 3, 1)]
            del whole
        if late is not None:
            late[0] += 1; late[1] *= 2; late[3][0] -= 1
            probe.trace([x.tolist() for x in late])
        probe.trace(step, base.tolist(), column.tolist(), flat.tolist(), both.tolist(), same.tolist())
main()
""",
    # What a variable means in the first iteration is somebody else's: the data, the weights.
    "variables_that_borrow": """
class Data(Dataset):
    def __init__(self):
        self.tensors = [torch.full((2,), float(i)) for i in range(300)]
        self.arrays = [np.full(2, float(i)) for i in range(300)]
        self.table = torch.arange(1200.0).reshape(300, 4)
    def __len__(self):
        return 300
    def __getitem__(self, i):
        return self.tensors[i], self.arrays[i], self.table[i]
def main():
    data, other = Data(), torch.nn.Linear(2, 2)
    best, shown = [p.detach() for p in other.parameters()], None
    for step in range(9):
        tensor, array, row = data[step]
        if step >= 2:
            row = torch.zeros(4) + step
            best = [b + step for b in best]
        learn()
        probe.trace(step, tensor.tolist(), array.tolist(), row.tolist(), [b.tolist() for b in best])
        probe.trace([float(t.sum()) for t in data.tensors[:9]], [float(a.sum()) for a in data.arrays[:9]], float(data.table.sum()))
        probe.trace([p.tolist() for p in other.parameters()])
main()
""",
    "variables_that_borrow_objects": """
class Track:
    def __init__(self, n):
        self.n, self.tags = n, [n]
class Packed:
    __slots__ = ("n",)
    def __init__(self, n):
        self.n = n
class Data(Dataset):
    def __init__(self):
        self.rows = [[i] for i in range(300)]
        self.maps = [{"i": i} for i in range(300)]
        self.sets = [{i} for i in range(300)]
        self.tracks = [Track(i) for i in range(300)]
        self.packed = [Packed(i) for i in range(300)]
    def __len__(self):
        return 300
    def __getitem__(self, i):
        return self.rows[i], self.maps[i], self.sets[i], self.tracks[i], self.packed[i]
def main():
    class Local:
        n = 0
    class LocalList(list):
        pass
    Pair = collections.namedtuple("Pair", "a b")
    data, kept = Data(), []
    for step in range(9):
        local, numbers, pair = Local(), LocalList(range(step)), Pair(step, -step)
        local.n = step
        row, map, members, track, packed = data[step]
        kept = kept[-2:]
        learn()
        kept.append(step)
        probe.trace(local.n, numbers, pair, type(local) is Local, type(numbers) is LocalList, type(pair) is Pair)
        probe.trace(step, row, map, list(members), track.n, track.tags, packed.n, kept)
        probe.trace(data.rows[:9], data.maps[:9], [list(s) for s in data.sets[:9]])
        probe.trace([(t.n, t.tags) for t in data.tracks[:9]], [p.n for p in data.packed[:9]])
main()
""",
    # They share memory in the first iteration and no more when they are captured, and the other way
    # round.
    "parting_and_meeting": """
def main():
    a = torch.ones(3)
    b, c, d = a.detach(), torch.ones(3), np.ones(3)
    e = d[:]
    for step in range(9):
        learn()
        if step == 2:
            b, c, e = b.clone(), a.detach(), e.copy()
        a += 1; b *= 2; d -= 1; e *= 3
        probe.trace(step, a.tolist(), b.tolist(), c.tolist(), d.tolist(), e.tolist())
main()
""",
    # What a loop cuts out of a larger piece and keeps: sums depend on how it lies in memory.
    "cut_out": """
def main():
    g = torch.Generator().manual_seed(1)
    random = np.random.default_rng(1)
    mems, tail, back, column, wide = None, None, None, None, None
    for step in range(9):
        learn()
        new = torch.randn(2, 4 + step, 5, generator=g)
        mems = new[:, -3:] if mems is None else torch.cat([mems, new], 1)[:, -6:].detach()
        block = random.normal(size=(3, 8 + step))
        tail, back, column = block[:, -5:], block[:, ::-1], block[1, ::2]
        wide = torch.randn(3, 1, generator=g).expand(3, 4)
        probe.trace(step, mems.stride(), mems.sum().item(), mems.mean((0, 1)).tolist(), wide.stride(), wide.tolist())
        probe.trace([(x.strides, x.sum(), x.tolist()) for x in (tail, back, column)])
main()
""",
    # Who holds the object itself goes on seeing what is written into it.
    "objects_that_last": """
from types import MappingProxyType
def main():
    grid = torch.zeros(3, 4)
    held = MappingProxyType({"row": grid[1], "array": np.zeros(4)[1:3], "channels": torch.zeros(1, 2, 2, 2)})
    row, array, image = held["row"], held["array"], held["channels"]
    made = None
    for step in range(7):
        learn()
        row += step; array += step; image += 1
        if step == 1:
            made = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last), torch.zeros(3, 2).t(), np.zeros((2, 3), order="F")
        if made:
            made[0].add_(1); made[1].add_(1); made[2][0] += 1
            probe.trace([x.tolist() for x in made], made[0].stride(), made[1].stride(), made[2].strides)
        probe.trace(step, held["row"].tolist(), held["array"].tolist(), held["channels"].tolist(), grid.tolist())
main()
""",
}


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("name", SCRIPTS)
def test_memory_comes_back(run_script: Run, name: str, at: int) -> None:
    result = run_script(HEADER + SCRIPTS[name], at)
    result.check()
    assert result.captured["uncaptured"] == []
