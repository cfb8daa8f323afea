"""Small state that lies on devices (a loss that is kept, a counter of steps): there before the
snapshot is sealed, not at the capture.

Reading a device's memory on the spot would make the host wait for everything that the device was
asked for, at every step, and the device then idles until the host has asked for more. So a capture
has room for their contents, and the snapshot engine copies them there
(`_C.Rank.capture(…, parts, writers)`) while the host goes on.

What other streams than the one that trains may write (a batch that is fetched ahead, a running sum)
is copied behind what they were asked for before the capture, and in front of what they are asked
for after it. They are known when the script's variables hold them.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MANY = 128  # tensors, from which on small ones are gathered before they are copied
_SMALL = 4096  # bytes
_CUDA = 1  # torch's number of this kind of device
_MARK = os.urandom(16)  # in front of the place, to find it in a pickle


class DeviceParts:
    """Collects tensors of one capture.

    Args:
        devices: Indices of the CUDA devices whose memory the snapshot engine copies.
    """

    def __init__(self, devices: Collection[int] = ()) -> None:
        self._devices = devices
        self._parts: list[tuple[Any, int]] = []
        self._writers: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle
        self._waited_on: set[int] = set()  # devices on which placed() has waited for them
        self._size = 0

    def take(self, tensor: Any) -> tuple[int, int] | None:
        """Takes the contents of a tensor; None: the engine does not copy from where it lies.

        Returns:
            What stands in the node for them: begin and end of their place in the room for all of
            them.

        Args:
            tensor: Strided, with at least one item, without bits of conjugation. Writes that its
                device is asked for after the capture come behind the copy.
        """
        if not tensor.is_cuda or tensor.get_device() not in self._devices:
            return None
        begin, self._size = self._size, self._size + tensor.nbytes
        self._parts.append((tensor, begin))
        return begin, self._size

    def mark(self) -> tuple[int, int]:
        """What has been taken until now, for `forget_since`."""
        return len(self._parts), self._size

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Gives back what was taken since."""
        count, self._size = mark
        del self._parts[count:]

    def written_by(self, stream: torch.Stream) -> None:
        """Notes a stream that the script holds."""
        import torch

        device = stream.device_index
        if stream.device_type == _CUDA and device in self._devices:
            same = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=device, device_type=_CUDA
            )
            self._writers[device, same.cuda_stream] = same

    def writers(self) -> list[tuple[int, int]]:
        """Returns the streams that the script holds: device and handle.

        They may write these tensors, or the model's.
        """
        return sorted(self._writers)

    def room(self) -> bytes:
        """Gives what to pickle with the nodes: room for all contents."""
        return _MARK + bytes(self._size) if self._parts else b""

    def placed(self, pickled: bytes) -> list[tuple[Any, int]]:
        """Returns contiguous tensors, and where in a pickle the contents of each belong.

        Args:
            pickled: A pickle that holds `room()`.
        """
        if not self._parts:
            return []
        start = pickled.find(_MARK) + len(_MARK)
        parts = self._parts if len(self._parts) <= _MANY else self._gathered()
        return [(self._contiguous(tensor), start + begin) for tensor, begin in parts]

    def _contiguous(self, tensor: Any) -> Any:
        if tensor.is_contiguous():
            return tensor
        self._wait_for_writers(tensor.get_device())
        return tensor.contiguous()

    def _gathered(self) -> list[tuple[Any, int]]:
        """Small tensors that follow each other on one device become one there: a copy is a call
        into the driver, and a stream takes about a thousand before the next one waits for the
        device."""
        import torch

        parts = []
        for (index, small), following in itertools.groupby(
            self._parts, lambda part: (part[0].get_device(), part[0].nbytes <= _SMALL)
        ):
            group = list(following)
            if not small:
                parts += group
                continue
            self._wait_for_writers(index)
            with torch.no_grad():
                # Those of one type first: a view of each as bytes would take longer than all else.
                same = itertools.groupby(
                    (tensor.detach() for tensor, _ in group), lambda tensor: tensor.dtype
                )
                flat = [
                    torch.cat([tensor.reshape(-1) for tensor in one]).view(torch.uint8)
                    for _, one in same
                ]
                parts.append((torch.cat(flat), group[0][1]))
        return parts

    def _wait_for_writers(self, index: int) -> None:
        """The stream that trains reads tensors of a device here and now."""
        if index in self._waited_on:
            return
        import torch

        self._waited_on.add(index)
        current = torch.cuda.current_stream(index)
        for (device, _), stream in self._writers.items():
            if device == index and stream != current:
                current.wait_stream(stream)


def contents(place: tuple[int, int], room: bytes) -> bytes:
    """Gives what has come into the room for a tensor; `place` is what `take` returned for it."""
    start = len(_MARK)
    return room[start + place[0] : start + place[1]]
