"""Small state: what a rank pickles at a program point beside the tensors that the engine copies.

Random state, schedulers, gradient scalers, plain values of optimizers, registered objects, and with
REFT_RESUME=exact the loop frames with the positions of data loaders. `SmallState.capture` takes it,
`restore_optimizers`, `restore_objects` put it back.

Threads: the training thread. Errors: what cannot be captured is reported and left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypedDict

import torch

from reft import _continuation
from reft._resume import own_checkpoints
from reft._session.notes import Note
from reft._state import constructions, discovery, registry


class Saved(TypedDict, total=False):
    """The pickled dictionary.

    `closing` is the place of the closing optimizer; `optimizers` are signatures; `room` holds the
    contents of small tensors on devices, which other entries refer to; `verified` is under what
    (`verification.circumstances`) a resume of this job was found to be right; `frames` is missing
    where the place in the loop is not saved.
    """

    step: int
    session: int
    closing: int | None
    optimizers: list[str]
    state_keys: list[list[tuple[str, ...]]]
    counts: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    plain_state: list[list[dict[Any, Any]]]
    schedulers: list[tuple[str, dict[str, Any]]]
    scalers: list[tuple[str, dict[str, Any]]]
    strided: dict[str, torch.Tensor]
    registered: dict[str, dict[str, Any]]
    rng: Any
    verified: str
    frames: dict[str, Any]
    room: bytes


@dataclass(frozen=True)
class Captured:
    """Small state of one step.

    Attributes:
        pickled: a pickled `Saved`.
        parts: tensors whose contents the engine puts into `pickled`, with their place in it.
        writers: (device, stream) of streams that may write those tensors, or the regions.
    """

    pickled: bytes
    parts: list[tuple[torch.Tensor, int]]
    writers: list[tuple[int, int]]

    def read(self) -> Saved:
        """Waits for the devices and returns what a restarted process would read."""
        data = bytearray(self.pickled)
        for tensor, offset in self.parts:
            contents = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            data[offset : offset + contents.numel()] = contents.numpy().tobytes()
        saved: Saved = pickle.loads(bytes(data))
        return saved


class SmallState:
    """Captures the small state of one session.

    Args:
        session: number of the session among those of this process.
        exact: whether the place in the loop is captured.
        frame_bytes: most that the loop's variables may take together.
        failed: gets the name of a part that could not be captured, and why.

    Attributes:
        uncaptured: values that the newest capture left out.
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
        self._state_keys: list[list[tuple[str, ...]]] = []
        self._with_plain: set[int] = set()
        self._owned: set[int] = set()
        self._storages: frozenset[int] = frozenset()
        self.uncaptured: list[Note] = []
        self.verified = ""

    def planned(self, state: discovery.State, optimizers: list[torch.optim.Optimizer]) -> None:
        """Derives what every step needs of a new plan."""
        self._signatures = [discovery.signature(o) for o in optimizers]
        self._state_keys = [discovery.state_keys(o) for o in state.optimizers]
        self._owned, self._storages = _owned_ids(state), storages_of(state)
        self._with_plain = {
            index for index, o in enumerate(state.optimizers) if any(map(bool, _plain_state(o)))
        }

    def capture(
        self, frame: FrameType, step: int, closing: int | None, state: discovery.State
    ) -> Captured:
        """Pickles the small state at the program point of `step`. Only this rank reads it again."""
        devices = {r.tensor.get_device() for r in state.regions if r.tensor.is_cuda}
        parts = _continuation.DeviceParts(devices)
        saved: Saved = {
            "step": step,
            "session": self._session,
            "closing": closing,
            "optimizers": self._signatures,
            "state_keys": self._state_keys,
            "counts": own_checkpoints.counts(state.optimizers, state.schedulers, parts),
            "groups": [
                [
                    {k: v for k, v in group.items() if k != "params" and _is_plain(v)}
                    for group in optimizer.param_groups
                ]
                for optimizer in state.optimizers
            ],
            "plain_state": [
                _plain_state(o) if index in self._with_plain else []
                for index, o in enumerate(state.optimizers)
            ],
            "schedulers": [(type(s).__name__, _own_state_dict(s)) for s in state.schedulers],
            "scalers": [(type(s).__name__, s.state_dict()) for s in state.scalers],
            "strided": {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in state.strided.items()
            },
            "registered": {
                name: obj.state_dict()
                for name, obj in registry.objects.items()
                if hasattr(obj, "state_dict") and not isinstance(obj, torch.nn.Module)
            },
            "rng": _continuation.capture_rng(),
            "verified": self.verified,
        }
        if self._exact:
            self._capture_frames(saved, frame, parts, state)
        saved["room"] = parts.room()
        pickled = self._pickle(saved)
        return Captured(pickled, parts.placed(pickled), parts.writers())

    def _capture_frames(
        self,
        saved: Saved,
        frame: FrameType,
        parts: _continuation.DeviceParts,
        state: discovery.State,
    ) -> None:
        groups = frozenset(id(group) for o in state.optimizers for group in o.param_groups)
        try:
            captured = _continuation.capture(
                frame, self._frame_bytes, self._owned, self._storages, parts, groups
            )
        except Exception as error:
            self._failed("loop state", error)
            return
        saved["frames"] = captured
        self.uncaptured = captured["uncaptured"]

    def _pickle(self, saved: Saved) -> bytes:
        try:
            return pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            self._failed("small state", error)
            saved.pop("frames", None)
            return pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL)


def restore_optimizers(saved: Saved, state: discovery.State) -> None:
    """Puts hyperparameters, plain state and strided tensors back. The optimizers match `saved`."""
    for optimizer, groups, plain in zip(
        state.optimizers, saved["groups"], saved["plain_state"], strict=True
    ):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        _put_plain_state(optimizer, plain)
    with torch.no_grad():
        for name, tensor in state.strided.items():
            if name in saved["strided"]:
                tensor.copy_(saved["strided"][name])


def restore_registered(saved: Saved) -> None:
    """Puts registered objects back that the script has registered again."""
    for name, values in saved["registered"].items():
        if name in registry.objects:
            registry.objects[name].load_state_dict(values)


def restore_state_dicts(
    kind: str, objects: list[Any], saved: list[tuple[str, dict[str, Any]]]
) -> list[Note]:
    """Puts schedulers or scalers back, in order.

    Returns:
        Those that could not be.
    """
    lost: list[Note] = []
    for obj, (name, values) in zip(objects, saved, strict=False):
        if type(obj).__name__ != name:
            why = f"made after the first step, where the script has a {type(obj).__name__}"
            lost.append((f"{kind} {name}", "", why))
            continue
        try:
            obj.load_state_dict(values)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            lost.append((f"{kind} {type(obj).__name__}", "", why))
    return lost


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


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def _plain_state(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    """Entries of the optimizer's state that are not tensors (step counts, LBFGS history), by
    parameter position."""
    result = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = discovery.state_of(optimizer, parameter)
            result.append({k: v for k, v in entries.items() if not isinstance(v, torch.Tensor)})
    return result


def _put_plain_state(optimizer: torch.optim.Optimizer, saved: list[dict[Any, Any]]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, values in zip(parameters, saved, strict=False):
        if values:
            optimizer.state[parameter].update(values)
