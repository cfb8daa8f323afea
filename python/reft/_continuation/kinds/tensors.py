"""Tensors and arrays: contents, and where in memory they lie.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import ast
import functools
import pickle
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reft._state.raw import bytes_of

from .. import attachments, hooks, memory, module_tree
from ..bulk import MappedArray
from ..handles import LEAST_IDENTITY
from ..memory import Span
from ..nodes import KEEP, LATER, MISSING, At, Named, Node, kind, native, type_name
from .constants import Pickled
from .objects import OWNED, Owned, capture_foreign, encode_hooks

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_MOST_OBJECTS = 50_000  # of an array
_FLAGS = frozenset({bool, str, type(None)})
_WRITTEN = "{op} still writes it when the optimizer step returns: call wait() on that op first"
_BORROWED = "view of a weight, restored as a separate copy"
_OTHER_PART = (
    "other ranks had other parts of it, which this rank has not: reft.register() has a tensor or a"
    " module dealt to the ranks of now"
)
_IDENTITIES = frozenset({"int64", "uint64"})
_MOST_IDENTITIES = 256  # items of an array that are looked at
_IDENTITY = "holds what id() gave, which is another number in each process"


@kind
class Tensor(Node):
    """A tensor or a parameter."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    data: Any
    """Contents, item by item; their place in the room for device memory until they arrive."""
    requires_grad: bool
    storage: int
    """Address of the memory that it is a view of."""
    offset: int
    """First item in that memory, in items."""
    strides: tuple[int, ...]
    is_owned: bool
    """Whether that memory is saved elsewhere."""
    bits: tuple[bool, bool]
    """See `memory.bits_of`."""
    tags: Named
    """Values that the script has attached to it."""
    hooks: Named
    """What hooks of the script's on a leaf keep."""
    grad: Any
    """Its gradient, which a script that takes steps of its own may still use; None without one."""
    names: tuple[str | None, ...]
    """Of its dimensions; none if none of them has one."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        torch: Any = sys.modules["torch"]
        if value.requires_grad and value.grad_fn is not None:
            walk.graphs.append((value, place))
        hooked = _encode_hooks(value, place, depth, walk)
        if id(value) in walk.owned or walk.note_births:
            return Owned(encode_tags(value, place, depth, walk), None)
        op = native().writes_still(value)  # before it is copied: then it may have ended half way
        if op is not None:
            return walk.lost(place, type_name(type(value)), _WRITTEN.format(op=op))
        found = native().host_memory(value, walk.bytes_left)
        if found is not None:
            size, shape, contents, is_leaf, pointer, offset, strides, *bits = found
            if contents is None:
                return walk.no_room(value, place, size)
            walk.take(size)
            return cls(
                str(value.dtype)[6:],
                shape,
                "cpu",
                contents,
                is_leaf,
                pointer,
                offset,
                strides,
                pointer in walk.owned_storages,
                tuple(bits),
                encode_tags(value, place, depth, walk),
                hooked,
                _encode_grad(value, place, depth, walk),
                _names_of(value),
            )
        name = type_name(type(value))
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            return walk.lost(place, name, f"tensor of layout {value.layout} on {value.device}")
        size = value.numel() * value.element_size()
        if not walk.take(size):
            return walk.no_room(value, place, size)
        pointer = value.untyped_storage().data_ptr()
        return cls(
            str(value.dtype)[6:],
            tuple(value.shape),
            str(value.device),
            _contents(torch, value, walk),
            value.requires_grad and value.is_leaf,
            pointer,
            value.storage_offset(),
            tuple(value.stride()),
            pointer in walk.owned_storages,
            memory.bits_of(value),
            encode_tags(value, place, depth, walk),
            hooked,
            _encode_grad(value, place, depth, walk),
            _names_of(value),
        )

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        torch: Any = sys.modules["torch"]
        if self.is_owned and self.data:
            target = walk.target(at, live)
            if target is not MISSING:
                walk.put_attributes(self.tags, target, at.place)
                if self._is_like(target, walk):
                    return target  # another name for a weight's memory, put back as the weight's
            walk.problem(at, _BORROWED)
        if self._is_other_part(at, live, walk):
            return walk.problem(at, _OTHER_PART)
        target = walk.room_for(at, self, live)
        if target is not None:
            walk.claim(target)
        dtype = getattr(torch, self.dtype)
        saved = torch.empty(0, dtype=dtype)
        if self.data:
            saved = torch.frombuffer(bytearray(self.data), dtype=dtype)
        saved = saved.reshape(self.shape)
        if self.has_memory():
            made = walk.memory.place(at.index, target)
            walk.contents.append(lambda: memory.fill(made, saved))
        else:
            made = saved.to(self.device) if target is None else target
        if made is target:
            if made.is_leaf and made.requires_grad != self.requires_grad:
                walk.contents.append(lambda: made.requires_grad_(self.requires_grad))
        else:
            made = memory.with_bits(made, self.bits)
            if at.type_name == "torch.nn.parameter.Parameter":
                made = torch.nn.Parameter(made, self.requires_grad)
            elif self.requires_grad:
                made.requires_grad_()
        if self.names != _names_of(made):
            walk.contents.append(lambda: made.rename_(*(self.names or (None,))))
        walk.stands(at, made)
        walk.put_attributes(self.tags, made, at.place)
        if self.hooks or (made is target and made.is_leaf):
            walk.put_hooks(self.hooks, hooks.of_tensor(made), at.place)
        before = made.grad if made.is_leaf else None
        if made.is_leaf and (self.grad is not None or before is not None):
            current = MISSING if before is None else before
            grad = walk.resolve(self.grad, current, f"{at.place}.grad")
            if grad is not KEEP and grad is not before:
                walk.contents.append(lambda: setattr(made, "grad", grad))
        return made

    def _is_other_part(self, at: At, live: Any, walk: RestoreWalk) -> bool:
        """Whether it has the shape of what the ranks of then had of a tensor, and its place in the
        script of this rank, which has another part, has not."""
        if walk.resized is None or (self.dtype, tuple(self.shape)) not in walk.resized.parts:
            return False
        there = [one for one in (walk.born(at.birth), live) if hasattr(one, "shape")]
        return not there or tuple(there[0].shape) != tuple(self.shape)

    def is_made_anew(self) -> bool:
        return not self.is_owned

    def with_data(self, data: bytes) -> Tensor:
        """Returns this node with contents that have arrived from the device."""
        return replace(self, data=data)

    def can_take(self, live: Any) -> bool:
        """Whether the captured contents fit into a live tensor, and may be written there."""
        if tuple(live.shape) != tuple(self.shape) or str(live.dtype)[6:] != self.dtype:
            return False
        if str(live.device) != self.device or live.is_inference():
            return False
        if memory.bits_of(live) != tuple(self.bits):
            return False
        sizes = zip(live.stride(), live.shape, strict=True)
        return all(stride != 0 or size <= 1 for stride, size in sizes)

    def has_memory(self) -> bool:
        """Whether it has bytes that are restored with it."""
        return bool(self.data) and not self.is_owned

    def origin(self) -> int:
        """Captured address of the first item."""
        return self.storage + self.offset * self._item_size()

    def span(self) -> Span:
        """Captured bytes between the first and the last item."""
        item = self._item_size()
        strides = [stride * item for stride in self.strides]
        return memory.reach(self.device, self.origin(), self.shape, strides, item)

    def empty(self) -> Any:
        """Makes memory for a tensor that is alone, laid out as the captured one was: the order in
        which a kernel adds up depends on it."""
        torch: Any = sys.modules["torch"]
        found = self.span()
        size = found.high - found.low
        if size == len(self.data):
            dtype = getattr(torch, self.dtype)
            return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=self.device)
        # A part of what was larger. What lies between its items takes no more than it did.
        whole = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self.view_of(whole, whole.data_ptr() - found.low)

    def view_of(self, buffer: Any, shift: int) -> Any:
        """Makes this tensor over a region's live bytes, `shift` bytes from where it was."""
        torch: Any = sys.modules["torch"]
        dtype = getattr(torch, self.dtype)
        storage = buffer.untyped_storage()
        offset = self.origin() + shift - storage.data_ptr()
        empty = torch.empty(0, dtype=dtype, device=buffer.device)
        return empty.set_(storage, offset // dtype.itemsize, self.shape, self.strides)

    def _is_like(self, live: Any, walk: RestoreWalk) -> bool:
        """Whether a live tensor is the same view of a weight."""
        return (
            walk.memory.is_owned(live)
            and live.storage_offset() == self.offset
            and tuple(live.stride()) == tuple(self.strides)
            and tuple(live.shape) == tuple(self.shape)
            and memory.bits_of(live) == tuple(self.bits)
        )

    def _item_size(self) -> int:
        torch: Any = sys.modules["torch"]
        return int(getattr(torch, self.dtype).itemsize)


@kind
class Array(Node):
    """A NumPy array or scalar whose items are bytes, also one with named fields."""

    dtype: str
    """NumPy's name of it, or the list of its fields; see `_type_called`."""
    shape: tuple[int, ...]
    data: bytes
    storage: int
    """Address of the array that owns the memory."""
    address: int
    """Address of the first item."""
    strides: tuple[int, ...] | None
    """In bytes; None for a scalar, which has no memory."""
    is_owned: bool
    """Whether that memory is saved elsewhere."""
    is_writeable: bool

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if value.dtype == object and value.base is None:
            return ObjectArray.capture(value, place, depth, walk)
        if walk.note_births:
            return OWNED
        dtype = _name_of_type(value.dtype)
        is_record = isinstance(value, sys.modules["numpy"].void)
        if dtype is None or (is_record and value.base is not None):
            return walk.lost(place, type_name(type(value)), f"array of {value.dtype}")
        if not walk.take(value.nbytes):
            return walk.no_room(value, place, value.nbytes)
        if dtype in _IDENTITIES and 0 < value.size <= _MOST_IDENTITIES:
            least = (item for item in value.flat if item >= LEAST_IDENTITY)
            if any(walk.identity_of(int(item)) is not None for item in least):
                walk.lost(place, type_name(type(value)), _IDENTITY)
        shape, data = tuple(value.shape), _bytes_of(value)
        found = memory.memory_of_array(value)
        if found is None:
            return cls(dtype, shape, data, 0, 0, None, False, False)
        storage, address = found
        strides, is_owned = tuple(value.strides), storage in walk.owned_storages
        is_writeable = bool(value.flags.writeable)
        return cls(dtype, shape, data, storage, address, strides, is_owned, is_writeable)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        import numpy

        saved = numpy.frombuffer(self.data, _type_called(self.dtype)).reshape(self.shape)
        if at.type_name != "numpy.ndarray":
            return saved[()]
        if self.is_owned and self.data:
            target = walk.target(at, live)
            if (
                target is not MISSING
                and target.shape == self.shape
                and walk.memory.is_owned(target)
            ):
                return target  # another name for a weight's memory
            walk.problem(at, _BORROWED)
            return saved.copy()
        target = walk.room_for(at, self, live)
        if not self.has_memory():
            return saved.copy() if target is None else target
        made = walk.memory.place(at.index, target)
        walk.contents.append(lambda: numpy.copyto(made, saved))
        if not self.is_writeable:
            walk.afterwards(lambda: made.setflags(write=False))
        return made

    def is_made_anew(self) -> bool:
        return True

    def can_take(self, live: Any) -> bool:
        """Whether the captured contents fit into a live array, and may be written there."""
        return (
            tuple(live.shape) == tuple(self.shape)
            and _name_of_type(live.dtype) == self.dtype
            and bool(live.flags.writeable)
        )

    def has_memory(self) -> bool:
        """Whether it has bytes that are restored with it."""
        return bool(self.data) and self.strides is not None and not self.is_owned

    def origin(self) -> int:
        """Captured address of the first item."""
        return self.address

    def span(self) -> Span:
        """Captured bytes between the first and the last item."""
        item = _type_called(self.dtype).itemsize
        return memory.reach("cpu", self.address, self.shape, self.strides, item)

    def empty(self) -> Any:
        """Makes memory for an array that is alone, laid out as it was."""
        import numpy

        found = self.span()
        size = found.high - found.low
        dtype = _type_called(self.dtype)
        if size == len(self.data) and min(self.strides or (), default=0) >= 0:
            made = numpy.empty(self.shape, dtype, "F" if self._is_fortran() else "C")
            if made.strides == tuple(self.strides or ()):
                return made
        whole: Any = numpy.zeros(size, dtype=numpy.uint8)
        first = self.address - found.low
        return numpy.ndarray(self.shape, dtype, whole, first, self.strides)

    def view_of(self, buffer: Any, shift: int) -> Any:
        """Makes this array over a region's live bytes, `shift` bytes from where it was."""
        import numpy

        offset = self.address + shift - buffer.data_ptr()
        dtype = _type_called(self.dtype)
        return numpy.ndarray(self.shape, dtype, buffer.numpy(), offset, self.strides)

    def _is_fortran(self) -> bool:
        sizes = zip(self.strides or (), self.shape, strict=True)
        steps = [stride for stride, size in sizes if size > 1]
        if len(steps) < 2 or steps != sorted(steps):
            return False
        count = 1
        for size in self.shape:
            count *= size
        return steps[0] == len(self.data) // max(1, count)


@kind
class ObjectArray(Node):
    """A NumPy array of Python objects that owns its memory. A view of one is not captured."""

    shape: tuple[int, ...]
    is_fortran: bool
    items: list[Any]
    """In the order of the memory."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if value.size > _MOST_OBJECTS:
            return walk.lost(place, type_name(type(value)), f"array of {value.size} objects")
        if not walk.take(8 * value.size):
            return walk.no_room(value, place, 8 * value.size)
        is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        flat = value.reshape(-1, order="F" if is_fortran else "C").tolist()
        return cls(tuple(value.shape), is_fortran, walk.encode_all(flat, place, depth))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        import numpy

        target = walk.container(at, live)
        is_alive = target is not MISSING and self._is_like(target)
        if not is_alive:
            target = numpy.empty(self.shape, object, "F" if self.is_fortran else "C")
        walk.stands(at, target)
        flat = (target.T if self.is_fortran else target).reshape(-1)  # a view
        items = walk.children(self.items, flat.tolist() if is_alive else [], at.place)
        if items is None:
            return walk.problem(at, "holds an object made after the first step")

        def fill() -> None:
            for i, item in enumerate(items):
                flat[i] = item

        walk.contents.append(fill)
        return target

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return self.items

    def _is_like(self, live: Any) -> bool:
        return (
            live.dtype == object
            and tuple(live.shape) == tuple(self.shape)
            and bool(live.flags.writeable)
            and bool(live.flags.f_contiguous if self.is_fortran else live.flags.c_contiguous)
        )


@functools.lru_cache(maxsize=256)
def _name_of_type(dtype: Any) -> str | None:
    """Returns what `_type_called` makes the same type of; None where nothing does."""
    if dtype.hasobject:
        return None
    if dtype.names is None:
        return str(dtype.str)
    from numpy.lib import format as npy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what has metadata
        try:
            name = repr(npy.dtype_to_descr(dtype))
            # It tells records from structures, and aligned ones from others.
            return name if repr(_type_called(name)) == repr(dtype) else None
        except (ValueError, TypeError, SyntaxError):
            return None


@functools.lru_cache(maxsize=256)
def _type_called(name: str) -> Any:
    """Returns NumPy's type of that name, or with the fields of that list."""
    import numpy
    from numpy.lib import format as npy

    return npy.descr_to_dtype(ast.literal_eval(name)) if name[0] == "[" else numpy.dtype(name)


def _bytes_of(array: Any) -> bytes:
    """The contents, and zeros between named fields: what stands there is not copied with them."""
    if array.dtype.names is None:
        return bytes(array.tobytes())
    import numpy

    fields = numpy.zeros(array.shape, array.dtype)
    fields[...] = array
    return bytes(fields.tobytes())


def capture_mapped(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures NumPy's memmap: the contents are its file's. One that the script writes is reported:
    the file does not go back to the step that is resumed, and mode "w+" empties it."""
    if value.flags.writeable and value.filename:
        if walk.note_births:
            walk.births.mapped[place] = MappedArray(value)
        first = walk.births.mapped.get(place)
        stands = walk.births.place(value) == place  # not a window of it, made since
        if first is not None and stands and first.has_changed(value):
            why = "a mapped file that the script has written: a resume does not take that back"
            return walk.lost(place, type_name(type(value)), why)
    return capture_foreign(value, place, depth, walk)


def capture_masked(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures NumPy's MaskedArray."""
    if walk.note_births:
        return OWNED
    size = 2 * value.nbytes  # with the mask, about
    if not walk.take(size):
        return walk.no_room(value, place, size)
    return Pickled(pickle.dumps(value, protocol=5))


@kind
class DTensor(Node):
    """The part of a distributed tensor that this rank holds."""

    layout: str
    spec: Any
    """What a new one is made of besides its part; see `placements.spec_of`."""
    requires_grad: bool
    local: Any
    tags: Named
    """Values that the script has attached to it."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        from reft._state.placements import spec_of  # imports torch

        tags = encode_tags(value, place, depth, walk)
        if walk.note_births or walk.is_owned(value):
            return Owned(tags, None)
        local = walk.encode(value._local_tensor, f"{place}._local_tensor", depth + 1)
        is_leaf = value.requires_grad and value.is_leaf
        return cls(_layout_of(value), spec_of(value), is_leaf, local, tags)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING or _layout_of(target) != self.layout:
            if walk.resized is not None or walk.is_foreign:
                return walk.problem(at, LATER if walk.resized is None else _OTHER_PART)
            return self._made(at, walk)
        walk.stands(at, target)
        local = target._local_tensor
        walk.fix(local)
        value = walk.resolve(self.local, local, f"{at.place}._local_tensor")
        if value is not KEEP and value is not local:
            walk.contents.append(lambda: setattr(target, "_local_tensor", value))
        walk.put_attributes(self.tags, target, at.place)
        return target

    def _made(self, at: At, walk: RestoreWalk) -> Any:
        """A new one, of a part that is new, too. Its mesh is that of a weight of a model."""
        from reft._state.placements import made_of  # imports torch

        local = walk.resolve(self.local, MISSING, f"{at.place}._local_tensor")
        if local is KEEP:
            return walk.problem(at, LATER)
        made = made_of(self.spec, local, module_tree.all_tensors())
        if made is None:
            return walk.problem(at, f"{LATER}, on a mesh of devices that no model has")
        if self.requires_grad:
            made.requires_grad_()
        walk.stands(at, made)
        walk.put_attributes(self.tags, made, at.place)
        return made

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return [self.local]


def _layout_of(tensor: Any) -> str:
    """Which part of a distributed tensor this rank has."""
    from reft._state.placements import shards_of  # imports torch

    return f"{tuple(tensor.shape)} {tensor.placements} {shards_of(tensor)}"


def capture_subclass(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Leaves the weights of an optimizer alone, but for what a script has attached to them, and
    reports any other subclass of a tensor."""
    if walk.note_births or walk.is_owned(value):
        return Owned(encode_tags(value, place, depth, walk), None)
    return walk.lost(place, type_name(type(value)), "tensor of an unknown class")


def _names_of(tensor: Any) -> tuple[str | None, ...]:
    # torch 2.13 has no named tensors any more.
    has_names = getattr(tensor, "has_names", None)
    return tuple(tensor.names) if has_names is not None and has_names() else ()


def tags_of(tensor: Any) -> list[tuple[str, Any]]:
    """Returns the attributes that a script may have attached to a tensor (`p.average = …`).

    Packages mark theirs with flags whose names have an underscore in front.
    """
    return [
        (name, value)
        for name, value in tensor.__dict__.items()
        if not (name.startswith("_") and type(value) in _FLAGS)
        and attachments.is_attached(name, value)
    ]


def encode_tags(tensor: Any, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes what a script has attached to a tensor."""
    return walk.encode_attached(tags_of(tensor), tensor, place, depth)


def _encode_hooks(value: Any, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes what hooks on a tensor that is no parameter keep: those are their module's."""
    if not value._backward_hooks and not value._post_accumulate_grad_hooks:
        return []
    if not value.is_leaf or id(value) in walk.owned:
        return []  # what an op has made is made again
    if not walk.note_births and walk.births.place(value) is None:
        return []  # as is what each iteration makes, and registers hooks on
    return encode_hooks(hooks.of_tensor(value), place, depth, walk)


def _encode_grad(value: Any, place: str, depth: int, walk: CaptureWalk) -> Any:
    """Encodes the gradient of a tensor that is no optimizer's."""
    if not value.is_leaf or value.grad is None:
        return None
    return walk.encode(value.grad, f"{place}.grad", depth + 1)


def _contents(torch: Any, tensor: Any, walk: CaptureWalk) -> Any:
    """What lies in its memory, item by item, or where in the room it will be."""
    if tensor.numel() == 0:
        return b""
    plain = memory.without_bits(tensor.detach())
    place = walk.device_parts.take(plain)
    if place:
        return place
    return bytes_of(plain)
