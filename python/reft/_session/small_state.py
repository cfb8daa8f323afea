"""Small state: what a rank pickles at a program point beside the tensors that the engine copies.

Random state, schedulers, gradient scalers, plain values of optimizers, registered objects, and with
REFT_RESUME=exact the loop frames with the positions of data loaders. `SmallState.capture` takes it;
`Arrangement` (`_resume/arrangement.py`) and the `restore_…` functions put it back.

The whole is a pickle of plain values. Objects of the script are pickled each by itself, and read
when the script has made its own: then their classes exist, and one that fails costs the others
nothing.

Threads: the training thread. Errors: what cannot be captured is reported and left out.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import torch

from reft import _continuation
from reft._continuation import plain
from reft._resume import own_checkpoints
from reft._session.boundary import Boundary
from reft._session.notes import Note
from reft._session.saved import FORMAT, Saved
from reft._state import constructions, contents, discovery, naming, object_pickles, registry
from reft._state.device_parts import DeviceParts
from reft._state.optimizers import replaced_tensors, signature
from reft._state.raw import bytes_of

_OTHER_OPTIMIZER = (
    "another one than in the first iteration, by its class or its parameters: a restarted script"
    " begins without it, and would start from its beginning"
)
_MADE_LATE = (
    "made so late that a restarted script, which is put back within its first optimizer steps, would"
    " be without it, and would start from its beginning"
)
_OTHER_PARAMETER = (
    "a parameter in the first iteration, and not since: a restarted script begins with it, and would"
    " start from its beginning"
)
_OTHER_TYPE = (
    "of another shape or dtype than in the first iteration, with which a restarted script begins: it"
    " would start from its beginning"
)
_MADE_LATER = (
    "made after the first iteration: a restarted script begins without it, and a resume cannot put"
    " it back"
)
_OF_MODULE = re.compile(r"m\d+\.")
_Look = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Captured:
    """Small state of one step.

    Attributes:
        pickled: a pickled `Saved`.
        parts: tensors whose contents the engine puts into `pickled`, with their place in it.
        writers: (device, stream) of streams that may write those tensors, or the regions.
        state: what it was captured of.
    """

    pickled: bytes
    parts: list[tuple[torch.Tensor, int]]
    writers: list[tuple[int, int]]
    state: discovery.State

    def read(self) -> Saved:
        """Waits for the devices and returns what a restarted process would read, opened."""
        data = bytearray(self.pickled)
        for tensor, offset in self.parts:
            items = bytes_of(tensor)
            data[offset : offset + len(items)] = items
        return opened(read(bytes(data)), finder_in(self.state))


def read(data: bytes) -> Saved:
    """Reads what `SmallState.capture` has pickled: plain values, of which nothing runs."""
    saved: Saved = plain.loads(data)
    return saved


class SmallState:
    """Captures the small state of one session.

    Args:
        session: number of the session among those of this process.
        exact: whether the place in the loop is captured.
        frame_bytes: most that the loop's variables may take together.
        failed: gets the name of a part that could not be captured, and why.

    Attributes:
        first_shapes: of buffers, as a restarted script begins with them.
        uncaptured: values of the loop that the newest capture left out.
        assumed: values that it took for unchanged although a change of them may not be seen.
        unsaved: parts of optimizers, schedulers and registered objects that it left out.
        verified: see `Saved`.
    """

    def __init__(
        self,
        session: int,
        exact: bool,
        frame_bytes: int,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._session, self._exact, self._frame_bytes = session, exact, frame_bytes
        self._failed = failed
        self._signatures: list[str] = []
        self._first_signatures: list[str] = []
        self.first_shapes: dict[str, list[int]] = {}
        self._reshaped: dict[str, list[int]] = {}
        self._first_parameters: set[str] = set()
        self._first_tensors: dict[str, _Look] = {}
        self._looked_at = 0  # how many optimizers there were when those were noted
        self._first_made: dict[str, dict[str, str]] = {}  # classes of schedulers, scalers, by key
        self._replaced: list[Note] = []  # what a restarted script begins without
        self._keys: dict[str, list[str]] = {}
        self._owned: set[int] = set()
        self._storages: frozenset[int] = frozenset()
        self._addresses: list[int] = []
        self._saved_names: set[str] = set()
        self._references: object_pickles.References = {}
        self._labels: dict[int, str] = {}
        # By optimizer, where it keeps nothing but tensors: that changes with a new plan only.
        self._fixed: dict[int, bytes] = {}
        self.uncaptured: list[Note] = []
        self.assumed: list[Note] = []
        self.unsaved: list[Note] = []
        self.verified = ""
        self._role = "", ""
        self._missed: list[tuple[str, str]] = []

    @property
    def left_out(self) -> tuple[list[Note], list[Note]]:
        """What the newest capture has not, or may not have: `uncaptured` and `assumed`."""
        return self.uncaptured, self.assumed

    def planned(self, state: discovery.State, boundary: Boundary) -> None:
        """Derives what every step needs of a new plan."""
        optimizers = boundary.optimizers
        self._signatures = [signature(o) for o in optimizers]
        self._first_signatures += self._signatures[len(self._first_signatures) :]
        pairs = zip(self._signatures, self._first_signatures, optimizers, strict=False)
        self._replaced = [
            (f"optimizer {k}", type(optimizer).__name__, _OTHER_OPTIMIZER)
            for k, (now, first, optimizer) in enumerate(pairs)
            if now != first
        ]
        if not self._replaced and len(self._signatures) == len(self._first_signatures):
            self._replaced = self._other_tensors(state)
        self._replaced += [
            (f"optimizer {k}", type(optimizer).__name__, _MADE_LATE)
            for k, optimizer in enumerate(optimizers[boundary.early :], boundary.early)
        ]
        named = {"optimizers": optimizers, "schedulers": state.schedulers, "scalers": state.scalers}
        self._keys = {name: keys_of(objects) for name, objects in named.items()}
        for name, what in (("schedulers", "scheduler"), ("scalers", "gradient scaler")):
            kinds = [type(made).__name__ for made in named[name]]
            now = list(zip(self._keys[name], kinds, strict=True))
            first = self._first_made.setdefault(name, dict(now))
            # One that was made later is put into one of its class, whose place it has taken.
            free = Counter(kind for key, kind in first.items() if key not in dict(now))
            for key, kind in now:
                if key in first:
                    continue
                if free[kind] <= 0:
                    self._replaced.append((what, kind, _MADE_LATER))
                free[kind] -= 1
        self._addresses = []
        self._role, self._missed = (state.role(), state.role_among_some()), list(state.missed)
        shapes = {r.name: list(r.tensor.shape) for r in state.regions if r.is_replaceable}
        for name, shape in shapes.items():
            self.first_shapes.setdefault(name, shape)
        self._reshaped = {
            name: self.first_shapes[name]
            for name, shape in shapes.items()
            if shape != self.first_shapes[name]
        }
        self._saved_names = state.saved_names()
        self._references = references_to(state)
        self._labels = {id(p): name for name, p in state.parameters.items()}
        self._fixed = {}
        encoder = self._encoder()
        for index, optimizer in enumerate(state.optimizers):
            encoded = encoder.encode(dict(optimizer.state), f"o{index}")
            if contents.is_fixed(encoded):
                self._fixed[index] = pickle.dumps(encoded, protocol=pickle.HIGHEST_PROTOCOL)

    def _other_tensors(self, state: discovery.State) -> list[Note]:
        """Tensors of modules with which a restarted script begins, and that a resume cannot give it
        as they are: a pruned parameter has another name, and what was cast has another dtype."""
        now = {
            region.name: _look(region.tensor, region.is_replaceable)
            for region in state.regions
            if _OF_MODULE.match(region.name)
        }
        if len(self._signatures) > self._looked_at:  # at first, and with each optimizer that is new
            self._looked_at = len(self._signatures)
            self._first_tensors = now | self._first_tensors
            self._first_parameters |= state.parameters.keys()
        names = now.keys() | state.parameters.keys()
        gone = [
            (name, "parameter", _OTHER_PARAMETER)
            for name in sorted(self._first_parameters)
            if name not in names
        ]
        return gone + [
            (name, "tensor", _OTHER_TYPE)
            for name, first in self._first_tensors.items()
            if name in now and now[name] != first
        ]

    def forget(self) -> None:
        """Drops what a plan has led to."""
        self._references, self._labels, self._fixed = {}, {}, {}

    def capture(
        self,
        frame: FrameType,
        step: int,
        boundary: Boundary,
        state: discovery.State,
        waiting: Iterable[torch.optim.Optimizer] = (),
    ) -> Captured:
        """Pickles the small state at the program point of `step`. Only this rank reads it again.

        Args:
            waiting: from `Gradients.waiting`.
        """
        devices = {r.tensor.get_device() for r in state.regions if r.tensor.is_cuda}
        parts = DeviceParts(devices)
        encoder = self._encoder()
        saved: Saved = {
            "format": FORMAT,
            "step": step,
            "session": self._session,
            "boundary": boundary.position(frame),
            "optimizers": self._signatures,
            "keys": self._keys,
            "waiting": keys_of(waiting),
            "counts": own_checkpoints.counts(state.optimizers, state.schedulers, parts),
            "groups": [
                [
                    {
                        key: encoder.encode(value, f"o{k}.g{g}.{key}")
                        for key, value in group.items()
                        if key != "params"
                    }
                    for g, group in enumerate(optimizer.param_groups)
                ]
                for k, optimizer in enumerate(state.optimizers)
            ],
            "plain_state": [
                self._fixed.get(k) or encoder.encode(dict(optimizer.state), f"o{k}")
                for k, optimizer in enumerate(state.optimizers)
            ],
            "aliases": [_described(alias) for alias in state.aliases],
            "empty": list(state.empty),
            "reshaped": self._reshaped,
            "replaced": replaced_tensors(state.optimizers),
            "schedulers": [
                self._state_dict(f"scheduler {i}", s) for i, s in enumerate(state.schedulers)
            ],
            "scalers": [
                self._state_dict(f"gradient scaler {i}", s) for i, s in enumerate(state.scalers)
            ],
            "strided": {name: self._strided(name, t) for name, t in state.strided.items()},
            "registered": {},
            "rng": _continuation.capture_rng(),
            "verified": self.verified,
            "role": self._role,
            "missed": self._missed,
        }
        for name, obj in registry.objects.items():
            if hasattr(obj, "state_dict") and not isinstance(obj, torch.nn.Module):
                _, values = self._state_dict(f"registered object {name}", obj)
                if values is not None:
                    saved["registered"][name] = values
        self.unsaved += [*encoder.left_out, *self._replaced]
        if self._exact:
            elsewhere = "" if saved["boundary"]["at"] else boundary.sites.why_never(frame)
            self._capture_frames(saved, frame, parts, state, elsewhere)
        saved["room"] = parts.room()
        pickled = self._pickle(saved)
        return Captured(pickled, parts.placed(pickled), parts.writers(), state)

    def _strided(self, name: str, tensor: torch.Tensor) -> bytes | None:
        try:
            return object_pickles.dumps(tensor.detach().to("cpu", copy=True), {})
        except Exception as error:  # noqa: BLE001  # of a class that torch does not read back
            why = f"cannot be pickled: {error}"
            self.unsaved.append((f"tensor {name}", type(tensor).__name__, why))
            return None

    def _encoder(self) -> contents.Encoder:
        self.unsaved = []
        return contents.Encoder(self._saved_names, self._references, self._label)

    def _label(self, key: Any) -> str:
        if isinstance(key, torch.Tensor):
            return f"[{self._labels.get(id(key), '?')}]"
        return str(key)

    def _state_dict(self, name: str, obj: Any) -> tuple[str, Any]:
        """(class, pickle of its state); without the entries that cannot be pickled, which are
        noted. None instead of the pickle where there is no state at all."""
        kind = type(obj).__name__
        try:
            values = _own_state_dict(obj)
        except Exception as error:  # noqa: BLE001  # the others are still worth having
            self.unsaved.append((name, kind, f"state_dict() fails: {error}"))
            return kind, None
        try:
            return kind, object_pickles.dumps(values, self._references)
        except Exception as error:  # noqa: BLE001  # a lambda, a lock
            if type(values) is not dict:
                self.unsaved.append((name, kind, f"cannot be pickled: {error}"))
                return kind, None
        kept = {}
        for key, value in values.items():
            try:
                object_pickles.dumps(value, self._references)
                kept[key] = value
            except Exception as error:  # noqa: BLE001
                if not isinstance(value, FunctionType):  # code, which a restarted script has
                    what = f"{name} {kind}.{key}"
                    self.unsaved.append((what, type(value).__name__, f"cannot be pickled: {error}"))
        return kind, object_pickles.dumps(kept, self._references)

    def _capture_frames(
        self,
        saved: Saved,
        frame: FrameType,
        parts: DeviceParts,
        state: discovery.State,
        elsewhere: str,
    ) -> None:
        # An optimizer may replace its tensors in each step, and the script's get their memory then.
        addresses = [region.current().data_ptr() for region in state.regions]
        if addresses != self._addresses:
            self._addresses = addresses
            self._owned, self._storages = _owned_ids(state), storages_of(state)
        groups = frozenset(id(group) for o in state.optimizers for group in o.param_groups)
        try:
            captured = _continuation.capture(
                frame, self._frame_bytes, self._owned, self._storages, parts, groups, elsewhere
            )
        except Exception as error:
            self._failed("loop state", error)
            return
        self.assumed = captured.pop("assumed")
        saved["frames"] = captured
        self.uncaptured = captured["uncaptured"]

    def _pickle(self, saved: Saved) -> bytes:
        try:
            return pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            self._failed("small state", error)
            saved.pop("frames", None)
            return pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL)


def opened(saved: Saved, find: object_pickles.Find) -> Saved:
    """`saved` with its pickles read: those that can be.

    Args:
        find: gives what a reference stands for.
    """

    def open_all(rows: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, _opened(values, find)) for name, values in rows]

    more: Saved = {
        "plain_state": [
            plain.loads(one) if type(one) is bytes else one for one in saved["plain_state"]
        ],
        "schedulers": open_all(saved["schedulers"]),
        "scalers": open_all(saved["scalers"]),
        "strided": dict(open_all(list(saved["strided"].items()))),
        "registered": dict(open_all(list(saved["registered"].items()))),
    }
    return {**saved, **more}


def _opened(data: bytes | None, find: object_pickles.Find) -> Any:
    if data is None:
        return Unreadable("it was not saved")
    try:
        return object_pickles.loads(data, find)
    except Exception as error:  # noqa: BLE001  # a class that was renamed, say
        return Unreadable(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Unreadable:
    """Stands for state that cannot be put back."""

    why: str


def registered_values(saved: Saved) -> dict[str, Any]:
    """Registered objects that can be read now: when the script asks for them, before its training,
    classes of others may not exist yet."""

    def find(kind: str, key: Any) -> Any:
        raise LookupError(f"{kind} {key} does not exist yet")

    found = {name: _opened(values, find) for name, values in saved["registered"].items()}
    return {name: values for name, values in found.items() if not isinstance(values, Unreadable)}


def _look(tensor: torch.Tensor, is_replaceable: bool) -> _Look:
    """A buffer of another shape comes back (`Arrangement`)."""
    return () if is_replaceable else tuple(tensor.shape), tensor.dtype


def restore_strided(saved: Saved, state: discovery.State) -> list[Note]:
    """Puts tensors back that are saved by value. Returns those that could not be."""
    lost: list[Note] = []
    with torch.no_grad():
        for name, tensor in state.strided.items():
            value = saved["strided"].get(name)
            if isinstance(value, torch.Tensor):
                tensor.copy_(value)
            else:
                lost.append((f"tensor {name}", "", getattr(value, "why", "it was not saved")))
    return lost


def restore_registered(
    saved: Saved, other_parts: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
) -> list[Note]:
    """Puts registered objects back that the script has registered again. Returns those that could
    not be.

    Args:
        other_parts: types and shapes of parts of tensors that this rank has not.
    """
    lost: list[Note] = []
    for name, values in saved["registered"].items():
        if name in registry.objects:
            if other_parts and _has_part(values, other_parts):
                why = "it has parts of tensors that other ranks had, which this rank has not"
            else:
                why = _load(registry.objects[name], values)
            if why:
                lost.append((f"registered object {name}", "", why))
    return lost


def _has_part(values: Any, other_parts: frozenset[tuple[str, tuple[int, ...]]]) -> bool:
    if isinstance(values, torch.Tensor):
        local = getattr(values, "_local_tensor", values)
        return (str(local.dtype)[6:], tuple(local.shape)) in other_parts
    items = values.values() if isinstance(values, dict) else values
    return isinstance(values, (dict, list, tuple)) and any(
        _has_part(item, other_parts) for item in items
    )


def _load(obj: Any, values: Any) -> str:
    """Why an object does not take its state, "" if it does."""
    if isinstance(values, Unreadable):
        return values.why
    try:
        obj.load_state_dict(values)
    except Exception as error:  # noqa: BLE001  # code of the script's own
        return f"{type(error).__name__}: {error}"
    return ""


def keys_of(objects: Iterable[Any]) -> list[str]:
    """What tells each of some optimizers, schedulers or scalers from the others."""
    return [constructions.of_process.key_of(obj) for obj in objects]


def restore_state_dicts(
    kind: str, objects: list[Any], saved: list[tuple[str, dict[str, Any]]], keys: list[str]
) -> list[Note]:
    """Puts schedulers or scalers back: each into the one that it was taken of, those that were made
    after the first step into others of their class, which they have replaced.

    Args:
        keys: of the saved ones.

    Returns:
        Those that could not be.
    """
    lost: list[Note] = []
    left = dict(zip(keys_of(objects), objects, strict=True))
    rows: list[tuple[str, Any, Any]] = []
    for key, (name, values) in zip(keys, saved, strict=True):
        is_there = key in left and type(left[key]).__name__ == name
        rows.append((name, values, left.pop(key) if is_there else None))
    others = list(left.values())
    for name, values, obj in rows:
        if obj is None:
            obj = next((one for one in others if type(one).__name__ == name), None)
            if obj is None:
                instead = f", where the script has a {type(others[0]).__name__}" if others else ""
                lost.append((f"{kind} {name}", "", f"made after the first step{instead}"))
                continue
            others = [one for one in others if one is not obj]
        if why := _load(obj, values):
            lost.append((f"{kind} {name}", "", why))
        else:
            _delete_others(obj, values)
    return lost


def _delete_others(obj: Any, values: dict[str, Any]) -> None:
    """Deletes the numbers and strings that a scheduler has and had not then: of its attributes,
    torch saves these at least."""
    if type(obj).state_dict is torch.optim.lr_scheduler.LRScheduler.state_dict:
        for name, value in obj.state_dict().items():
            if name not in values and type(value) in contents.PLAIN:
                vars(obj).pop(name, None)


def storages_of(state: discovery.State) -> frozenset[int]:
    """Where the memory of the regions lies."""
    return frozenset(region.tensor.untyped_storage().data_ptr() for region in state.regions)


def _owned_ids(state: discovery.State) -> set[int]:
    """Ids of the tensors that are saved as regions, and of their optimizers."""
    parameters = [p for o in state.optimizers for g in o.param_groups for p in g["params"]]
    regions = [region.tensor for region in state.regions]
    return {id(obj) for obj in (*regions, *parameters, *state.optimizers)}


def _own_state_dict(scheduler: Any) -> dict[str, Any]:
    """State of a scheduler without optimizers and schedulers that it holds: those are saved as what
    they are."""
    others = (torch.optim.Optimizer, *constructions.SCHEDULERS)

    def holds_others(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(holds_others, value))
        return isinstance(value, others)

    return {k: v for k, v in scheduler.state_dict().items() if not holds_others(v)}


def references_to(state: discovery.State) -> object_pickles.References:
    """What stands in pickles for objects that a restarted script has, too."""
    found: object_pickles.References = {}
    for root in state.modules:
        for module in root.modules():
            if (name := naming.of_process.get(module)) is not None:
                found[id(module)] = ("module", name)
    for name, parameter in state.parameters.items():
        found[id(parameter)] = ("parameter", name)
    found |= {id(obj): ("optimizer", i) for i, obj in enumerate(state.optimizers)}
    schedulers = zip(keys_of(state.schedulers), state.schedulers, strict=True)
    return found | {id(obj): ("scheduler", key) for key, obj in schedulers}


def finder_in(state: discovery.State) -> object_pickles.Find:
    """The opposite of `references_to`, in a restarted script."""
    modules = {
        naming.of_process.get(module): module for root in state.modules for module in root.modules()
    }
    there: dict[str, Any] = {
        "module": modules,
        "parameter": state.parameters,
        "optimizer": state.optimizers,
        "scheduler": dict(zip(keys_of(state.schedulers), state.schedulers, strict=True)),
    }

    def find(kind: str, key: Any) -> Any:
        try:
            return there[kind][key]
        except LookupError:
            raise LookupError(f"{kind} {key} does not exist now") from None

    return find


def _described(alias: discovery.Alias) -> tuple[str, str, str, tuple[int, ...], tuple[int, ...]]:
    tensor = alias.current()
    local = getattr(tensor, "_local_tensor", tensor)
    return alias.name, alias.region, str(local.dtype)[6:], tuple(local.shape), tuple(local.stride())
