"""reft keeps PyTorch training alive.

``torch.distributed.init_process_group(backend="reft")`` is all that a script needs; importing this
package is optional and does not import torch.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

__version__ = importlib.metadata.version("reft")  # declared in pyproject.toml
__all__ = ["__version__", "register", "resume", "snapshot_now", "status", "step"]


def register(name: str, obj: Any) -> None:
    """Adds state that reft cannot find by itself.

    Args:
        name: unique and the same on every run.
        obj: a tensor (any shape and dtype; its bytes are saved at every step), a module (its
            parameters and buffers), or an object with ``state_dict``/``load_state_dict`` (pickled).
    """
    from reft._state import registry

    registry.register(name, obj)


def resume(**defaults: Any) -> Any:
    """Gives named values back as the newest committed snapshot had them, and saves them with every
    snapshot from now on.

    For scripts that keep their own position instead of having their loops continued by reft; works
    with ``REFT_RESUME=exact`` and ``state``. Call it after ``init_process_group`` and before the
    training loop::

        state = reft.resume(epoch=0, step=0, best=float("inf"))
        for step in range(state.step, 1000):
            state.step = step                 # the iteration in progress: assign it before
            optimizer.step() ...
            optimizer.step()

    Assign the iteration *in progress*, not the next one: a restarted script computes its first
    iteration once more, and when the optimizer step of that iteration returns, reft replaces
    everything by the snapshot's state of that same iteration. If the tensors of an edited script no
    longer match the snapshot, training starts from its beginning (reft reports it), but these
    values are still those of the snapshot. The script skips data itself, unless reft continues its
    loop.

    Args:
        **defaults: names, and their values without a snapshot. Each snapshot pickles the values:
            keep them small.

    Returns:
        An object with one attribute per name. Without a process group of backend "reft" it holds
        the defaults. A second call gives the same object with the further names.

    Raises:
        ValueError: a name begins with an underscore.
    """
    from reft._resume import explicit
    from reft._session import current

    session = current.session()
    return explicit.resume(defaults, {} if session is None else session.registered)


def step() -> None:
    """Marks the end of a training step where no ``torch.optim`` optimizer does (foreign optimizers,
    captured graphs).

    The snapshot is of the state at this call. reft does not learn when the script writes the state
    again. On a CUDA device, work enqueued after this call waits, on the device, until the copy is
    done. On the host, reft finds a write that comes before the copy, drops that snapshot, and from
    then on copies the tensor within this call. Does nothing without a group of backend "reft".
    """
    from reft._session import current

    current.explicit_step(sys._getframe(1))


def snapshot_now(timeout_sec: float = 60.0) -> int:
    """Waits until the newest captured step is committed by all ranks, or given up.

    Returns:
        The newest committed step of this run, -1 if there is none.
    """
    from reft._session import current

    return current.snapshot_now(timeout_sec)


def status() -> dict[str, Any]:
    """Counters of this rank; times in nanoseconds. Empty without a group of backend "reft"."""
    from reft._session import current

    return current.status()


def _autoload() -> None:
    # `import reft` before `import torch` must work: torch's own autoload then finds the name
    # registered already.
    if "torch" in sys.modules:
        import reft_autoload

        reft_autoload.register()


_autoload()
