"""Says which ranks have not come to `init_process_group` while this one waits for them there, and
where their processes stand.

At this point the job has no name yet and so no agent: a rank that waits looks by itself, from
outside, at the processes of the missing ranks on its own machine. It only reports: no rank is ever
ended for what is found here.

Threads: `tick()` is for the training thread. A thread of its own, `reft-late`, reads processes,
because their memory may be where no read returns.
Errors: none; what cannot be read is not said.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reft import _voice
from reft._link import other_process

_FIRST_LOOK = 0.75  # of the suspicion time; the second look is at its end
# An idle process that polls for something uses less.
_BUSY_SHARE = 0.1
_BUSY_BYTES = 64 << 10
_MOST_READ = 8  # processes whose stacks are read, and ranks with a line of their own
_MOST_CANDIDATES = 3  # processes of one rank, from the outermost, that may be the one with Python
_INIT = ("distributed_c10d.py", "init_process_group")


@dataclass(frozen=True)
class Missing:
    """Ranks that the others wait for.

    Attributes:
        unseen: have never asked for anything in this store, so they have not come.
        silent: have not taken part in this attempt. They may have come and stand still since.
    """

    unseen: Sequence[int] = ()
    silent: Sequence[int] = ()


@dataclass(frozen=True)
class Seen:
    """What a rank's process did between two looks.

    Attributes:
        place: "data.py:88 load"; "" if its stack cannot be read.
        moved: it went on, computed, or read or wrote.
        inside: it stands in init_process_group.
    """

    pid: int
    place: str
    moved: bool
    inside: bool


@dataclass(frozen=True)
class _Look:
    """One of the two.

    Attributes:
        frames: of the main thread, newest first.
    """

    pid: int
    place: str
    frames: tuple[tuple[str, int, str], ...]
    use: other_process.Use


class Latecomers:
    """Of one wait in `init_process_group`. Looks after three quarters of the suspicion time and at
    its end, reports, and does so again while that changes."""

    def __init__(
        self,
        rank: int,
        suspect_sec: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        siblings: Callable[[int], Mapping[int, Sequence[int]]] = other_process.siblings,
        watch: Callable[[Mapping[int, Sequence[int]], float], Mapping[int, Seen]] | None = None,
        say: Callable[[str], None] = _voice.warn,
    ) -> None:
        self._rank, self._suspect = rank, suspect_sec
        self._clock, self._wall, self._siblings, self._say = clock, wall, siblings, say
        self._watch = watch or seen_in
        self._begin = clock()
        self._due = self._begin + _FIRST_LOOK * suspect_sec
        self._deferred = self._speaks = False
        self._seen: dict[int, Seen] | None = None
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()

    def tick(
        self, missing: Callable[[Sequence[int] | None], Missing], claim: Callable[[int], bool]
    ) -> None:
        """To be called often while this rank waits. Returns at once, but for a look at /proc.

        Args:
            missing: who is missing, of these ranks; None: of all.
            claim: whether this rank speaks for those that wait, in this turn; turns are numbered.
        """
        now = self._clock()
        if now < self._due:
            return
        if self._thread is None:
            self._begin_look(missing, claim, now)
        elif self._seen is not None:
            found, self._seen, self._thread = self._seen, None, None
            self._due = now + _FIRST_LOOK * self._suspect
            self._report(missing(None), found, now - self._begin)

    def _begin_look(
        self,
        missing: Callable[[Sequence[int] | None], Missing],
        claim: Callable[[int], bool],
        now: float,
    ) -> None:
        here = self._siblings(self._rank)
        near = missing(sorted(here))
        wanted = [*near.unseen, *near.silent][:_MOST_READ]
        if not wanted and not self._deferred:  # a rank beside the missing one can say more
            self._deferred, self._due = True, now + (1 - _FIRST_LOOK) * self._suspect
            return
        self._speaks = claim(int(self._wall() / self._suspect)) or self._speaks
        if not self._speaks:
            self._due = now + 2 * self._suspect
            return
        processes = {rank: here[rank] for rank in wanted}
        pause = (1 - _FIRST_LOOK) * self._suspect if wanted else 0.0

        def look() -> None:
            try:
                self._seen = dict(self._watch(processes, pause))
            except Exception as error:  # the wait goes on, whatever was found
                _voice.debug(f"latecomers: {error}")
                self._seen = {}

        self._thread = threading.Thread(target=look, name="reft-late", daemon=True)
        self._thread.start()
        self._due = now + pause

    def _report(self, missing: Missing, found: Mapping[int, Seen], waited: float) -> None:
        for kind, line in lines(missing, found):
            if kind not in self._said:
                self._said.add(kind)
                self._say(f"{line}; the others have waited for {waited:.0f} s")


def lines(missing: Missing, found: Mapping[int, Seen]) -> list[tuple[str, str]]:
    """What there is to say, and a key for each: what is said once is not said again."""
    said: list[tuple[str, str]] = []
    plain: list[int] = []
    # Who is silent may itself wait for those that have not come.
    for rank in missing.unseen or missing.silent:
        seen = found.get(rank)
        if seen is None or not seen.place:
            plain.append(rank)
        elif not seen.inside:
            state, does = ("slow", "is at work") if seen.moved else ("hang", "stands")
            line = (
                f"{state}: rank {rank} has not reached init_process_group: its process {does} at"
                f" {seen.place} (pid {seen.pid})"
            )
            said.append((f"{state} {rank}", line))
    if plain:
        have = "has" if len(plain) == 1 else "have"
        line = f"{_voice.ranks(plain)} {have} not reached init_process_group"
        if not missing.unseen:
            line += ", or " + ("stands" if len(plain) == 1 else "stand") + " still in it"
        said.append((line, line))
    return said


def seen_in(processes: Mapping[int, Sequence[int]], pause: float) -> dict[int, Seen]:
    """Looks twice at the processes of ranks.

    Args:
        processes: of each rank, outermost first.
        pause: seconds between the looks.
    """
    first = {rank: _look(pids) for rank, pids in processes.items()}
    time.sleep(pause)
    seen: dict[int, Seen] = {}
    for rank, pids in processes.items():
        then, now = first[rank], _look(pids)
        if now is not None:
            moved = then is None or _moved(then, now, pause)
            inside = any(
                file.endswith(_INIT[0]) and function == _INIT[1]
                for file, _, function in now.frames
            )
            seen[rank] = Seen(now.pid, now.place, moved, inside)
    return seen


def _moved(then: _Look, now: _Look, sec: float) -> bool:
    used = now.use.cpu_sec - then.use.cpu_sec
    return (
        then.frames != now.frames
        or (then.use.running and now.use.running)
        or used > _BUSY_SHARE * max(sec, 0.1)
        or now.use.io_bytes - then.use.io_bytes >= _BUSY_BYTES
    )


def _look(pids: Sequence[int]) -> _Look | None:
    """None if none of them exists any more."""
    use = other_process.use_of(pids)
    last: _Look | None = None
    for pid in pids[:_MOST_CANDIDATES]:
        try:
            read = other_process.read_stacks(pid)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        main = next((thread for thread in read["threads"] if thread["main"]), None)
        if main is not None and main["frames"]:
            return _Look(pid, main["place"], _frames(main), use)
        last = last or _Look(pid, "", (), use)
    return last


def _frames(thread: Mapping[str, Any]) -> tuple[tuple[str, int, str], ...]:
    return tuple((frame["file"], frame["line"], frame["function"]) for frame in thread["frames"])
