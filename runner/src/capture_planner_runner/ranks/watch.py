"""The watch: each rank shows that it lives and where it is, looks at the others, and ends with them.

Every rank posts its state a few times a second, from a thread, and reads those of all others. A rank that
died, went silent, ended with an error or is at another point is a fault. The first rank to see it writes the
verdict; all ranks read it, and end with the same sentence. A thread that stays inside a collective cannot
raise it: then the process is ended around it, see ``guard``.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from time import monotonic, sleep

import attrs
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined, unused-ignore]

from capture_planner.errors import CapturePlannerError, RankError, one_line
from capture_planner.records._base import grouped
from capture_planner.records.text import counted
from capture_planner_runner.ranks.outcomes import minority

PART = 4 << 20
"""Most bytes of one value: the server of a TCPStore closes the connection for more than 8 MiB (torch 2.11 to 2.13)."""


class Board:
    """Texts by key, in a store of torch. No method waits for another rank, so that any may be called at any time.

    Raises ``RankError`` where the store does not answer, with its address.

    :param address: of the store, for messages.
    :param host_rank: the rank whose process the store is in; None: a launcher's.
    """

    def __init__(self, store: Store, address: str, host_rank: int | None = None) -> None:
        self._store, self.address, self._host_rank = store, address, host_rank

    def post(self, key: str, text: str) -> None:
        """Write a text, over the one that was there."""
        data = text.encode()
        parts = [data[start : start + PART] for start in range(0, len(data), PART)]
        try:
            for number, part in enumerate(parts[1:], 1):
                self._store.set(f"{key}.{number}", part)  # type: ignore[arg-type, unused-ignore]
            # The first part comes last: it names their number, and a reader that finds it finds the others.
            self._store.set(key, f"{len(parts)} ".encode() + (parts or [b""])[0])  # type: ignore[arg-type, unused-ignore]
        except RuntimeError as error:
            raise self._broken(error) from error

    def read(self, keys: Sequence[str]) -> tuple[str | None, ...]:
        """Return the texts of some keys; None for a missing one."""
        try:
            # Both `multi_get` and `get` wait for a key that is missing, and `check` does not.
            if self._store.check(list(keys)):
                found: list[bytes | None] = list(self._store.multi_get(list(keys)))
            else:
                found = [self._store.get(key) if self._store.check([key]) else None for key in keys]
            return tuple(
                None if data is None else self._whole(key, data) for key, data in zip(keys, found, strict=True)
            )
        except RuntimeError as error:
            raise self._broken(error) from error

    def _whole(self, key: str, data: bytes) -> str:
        count, _, first = data.partition(b" ")
        rest = [self._store.get(f"{key}.{number}") for number in range(1, int(count or 0))]
        return b"".join([first, *rest]).decode()

    def claim(self, key: str, text: str) -> str:
        """Write a text unless there is one that is not empty; return the text that is there then."""
        try:
            # Unlike in other stores, an expected value of nothing is also that of a key that is missing.
            found: bytes = self._store.compare_set(key, "", f"1 {text}")
        except RuntimeError as error:
            raise self._broken(error) from error
        return found.partition(b" ")[2].decode()

    def erase(self, key: str) -> None:
        """Remove a key."""
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> RankError:
        where = "the launcher" if self._host_rank is None else f"rank {self._host_rank}"
        reason = str(error).partition("\n")[0]
        return RankError(
            f"{where}, whose store at {self.address} the ranks meet in, has ended or cannot be reached: {reason}",
            () if self._host_rank is None else (self._host_rank,),
        )


def open_store(host: str, port: int, *, hosts: bool, seconds: float) -> TCPStore:
    """Connect to the store at an address, or open it there.

    Raises ``OSError`` where nothing listens there within ``seconds``, and ``RuntimeError`` where that is no store.
    """
    limit = timedelta(seconds=seconds)
    opened: Future[TCPStore] = Future()

    def work() -> None:
        try:
            opened.set_result(
                TCPStore(host, port, is_master=hosts, timeout=limit, wait_for_workers=False, multi_tenant=True)
            )
        except RuntimeError as error:
            opened.set_exception(error)

    if not hosts:
        # The store itself would print its stack for each time that it finds nothing.
        _await_port(host, port, seconds)
    # A store waits without end for the answer of another kind of server; no signal ends that either.
    threading.Thread(target=work, daemon=True).start()
    try:
        return opened.result(seconds)
    except TimeoutError:
        raise RuntimeError("what listens there does not answer as a store does") from None


def _await_port(host: str, port: int, seconds: float) -> None:
    """Wait until something listens at an address."""
    until = monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), max(until - monotonic(), LEAST_WAIT)).close()
            return
        except OSError:
            if monotonic() + LEAST_WAIT >= until:
                raise
            sleep(LEAST_WAIT)


LEAST_WAIT = 0.1
"""Seconds between two tries to reach an address."""


VERDICT = "verdict"
START = "the start"


@attrs.frozen(kw_only=True)
class WaitLimits:
    """Time limits of ranks that wait for each other, in seconds."""

    beat: float = 0.5
    """Interval between two looks."""
    silence: float = 6.0
    """Silence after which a rank has died. Counted only while this rank looks, so that a rank that was stopped
    itself accuses none."""
    grace: float = 2.0
    """Time from a verdict to the end of a process whose main thread does not raise it."""
    parting: float = 10.0
    """Time from a raised verdict to the forced end of a process that still runs."""
    start: float = 10.0
    """Time for all ranks to start, after this one."""
    slow: float | None = None
    """Time after which a living rank that does not reach the call where others wait is a fault; None: never."""


@attrs.frozen(kw_only=True)
class RankVerdict:
    """The reason why all ranks end."""

    says: str
    ranks: tuple[int, ...] = ()
    """Ranks that are the cause."""
    interrupted: bool = False
    """True for Ctrl-C, which is no fault."""

    @classmethod
    def of(cls, text: str) -> RankVerdict:
        """Read a verdict from the board."""
        fields = json.loads(text)
        return cls(**fields | {"ranks": tuple(fields["ranks"])})

    @property
    def text(self) -> str:
        """The verdict as it is on the board."""
        return json.dumps(attrs.asdict(self))

    def error(self) -> BaseException:
        """Return what a main thread raises."""
        return KeyboardInterrupt() if self.interrupted else RankError(self.says, self.ranks)


@attrs.frozen(kw_only=True)
class RankState:
    """The state of a rank that the others read."""

    beat: int
    op: int
    """Number of collective calls begun."""
    at: str
    """Topic of the last call."""
    waits: bool
    """True while it is in that call."""
    ended: str | None = None
    """Error that it ended with; empty: it has finished; None: it runs."""
    blamed: Sequence[int] = ()
    """Ranks that its error names as the cause; empty: itself."""
    interrupted: bool = False
    terminated: bool = False
    """True if it was sent SIGTERM, for example by torchrun after another rank died."""


EndProcess = Callable[[RankVerdict, bool], None]
"""Ends this process; the second argument: whether its main thread has raised the verdict already."""


class RankWatch:
    """One rank's view of the others. Threads call ``look`` and ``guard``, the main thread everything else.

    :param names: of all ranks by number, for messages: ``rank 1 (host)``.
    :param gone: returns the ranks whose processes are known to have ended.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        names: Sequence[str],
        limits: WaitLimits,
        *,
        gone: Callable[[], Collection[int]] = tuple,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._board, self._rank, self.names, self._limits = board, rank, names, limits
        self._gone, self._clock = gone, clock
        self._call = (0, START, False)
        self._ended_with: str | None = None
        self._blamed: tuple[int, ...] = ()
        self._interrupted = False
        self._beats = 0
        self._verdict: RankVerdict | None = None
        self._concluded = threading.Event()
        self._seen = dict.fromkeys(range(len(names)), RankState(beat=0, op=0, at=START, waits=False))
        self._silent = dict.fromkeys(range(len(names)), 0.0)
        self._looked = self._guarded = self._since = self._concluded_at = clock()
        self._unseen = 0.0
        self._left: float | None = None
        self._terminated: float | None = None
        self._asked: float | None = None

    # Called by the main thread ------------------------------------------------------------------

    @property
    def verdict(self) -> RankVerdict | None:
        """The reason why all ranks end; None: they go on."""
        return self._verdict

    def begin(self, at: str) -> int:
        """Note that a collective call begins; return its number, which is the same on all ranks."""
        self._since = self._clock()
        number = self._call[0] + 1
        # In one tuple, so that the other thread reads the number and the topic of the same call.
        self._call = number, at, True
        return number

    def done(self) -> float:
        """Note that the call is over, and return the seconds that it took."""
        self._call = *self._call[:2], False
        return self._clock() - self._since

    def check(self) -> None:
        """Raise the verdict, if there is one."""
        if self._verdict is not None:
            self._left = self._left or self._clock()
            raise self._verdict.error()

    def accuse(self, verdict: RankVerdict) -> RankVerdict:
        """Write a verdict unless there is one; return the one that holds on all ranks."""
        self.conclude(RankVerdict.of(self._board.claim(VERDICT, verdict.text)))
        assert self._verdict is not None
        return self._verdict

    def interrupt(self) -> None:
        """Let all ranks end as after Ctrl-C, which came to this one."""
        self._left = self._left or self._clock()
        self.accuse(RankVerdict(says="interrupted", interrupted=True))

    def cause(self, seconds: float) -> RankVerdict | None:
        """Wait for a verdict, for example on a broken connection; None if none comes within so many seconds."""
        self._concluded.wait(seconds)
        return self._verdict

    def leave(self, error: BaseException | None = None) -> None:
        """Show that this rank has ended, with an error or without."""
        self._left = self._left or self._clock()
        self._blamed = error.ranks if isinstance(error, RankError) else ()
        self._interrupted = isinstance(error, KeyboardInterrupt)
        # Last of the three: the other thread may post at any time, and an end needs its cause.
        self._ended_with = "" if error is None else sentence(error)
        self._post()

    def ask_to_interrupt(self) -> None:
        """Note Ctrl-C in this process, because the main thread may lose its exception, in a finalizer for example."""
        self._asked = self._asked or self._clock()

    def terminate(self) -> None:
        """Note SIGTERM in this process. It ends with the verdict that follows, or with its own after a while."""
        self._terminated = self._terminated or self._clock()

    # Called by a thread, every ``WaitLimits.beat`` seconds ------------------------------------------

    def look(self) -> None:
        """Show this rank's state, read those of the others, and accuse where something is wrong.

        Raises ``RankError`` where the board does not answer.
        """
        gone = frozenset(self._gone())
        self._post()
        *texts, verdict = self._board.read([*(state_key(rank) for rank in range(len(self.names))), VERDICT])
        now = self._clock()
        # A process that was stopped has seen nobody meanwhile: of a long gap, two beats count as silence.
        passed, self._looked = min(now - self._looked, 2 * self._limits.beat), now
        self._unseen = 0.0
        if verdict:
            self.conclude(RankVerdict.of(verdict))
        if self._verdict is not None or self._ended_with is not None:
            return
        for rank, text in enumerate(texts):
            state = self._seen[rank] if text is None else RankState(**json.loads(text))
            if state == self._seen[rank]:
                self._silent[rank] += passed
            else:
                self._seen[rank], self._silent[rank] = state, 0.0
        found = self._fault(gone)
        if found is not None:
            self.accuse(found)

    def guard(self, end: EndProcess) -> None:
        """Call ``end`` where a verdict has come, and the main thread has not raised it or ended in time.

        Also where ``look`` itself hangs, because the board's host is gone; so another thread calls this.
        """
        now = self._clock()
        passed, self._guarded = min(now - self._guarded, 2 * self._limits.beat), now
        self._unseen += passed
        if self._verdict is None and self._left is None and self._unseen > self._limits.silence:
            self.conclude(
                RankVerdict(says=f"the store that the ranks meet in has not answered for {self._unseen:.0f} s")
            )
        if self._verdict is not None:
            limit = self._limits.grace if self._left is None else self._limits.parting
            if now - (self._left or self._concluded_at) > limit:
                end(self._verdict, self._left is not None)

    def conclude(self, verdict: RankVerdict) -> None:
        """End with a verdict that could not be written, since the board does not answer."""
        if self._verdict is None:
            # The time first: the guard reads it as soon as there is a verdict.
            self._concluded_at = self._clock()
            self._verdict = verdict
            self._concluded.set()

    # --------------------------------------------------------------------------------------------

    def _post(self) -> None:
        """Show this rank's state; again where it has ended meanwhile, so that no older state stays."""
        while True:
            self._beats += 1
            op, at, waits = self._call
            state = RankState(
                beat=self._beats,
                op=op,
                at=at,
                waits=waits,
                ended=self._ended_with,
                blamed=self._blamed,
                interrupted=self._interrupted,
                terminated=self._terminated is not None,
            )
            self._board.post(state_key(self._rank), json.dumps(attrs.asdict(state)))
            if state.ended == self._ended_with:
                return

    def _fault(self, gone: Collection[int]) -> RankVerdict | None:
        others = {rank: state for rank, state in self._seen.items() if rank != self._rank}
        # From the surest cause to the least: an error names it, while a late rank may wait for a dead one.
        return (
            self._ended(others)
            or self._dead(others, gone)
            or self._apart(others)
            or self._late(others)
            or self._ended_by_signal(others)
        )

    def _ended(self, others: dict[int, RankState]) -> RankVerdict | None:
        """Return the verdict on ranks that ended with an error, or while others wait for them."""
        wrong = {rank: state.ended for rank, state in others.items() if state.ended}
        if any(others[rank].interrupted for rank in wrong):
            return RankVerdict(says="interrupted", interrupted=True)
        # A rank that ended because of another one is a witness: the one that it names is the cause.
        for rank in wrong:
            if others[rank].blamed:
                return RankVerdict(says=str(wrong[rank]), ranks=tuple(others[rank].blamed))
        if wrong:
            causes = "; ".join(f"{self.names[rank]} ended: {ended}" for rank, ended in wrong.items())
            return RankVerdict(says=causes, ranks=tuple(wrong))
        op, at, waits = self._call
        early = [rank for rank, state in others.items() if state.ended == "" and state.op < op and waits]
        if early:
            return RankVerdict(says=f"{self._list(early)} finished, and others wait at {at!r}", ranks=tuple(early))
        return None

    def _dead(self, others: dict[int, RankState], gone: Collection[int]) -> RankVerdict | None:
        runs = [rank for rank in others if others[rank].ended is None]
        dead = [rank for rank in runs if rank in gone]
        if dead:
            return RankVerdict(says=f"{self._list(dead)} died, last met at {self._points(dead)}", ranks=tuple(dead))
        limit = self._limits.silence
        if not any(self._silent[rank] > limit for rank in runs):
            return None
        # Ranks of a host that is gone go silent together, a few beats apart: all are named.
        silent = [rank for rank in runs if self._silent[rank] > limit - 3 * self._limits.beat]
        has = "has" if len(silent) == 1 else "have"
        return RankVerdict(
            says=f"{self._list(silent)} {has} not answered for {limit:g} s, last met at {self._points(silent)}",
            ranks=tuple(silent),
        )

    def _apart(self, others: dict[int, RankState]) -> RankVerdict | None:
        """Return the verdict on ranks that are in another call than this rank, although it has the same number."""
        op, at, _ = self._call
        return apart(self.names, {self._rank: at} | {r: state.at for r, state in others.items() if state.op == op})

    def _late(self, others: dict[int, RankState]) -> RankVerdict | None:
        (op, at, waits), limit = self._call, self._limits.slow
        if limit is None or not waits or self._looked - self._since <= limit:
            return None
        late = [rank for rank, state in others.items() if state.op < op]
        if not late:
            return None
        has = "answers, but has" if len(late) == 1 else "answer, but have"
        says = (
            f"{self._list(late)} {has} not come to {at!r} within {limit:g} s (--rank-timeout), "
            f"and {'is' if len(late) == 1 else 'are'} at {self._points(late)}"
        )
        return RankVerdict(says=says, ranks=tuple(late))

    def _ended_by_signal(self, others: dict[int, RankState]) -> RankVerdict | None:
        if self._asked is not None and self._left is None and self._looked - self._asked > self._limits.grace:
            return RankVerdict(says="interrupted", interrupted=True)
        if self._terminated is None:
            return None
        # torchrun sends SIGTERM to all ranks when one has died: wait for the verdict on that one.
        if all(state.terminated for state in others.values()):
            return RankVerdict(says="all ranks were ended by SIGTERM", interrupted=True)
        if self._looked - self._terminated > self._limits.silence + 2 * self._limits.beat:
            return RankVerdict(says=f"{self.names[self._rank]} was ended by SIGTERM", ranks=(self._rank,))
        return None

    def _list(self, ranks: Sequence[int]) -> str:
        return listed(self.names, ranks)

    def _points(self, ranks: Sequence[int]) -> str:
        return " and ".join(repr(at) for at in dict.fromkeys(self._seen[rank].at for rank in ranks))


def sentence(error: BaseException) -> str:
    """Return what an error says in one line, with its class where it is none of ours."""
    text = one_line(error)
    name = "" if isinstance(error, CapturePlannerError) else type(error).__name__
    return ": ".join(part for part in (name, text) if part)


def state_key(rank: int) -> str:
    """Return the key of a rank's state."""
    return f"state/{rank}"


def listed(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Name some ranks: all of them up to four."""
    shown = ", ".join(names[rank] for rank in ranks[:4])
    more = len(ranks) - 4
    return shown if more <= 0 else f"{shown} and {counted(more, 'other rank')}"


def apart(names: Sequence[str], points: dict[int, str]) -> RankVerdict | None:
    """Return the verdict on ranks that are in different calls; None where all are in the same.

    The smallest group is the cause; of groups of one size, all but the first rank's.
    """
    groups = grouped(sorted(points), points.__getitem__)
    if len(groups) < 2:
        return None
    where = ", ".join(f"{listed(names, ranks)} at {at!r}" for at, ranks in groups.items())
    return RankVerdict(says=f"ranks are at different points: {where}", ranks=minority(groups))
