"""What happened: graphs with seconds and bytes, steps by shape, and each reason for eager once in the log."""

from __future__ import annotations

import logging
from collections import Counter

from capture_planner.modes import Reason
from capture_planner_transformers.tables import Answer, GraphTable, Key, Step

LOG = logging.getLogger("capture_planner.transformers")


class Ledger:
    """Counts of one manager; ``count`` is called once a step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.costs: dict[Key, tuple[float, int]] = {}
        """Seconds and bytes of memory of each graph, over all sets of static inputs."""
        self.steps: Counter[tuple[Step, Key | None, Reason | None]] = Counter()
        self._reasons: set[Reason | None] = set()

    def captured(self, key: Key, seconds: float, size: int) -> None:
        """Add the cost of one capture."""
        before = self.costs.get(key, (0.0, 0))
        self.costs[key] = before[0] + seconds, before[1] + size

    def begin(self, table: GraphTable, captured: frozenset[Key]) -> None:
        """All graphs are captured."""
        seconds = sum(cost[0] for cost in self.costs.values())
        LOG.info("%s: %d of %d graphs in %.1f s", self.name, len(captured), len(table.keys), seconds)

    def count(self, step: Step, answer: Answer) -> None:
        """Count a step, and log the first of each reason for eager."""
        self.steps[step, answer.key, answer.reason] += 1
        if answer.key is None and answer.reason not in self._reasons:
            self._reasons.add(answer.reason)
            LOG.warning(
                "%s: a batch of %d tokens, %d requests and %d cache reads runs eager: %s",
                self.name,
                step.num_tokens,
                step.num_reqs,
                step.reads,
                answer.reason,
            )
