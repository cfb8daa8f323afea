"""Parts of a training script that every script has: model, optimizer, schedule, data, loop.

In the texts, § stands for the owner of the loop's variables: "self." in a trainer class, else
nothing.
"""

from __future__ import annotations

IMPORTS = '''
import abc, argparse, array, bisect, calendar, codecs, collections, concurrent.futures, configparser, contextlib
import contextvars, copy, csv, ctypes, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq
import io, ipaddress, itertools, logging, math, mmap, multiprocessing, os, pathlib, queue, random, re, sqlite3
import statistics, string, struct, sys, tempfile, threading, time, types, typing, uuid, weakref, zlib
import xml.etree.ElementTree as ET
import numpy as np
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset
torch.set_num_threads(1)

'''

# All that a value holds, as text.
DIGEST = '''
def flat(value, depth=0):
    """All that a value holds, as text."""
    if hasattr(value, "to_local"):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.to_dense()
        return f"{value.dtype}{tuple(value.shape)}{[x.hex() if isinstance(x, float) else x for x in value.detach().double().reshape(-1).tolist()]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tolist()}"
    if isinstance(value, (float, np.floating)):
        return float(value).hex()
    if isinstance(value, dict):
        return "{" + ",".join(f"{flat(k, depth + 1)}:{flat(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "set" + str(sorted(flat(v, depth + 1) for v in value))
    if isinstance(value, (list, tuple, collections.deque, collections.UserList)):
        return type(value).__name__ + "[" + ",".join(flat(v, depth + 1) for v in value) + "]"
    if isinstance(value, (type, types.FunctionType)):
        return value.__name__
    if type(value).__module__ == "__main__" and depth < 8:
        inside = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            names = cls.__dict__.get("__slots__", ())
            for name in [names] if isinstance(names, str) else names:
                if hasattr(value, name) and not name.startswith("__"):
                    inside[name] = getattr(value, name)
        return type(value).__name__ + flat({k: v for k, v in inside.items() if not k.startswith("__")}, depth + 1)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

'''

PRELUDE = (
    IMPORTS
    + DIGEST
    + '''
def short(value):
    return hashlib.sha256(flat(value).encode()).hexdigest()[:10]


def say(step, loss, seen):
    print(f"r{dist.get_rank()} step {step} {float(loss).hex()} {short(seen)}", flush=True)


def final(**parts):
    words = " ".join(f"{name}={short(value)}" for name, value in parts.items())
    print(f"r{dist.get_rank()} final {words}", flush=True)


dist.init_process_group("reft" if not os.environ.get("REFT_DISABLE") else "gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
random.seed(5 + RANK)
np.random.seed(5 + RANK)
torch.manual_seed(5)
CLOCK = [0]
'''
)

MODELS = {
    "mlp": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        FORWARD
        return self.last(torch.tanh(self.first(x)))
""",
    "batch_norm": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    def forward(self, x):
        FORWARD
        return self.last(torch.relu(self.norm(self.first(x))))
""",
    "dropout": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)
    def forward(self, x):
        FORWARD
        return self.last(self.drop(self.first(x)))
""",
    "spectral": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))
    def forward(self, x):
        FORWARD
        return self.last(torch.tanh(self.first(x)))
""",
    "tied": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
    def forward(self, x):
        FORWARD
        self.calls += 1
        return self.last(torch.tanh(self.second(self.first(x)))) * (1 + 0.01 * self.calls)
""",
    "counting": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.calls, self.recent, self.temperature = 0, collections.deque(maxlen=3), 1.0
    def forward(self, x):
        FORWARD
        self.calls += 1
        self.recent.append(x.detach().mean())
        self.temperature *= 0.97
        return self.last(torch.tanh(self.first(x))) / self.temperature + sum(self.recent)
    def get_extra_state(self):
        return {"calls": self.calls}
    def set_extra_state(self, state):
        self.calls = state["calls"]
""",
    "lstm": """
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 2)
        self.hidden = None
    def forward(self, x):
        FORWARD
        out, hidden = self.cell(self.first(x)[None], self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.last(out[0])
""",
}

WRAPS = {
    "ddp": "§model = DDP(§core)",
    "ddp_static": "§model = DDP(§core, gradient_as_bucket_view=True, static_graph=True)",
    "manual": "§model = §core",  # gradients are averaged by hand
    "fsdp": "from torch.distributed.fsdp import fully_shard\n§model = fully_shard(§core)",
}

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(§core.parameters(), lr=0.05, momentum=0.9, nesterov=True)",
    "sgd_plain": "torch.optim.SGD(§core.parameters(), lr=0.1)",
    "adam": "torch.optim.Adam(§core.parameters(), lr=0.02, amsgrad=True)",
    "adamw": "torch.optim.AdamW([{'params': [p for p in §core.parameters() if p.ndim > 1]}, {'params': [p for p in §core.parameters() if p.ndim < 2], 'weight_decay': 0.0}], lr=0.02)",
    "adamw_foreach": "torch.optim.AdamW(§core.parameters(), lr=0.02, foreach=True)",
    "adamw_fused": "torch.optim.AdamW(§core.parameters(), lr=0.02, fused=True)",
    "adam_tensor_lr": "torch.optim.Adam(§core.parameters(), lr=torch.tensor(0.02))",
    "rmsprop": "torch.optim.RMSprop(§core.parameters(), lr=0.01, momentum=0.5, centered=True)",
    "adagrad": "torch.optim.Adagrad(§core.parameters(), lr=0.05)",
    "adadelta": "torch.optim.Adadelta(§core.parameters())",
    "nadam": "torch.optim.NAdam(§core.parameters(), lr=0.02)",
    "radam": "torch.optim.RAdam(§core.parameters(), lr=0.02)",
    "rprop": "torch.optim.Rprop(§core.parameters(), lr=0.02)",
    "asgd": "torch.optim.ASGD(§core.parameters(), lr=0.02, t0=2)",
    "adamax": "torch.optim.Adamax(§core.parameters(), lr=0.02)",
    "own": "OwnOptimizer(§core.parameters(), 0.05)",
}
OWN_OPTIMIZER = '''
class OwnOptimizer(torch.optim.Optimizer):
    """Lookahead over signs, with counters of its own."""
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.turn, self.history = 0, []
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
    @torch.no_grad()
    def step(self, closure=None):
        self.turn += 1
        total = 0.0
        for group, slow in zip(self.param_groups, self.slow):
            for p, s in zip(group["params"], slow):
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["m"] = p.grad.sign() if "m" not in state else state["m"] * 0.9 + p.grad * 0.1
                p.sub_(state["m"] * group["lr"] / state["n"] ** 0.5)
                total += float(state["m"].norm())
                if self.turn % 3 == 0:
                    s.lerp_(p, 0.5)
                    p.copy_(s)
        self.history.append(total)
        self.history = self.history[-4:]
'''

SCHEDULERS = {
    "step": "torch.optim.lr_scheduler.StepLR(§optimizer, 3, 0.8)",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(§optimizer, 7)",
    "warm_restarts": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(§optimizer, 3, 2)",
    "one_cycle": "torch.optim.lr_scheduler.OneCycleLR(§optimizer, 0.1, total_steps=60, cycle_momentum=False)",
    "lambda": "torch.optim.lr_scheduler.LambdaLR(§optimizer, lambda e: 0.95 ** e)",
    "sequential": "torch.optim.lr_scheduler.SequentialLR(§optimizer, [torch.optim.lr_scheduler.LinearLR(§optimizer, 0.3, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(§optimizer, 0.9)], [4])",
    "chained": "torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ConstantLR(§optimizer, 0.5, 3), torch.optim.lr_scheduler.ExponentialLR(§optimizer, 0.95)])",
    "cyclic": "torch.optim.lr_scheduler.CyclicLR(§optimizer, 0.01, 0.06, step_size_up=3, cycle_momentum=False)",
    "polynomial": "torch.optim.lr_scheduler.PolynomialLR(§optimizer, 20, 2.0)",
    "multiplicative": "torch.optim.lr_scheduler.MultiplicativeLR(§optimizer, lambda e: 0.9 + 0.01 * (e % 3))",
    "own": "OwnSchedule(§optimizer)",
}
OWN_SCHEDULE = """
class OwnSchedule:
    def __init__(self, optimizer):
        self.optimizer, self.base, self.n = optimizer, [float(g["lr"]) for g in optimizer.param_groups], 0
    def step(self):
        self.n += 1
        for group, base in zip(self.optimizer.param_groups, self.base):
            group["lr"] = base * (1 + self.n % 4) / 2
"""

DATA = """
class Items(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(11)
        self.x, self.y = torch.randn(n, 4, generator=g), torch.randn(n, 2, generator=g)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        x = self.x[i]
        ITEM
        return i, x, self.y[i]
"""
# What the loader is, and what is said at the start of each epoch.
LOADERS = {
    "shuffle": ("DataLoader(§data, 4, shuffle=True, generator=torch.Generator().manual_seed(3 + RANK)COLLATE)", ""),
    "shuffle_global": ("DataLoader(§data, 4, shuffle=TrueCOLLATE)", ""),
    "distributed": (
        "DataLoader(§data, 4, sampler=DistributedSampler(§data, WORLD, RANK, seed=3)COLLATE)",
        "§loader.sampler.set_epoch(epoch)",
    ),
    "sequential": ("DataLoader(§data, 4COLLATE)", ""),
    "weighted": (
        "DataLoader(§data, 4, sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1., len(§data) + 1), 16)COLLATE)",
        "",
    ),
    "own_sampler": ("DataLoader(§data, 4, sampler=OwnSampler(len(§data))COLLATE)", ""),
    "own_batch_sampler": ("DataLoader(§data, batch_sampler=OwnBatches(len(§data))COLLATE)", "§loader.batch_sampler.epoch = epoch"),
    "plain_batch_sampler": ("DataLoader(§data, batch_sampler=PlainBatches(len(§data))COLLATE)", ""),
    "curriculum": ("DataLoader(§data, 4, sampler=Curriculum(len(§data))COLLATE)", "§loader.sampler.grow()"),
    "iterable": ("DataLoader(Stream(§data), 4COLLATE)", ""),
    "iterable_buffered": ("DataLoader(Buffered(§data), 4COLLATE)", ""),
    "workers": ("DataLoader(§data, 4, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(3 + RANK)COLLATE)", ""),
    "persistent": (
        "DataLoader(§data, 4, shuffle=True, num_workers=2, persistent_workers=True, generator=torch.Generator().manual_seed(3 + RANK)COLLATE)",
        "",
    ),
    "iterable_workers": ("DataLoader(Stream(§data), 4, num_workers=1COLLATE)", ""),
    "list": ("[(torch.arange(j, j + 4), §data.x[j:j + 4], §data.y[j:j + 4]) for j in range(RANK, 16, 4)]", "random.shuffle(§loader)"),
    "own_loader": ("OwnLoader(§data)", ""),
    "generator_function": ("Again(lambda: endless(§data))", ""),
}
SAMPLERS = """
class OwnSampler(Sampler):
    def __init__(self, n):
        self.n, self.rng, self.drawn = n, random.Random(3 + RANK), 0
    def __len__(self):
        return 16
    def __iter__(self):
        for _ in range(16):
            self.drawn += 1
            yield self.rng.randrange(self.n)
class OwnBatches:
    epoch = 0
    def __init__(self, n):
        self.n, self.size = n, 4
    def __len__(self):
        return 4
    def __iter__(self):
        order = np.random.default_rng(self.epoch + RANK).permutation(self.n).tolist()
        for at in range(0, 16, self.size):
            yield order[at:at + self.size]
class PlainBatches:
    def __init__(self, n):
        self.left, self.n, self.rng = [], n, np.random.RandomState(3 + RANK)
    def __iter__(self):
        for _ in range(4):
            if len(self.left) < 4:
                self.left = self.left + self.rng.permutation(self.n).tolist()
            batch, self.left = self.left[:4], self.left[4:]
            yield batch
class Curriculum:
    def __init__(self, n):
        self.n, self.stage, self.seen = n, 1, collections.Counter()
    def grow(self):
        self.stage += 1
    def __len__(self):
        return 16
    def __iter__(self):
        for j in range(16):
            item = (j * 7 + self.stage * 5 + RANK) % min(self.n, 8 * self.stage)
            self.seen[item] += 1
            yield (item + self.seen[item]) % self.n
class Stream(IterableDataset):
    def __init__(self, data):
        self.data, self.epoch = data, 0
    def __iter__(self):
        self.epoch += 1
        order = list(range(len(self.data)))
        random.Random(self.epoch + RANK).shuffle(order)
        for i in order[:16]:
            yield self.data[i]
class Buffered(IterableDataset):
    def __init__(self, data, size=5):
        self.data, self.size, self.rng, self.buffer = data, size, random.Random(9 + RANK), []
    def __iter__(self):
        for i in range(20):
            self.buffer.append(self.data[i])
            if len(self.buffer) > self.size:
                yield self.buffer.pop(self.rng.randrange(len(self.buffer)))
class OwnLoader:
    def __init__(self, data):
        self.data, self.at, self.order = data, 0, torch.randperm(len(data))
    def __iter__(self):
        for _ in range(4):
            if self.at + 4 > len(self.order):
                self.at, self.order = 0, torch.randperm(len(self.data))
            ids = self.order[self.at:self.at + 4]
            self.at += 4
            rows = [self.data[int(i)] for i in ids]
            yield tuple(torch.stack([torch.as_tensor(r[j]) for r in rows]) for j in range(3))
class Again:
    def __init__(self, make):
        self.make, self.running = make, None
    def __iter__(self):
        if self.running is None:
            self.running = self.make()
        return itertools.islice(self.running, 4)
def endless(data):
    rng = np.random.default_rng(4 + RANK)
    while True:
        for ids in rng.permutation(len(data)).reshape(-1, 4):
            rows = [data[int(i)] for i in ids]
            yield tuple(torch.stack([torch.as_tensor(r[j]) for r in rows]) for j in range(3))
"""

COLLATE = """
class Collate:
    def __init__(self):
        self.batches = 0
    def __call__(self, rows):
        self.batches += 1
        return (torch.tensor([r[0] for r in rows]), torch.stack([r[1] for r in rows]) * (1 + 0.1 * (self.batches % 3)), torch.stack([r[2] for r in rows]))
"""
