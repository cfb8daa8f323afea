"""DataLoaders, their iterators, samplers and datasets.

A position is the number of batches that the loop got, not of those that workers have ready.
Map-style positions advance at the sampler and read no data; an IterableDataset is read and its
items are thrown away. A loader with a state of its own (torchdata's StatefulDataLoader) is asked
for it.

Limits: a sampler that draws from a global generator at each batch, rather than once per epoch, is
replayed from its first draw; it comes back if nothing else draws from that generator meanwhile. Of
what is replayed, the attributes come back that `loader_parts` copies.

Threads: the training thread. Errors: what the user's sampler or dataset raise while it is replayed.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from reft._state import names

from .. import attachments, batches, hooks, plain, workers
from ..dealing import Dealt, Hand, deal, dealer_of
from ..loader_origins import ORIGIN, FirstDraw, Origin, Replay, kind_of, with_index
from ..loader_parts import (
    WHOSE,
    chain,
    containers_in,
    fingerprint,
    is_drawn,
    large,
    parts,
    parts_of_loader,
)
from ..nodes import KEEP, MISSING, At, Named, Node, kind, type_name
from ..rng import capture_rng, restore_rng
from .objects import OWNED, encode_slots

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_FIXED = (names.VALUES, names.CONTAINERS, names.ARRAYS, plain.TENSORS)
_SIZE = re.compile(r" of \w+,")  # of a dataset, in a fingerprint
_BATCH = re.compile(r" batch \w+,")
_EQUAL_IS_SAME = (range, str, bytes)
_MADE_OF_TORCH = tuple(
    f"torch.utils.data.{name}." for name in ("dataloader", "dataset", "distributed", "sampler")
)
_TOUCHED = (
    *("batch_sampler", "worker_init_fn", "_iterator", "next_iter_state"),
    "_initial_iter_for_state_dict",
)


@kind
class Shallow(Node):
    """A dataset, a sampler, or an optimizer of the script's own: all but its large parts."""

    attributes: Named
    slots: Named
    hooks: Named | None
    """States of an optimizer's hooks; None for a dataset or a sampler."""
    whose: Named
    """Numbers of the rank, for a sampler that is made again."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        """Encodes all of a dataset or sampler but the data itself, which stays as it is."""
        attributes: Named = []
        whose: Named = []
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if name not in WHOSE:
                encoded = walk.encode_data(item, f"{place}.{name}", depth + 1)
                attributes.append((name, encoded))
            elif type(item) is int and walk.births.place(value) is None:
                whose.append((name, item))
        return cls(attributes, encode_slots(value, place, depth, walk), None, whose)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return self._made(at, live, walk)
        walk.stands(at, target)
        for name, item in self.slots:
            value = walk.resolve(item, getattr(target, name, MISSING), f"{at.place}.{name}")
            if value is not KEEP:
                walk.contents.append(functools.partial(object.__setattr__, target, name, value))
        drawn = is_drawn(target)
        for name, item in self.attributes:
            there = target.__dict__.get(name, MISSING)
            if drawn:
                # Its iterator, which a replay has made, may hold them.
                walk.fix(*containers_in(there))
            value = walk.resolve(item, there, f"{at.place}.{name}")
            if value is not KEEP:
                walk.contents.append(functools.partial(target.__dict__.__setitem__, name, value))
        if self.hooks is not None:
            walk.put_hooks(self.hooks, hooks.of_optimizer(target), at.place)
        return target

    def _made(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        found = walk.type_of(at, live)
        if (
            found is None
            or not _is_made(at.type_name)
            or (self.whose and walk.is_foreign)
            or (self.hooks is not None and (self.hooks or not walk.is_made_anew(at.index)))
        ):
            return walk.came_later(at)
        return _built(object.__new__(found), [*self.attributes, *self.whose], self.slots, at, walk)

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return [item for _, item in (*self.attributes, *self.slots)]

    def needs_live(self, type_name: str) -> bool:
        return not _is_made(type_name)


@kind
class Loader(Node):
    """A DataLoader."""

    pieces: Any
    """From `loader_parts.Parts.capture`."""
    iterator: Any
    """Its iterator, if its workers are persistent."""
    parts_of_it: Named
    attributes: Named
    made_of: Named
    """All attributes but its iterator, of one that was made after the first step."""
    look: str
    """From `loader_parts.fingerprint`."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        names = ["batch_sampler", "sampler", "dataset"]
        if value.num_workers == 0 and hooks.is_own_hook(value.collate_fn):
            names.append("collate_fn")  # workers have copies of their own
        found = [(name, getattr(value, name, None)) for name in names]
        there = [(name, part) for name, part in found if part is not None]
        parts_of_it = walk.encode_named(there, place, depth)
        known = attachments.names_in(type(value))
        attached = [
            (name, item)
            for name, item in list(value.__dict__.items())
            if name not in known
            and (attachments.is_attached(name, item) or hasattr(item, "_next_index"))
        ]
        attributes = walk.encode_named(walk.without_still(attached, place), place, depth)
        if walk.note_births:
            return OWNED
        pieces = parts_of_loader(value).capture()
        iterator: Any = None
        if value.persistent_workers:
            iterator = getattr(value, "_iterator", None)
            iterator = walk.encode(iterator, f"{place}._iterator", depth + 1)
        made_of: Named = []
        if walk.births.place(value) is None:
            every = list(value.__dict__.items())
            others = [(name, item) for name, item in every if name != "_iterator"]
            made_of = walk.encode_named(others, place, depth)
        look = fingerprint(value) if made_of else ""
        return cls(pieces, iterator, parts_of_it, attributes, made_of, look)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        is_other = self.made_of and live is not MISSING and not self._is_like(live)
        # Over other data, as in a loop that adds to them.
        target = walk.target(at, MISSING if is_other else live)
        if target is not MISSING:
            walk.stands(at, target)
            # A sampler's iterator, which a replay has made, may hold them.
            walk.fix(*parts_of_loader(target).containers())
            if self.made_of and any(self._others(target, at, walk)):
                target = MISSING
        if target is MISSING:
            target = self._made(at, live, walk)
            if target is KEEP:
                return KEEP
        # After the iterators' replay, which needs older states.
        walk.positions.append(lambda: parts(target).write(self.pieces, walk.resized is not None))

        def put(name: str, value: Any) -> None:
            walk.positions.append(functools.partial(target.__dict__.__setitem__, name, value))

        for name, value in self._others(target, at, walk):
            if name == "collate_fn":
                put(name, value)  # its iterators keep what they were made with
            why = "the loader reads another object than the variable that is restored"
            walk.problem(at, why, f"{at.place}.{name}")

        for name, item in self.attributes:
            there = target.__dict__.get(name, MISSING)
            value = walk.resolve(item, there, f"{at.place}.{name}")
            if value is not KEEP and value is not there:
                put(name, value)
        if self.iterator is not None:
            there = getattr(target, "_iterator", None)
            known = MISSING if there is None else there
            iterator = walk.resolve(self.iterator, known, f"{at.place}._iterator")
            if iterator is not KEEP and iterator is not there:
                put("_iterator", iterator)
        return target

    def _others(self, target: Any, at: At, walk: RestoreWalk) -> Iterator[tuple[str, Any]]:
        """Its captured parts that are other objects than those of the live loader, by name."""
        walk.fix(*(getattr(target, name, MISSING) for name, _ in self.parts_of_it))
        for name, part in self.parts_of_it:
            there = getattr(target, name, MISSING)
            value = walk.resolve(part, there, f"{at.place}.{name}")
            if value is KEEP or value is there:
                continue
            if type(value) is type(there) and type(value) in _EQUAL_IS_SAME and value == there:
                continue
            yield name, value

    def _is_like(self, live: Any) -> bool:
        try:
            return fingerprint(live) == self.look
        except Exception:  # no loader, or one whose dataset has no length yet
            return False

    def _made(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        if not self.made_of and live is not MISSING:
            return KEEP
        found = walk.type_of(at, live)
        if found is None or not self.made_of:
            return walk.came_later(at)
        return _built(object.__new__(found), self.made_of, [], at, walk)

    def needs_live(self, type_name: str) -> bool:
        return not self.made_of


@kind
class LoaderIterator(Node):
    """The position of a DataLoader's iterator."""

    is_position = True
    loader: Any
    flavor: str
    """See `loader_origins.kind_of`."""
    fixed: bytes
    """From `loader_origins.Origin.fixed`."""
    yielded: int
    """Batches that the loop got."""
    is_iterable: bool
    is_started: bool
    """Whether its sampler has drawn an index."""
    workers: dict[int, workers.States]
    is_finished: bool
    indices_drawn: int
    """A hash of those of this epoch, to be compared; 0 if a replay does not draw them again."""
    last_batch: int
    """A hash of a sample of what the loop got last, to be compared; 0 if it is not known."""
    state: bytes
    """State of a StatefulDataLoader, pickled."""
    is_mixed: bool
    """From `loader_origins.Origin.is_mixed`."""
    hands: list[tuple[int, int, int, int]]
    """From `loader_origins.Origin.hands`."""
    size: int
    """Items of a batch; 0 if its loader makes none."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        name = type_name(type(value))
        why = _unrestorable(value)
        if why is not None:
            return walk.lost(place, name, why)
        origin: Origin = getattr(value, ORIGIN)
        loader = walk.encode(origin.loader, f"{place}.loader", depth + 1)
        if walk.note_births:
            return OWNED
        remark = _remark(value)
        if remark is not None:
            walk.lost(place, name, remark)
        flavor, is_finished = kind_of(value), _is_finished(value)
        return cls(
            loader,
            flavor,
            origin.fixed(),
            int(value._num_yielded),
            value._dataset_kind != 0,
            not isinstance(value._sampler_iter, FirstDraw),
            origin.workers,
            is_finished,
            *((0, 0) if flavor == "stateful" or is_finished else (origin.indices, origin.batch)),
            plain.dumps(value.state_dict(), *_FIXED) if flavor == "stateful" else b"",
            origin.is_mixed,
            [(hand.ranks, hand.rank, hand.batches, hand.size) for hand in origin.hands],
            _batch_size(origin.loader),
        )

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        live_loader = getattr(target, ORIGIN).loader if target is not MISSING else MISSING
        loader = walk.resolve(self.loader, live_loader, f"{at.place}.loader")
        if loader is KEEP:
            loader = live_loader
        if loader is MISSING:
            return walk.problem(at, "its DataLoader was made after the first step")
        self._deal(loader, at, walk)
        if self._grows(loader, walk):
            standing = self._at_the_beginning(loader) if target is MISSING else target
            walk.afterwards(lambda: self._make_with_data(standing, loader, at, walk))
            return standing
        if self.flavor == "multi" and target is not MISSING:
            # Workers get copies of the dataset, so they start when it is back.
            _check(loader, plain.loads(self.fixed, *_FIXED), self._is_dealt(walk))
            walk.afterwards(lambda: self._make_again(target, loader, at, walk))
            return target
        remarks: list[str] = []
        replayed: list[Callable[[], Any]] = []
        fresh, is_same = self.rebuild(loader, remarks, replayed, walk)
        walk.positions[:0] = replayed  # parts of the loader are written after them
        for remark in remarks:
            walk.problem(at, remark)
        if not is_same:
            standing = fresh if target is MISSING else target
            walk.afterwards(lambda: self._make_again(standing, loader, at, walk))
        if target is MISSING:
            if (
                fresh is not None
                and "_iterator" in loader.__dict__
                and (loader.persistent_workers or self.flavor == "stateful")
            ):
                put = functools.partial(loader.__dict__.__setitem__, "_iterator", fresh)
                walk.positions.append(put)
            return iter(()) if fresh is None else fresh
        if fresh is None:
            walk.positions.append(lambda: _finish(target))
        else:
            # First, because parts of the loader are written after it.
            walk.positions.insert(0, lambda: _swap(target, fresh))
        return target

    def _deal(self, loader: Any, at: At, walk: RestoreWalk) -> None:
        """Says if nothing deals what is left of the epoch to another number of ranks.

        Raises:
            ValueError: What has been drawn of it is not what those ranks would have drawn.
        """
        if walk.resized is None or not self.is_started:
            return
        if self.flavor == "stateful" or self.is_iterable or dealer_of(loader) is None:
            why = (
                f"{walk.resized.ranks} ranks saved it, and no DistributedSampler deals its items to"
                " the ranks of now: of this epoch, items may come twice or not at all"
            )
            walk.problem(at, why, f"items of {at.place}")
            return
        fixed, drawn = plain.loads(self.fixed, *_FIXED), 0
        pieces = parts(loader)
        rng, kept = capture_rng(cuda=False), pieces.capture(nested=True)
        try:
            _, before, rest = self._dealt(loader, fixed, pieces, walk, _batch_size(loader))
        finally:
            pieces.write(kept)
            restore_rng(rng)
        walk.resized.dealt.append(zlib.crc32(repr((self.yielded, rest)).encode()))
        for count, batch in enumerate(before, 1):
            drawn = with_index(drawn, batch)
            if count >= self.yielded and drawn == self.indices_drawn:
                return
        if self.indices_drawn:
            raise ValueError(
                f"{at.place}: the items that its sampler gave to {walk.resized.ranks} ranks cannot"
                " be told from those that are left"
            )

    def _is_dealt(self, walk: RestoreWalk) -> bool:
        return walk.resized is not None or bool(self.hands)

    def _hands(self, loader: Any, walk: RestoreWalk) -> list[Hand]:
        hands = [Hand(*hand) for hand in self.hands]
        if walk.resized is None or not self.is_started or self.is_iterable:
            return hands
        if self.flavor == "stateful" or dealer_of(loader) is None:
            return hands
        return [*hands, Hand(walk.resized.ranks, walk.resized.rank, self.yielded, self.size)]

    def _dealt(
        self, loader: Any, fixed: dict[str, Any], pieces: Any, walk: RestoreWalk, size: int
    ) -> tuple[Dealt, list[list[int]], list[int]]:
        def begin() -> None:
            restore_rng(fixed["first_draw"] or fixed["created"])
            pieces.write(fixed["begun_with"])

        return deal(loader, self._hands(loader, walk), size, begin)

    def _grows(self, loader: Any, walk: RestoreWalk) -> bool:
        """Whether the loader has other data than the captured one, and gets those in this walk."""
        there, here = plain.loads(self.fixed, *_FIXED)["loader"], fingerprint(loader)
        if here == there or _SIZE.sub("", here) != _SIZE.sub("", there):
            return False
        return any(
            walk.is_claimed(item)
            for part in [loader, *chain(loader)]
            for item in part.__dict__.values()
            if isinstance(item, (list, dict, deque))
        )

    @staticmethod
    def _at_the_beginning(loader: Any) -> Any:
        """Makes an iterator that something is to be put into."""
        pieces = parts(loader)
        rng, before = capture_rng(cuda=False), pieces.capture(nested=True)
        try:
            return loader._get_iterator()
        finally:
            pieces.write(before)
            restore_rng(rng)

    def _make_with_data(self, standing: Any, loader: Any, at: At, walk: RestoreWalk) -> None:
        try:
            self._make_again(standing, loader, at, walk)
        except ValueError as error:  # another size than the captured one after all
            walk.problem(at, f"starts at the beginning: {error}")

    def _make_again(self, standing: Any, loader: Any, at: At, walk: RestoreWalk) -> None:
        """Makes the iterator when everything else is back: a sampler may read a global variable, a
        closure, or an object that is no part of its loader."""
        remarks: list[str] = []
        replayed: list[Callable[[], Any]] = []
        pieces = parts(loader).capture()
        fresh, is_same = self.rebuild(loader, remarks, replayed, walk)
        for write in replayed:
            write()
        parts(loader).write(pieces)
        if fresh is None:
            _finish(standing)
        else:
            _swap(standing, fresh)
        if self.flavor == "multi":
            for remark in remarks:  # others have reported them
                walk.problem(at, remark)
        if not is_same:
            # Under a name of its own: a verification compares the position itself.
            why = "what it is made of gives other items than before"
            walk.problem(at, why, f"items of {at.place}")

    def rebuild(
        self,
        loader: Any,
        remarks: list[str],
        replayed: list[Callable[[], Any]],
        walk: RestoreWalk,
    ) -> tuple[Any, bool]:
        """Makes an iterator at this position; leaves the loader and all random states as they were.

        Args:
            loader: The live DataLoader.
            remarks: Gets what of the position comes back only approximately.
            replayed: Gets writes that give samplers the lists and generators that the replay has
                made: the new iterator draws from them.
            walk: Says if another number of ranks goes on.

        Returns:
            The iterator, None if it has no more batches and nothing to keep; and whether it gave
            what it gave before, as far as that is known.

        Raises:
            ValueError: The loader has other parts than the captured one.
        """
        fixed = plain.loads(self.fixed, *_FIXED)
        _check(loader, fixed, self._is_dealt(walk))
        size = _batch_size(loader)
        if self.flavor == "multi" and self.is_finished and not loader.persistent_workers:
            return None, True
        pieces = parts(loader)
        rng, before = capture_rng(cuda=False), pieces.capture(nested=True)
        objects = pieces.objects()
        kept = {name: loader.__dict__[name] for name in _TOUCHED if name in loader.__dict__}
        try:
            if missing := pieces.write(fixed["made_of"]):
                remarks.append(f"its {missing[0]} was made after the first step")
            restore_rng(fixed["created"])
            if self.flavor == "stateful":
                loader.load_state_dict(plain.loads(self.state, *_FIXED))
                iterator = loader._get_iterator()
                getattr(iterator, ORIGIN).take(fixed)
                return iterator, True
            hands = self._hands(loader, walk)
            if hands:
                dealt = self._dealt(loader, fixed, pieces, walk, size)
                loader.__dict__["batch_sampler"] = dealt[0]
                restore_rng(fixed["created"])
            if self.flavor == "multi":
                iterator = self._with_workers(loader, fixed)
            else:
                iterator = self._without_workers(loader, fixed, pieces, remarks)
            is_same = walk.resized is not None or self._gave_the_same(getattr(iterator, ORIGIN))
            # A verification compares what is drawn from here on; that a replay draws otherwise, as
            # a sampler does whose weights the loop changes, is reported.
            if self.indices_drawn and walk.resized is None:
                getattr(iterator, ORIGIN).indices = self.indices_drawn
            getattr(iterator, ORIGIN).replayed = []
            getattr(iterator, ORIGIN).batch = self.last_batch
            getattr(iterator, ORIGIN).is_mixed = self.is_mixed
            getattr(iterator, ORIGIN).hands = hands
            iterator._num_yielded = self.yielded
        finally:
            Replay.end(loader)
            loader.__dict__.update(kept)
            self._leave(pieces, objects, replayed)
            pieces.write(before)
            restore_rng(rng)
        if hands:  # it goes on with the loader's own sampler, in the next epoch
            iterator._index_sampler = loader._index_sampler
            getattr(iterator, ORIGIN).parts = parts(loader)
        return iterator, is_same

    def _gave_the_same(self, origin: Origin) -> bool:
        is_known = self.yielded > 0 and self.is_started and not self.is_finished
        if not is_known:
            return True
        if self.is_iterable:
            return not self.last_batch or not origin.batch or origin.batch == self.last_batch
        return not self.indices_drawn or origin.indices == self.indices_drawn

    @staticmethod
    def _leave(
        pieces: Any, objects: dict[str, Any], replayed: list[Callable[[], Any]]
    ) -> None:
        """Takes away what the replay has made, and plans to put it back."""
        made = {
            path: value
            for path, value in pieces.objects().items()
            if value is not objects.get(path) and type(value) is not dict
        }
        contents = large(pieces.capture(nested=True))
        pieces.put_objects(objects)
        if made:
            replayed.append(lambda: pieces.put_objects(made))
        if contents[2]:
            replayed.append(lambda: pieces.write(contents))

    def _with_workers(self, loader: Any, fixed: dict[str, Any]) -> Any:
        Replay(fixed, self.yielded, self.is_iterable, self.workers).begin(loader)
        states = fixed["workers_at_begin"] if self.is_iterable else self.workers
        loader.worker_init_fn = workers.Begin(loader.worker_init_fn, loader.collate_fn, states)
        with workers.with_globals(fixed["copied"]):
            iterator = loader._get_iterator()
        Replay.end(loader)
        if self.is_finished:
            _finish(iterator)
        elif self.is_iterable:
            self._advance_iterable(iterator)
        return iterator

    def _advance_iterable(self, iterator: Any) -> None:
        batch: Any = None
        for _ in range(self.yielded):
            batch = iterator._next_data()
        getattr(iterator, ORIGIN).batch = batches.sample_hash(batch) if self.last_batch else 0

    def _without_workers(
        self, loader: Any, fixed: dict[str, Any], pieces: Any, remarks: list[str]
    ) -> Any:
        iterator = loader._get_iterator()
        if self.is_started:
            self._advance(iterator, fixed, pieces, remarks)
        getattr(iterator, ORIGIN).take(fixed)
        return iterator

    def _advance(
        self, iterator: Any, fixed: dict[str, Any], pieces: Any, remarks: list[str]
    ) -> None:
        if fixed["first_draw"] is not None:
            restore_rng(fixed["first_draw"])
            pieces.write(fixed["begun_with"])
        getattr(iterator, ORIGIN).replayed = list(fixed["changes"])
        if self.is_iterable:
            self._advance_iterable(iterator)
            return
        mark: Any = None
        for _ in range(self.yielded):
            iterator._next_index()
            mark = mark or capture_rng(cuda=False)
        # The same indices again: nothing else has drawn meanwhile, and the state of now comes back.
        is_same = self.indices_drawn and getattr(iterator, ORIGIN).indices == self.indices_drawn
        if mark is not None and not is_same and mark != capture_rng(cuda=False):
            remarks.append(
                "its sampler draws from a global generator in mid-iteration:"
                " the batches that follow have another order"
            )


def reads_container(loader: Any) -> bool:
    """Whether a loader's dataset is a plain container, which has no place of its own."""
    return isinstance(getattr(loader, "dataset", None), (list, dict, deque))


def _is_made(name: str) -> bool:
    """Whether a dataset or sampler of the class of this name is its attributes and nothing more."""
    return not name.startswith("torch.") or name.startswith(_MADE_OF_TORCH)


def _built(target: Any, attributes: Named, slots: Named, at: At, walk: RestoreWalk) -> Any:
    """Gives a new object its attributes; KEEP, and a report, if one of them cannot be put back."""
    walk.stands(at, target)
    for name, item in (*attributes, *slots):
        value = walk.resolve(item, MISSING, f"{at.place}.{name}")
        if value is KEEP:
            return walk.stays_half(at, name)
        object.__setattr__(target, name, value)
    return target


def _check(loader: Any, fixed: dict[str, Any], is_dealt: bool) -> None:
    """
    Args:
        is_dealt: Another number of ranks goes on, or went on in this epoch, which may have batches
            of another size.
    """
    there, here = fixed["loader"], fingerprint(loader)
    if is_dealt:
        there, here = _BATCH.sub("", there), _BATCH.sub("", here)
    if here != there:
        raise ValueError(f"DataLoader was {fixed['loader']}, is {fingerprint(loader)}")


def _batch_size(loader: Any) -> int:
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if type(size) is int else 0


def _unrestorable(iterator: Any) -> str | None:
    """Says why an iterator's position cannot be restored; None if it can."""
    flavor = kind_of(iterator)
    if not flavor:
        return f"DataLoader iterator of unknown kind {type(iterator).__qualname__}"
    origin: Origin | None = getattr(iterator, ORIGIN, None)
    if origin is None:
        return "DataLoader iterator made before reft started"
    if flavor == "stateful":
        return None
    from torch.utils.data import IterDataPipe, MapDataPipe

    if isinstance(iterator._dataset, (IterDataPipe, MapDataPipe)):
        return "DataLoader over a DataPipe: use torchdata's StatefulDataLoader"
    if not origin.hands and origin.parts.is_resized(origin.begun_with):
        return "the batch size was changed in the middle of an epoch, so its position is unknown"
    if (
        flavor == "multi"
        and ORIGIN in iterator.__dict__
        and not hasattr(iterator, "_worker_queue_idx_cycle")
    ):
        return "DataLoader with workers of an unknown torch release"
    return None


def _remark(iterator: Any) -> str | None:
    """Says what of a restorable iterator comes back only approximately, if anything."""
    if changed := getattr(iterator, ORIGIN).has_changed_in_place:
        return (
            f"approximated: its {changed[0]} is changed in place and too large to copy: the batches"
            " that follow have another order"
        )
    if getattr(iterator, ORIGIN).is_mixed:
        return (
            "approximated: its sampler draws from a global generator at each batch, and so does"
            " something else in between: after a resume, other batches follow. Give the sampler a"
            " generator of its own"
        )
    if cut := getattr(iterator, ORIGIN).parts.cut:
        return f"approximated: what decides the order of the data is not all followed: {cut}"
    if kind_of(iterator) != "multi":
        return None
    if not getattr(iterator, "_in_order", True):
        return "approximated: with in_order=False, the order of batches is random in any run"
    is_iterable = iterator._dataset_kind != 0
    if is_iterable and iterator._persistent_workers and getattr(iterator, ORIGIN).epochs > 1:
        return (
            "approximated: state of the dataset in persistent workers from earlier epochs"
            " starts from scratch"
        )
    return None


def _is_finished(iterator: Any) -> bool:
    """Says whether an iterator has no more batches, as far as its position does not tell."""
    if getattr(iterator, "_shutdown", False):
        return True
    status = getattr(iterator, "_workers_status", None)
    return iterator._dataset_kind != 0 and status is not None and not any(status)


def _finish(iterator: Any) -> None:
    """Makes an iterator one that has no more batches; workers end unless they are persistent."""
    iterator._sampler_iter = iter(())
    if iterator._num_workers > 0:
        if not iterator._persistent_workers:
            iterator._shutdown_workers()
        iterator._workers_status = [False] * iterator._num_workers
        iterator._rcvd_idx = iterator._send_idx
        iterator._task_info.clear()


def _swap(live: Any, fresh: Any) -> None:
    """Gives `live` the state of `fresh`, so that every reference to `live` sees the new position.

    Workers of `live` end; those of `fresh` become its own.
    """
    if live is fresh:
        return
    if hasattr(live, "_shutdown_workers"):
        live._shutdown_workers()
    state = dict(fresh.__dict__)
    pending = state.get("_sampler_iter")
    if isinstance(pending, FirstDraw):
        pending.move_to(live)
    live.__dict__.clear()
    live.__dict__.update(state)
    if state.get("_worker_pids_set"):
        from torch.utils.data._utils import signal_handling

        signals: Any = signal_handling
        signals._remove_worker_pids(id(fresh))
        signals._set_worker_pids(id(live), tuple(worker.pid for worker in state["_workers"]))
    # Its __del__ looks for workers to end: they are not its own any more.
    fresh.__dict__.clear()
    fresh.__dict__.update({"_shutdown": True, "_workers": [], "_worker_pids_set": False})
