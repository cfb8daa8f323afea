"""reft keeps PyTorch training alive.

``torch.distributed.init_process_group(backend="reft")`` is all that a script needs; importing this package is optional
and does not import torch.
"""

from __future__ import annotations

import sys
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "register", "snapshot_now", "status", "step"]


def register(name: str, obj: Any) -> None:
    """Adds state that reft cannot find by itself.

    Args:
        name: unique and the same on every run.
        obj: a tensor (any shape and dtype; its bytes are saved at every step), a module (its parameters and buffers), or an
            object with ``state_dict``/``load_state_dict`` (pickled).
    """
    from reft import _registry

    _registry.register(name, obj)


def step() -> None:
    """Marks the end of a training step where no ``torch.optim`` optimizer does (foreign optimizers, captured graphs).

    The state to save is the one at this call; it must not be written before the next forward has begun. Does nothing
    without a process group of backend "reft".
    """
    from reft import _runtime

    _runtime.explicit_step(sys._getframe(1))


def snapshot_now(timeout_sec: float = 60.0) -> int:
    """Waits until the newest captured step is committed by all ranks, or given up.

    Returns:
        The newest committed step of this run, -1 if there is none.
    """
    from reft import _runtime

    return _runtime.snapshot_now(timeout_sec)


def status() -> dict[str, Any]:
    """Counters of this rank; times in nanoseconds. Empty without a process group of backend "reft"."""
    from reft import _runtime

    return _runtime.status()


def _autoload() -> None:
    # `import reft` before `import torch` must work: torch's own autoload then finds the name registered already.
    if "torch" in sys.modules:
        import reft_autoload

        reft_autoload.register()


_autoload()
