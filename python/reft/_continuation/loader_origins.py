"""Makes each DataLoader iterator remember how it came to be, so that it can be made again and
advanced.

The order of the items follows from the random state when the iterator was made, and from the state
when its sampler drew the first index. (A sampler is a generator function, so without workers that
is later.) Both are recorded once per epoch. Random state inside workers comes back through
`workers`.

Threads: the training thread. Errors: none; an iterator whose origin cannot be read has none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from reft._state import names

from . import batches, dealing, plain, workers
from .loader_parts import Parts, fingerprint, parts
from .rng import capture_rng, restore_rng

_WATCHED_DRAWS = 4  # of an epoch, whose random state is looked at
_SAMPLED_INDICES = 4096  # of a larger batch
ORIGIN = "_reft_origin"
"""Attribute of an iterator that holds its `Origin`."""
_REPLAY = "_reft_replay"
"""Attribute of a loader that holds a `Replay` while `kinds.loaders` makes an iterator again."""


class Origin:
    """How one iterator was made, and how its present epoch began."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.parts = parts(loader)
        self.created = capture_rng(cuda=False)
        self.made_of = self.parts.capture(nested=True)
        self.first_draw: dict[str, Any] | None = None
        self.begun_with = self.made_of
        self.has_changed_in_place = _note_large(loader, self.parts)
        self.workers_at_begin: dict[int, workers.States] = {}
        self.workers: dict[int, workers.States] = {}
        self.copied = workers.globals_read(loader) if loader.num_workers else {}
        self.base_seed = 0
        self.epochs = 0
        self.hands: list[dealing.Hand] = []  # of this epoch, if others had begun it
        # Draws from the sampler, and before which of them `set_epoch` had set something else: an
        # iterator that never ends, over a sampler that is repeated (timm's MultiEpochsDataLoader),
        # meets that in the middle.
        self.draws = 0
        self.indices = 0  # a hash of all indices of this epoch that were drawn so far
        self.batch = 0  # a hash of a sample of the newest batch, if those are watched
        self.changes: list[tuple[int, dict[str, Any]]] = []
        self.replayed: list[tuple[int, dict[str, Any]]] = []
        self._epochs = self.parts.epochs()
        # Whether the sampler draws from a global generator at each batch, and something else does,
        # too: a replay draws the batches one after the other.
        self._drawn_from: set[str] = set()
        self.is_mixed = False
        self._random: dict[str, Any] | None = None  # the global generators around the newest draw
        self._fixed: bytes | None = None

    def fixed(self) -> bytes:
        """What does not change until the next epoch, pickled once."""
        if self._fixed is None:
            self._fixed = plain.dumps(
                {
                    "loader": fingerprint(self.loader),
                    "created": self.created,
                    "made_of": self.made_of,
                    "first_draw": self.first_draw,
                    "begun_with": self.begun_with,
                    "workers_at_begin": self.workers_at_begin,
                    "copied": self.copied,
                    "base_seed": self.base_seed,
                    "epochs": self.epochs,
                    "changes": self.changes,
                },
                names.VALUES,
                names.CONTAINERS,
                names.ARRAYS,
                plain.TENSORS,
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
            "copied",
            "base_seed",
            "epochs",
            "changes",
        ):
            setattr(self, name, fixed[name])
        self._drawn_from, self._random = set(), None  # a replay has drawn
        self._fixed = None

    def before_draw(self) -> None:
        """The next index is about to be drawn from the sampler."""
        if self._drawn_from or 0 < self.draws < _WATCHED_DRAWS:
            now = capture_rng(cuda=False)
            before = self._random or {}
            if any(now[name] != before.get(name) for name in self._drawn_from):
                self.is_mixed = True
            self._random = now
        else:
            self._random = None
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

    def drew(self, index: Any) -> None:
        """Notes what was drawn; of a large batch, its size and a sample. Only numbers: the hash of
        a string differs in each process, and a dict has none."""
        if self._random is not None:
            now = capture_rng(cuda=False)
            self._drawn_from |= {name for name in now if now[name] != self._random.get(name)}
            self._random = now
        self.indices = with_index(self.indices, index)

    def begin(self) -> None:
        """An epoch of an iterator with workers begins."""
        self.epochs += 1
        self.draws, self.indices, self.changes, self.hands = 0, 0, [], []
        self._drawn_from, self.is_mixed, self._random = set(), False, None
        if self.epochs > 1:  # an epoch may bring other objects
            self.parts = parts(self.loader)
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


def with_index(drawn: int, index: Any) -> int:
    """The hash of all that was drawn, after one more index or batch of them."""
    if type(index) is int:
        return hash((drawn, index))
    if type(index) is not list or not index:
        return drawn
    step = len(index) // _SAMPLED_INDICES
    some = [len(index), *index[::step]] if step > 1 else index
    return hash((drawn, *some)) if set(map(type, some)) == {int} else drawn


def _note_large(loader: Any, parts: Parts) -> list[str]:
    """Gives the large lists and arrays, by path, that drawing has changed since the loader's first
    iterator."""
    now = parts.changed_in_place()
    first = _first_samples.setdefault(loader, now) if now else {}
    return [path for path, sample in now.items() if path in first and first[path] != sample]


class FirstDraw:
    """Stands in for a sampler's iterator until the first index is drawn, then takes itself out."""

    __slots__ = ("_inner", "_owner")

    def __init__(self, inner: Iterator[Any], owner: Any) -> None:
        self._inner = inner
        self._owner = owner

    def move_to(self, owner: Any) -> None:
        """Another iterator takes the place of the one that it stands in."""
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        owner, inner = self._owner, self._inner
        origin = getattr(owner, ORIGIN, None)
        if origin is not None and origin.first_draw is None:
            _observe(owner, origin.drawn)
        if owner is not None and owner._sampler_iter is self:
            owner._sampler_iter = inner
        self._owner = None
        return next(inner)


@dataclass(frozen=True, slots=True)
class Replay:
    """An iterator with workers that is being made again, at a position."""

    fixed: dict[str, Any]
    """What `Origin.fixed` pickled."""
    yielded: int
    """Batches that the loop got."""
    is_iterable: bool
    workers: dict[int, workers.States]
    """Random states of the workers after those batches."""

    def begin(self, loader: Any) -> None:
        """Makes the next iterator of a loader start at this position."""
        loader.__dict__[_REPLAY] = self

    @staticmethod
    def end(loader: Any) -> None:
        """Ends what `begin` began."""
        loader.__dict__.pop(_REPLAY, None)

    @staticmethod
    def of(loader: Any) -> Replay | None:
        """Returns the position at which a loader's next iterator starts; None at its beginning."""
        found: Replay | None = loader.__dict__.get(_REPLAY)
        return found


_KINDS = {"_SingleProcessDataLoaderIter": "single", "_MultiProcessingDataLoaderIter": "multi"}
_watches_batches = False
_originals: list[tuple[Any, str, Any]] = []
_first_samples: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def install(batch_hashes: bool = False) -> None:
    """Makes new DataLoader iterators remember their origin.

    Args:
        batch_hashes: whether iterators keep a hash of a sample of their newest batch.

    Cost: copies of the host's random states at the first draws of an epoch, and at each one if the
        sampler draws from them each time; per batch one hash of its indices, and of a loader with
        workers one type check.
    """
    global _watches_batches
    _watches_batches = batch_hashes
    if _originals:
        return
    from torch.utils.data import dataloader

    base: Any = dataloader._BaseDataLoaderIter
    multi: Any = dataloader._MultiProcessingDataLoaderIter
    init, reset, process, next_index, next_batch = (
        base.__init__,
        base._reset,
        multi._process_data,
        base._next_index,
        base.__next__,
    )

    @functools.wraps(init)
    def __init__(self: Any, loader: Any) -> None:
        try:
            origin = Origin(loader)
        except Exception:
            origin = None  # an observer may go blind, it may not break training
        init(self, loader)
        if origin is None:
            return
        setattr(self, ORIGIN, origin)
        replay = Replay.of(loader)
        if replay is not None:
            origin.take(replay.fixed)
            self._base_seed = origin.base_seed
        origin.base_seed = self._base_seed
        if (
            self._num_workers == 0 and kind_of(self) == "single"
        ):  # others look at the kind of their sampler's iterator
            self._sampler_iter = FirstDraw(self._sampler_iter, self)
        elif isinstance(self, multi):
            self._collate_fn = workers.Track(self._collate_fn)

    @functools.wraps(reset)
    def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        origin: Origin | None = getattr(self, ORIGIN, None)
        replay = Replay.of(loader)
        if origin is not None and self._num_workers > 0:
            if replay is not None:
                _begin_replay(self, origin, replay)
            else:
                _observe(self, origin.begin)
        reset(self, loader, first_iter)
        if origin is not None and replay is not None and not replay.is_iterable:
            for _ in range(replay.yielded):
                origin.before_draw()
                index = next(self._sampler_iter, _END)
                if index is _END:
                    break
                origin.drew(index)

    @functools.wraps(process)
    def _process_data(self: Any, data: Any, worker_idx: int) -> Any:
        if type(data) is workers.Carried:
            origin: Origin | None = getattr(self, ORIGIN, None)
            if origin is not None:
                origin.workers.setdefault(worker_idx, {}).update(data.states)
            data = data.data
        return process(self, data, worker_idx)

    @functools.wraps(next_index)
    def _next_index(self: Any) -> Any:
        origin: Origin | None = getattr(self, ORIGIN, None)
        if origin is None:
            return next_index(self)
        _observe(self, origin.before_draw)
        index = next_index(self)
        _observe(self, origin.drew, index)
        return index

    @functools.wraps(next_batch)
    def __next__(self: Any) -> Any:
        batch = next_batch(self)
        if _watches_batches:
            origin: Origin | None = getattr(self, ORIGIN, None)
            if origin is not None:
                origin.batch = batches.sample_hash(batch)
        return batch

    for holder, name, replacement in (
        (base, "__init__", __init__),
        (base, "__next__", __next__),
        (base, "_next_index", _next_index),
        (base, "_reset", _reset),
        (multi, "_process_data", _process_data),
    ):
        _originals.append((holder, name, getattr(holder, name)))
        setattr(holder, name, replacement)


_END = object()


def _observe(iterator: Any, note: Callable[..., None], *arguments: Any) -> None:
    """Calls a method of an iterator's origin. If it fails, the iterator has no origin any more: an
    observer may go blind, it may not break training."""
    try:
        note(*arguments)
    except Exception:
        iterator.__dict__.pop(ORIGIN, None)


def uninstall() -> None:
    """Puts torch's own functions back."""
    while _originals:
        holder, name, original = _originals.pop()
        setattr(holder, name, original)


def _begin_replay(iterator: Any, origin: Origin, replay: Replay) -> None:
    """Puts back the state of the epoch's begin, before an iterator's sampler starts.

    Only iterators with workers come here.
    """
    origin.workers = {worker: dict(states) for worker, states in replay.workers.items()}
    origin.parts.write(origin.begun_with)
    origin.replayed = list(replay.fixed["changes"])
    if origin.first_draw is not None:
        restore_rng(origin.first_draw)
    turn = replay.yielded % iterator._num_workers
    if replay.is_iterable or not turn:
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


def kind_of(iterator: Any) -> str:
    """Returns "single", "multi" (with workers) or "stateful"; "" for an unknown iterator."""
    module, name = type(iterator).__module__, type(iterator).__name__
    if module == "torch.utils.data.dataloader":
        return _KINDS.get(name, "")
    return "stateful" if module.startswith("torchdata.") and hasattr(iterator, "state_dict") else ""
