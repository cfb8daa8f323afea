"""Where captured tensors and arrays go in the memory of a restarted process, so that what shared
memory shares it again.

Captured tensors and arrays whose bytes overlap make a *region*; every other one is alone. A region
is put, as a whole and at one displacement, over live memory that is known to be the same (an object
that stood at the first program point and has lived since), or into new memory. Live memory that has
taken one region takes no other: two variables that shared memory in the first iteration and did not
when they were captured do not overwrite each other.

Threads: the training thread. Errors: none; what cannot be put over live memory gets new memory.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_ALIGNMENT = 64  # of what torch allocates


class Span(NamedTuple):
    """Bytes [`low`, `high`) of a device's memory."""

    device: str
    low: int
    high: int


@dataclass(slots=True)
class Region:
    """Captured memory that was one piece, and where it is put."""

    span: Span
    nodes: list[int] = field(default_factory=list)
    shift: int | None = None
    """From captured to live addresses; None until it is placed."""
    buffer: Any = None
    """The live bytes of a region of several, 1-D uint8 tensor: what views are made of."""


class Memory:
    """Places the tensors and arrays of one restore.

    Args:
        nodes: From `Encoder.nodes`.
        lasting: Gives the live tensor or array that a node was at the first program point, None if
            there is none that fits.
        owned_storages: Addresses of memory that is restored elsewhere; nothing is put there.
    """

    def __init__(self, nodes: list[Any], lasting: Callable[[Any], Any], owned_storages: Collection[int]) -> None:
        self._nodes = nodes
        self._lasting = lasting
        self._owned = owned_storages
        self._taken: dict[str, list[tuple[int, int, Region]]] = {}
        self._regions = self._divide()

    def tensor(self, index: int, live: Any) -> Any:
        """Gives the tensor that a node is put into; the caller writes its contents.

        Args:
            index: Of a tensor's node that has bytes.
            live: The tensor that it would be: of the same dtype, shape and device. None if there is
                none.

        Returns:
            `live` itself or another name of its memory, or a new tensor; strides are the captured
            ones where memory is shared.
        """
        region, node = self._regions[index], self._nodes[index]
        if len(region.nodes) == 1:
            return live if live is not None and self._take(region, live_span(live)) else _new_tensor(node)
        shift = self._place(region)
        if live is not None and _is_at(live, node, shift):
            return live
        torch: Any = sys.modules["torch"]
        dtype = getattr(torch, node[3])
        storage = region.buffer.untyped_storage()
        offset = _origin(node) + shift - storage.data_ptr()
        empty = torch.empty(0, dtype=dtype, device=region.buffer.device)
        return empty.set_(storage, offset // dtype.itemsize, node[4], node[8][2])

    def array(self, index: int, live: Any) -> Any:
        """As `tensor`, for an array's node."""
        import numpy

        region, node = self._regions[index], self._nodes[index]
        if len(region.nodes) == 1:
            fits = live is not None and self._take(region, live_span(live))
            return live if fits else numpy.empty(node[4], dtype=node[3], order="F" if _is_fortran(node) else "C")
        shift = self._place(region)
        if live is not None and _is_at(live, node, shift):
            return live
        offset = _origin(node) + shift - region.buffer.data_ptr()
        return numpy.ndarray(node[4], node[3], buffer=region.buffer.numpy(), offset=offset, strides=node[6][2])

    def _divide(self) -> dict[int, Region]:
        """Gives the region of each node that has memory of its own."""
        spans = sorted((_span(node), i) for i, node in enumerate(self._nodes) if has_memory(node))
        regions: dict[int, Region] = {}
        last: Region | None = None
        for span, i in spans:
            if last is not None and span.device == last.span.device and span.low < last.span.high:
                last.span = last.span._replace(high=max(last.span.high, span.high))
            else:
                last = Region(span)
            last.nodes.append(i)
            regions[i] = last
        return regions

    def _place(self, region: Region) -> int:
        """Chooses where a region of several goes: over a live one of them that has all of it, else into new memory."""
        if region.shift is not None:
            return region.shift
        size = region.span.high - region.span.low
        for i in region.nodes:
            live = self._lasting(self._nodes[i])
            if live is None or _strides(live) != _strides_of(self._nodes[i]):
                continue
            low = live_span(live).low + region.span.low - _span(self._nodes[i]).low
            buffer = _bytes_around(live, low, size)
            if buffer is not None and self._take(region, Span(region.span.device, low, low + size)):
                region.buffer = buffer
                return low - region.span.low
        torch: Any = sys.modules["torch"]
        pad = region.span.low % _ALIGNMENT
        region.buffer = torch.zeros(pad + size, dtype=torch.uint8, device=region.span.device)[pad:]
        region.shift = int(region.buffer.data_ptr()) - region.span.low
        return region.shift

    def _take(self, region: Region, span: Span) -> bool:
        """Puts a region over live memory, unless that has another one's bytes."""
        taken = self._taken.setdefault(span.device, [])
        at = bisect.bisect_left(taken, span.low, key=lambda other: other[1] - 1)  # the first that ends behind `low`
        if at < len(taken) and taken[at][0] < span.high:
            return False
        taken.insert(at, (span.low, span.high, region))
        region.shift = span.low - region.span.low
        return True

    def is_owned(self, live: Any) -> bool:
        """Whether a live tensor or array lies in memory that is restored elsewhere."""
        start = _owner(live).__array_interface__["data"][0] if is_array(live) else live.untyped_storage().data_ptr()
        return start in self._owned


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array, not a tensor."""
    return hasattr(value, "__array_interface__")


def has_memory(node: Any) -> bool:
    """Whether a node is a tensor or an array with bytes that are restored with it."""
    if node[0] == "tensor":
        return bool(node[6]) and not node[8][3]
    return node[0] == "array" and bool(node[5]) and node[6] is not None and not node[6][3]


def memory_of_tensor(tensor: Any, owned_storages: Collection[int]) -> tuple[Any, ...]:
    """Where a tensor lies, for its node: address of its storage, offset and strides in items,
    whether that is saved elsewhere, and how its items are read (`bits_of`)."""
    pointer = tensor.untyped_storage().data_ptr()
    return (pointer, tensor.storage_offset(), tuple(tensor.stride()), pointer in owned_storages, bits_of(tensor))


def bits_of(tensor: Any) -> tuple[bool, bool]:
    """Whether a tensor's items are the conjugates, and the negatives, of what lies in its memory."""
    return (tensor.is_conj(), tensor.is_neg())


def without_bits(tensor: Any) -> Any:
    """The same memory, read as it is."""
    return with_bits(tensor, bits_of(tensor))


def with_bits(tensor: Any, bits: tuple[bool, bool]) -> Any:
    """The same memory, read the other way where `bits` says so."""
    torch: Any = sys.modules["torch"]
    tensor = tensor.conj() if bits[0] else tensor
    return torch._neg_view(tensor) if bits[1] else tensor


def memory_of_array(array: Any, owned_storages: Collection[int]) -> tuple[Any, ...] | None:
    """Where an array lies, for its node: address of the array that owns the memory, its own
    address, strides in bytes, and whether that memory is saved elsewhere; None for a scalar."""
    if not hasattr(array, "strides") or array.base is array or type(array).__name__ != "ndarray":
        return None
    address = array.__array_interface__["data"][0]
    owner = _owner(array)
    start = address if owner is array else owner.__array_interface__["data"][0]
    return (start, address, tuple(array.strides), start in owned_storages)


def live_span(value: Any) -> Span:
    """The bytes between the first and the last item of a live tensor or array."""
    if is_array(value):
        return _reach("cpu", value.__array_interface__["data"][0], value.shape, value.strides, value.itemsize)
    strides = [stride * value.element_size() for stride in value.stride()]
    return _reach(str(value.device), value.data_ptr(), value.shape, strides, value.element_size())


def fill(target: Any, saved: Any) -> None:
    """Writes a tensor's contents, whatever its strides are.

    `.data` has a version counter of its own: a graph that saved this tensor does not see the write.
    """
    target = without_bits(target.data)
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:  # one item under many names
            target, saved = target.narrow(dimension, 0, 1), saved.narrow(dimension, 0, 1)
    target.copy_(saved)


def _reach(device: str, address: int, shape: Any, strides: Any, item: int) -> Span:
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = address + sum(step for step in steps if step < 0)
    return Span(device, low, address + sum(step for step in steps if step > 0) + item)


def _origin(node: Any) -> int:
    """The captured address of a node's first item."""
    if node[0] == "array":
        return int(node[6][1])
    return int(node[8][0] + node[8][1] * _item_size(node))


def _item_size(node: Any) -> int:
    torch: Any = sys.modules["torch"]
    return int(getattr(torch, node[3]).itemsize)


def _span(node: Any) -> Span:
    """The captured bytes between the first and the last item of a node."""
    if node[0] == "array":
        import numpy

        return _reach("cpu", _origin(node), node[4], node[6][2], numpy.dtype(node[3]).itemsize)
    item = _item_size(node)
    return _reach(node[5], _origin(node), node[4], [stride * item for stride in node[8][2]], item)


def _strides(live: Any) -> tuple[int, ...]:
    return tuple(live.strides if is_array(live) else live.stride())


def _strides_of(node: Any) -> tuple[int, ...]:
    return tuple(node[6][2] if node[0] == "array" else node[8][2])


def _is_at(live: Any, node: Any, shift: int) -> bool:
    """Whether a live tensor or array lies as the captured one, `shift` bytes further."""
    return live_span(live).low == _span(node).low + shift and _strides(live) == _strides_of(node)


def _owner(array: Any) -> Any:
    while type(array.base).__name__ == "ndarray":
        array = array.base
    return array


def _bytes_around(live: Any, low: int, size: int) -> Any:
    """The bytes [low, low + size) as a uint8 tensor, if they are in the memory of a live tensor or array; else None."""
    torch: Any = sys.modules["torch"]
    if not is_array(live):
        storage = live.untyped_storage()
        first = low - storage.data_ptr()
        if first < 0 or first + size > storage.nbytes():
            return None
        return torch.empty(0, dtype=torch.uint8, device=live.device).set_(storage, first, (size,), (1,))
    import numpy

    owner = _owner(live)
    owner = owner if owner.flags.c_contiguous else owner.T
    first = low - owner.__array_interface__["data"][0]
    if not owner.flags.c_contiguous or not owner.flags.writeable or first < 0 or first + size > owner.nbytes:
        return None
    return torch.from_numpy(numpy.ndarray((owner.nbytes,), numpy.uint8, buffer=owner)[first : first + size])


def _new_tensor(node: Any) -> Any:
    """Memory for a tensor that is alone: laid out as the captured one if that was dense, which kernels may depend on."""
    torch: Any = sys.modules["torch"]
    dtype, shape, strides = getattr(torch, node[3]), node[4], node[8][2]
    reach = _span(node)
    dense = reach.high - reach.low == len(node[6])
    return torch.empty_strided(shape, strides if dense else _row_major(shape), dtype=dtype, device=node[5])


def _row_major(shape: Any) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _is_fortran(node: Any) -> bool:
    """Whether an array's items lay column by column."""
    strides, shape = node[6][2], node[4]
    steps = [stride for stride, size in zip(strides, shape, strict=True) if size > 1]
    return len(steps) > 1 and steps == sorted(steps) and steps[0] == len(node[5]) // max(1, _count(shape))


def _count(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
