"""State of every random generator that a training script uses without naming it.

Threads: the training thread. Errors: whatever torch or numpy raise for a state of another kind.
"""

from __future__ import annotations

import pickle
import random
import sys
from array import array
from typing import Any

from reft._state import names
from reft._state.raw import bytes_of

from . import plain

_SEED = "reft seed"  # key added to the state of a bit generator


def capture_rng(cuda: bool = True) -> dict[str, Any]:
    """Takes the state of Python's, numpy's (if imported) and torch's generators.

    Args:
        cuda: Also take the state of every CUDA device, if CUDA is in use. Costs a device
            synchronisation.

    Returns:
        A picklable dict of plain values for `restore_rng`.
    """
    state: dict[str, Any] = {"python": _packed(random.getstate())}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (name, keys.tobytes(), int(position), int(has_gauss), float(gauss))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = bytes_of(torch.get_rng_state())
        if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [bytes_of(one) for one in torch.cuda.get_rng_state_all()]
    return state


def _packed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Python's random state with its words as bytes.

    One by one, its 625 integers would be most of the cost of a capture.
    """
    version, words, gauss_next = state
    return (version, array("I", words).tobytes(), gauss_next)


def _unpacked(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `_packed` was given."""
    version, words, gauss_next = state
    return (version, tuple(array("I", words)), gauss_next)


def restore_rng(state: dict[str, Any]) -> None:
    """Puts back what `capture_rng` took. Generators absent from `state` are left alone."""
    if "python" in state:
        random.setstate(_unpacked(state["python"]))
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state(
            (name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, gauss)
        )
    if "torch" in state:
        import torch

        torch.set_rng_state(state_tensor(state["torch"]))
    if "cuda" in state:
        import torch

        for device in range(min(len(state["cuda"]), torch.cuda.device_count())):
            torch.cuda.set_rng_state(state_tensor(state["cuda"][device]), device)


def generator_state(generator: Any) -> bytes:
    """Gives the state of a `torch.Generator` as bytes."""
    return bytes_of(generator.get_state())


def state_tensor(state: bytes) -> Any:
    """Makes the tensor that torch's `set_state` functions take."""
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def is_random(value: Any) -> bool:
    """Says whether an object is a random generator that a script made for itself."""
    return is_random_kind(type(value))


def is_random_kind(kind: type) -> bool:
    """As `is_random`, of the objects of a class."""
    root = kind.__module__.partition(".")[0]
    if root == "torch":
        return kind.__name__ == "Generator" and kind is sys.modules["torch"].Generator
    if root == "numpy":
        is_there = kind.__module__.startswith("numpy.random")
        return is_there and (
            kind.__name__ in ("Generator", "RandomState") or is_bit_generator(kind)
        )
    return root == "random" and kind is random.Random


def is_bit_generator(kind: type) -> bool:
    """Whether a class is one of those that NumPy's generators draw their bits from."""
    if not kind.__module__.startswith("numpy.random"):
        return False
    return issubclass(kind, sys.modules["numpy"].random.BitGenerator)


def object_state(generator: Any) -> Any:
    """Gives the state of a generator object for which `is_random` holds, as plain values."""
    root = type(generator).__module__.partition(".")[0]
    if root == "torch":
        return (str(generator.device), generator_state(generator))
    if root == "random":
        return _packed(generator.getstate())
    bits = _bits_of(generator)
    if bits is None:
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(dict(bits.state, **_seed_of(bits)))


def set_object_state(generator: Any, state: Any) -> None:
    """Puts back what `object_state` gave.

    Args:
        generator: A generator of the same type.
        state: From `object_state`; a pickle inside it names classes of numpy at most.
    """
    root = type(generator).__module__.partition(".")[0]
    if root == "torch":
        generator.set_state(state_tensor(state[1]))
    elif root == "random":
        generator.setstate(_unpacked(state))
    else:
        value = plain.loads(state, names.ARRAYS)
        bits = _bits_of(generator)
        if bits is not None:
            seed = value.pop(_SEED, None)
            bits.state = value
            if seed is not None and seed != _seed_of(bits).get(_SEED):
                put_sequence(bits, _sequence(*seed))  # one that spawned more cannot go back
        else:
            generator.set_state(value)


def new_object(kind: str, state: Any) -> Any:
    """Makes a generator object with the given state.

    Args:
        kind: Full name of its type.
        state: From `object_state`.
    """
    made: Any
    if kind.startswith("torch."):
        import torch

        made = torch.Generator(state[0])
    elif kind.startswith("random."):
        made = random.Random()
    else:
        import numpy

        value = plain.loads(state, names.ARRAYS)
        seed: Any = value.get(_SEED)
        sequence = None if seed is None else _sequence(*seed)
        bits = getattr(numpy.random, value["bit_generator"])(sequence)
        if kind.endswith("RandomState"):
            made = numpy.random.RandomState(bits)
        else:
            made = numpy.random.Generator(bits) if kind.endswith("Generator") else bits
    set_object_state(made, state)
    return made


def sequence_of(generator: Any) -> Any:
    """The SeedSequence that a generator spawns from; None if it has none."""
    sequence = getattr(_bits_of(generator), "seed_seq", None)
    return sequence if type(sequence).__name__ == "SeedSequence" else None


def put_sequence(generator: Any, sequence: Any) -> None:
    """Has a generator spawn from a sequence.

    Raises:
        TypeError: this version of NumPy cannot.
    """
    bits = _bits_of(generator)
    if bits.seed_seq is not sequence:
        bits.__setstate__((bits.state, sequence))


def _sequence(entropy: Any, key: tuple[int, ...], pool_size: int, spawned: int) -> Any:
    make = sys.modules["numpy"].random.SeedSequence
    return make(entropy, spawn_key=key, pool_size=pool_size, n_children_spawned=spawned)


def _seed_of(bits: Any) -> dict[str, Any]:
    """What `spawn` makes new generators of: entropy, key, size of the pool, their number so far."""
    sequence = sequence_of(bits)
    if sequence is None or not _is_plain(sequence.entropy):
        return {}
    key = tuple(map(int, sequence.spawn_key))
    return {_SEED: (sequence.entropy, key, sequence.pool_size, sequence.n_children_spawned)}


def _is_plain(entropy: Any) -> bool:
    items = entropy if type(entropy) in (list, tuple) else [entropy]
    return all(type(item) is int for item in items)


def _bits_of(generator: Any) -> Any:
    """What holds the state of a generator of NumPy's; None for a RandomState."""
    if is_bit_generator(type(generator)):
        return generator
    return getattr(generator, "bit_generator", None)
