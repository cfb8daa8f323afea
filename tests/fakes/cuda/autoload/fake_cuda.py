"""Loads the operators of the stand-in devices at the end of `import torch`, by torch's own way for device backends."""

import os


def load() -> None:
    """Called by torch. Without the environment of `environment.py` nothing happens."""
    library = os.environ.get("FAKE_CUDA_OPERATORS")
    if library:
        import ctypes

        ctypes.CDLL(library)
