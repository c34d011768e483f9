"""Connecting a process to the other ranks, exchanging values with them, and parting: with all, or because of one."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from types import FrameType

import attrs
from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]

from capture_planner.errors import RankError
from capture_planner_runner.ranks.peers import Plain
from capture_planner_runner.ranks.processes import LocalProcesses, RankProcess, card
from capture_planner_runner.ranks.watch import (
    VERDICT,
    Board,
    EndProcess,
    RankVerdict,
    RankWatch,
    WaitLimits,
    apart,
    listed,
    open_store,
    sentence,
)

SHORTEST, LONGEST = 0.0005, 0.02
"""Seconds between two looks at a board that others have yet to write to: doubled from one to the other."""


def meet(
    board: Board,
    rank: int,
    size: int,
    card: dict[str, Plain],
    limits: WaitLimits,
    *,
    clock: Callable[[], float] = monotonic,
    pause: Callable[[float], None] = sleep,
) -> tuple[dict[str, Plain], ...]:
    """Show this rank's card, which has its ``host``, and return those of all ranks.

    Raises ``RankError`` on every rank that has come, with the ranks that have not within ``limits.start``.
    """
    keys = [f"card/{each}" for each in range(size)]
    begun, each = clock(), SHORTEST
    # Shown before anything is read: two ranks that both wait to read would never meet.
    board.post(keys[rank], json.dumps(card))
    while None in (texts := board.read(keys)):
        (verdict,) = board.read([VERDICT])
        # The first rank to lose patience writes the verdict, so that all that have come name the same ranks.
        if not verdict and clock() - begun > limits.start:
            missing = [rank for rank, text in enumerate(texts) if text is None]
            names = [f"rank {rank}" for rank in range(len(texts))]
            says = (
                f"{listed(names, missing)} of {len(texts)} {'has' if len(missing) == 1 else 'have'} not started within "
                f"{limits.start:g} s of the others; see the output of its launcher (--rank-timeout waits longer)"
            )
            verdict = board.claim(VERDICT, RankVerdict(says=says, ranks=tuple(missing)).text)
        if verdict:
            found = RankVerdict.of(verdict)
            raise RankError(found.says, found.ranks)
        pause(each)
        each = min(2 * each, LONGEST)
    return tuple(json.loads(text or "") for text in texts)


class ControlPlane:
    """Exchanges values with the other ranks, under a watch."""

    def __init__(
        self, board: Board, watch: RankWatch, rank: int, size: int, *, pause: Callable[[float], None] = sleep
    ) -> None:
        self._board, self.watch, self.rank, self.size, self._pause = board, watch, rank, size, pause
        self._last = 0

    def exchange(self, topic: str, value: Plain) -> tuple[Plain, ...]:
        """Return the values of all ranks, see ``Peers.exchange``."""
        number, pause = self.watch.begin(topic), SHORTEST
        keys = [f"exchange/{number}/{rank}" for rank in range(self.size)]
        self._board.post(keys[self.rank], json.dumps([topic, value]))
        while None in (texts := self._board.read(keys)):
            self.watch.check()
            self._pause(pause)
            pause = min(2 * pause, LONGEST)
        self.watch.done()
        pairs = [json.loads(text or "") for text in texts]
        # Ranks that are at different topics have gone apart, and their values mean different things.
        if (wrong := apart(self.watch.names, {rank: at for rank, (at, _) in enumerate(pairs)})) is not None:
            self.watch.accuse(wrong)
            self.watch.check()
        # All have posted this value, and so have read all values of the exchange before.
        if self._last:
            self._board.erase(f"exchange/{self._last}/{self.rank}")
        self._last = number
        return tuple(value for _, value in pairs)

    def collect(self, topic: str, value: Plain, seconds: float | None = None) -> tuple[Plain, ...]:
        """Show a value to the first rank; there, return those of all ranks, None for a missing one.

        The last word of each rank, also of one that ends early: nothing is waited for once there is a verdict, or for
        longer than ``seconds``, and none is raised.
        """
        keys = [f"collect/{topic}/{rank}" for rank in range(self.size)]
        self._board.post(keys[self.rank], json.dumps(value))
        # Only the first rank reports; the others need not wait for it.
        if self.rank:
            return (None,) * self.size
        waited = 0.0
        while None in (texts := self._board.read(keys)):
            # After a verdict a rank may be gone, and its word will never come.
            if self.watch.verdict is not None if seconds is None else waited >= seconds:
                break
            self._pause(LONGEST)
            waited += LONGEST
        return tuple(None if text is None else json.loads(text) for text in texts)


CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "socket timeout", "broken pipe")
"""Words in errors of collectives that lost a rank. The verdict of the watch names the rank."""

PARTING = 30.0
"""Seconds that a store outlives the run, for ranks that close their groups slowly."""


@attrs.frozen(kw_only=True)
class Connection:
    """The connection of one process to the other ranks."""

    plane: ControlPlane
    store: Store
    hosts: tuple[str, ...]
    """Host names by rank."""
    machines: tuple[str, ...]
    """The machine of each rank: processes of one see each other. Hosts of one name are not always one."""
    limits: WaitLimits

    def raise_cause(self, error: BaseException) -> None:
        """Raise which rank broke a connection, once the ranks know; return where none of them is gone."""
        verdict = self.plane.watch.cause(self.limits.silence + self.limits.grace)
        if verdict is not None:
            raise verdict.error() from error


@attrs.frozen(kw_only=True)
class Patience:
    """Lifetime of a store after its rank. If it ends too early, the other ranks cannot read the verdict."""

    seconds: float
    blamed: Collection[int] = ()
    """Ranks that may never part; they are waited for as long as a process has to raise a verdict."""
    grace: float = 0.0
    gone: Callable[[], Collection[int]] = tuple
    """Returns the ranks whose processes are known to have ended."""

    @classmethod
    def after(
        cls, limits: WaitLimits, blamed: Collection[int], gone: Callable[[], Collection[int]] = tuple
    ) -> Patience:
        """Return the patience after a verdict: half of that which the guard of this process has with it."""
        return cls(seconds=limits.parting / 2, blamed=blamed, grace=limits.grace, gone=gone)

    def waits_for(self, missing: Collection[int], waited: float) -> bool:
        """Return True while ranks that have not parted are waited for, after ``waited`` seconds."""
        # A blamed rank may still want to read its verdict, but is not waited for longer than that takes.
        awaited = set(missing).difference(self.gone(), self.blamed if waited > self.grace else ())
        return bool(awaited) and waited <= self.seconds


@contextmanager
def connected(me: RankProcess, limits: WaitLimits, end: EndProcess) -> Iterator[Connection]:
    """Meet the other ranks, and be watched by them until the end of the context.

    Raises ``RankError`` where a rank is missing, died, or ended with an error: the same sentence on all ranks. A main
    thread that cannot raise it, as it waits inside a collective, is ended around by ``end``, on another thread.
    """
    where = f"{me.address}:{me.port}"
    hosts_store = not me.has_store and me.rank == 0
    try:
        store = open_store(me.address, me.port, hosts=hosts_store, seconds=limits.start)
    except (OSError, RuntimeError) as error:
        raise RankError(_unreachable(me, where, limits, error), () if me.has_store else (0,)) from error
    board = Board(store, where, None if me.has_store else 0)
    try:
        cards = meet(board, me.rank, me.size, card(), limits)
    except RankError as error:
        # A store in this process stays until the ranks that have come have read the verdict.
        _part_from(board, me, Patience.after(limits, error.ranks), hosts_store=hosts_store)
        raise
    hosts, machines = (tuple(str(each[name]) for each in cards) for name in ("host", "machine"))
    names = [f"rank {rank} ({host})" for rank, host in enumerate(hosts)]
    with ExitStack() as ends:
        processes = LocalProcesses(me.rank, cards)
        # Registered first, so closed last: the threads below read these files until they have stopped.
        ends.callback(processes.close)
        watch = RankWatch(board, me.rank, names, limits, gone=processes.gone)
        ends.callback(_threads(watch, limits, end))
        ends.callback(_on_signals(watch))
        plane = ControlPlane(board, watch, me.rank, me.size)
        connection = Connection(plane=plane, store=store, hosts=hosts, machines=machines, limits=limits)
        try:
            yield connection
        except BaseException as error:
            # What watches this process goes on: its end may wait for what a rank that is gone had to do.
            ends.pop_all()
            try:
                _end_with(connection, error)
            finally:
                blamed = watch.verdict.ranks if watch.verdict else ()
                patience = Patience.after(limits, blamed, processes.gone)
                _part_from(board, me, patience, hosts_store=hosts_store)
            raise
    watch.leave()
    _part_from(board, me, Patience(seconds=PARTING), hosts_store=hosts_store)


def _end_with(connection: Connection, error: BaseException) -> None:
    """Show the others why this rank ends; raise their verdict where that is the cause."""
    watch, limits = connection.plane.watch, connection.limits
    text = f"{sentence(error)} {error.__cause__ or ''}".lower()
    is_known = isinstance(error, RankError) or not isinstance(error, Exception)
    # A broken connection is the effect of another rank's end, which the watch finds within its limits.
    if not is_known and any(word in text for word in CONNECTION_WORDS):
        watch.cause(limits.silence + limits.grace)
    verdict = watch.verdict
    watch.leave(error if verdict is None else verdict.error())
    if verdict is not None and not is_known:
        raise verdict.error() from error


def _part_from(board: Board, me: RankProcess, patience: Patience, *, hosts_store: bool) -> None:
    """Read and write no more; a store in this process waits until no other rank does."""
    if not hosts_store:
        # The store is in another process: it need only know that this rank reads no more.
        board.post(f"parted/{me.rank}", "")
        return
    ranks, begun = range(1, me.size), monotonic()
    while True:
        parted = board.read([f"parted/{rank}" for rank in ranks])
        missing = {rank for rank, text in zip(ranks, parted, strict=True) if text is None}
        if not patience.waits_for(missing, monotonic() - begun):
            return
        sleep(LONGEST)


def _threads(watch: RankWatch, limits: WaitLimits, end: EndProcess) -> Callable[[], None]:
    """Start the threads of a watch; return what stops them."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(limits.beat):
            try:
                watch.look()
            except RankError as error:
                # The board does not answer, so the verdict cannot be shared: this rank ends with its own.
                watch.conclude(RankVerdict(says=str(error), ranks=error.ranks))
                return

    def guard() -> None:
        while not stop.wait(limits.beat):
            watch.guard(end)

    # Two: ``look`` may hang in the store, and ``guard`` must then still end this process in time.
    threads = [threading.Thread(target=work, name=work.__name__, daemon=True) for work in (look, guard)]
    for thread in threads:
        thread.start()

    def join() -> None:
        stop.set()
        for thread in threads:
            thread.join(limits.grace)

    return join


def _on_signals(watch: RankWatch) -> Callable[[], None]:
    """Let SIGTERM wait for its reason, since torchrun sends it to all when a rank has died. Return what undoes it."""
    # Python allows signal handlers only there; a test or a notebook may call from another thread.
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def interrupt(number: int, frame: FrameType | None) -> None:
        watch.ask_to_interrupt()
        raise KeyboardInterrupt

    handlers = {signal.SIGTERM: lambda number, frame: watch.terminate(), signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


def _unreachable(me: RankProcess, where: str, limits: WaitLimits, error: OSError | RuntimeError) -> str:
    reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
    if me.rank == 0 and not me.has_store:
        return f"rank 0 cannot open a store at {where}: {reason}; choose another MASTER_PORT"
    cause = "its launcher has ended" if me.has_store else "rank 0, which opens it, has not started"
    return (
        f"rank {me.rank} found no store at {where} within {limits.start:g} s: {cause}, or the address cannot be "
        f"reached from here: {reason}"
    )
