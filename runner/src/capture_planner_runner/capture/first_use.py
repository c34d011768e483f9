"""First use: graphs of a lazy plan that are captured between the steps of requests, within a budget.

The rule: a batch whose best graph waits for its first use runs what is captured by now, the next larger graph or eager,
and requests that graph, once for each forward that runs. Before a later step, when the step before it is complete and
none is launched, the most requested graphs are captured while there is time left. A graph is tried once: one
that does not fit or cannot be captured is waived with its reason from then on. Once nothing is left of the memory, none
is tried. None is ever given up for another, so that nothing is captured twice.

All ranks capture the same graphs: they request the same ones equally often, since they run the same batches, and
replicas request those of their joint batches. The clock of the first rank decides whether time is left, and a graph
that does not fit on one rank is dropped on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import Plan
from capture_planner_runner.capture.sessions import capture_late
from capture_planner_runner.capture.variants import as_captured, without_lost
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.ledger.rows import GraphCapture, LazyCaptures
from capture_planner_runner.ledger.session import Session
from capture_planner_runner.ranks.collectives import Collectives
from capture_planner_runner.ranks.peers import Peers

MINUTE = 60.0


@attrs.frozen
class TokenBucket:
    """Seconds that may be spent: a minute's worth at most, which comes back evenly, a minute's worth in a minute.

    Spending may overdraw it once: what it lacks comes back first. So within any time the seconds spent are at most
    what came back in it, a minute's worth more, and the last spending.
    """

    per_minute: float
    level: float
    """Seconds that were left at ``now``; below 0 it is overdrawn."""
    now: float

    @classmethod
    def full(cls, per_minute: float, now: float) -> TokenBucket:
        return cls(per_minute, per_minute, now)

    def at(self, now: float) -> TokenBucket:
        """Return the bucket at a later moment, in seconds."""
        came = max(now - self.now, 0.0) * self.per_minute / MINUTE
        return attrs.evolve(self, level=min(self.level + came, self.per_minute), now=max(now, self.now))

    def less(self, seconds: float) -> TokenBucket:
        return attrs.evolve(self, level=self.level - seconds)

    @property
    def is_open(self) -> bool:
        """Whether capture time is left."""
        return self.level > 0


class FirstUse:
    """Wraps the dispatcher of a lazy plan: counts the graphs that forwards request, and captures them between steps.

    :param roles: of a runner, with what it captured at start.
    :param session: where captures are noted, those at start too.
    :param clock: in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        roles: Mapping[Role, RoleRun],
        grapher: Grapher,
        session: Session,
        peers: Peers,
        among: Collectives,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        memory, seconds = plan.capture.memory, plan.capture.seconds_per_minute
        assert memory is not None and seconds is not None, "a lazy plan has a budget"
        self._plan, self._roles, self._grapher, self._session = plan, roles, grapher, session
        self._peers, self._among, self._clock = peers, among, clock
        self._memory, self._seconds = memory, TokenBucket.full(seconds, clock())
        self._requested: Counter[tuple[Role, Entry]] = Counter()
        self._update()

    def _update(self) -> None:
        """Dispatch to the graphs that are captured now, and request none that cannot be captured."""
        captured = self._session.captured
        self.dispatcher = Dispatcher(as_captured(self._plan, captured))
        """Says what serves a batch now. Another one takes its place between steps."""
        # Without those that failed, which every batch would request, capture and discard again (vllm-omni#7180).
        self._ideal = Dispatcher(without_lost(self._plan, captured))

    @property
    def plan(self) -> Plan:
        """The plan as it is captured now."""
        return self.dispatcher.plan

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return what serves a batch now."""
        return self.dispatcher.dispatch(batch)

    def request_capture(self, batch: Batch, forwards: int = 1) -> None:
        """Request the graph that would have served ``forwards`` forwards of a batch better, where there is one."""
        best = self._ideal.dispatch(batch).entry
        if best is not None and best != self.dispatch(batch).entry:
            self._requested[batch.role, best] += forwards

    def is_due(self) -> bool:
        """Whether a graph is to be captured before the next step. Collective, where a graph was requested."""
        # Ranks have requested the same graphs, so either all return here or all enter the collective below.
        if not self._requested:
            return False
        # A rank that captured nothing, or whose session broke off, has no pool: then no rank captures.
        ready = all(role.graphs.pool is not None for role in self._roles.values())
        numbers = self._peers.agree([int(ready), int(self._seconds.at(self._clock()).is_open)])
        # The first rank's clock decides for all: a rank that captures alone is a deadlock (pegainfer#498).
        return bool(numbers[:, 0].all() and numbers[0, 1])

    def capture(self) -> None:
        """Capture the requested graphs, most requested first, while time is left. No step may be in flight."""
        self._capture_one()
        while self.is_due():
            self._capture_one()
        self._update()

    def _capture_one(self) -> None:
        places = {role: place for place, role in enumerate(self._roles)}
        # Ties are broken by order and role, so that every rank captures the same graph.
        role, entry = min(
            self._requested, key=lambda item: (-self._requested[item], item[1].capture_order, places[item[0]])
        )
        # Before it is tried: a graph that cannot be captured is not requested a second time.
        del self._requested[role, entry]
        steps, late = self._session.tally.steps, self._late
        done = capture_late(
            self._roles[role],
            entry,
            self._grapher,
            room=self._memory - self._taken,
            number=len(late) + 1,
            peers=self._peers,
            among=self._among,
        )
        self._session.captured.append(attrs.evolve(done, step=steps))
        self._seconds = self._seconds.at(self._clock()).less(done.seconds)

    @property
    def _late(self) -> list[GraphCapture]:
        return [done for done in self._session.captured if done.step is not None]

    @property
    def _taken(self) -> int:
        # Below 0 where captures gave back memory that was taken before them.
        return max(sum(done.taken for done in self._late), 0)

    def record(self) -> LazyCaptures:
        """Return what was captured on first use so far, and what is left of the budget."""
        late = self._late
        answered = {(done.role, done.entry) for done in late}
        return LazyCaptures(
            memory=self._memory,
            taken=self._taken,
            seconds_per_minute=self._seconds.per_minute,
            seconds=sum(done.seconds for done in late),
            left=self._seconds.at(self._clock()).level,
            unused=self._plan.num_lazy - len(answered) - len(self._requested),
            asked=len(self._requested),
            untried=sum(not done.tried for done in late),
        )
