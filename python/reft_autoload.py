"""Registers the backend "reft" with ``torch.distributed``; torch calls :func:`register` at
``import torch``.

This module stands outside the package ``reft``, so that neither import can depend on the other. An
error here would break ``import torch`` for every program of the environment, so it raises nothing,
starts nothing, loads no native library and prints nothing. Problems are reported when a program
asks for ``backend="reft"``.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_NAME = "reft"
_OLDEST_TORCH = (2, 11)
_REMEDY = (
    "Install it again for this torch (`pip install --force-reinstall --no-deps .` in its checkout)"
)


def register() -> None:
    """Registers the backend; again is harmless. Never raises."""
    try:
        _register()
    except Exception:
        # torch without torch.distributed, or one that has changed: a program that uses the name
        # gets torch's own error.
        pass


def _register() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "distributed") or not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    if _NAME.upper() in c10d.Backend._plugins:
        return
    c10d.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if _disabled():
        _resolve_to_plain(c10d)
    elif os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0").lower() not in ("", "0", "false"):
        _warn_of_torchcomms(c10d)


def _disabled() -> bool:
    return os.environ.get("REFT_DISABLE", "0") == "1"


def _resolve_to_plain(c10d: Any) -> None:
    """REFT_DISABLE=1: the name stands for torch's own backends, built by torch's own code."""
    import torch

    def plain() -> tuple[str, Any]:
        kinds = c10d.ProcessGroup.BackendType
        if torch.cuda.is_available() and c10d.is_nccl_available():
            return "cpu:gloo,cuda:nccl", kinds.NCCL
        return "gloo", kinds.GLOO

    original = c10d.BackendConfig.__init__

    def init(self: Any, backend: Any) -> None:
        text = str(backend).lower()
        if text == _NAME:
            text, kind = plain()
            c10d.Backend.backend_type_map[_NAME] = kind
            original(self, text)
        elif f":{_NAME}" in text:
            pairs = [pair.split(":") for pair in text.split(",")]
            plain_of = {"cuda": "nccl"}
            chosen = [(d, plain_of.get(d, "gloo") if b == _NAME else b) for d, b in pairs]
            original(self, ",".join(f"{device}:{name}" for device, name in chosen))
        else:
            original(self, backend)

    c10d.BackendConfig.__init__ = init


def _warn_of_torchcomms(c10d: Any) -> None:
    """With this switch torch replaces every backend by its own and never asks for ours."""
    original = c10d.BackendConfig.__init__

    def init(self: Any, backend: Any) -> None:
        original(self, backend)
        enabled = getattr(c10d, "_use_torchcomms_enabled", lambda: False)()
        handles = getattr(c10d, "_torchcomms_handles_backend", lambda _name: True)
        if enabled and _NAME in self.device_backend_map.values() and handles(_NAME):
            _warn(
                "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set, so torch uses torchcomms in place of"
                " reft: nothing is protected. Unset it"
            )

    c10d.BackendConfig.__init__ = init


def _warn(text: str) -> None:
    from reft import _voice

    _voice.warn(text)


def _create(options: Any, pg_options: Any) -> Any:
    """Creator for ``torch.distributed``: returns a ``c10d.Backend``.

    Raises:
        RuntimeError: reft is not usable here; the text says why and what to do. No group has been
            made.
    """
    if _disabled():
        # Set after torch was imported, or the caller has made no BackendConfig.
        from torch.distributed import distributed_c10d as c10d

        _warn("REFT_DISABLE=1 was set after torch was imported: the group is plain gloo")
        return c10d.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
    why = unfit()
    if not why:
        try:
            from reft._torch import backend
        except ImportError as error:
            why = _unloadable(error)
    if why:
        raise RuntimeError(f'backend "reft" {why}, or set REFT_DISABLE=1 for plain gloo/NCCL')
    return backend.create_backend(options, pg_options)


def unfit() -> str:
    """Why reft does not work with the torch that is imported, and what to do; "" if it does."""
    import torch

    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else _OLDEST_TORCH
    if version < _OLDEST_TORCH:
        return f"needs torch 2.11 or newer, this is {torch.__version__}. Use a newer torch"
    try:
        from reft import _C
    except ImportError as error:
        return _unloadable(error)
    built_for = ".".join(_C.torch_version.split(".")[:2])
    if built_for != ".".join(map(str, version)):
        return f"was built for torch {built_for}, this is {torch.__version__}. {_REMEDY}"
    return ""


def _unloadable(error: ImportError) -> str:
    from importlib import metadata

    import torch

    needed = metadata.requires("reft") or []
    fits = next((text for text in needed if text.startswith("torch")), "any torch")
    return (
        f"cannot load its native library (for {fits}) with torch {torch.__version__}: {error}."
        f" {_REMEDY}"
    )
