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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .kinds.tensors import Array, Tensor

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
        nodes: Captured tensors and arrays that have bytes, by their index in the graph.
        lasting: Returns the live tensor or array that the node of an index was at the first program
            point; None if none fits.
        owned_storages: Addresses of memory that is restored elsewhere; nothing is put there.
    """

    def __init__(
        self,
        nodes: dict[int, Tensor | Array],
        lasting: Callable[[int], Any],
        owned_storages: Collection[int],
    ) -> None:
        self._nodes = nodes
        self._lasting = lasting
        self._owned = owned_storages
        self._taken: dict[str, list[tuple[int, int, Region]]] = {}
        self._regions = self._divide()

    def place(self, index: int, live: Any) -> Any:
        """Returns the tensor or array that a node is put into; the caller writes its contents.

        Args:
            index: Index of a node that has bytes.
            live: The tensor or array that it would be, of the same dtype, shape and device; None if
                there is none.

        Returns:
            `live` itself or another name of its memory, or a new object. Strides are the captured
            ones, unless `live` has stood there since the first program point.
        """
        region, node = self._regions[index], self._nodes[index]
        if len(region.nodes) == 1:
            fits = live is not None and self._is_laid_out(live, index)
            if fits and self._take(region, live_span(live)):
                return live
            return node.empty()
        shift = self._place(region)
        if live is not None and _is_at(live, node, shift):
            return live
        return node.view_of(region.buffer, shift)

    def _is_laid_out(self, live: Any, index: int) -> bool:
        strides = tuple(self._nodes[index].strides or ())
        return _strides(live) == strides or live is self._lasting(index)

    def _divide(self) -> dict[int, Region]:
        """Returns the region of each node."""
        spans = sorted((node.span(), index) for index, node in self._nodes.items())
        regions: dict[int, Region] = {}
        last: Region | None = None
        for span, index in spans:
            if last is not None and span.device == last.span.device and span.low < last.span.high:
                last.span = last.span._replace(high=max(last.span.high, span.high))
            else:
                last = Region(span)
            last.nodes.append(index)
            regions[index] = last
        return regions

    def _place(self, region: Region) -> int:
        """Chooses where a region of several goes.

        That is over a live one of them that has all of it, else into new memory.
        """
        if region.shift is not None:
            return region.shift
        size = region.span.high - region.span.low
        for index in region.nodes:
            live, node = self._lasting(index), self._nodes[index]
            if live is None or _strides(live) != tuple(node.strides or ()):
                continue
            low = live_span(live).low + region.span.low - node.span().low
            buffer = _bytes_around(live, low, size)
            if buffer is not None and self._take(region, Span(region.span.device, low, low + size)):
                region.buffer = buffer
                return low - region.span.low
        torch: Any = sys.modules["torch"]
        pad = region.span.low % _ALIGNMENT
        whole = torch.zeros(pad + size, dtype=torch.uint8, device=region.span.device)
        region.buffer = whole[pad:]
        region.shift = int(region.buffer.data_ptr()) - region.span.low
        return region.shift

    def _take(self, region: Region, span: Span) -> bool:
        """Puts a region over live memory, unless that has another one's bytes."""
        taken = self._taken.setdefault(span.device, [])
        at = bisect.bisect_left(
            taken, span.low, key=lambda other: other[1] - 1
        )  # the first that ends behind `low`
        if at < len(taken) and taken[at][0] < span.high:
            return False
        taken.insert(at, (span.low, span.high, region))
        region.shift = span.low - region.span.low
        return True

    def is_owned(self, live: Any) -> bool:
        """Whether a live tensor or array lies in memory that is restored elsewhere."""
        start = (
            _owner(live).__array_interface__["data"][0]
            if is_array(live)
            else live.untyped_storage().data_ptr()
        )
        return start in self._owned


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array, not a tensor."""
    return hasattr(value, "__array_interface__")


def bits_of(tensor: Any) -> tuple[bool, bool]:
    """Whether a tensor's items are the conjugates, and the negatives, of what its memory holds."""
    return (tensor.is_conj(), tensor.is_neg())


def without_bits(tensor: Any) -> Any:
    """The same memory, read as it is."""
    return with_bits(tensor, bits_of(tensor))


def with_bits(tensor: Any, bits: tuple[bool, bool]) -> Any:
    """The same memory, read the other way where `bits` says so."""
    torch: Any = sys.modules["torch"]
    tensor = tensor.conj() if bits[0] else tensor
    return torch._neg_view(tensor) if bits[1] else tensor


def live_span(value: Any) -> Span:
    """The bytes between the first and the last item of a live tensor or array."""
    if is_array(value):
        return reach(
            "cpu", value.__array_interface__["data"][0], value.shape, value.strides, value.itemsize
        )
    strides = [stride * value.element_size() for stride in value.stride()]
    return reach(str(value.device), value.data_ptr(), value.shape, strides, value.element_size())


def fill(target: Any, saved: Any) -> None:
    """Writes a tensor's contents, whatever its strides are.

    `.data` has a version counter of its own: a graph that saved this tensor does not see the write.
    """
    target = without_bits(target.data)
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:  # one item under many names
            target, saved = target.narrow(dimension, 0, 1), saved.narrow(dimension, 0, 1)
    target.copy_(saved)


def _strides(live: Any) -> tuple[int, ...]:
    return tuple(live.strides if is_array(live) else live.stride())


def _owner(array: Any) -> Any:
    while type(array.base).__name__ == "ndarray":
        array = array.base
    return array


def _bytes_around(live: Any, low: int, size: int) -> Any:
    """Returns the bytes [low, low + size) as a uint8 tensor.

    Returns None if they do not lie in the memory of the live tensor or array.
    """
    torch: Any = sys.modules["torch"]
    if not is_array(live):
        storage = live.untyped_storage()
        first = low - storage.data_ptr()
        if first < 0 or first + size > storage.nbytes():
            return None
        return torch.empty(0, dtype=torch.uint8, device=live.device).set_(
            storage, first, (size,), (1,)
        )
    import numpy

    owner = _owner(live)
    owner = owner if owner.flags.c_contiguous else owner.T
    first = low - owner.__array_interface__["data"][0]
    if (
        not owner.flags.c_contiguous
        or not owner.flags.writeable
        or first < 0
        or first + size > owner.nbytes
    ):
        return None
    return torch.from_numpy(
        numpy.ndarray((owner.nbytes,), numpy.uint8, buffer=owner)[first : first + size]
    )


def memory_of_array(array: Any) -> tuple[int, int] | None:
    """Returns where an array lies; None for a scalar, which has no memory of its own.

    Returns:
        Address of the array that owns the memory, and the array's own address.
    """
    if not hasattr(array, "strides") or array.base is array or type(array).__name__ != "ndarray":
        return None
    address = array.__array_interface__["data"][0]
    owner = _owner(array)
    return (address if owner is array else owner.__array_interface__["data"][0], address)


def reach(device: str, address: int, shape: Any, strides: Any, item: int) -> Span:
    """Returns the bytes between the first and the last of some items."""
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = address + sum(step for step in steps if step < 0)
    return Span(device, low, address + sum(step for step in steps if step > 0) + item)


def _is_at(live: Any, node: Tensor | Array, shift: int) -> bool:
    """Whether a live tensor or array lies as the captured one, `shift` bytes further."""
    if live_span(live).low != node.span().low + shift:
        return False
    return _strides(live) == tuple(node.strides or ())
