"""What this rank tells its agent before it ends, and torchrun's error file.

An exception that nothing catches is told when Python prints it, through `sys.excepthook`, and one
that ends a thread through `threading.excepthook`; the hooks that were there before run next. Where a
script has replaced the hook since, `leave` finds the exception in `sys.last_value`. Faults of
native code and exit statuses are told by C++ (hang_detect/rank/last_words.h).

torchrun's summary shows no traceback for a script without `@record`: its error file is missing. So
a rank that failed by itself writes the file, unless something wrote it. One that says that another
failed does not: torchrun takes the failure with the least time for the first one, and a killed rank,
which writes none, gets the time at which torchrun looked.

Threads: the hooks run on the thread that failed. Errors: none: words that cannot be said are lost.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from reft import _C, _voice
from reft._link import agent_protocol

_MOST_MESSAGE = 4000  # characters
_MOST_FRAMES = 48  # on either end of the stack, half each
_MOST_CAUSES = 4
_WORKER = re.compile(r"Caught (\S+) in (DataLoader worker process \d+|pin memory thread.*?|replica .*?)\.\n")
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
# What torch, gloo and NCCL raise when a peer is gone; hang_detect/verdict/crash.cc has more.
_OF_PEERS = re.compile(
    r"Connection (closed|reset) by peer|gloo/transport|Gloo connectFullMesh|Socket closed|Broken pipe"
    r"|remote process exited|NCCL communicator was aborted|recvValue failed|sendBytes failed"
)


def describe(error: BaseException, tb: TracebackType | None) -> dict[str, Any]:
    """The fields of last words of kind `exception`: type, message, frames (newest first), causes,
    errno, thread.

    An exception of a data worker has the worker's frames before those of the rank.
    """
    frames = [
        {"file": frame.f_code.co_filename, "line": line or 0, "function": frame.f_code.co_name}
        for frame, line in traceback.walk_tb(tb)
    ][::-1]
    message, place = _text(error), ""
    if worker := _WORKER.match(message):
        inner = [
            {"file": file, "line": int(line), "function": name}
            for file, line, name in _FRAME.findall(message)
        ]
        frames, place = inner[::-1] + frames, worker[2]
        message = message.rstrip().rsplit("\n", 1)[-1].removeprefix(f"{worker[1]}: ")
    if len(frames) > _MOST_FRAMES:
        frames = frames[: _MOST_FRAMES // 2] + frames[-_MOST_FRAMES // 2 :]
    return {
        "type": _type_name(error),
        "message": message[:_MOST_MESSAGE],
        "thread": place,
        "frames": frames,
        "causes": [f"{_type_name(cause)}: {_text(cause)[:300]}" for cause in _causes(error)],
        "errno": _errno(error),
        "at_ns": time.monotonic_ns(),
    }


def _type_name(error: BaseException) -> str:
    kind = type(error)
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # a class of the script
        return ""


def _errno(error: BaseException) -> int:
    for one in (error, *_causes(error)):
        number = getattr(one, "errno", None)
        if isinstance(one, OSError) and isinstance(number, int) and 0 < number < 4096:
            return number
    return 0


def _causes(error: BaseException) -> list[BaseException]:
    """What it was raised from, or while handling, newest first."""
    found: list[BaseException] = []
    while len(found) < _MOST_CAUSES:
        after = error.__cause__
        if after is None and not error.__suppress_context__:
            after = error.__context__
        if after is None or after in found:
            break
        found.append(error := after)
    return found


def of_a_peer(error: BaseException) -> bool:
    """Whether it says that another rank, or the network, failed."""
    import torch.distributed as dist

    return any(
        isinstance(one, dist.DistError) or _OF_PEERS.search(_text(one))
        for one in (error, *_causes(error))
    )


class LastWords:
    """The hooks of one session; `leave` takes them out.

    Args:
        client: the rank's connection to its agent; not kept alive.
    """

    def __init__(self, client: _C.AgentClient) -> None:
        self._client = weakref.ref(client)
        self._process = os.getpid()
        self._said: BaseException | None = None
        self._before: Callable[..., Any] = sys.excepthook
        self._before_in_thread: Callable[..., Any] = threading.excepthook
        # Bound methods are made anew by each access, so these are what `leave` compares.
        self._hook, self._hook_in_thread = self._on_exception, self._on_thread
        sys.excepthook = self._hook
        threading.excepthook = self._hook_in_thread
        _C.install_fault_words(client)

    def leave(self, at_exit: bool) -> str:
        """Takes the hooks out where they are still the newest.

        Args:
            at_exit: Python ends; what ended it is told if a later hook kept it from this one.

        Returns:
            torchrun's error file, which an exit code that is not 0 has to fill; "" if an exception
            has said more, or an op has failed.
        """
        error = getattr(sys, "last_value", None)
        if at_exit and isinstance(error, BaseException) and not isinstance(error, SystemExit):
            self._say(error, error.__traceback__)
        if sys.excepthook is self._hook:
            sys.excepthook = self._before
        if threading.excepthook is self._hook_in_thread:
            threading.excepthook = self._before_in_thread
        told = self._said is not None or _C.an_op_failed()
        return "" if told else _free_error_file()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        self._say(error, tb)
        self._before(kind, error, tb)

    def _on_thread(self, args: Any) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            name = "a thread" if args.thread is None else f"thread {args.thread.name}"
            self._tell("thread", args.exc_value, args.exc_traceback, name)
        self._before_in_thread(args)

    def _say(self, error: BaseException, tb: TracebackType | None) -> None:
        if self._said is error or os.getpid() != self._process:
            return
        self._said = error
        self._tell("exception", error, tb, "")
        try:
            write_error_file(error)
        except Exception as problem:  # noqa: BLE001  # the script's end goes on
            _voice.debug(f"no error file: {problem!r}")

    def _tell(
        self, kind: str, error: BaseException, tb: TracebackType | None, thread: str
    ) -> None:
        try:
            client = self._client()
            if client is not None and os.getpid() == self._process:
                fields = describe(error, tb) | ({"thread": thread} if thread else {})
                client.send(agent_protocol.LAST_WORDS, json.dumps({"kind": kind} | fields))
        except Exception as problem:  # noqa: BLE001
            _voice.debug(f"no last words: {problem!r}")


def _free_error_file() -> str:
    """The path of torchrun's error file (TORCHELASTIC_ERROR_FILE) if nothing has written it, or ""."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    target = Path(path)
    free = path and target.parent.is_dir() and not (target.exists() and target.stat().st_size > 0)
    return path if free else ""


def write_error_file(error: BaseException) -> None:
    """Writes torchrun's error file as `@record` would, if there is none and `error` is the rank's
    own failure."""
    path = _free_error_file()
    if not path or isinstance(error, (SystemExit, KeyboardInterrupt)):
        return
    # A script may have put an exception of its own in the place of what an op raised.
    if of_a_peer(error) or _C.an_op_failed():
        return
    text = "".join(traceback.format_exception(error))
    message = {
        "message": f"{_type_name(error)}: {_text(error)[:_MOST_MESSAGE]}",
        "extraInfo": {"py_callstack": text[-20_000:], "timestamp": str(int(time.time()))},
    }
    target = Path(path)
    temporary = target.with_name(f"{target.name}.reft-{os.getpid()}")
    temporary.write_text(json.dumps({"message": message}))
    temporary.replace(target)  # whole, or not at all
