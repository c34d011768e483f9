"""The tally of a run: what forwards, steps and requests add up to, in memory that does not grow with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.runtime.distribution import Distribution
from capture_planner.runtime.ledger import Forward, RankStep, RequestResult, Step, Wait

MOST_SHAPES = 10_000
"""Different shapes of eager forwards that are counted one by one; the others are counted by role and reason."""

# What ``request_counts`` has of a tally.
SUMS = ("requests", "finished", "output_tokens", "with_adapter", "drafted_tokens", "accepted_tokens")
PLACES = ("drafted", "accepted")
TIMES = ("first_token", "per_token", "last_token")

Shape = tuple[Role, Reason | None, int, int, int | None]
"""Role, reason, requests, tokens and query length of an eager forward; 0 requests and tokens of shapes too many."""


@attrs.define
class ModeTally:
    """Forwards of one role and mode, and their rows, with their repeats."""

    forwards: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    real_reqs: int = 0
    padded_reqs: int = 0


@attrs.define(eq=False)
class Tally:
    """Counts, which are exact, and distributions of times."""

    modes: dict[tuple[Role, GraphMode], ModeTally] = attrs.Factory(dict)
    decodes: Counter[Role] = attrs.Factory(Counter)
    """Forwards of uniform decodes."""
    covered: Counter[Role] = attrs.Factory(Counter)
    """Those that a graph served."""
    varying: Counter[Role] = attrs.Factory(Counter)
    """Forwards of decodes whose requests differ."""
    varying_covered: Counter[Role] = attrs.Factory(Counter)
    """Those that a full graph served."""
    uses: Counter[tuple[Role, Entry]] = attrs.Factory(Counter)
    """Forwards that each graph served."""
    fallbacks: Counter[Shape] = attrs.Factory(Counter)
    """Eager forwards."""
    adapters: Counter[tuple[int, int]] = attrs.Factory(Counter)
    """Forwards of the target by active adapters, and by those that the graph is for; -1: eager."""
    steps: int = 0
    reqs: int = 0
    """Requests, summed over the steps."""
    tokens: int = 0
    most_reqs: int = 0
    most_waiting: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted: list[int] = attrs.Factory(list)
    """Drafts that were verified, by their place in a step."""
    accepted: list[int] = attrs.Factory(list)
    """Drafts that were accepted, those before them too, by their place."""
    requests: int = 0
    finished: int = 0
    output_tokens: int = 0
    with_adapter: int = 0
    waited: Counter[Wait] = attrs.Factory(Counter)
    """Requests that were not admitted in the step in which they came, by what was missing last."""
    agreements: int = 0
    """Steps that replicas agreed on."""
    idle_steps: int = 0
    """Those in which this one had no requests."""
    eager_by_others: int = 0
    """Forwards that ran eager because of other replicas."""
    larger_by_others: int = 0
    """Forwards that replayed another graph because of other replicas."""
    step_seconds: Distribution = attrs.Factory(Distribution)
    host_seconds: Distribution = attrs.Factory(Distribution)
    """Of each forward."""
    first_token: Distribution = attrs.Factory(Distribution)
    per_token: Distribution = attrs.Factory(Distribution)
    """Of each finished request with two or more tokens, the mean of those after the first."""
    last_token: Distribution = attrs.Factory(Distribution)

    @classmethod
    def of(cls, forwards: Iterable[Forward], steps: Iterable[Step], served: Iterable[RequestResult]) -> Tally:
        """Add up rows."""
        tally = cls()
        for forward in forwards:
            tally.add_forward(forward)
        for step in steps:
            tally.add_step(step)
        for request in served:
            tally.add_request(request)
        return tally

    def add_forward(self, forward: Forward) -> None:
        role, times, entry = forward.role, forward.repeats, forward.entry
        mode = self.modes.setdefault((role, forward.mode), ModeTally())
        mode.forwards += times
        mode.real_tokens += times * forward.num_tokens
        mode.padded_tokens += times * forward.padded_tokens
        mode.real_reqs += times * forward.num_reqs
        mode.padded_reqs += times * forward.padded_reqs
        if forward.query_len is not None:
            self.decodes[role] += times
            self.covered[role] += times * (entry is not None)
        if forward.max_query_len is not None:
            self.varying[role] += times
            self.varying_covered[role] += times * (forward.mode is GraphMode.FULL)
        if entry is not None:
            self.uses[role, entry] += times
        else:
            shape = role, forward.reason, forward.num_reqs, forward.num_tokens, forward.query_len
            if shape not in self.fallbacks and len(self.fallbacks) >= MOST_SHAPES:
                shape = role, forward.reason, 0, 0, None
            self.fallbacks[shape] += times
        if role is Role.TARGET:
            self.adapters[forward.active_loras, -1 if entry is None else entry.active_loras] += times
        self.host_seconds.add(forward.host_seconds / times, times)

    def add_step(self, step: Step) -> None:
        self.steps += 1
        self.reqs += step.num_reqs
        self.tokens += step.num_tokens
        self.most_reqs = max(self.most_reqs, step.num_reqs)
        self.most_waiting = max(self.most_waiting, step.waiting)
        self.drafted_tokens += step.drafted
        self.accepted_tokens += step.accepted
        _add(self.drafted, step.drafted_at)
        _add(self.accepted, step.accepted_at)
        self.step_seconds.add(step.seconds)

    def add_request(self, request: RequestResult) -> None:
        """Count a request that is finished or cut off."""
        self.requests += 1
        self.output_tokens += request.output_tokens
        self.with_adapter += request.adapter > 0
        if request.waited_for is not None:
            self.waited[request.waited_for] += 1
        if request.first_token is not None:
            self.first_token.add(request.first_token)
        if request.finished is None:
            return
        self.finished += 1
        self.last_token.add(request.finished)
        if request.per_token is not None:
            self.per_token.add(request.per_token)

    def add_rank_step(self, step: RankStep) -> None:
        self.agreements += 1
        self.idle_steps += step.is_idle
        self.eager_by_others += step.eager_by_others
        self.larger_by_others += step.larger_by_others

    @property
    def request_counts(self) -> dict[str, Any]:
        """What requests and their drafts add up to, as JSON can hold it: what differs from replica to replica."""
        times: dict[str, Distribution] = {name: getattr(self, name) for name in TIMES}
        return {
            **{name: getattr(self, name) for name in (*SUMS, *PLACES)},
            "waited": {wait.value: count for wait, count in self.waited.items()},
            **{name: {"pairs": each.pairs, "max": each.max} for name, each in times.items()},
        }

    def add_request_counts(self, counts: Mapping[str, Any]) -> None:
        """Add the ``request_counts`` of another replica."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + counts[name])
        for name in PLACES:
            _add(getattr(self, name), counts[name])
        self.waited.update({Wait(wait): count for wait, count in counts["waited"].items()})
        for name in TIMES:
            getattr(self, name).add_all(counts[name]["pairs"], counts[name]["max"])


def _add(sums: list[int], more: Sequence[int]) -> None:
    sums.extend([0] * (len(more) - len(sums)))
    for place, count in enumerate(more):
        sums[place] += count
