"""State of every random generator that a training script uses without naming it.

Threads: the training thread. Errors: whatever torch or numpy raise for a state of another kind.
"""

from __future__ import annotations

import random
import sys
from typing import Any


def capture_rng(cuda: bool = True) -> dict[str, Any]:
    """Takes the state of Python's, numpy's (if imported) and torch's generators.

    Args:
        cuda: Also take the state of every CUDA device, if CUDA is in use. Costs a device synchronisation.

    Returns:
        A picklable dict of plain values for `restore_rng`.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (name, keys.tobytes(), int(position), int(has_gauss), float(gauss))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = _state_bytes(torch.get_rng_state())
        if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [_state_bytes(one) for one in torch.cuda.get_rng_state_all()]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Puts back what `capture_rng` took. Generators absent from `state` are left alone."""
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    if "torch" in state:
        import torch

        torch.set_rng_state(state_tensor(state["torch"]))
        if "cuda" in state:
            devices = min(len(state["cuda"]), torch.cuda.device_count())
            for device in range(devices):
                torch.cuda.set_rng_state(state_tensor(state["cuda"][device]), device)


def generator_state(generator: Any) -> bytes:
    """Gives the state of a `torch.Generator` as bytes."""
    return _state_bytes(generator.get_state())


def state_tensor(state: bytes) -> Any:
    """Makes the tensor that torch's `set_state` functions take."""
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _state_bytes(tensor: Any) -> bytes:
    return bytes(tensor.numpy().tobytes())
