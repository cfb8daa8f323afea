"""Names that a pickle may hold: exact pairs of module and name, each of which only makes a value.

Threads: values. Errors: none.
"""

from __future__ import annotations

Names = frozenset[tuple[str, str]]


def of(module: str, names: str) -> Names:
    """Pairs of one module."""
    return frozenset((module, name) for name in names.split())


# Of numbers, dates and paths. `complex` and `Ellipsis` are atoms of nodes.
VALUES: Names = (
    of("builtins", "complex Ellipsis range slice")
    | of("datetime", "date time datetime timedelta timezone")
    | of("fractions", "Fraction")
    | of("uuid", "UUID SafeUUID")
    | of("zoneinfo", "ZoneInfo")
    | of(
        "decimal",
        "Decimal DecimalTuple Context Clamped InvalidOperation DivisionByZero Inexact Rounded"
        " Subnormal Overflow Underflow FloatOperation",
    )
)
_PATHS = "PosixPath PurePosixPath WindowsPath PureWindowsPath Path PurePath"
VALUES |= of("pathlib", _PATHS) | of("pathlib._local", _PATHS)
# NumPy 1 and 2 keep what its pickles name in different modules.
ARRAYS: Names = (
    of("numpy", "dtype ndarray")
    | of("numpy.core.multiarray", "_reconstruct scalar")
    | of("numpy._core.multiarray", "_reconstruct scalar")
    | of("numpy.core.numeric", "_frombuffer")
    | of("numpy._core.numeric", "_frombuffer")
)
MASKED_ARRAYS: Names = of("numpy.ma", "MaskedArray") | of(
    "numpy.ma.core", "MaskedArray _mareconstruct"
)
CONTAINERS: Names = of("collections", "deque defaultdict OrderedDict Counter") | of(
    "builtins", "list dict set tuple int float bool str bytes frozenset bytearray"
)
# Of state that objects of the script keep.
SETTINGS: Names = (
    of("argparse", "Namespace")
    | of("types", "SimpleNamespace")
    | of("torch", "Size device")
)
GENERATORS: Names = (
    of("random", "Random")
    | of(
        "numpy.random._pickle",
        "__generator_ctor __bit_generator_ctor __randomstate_ctor",
    )
    | of("numpy.random._mt19937", "MT19937")
    | of("numpy.random._pcg64", "PCG64 PCG64DXSM")
    | of("numpy.random._philox", "Philox")
    | of("numpy.random._sfc64", "SFC64")
    | of("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence")
)
