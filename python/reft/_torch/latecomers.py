"""Says which ranks have not come to `init_process_group` while this one waits for them there, and
where their processes stand.

At this point the job has no name yet and so no agent: a rank that waits looks by itself, from
outside, at the processes of the missing ranks on its own machine. It only reports: no rank is ever
ended for what is found here.

Threads: `tick()` is for the training thread; only there the store is asked. A thread of its own,
`reft-late`, does all that touches another process, because such a read may never return.
Errors: none; what cannot be read is not said, and whatever fails here turns the reports off.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from reft import _voice
from reft._link import other_process

_FIRST_LOOK = 0.75  # of the suspicion time; the second look is at its end
_OVERDUE = 3.0  # suspicion times after which the thread that looks counts as stuck
_HANG_AFTER = 10.0  # suspicion times; nobody has waited at this place before
# An idle process that polls for something uses less.
_BUSY_SHARE = 0.1
_BUSY_BYTES = 64 << 10
_MOST_READ = 8  # processes whose stacks are read, and ranks with a line of their own
_MOST_CANDIDATES = 3  # processes of one rank, from the outermost, that may be the one with Python
_MOST_NAMED = 64  # ranks in one line
_TURNS_KEPT = 2  # as many later, a mark of the rank that speaks still counts
_INIT = ("distributed_c10d.py", "init_process_group")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Missing:
    """Ranks that the others wait for.

    Attributes:
        unseen: have never asked for anything in this store, so they have not come.
        silent: have not taken part in this attempt. They may have come and stand still since.
        cut: `unseen` may have more ranks than these.
    """

    unseen: Sequence[int] = ()
    silent: Sequence[int] = ()
    cut: bool = False


@dataclass(frozen=True)
class Seen:
    """What a rank's process did between two looks.

    Attributes:
        place: "data.py:88 load"; "" unless both looks have read its stack.
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
        frames: of the main thread, newest first; () if they cannot be read.
        uses: by pid, of the rank's processes.
    """

    pid: int
    place: str
    frames: tuple[tuple[str, int, str], ...]
    uses: Mapping[int, other_process.Use]


class _Errand(Generic[_T]):
    """Work for a thread of its own that begins at once and may never end.

    Attributes:
        done: `found` has the result; that of work that failed is `otherwise`.
    """

    def __init__(self, work: Callable[[], _T], otherwise: _T, since: float) -> None:
        self.since, self.done, self.found = since, False, otherwise
        self._work = work
        threading.Thread(target=self._run, name="reft-late", daemon=True).start()

    def _run(self) -> None:
        try:
            self.found = self._work()
        except Exception as error:  # the wait goes on, whatever was found
            _voice.debug(f"latecomers: {error!r}")
        self.done = True


Find = Callable[[int, int], Mapping[int, Sequence[int]]]
Watch = Callable[[Mapping[int, Sequence[int]], float], Mapping[int, Seen]]
WhoIsMissing = Callable[[Sequence[int] | None], Missing]
Claim = Callable[[int, bool], bool]


class Latecomers:
    """Of one wait in `init_process_group`. Looks after three quarters of the suspicion time and at
    its end, reports, and does so again while that changes."""

    def __init__(
        self,
        rank: int,
        size: int,
        suspect_sec: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        siblings: Find = other_process.siblings,
        watch: Watch | None = None,
        say: Callable[[str], None] = _voice.warn,
    ) -> None:
        self._rank, self._size, self._suspect = rank, size, suspect_sec
        self._clock, self._wall, self._siblings, self._say = clock, wall, siblings, say
        self._watch = watch or seen_in
        self._begin = clock()
        self._due = self._begin + _FIRST_LOOK * suspect_sec
        self._off = self._blind = self._deferred = False
        self._search: _Errand[Mapping[int, Sequence[int]]] | None = None
        self._look: _Errand[Mapping[int, Seen]] | None = None
        self._turn: int | None = None  # the newest that this rank has marked, if it speaks
        self._said: set[tuple[int, str, str]] = set()
        self._said_plainly: dict[bool, int] = {}  # by whether ranks are unseen: how many there were

    def tick(self, missing: WhoIsMissing, claim: Claim) -> None:
        """To be called often while this rank waits. Returns at once, but for the store's answers.

        Args:
            missing: who is missing, of these ranks; None: of all.
            claim: whether this rank speaks for those that wait, in this turn; turns are numbered.
                True as second argument: it has spoken until now, and goes on.
        """
        if self._off:
            return
        try:
            self._tick(missing, claim, self._clock())
        except Exception as error:  # of a report, which no start may fail for
            self._off = True
            _voice.debug(f"latecomers: off after {error!r}")

    def _tick(self, missing: WhoIsMissing, claim: Claim, now: float) -> None:
        self._renew(claim)
        if now < self._due:
            return
        errand = self._search or self._look
        if errand is not None and not errand.done:
            if now < errand.since + _OVERDUE * self._suspect:
                return
            self._search = self._look = None
            self._blind = True
        if self._search is not None:
            here, self._search = self._search.found, None
            self._choose(here, missing, claim, now)
        elif self._look is not None:
            found, self._look = self._look.found, None
            self._due = now + _FIRST_LOOK * self._suspect
            self._report(missing(None), found, now - self._begin)
        elif self._blind:
            self._choose({}, missing, claim, now)
        else:
            self._search = _Errand(lambda: self._siblings(self._rank, self._size), {}, now)

    def _choose(
        self,
        here: Mapping[int, Sequence[int]],
        missing: WhoIsMissing,
        claim: Claim,
        now: float,
    ) -> None:
        """Begins to look at the processes of missing ranks, or says who is missing if none of their
        processes is known.

        Args:
            here: processes of this machine, by rank.
        """
        near = missing(sorted(here)) if here else Missing()
        wanted = [*near.unseen, *near.silent][:_MOST_READ]
        if not wanted and not self._deferred and not self._blind:
            # a rank beside the missing one can say more
            self._deferred, self._due = True, now + (1 - _FIRST_LOOK) * self._suspect
        elif not self._speaks(claim):
            self._due = now + 2 * self._suspect
        elif wanted:
            processes = {rank: here[rank] for rank in wanted}
            pause = (1 - _FIRST_LOOK) * self._suspect
            self._look = _Errand(lambda: self._watch(processes, pause), {}, now)
            self._due = now + pause
        else:
            self._due = now + self._suspect
            self._report(missing(None), {}, now - self._begin)

    def _speaks(self, claim: Claim) -> bool:
        turn = int(self._wall() / self._suspect)
        if self._turn is None and claim(turn, False):
            self._turn = turn
        return self._turn is not None

    def _renew(self, claim: Claim) -> None:
        """Marks each turn in which this rank speaks, so that no other takes over meanwhile."""
        if self._turn is None:
            return
        turn = int(self._wall() / self._suspect)
        if turn > self._turn + _TURNS_KEPT:  # it was away: another may speak by now
            self._turn = None
        elif turn != self._turn:
            self._turn = turn if claim(turn, True) else None

    def _report(self, missing: Missing, found: Mapping[int, Seen], waited: float) -> None:
        placed, plain = sort_out(missing, found)
        for rank, seen in placed:
            hangs = not seen.moved and waited >= _HANG_AFTER * self._suspect
            state, does = "hang" if hangs else "slow", "is at work" if seen.moved else "stands"
            if (rank, state, does) not in self._said:
                self._said.add((rank, state, does))
                self._speak(
                    f"{state}: rank {rank} has not reached init_process_group: its process {does}"
                    f" at {seen.place} (pid {seen.pid})",
                    waited,
                )
        before = self._said_plainly.get(bool(missing.unseen))
        if plain and (before is None or len(plain) <= before / 2):
            self._said_plainly[bool(missing.unseen)] = len(plain)
            self._speak(plainly(plain, missing), waited)

    def _speak(self, line: str, waited: float) -> None:
        self._say(f"{line}; the others have waited for {waited:.0f} s")


def sort_out(
    missing: Missing, found: Mapping[int, Seen]
) -> tuple[list[tuple[int, Seen]], list[int]]:
    """Missing ranks whose place is known, and those of which nothing is."""
    placed: list[tuple[int, Seen]] = []
    plain: list[int] = []
    # Who is silent may itself wait for those that have not come.
    for rank in missing.unseen or missing.silent:
        seen = found.get(rank)
        if seen is None or not (seen.place or seen.inside):
            plain.append(rank)
        elif not seen.inside:
            placed.append((rank, seen))
    return placed, plain


def plainly(ranks: Sequence[int], missing: Missing) -> str:
    """Says that these of the missing ranks have not come."""
    line = _voice.ranks(ranks[:_MOST_NAMED])
    if len(ranks) > _MOST_NAMED:
        line += f" and {'at least ' if missing.cut else ''}{len(ranks) - _MOST_NAMED} more"
    line += f" {'has' if len(ranks) == 1 else 'have'} not reached init_process_group"
    if not missing.unseen:
        line += f", or {'stands' if len(ranks) == 1 else 'stand'} still in it"
    return line


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
        now = _look(pids)
        if now is not None:
            seen[rank] = _compare(first[rank], now, pause)
    return seen


def _compare(then: _Look | None, now: _Look, sec: float) -> Seen:
    inside = any(
        file.endswith(_INIT[0]) and function == _INIT[1] for file, _, function in now.frames
    )
    if then is None or then.pid != now.pid or not (then.frames and now.frames):
        return Seen(now.pid, "", False, inside)  # nothing to compare
    return Seen(now.pid, now.place, _moved(then, now, sec), inside)


def _moved(then: _Look, now: _Look, sec: float) -> bool:
    both = [(then.uses[pid], now.uses[pid]) for pid in then.uses.keys() & now.uses.keys()]
    cpu_sec = sum(new.cpu_sec - old.cpu_sec for old, new in both)
    moved = sum(new.fault_bytes - old.fault_bytes for old, new in both)
    for old, new in both:
        if old.io_bytes is not None and new.io_bytes is not None:
            moved += new.io_bytes - old.io_bytes
    return (
        then.frames != now.frames
        or any(old.running and new.running for old, new in both)
        or cpu_sec > _BUSY_SHARE * max(sec, 0.1)
        or moved >= _BUSY_BYTES
    )


def _look(pids: Sequence[int]) -> _Look | None:
    """None if no process of them can be read."""
    uses = other_process.use_of(pids)
    last: _Look | None = None
    for pid in pids[:_MOST_CANDIDATES]:
        try:
            read = other_process.read_stacks(pid)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        main = next((thread for thread in read["threads"] if thread["main"]), None)
        if main is not None and main["frames"]:
            return _Look(pid, main["place"], _frames(main), uses)
        last = last or _Look(pid, "", (), uses)
    return last


def _frames(thread: Mapping[str, Any]) -> tuple[tuple[str, int, str], ...]:
    return tuple((frame["file"], frame["line"], frame["function"]) for frame in thread["frames"])
