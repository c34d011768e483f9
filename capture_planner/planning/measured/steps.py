"""Steps: the target's batches of a traffic, the passes that a step makes of one, and what they take by a profile.

Drafters follow the target: draft prefill runs its batch, with some methods more rows, and draft decodes come after it.
So what a traffic says of a drafter's own passes is not needed: one that counts the target's steps alone is complete.

What steps take is judged under a table of graphs, of ladders, a plan or an engine, and with every size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.sizing import Ladder
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import (
    DecodeFamily,
    Deployment,
    decode_families,
    draft_prefill_of,
    draft_steps,
    extra_slots,
    kind_of,
    most_loras,
    token_step,
)
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount

Answer = Callable[[Batch], Entry | None]
"""A function from a batch to the entry that serves it; None: it runs eager."""

Modes = Mapping[Role, GraphMode]
"""The mode of each role, by which a table with every size is judged."""

T = TypeVar("T")


def percentile(counts: Iterable[tuple[T, float]], percent: float) -> T:
    """Return the first of ascending counted items within which ``percent`` of all counts are; there must be some."""
    items = list(counts)  # read twice
    left = sum(count for _, count in items) * percent / 100
    for item, count in items:
        left -= count
        if left <= 1e-9:  # not 0: sums are rounded
            return item
    return items[-1][0]


@attrs.frozen
class Steps:
    """The number of steps of each batch of the target, with sentences on what the traffic did not say."""

    counts: Mapping[Batch, int]
    """Steps by batch, in a fixed order."""
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    """Assumptions about decodes of query lengths that this deployment does not have."""
    foreign: int = 0
    """Steps of those decodes."""
    observed: int | None = None
    """Observations that the steps rest on, where a log shows one of several; None: each step is one."""

    @property
    def lines(self) -> int:
        """Number of observations, which a claim about the steps can rest on."""
        return self.total if self.observed is None else self.observed

    @property
    def has_prompts(self) -> bool:
        """True if some batch has prompts; without, the steps say nothing of the sizes of mixed batches."""
        return any(not batch.past_prompt for batch in self.counts)

    @property
    def total(self) -> int:
        """Number of steps."""
        return sum(self.counts.values())

    def percentile(self, percent: float, time: Callable[[Batch], float]) -> Batch:
        """Return the batch of the step within whose time ``percent`` of the steps end; there must be some."""
        return percentile(sorted(self.counts.items(), key=lambda item: time(item[0])), percent)


def weights_of(steps: Mapping[Batch, int], objective: str) -> dict[Batch, int]:
    """Return what the steps of each batch weigh: of the objective token their requests, all of which wait for them."""
    return {batch: count * (batch.num_reqs if objective == "token" else 1) for batch, count in steps.items()}


def steps_of(traffic: Traffic, deployment: Deployment) -> Steps:
    """Return the target's steps of a traffic, as far as the deployment's limits admit them.

    Without a query length, a batch of the target is a decode if its tokens are what the schedule gives a number of
    requests and nothing says that it has prompts; every other batch is mixed. A mixed batch of unknown requests has as
    many as a step has on average, for the draft decodes that follow it.
    """
    families = decode_families(Role.TARGET, deployment)
    limits, loras, slots = deployment.limits, most_loras(Role.TARGET, deployment), extra_slots(deployment)
    lines = [line for line in traffic.batches if line.role is Role.TARGET]
    known = [line for line in lines if line.num_reqs is not None]
    weight = sum(line.count for line in known)
    typical = sum((line.num_reqs or 0) * line.count for line in known) // weight if weight else limits.max_num_reqs
    found: Counter[Batch] = Counter()
    guessed: Counter[str] = Counter()
    foreign: Counter[int] = Counter()
    for line in lines:
        # Drafters with rows of their own need room in the same limit as the target's tokens.
        batch = _batch(line, families, max(typical, 1))
        if batch is None:
            guessed["without tokens or requests are left out"] += line.count
        elif batch.num_tokens + batch.num_reqs * slots > limits.max_num_tokens or batch.num_reqs > limits.max_num_reqs:
            guessed["beyond the limits are left out"] += line.count
        else:
            found[attrs.evolve(batch, active_loras=min(line.active_loras, loras, batch.num_reqs))] += line.count
            # Traffic of another K: its decodes are not those that this deployment will run.
            if (
                line.past_prompt is not False
                and line.query_len is not None
                and not any(each.query_len == batch.query_len and batch.num_reqs in each.requests for each in families)
            ):
                foreign[line.query_len] += line.count
            if line.num_reqs is None:
                which = "decodes" if batch.query_len else f"mixed batches of {typical} requests"
                guessed[f"of unknown requests are taken for {which}"] += line.count
            elif line.past_prompt is None and batch.query_len:
                guessed["of unknown phase have the shape of decodes and are taken for them"] += line.count
    notes = tuple(f"{counted(count, 'step')} {what}" for what, count in sorted(guessed.items()))
    steps, listed = found.total(), sum(line.count for line in lines)
    return Steps(
        dict(sorted(found.items(), key=lambda item: _order(item[0]))),
        notes,
        tuple(_foreign(foreign, families)),
        foreign.total(),
        # Which lines those left out are is not known.
        None if traffic.lines is None else round(traffic.lines * steps / max(listed, 1)),
    )


def _foreign(steps: Counter[int], families: tuple[DecodeFamily, ...]) -> Iterator[str]:
    """Say how many decodes have a query length that the deployment does not run, at all or for so many requests."""
    if steps:
        recorded, own = (
            " or ".join(map(str, sorted(lengths))) for lengths in (steps, {each.query_len for each in families})
        )
        yield (
            f"{counted(steps.total(), 'step')} are decodes of query length {recorded}; this deployment has those of "
            f"{own}: they count with the tokens that they had, and not as its decodes; record "
            "traffic with its draft lengths"
        )


def _order(batch: Batch) -> tuple[int, ...]:
    return batch.num_tokens, batch.num_reqs, batch.query_len or 0, batch.past_prompt, batch.active_loras


def _batch(line: TrafficCount, families: tuple[DecodeFamily, ...], typical: int) -> Batch | None:
    """Return the batch that a line is about, or None where its tokens are not known, nor a decode that it is."""
    requests, tokens, query_len = line.num_reqs, line.num_tokens, line.query_len
    # Unless the source says that there are prompts, a shape that only decodes have is taken for one.
    if line.past_prompt is not False:
        for family in families:
            each = family.query_len
            if query_len not in (None, each):
                continue
            number = requests or (tokens or 0) // each
            if number in family.requests and tokens in (None, number * each):
                return Batch.decode(Role.TARGET, number, each)
    # Requests alone say nothing about a mixed batch's tokens.
    if tokens is None:
        return None
    return Batch(
        role=Role.TARGET,
        num_reqs=min(requests or typical, tokens),
        num_tokens=tokens,
        # With a typical number of requests in place of the real one, this length may not match the tokens.
        query_len=query_len if requests is not None else None,
        past_prompt=line.past_prompt is True,
    )


def passes_of(batch: Batch, deployment: Deployment) -> Iterator[tuple[Batch, int]]:
    """Yield the batch of each role that runs in a step of the target's ``batch``, with how often it runs."""
    yield batch, 1
    if deployment.speculative is not None:
        yield draft_prefill_of(batch, deployment.speculative.extra_slots), 1
        drafts = deployment.speculative.draft_tokens(batch.num_reqs)
        # The draft prefill makes the first draft, and with some methods all of them.
        if drafts > 1 and deployment.speculative.is_chain:
            yield Batch.decode(Role.DRAFT_DECODE, batch.num_reqs, 1), drafts - 1


@attrs.frozen
class PassCost:
    """Time of the passes of one role in a step."""

    batch: Batch
    entry: Entry | None
    """The graph that serves it; None: eager."""
    milliseconds: float
    every_size: float
    """The same if every size had a graph, in the mode that the role runs in."""


@attrs.frozen
class StepCost:
    """Time of one step, the target's passes first."""

    passes: tuple[PassCost, ...]
    milliseconds: float
    every_size: float
    """The same if every size had a graph."""

    @property
    def answers(self) -> dict[Role, Entry | None]:
        """The graph of each role that runs in it."""
        return {each.batch.role: each.entry for each in self.passes}


@attrs.frozen(kw_only=True)
class Judgement:
    """The time of a traffic's steps, by a profile."""

    steps: int
    mean_step_ms: float
    """Mean time of a step, in milliseconds; 0 without steps."""
    every_size_ms: float
    """The same with a graph of every size that gains by one, in the same modes."""
    eager_share: float
    """Share of the steps in which at least one pass runs eager."""
    times: tuple[tuple[float, int], ...]
    """Milliseconds of a step with the number of steps that take them, ascending."""

    @property
    def regret(self) -> float:
        """Extra time of the mean step over every size, as a share."""
        return self.mean_step_ms / self.every_size_ms - 1 if self.every_size_ms else 0.0

    def percentile(self, percent: float) -> float:
        """Return the time within which ``percent`` of the steps end, in milliseconds; 0 without steps."""
        return percentile(self.times, percent) if self.times else 0.0


def every_size(costs: Costs, deployment: Deployment, modes: Modes | None = None) -> Callable[[Batch], float]:
    """Return the milliseconds of a step of the target's batch where every size has a graph, drafter's passes included.

    :param modes: the mode of each role; None: FULL_AND_PIECEWISE for all.
    The function raises ``PlanningError`` where the profile has no times of a role.
    """
    prices = Prices(costs, deployment, dict.fromkeys(Role, GraphMode.FULL_AND_PIECEWISE) if modes is None else modes)

    return cache(lambda batch: prices.step(batch, prices.on_every_size(batch)))


def judge(answer: Answer, steps: Steps, costs: Costs, deployment: Deployment, modes: Modes) -> Judgement:
    """Return what ``steps`` take where ``answer`` dispatches; raises ``PlanningError`` without times of a role."""
    prices = Prices(costs, deployment, modes)
    times: dict[float, int] = {}
    spent = every = 0.0
    eager = 0
    for batch, count in steps.counts.items():
        step = prices.cost(answer, batch, passes_of(batch, deployment))
        spent, every = spent + step.milliseconds * count, every + step.every_size * count
        times[step.milliseconds] = times.get(step.milliseconds, 0) + count
        eager += count * (None in step.answers.values())
    total = steps.total or 1
    return Judgement(
        steps=steps.total,
        mean_step_ms=spent / total,
        every_size_ms=every / total,
        eager_share=eager / total,
        times=tuple(sorted(times.items())),
    )


class Prices:
    """The time of passes, by the entry that serves them."""

    def __init__(self, costs: Costs, deployment: Deployment, modes: Modes) -> None:
        self.graph, self.eager = cache(costs.graph), cache(costs.eager)
        self._profile, self._deployment = costs.profile, deployment
        self.modes, self._step = modes, token_step(deployment.parallel)
        self._families = {role: decode_families(role, deployment) for role in Role}

    def of(self, batch: Batch, entry: Entry | None, repeats: int) -> float:
        """Return the milliseconds of ``repeats`` passes of a batch on its entry."""
        if entry is None:
            return self._eager(batch, repeats)
        # A replay takes the time of its padded size, whatever part of it is real; only experts skip padding.
        curve = self.graph((batch.role, entry.mode, entry.query_len, entry.draft_steps))
        replays = curve(entry.num_tokens) * (repeats if entry.draft_steps is None else 1)
        return replays + self.experts(batch, repeats)

    def experts(self, batch: Batch, repeats: int) -> float:
        """Return what the experts of a mixture take in ``repeats`` passes, whatever graph they run on."""
        return self._profile.expert_milliseconds(batch.role, batch.num_tokens) * repeats

    def step(self, batch: Batch, passes: Iterable[float]) -> float:
        """Return the milliseconds of a step, given the milliseconds of its passes."""
        return self._profile.step(batch.num_reqs, sum(passes))

    def cost(self, answer: Answer, batch: Batch, passes: Iterable[tuple[Batch, int]]) -> StepCost:
        """Return what a step takes where ``answer`` dispatches; ``passes``: each batch, with how often it runs."""
        costs = []
        for each, repeats in passes:
            entry = answer(each)
            # A fused chain is one replay for all draft steps; single passes are one replay each.
            fused = entry is not None and entry.draft_steps is not None
            best = self.with_every_size(each, repeats, fused=fused)
            costs.append(PassCost(each, entry, self.of(each, entry, repeats), best))
        own, every = [each.milliseconds for each in costs], [each.every_size for each in costs]
        return StepCost(tuple(costs), self.step(batch, own), self.step(batch, every))

    def on_every_size(self, batch: Batch, chains: Container[int | None] = ()) -> tuple[float, ...]:
        """Return the milliseconds of the passes of each role, the target's first, all on graphs of their own size.

        :param chains: lengths of the chains of draft decodes that run in one graph.
        """
        return tuple(
            self.with_every_size(each, repeats, fused=each.role is Role.DRAFT_DECODE and repeats in chains)
            for each, repeats in passes_of(batch, self._deployment)
        )

    def with_every_size(self, batch: Batch, repeats: int, *, fused: bool = False) -> float:
        """Return the milliseconds of ``repeats`` passes on graphs of the batch's own size, in its role's mode."""
        mode = self.modes.get(batch.role, GraphMode.NONE)
        is_decode = kind_of(batch, self._families[batch.role]) is Kind.DECODE
        lowered = mode.decode_mode if is_decode else mode.mixed_mode
        own = is_decode and mode.is_separate
        # Sequence parallelism pads every batch to a multiple of the ranks.
        tokens = -(-batch.num_tokens // self._step) * self._step
        family: Family = (batch.role, lowered, batch.query_len if own else None, repeats if fused else None)
        if lowered is GraphMode.NONE:
            return self._eager(batch, repeats)
        replays = self.graph(family)(tokens) * (1 if fused else repeats) + self.experts(batch, repeats)
        # Engines run decodes that have graphs of their own on them, whatever an eager pass takes.
        if own:
            return replays
        # Mixed batches run eager where that takes no longer.
        return min(replays, self._eager(batch, repeats))

    def _eager(self, batch: Batch, repeats: int) -> float:
        # An eager curve of draft decodes may be that of a whole chain.
        chain = repeats if batch.role is Role.DRAFT_DECODE else None
        eager = self.eager(batch.role, batch.uniform_query_len, chain)(batch.num_tokens)
        return eager + self.experts(batch, repeats)


class LadderAnswers:
    """The cheapest entry of ladders for a batch."""

    def __init__(self, ladders: Sequence[Ladder], deployment: Deployment) -> None:
        self._ladders = {role: [each for each in ladders if each.role is role and each.sizes] for role in Role}
        self._speculative = deployment.speculative

    def __call__(self, batch: Batch) -> Entry | None:
        """Return the entry that serves a batch of a role without adapters' limits, or None for none."""
        steps, found = draft_steps(batch.role, batch.num_reqs, self._speculative), []
        for ladder in self._ladders[batch.role]:
            # Of one ladder the next size that holds the batch is the cheapest.
            index = bisect_left(ladder.sizes, batch.extent(ladder.kind))
            for size in ladder.sizes[index : index + 1]:
                case = next((case for case in ladder.served(size) if case >= batch.active_loras), None)
                entry = None if case is None else ladder.entry(size, case)
                if entry is not None and entry.rejection(batch, steps) is None:
                    found.append(entry)
        return min(found, key=lambda entry: entry.cost, default=None)
