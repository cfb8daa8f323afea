"""Where vaults are. Threads: any. Errors: none."""

from __future__ import annotations

from reft import _C


def in_memory(vault_dir: str) -> bool:
    """Whether vaults take memory: anonymous ones, and files on tmpfs or ramfs.

    Args:
        vault_dir: REFT_VAULT_DIR; it may not exist yet.
    """
    return not vault_dir or _C.is_in_memory(vault_dir)
