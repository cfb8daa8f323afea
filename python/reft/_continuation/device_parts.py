"""Small state that lies on devices (a loss that is kept, a counter of steps): there before the snapshot is sealed, not at the capture.

Reading a device's memory on the spot would make the host wait for everything that the device was asked for, at every step, and the
device then idles until the host has asked for more. So a capture has room for their contents, and the snapshot engine copies them
there (`_C.Engine.capture(…, parts)`) while the host goes on.

What other streams than the one that trains may write (a batch that is fetched ahead, a running sum) is copied behind what they were
asked for before the capture, and in front of what they are asked for after it. They are known when the script's variables hold them.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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
        self._size = 0

    def take(self, tensor: Any) -> tuple[int, int] | None:
        """Takes the contents of a tensor; None: the engine does not copy from where it lies.

        Returns:
            What stands in the node for them: begin and end of their place in the room for all of them.

        Args:
            tensor: Strided, with at least one item, without bits of conjugation. Writes that its device is asked for after the capture
                come behind the copy.
        """
        if not tensor.is_cuda or tensor.get_device() not in self._devices:
            return None
        begin, self._size = self._size, self._size + tensor.nbytes
        self._parts.append((tensor, begin))
        return begin, self._size

    def written_by(self, stream: torch.Stream) -> None:
        """Notes a stream that the script holds: it may write tensors that were taken, or will be."""
        import torch

        device = stream.device_index
        if stream.device_type == _CUDA and device in self._devices:
            same = torch.cuda.Stream(stream_id=stream.stream_id, device_index=device, device_type=_CUDA)
            self._writers[device, same.cuda_stream] = same

    def writers(self, anyway: bool = False) -> list[tuple[int, int]]:
        """Gives the streams that may write the tensors, beside those that train: device and handle.

        Args:
            anyway: Also if there are no tensors.
        """
        return sorted(self._writers) if self._parts or anyway else []

    def room(self) -> bytes:
        """Gives what to pickle with the nodes: room for all contents."""
        return _MARK + bytes(self._size) if self._parts else b""

    def placed(self, pickled: bytes) -> list[tuple[Any, int]]:
        """Gives each tensor, contiguous, and where in `pickled`, which holds `room()`, its contents belong."""
        start = pickled.find(_MARK) + len(_MARK) if self._parts else 0
        return [(self._contiguous(tensor), start + begin) for tensor, begin in self._parts]

    def _contiguous(self, tensor: Any) -> Any:
        if tensor.is_contiguous():
            return tensor
        import torch

        current = torch.cuda.current_stream(tensor.get_device())
        for (device, _), stream in self._writers.items():
            if device == tensor.get_device() and stream != current:
                current.wait_stream(stream)  # it reads the tensor here and now
        return tensor.contiguous()


def contents(place: tuple[int, int], room: bytes) -> bytes:
    """Gives what has come into the room for a tensor; `place` is what `take` returned for it."""
    start = len(_MARK)
    return room[start + place[0] : start + place[1]]


def put_in(nodes: list[Any], room: bytes) -> None:
    """Puts what has come into the room into the nodes of tensors."""
    for index, node in enumerate(nodes):
        if node[0] == "tensor" and type(node[6]) is tuple:
            nodes[index] = (*node[:6], contents(node[6], room), *node[7:])
