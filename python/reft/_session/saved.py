"""What the small state of a snapshot consists of.

Threads: any. Errors: none.
"""

from __future__ import annotations

from typing import Any, TypedDict

FORMAT = 5  # raised when `Saved` changes


class Saved(TypedDict, total=False):
    """The pickled dictionary.

    `format` is `FORMAT`; `boundary` is from `Boundary.position`; `optimizers` are signatures; `keys`
    tell optimizers, schedulers and scalers apart (`Constructions.key_of`); `waiting` are those of
    optimizers that are still to step with gradients which are not saved; `reshaped` has the first
    shapes of buffers that have another one since; `groups` and `plain_state` are what optimizers
    keep, as `_state/contents.py` encodes it; `aliases`, `empty` and `missed` are those of
    `discovery.State`, and `role` is from its `role` and `role_among_some`; `replaced` is of
    `optimizers.replaced_tensors`; `room` holds the contents of small tensors on devices, which other
    entries refer to; `verified` is under what (`verification.circumstances`) a resume of this job was
    found to be right; `frames` is missing where the place in the loop is not saved. See
    `small_state.opened` for the entries that hold pickles.
    """

    format: int
    step: int
    session: int
    boundary: dict[str, Any]
    optimizers: list[str]
    keys: dict[str, list[str]]
    waiting: list[str]
    counts: dict[str, Any]
    groups: list[Any]
    plain_state: list[Any]
    aliases: list[tuple[str, str, str, tuple[int, ...], tuple[int, ...]]]
    empty: list[str]
    reshaped: dict[str, list[int]]
    replaced: list[str]
    schedulers: list[tuple[str, Any]]
    scalers: list[tuple[str, Any]]
    strided: dict[str, Any]
    registered: dict[str, Any]
    rng: Any
    verified: str
    role: tuple[str, str]
    missed: list[tuple[str, str]]
    frames: dict[str, Any]
    room: bytes
