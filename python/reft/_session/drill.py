"""The rank's part in `reft drill`: records what a script computes, kills at a chosen step, ends the
job after enough steps.

`reft drill` runs a script several times, each time with a folder in REFT_DRILL. `plan.json` there
tells the ranks what to do. Each rank writes lines of JSON to `rank-R.jsonl` (`events`), and what it
held at each program point to `rank-R/` (`Record`). A run that has a reference, which is the folder
of an earlier run, compares each of its records with that of the same rank and step. Right after a
resume, the record is compared with the one that this very run made of the step before it was
killed. The comparison happens here, where the script's classes and frames are known; what follows
from it is decided in `reft._cli.drill_verdict`.

Threads: the training thread. Errors: none reach training; what goes wrong becomes an event, and
`reft drill` reports it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree

from reft import _C, _continuation, _voice
from reft._continuation import comparison
from reft._continuation.bytecode import Unsupported, analyse
from reft._continuation.comparison import Difference
from reft._continuation.frames import frames_from
from reft._continuation.nodes import type_name
from reft._link import job_identity
from reft._link.protection import AUTO, PEER
from reft._session import notes
from reft._session.saved import Saved
from reft._session.step_comparison import Capture, parts
from reft._state import discovery, node_loss
from reft._state.own import is_own

PLAN = "plan.json"

_WHOLE_BYTES = 64 << 20  # of all tensors of a rank: up to this, the last record has all items
_SAMPLE = 256  # items of a tensor in the other records
_SAMPLE_LAST = 65536
_MOST = 200  # differences of one step
_LONGEST = 200
_CALLS = 64  # of models, in one step
_END_SEC = 30.0  # how long ranks wait for each other at the end
_UNBOUND = object()


@dataclass(frozen=True)
class Plan:
    """What `reft drill` wants of one run.

    Attributes:
        steps: number of the last step that is recorded.
        timed: steps after it that are only timed; the job ends behind them.
        kills: (attempt, rank, step): in this attempt, the rank kills itself while it computes the
            step, right before its optimizer writes.
        reference: folder of the run to compare with, "" for none.
    """

    steps: int
    timed: int = 0
    kills: tuple[tuple[int, int, int], ...] = ()
    reference: str = ""

    def write(self, folder: Path) -> None:
        """Puts it where the ranks of the run look."""
        (folder / PLAN).write_text(json.dumps(self.__dict__))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        values = json.loads((folder / PLAN).read_text())
        return cls(**values | {"kills": tuple(map(tuple, values["kills"]))})


@dataclass
class Record:
    """What a rank holds at a program point.

    Attributes:
        tensors: by name: type and shape, hash of all bytes, and some items, evenly spaced.
        saved: the small state.
        opaque: states of objects that no snapshot has, by place.
    """

    tensors: dict[str, tuple[str, tuple[int, int], torch.Tensor]]
    saved: Saved
    opaque: dict[str, Any] = field(default_factory=dict)


def of_session(
    env: dict[str, Any], job: job_identity.Job, number: int, capture: Capture
) -> Drill | None:
    """The drill that this process takes part in, None without one.

    Args:
        number: of the session; only the first one of a process is recorded.
        capture: takes the small state of a step.
    """
    if not env["drill"] or number != 1:
        return None
    try:
        return Drill(Path(env["drill"]), job, capture, env["snapshot_protection"])
    except (OSError, ValueError, TypeError) as error:
        _voice.warn(f"REFT_DRILL={env['drill']} is not the folder of a drill: {error}")
        return None


class Drill:
    """One rank of one run.

    Args:
        folder: of the run.
        job: identity of the rank.
        capture: takes the small state of a step.
        protection: REFT_SNAPSHOT_PROTECTION.
    """

    def __init__(
        self, folder: Path, job: job_identity.Job, capture: Capture, protection: str
    ) -> None:
        self._plan = Plan.read(folder)
        self._job, self._capture = job, capture
        # Which of the others `auto` takes depends on the nodes; this is what it takes last.
        self._protection = PEER if protection == AUTO else protection
        self._records = folder / f"rank-{job.rank}"
        self._records.mkdir(exist_ok=True)
        self._events = folder / f"rank-{job.rank}.jsonl"
        self._fed = _Fed()
        self._store: Any = None
        self._at = 0.0  # when the last point was left

    def started(self, store: Any, resuming_at: int | None) -> None:
        """The session has started."""
        self._store = store
        self._tell("started", world=self._job.world, nodes=self._job.nodes, resuming=resuming_at)

    def gate(self, step: int) -> None:
        """An optimizer is about to write in `step`. May not return."""
        if (self._job.attempt, self._job.rank, step) in self._plan.kills:
            self._tell("kill", step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def point(
        self,
        frame: FrameType,
        step: int,
        state: discovery.State,
        stats: dict[str, Any],
        uncaptured: list[notes.Note],
    ) -> bool:
        """A program point: records it, and compares it with the reference.

        Args:
            frame: frame of the optimizer step whose end it is.
            step: its number.
            state: what the newest plan saves.
            stats: counters of the engine.
            uncaptured: values that the snapshot of the step left out.

        Returns:
            Whether the job ends here; `end` is called then.
        """
        began = time.monotonic()
        values: dict[str, Any] = {
            "step": step,
            "sec": began - self._at if self._at else None,  # a step without what the drill does
            "spent_ns": int(stats["gate_ns"]) + int(stats["capture_ns"]),
            "bytes": int(stats["payload_bytes"]),
            "fed": self._fed.take(),
        }
        if step <= self._plan.steps:
            with self._reported(step):
                values |= self._recorded(frame, step, state)
            values["shared"] = sum(bool(region.ranks) for region in state.regions)
            values["private"] = [region.name for region in state.regions if not region.ranks][
                :_MOST
            ]
            # A drill runs on one node. This is what would be lost even if each rank had its own.
            apart = job_identity.Layout.in_blocks(self._job.world, 1)
            values["node_loss"] = node_loss.survival(state, apart, self._protection).why
            values["state_bytes"] = state.bytes
            values["uncaptured"] = [list(map(_shortened, note)) for note in uncaptured[:_MOST]]
            values["missed"] = [[_shortened(what), _shortened(why)] for what, why in state.missed]
            self._tell("step", **values)
        else:
            self._tell("timed", **values)
        self._at = time.monotonic()
        return step >= self._plan.steps + self._plan.timed

    def resumed(
        self, frame: FrameType, step: int, what: str, state: discovery.State, lost: list[notes.Note]
    ) -> None:
        """The process was put back at `step`: compares it with what the process before held there.

        Args:
            what: what was restored, in words.
            lost: what was not.
        """
        self._fed.discard()
        found: list[Difference] | None = None
        with self._reported(step):
            before = next(
                (
                    record
                    for attempt in range(self._job.attempt - 1, -1, -1)
                    if (record := _read(self._file(step, attempt))) is not None
                ),
                None,
            )
            if before is not None:
                found = compare(frame, before, self._record(frame, step, state))
        self._tell(
            "resumed",
            step=step,
            what=what,
            lost=[list(map(_shortened, note)) for note in lost[:_MOST]],
            differences=None if found is None else _rows(found),
        )
        self._at = time.monotonic()

    def end(self, stop: Callable[[], None]) -> None:
        """Ends this process, cleanly as far as the launcher is concerned, once all ranks want to.

        Args:
            stop: ends the session.
        """
        self._tell("ended")
        self._wait_for_all()
        with contextlib.suppress(Exception):  # nothing may keep the process from ending
            stop()
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # No `finally` and no exit handler of the script: they would save, report, or take part in
        # collectives.
        os._exit(0)

    def remove(self) -> None:
        """Takes the hooks out."""
        self._fed.remove()

    def _wait_for_all(self) -> None:
        """A rank that left early would break collectives of the others' last step."""
        try:
            self._store.add("drill/end", 1)
            until = time.monotonic() + _END_SEC
            while self._store.add("drill/end", 0) < self._job.world and time.monotonic() < until:
                time.sleep(0.01)
        except Exception:  # noqa: BLE001  # the process that serves the store has ended: all did
            pass

    # -- records

    def _recorded(self, frame: FrameType, step: int, state: discovery.State) -> dict[str, Any]:
        """Records the step and gives what is told about it."""
        record = self._record(frame, step, state)
        self._file(step, self._job.attempt).write_bytes(pickle.dumps(record))
        told: dict[str, Any] = {
            "tensors": len(record.tensors),
            "place": bool(record.saved.get("frames", {}).get("exact")),
        }
        if self._plan.reference:
            other = Path(self._plan.reference) / self._records.name / self._name(step, 0)
            reference = _read(other)
            told["differences"] = None
            if reference is not None:
                told["differences"] = _rows(compare(frame, reference, record))
        return told

    def _record(self, frame: FrameType, step: int, state: discovery.State) -> Record:
        state.wait_for_devices()
        last = step == self._plan.steps
        most = _SAMPLE_LAST if last else _SAMPLE
        if last and state.bytes <= _WHOLE_BYTES:
            most = _WHOLE_BYTES
        tensors = {}
        for region in state.regions:
            tensor = region.current()
            what = f"{_C.dtype_name(tensor)} {list(tensor.shape)}"
            tensors[region.name] = (what, _C.content_hash(tensor), _sample(tensor, most))
        saved = self._capture(frame, step, state)
        return Record(tensors, saved, opaque_states(frame))

    def _file(self, step: int, attempt: int) -> Path:
        return self._records / self._name(step, attempt)

    @staticmethod
    def _name(step: int, attempt: int) -> str:
        return f"step-{step}.attempt-{attempt}"

    # -- events

    def _tell(self, event: str, **values: Any) -> None:
        line = {"event": event, "attempt": self._job.attempt, "at": time.monotonic(), **values}
        with open(self._events, "a", encoding="utf-8") as file:  # whole, also after a kill
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        """An error within becomes an event."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever the script's objects raise
            self._tell("error", step=step, what=_shortened(f"{type(error).__name__}: {error}"))


class _Fed:
    """Digests what the script feeds its models: the arguments of each outermost call of a module
    that has parameters."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        self._discarded = 0  # calls in progress that the discarded iteration began
        self._calls: list[list[str]] = []
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def take(self) -> list[list[str]]:
        """[class of the model, types and shapes, digest] of the calls that have ended since the last
        `take`. A call that the discarded iteration began has the digest "": Lightning's training
        step runs inside of one."""
        calls, self._calls, self._depth = self._calls, [], 0
        return calls

    def discard(self) -> None:
        """Forgets the calls of the discarded iteration."""
        self._discarded = self._depth
        self.take()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # a constant there: the graph is as without the hook
            return
        if threading.get_ident() == self._thread:
            self._depth += 1

    def _after(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """`rest`: keyword arguments and result; the result alone after an error."""
        if torch.compiler.is_compiling():
            return
        if threading.get_ident() != self._thread:
            return
        is_discarded = self._depth == 0 and self._discarded > 0
        self._discarded -= is_discarded
        self._depth = max(0, self._depth - 1)
        if self._depth or len(self._calls) >= _CALLS:
            return
        if next(module.parameters(), None) is not None:
            kwargs = rest[0] if len(rest) == 2 else {}
            shapes, digest = _digest((args, kwargs))
            self._calls.append([type(module).__name__, shapes, "" if is_discarded else digest])


def compare(frame: FrameType, before: Record, now: Record) -> list[Difference]:
    """What is not what it was, in two records of one program point.

    Args:
        frame: of the present point; its frames name the variables.
    """
    found: list[Difference] = []
    for place in before.opaque.keys() & now.opaque.keys():
        old, new = before.opaque[place], now.opaque[place]
        if old != new:
            why = f"was {_shortened(str(old), 40)}, is {_shortened(str(new), 40)}"
            found.append(Difference(comparison.VARIABLE, place, why))
    there, here = before.saved, now.saved
    found += parts(there, here)
    if "frames" in there and "frames" in here:
        variables = _continuation.compare(
            frame, (there["frames"], there["room"]), (here["frames"], here["room"])
        )
        found += [_as_variable(one) for one in variables]
    elif "frames" in there or "frames" in here:
        why = "the place in the loop was captured in one of the runs only"
        found.append(Difference(comparison.VARIABLE, "loop", why))
    return found + _tensors(before.tensors, now.tensors)


def _as_variable(one: Difference) -> Difference:
    """A tensor that a variable refers to is a variable: a meter, a batch, a loss."""
    if one.kind != comparison.TENSOR:
        return one
    return Difference(comparison.VARIABLE, one.where, one.why, one.may_be_time)


def _tensors(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    found = []
    for name in sorted(before.keys() | now.keys()):
        if name not in before or name not in now:
            why = "is new" if name in now else "is missing"
            found.append(Difference(comparison.TENSOR, name, why))
            continue
        (old_what, old_hash, old), (new_what, new_hash, new) = before[name], now[name]
        if old_what != new_what:
            why = f"was {old_what}, is {new_what}"
            found.append(Difference(comparison.TENSOR, name, why))
        elif tuple(old_hash) != tuple(new_hash):
            why = comparison.delta(old, new) or "differs outside of the items compared"
            found.append(Difference(comparison.TENSOR, name, why))
    return found


def opaque_states(frame: FrameType) -> dict[str, Any]:
    """States of objects that no snapshot has and that can be read all the same: running hashes, CSV
    readers, shared values. They are looked for in the variables of the script's frames, and in the
    attributes of its objects there."""
    found: dict[str, Any] = {}
    globals_seen: set[int] = set()
    for one, user, _ in frames_from(frame):
        if not user or not is_own(one.f_globals.get("__name__")):
            continue
        code = one.f_code
        if id(one.f_globals) not in globals_seen:
            globals_seen.add(id(one.f_globals))
            for name, value in list(one.f_globals.items()):
                _note_opaque(f"global {name}", value, found)
        if one.f_globals is one.f_locals:
            continue
        try:
            names = analyse(code).slot_names
        except Unsupported:
            continue
        # Not `f_locals`: it would keep the values alive.
        for name, value in zip(names, _C.frame_slots(one, len(names), _UNBOUND), strict=True):
            if type(value) is CellType:
                value = value.cell_contents if _is_full(value) else _UNBOUND
            _note_opaque(f"{code.co_qualname}:{name}", value, found)
    return found


def _note_opaque(place: str, value: Any, found: dict[str, Any]) -> None:
    state = _opaque_state(value)
    if state is not None:
        found[f"{place} ({type_name(type(value))})"] = state
    elif is_own(type(value).__module__) and not isinstance(value, (type, torch.nn.Module)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            state = _opaque_state(item)
            if state is not None:
                found[f"{place}.{name} ({type_name(type(item))})"] = state


def _opaque_state(value: Any) -> Any:
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    if root in ("_hashlib", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3", "_blake2"):
        return value.hexdigest() if hasattr(value, "copy") and value.digest_size else None
    if root == "_csv" and hasattr(value, "line_num"):
        return value.line_num
    if kind.__module__ == "multiprocessing.sharedctypes" and hasattr(kind, "value"):
        return value.value
    return None


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """At most `most` items, evenly spaced, in the order of memory; on the CPU."""
    whole = tensor.detach()
    flat = torch.as_strided(whole, (whole.numel(),), (1,), whole.storage_offset())
    stride = max(1, -(-flat.numel() // most))
    return flat[::stride].cpu().clone()


def _digest(values: Any) -> tuple[str, str]:
    """Types and shapes, and a digest, of all tensors and plain values in `values`."""
    digest, shapes = hashlib.sha256(), []
    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            what = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
            shapes.append(what)
            digest.update(what.encode())
            with contextlib.suppress(Exception):  # of a layout without bytes of its own
                plain = getattr(leaf, "_local_tensor", leaf).detach().cpu().contiguous()
                digest.update(repr(_C.content_hash(plain)).encode())
        elif isinstance(leaf, (bool, int, float, str, bytes)):
            digest.update(repr(leaf).encode())
    return ", ".join(shapes[:4]), digest.hexdigest()[:16]


def _read(file: Path) -> Record | None:
    """A record of this drill: its folder belongs to this user alone."""
    if not file.exists():
        return None
    record = pickle.loads(file.read_bytes())
    assert isinstance(record, Record)
    return record


def _rows(found: list[Difference]) -> list[list[Any]]:
    return [
        [one.kind, _shortened(one.where), _shortened(one.why), one.may_be_time]
        for one in found[:_MOST]
    ]


def _shortened(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
