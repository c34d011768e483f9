"""The profile that an observation has in it: what an engine measured of its own graphs and steps.

What steps take besides their passes is fitted to the intervals: a time for each request, and for each way that the
target runs a mean, or without a graph the host's own time, which a step takes at least (``Overhead``). The fit keeps
totals: the mean step of each kind is predicted as it was measured, where no time would have to be negative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import attrs

from capture_planner.engines.deployments import GraphRows
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.errors import CapturePlannerError, PlanningError
from capture_planner.measuring.fits import Fit, GraphSample, curves_of, entry_family, fit_graphs
from capture_planner.measuring.step_times import decode_lengths, kind_of_step, step_times
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.measured.steps import Prices, passes_of
from capture_planner.records._base import grouped, replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import decode_families
from capture_planner.records.environment import Device
from capture_planner.records.model import Model
from capture_planner.records.observation import BatchCount, Observation, ObservedGraph, ObservedRole
from capture_planner.records.profile import ExpertCost, Overhead, Profile, family_name
from capture_planner.records.text import counted

Timed = tuple[float, int]
"""Milliseconds, and the number of steps that they are the median of."""

NOTHING = 1e-5
"""The least milliseconds that a pass may have in a profile."""

EAGER_REPEATS = 5
"""How many dummy steps an eager cost of an observation is the median of."""


def observed_profile(observation: Observation, model: Model, device: Device, command: str = "") -> Profile:
    """Return the figures of an observation as a profile of ``model`` on ``device``, which it has only the names of.

    Raises ``CapturePlannerError`` where it has no times: the engine neither profiled its graphs nor sampled its steps.
    """
    notes: list[str] = []
    # A served name is the operator's own, so it is a note and no error.
    if observation.model not in (None, model.name):
        notes.append(f"the engine served {observation.model}; its figures count as those of {model.name}")
    times: dict[Family, dict[int, list[Timed]]] = {}
    experts = {role.role: cost for role in observation.roles if (cost := _experts(role)) is not None}
    for role in observation.roles:
        replays = [graph for graph in role.graphs if graph.milliseconds]
        if role.graphs and not replays:
            notes.append(f"{role.role.value}: its graphs were not profiled; their times are those of sampled steps")
        lengths = {family.query_len for family in decode_families(role.role, observation)}
        for family, tokens, timed in _points(role, lengths, experts.get(role.role)):
            times.setdefault(family, {}).setdefault(tokens, []).append(timed)
    if not times:
        raise CapturePlannerError(
            f"the observation of {observation.engine} has no times; start the engine with CAPTURE_PLANNER_PROFILE=1, "
            "so that it times its graphs right after capture"
        )
    with_loras = sum(graph.entry.active_loras > 0 for role in observation.roles for graph in role.graphs)
    if with_loras:
        notes.append(f"{counted(with_loras, 'graph')} with LoRA adapters are left out")
    fit = _fit(observation, notes)
    profile = Profile(
        source=f"{observation.engine} {observation.engine_version}",
        command=command,
        date=observation.started,
        device=device,
        driver=observation.driver,
        torch=observation.torch,
        packages={observation.engine: observation.engine_version.partition("+")[0]},
        model=model,
        speculative=observation.speculative,
        parallel=observation.parallel,
        curves=curves_of(
            {
                family: (_non_decreasing if family[1] is GraphMode.NONE else _least_of_larger)(
                    {tokens: _weighed(all_) for tokens, all_ in sizes.items()}
                )
                for family, sizes in times.items()
            }
        ),
        experts=tuple(experts.values()),
        graphs=fit.graphs,
        pool=Pool.SHARED,  # vLLM's managers and its wrappers of pieces capture into one pool of the process
        base_mib=fit.base_mib,
        base_seconds=fit.base_seconds,
        notes=(*notes, *observation.notes),
    )
    return with_overheads(profile, observation)


def _experts(role: ObservedRole) -> ExpertCost | None:
    """Return what the experts of a mixture take by tokens; None: padding costs what tokens do, as far as is known.

    A replay whose tokens are half of its rows takes less by what the experts take for the other half: so their times
    add up from half to half. Below the smallest graph they are in proportion.
    """
    halves: dict[int, list[float]] = {}
    for graph in (*role.graphs, *role.trials):
        if graph.milliseconds and graph.half_milliseconds and not graph.entry.active_loras:
            halves.setdefault(graph.entry.num_tokens, []).append(graph.milliseconds - graph.half_milliseconds)
    found = None
    for tokens, more in sorted(halves.items()):
        half, last = tokens // 2, 0.0 if found is None else found.milliseconds[-1]
        rest = max(statistics.median(more), 0.0)
        total = rest * tokens / (tokens - half) if found is None else max(found(half) + rest, last)
        before = ((), ()) if found is None else (found.tokens, found.milliseconds)
        found = ExpertCost(role=role.role, tokens=(*before[0], tokens), milliseconds=(*before[1], round(total, 5)))
    return found


def _points(
    role: ObservedRole, lengths: Collection[int], experts: ExpertCost | None
) -> Iterator[tuple[Family, int, Timed]]:
    """Yield the times of a role by family and padded tokens.

    They are of profiled graphs, else of the steps on them; of eager steps, both. Of sizes that the engine has no graph
    of, they are those of graphs that it captured for a moment.

    :param lengths: query lengths of the role's decodes; eager batches of other lengths are mixed ones, such as the
        dummy batches that vLLM spreads evenly over its requests.
    :param experts: times that are no graph's own.
    """

    def eager(query_len: int | None) -> Family:
        return role.role, GraphMode.NONE, query_len if query_len in lengths else None, None

    profiled = any(graph.milliseconds for graph in role.graphs)
    # Adapters slow a graph down, and a profile has no family of graphs with them.
    captured = {_place(graph) for graph in role.graphs if not graph.entry.active_loras}
    for graph in (*role.graphs, *(trial for trial in role.trials if _place(trial) not in captured)):
        if graph.milliseconds and not graph.entry.active_loras:
            tokens, own = graph.entry.num_tokens, graph.milliseconds
            if experts is not None:
                own = round(max(own - experts(tokens), NOTHING), 5)
            yield entry_family(role.role, graph.entry), tokens, (own, 1)
    for cost in role.eager:
        if cost.milliseconds:
            yield eager(cost.query_len), cost.num_tokens, (cost.milliseconds, EAGER_REPEATS)
    sampled: dict[tuple[Family, int], list[tuple[int, Timed]]] = {}
    for batch in role.batches:
        timed = _time_of(role, batch)
        if timed is None or batch.active_loras or batch.num_tokens < 1:
            continue
        # Token counts of eager steps rarely repeat, so they are grouped by powers of two.
        if batch.graph is None:
            doubling = eager(batch.query_len if batch.past_prompt else None), (batch.num_tokens - 1).bit_length()
            sampled.setdefault(doubling, []).append((batch.num_tokens, timed))
        elif not profiled:
            entry = role.graphs[batch.graph].entry
            yield entry_family(role.role, entry), entry.num_tokens, timed
    # Of a size there is seldom more than one such step, and the first ones compile kernels, which takes seconds.
    for (family, _), alike in sampled.items():
        # At the largest of them: a smaller batch takes no longer.
        yield family, max(tokens for tokens, _ in alike), _weighed([timed for _, timed in alike])


def _place(graph: ObservedGraph) -> tuple[GraphMode, int | None, int]:
    return graph.entry.mode, graph.entry.query_len, graph.entry.num_tokens


def _time_of(role: ObservedRole, batch: BatchCount) -> Timed | None:
    """Return the time of the steps of a batch that were sampled; None: none was.

    A step without a graph waits for the host. Where the engine timed none at start, the time until the next step is
    that of its pass, as the sampled ones are few.
    """
    if batch.milliseconds:
        return batch.milliseconds, max(1, batch.samples)
    if batch.graph is None and batch.interval and not role.eager:
        return batch.interval, max(1, batch.intervals)
    return None


def _least_of_larger(sizes: Mapping[int, Timed]) -> dict[int, float]:
    """Return for each size of graphs the least time of it and of all larger ones.

    A batch can run on a larger graph, so it never needs to take longer. And other work of the host makes a replay
    longer, never shorter: sizes that were timed in the same bad moment would else look worse than they are.
    """
    descending = sorted(sizes, reverse=True)
    return dict(zip(descending, accumulate((sizes[tokens][0] for tokens in descending), min), strict=True))


def _non_decreasing(sizes: Mapping[int, Timed]) -> dict[int, float]:
    """Return times that never fall as the size grows: of such ones, the least absolute distance from those measured.

    A running maximum would let one slow step, as the first of a kind that compiles its kernels, count for all larger
    sizes; so would the mean of those that fall.
    """
    pools: list[tuple[list[Timed], list[int]]] = []
    for tokens in sorted(sizes):
        timings, members = [sizes[tokens]], [tokens]
        # Sizes whose times fall are pooled until they no longer do (pool adjacent violators).
        while pools and _weighed(pools[-1][0])[0] > _weighed(timings)[0]:
            before, others = pools.pop()
            timings, members = before + timings, others + members
        pools.append((timings, members))
    return {tokens: _weighed(timings)[0] for timings, members in pools for tokens in members}


def _weighed(timings: list[Timed]) -> Timed:
    """Return one timing of several: the median over all repeats, as far as medians of parts tell it.

    Of an even number it is the lower one: of two steps, the slower one may have compiled kernels.
    """
    # More repeats than a hundred change no median, and would take memory for each step of a run.
    medians = [milliseconds for milliseconds, repeats in timings for _ in range(min(repeats, 100))]
    return statistics.median_low(medians), sum(repeats for _, repeats in timings)


def _fit(observation: Observation, notes: list[str]) -> Fit:
    """Fit the costs of the graphs whose capture was measured; add to ``notes`` what is not known."""
    samples = [sample for role in observation.roles for sample in _samples(role, role.graphs)]
    if not samples:
        notes.append("what graphs cost in memory and time was not measured")
        return Fit(graphs=(), base_mib=0.0, base_seconds=0.0)
    alone = [sample for role in observation.roles for sample in _samples(role, role.trials)]
    largest = (
        "graphs take is that of captures into pools of their own"
        if alone
        else "graph of a family takes is taken to be in proportion to its tokens"
    )
    reported = "memory is what the device reported around each capture, allocator and driver together"
    notes.append(f"{reported}; what the largest {largest}")
    fit = fit_graphs([samples], alone)
    # What the whole capture took above its graphs, those with adapters among them, is the base: it is paid once.
    every = [graph for role in observation.roles for graph in role.graphs]
    mib, total = sum(graph.mib or 0.0 for graph in every), sum(graph.seconds or 0.0 for graph in every)
    rest = 0.0 if observation.graph_mib is None else observation.graph_mib - mib
    seconds = 0.0 if observation.capture_seconds is None else observation.capture_seconds - total
    return Fit(
        graphs=fit.graphs,
        base_mib=round(fit.base_mib + max(0.0, rest), 6),
        base_seconds=round(fit.base_seconds + max(0.0, seconds), 6),
    )


def _samples(role: ObservedRole, graphs: Iterable[ObservedGraph]) -> Iterator[GraphSample]:
    """Yield the graphs whose capture was measured."""
    for graph in graphs:
        if graph.seconds is not None and graph.mib is not None and not graph.entry.active_loras:
            yield GraphSample(
                family=entry_family(role.role, graph.entry),
                tokens=graph.entry.num_tokens,
                seconds=graph.seconds,
                mib=graph.mib,
            )


# What steps take besides their passes ------------------------------------------------------------


FITS = 8
"""Turns of the fit of floors and of the time for each request."""

TOLERANCE = 0.01
"""Share of a step by which passes may take longer than it, before that is said."""

Kind = tuple[GraphMode, int | None]


@attrs.frozen(kw_only=True)
class ServedStep:
    """Times of the steps of one shape, and of their passes."""

    kind: Kind
    num_reqs: int
    weight: int
    interval: float
    """Mean milliseconds until the next step."""
    passes: float
    """Milliseconds of all its passes, the drafter's included."""
    above: float
    """Milliseconds that a floor has no part in (``Costs``): the drafter's passes above their least, and the experts."""

    @property
    def rest(self) -> float:
        """Milliseconds of the step outside its passes."""
        return self.interval - self.passes

    def with_floor(self, floor: float) -> float:
        """Return the milliseconds of the passes where the step takes at least ``floor``."""
        return max(self.passes, floor + self.above)


def with_overheads(profile: Profile, observation: Observation) -> Profile:
    """Return a profile with what the observed steps took besides the passes that it has the times of.

    A drafter's graphs count in full, also where the device waits for the host meanwhile: with vLLM 0.33 on an H200,
    decodes of 8 to 145 requests took 2 to 4 % longer with one graph of 256 requests for draft decodes than with 21, for
    equal passes of the target (Qwen3-30B-A3B). Without intervals the profile is as it was, with a note.
    """
    try:
        times = step_times(observation)
    except CapturePlannerError as error:
        return _noted(profile, f"the time of a step besides its passes is unknown: {error}")
    steps, notes = served_steps(profile, observation)
    if not steps:
        return _noted(profile, *notes)
    slope, apart = _fit_overheads(steps)
    by_kind = {(each.mode, each.query_len): each for each in times.kinds}
    overheads = tuple(
        Overhead(
            mode=mode,
            query_len=query_len,
            milliseconds=round(milliseconds, 5),
            floor=round(floor, 5),
            # Of one step the error is not known, and counts as what the step took.
            error=round(served.error_ms if math.isfinite(served.error_ms) else served.mean_ms, 5),
            steps=served.steps,
        )
        for (mode, query_len), (floor, milliseconds) in sorted(apart.items(), key=str)  # None has no order
        for served in (by_kind[mode, query_len],)
    )
    fitted = replace(
        profile,
        step_milliseconds=min(each.milliseconds for each in overheads),
        step_milliseconds_per_request=round(slope, 7),
        overheads=overheads,
    )
    return _noted(fitted, *notes, *_off(steps))


def served_steps(profile: Profile, observation: Observation) -> tuple[tuple[ServedStep, ...], tuple[str, ...]]:
    """Return the steps of the target whose intervals are known, and sentences on those whose passes have no times.

    :param profile: its overheads do not count.
    """
    # With its overheads, a price would contain what is to be fitted.
    bare = replace(profile, overheads=(), step_milliseconds=0.0, step_milliseconds_per_request=0.0)
    costs = Costs(bare)
    prices = Prices(costs, observation, {role.role: role.mode for role in observation.roles})
    graph_of = {role.role: _graph_of(role, observation) for role in observation.roles}
    lengths, found, missing = decode_lengths(observation), [], dict[str, int]()
    target = next(role for role in observation.roles if role.role is Role.TARGET)
    for count in target.batches:
        if not count.interval or not count.num_tokens:
            continue
        kind = kind_of_step(target, count, lengths)
        entry = None if count.graph is None else target.graphs[count.graph].entry
        batch = count.batch(Role.TARGET)
        if entry is None and kind[1] is None:
            batch = attrs.evolve(batch, query_len=None)  # of a length that is not scheduled: a mixed batch
        try:
            own, *drafts = (
                prices.of(each, entry if each is batch else graph_of[each.role](each), repeats)
                for each, repeats in passes_of(batch, observation)
                if each.role in graph_of
            )
            drafting = costs.least_drafting(*kind)(batch.num_tokens if entry is None else entry.num_tokens)
        except PlanningError as error:
            missing[str(error)] = missing.get(str(error), 0) + count.steps
            continue
        found.append(
            ServedStep(
                kind=kind,
                num_reqs=count.num_reqs,
                weight=count.steps,
                interval=count.interval,
                passes=own + sum(drafts),
                above=sum(drafts) + prices.experts(batch, 1) - drafting,
            )
        )
    notes = (f"{steps} steps have no part in the overheads: {reason}" for reason, steps in sorted(missing.items()))
    return tuple(found), tuple(notes)


def _graph_of(role: ObservedRole, observation: Observation) -> Callable[[Batch], Entry | None]:
    """Return a function to the graph that a batch of a role ran on, or would by the role's graphs; None: eager."""
    ran = {count.batch(role.role): count.graph for count in role.batches}
    captured = (CapturedGraph.of(role.role, graph) for graph in role.graphs)
    rows = GraphRows(captured, decode_families(role.role, observation))

    def graph_of(batch: Batch) -> Entry | None:
        if batch in ran:
            graph = ran[batch]
            return None if graph is None else role.graphs[graph].entry
        return rows.best(batch)

    return graph_of


def _fit_overheads(steps: Sequence[ServedStep]) -> tuple[float, Mapping[Kind, tuple[float, float]]]:
    """Return the milliseconds per request and, by kind, the floor of a step and what it takes besides."""
    kinds = grouped(steps, lambda step: step.kind)
    floors, slope = dict.fromkeys(kinds, 0.0), 0.0
    # Each is fitted with the other as it is; a few turns are enough, and the last one keeps the means.
    for _ in range(FITS):
        slope = _slope(kinds, floors)
        floors = {kind: _floor(alike, slope) for kind, alike in kinds.items()}
    apart = {}
    for kind, alike in kinds.items():
        # A replay may wait for the host, too, but padding has its price: the host's time varies from step to step and
        # from start to start. An eager pass has no size to choose.
        floor = floors[kind] if kind[0] is GraphMode.NONE else 0.0
        rests = [(each.interval - slope * each.num_reqs - each.with_floor(floor), each.weight) for each in alike]
        apart[kind] = floor, max(_mean(rests), 0.0)
    return slope, apart


def _slope(kinds: Mapping[Kind, Sequence[ServedStep]], floors: Mapping[Kind, float]) -> float:
    """Return by how much the rest grows with each request, within the kinds: at least 0, and no more than all of it."""
    above = below = 0.0
    most = math.inf
    for kind, alike in kinds.items():
        rests = [each.interval - each.with_floor(floors[kind]) for each in alike]
        reqs = _mean([(float(each.num_reqs), each.weight) for each in alike])
        rest = _mean([(rest, each.weight) for each, rest in zip(alike, rests, strict=True)])
        for each, more in zip(alike, rests, strict=True):
            above += each.weight * (each.num_reqs - reqs) * (more - rest)
            below += each.weight * (each.num_reqs - reqs) ** 2
        # With a steeper slope the steps of this kind would take less than their passes.
        most = min(most, max(_mean([(each.rest, each.weight) for each in alike]), 0.0) / reqs)
    return min(max(above / below, 0.0), most) if below else 0.0


def _floor(alike: Sequence[ServedStep], slope: float) -> float:
    """Return the floor with which steps of a kind take their mean interval; 0.0 where their passes take all of it."""
    left = sum(each.weight * (each.interval - slope * each.num_reqs - each.passes) for each in alike)
    weight, ascending = 0, sorted(alike, key=lambda each: each.passes - each.above)
    # A floor rises, and holds ever more steps, until what it adds to their passes is what is left.
    for each, following in zip(ascending, [*ascending[1:], None], strict=True):
        weight += each.weight
        start = each.passes - each.above
        room = math.inf if following is None else weight * (following.passes - following.above - start)
        if left <= room:
            return max(start + left / weight, 0.0) if left > 0 else 0.0
        left -= room
    return 0.0


def _mean(weighed: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in weighed) / sum(weight for _, weight in weighed)


def _off(steps: Sequence[ServedStep]) -> Iterator[str]:
    """Say where passes take longer by the profile than the steps that ran them."""
    for kind, alike in grouped(steps, lambda step: step.kind).items():
        mean = _mean([(each.interval, each.weight) for each in alike])
        rest = _mean([(each.rest, each.weight) for each in alike])
        if -rest > TOLERANCE * mean:
            name = family_name(Role.TARGET, *kind, None)
            yield f"steps of {name} took {mean:.3f} ms, {-rest:.3f} ms less than their passes when measured"


def _noted(profile: Profile, *notes: str) -> Profile:
    return replace(profile, notes=(*profile.notes, *notes))
