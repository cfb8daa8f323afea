"""The session of this process: there is at most one, that of the newest default process group.

This module owns it. A forked child has none: it sees reft disabled.

Threads: the training thread. Errors: nothing raises into training, unless REFT_STRICT=1.
"""

from __future__ import annotations

import atexit
import os
from types import FrameType
from typing import Any

from reft import _C, _voice
from reft._link import agreement, settings
from reft._link.trusted_store import TrustedStore
from reft._session import startup
from reft._session.session import Session


class _Owner:
    """Holds the session.

    Attributes:
        session: the present one.
        made: how many default process groups this process has made.
        inherited: sessions of parent processes. They stay alive until this process ends, as freeing
            their tensors may take locks that threads of the parent held.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.made = 0
        self.inherited: list[Session] = []
        self._registered = False

    def replace(self, session: Session | None) -> None:
        """Makes `session` the present one and ends the one before."""
        before, self.session = self.session, session
        if before is not None:
            before.stop(at_exit=False)

    def watch_process(self) -> None:
        """Has the session end with the process, and not with its forked children. Idempotent."""
        if not self._registered:
            self._registered = True
            atexit.register(self._at_exit)
            os.register_at_fork(after_in_child=self._in_child)

    def _at_exit(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            try:
                session.stop(at_exit=True)
            except Exception as error:
                _voice.say(f"error at exit: {error}")

    def _in_child(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.abandon()
            self.inherited.append(session)


_owner = _Owner()


def session() -> Session | None:
    """The session of this process, None if it has none."""
    return _owner.session


def on_default_group(store: TrustedStore, rank: int, world_size: int) -> None:
    """Starts the session of a new default process group; the backend's creator calls it.

    Args:
        store: keys that no other attempt sees.
        rank: of this process.
        world_size: number of ranks.
    """
    _owner.made += 1
    _owner.replace(None)
    env = _environment(store, rank, world_size)
    if env is None or env["disable"]:
        return
    try:
        _C.configure_faults(env["fault"], rank)
        agreed, refusals = agreement.agree(store, rank, world_size, env)
        startup.all_take_part(rank, world_size, refusals)
        assert agreed is not None
    except Exception as error:
        startup.give_up_early(rank, world_size, store, str(error) or type(error).__name__)
        _report(rank, store, agreement.ROUND, error, "", bool(env["strict"]))
        return
    env["snapshot_protection"] = agreed.protection
    started = Session(env, agreed, store, _owner.made)
    try:
        started.start()
    except Exception as error:
        _give_up(started, store, error)
        return
    _owner.replace(started)
    _owner.watch_process()


def on_default_group_gone() -> None:
    """Lets go of the training's objects: the script may go on to something else."""
    if (session := _owner.session) is not None:
        try:
            session.release()
        except Exception as error:
            session.failed("release", error)


def _environment(store: TrustedStore, rank: int, world_size: int) -> dict[str, Any] | None:
    """The settings; None if one of them has no value that can be used."""
    try:
        env = settings.read()
    except _C.InvalidArgument as error:
        startup.give_up_early(rank, world_size, store, str(error))
        if os.environ.get("REFT_STRICT") == "1":  # the other settings are not known
            raise
        if not startup.said_by_the_first(rank, store, agreement.ROUND, str(error)):
            _voice.say(f"error: {error}. Training continues without snapshots and hang detection")
        return None
    if rank == 0:
        for name, nearest in settings.unknown():
            hint = f"; did you mean {nearest}?" if nearest else ""
            _voice.warn(f"{name} is not a setting of reft{hint}")
    return env


def _give_up(session: Session, store: TrustedStore, error: Exception) -> None:
    """A session could not start: the other ranks learn of it, and training continues without."""
    job = session.job
    startup.give_up(job, store, str(error) or type(error).__name__)
    from_start = job.attempt > 0 and session.resuming_at is None
    beginning = ", from its beginning" if from_start else ""
    _report(job.rank, store, startup.INVENTORY, error, beginning, bool(session.env["strict"]))
    session.stop(at_exit=False)


def _report(
    rank: int, store: TrustedStore, name: str, error: Exception, beginning: str, strict: bool
) -> None:
    """Says why this rank trains without reft, unless another one has said it in round `name`."""
    if strict:
        raise error
    reason = str(error) or type(error).__name__
    if isinstance(error, startup.OthersGaveUp):
        is_reported = not error.to_say
    else:
        is_reported = startup.said_by_the_first(rank, store, name, reason)
    if not is_reported:
        _voice.say(
            f"rank {rank}: training continues without snapshots and hang detection"
            f"{beginning}: {reason}"
        )


def explicit_step(frame: FrameType) -> None:
    """See :func:`reft.step`."""
    if (session := _owner.session) is not None:
        try:
            session.explicit_point(frame)
        except Exception as error:
            session.failed("step", error)


def set_enabled(enabled: bool) -> None:
    """Switches snapshots of this rank on or off, for measurements. All ranks do it at the same
    step."""
    if (session := _owner.session) is not None:
        session.gate()
        session.enabled = enabled


def snapshot_now(timeout_sec: float) -> int:
    """See :func:`reft.snapshot_now`."""
    session = _owner.session
    if session is None or session.engine is None:
        return -1
    session.engine.drain(int(timeout_sec * 1000))
    return int(session.engine.committed_step)


def status() -> dict[str, Any]:
    """See :func:`reft.status`."""
    session = _owner.session
    return {} if session is None or session.engine is None else dict(session.engine.stats())
