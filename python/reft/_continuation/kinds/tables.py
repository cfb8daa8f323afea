"""Datasets of the package `datasets` (Hugging Face): views of Arrow tables that never change.

Each transform makes a new object with a fingerprint of its own; only the output format is set in
place. So neither the table nor its features are looked at.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..nodes import MISSING, At, Named, Node, kind, type_name
from .objects import OWNED, Owned

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_FORMAT = ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns")
"""Attributes of the output format: a transform of the script's own may be among them."""


def is_table(kind: type) -> bool:
    """Says whether a class is that of these datasets."""
    return kind.__module__ == "datasets.arrow_dataset" and kind.__qualname__ == "Dataset"


def format_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of a dataset's output format."""
    there = vars(value)
    return [(name, there[name]) for name in _FORMAT if name in there]


@kind
class Table(Node):
    """A dataset that is another one, or has another format, than at the first program point."""

    is_live_only = True
    fingerprint: str
    format: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        fingerprint = str(value._fingerprint)
        format = walk.encode_named(format_of(value), place, depth)
        if walk.note_births:
            walk.births.fingerprints[place] = fingerprint
            return OWNED
        known = walk.births.fingerprints.get(place)
        if walk.births.place(value) is not None and known == fingerprint:
            return Owned(format, None)
        return cls(fingerprint, format)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        born = walk.born(at.birth)
        for candidate in (born, live):
            if candidate is MISSING or type_name(type(candidate)) != at.type_name:
                continue
            if candidate is born or candidate._fingerprint == self.fingerprint:
                walk.stands(at, candidate)
                now = [*self.format, ("_fingerprint", self.fingerprint)]
                walk.put_attributes(now, candidate, at.place)
                return candidate
        return walk.came_later(at)
