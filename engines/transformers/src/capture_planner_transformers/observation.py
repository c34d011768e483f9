"""What happened: graphs with seconds and memory, steps by shape, and each reason for eager once in the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from capture_planner.engines import probe
from capture_planner.engines.inside import timestamp
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import digest
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.observation import Observation, ObservedGraph, ObservedRole
from capture_planner_transformers.tables import EngineStep, GraphAnswer, GraphTable, Key

LOG = logging.getLogger("capture_planner.transformers")

_MIB = 1 << 20


@attrs.frozen(kw_only=True)
class Facts:
    """What is known of the engine before its graphs are captured."""

    engine_version: str
    device: str | None
    torch: str
    rank: int
    world_size: int
    kv_blocks: int
    settings: tuple[tuple[str, str], ...]


class Ledger:
    """Counts of one manager; ``count`` is called once a step."""

    def __init__(self, name: str, facts: Facts, recorder: Recorder | None = None) -> None:
        """:param name: the plan, for the log."""
        self.costs: dict[Key, tuple[float, int]] = {}
        """Seconds and bytes of memory of each graph, over all sets of static inputs."""
        self.steps: Counter[tuple[Key | None, Reason | None]] = Counter()
        """Steps by graph, or by the reason for none."""
        self._name, self._facts, self._recorder = name, facts, recorder
        self._indices: dict[Entry, int] = {}

    def captured(self, key: Key, seconds: float, size: int) -> None:
        """Add the cost of one capture."""
        before = self.costs.get(key, (0.0, 0))
        # ``torch.cuda.graph`` returns cached blocks first, which can lower reserved memory by more than a graph adds.
        self.costs[key] = before[0] + seconds, before[1] + max(size, 0)

    def begin(self, table: GraphTable, captured: frozenset[Key]) -> None:
        """All graphs are captured: log them, and write the observation if one is wanted."""
        seconds, size = (sum(costs) for costs in zip((0.0, 0), *self.costs.values(), strict=True))
        LOG.info(
            "%s: %d of %d graphs in %.1f s and %d MiB", self._name, len(captured), len(table.keys), seconds, size / _MIB
        )
        if self._recorder is not None:
            observation = observed(table, captured, self.costs, self._facts)
            graphs = observation.roles[0].graphs
            self._indices = {graph.entry: index for index, graph in enumerate(graphs)}
            self._recorder.begin(observation)

    def count(self, step: EngineStep, answer: GraphAnswer) -> None:
        """Count a step, and log the first of each reason for eager."""
        key, reason = answer.key, answer.reason
        # One line for each reason: a server runs thousands of steps a minute.
        if key is None and not self.steps[key, reason]:
            LOG.warning(
                "%s: a batch of %d tokens, %d requests and %d cache reads runs eager: %s",
                *(self._name, step.num_tokens, step.num_reqs, step.reads, reason),
            )
        self.steps[key, reason] += 1
        if self._recorder is not None:
            batch = step.batch
            graph = None if key is None or answer.entry is None else self._indices[answer.entry]
            self._recorder.count(
                Role.TARGET, batch.num_reqs, batch.num_tokens, batch.query_len, batch.past_prompt, 0, graph, reason
            )


def observed(
    table: GraphTable, captured: frozenset[Key], costs: dict[Key, tuple[float, int]], facts: Facts
) -> Observation:
    """Return what is known after capture: one graph for each entry, whose costs are those of all its cache reads."""
    plan = table.dispatcher.plan
    target = plan.role(Role.TARGET)
    # An entry counts from one graph on, of whatever cache reads.
    sizes = {key[0] for key in captured}
    entries = [entry for entry in target.entries if entry.mode is GraphMode.FULL and entry.num_tokens in sizes]
    graphs = []
    for entry in entries:
        # An entry has a graph for each size of cache reads, and costs what they cost together.
        own = [costs[key] for key in captured if key[0] == entry.num_tokens and key in costs]
        seconds, size = sum(cost[0] for cost in own), sum(cost[1] for cost in own)
        graphs.append(ObservedGraph(entry=entry, seconds=round(seconds, 4), mib=round(size / _MIB, 2)))
    reads = " ".join(map(str, table.reads))
    return Observation(
        engine="transformers",
        engine_version=facts.engine_version,
        device=facts.device,
        torch=facts.torch,
        rank=facts.rank,
        world_size=facts.world_size,
        started=timestamp(),
        plan=digest(plan),
        model=plan.model.name,
        limits=plan.limits,
        parallel=plan.parallel,
        sizes=tuple(sorted(sizes)),
        settings=(*facts.settings, ("kv_sizes", reads)),
        kv_blocks=facts.kv_blocks,
        capture_seconds=round(sum(cost[0] for cost in costs.values()), 4),
        graph_mib=round(sum(cost[1] for cost in costs.values()) / _MIB, 2),
        roles=(
            ObservedRole(
                role=Role.TARGET,
                mode=target.mode.without_piecewise if graphs else GraphMode.NONE,
                graphs=tuple(graphs),
                answers=probe.answers(Role.TARGET, plan, graphs, _asked(table, entries)),
            ),
        ),
        notes=(
            f"each graph was captured for up to {len(table.reads)} sizes of cache reads ({reads}); a step that reads "
            "more runs eager",
        ),
    )


def _asked(table: GraphTable, entries: Sequence[Entry]) -> Callable[[Batch], tuple[int | None, Reason | None]]:
    """Return what a batch whose cache reads fit runs on: an index into ``entries``, or the reason for none."""
    indices = {entry: index for index, entry in enumerate(entries)}

    def answer(batch: Batch) -> tuple[int | None, Reason | None]:
        dispatch = table.dispatcher.dispatch(batch)
        if dispatch.entry is None:
            return None, dispatch.reason
        if dispatch.entry in indices:
            return indices[dispatch.entry], None
        # With other graphs there, this one's capture failed; without any, none was to be made.
        return None, Reason.MEMORY if dispatch.mode is GraphMode.FULL and entries else Reason.MODE

    return answer
