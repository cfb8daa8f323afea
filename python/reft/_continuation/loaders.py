"""Remembers how each DataLoader iterator came to be, so that it can be made again and advanced.

The order of the items follows from the random state when the iterator was made, and from the state
when its sampler drew the first index (a sampler is a generator function, so without workers that is
later). Both are recorded once per epoch. A position is the number of batches that the loop got, not
of those that workers have ready. Map-style positions advance at the sampler and read no data; an
IterableDataset is read and its items are thrown away. Random state inside workers comes back
through `workers`. A loader with a state of its own (torchdata's StatefulDataLoader) is asked for
it.

Limits: a sampler that draws from a global generator at each batch, rather than once per epoch, is
replayed from its first draw only; attributes of what is replayed come back as far as they are
numbers, strings, generators, small tensors, and of samplers and iterable datasets small arrays and
lists of plain values.

Threads: the training thread. Errors: what the user's sampler or dataset raise while it is replayed.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from . import workers
from .rng import capture_rng, is_random, object_state, restore_rng, set_object_state

_ORIGIN = "_reft_origin"
_PLAIN = (int, float, bool, str, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
WHOSE = ("rank", "num_replicas")
_SMALL_ELEMENTS = 4096

_NESTING = frozenset({list, dict, deque, defaultdict})

Attributes = list[dict[str, Any]]


class Parts:
    """The objects whose attributes decide what a loader yields: samplers and datasets, outermost first."""

    __slots__ = ("_generators", "_parts", "_read_elsewhere")

    def __init__(self, *roots: Any, read_elsewhere: bool = False) -> None:
        self._parts = workers.parts_of(*roots)
        self._read_elsewhere = (
            read_elsewhere  # by workers, who get a copy of each part when the loader's iterator is made
        )
        # Kept: a sampler may make its generator when it is first used, and before that it has none.
        self._generators = [
            {name: value for name, value in part.__dict__.items() if is_random(value)} for part in self._parts
        ]

    def kinds(self) -> list[str]:
        """Names of the parts' types."""
        return [type(part).__qualname__ for part in self._parts]

    def capture(self, nested: bool = False) -> tuple[Any, ...]:
        """Copies attributes, generators, small tensors, arrays and lists: of each part, by name.

        Args:
            nested: For a replay, which begins there: containers of containers or tensors, too.
        """
        generators, contents = [], []
        for part in self._parts:
            items = part.__dict__.items()
            generators.append({name: object_state(value) for name, value in items if is_random(value)})
            drawn = self._read_elsewhere or is_drawn(part)
            copies = [(name, _contents_of(value, drawn) or _nested(value, nested and drawn)) for name, value in items]
            contents.append({name: copy for name, copy in copies if copy is not None})
        return [plain_attributes(part) for part in self._parts], generators, contents

    def epochs(self) -> list[Any]:
        """What `set_epoch` has set, of each part."""
        return [part.__dict__.get("epoch") for part in self._parts]

    def set_epochs(self, epochs: list[Any]) -> None:
        """Sets what `epochs` gave."""
        for part, epoch in zip(self._parts, epochs, strict=True):
            if "epoch" in part.__dict__:
                part.__dict__["epoch"] = epoch

    def is_resized(self, captured: tuple[Any, ...]) -> bool:
        """Whether a batch size is not what it was when `captured` was captured: a replay would take other batches."""
        pairs = zip(self._parts, captured[0], strict=True)
        return any(
            "batch_size" in plain and part.__dict__.get("batch_size") != plain["batch_size"] for part, plain in pairs
        )

    def write(self, captured: tuple[Any, ...]) -> None:
        """Writes back what `capture` gave.

        Raises:
            ValueError: There are other parts now; nothing was written.
        """
        writes = []
        if any(len(values) != len(self._parts) for values in captured):
            raise ValueError("samplers or datasets of the DataLoader differ")
        for part, known, plain, states, contents in zip(self._parts, self._generators, *captured, strict=True):
            # One that a replay has made is the one that the replayed sampler draws from.
            there = part.__dict__
            generators = {name: there[name] if is_random(there.get(name)) else known.get(name) for name in states}
            held = {name: part.__dict__.get(name) for name in contents}
            if not all(is_random(generator) for generator in generators.values()):
                raise ValueError(f"generators of the DataLoader's {type(part).__qualname__} differ")
            if not all(_fits(value, contents[name]) for name, value in held.items()):
                raise ValueError(f"tensors, arrays or lists of the DataLoader's {type(part).__qualname__} differ")
            writes.append((part, plain, generators, states, held, contents))
        for part, plain, generators, states, held, contents in writes:
            part.__dict__.update(plain)
            for name, generator in generators.items():
                part.__dict__[name] = generator
                set_object_state(generator, states[name])
            for name, value in held.items():
                _fill(value, contents[name])


def is_drawn(part: Any) -> bool:
    """Whether iterating over a part runs its code, which may change its lists and arrays as it goes."""
    data: Any = sys.modules["torch.utils.data"]
    return isinstance(part, (data.Sampler, data.IterableDataset))


def _contents_of(value: Any, is_drawn: bool) -> Any:
    """Copies a small tensor, array or list of numbers and strings: (kind, type and shape, contents); None for anything else."""
    torch: Any = sys.modules["torch"]
    kind = type(value)
    if kind is torch.Tensor:
        if value.numel() > _SMALL_ELEMENTS or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        flat = value.detach().contiguous().reshape(-1)
        return (
            "tensor",
            (str(value.dtype), tuple(value.shape)),
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
        )
    if not is_drawn:
        return None
    if kind is list:
        return (
            ("list", None, list(value))
            if len(value) <= _SMALL_ELEMENTS and set(map(type, value)) <= _PLAIN_TYPES
            else None
        )
    if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
        small = value.size <= _SMALL_ELEMENTS and not value.dtype.hasobject and value.dtype.names is None
        return ("array", (value.dtype.str, value.shape), value.tobytes()) if small else None
    return None


def _nested(value: Any, wanted: bool) -> Any:
    """Copies a small list, dict or deque of containers and tensors: batches that are not full yet."""
    if not wanted or type(value) not in _NESTING or _count(value, _SMALL_ELEMENTS) is None:
        return None
    return ("nested", type(value).__name__, pickle.dumps(value, protocol=5))


def _count(value: Any, most: int) -> int | None:
    """How many numbers and strings are in a container; None if there are more than `most`, or anything else."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return 1
    torch: Any = sys.modules["torch"]
    if kind is torch.Tensor:
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        return int(value.numel()) if plain and value.numel() <= most else None
    if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
        return int(value.size) if value.size <= most and not value.dtype.hasobject else None
    if kind not in _NESTING and kind not in (tuple, set):
        return None
    total = 1
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in items:
        count = _count(item, most - total)
        if count is None or (total := total + count) > most:
            return None
    return total


def _fits(value: Any, contents: tuple[Any, ...]) -> bool:
    """Whether a live value can take what `_contents_of` copied."""
    kind, layout, _ = contents
    if kind == "list":
        return type(value) is list
    if kind == "nested":
        return bool(type(value).__name__ == layout)
    if kind == "array":
        return hasattr(value, "dtype") and (getattr(value.dtype, "str", None), tuple(value.shape)) == (
            layout[0],
            tuple(layout[1]),
        )
    return hasattr(value, "dtype") and (str(value.dtype), tuple(value.shape)) == (layout[0], tuple(layout[1]))


def _fill_nested(live: Any, saved: Any) -> None:
    """Gives a container the saved items; containers in it stay the same objects, which a generator's variables may mean."""
    if isinstance(saved, dict):
        pairs = {key: _merged(live.get(key), item) for key, item in saved.items()}
        live.clear()
        live.update(pairs)
    else:
        there = list(live)
        items = [_merged(there[i] if i < len(there) else None, item) for i, item in enumerate(saved)]
        live.clear()
        live.extend(items)


def _merged(live: Any, saved: Any) -> Any:
    if type(live) is not type(saved) or type(live) not in _NESTING:
        return saved
    _fill_nested(live, saved)
    return live


def containers_in(value: Any, depth: int = 0) -> list[Any]:
    """Gives a list, dict or deque and those in it, if they are few."""
    if type(value) not in _NESTING or len(value) > _SMALL_ELEMENTS:
        return []
    items = value.values() if isinstance(value, dict) else value
    return [value, *(inner for item in items if depth < 3 for inner in containers_in(item, depth + 1))]


def _fill(value: Any, contents: tuple[Any, ...]) -> None:
    kind, layout, data = contents
    if kind == "list":
        value[:] = data
    elif kind == "nested":
        _fill_nested(value, pickle.loads(data))  # of this rank's own snapshot
    elif kind == "array":
        import numpy

        numpy.copyto(value, numpy.frombuffer(data, dtype=layout[0]).reshape(layout[1]))
    elif data:
        torch: Any = sys.modules["torch"]
        value.data.copy_(torch.frombuffer(bytearray(data), dtype=value.dtype).reshape(layout[1]))


def parts(loader: Any) -> Parts:
    """Gives the parts of a DataLoader."""
    roots = [loader.batch_sampler, loader.sampler, loader.dataset]
    return Parts(_Holder(loader), *(root for root in roots if root is not None), read_elsewhere=loader.num_workers > 0)


class _Holder:
    """Stands for the loader among its parts: its generator, none of its own attributes."""

    def __init__(self, loader: Any) -> None:
        if loader.generator is not None:
            self.generator = loader.generator
        for name in ("base_dataloader",):
            if name in loader.__dict__:
                setattr(self, name, loader.__dict__[name])


class _Origin:
    """How one iterator was made, and how its present epoch began."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.parts = parts(loader)
        self.created = capture_rng(cuda=False)
        self.made_of = self.parts.capture(nested=True)
        self.first_draw: dict[str, Any] | None = None
        self.begun_with = self.made_of
        self.workers_at_begin: dict[int, workers.States] = {}
        self.workers: dict[int, workers.States] = {}
        self.base_seed = 0
        self.epochs = 0
        # Draws from the sampler, and before which of them `set_epoch` had set something else: an
        # iterator that never ends, over a sampler that is repeated (timm's MultiEpochsDataLoader),
        # meets that in the middle.
        self.draws = 0
        self.changes: list[tuple[int, list[Any]]] = []
        self.replayed: list[tuple[int, list[Any]]] = []
        self._epochs = [] if all(epoch is None for epoch in self.parts.epochs()) else self.parts.epochs()
        self._fixed: bytes | None = None

    def fixed(self) -> bytes:
        """What does not change until the next epoch, pickled once."""
        if self._fixed is None:
            self._fixed = pickle.dumps(
                {
                    "loader": fingerprint(self.loader),
                    "created": self.created,
                    "made_of": self.made_of,
                    "first_draw": self.first_draw,
                    "begun_with": self.begun_with,
                    "workers_at_begin": self.workers_at_begin,
                    "base_seed": self.base_seed,
                    "epochs": self.epochs,
                    "changes": self.changes,
                },
                protocol=5,
            )
        return self._fixed

    def take(self, fixed: dict[str, Any]) -> None:
        """Becomes the origin that `fixed` tells of."""
        for name in (
            "created",
            "made_of",
            "first_draw",
            "begun_with",
            "workers_at_begin",
            "base_seed",
            "epochs",
            "changes",
        ):
            setattr(self, name, fixed[name])
        self._fixed = None

    def before_draw(self) -> None:
        """The next index is about to be drawn from the sampler."""
        if self.replayed:
            if self.replayed[0][0] == self.draws:
                self._epochs = self.replayed.pop(0)[1]
                self.parts.set_epochs(self._epochs)
        elif self._epochs and (now := self.parts.epochs()) != self._epochs:
            self._epochs = now
            if self.draws:
                self.changes = [*self.changes, (self.draws, now)]
                self._fixed = None
        self.draws += 1

    def begin(self) -> None:
        """An epoch of an iterator with workers begins."""
        self.epochs += 1
        self.draws, self.changes = 0, []
        self.first_draw = capture_rng(cuda=False)
        self.begun_with = self.parts.capture(nested=True)
        self.workers_at_begin = {worker: dict(states) for worker, states in self.workers.items()}
        self._fixed = None

    def drawn(self) -> None:
        """The sampler of an iterator without workers is about to draw its first index."""
        self.first_draw = capture_rng(cuda=False)
        self.begun_with = self.parts.capture(
            nested=True
        )  # another loader may have drawn from the same generator meanwhile
        self._fixed = None


class _FirstDraw:
    """Stands in for a sampler's iterator until the first index is drawn, then takes itself out."""

    __slots__ = ("_inner", "_owner")

    def __init__(self, inner: Iterator[Any], owner: Any) -> None:
        self._inner = inner
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        owner, inner = self._owner, self._inner
        origin = getattr(owner, _ORIGIN, None)
        if origin is not None and origin.first_draw is None:
            origin.drawn()
        if owner is not None and owner._sampler_iter is self:
            owner._sampler_iter = inner
        self._owner = None
        return next(inner)


class _Replay:
    """An iterator with workers that is being made again, at a position."""

    def __init__(self, loader: Any, description: dict[str, Any], fixed: dict[str, Any]) -> None:
        self.loader = loader
        self.description = description
        self.fixed = fixed


_replay: _Replay | None = None
_originals: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Makes new DataLoader iterators remember their origin. Calling it again does nothing.

    Cost: one copy of the host's random states per epoch; per batch of a loader with workers one
        type check.
    """
    if _originals:
        return
    from torch.utils.data import dataloader

    base: Any = dataloader._BaseDataLoaderIter
    multi: Any = dataloader._MultiProcessingDataLoaderIter
    init, reset, process, next_index = base.__init__, base._reset, multi._process_data, base._next_index

    @functools.wraps(init)
    def __init__(self: Any, loader: Any) -> None:
        try:
            origin = _Origin(loader)
        except Exception:
            origin = None  # an observer may go blind, it may not break training
        init(self, loader)
        if origin is None:
            return
        setattr(self, _ORIGIN, origin)
        if _replay is not None and _replay.loader is loader:
            origin.take(_replay.fixed)
            self._base_seed = origin.base_seed
        origin.base_seed = self._base_seed
        if self._num_workers == 0 and _kind(self) == "single":  # others look at the kind of their sampler's iterator
            self._sampler_iter = _FirstDraw(self._sampler_iter, self)
        elif isinstance(self, multi):
            self._collate_fn = workers.Track(self._collate_fn)

    @functools.wraps(reset)
    def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        origin: _Origin | None = getattr(self, _ORIGIN, None)
        replay = _replay if _replay is not None and _replay.loader is loader else None
        if origin is not None and self._num_workers > 0:
            if replay is not None:
                _begin_replay(self, origin, replay)
            else:
                try:
                    origin.begin()
                except Exception:
                    delattr(self, _ORIGIN)
        reset(self, loader, first_iter)
        if origin is not None and replay is not None and not replay.description["iterable"]:
            for _ in range(replay.description["yielded"]):
                origin.before_draw()
                if next(self._sampler_iter, _END) is _END:
                    break

    @functools.wraps(process)
    def _process_data(self: Any, data: Any, worker_idx: int) -> Any:
        if type(data) is workers.Carried:
            origin: _Origin | None = getattr(self, _ORIGIN, None)
            if origin is not None:
                origin.workers.setdefault(worker_idx, {}).update(data.states)
            data = data.data
        return process(self, data, worker_idx)

    @functools.wraps(next_index)
    def _next_index(self: Any) -> Any:
        origin: _Origin | None = getattr(self, _ORIGIN, None)
        if origin is not None:
            origin.before_draw()
        return next_index(self)

    for holder, name, replacement in (
        (base, "__init__", __init__),
        (base, "_next_index", _next_index),
        (base, "_reset", _reset),
        (multi, "_process_data", _process_data),
    ):
        _originals.append((holder, name, getattr(holder, name)))
        setattr(holder, name, replacement)


_END = object()


def uninstall() -> None:
    """Puts torch's own functions back."""
    while _originals:
        holder, name, original = _originals.pop()
        setattr(holder, name, original)


def _begin_replay(iterator: Any, origin: _Origin, replay: _Replay) -> None:
    """Right before the sampler of an iterator with workers is started: the state is that of the epoch's begin."""
    origin.workers = {worker: dict(states) for worker, states in replay.description["workers"].items()}
    origin.parts.write(origin.begun_with)
    origin.replayed = list(replay.fixed["changes"])
    if origin.first_draw is not None:
        restore_rng(origin.first_draw)
    turn = replay.description["yielded"] % iterator._num_workers
    if replay.description["iterable"] or not turn:
        return
    put = iterator._try_put_index

    def first_put() -> None:
        # The worker that serves a batch is the one that would have served it: its random state
        # belongs to it.
        for _ in range(turn):
            next(iterator._worker_queue_idx_cycle)
        del iterator._try_put_index
        put()

    iterator._try_put_index = first_put


def _kind(iterator: Any) -> str:
    module, name = type(iterator).__module__, type(iterator).__name__
    if module == "torch.utils.data.dataloader":
        return {"_SingleProcessDataLoaderIter": "single", "_MultiProcessingDataLoaderIter": "multi"}.get(name, "")
    return "stateful" if module.startswith("torchdata.") and hasattr(iterator, "state_dict") else ""


def unrestorable(iterator: Any) -> str | None:
    """Says why this DataLoader iterator's position cannot be restored, or None if it can."""
    kind = _kind(iterator)
    if not kind:
        return f"DataLoader iterator of unknown kind {type(iterator).__qualname__}"
    if getattr(iterator, _ORIGIN, None) is None:
        return "DataLoader iterator made before reft was there"
    if kind == "stateful":
        return None
    from torch.utils.data import IterDataPipe, MapDataPipe

    if isinstance(iterator._dataset, (IterDataPipe, MapDataPipe)):
        return "DataLoader over a DataPipe: use torchdata's StatefulDataLoader"
    origin: _Origin = getattr(iterator, _ORIGIN)
    if origin.parts.is_resized(origin.begun_with):
        return "the batch size was changed in the middle of an epoch, so how far it is cannot be told"
    if kind == "multi" and "_reft_origin" in iterator.__dict__ and not hasattr(iterator, "_worker_queue_idx_cycle"):
        return "DataLoader with workers of another torch release"
    return None


def remark(iterator: Any) -> str | None:
    """Says what of a restorable iterator comes back only approximately, if anything."""
    if _kind(iterator) != "multi":
        return None
    if not getattr(iterator, "_in_order", True):
        return "approximated: with in_order=False the order of batches is chance in any run"
    if iterator._dataset_kind != 0 and iterator._persistent_workers and getattr(iterator, _ORIGIN).epochs > 1:
        return "approximated: what the dataset kept in persistent workers from earlier epochs starts anew"
    return None


def loader_of(iterator: Any) -> Any:
    """Gives the DataLoader that made this iterator."""
    return getattr(iterator, _ORIGIN).loader


def parts_of_loader(loader: Any) -> Parts:
    """Gives the parts of a DataLoader; found once, because every step asks."""
    found = _parts_cache.get(id(loader))
    if found is None or found[0] is not loader or found[1] is not loader.dataset:
        if len(_parts_cache) > 64:
            _parts_cache.clear()
        found = _parts_cache[id(loader)] = (loader, loader.dataset, parts(loader))
    return found[2]


_parts_cache: dict[int, tuple[Any, Any, Parts]] = {}


def describe(iterator: Any) -> dict[str, Any]:
    """Gives the position of an iterator as plain values.

    Args:
        iterator: An iterator for which `unrestorable` gives None.
    """
    origin: _Origin = getattr(iterator, _ORIGIN)
    described = {
        "kind": _kind(iterator),
        "fixed": origin.fixed(),
        "yielded": int(iterator._num_yielded),
        "iterable": iterator._dataset_kind != 0,
        "started": not isinstance(iterator._sampler_iter, _FirstDraw),
        "workers": origin.workers,
        "finished": _finished(iterator),
    }
    if described["kind"] == "stateful":
        described["state"] = pickle.dumps(iterator.state_dict(), protocol=5)
    return described


def _finished(iterator: Any) -> bool:
    """Says whether an iterator has said that it has no more batches, as far as its position does not tell."""
    if getattr(iterator, "_shutdown", False):
        return True
    status = getattr(iterator, "_workers_status", None)
    return iterator._dataset_kind != 0 and status is not None and not any(status)


def finish(iterator: Any) -> None:
    """Makes an iterator one that has no more batches; workers end unless they are persistent."""
    iterator._sampler_iter = iter(())
    if iterator._num_workers > 0:
        if not iterator._persistent_workers:
            iterator._shutdown_workers()
        iterator._workers_status = [False] * iterator._num_workers
        iterator._rcvd_idx = iterator._send_idx
        iterator._task_info.clear()


def rebuild(loader: Any, description: dict[str, Any], remarks: list[str] | None = None) -> Any:
    """Makes an iterator at the described position; leaves the loader and all random states as they
    were.

    Args:
        loader: The live DataLoader.
        description: From `describe` in the process that ended.
        remarks: Gets what of the position comes back only approximately.

    Returns:
        The iterator; None if it has no more batches and nothing to keep.

    Raises:
        ValueError: The loader has other parts than the captured one.
    """
    global _replay
    fixed = pickle.loads(description["fixed"])  # plain values of this rank's own snapshot
    if fingerprint(loader) != fixed["loader"]:
        raise ValueError(f"DataLoader was {fixed['loader']}, is {fingerprint(loader)}")
    if description["kind"] == "multi" and description["finished"] and not loader.persistent_workers:
        return None
    pieces = parts(loader)
    rng, before = capture_rng(cuda=False), pieces.capture(nested=True)
    kept = {name: loader.__dict__[name] for name in _KEPT if name in loader.__dict__}
    try:
        pieces.write(fixed["made_of"])
        restore_rng(fixed["created"])
        if description["kind"] == "stateful":
            return _rebuild_stateful(loader, description, fixed)
        if description["kind"] == "multi":
            _replay = _Replay(loader, description, fixed)
            states = fixed["workers_at_begin"] if description["iterable"] else description["workers"]
            loader.worker_init_fn = workers.Begin(loader.worker_init_fn, states)
            iterator = loader._get_iterator()
            _replay = None
            if description["finished"]:
                finish(iterator)
            elif description["iterable"]:
                for _ in range(description["yielded"]):
                    iterator._next_data()
        else:
            iterator = loader._get_iterator()
            if description["started"]:
                if fixed["first_draw"] is not None:
                    restore_rng(fixed["first_draw"])
                    pieces.write(fixed["begun_with"])
                getattr(iterator, _ORIGIN).replayed = list(fixed["changes"])
                mark: Any = None
                for _ in range(description["yielded"]):
                    if description["iterable"]:
                        iterator._next_data()
                    else:
                        iterator._next_index()
                        mark = mark or capture_rng(cuda=False)
                if mark is not None and mark != capture_rng(cuda=False) and remarks is not None:
                    remarks.append(
                        "its sampler draws from a global generator in mid-iteration: what follows has another order"
                    )
            getattr(iterator, _ORIGIN).take(fixed)
        if description["kind"] != "stateful":
            getattr(iterator, _ORIGIN).replayed = []
        iterator._num_yielded = description["yielded"]
    finally:
        _replay = None
        loader.__dict__.update(kept)
        pieces.write(before)
        restore_rng(rng)
    return iterator


_KEPT = ("worker_init_fn", "_iterator", "next_iter_state", "_initial_iter_for_state_dict")


def _rebuild_stateful(loader: Any, description: dict[str, Any], fixed: dict[str, Any]) -> Any:
    loader.load_state_dict(pickle.loads(description["state"]))
    iterator = loader._get_iterator()
    origin = getattr(iterator, _ORIGIN)
    origin.take(fixed)
    return iterator


def swap(live: Any, fresh: Any) -> None:
    """Gives `live` the state of `fresh`, so that every reference to `live` sees the new position.

    Workers of `live` end; those of `fresh` become its own.
    """
    if live is fresh:
        return
    signals: Any = None
    if hasattr(live, "_shutdown_workers"):
        live._shutdown_workers()
    state = dict(fresh.__dict__)
    pending = state.get("_sampler_iter")
    if isinstance(pending, _FirstDraw):
        pending._owner = live
    live.__dict__.clear()
    live.__dict__.update(state)
    if state.get("_worker_pids_set"):
        from torch.utils.data._utils import signal_handling

        signals = signal_handling
        signals._remove_worker_pids(id(fresh))
        signals._set_worker_pids(id(live), tuple(worker.pid for worker in state["_workers"]))
    # Its __del__ looks for workers to end: they are not its own any more.
    fresh.__dict__.clear()
    fresh.__dict__.update({"_shutdown": True, "_workers": [], "_worker_pids_set": False})


def plain_attributes(part: Any) -> dict[str, Any]:
    """Gives the numbers and strings among an object's attributes, but not whose it is: a sampler's rank never moves."""
    found = getattr(part, "__dict__", {}).items()
    return {name: value for name, value in found if type(value) in _PLAIN and name not in WHOSE}


def fingerprint(loader: Any) -> str:
    """What two DataLoaders must share to yield the same items: an object that only stands at the same place does not."""
    try:
        size = len(loader.dataset)
    except TypeError:  # a ChainDataset has a length only if all in it have one
        size = None
    kinds = parts_of_loader(loader).kinds()
    return (
        f"{type(loader.dataset).__qualname__} of {size}, batch {loader.batch_size}, {loader.drop_last}, {kinds}, "
        f"{loader.num_workers} workers"
    )
