"""Values of many kinds come back as they were, those made after the first step too; what must not be touched is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

Run = Callable[..., Any]

HEADER = """
import collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, os, pathlib, random, tempfile, threading
import numpy as np
import probe, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
probe.hook_optimizers()
torch.manual_seed(7), random.seed(7), np.random.seed(7)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # weights are not this package's to restore
def learn(x=None):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3) if x is None else x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""

SCRIPTS = {
    "builtin_values": """
class Mode(enum.Flag):
    A = 1
    B = 2
class Slots:
    __slots__ = ("n", "later")
@dataclasses.dataclass(slots=True)
class Frozen:
    n: int
    tags: list
Point = collections.namedtuple("Point", "x y")
class Log(list):
    pass
class Table(dict):
    pass
class Warned(set):
    pass
def main():
    warned, later = Warned(), None
    state = {"when": datetime.datetime(2020, 1, 1), "z": 1j, "d": decimal.Decimal("1.1"), "f": fractions.Fraction(1, 3)}
    path, data, none, mode, slots = pathlib.Path("a"), b"", None, Mode.A, Slots()
    slots.n = 0
    frozen, groups, counts, last = Frozen(0, []), collections.defaultdict(list), collections.Counter(), collections.deque(maxlen=3)
    ordered, seen, keys, shared = collections.OrderedDict(), set(), {}, []
    late = log = table = extra = None
    for step in range(9):
        learn()
        state["when"] += datetime.timedelta(hours=1)
        state["z"] *= 2j
        state["d"] += decimal.Decimal("0.1")
        state["f"] += 1
        path, data = path / str(step), data + bytes([step])
        mode = Mode.A | Mode.B if step % 2 else Mode.B
        slots.n += step
        frozen.n += 1
        frozen.tags.append(Point(step, -step))
        groups[step % 2].append(step)
        counts[str(step % 3)] += 1
        last.append(step)
        ordered[step] = step
        ordered.move_to_end(0, last=True)
        seen.add((step, "x"))
        keys[mode] = keys.get(mode, 0) + 1
        keys["r", step] = step  # as references are written in nodes
        seen.add(("r", 0))
        warned.add(step)
        warned.count = len(warned)
        if step == 1:
            later = Warned("b")
            late = Slots()
            late.n, late.later = shared, collections.deque([1], maxlen=2)
            log, table, extra = Log([5]), Table(a=1), collections.defaultdict(int)
            log.name = table.name = "late"
            none = Frozen(9, [frozenset([Mode.A, 2]), bytearray(b"q")])
        if late is not None:
            shared.append(step)
            late.later.append(step)
            log.append(step)
            table[step] = step
            extra[step] += 1
            none.n += 1
            later.add(str(step))
        probe.trace(warned.count, sorted(warned), sorted(later or []), type(later).__name__)
        probe.trace(step, repr(state), str(path), list(data), str(mode), slots.n, repr(frozen), repr(groups), repr(counts), repr(last))
        probe.trace(repr(ordered), sorted(map(repr, seen)), sorted((str(k), v) for k, v in keys.items()))
        if late is not None:
            probe.trace(late.n is shared, shared, repr(late.later), log, log.name, table, table.name, extra[99], none.n, repr(none.tags))
main()
""",
    "generators_of_random_numbers": """
class Holder:
    def __init__(self):
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(2), torch.Generator().manual_seed(3)
def main():
    holder, legacy, late = Holder(), np.random.RandomState(4), []
    for step in range(7):
        learn()
        if step == 1:
            late = [random.Random(5), np.random.default_rng(6), np.random.RandomState(7), torch.Generator().manual_seed(8)]
        drawn = [holder.python.random(), holder.numpy.random(), torch.rand(1, generator=holder.torch).item(), legacy.rand()]
        if late:
            drawn += [late[0].gauss(0, 1), late[1].normal(), late[2].normal(), torch.randn(1, generator=late[3]).item()]
        probe.trace(step, drawn)
main()
""",
    "modules_without_an_optimizer": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.seen, self.last = torch.nn.Linear(2, 2), 0, [], None
    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.last = {"sum": x.sum().detach()}
        return self.layer(x)
def numbers(module):
    return [p.flatten().tolist() for p in module.state_dict().values()]
def main():
    net = Net()
    own = torch.optim.SGD(net.parameters(), lr=0.0)
    ema, teacher = copy.deepcopy(net).requires_grad_(False), copy.deepcopy(net)
    average = torch.optim.swa_utils.AveragedModel(net)
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    late = best = None
    for step in range(8):
        net(torch.full((1, 2), float(step)))
        learn()
        with torch.no_grad():
            for p in ema.parameters():
                p.data.mul_(0.5).add_(step)
            for p in shadow.values():
                p.mul_(0.5).add_(step)
        average.update_parameters(ema)
        if step == 2:
            late, best = copy.deepcopy(ema), copy.deepcopy(ema.state_dict())
            net.layer.weight.requires_grad_(False)
            ema.layer.eval()
        if late is not None:
            with torch.no_grad():
                late.layer.weight.add_(1)
            best["layer.bias"].add_(2)
        probe.trace(step, numbers(ema), numbers(teacher) == numbers(net), int(average.n_averaged), numbers(average))
        probe.trace(net.calls, net.seen, float(net.last["sum"]), [p.tolist() for p in shadow.values()])
        probe.trace(net.layer.weight.requires_grad, net.training, ema.layer.training, late and numbers(late))
        probe.trace(best and {k: v.tolist() for k, v in best.items()}, best and getattr(best, "_metadata", None) is not None)
        if late is not None:
            probe.trace(type(late).__name__, late.layer.weight.requires_grad, late(torch.ones(1, 2)).tolist())
main()
""",
    "closures_methods_and_partials": """
class Callbacks:
    def __init__(self):
        self.calls = 0
        self.hooks = [self.on_step, functools.partial(self.on_value, 2)]
    def on_step(self):
        self.calls += 1
    def on_value(self, by):
        self.calls += by
def counter():
    count, history = 0, []
    def tick():
        nonlocal count
        count += 1
        history.append(count)
        return count, list(history)
    return tick
tick_global = counter()
def main():
    registry = {"ticks": [counter(), counter()], "callbacks": Callbacks().hooks}
    for step in range(7):
        learn()
        for hook in registry["callbacks"]:
            hook()
        probe.trace(step, [tick() for tick in registry["ticks"]], registry["callbacks"][0].__self__.calls, tick_global())
main()
""",
    "generators_at_other_yields": """
def batches(items, size):
    buffer = []
    for item in items:
        buffer.append(item)
        if len(buffer) == size:
            yield buffer
            buffer = []
    if buffer:
        yield buffer
def both(a, b):
    yield from batches(a, 2)
    for x in b:
        yield [x]
class Reader:
    def stream(self, start):
        for i in range(start, start + 3):
            yield i
def main():
    unused, reader, late = batches([7, 8, 9], 2), Reader(), None
    for step, batch in enumerate(both(range(5), "abc")):
        learn()
        if step == 2:
            late = reader.stream(10)
        probe.trace(step, batch, next(late, None) if late else None, next(unused, None) if step > 3 else 0)
    for batch in batches(range(5), 2):
        learn()
        probe.trace(batch)
main()
""",
    "datasets_with_state": """
class Cached(Dataset):
    def __init__(self):
        self.data, self.cache, self.log, self.rng = list(range(1000)), {}, [], random.Random(3)
    def __len__(self):
        return 12
    def __getitem__(self, i):
        self.log.append(i)
        self.cache[i] = self.cache.get(i, 0) + 1
        return torch.full((3,), self.data[i] + self.rng.random())
def main():
    dataset = Cached()
    for epoch in range(3):
        for x in DataLoader(dataset, 4, shuffle=True):
            learn(x)
            probe.trace(epoch, x.tolist(), dataset.log, dataset.cache)
main()
""",
    "classes_functions_and_files": """
import io
class Counter:
    total, names, stream = 0, [], None
    class Inner:
        depth = 0
    def bump(self, seen={}):
        seen[len(seen)] = Counter.total
        type(self).total += 1
        Counter.Inner.depth -= 1
        return len(seen)
def tag(n, *, log=[]):
    tag.calls = getattr(tag, "calls", 0) + n
    log.append(tag.calls)
    return list(log)
def numbers():
    for i in range(20):
        yield i
def main():
    text, raw, buffer = open(probe.__file__), open(probe.__file__, "rb"), io.BytesIO()
    lines = io.TextIOWrapper(io.BytesIO(b"".join(b"line %d\\n" % n for n in range(20))))
    both = io.TextIOWrapper(io.BytesIO(b"first"))
    Counter.stream = numbers()
    counter = Counter()
    for step in range(8):
        learn()
        Counter.names.append(str(step))
        if step == 2:
            Counter.late = step
        buffer.write(bytes([step]))
        probe.trace(step, counter.bump(), Counter.total, Counter.names, Counter.Inner.depth, getattr(Counter, "late", None))
        probe.trace(tag(step), next(Counter.stream), text.readline(), list(raw.read(step + 3)), list(buffer.getvalue()))
        if step % 2:
            probe.trace(lines.readline())
        both.write("\\u00e9")
        both.flush()
        probe.trace(list(both.buffer.getvalue()))
main()
""",
    "lbfgs_closure": """
def main():
    weight = torch.nn.Parameter(torch.zeros(2))
    lbfgs = torch.optim.SGD([weight], lr=0.0)
    scale = 0
    def closure():
        nonlocal scale
        scale += 1
        return ((weight + scale) ** 2).sum()
    for step in range(6):
        loss = lbfgs.step(closure)
        probe.trace(step, float(loss), scale)
main()
""",
    "containers_of_every_make": """
import weakref
from torch.nn.utils.rnn import pack_sequence
class AttrDict(dict):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self.__dict__ = self
class Aliased(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
class Tree(collections.defaultdict):
    def __init__(self):
        super().__init__(Tree)
    def __getattr__(self, name):
        return self[name]
    def __setattr__(self, name, value):
        self[name] = value
class Vec(tuple):
    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))
@dataclasses.dataclass(frozen=True)
class State:
    x: int
class Node:
    def __init__(self, v):
        self.v = v
def scaled(x, k):
    return x * k
tree, alias = Tree(), Aliased(n=0)
def main():
    todo, big, small = set(range(40)), set(range(100000, 102000)), frozenset([3, 1, 300, 7])
    nodes, seen, by_id, step = [Node(i) for i in range(4)], {}, {}, 0
    best = weakref.ref(nodes[0])
    for epoch in range(3):
        both, vec, partial = AttrDict(n=0), Vec(epoch, 1), functools.partial(scaled, k=epoch)
        stats = collections.defaultdict(lambda: [0, 0])
        buffer = bytearray(8)
        view = memoryview(buffer)
        local = Aliased(n=epoch)
        z = torch.ones(3, dtype=torch.complex64) * (epoch + 1j)
        conjugate, negative = z.conj(), z.conj().imag
        small = frozenset([*small, 17 * epoch])
        for i in range(5):
            step += 1
            top = torch.randn(4).topk(2)
            packed = pack_sequence([torch.full((3,), float(step)), torch.zeros(2)])
            learn()
            both.n += 1
            stats[step % 3][0] += step
            view[i] = step
            alias.n += 1
            local.n += 1
            tree.train.loss = step
            seen[State(step)] = step
            taken = todo.pop()
            if step % 3 == 0:
                todo.add(taken - 1)
                best = weakref.ref(nodes[step % 4])
            nodes[step % 4].v = step
            big -= set(random.sample(list(big), 60))
            for p in model.parameters():
                by_id[id(p)] = by_id.get(id(p), 0) + step
            probe.trace(step, both.n, both["n"], list(vec), vec[0], partial(10), sorted(stats.items()), list(buffer), list(view))
            probe.trace(repr(z.tolist()), repr(conjugate.tolist()), negative.tolist(), top.values.tolist(), packed.data.tolist())
            probe.trace(taken, list(todo), list(big)[:9], list(small), best().v, alias.n, local.n, sorted(tree), tree["train"]["loss"])
            probe.trace([k.x for k in seen], State(2) in seen, len(by_id), sorted(by_id.values()), type(vec).__name__)
main()
""",
    "what_hangs_on_other_objects": """
import array
class Tracked:
    def __init__(self):
        self.values = {}
    def __set_name__(self, owner, name):
        self.name = name
    def __get__(self, obj, kind=None):
        return self.values.get(self.name, 0)
    def __set__(self, obj, value):
        self.values[self.name] = value
class Trainer:
    total = Tracked()
class Easy(Dataset):
    scale = 1
    def __getitem__(self, i):
        return i * self.scale
class Hard(Dataset):
    __slots__ = ("scale", "seen")
    def __init__(self, scale):
        self.scale, self.seen = scale, []
    def __getitem__(self, i):
        self.seen.append(i)
        return i * self.scale
def easy():
    yield from range(100)
def hard():
    for i in range(100):
        yield -i
def main():
    trainer, data, numbers, stream = Trainer(), Easy(), array.array("d", [0.0]), easy()
    weight = model[0].weight.detach().numpy()
    for p in model.parameters():
        p.average = p.detach().clone()
    for step in range(9):
        if step == 2:
            data, stream = Hard(10), hard()
        learn()
        trainer.total += step
        numbers.append(step)
        for p in model.parameters():
            p.average.mul_(0.5).add_(step)
        with torch.no_grad():
            model[0].weight += 0  # it is the optimizer's
        probe.trace(step, trainer.total, numbers.tolist(), [p.average.tolist() for p in model.parameters()], next(stream))
        probe.trace(type(data).__name__, data[step], getattr(data, "seen", None), weight.tolist() == model[0].weight.tolist())
main()
""",
    "arrays_of_objects_and_of_records": """
class SumTree:
    def __init__(self, n):
        self.sums, self.data, self.at = np.zeros(2 * n), np.zeros(n, dtype=object), 0
    def add(self, item):
        self.data[self.at % len(self.data)] = item
        self.sums[self.at % len(self.sums)] += self.at
        self.at += 1
def main():
    tree, board = SumTree(4), np.empty((2, 3), dtype=object, order="F")
    rows = np.zeros(4, dtype=[("step", "<i8"), ("loss", "<f4", 2), ("name", "S3")])
    steps = rows["step"]
    later, shared = None, []
    board[0, 1] = shared
    for step in range(9):
        loss = learn()
        tree.add((step, torch.full((2,), float(step)), {"a": step}))
        board[step % 2, step % 3] = shared if step % 4 == 0 else tree.data[step % 4]
        rows[step % 4] = (step, (step, loss.item()), b"abc"[: step % 4])
        shared.append(step)
        if step == 1:
            later = np.array([shared, None, step], dtype=object)
        probe.trace(step, tree.sums.tolist(), [str(item) for item in tree.data], str(board.tolist()), board.flags.f_contiguous)
        probe.trace(str(rows.tolist()), steps.tolist(), None if later is None else (later.tolist(), later[0] is shared))
main()
""",
    "frozen_modules_that_are_cast": """
def main():
    teacher, held = torch.nn.Linear(3, 3).requires_grad_(False), []
    held.append(teacher.weight)
    for step in range(9):
        if step == 2:
            teacher.to(torch.bfloat16)
        learn()
        with torch.no_grad():
            teacher.weight.add_(0.5)
        probe.trace(step, str(teacher.weight.dtype), teacher.weight.tolist(), held[0] is teacher.weight)
main()
""",
    "samplers_and_streams_that_change": """
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler
class Shuffled(Sampler):
    def __init__(self, n):
        self.order, self.numbers = list(range(n)), np.arange(n)
    def __len__(self):
        return len(self.order)
    def __iter__(self):
        np.random.shuffle(self.numbers)
        random.shuffle(self.order)
        yield from [self.order[i] for i in self.numbers.tolist()]
class Stream(IterableDataset):
    def __init__(self):
        self.held, self.rng = [], random.Random(3)
    def __iter__(self):
        for i in range(12):
            self.held.append(i)
            if len(self.held) > 5:
                yield self.held.pop(self.rng.randrange(len(self.held)))
class Reordered(Dataset):
    def __init__(self):
        self.order = list(range(12))
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return self.order[i]
def main():
    weighted = WeightedRandomSampler(torch.ones(100), 8)
    data = Reordered()
    shuffled, stream = DataLoader(range(12), 3, sampler=Shuffled(12)), DataLoader(Stream(), 2)
    drawn, read = DataLoader(range(100), 2, sampler=weighted), DataLoader(data, 4, shuffle=True, num_workers=1)
    for epoch in range(3):
        random.shuffle(data.order)
        for a, b, c, d in zip(shuffled, stream, drawn, read):
            learn()
            probe.trace(epoch, a.tolist(), b.tolist(), c.tolist(), d.tolist())
        weighted.weights = weighted.weights * torch.arange(100) % 7 + 0.1
main()
""",
    "progress_bars": """
from tqdm import tqdm, trange
from tqdm.auto import tqdm as automatic
def main():
    loader = DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1).expand(8, 3)), 3, shuffle=True)
    for epoch in trange(3, mininterval=0):
        bar = tqdm(loader, mininterval=0)
        for i, (x,) in enumerate(bar):
            learn(x)
            bar.set_postfix(epoch=epoch)
            probe.trace(epoch, i, x.tolist(), bar.n >= i)
    for i in automatic(range(3)):
        learn()
        probe.trace(i)
main()
""",
}


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("name", SCRIPTS)
def test_values_come_back(run_script: Run, name: str, at: int) -> None:
    if name == "progress_bars":
        pytest.importorskip("tqdm")
    result = run_script(HEADER + SCRIPTS[name], at)
    result.check()
    assert result.captured["uncaptured"] == []


def test_numbers_of_this_process_keep_their_live_values(run_script: Run) -> None:
    script = """
class Writer:
    def __init__(self):
        self.descriptor = os.open(os.devnull, os.O_WRONLY)
def main():
    writer, pair, own, address, moved = Writer(), os.pipe(), os.getpid(), id(model), 0
    local = os.dup(writer.descriptor)
    pid = os.getpid()
    moved = local
    for step in range(6):
        learn()
        moved += 1
        os.fstat(writer.descriptor), os.fstat(local), os.fstat(pair[0]), os.fstat(pair[1])
        probe.trace(step, pid == os.getpid(), address == id(model), moved - local)
    del own
main()
"""
    run_script(HEADER + script, 4).check()


def test_a_counter_that_has_the_number_of_a_descriptor_is_a_counter(run_script: Run) -> None:
    """The place is captured when `step` is, as at the first point, a descriptor's number, and restored where it is none."""
    script = """
def main():
    held = [os.open(os.devnull, os.O_WRONLY) for _ in range(4)]
    begin = held[2] if probe.mode != "restore" else 0
    for start in (begin, held[2] - 2):
        for step in range(start, held[2] + 3):
            learn()
            probe.trace(step, start - held[2])
main()
"""
    run_script(HEADER + script, 6).check()


def test_what_does_not_fit_is_named_with_the_setting(run_script: Run) -> None:
    script = """
def main():
    ema = torch.nn.Linear(300, 300)
    text = "x" * 200_000
    for step in range(5):
        learn()
        with torch.no_grad():
            ema.weight.add_(1)
        probe.trace(step, len(text))
main()
"""
    result = run_script(HEADER + script, 3, limit=100_000)
    said = {place: reason for place, _, reason in result.captured["uncaptured"]}
    assert "REFT_RESUME_FRAME_BYTES" in said["main:text"]
    assert "reft.register" in said["main:ema"]
    assert result.restored["lines"] == result.expected["lines"]


def test_what_only_a_later_object_holds_comes_back(run_script: Run) -> None:
    script = """
import configparser, logging, re
def main():
    logger, loader = logging.getLogger("x"), DataLoader(range(4))
    logger.block = torch.autograd.profiler.record_function("x")
    words = re.compile("a", re.I)
    for step in range(6):
        learn()
        if step == 1:
            loader.config, words = configparser.ConfigParser(), re.compile(b"b+")
        if step > 0:
            loader.config.read_dict({"a": {f"step{step % 3}": str(step)}})
        logger.block.n = getattr(logger.block, "n", 0) + step
        probe.trace(step, logger.block.n, str(words), step < 1 or dict(loader.config["a"]))
main()
"""
    result = run_script(HEADER + script, 4)
    result.check()
    assert result.captured["uncaptured"] == []


def test_a_module_that_hangs_on_an_event_comes_back(run_script: Run) -> None:
    script = """
event = threading.Event()
event.teacher = torch.nn.Linear(2, 1)
def main():
    for step in range(6):
        learn()
        with torch.no_grad():
            event.teacher.weight.add_(step)
        probe.trace(step, event.teacher.weight.tolist())
main()
"""
    run_script(HEADER + script, 4).check()


def test_what_is_another_object_by_now_and_cannot_be_copied_is_named(run_script: Run) -> None:
    script = """
import re
def main():
    match, noise = re.match("a", "a"), None
    for step in range(5):
        match = re.match("b*", "b" * step)
        learn()
        if step == 1:
            noise = torch.futures.Future()
        probe.trace(step, match is None, noise is None or step > 2)
main()
"""
    result = run_script(HEADER + script, 4)
    assert {place for place, _, _ in result.captured["uncaptured"]} == {"main:match", "main:noise"}
    assert result.restored["lines"] == result.expected["lines"]


@pytest.mark.parametrize("kind", ["list", "object array", "text"])
def test_a_container_without_room_leaves_it_to_what_comes_after(run_script: Run, kind: str) -> None:
    """A replay buffer took the room of the loop's position, which was lost without a word."""
    items = {
        "list": "[(i, [i]) for i in range(30_000)]",
        "object array": "np.array([(i, [i]) for i in range(60_000)] + [None], dtype=object)",
        "text": "['x' * 100 for _ in range(30_000)]",
    }
    script = f"""
class Memory:
    def __init__(self):
        self.data, self.at = {items[kind]}, 0
def main():
    memory, total = Memory(), torch.zeros(3)
    for step in range(6):
        learn()
        memory.data[step] = (step, [step])
        memory.at, total = memory.at + 1, total + step
        probe.trace(step, memory.at, total.tolist())
main()
"""
    result = run_script(HEADER + script, 4)
    assert [place for place, _, _ in result.captured["uncaptured"]] == ["main:memory.data"]
    assert result.restored["lines"] == result.expected["lines"]


def test_a_tensor_that_was_replaced_is_not_the_one_in_its_place(run_script: Run) -> None:
    script = """
def main():
    teacher = torch.nn.Linear(3, 2).requires_grad_(False)
    old = teacher.bias
    for step in range(6):
        learn()
        if step == 2:
            teacher.bias = torch.nn.Parameter(old.to(torch.bfloat16) + 1, False)
        probe.trace(step, str(old.dtype), old.tolist())
main()
"""
    result = run_script(HEADER + script, 4)
    assert result.restored["problems"]
    assert result.restored["lines"] == result.expected["lines"]


def test_arrays_of_objects_outside_of_frames_are_seen_to_change(run_script: Run) -> None:
    script = """
class Memory:
    data, grid = np.zeros(1000, dtype=object), np.zeros((300, 40), order="F")
def main():
    late = None
    for step in range(6):
        learn()
        Memory.data[step], Memory.grid[7, step] = (step,), step
        if step == 1:
            late = np.empty(2, dtype=object)
            late[0] = threading.Lock()
        probe.trace(step, Memory.data[:6].tolist(), Memory.grid[7, :6].tolist(), late is late)
main()
"""
    result = run_script(HEADER + script, 4)
    assert [place for place, _, _ in result.captured["uncaptured"]] == ["main:late[0]"]
    assert [place for place, _, _ in result.restored["problems"]] == ["main:late"]
    assert result.restored["lines"] == result.expected["lines"]


def test_a_record_in_the_memory_of_an_array_is_named(run_script: Run) -> None:
    script = """
def main():
    rows = np.zeros(4, np.dtype((np.record, [("step", "<i8"), ("loss", "<f4")])))
    first, table = rows[0], np.empty((2, 2), dtype=object)
    column = table[:, 0]
    for step in range(6):
        learn()
        rows[0] = (step, step)
        column[1] = step
        probe.trace(step, str(rows.tolist()), str(first), table.tolist())
main()
"""
    result = run_script(HEADER + script, 4)
    assert {place for place, _, _ in result.captured["uncaptured"]} == {
        "main:rows",
        "main:first",
        "main:column",
    }


def test_a_mapped_file_that_the_loop_writes_is_named(run_script: Run) -> None:
    script = """
def main():
    name = tempfile.mkdtemp() + "/rows"
    read = np.memmap(name, np.float32, "w+", shape=(70_000,))
    rows = np.memmap(name + "2", np.float32, "w+", shape=(70_000,))
    Held.rows, Held.grid = rows, np.memmap(name + "3", np.float32, "w+", shape=(30, 40), order="F")
    short = np.memmap(name + "4", np.float32, "w+", shape=(70_000,))
    os.truncate(name + "4", 0)
    for step in range(6):
        learn()
        rows[60_000 + step] = Held.grid[7, step] = step
        window = read[step : step + 2]
        probe.trace(step, window.tolist(), len(short))
class Held:
    pass
main()
"""
    result = run_script(HEADER + script, 4)
    named = {place for place, _, why in result.captured["uncaptured"] if "has written" in why}
    assert named == {"main:rows", "__main__:Held.grid"}


def test_what_only_hooks_hold_comes_back(run_script: Run) -> None:
    script = """
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
class Watch:
    def __init__(self):
        self.seen = []
    def __call__(self, module, inputs, output):
        self.seen.append(len(self.seen))
        return output * len(self.seen)
def add(scale):
    calls = 0
    def hook(*arguments):
        nonlocal calls
        calls += scale
        probe.trace(scale, calls)
    return hook
def main():
    sgd = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    sgd.register_step_pre_hook(add(2))
    sgd.register_step_post_hook(functools.partial(add(3), "named"))
    model[0].register_forward_hook(Watch())
    model[0].register_full_backward_hook(add(5))
    model[0].weight.register_hook(add(7))
    model[0].bias.register_post_accumulate_grad_hook(add(11))
    model._comm_hooks = [(add(13), PowerSGDState(None))]  # as DistributedDataParallel keeps them
    for step in range(6):
        sgd.step()
        loss = learn()
        hook, state = model._comm_hooks[0]
        hook()
        state.iter += 1
        state.error_dict[0] = torch.full((2,), float(step))
        probe.trace(step, loss.item(), state.iter, state.error_dict[0].tolist())
main()
"""
    run_script(HEADER + script, 3).check()


def test_hooks_that_come_and_go_are_named(run_script: Run) -> None:
    script = """
def halve(grad):
    return grad / 2
def main():
    early = model[0].register_forward_hook(lambda *_: None)
    for step in range(6):
        if step == 2:
            early.remove()
            model[2].weight.register_hook(halve)
        learn()
main()
"""
    problems = run_script(HEADER.replace("Dropout(0.5)", "ReLU(), torch.nn.Linear(3, 3)") + script, 4).restored[
        "problems"
    ]
    assert {(place.rpartition(".")[2], why) for place, _, why in problems} == {
        ("0<forward_hooks 0>", "removed after the first step"),
        ("weight<backward_hooks 0>", "registered after the first step"),
    }


def test_what_is_open_in_the_discarded_iteration_ends_with_it(run_script: Run) -> None:
    script = """
import contextlib
@contextlib.contextmanager
def seeded(seed):
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
def main():
    for step in range(9):
        with contextlib.ExitStack() as stack:
            if step % 4 == 0:
                stack.enter_context(seeded(step))
            learn()
        probe.trace(step, torch.rand(1).item())
main()
"""
    run_script(HEADER + script, 3).check()


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (
            "import re\nfor t in re.finditer('.', 'abcdefgh'):\n    learn()\n    probe.trace(t.group())",
            "iterator of unknown kind",
        ),
        ("for i, v in np.ndenumerate(np.ones((2, 4))):\n    learn()\n    probe.trace(i)", "iterator of unknown kind"),
    ],
)
def test_loops_over_iterators_of_other_kinds_are_refused(run_script: Run, loop: str, why: str) -> None:
    result = run_script(HEADER + loop, 3)
    assert not result.captured["exact"]
    assert why in result.restored["mismatch"]


def test_generators_of_one_function_that_take_turns_are_told_apart(run_script: Run) -> None:
    """The restarted script stands in the first one; the loop was in another."""
    script = """
def task(name, n):
    for i in range(n):
        learn()
        yield name, i
def main():
    tasks = collections.deque([task("a", 4), task("b", 3), task("c", 5)])
    while tasks:
        one = tasks.popleft()
        for found in one:
            probe.trace(*found)
            tasks.append(one)
            break
main()
"""
    same, other = run_script(HEADER + script, 4), run_script(HEADER + script, 5)
    same.check()
    assert "another generator" in other.restored["mismatch"]


def test_other_asyncio_tasks_are_a_reason_to_refuse(run_script: Run) -> None:
    script = """
import asyncio
async def task(name):
    for i in range(3):
        learn()
        await asyncio.sleep(0)
        probe.trace(name, i)
async def main():
    await asyncio.gather(task("a"), task("b"))
asyncio.run(main())
"""
    result = run_script(HEADER + script, 4)
    assert not result.captured["exact"]
    assert "other asyncio tasks" in result.restored["mismatch"]


def test_queues_and_what_only_moves_forward_are_named(run_script: Run) -> None:
    script = """
import queue
def main():
    filled, empty, (read, write) = queue.Queue(), queue.SimpleQueue(), os.pipe()
    pipe = os.fdopen(read)
    for step in range(5):
        learn()
        filled.put(step)
        probe.trace(step, empty.empty(), pipe.closed, filled.qsize() > 0)
main()
"""
    result = run_script(HEADER + script, 3)
    said = {place: reason for place, _, reason in result.captured["uncaptured"]}
    assert set(said) == {"main:filled", "main:pipe"}
    assert "items of a queue" in said["main:filled"] and "not seekable" in said["main:pipe"]
    assert result.restored["lines"] == result.expected["lines"]


def test_a_file_that_is_read_and_written_is_named_unless_it_is_at_its_end(run_script: Run) -> None:
    script = """
def main():
    log, both = open(probe.__file__ + ".log", "w+"), open(probe.__file__ + ".both", "w+")
    both.write("12345678")
    both.seek(0)
    for step in range(5):
        learn()
        log.write("line")
        probe.trace(step, both.read(1), log.closed)
main()
"""
    result = run_script(HEADER + script, 3)
    said = {place: reason for place, _, reason in result.captured["uncaptured"]}
    assert set(said) == {"main:both"} and "read and written" in said["main:both"]


def test_a_loop_over_the_lines_of_a_file_is_refused(run_script: Run) -> None:
    script = """
def main():
    for number, line in enumerate(open(probe.__file__)):
        learn()
        probe.trace(number, line)
        if number == 6:
            break
main()
"""
    result = run_script(HEADER + script, 3)
    assert not result.captured["exact"]
    assert "file that a `for` loop reads" in result.restored["mismatch"]


def test_a_dict_whose_methods_fail_is_read_without_them(run_script: Run) -> None:
    script = """
class Hostile(dict):
    def fails(self, *arguments):
        raise RuntimeError("no")
    items = __len__ = __contains__ = __iter__ = keys = fails
def main():
    hostile = Hostile()
    for step in range(6):
        learn()
        dict.__setitem__(hostile, "step", step)
        probe.trace(step, dict.__getitem__(hostile, "step"))
main()
"""
    run_script(HEADER + script, 3).check()


def test_an_object_that_fails_when_looked_at_loses_only_itself(run_script: Run) -> None:
    script = """
class Hostile:
    def __getattribute__(self, name):
        raise RuntimeError("no")
def main():
    hostile, total = Hostile(), 0
    for step in range(5):
        learn()
        total += step
        probe.trace(step, total, type(hostile).__name__)
main()
"""
    result = run_script(HEADER + script, 3)
    assert [place for place, _, reason in result.captured["uncaptured"]] == ["main:hostile"]
    assert result.restored["lines"] == result.expected["lines"]


def test_an_object_made_later_comes_back_whole_or_not_at_all(run_script: Run) -> None:
    script = """
class Meter:
    def __init__(self):
        self.total, self.lock = 0, threading.Lock()
class Table:
    pass
def main():
    table = Table()
    table.meters, table.plain = {}, {}
    for step in range(6):
        learn()
        if step > 0:
            table.meters.setdefault("late", Meter()).total += 1
            table.plain.setdefault("late", [0])[0] += 1
        meter = table.meters.get("late")
        probe.trace(step, meter is None or hasattr(meter, "lock"), table.plain.get("late"), [] if meter is None else meter.total)
main()
"""
    result = run_script(HEADER + script, 4)
    named = [place for place, _, reason in result.restored["problems"] if "made after the first step" in reason]
    assert any(place.startswith("main:table.meters") for place in named), result.restored["problems"]
    expected = result.expected["lines"]
    restored = result.restored["lines"]
    assert [line[:3] for line in restored] == [line[:3] for line in expected]
    # The meter began anew: nothing that is half there.
    assert [line[3] for line in restored] == [step - 2 for step, *_ in restored]


LATER = """
def main():
    for step in range(6):
        if step:
            probe.trace(step, type(hook).__name__)
        learn()
        if step == 0:
            hook = {}
main()
"""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("(lambda factor: lambda x: x * factor)(3)", "function made after the first step"),
        ("[(x for x in range(3))]", "generator made after the first step"),
        ("open(probe.__file__)", "was opened after the first step"),
    ],
)
def test_a_loop_whose_variable_would_have_no_value_is_refused(
    run_script: Run, value: str, reason: str
) -> None:
    result = run_script(HEADER + LATER.format(value), 3)
    named = [place for place, _, why in result.captured["uncaptured"] if "would refuse" in why]
    assert named == ["main:hook"]
    assert "main:hook did not exist yet and cannot be restored" in result.restored["mismatch"]
    assert reason in result.restored["mismatch"]


UNREAD = {
    "assigned_before_it_is_read": """
        probe.trace(step)
        hook = lambda: step
""",
    "code_with_an_attribute_called_eval": """
        probe.trace(step, Model().eval())
        hook = lambda: step
""",
    "a_cell": """
        def down(n):
            return n and down(n - 1)
        probe.trace(step, down(3))
""",
    "a_variable_of_a_comprehension": """
        with open(probe.__file__) as hook:
            lines = [hook.readline() for _ in range(2)]
        probe.trace(step, lines)
""",
    "a_global_that_a_function_names": """
        probe.trace(step, reads() if step == 9 else 0)
        globals()["late"] = lambda: step
""",
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_variable_that_the_loop_does_not_read_needs_no_value(run_script: Run, name: str) -> None:
    script = """
class Model:
    def eval(self):
        return 1
def reads():
    return late
def main():
    for step in range(5):
        learn()
"""
    result = run_script(HEADER + script + UNREAD[name] + "main()\n", 3)
    assert not [why for _, _, why in result.captured["uncaptured"] if "would refuse" in why]
    assert result.restored["lines"] == result.expected["lines"]


def test_renamed_local_and_deeper_change_are_refused(run_script: Run) -> None:
    script = (
        HEADER
        + """
def inner(x):
    return learn() * x
def main():
    for step in range(5):
        value = inner(step)
        probe.trace(step, float(value))
main()
"""
    )
    renamed = run_script(script, 3, restore_source=script.replace("value", "result"))
    assert "main: the code has changed" in renamed.restored["mismatch"]
    deeper = run_script(script, 3, restore_source=script.replace("learn() * x", "learn() * x * 2"))
    assert "inner: the code has changed" in deeper.restored["mismatch"]
