"""A hash of what a loop gets from its loader, to be compared after a resume.

It is taken in every step on the training thread, so a batch costs some ten microseconds whatever
its size: of a large tensor, a sample of its items counts. Tensors on devices are left out, as
reading them would wait for the device.

Threads: the training thread. Errors: none; what cannot be read is left out.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MOST_TENSORS = 8
_WHOLE_BYTES = 16 << 10
_ITEMS = 256  # of a larger tensor


def sample_hash(batch: Any) -> int:
    """Equal for equal batches, in all processes."""
    result = 1
    try:
        for number, tensor in enumerate(_tensors(batch, 0)):
            if number == _MOST_TENSORS:
                break
            result = hash((result, *tensor.shape, *_content(tensor)))
    except Exception:  # noqa: BLE001  # an observer may go blind, it may not break training
        return 0
    return result


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    torch: Any = sys.modules["torch"]  # a Python without torch imports this package in tests
    if type(value) is torch.Tensor:
        yield value
    elif depth < 3 and isinstance(value, (list, tuple)):
        for item in value[:_MOST_TENSORS]:
            yield from _tensors(item, depth + 1)
    elif depth < 3 and hasattr(value, "keys"):
        for key in list(value.keys())[:_MOST_TENSORS]:
            yield from _tensors(value[key], depth + 1)


def _content(tensor: torch.Tensor) -> tuple[int, ...]:
    from reft import _C  # needs torch's libraries; this package is imported before them, too

    torch: Any = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        return ()
    dtype = zlib.crc32(str(tensor.dtype).encode())
    if tensor.nbytes > _WHOLE_BYTES:
        flat = tensor.detach().view(-1)
        tensor = flat[:: flat.numel() // _ITEMS].contiguous()
    return (dtype, *_C.content_hash(tensor))
