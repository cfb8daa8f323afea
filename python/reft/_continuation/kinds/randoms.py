"""Random generators that a script has made for itself.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..nodes import KEEP, MISSING, At, Named, Node, kind
from ..rng import new_object, object_state, put_sequence, sequence_of, set_object_state

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk


@kind
class Random(Node):
    """A generator of torch, NumPy or Python."""

    state: Any
    attributes: Named
    sequence: Any
    """NumPy's SeedSequence that it spawns from, which others may have, too; or None."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        attributes = walk.attributes(value, place, depth)
        sequence = sequence_of(value)
        if sequence is not None:
            sequence = walk.encode(sequence, f"{place}.seed_seq", depth + 1)
        return cls(object_state(value), attributes, sequence)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            target = new_object(at.type_name, self.state)
        else:
            # After the loaders' samplers, whose replay needs the generators' older states.
            walk.positions.append(lambda: set_object_state(target, self.state))
        walk.put_all_attributes(self.attributes, target, at.place)
        if self.sequence is not None:
            place = f"{at.place}.seed_seq"
            sequence = walk.resolve(self.sequence, sequence_of(target), place)
            if sequence not in (KEEP, None):
                walk.positions.append(lambda: put_sequence(target, sequence))
        return target

    def is_made_anew(self) -> bool:
        return True


@kind
class SeedSequence(Node):
    """NumPy's SeedSequence. How many it has spawned cannot be written, so it comes back anew."""

    entropy: Any
    spawn_key: tuple[int, ...]
    pool_size: int
    spawned: int

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        state = value.state
        entropy = walk.encode(state["entropy"], f"{place}[entropy]", depth + 1)
        spawn_key = tuple(state["spawn_key"])
        return cls(entropy, spawn_key, state["pool_size"], state["n_children_spawned"])

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        import numpy

        there = getattr(live, "entropy", MISSING)
        entropy = walk.resolve(self.entropy, there, f"{at.place}[entropy]")
        return numpy.random.SeedSequence(
            entropy,
            spawn_key=self.spawn_key,
            pool_size=self.pool_size,
            n_children_spawned=self.spawned,
        )

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return [self.entropy]
