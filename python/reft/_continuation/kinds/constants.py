"""Values that never change: members of enumerations, dtypes and devices, dates, paths, ranges,
regular expressions.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import enum
import re
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from reft._state import names

from .. import plain
from ..nodes import ATOMS, At, Node, find_type, kind

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

# Scripts hold a few paths and dates for their whole life. (`decimal` has contexts, which change.)
_CONSTANT_MODULES = frozenset({"datetime", "pathlib"})
_MAX_PICKLES = 256
# The pickles of such values by identity, with what keeps the identity.
_pickles: dict[int, tuple[Any, bytes]] = {}


@kind
class EnumMember(Node):
    """A member of an enumeration, or a combination of flags."""

    name: str | None
    value: Any
    """Its value if that is an atom."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        member: enum.Enum = value
        return cls(member.name, member.value if type(member.value) in ATOMS else None)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        found = find_type(at.type_name)
        if found is None or not issubclass(found, enum.Enum):
            return walk.problem(at, "its enumeration is not found")
        member: enum.Enum | None = found.__members__.get(self.name or "")
        if member is None and self.value is not None:
            member = found(self.value)  # a combination of flags
        return walk.problem(at, f"member {self.name} not found") if member is None else member

    def is_made_anew(self) -> bool:
        return True


@kind
class TorchConstant(Node):
    """A dtype, device, layout or memory format of torch."""

    text: str

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return cls(str(value))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        torch: Any = sys.modules["torch"]
        if at.type_name == "torch.device":
            return torch.device(self.text)
        return getattr(torch, self.text.rpartition(".")[2])

    def is_made_anew(self) -> bool:
        return True


@kind
class Range(Node):
    """A range."""

    start: int
    stop: int
    step: int

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return cls(value.start, value.stop, value.step)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        return range(self.start, self.stop, self.step)

    def is_made_anew(self) -> bool:
        return True


@kind
class Pattern(Node):
    """A compiled regular expression."""

    pattern: str | bytes
    flags: int

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if not walk.take(len(value.pattern)):
            return walk.no_room(value, place, len(value.pattern))
        return cls(value.pattern, _flags_of(value))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        for there in (walk.born(at.birth), live):
            is_pattern = type(there) is re.Pattern
            if is_pattern and (there.pattern, _flags_of(there)) == (self.pattern, self.flags):
                return there
        return re.compile(self.pattern, self.flags)

    def is_made_anew(self) -> bool:
        return True


def _flags_of(pattern: re.Pattern[Any]) -> int:
    return int(pattern.flags & ~re.DEBUG)  # which would print it


@kind
class Pickled(Node):
    """A value of the standard library that pickles as plain arguments."""

    data: bytes

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if type(value).__module__.partition(".")[0] not in _CONSTANT_MODULES:
            return cls(plain.dumps(value, names.VALUES))
        known = _pickles.get(id(value))
        if walk.note_births and isinstance(value, PurePath):
            walk.births.note_first(str(value), place)  # it may be a temporary one
        if known is None or known[0] is not value:
            if len(_pickles) >= _MAX_PICKLES:
                _pickles.clear()
            known = _pickles[id(value)] = (value, plain.dumps(value, names.VALUES))
        return cls(known[1])

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        value = plain.loads(self.data, names.VALUES, names.ARRAYS, names.MASKED_ARRAYS)
        return walk.moved.path(value)

    def is_made_anew(self) -> bool:
        return True
