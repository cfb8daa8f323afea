"""Which modules are the script's own: those whose file is neither the interpreter's nor that of an
installed package.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import sys
import sysconfig
from types import ModuleType

_NOT_OWN = frozenset(
    {"torch", "reft", "reft_autoload", "numpy", "triton", "sitecustomize", "usercustomize"}
)
_INTERPRETER = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib"))


def is_own(name: str | None) -> bool:
    """Says whether the module of that name, as imported, is one of the script's."""
    if name == "__main__":
        return True
    module = sys.modules.get(name or "")
    if (
        type(module) is not ModuleType
        or module.__name__ != name
        or name.partition(".")[0] in _NOT_OWN
    ):
        return False  # a lazy module must not be made to load
    file = vars(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    return not (file.startswith(_INTERPRETER) or "site-packages" in file or "dist-packages" in file)
