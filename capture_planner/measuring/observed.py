"""The profile that an observation has in it: what an engine measured of its own graphs and steps."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby

from capture_planner.errors import CapturePlannerError, PlanningError
from capture_planner.measuring.curves import curves_of
from capture_planner.measuring.fits import Fit, GraphSample, Line, entry_family, fit_graphs
from capture_planner.measuring.staircase import Timing
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.judging import Prices
from capture_planner.records._base import replace
from capture_planner.records.batch_space import decode_families
from capture_planner.records.environment import Device
from capture_planner.records.model import Model
from capture_planner.records.observation import Observation, ObservedRole
from capture_planner.records.profile import Profile
from capture_planner.records.text import counted

Point = tuple[Family, int, float, int]
"""Family, padded tokens, milliseconds, and how many steps they are the median of."""

EAGER_REPEATS = 5
"""How many dummy steps an eager cost of an observation is the median of."""


def observed_profile(observation: Observation, model: Model, device: Device, command: str = "") -> Profile:
    """Return the figures of an observation as a profile of ``model`` on ``device``, which it has only the names of.

    Raises ``CapturePlannerError`` where it has no times: the engine neither profiled its graphs nor sampled its steps.
    """
    notes: list[str] = []
    if observation.model not in (None, model.name):
        notes.append(f"the engine served {observation.model}; its figures count as those of {model.name}")
    times: dict[Family, dict[int, list[Timing]]] = {}
    for role in observation.roles:
        replays = [graph for graph in role.graphs if graph.milliseconds]
        if role.graphs and not replays:
            notes.append(f"{role.role.value}: its graphs were not profiled; their times are those of sampled steps")
        lengths = {family.query_len for family in decode_families(role.role, observation)}
        for family, tokens, milliseconds, repeats in _points(role, lengths):
            times.setdefault(family, {}).setdefault(tokens, []).append(Timing(milliseconds, 0.0, repeats))
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
                family: _non_decreasing({tokens: _weighed(all_) for tokens, all_ in sizes.items()})
                for family, sizes in times.items()
            }
        ),
        graphs=fit.graphs,
        pool=Pool.PER_ROLE,  # the first graph of each role is seen to take memory of its own
        base_mib=fit.base_mib,
        base_seconds=fit.base_seconds,
        notes=(*notes, *observation.notes),
    )
    try:
        apart = Line.robust([*_apart(observation, Costs(profile))])
    except PlanningError as error:
        return replace(profile, notes=(*profile.notes, f"the time of a step apart from its passes is unknown: {error}"))
    return replace(
        profile,
        step_milliseconds=round(apart.intercept, 5),
        step_milliseconds_per_request=round(apart.slope, 6),
        drafts_overlap=observation.speculative is not None,
    )


def _apart(observation: Observation, costs: Costs) -> Iterator[tuple[float, float]]:
    """Yield the requests of each decode of the target whose intervals were taken, and what is not the target's pass.

    An engine waits for the tokens of the target, and the device for the engine: the drafter runs in between.
    """
    prices = Prices(costs, observation, {role.role: role.mode for role in observation.roles})
    target = next((role for role in observation.roles if role.role is Role.TARGET), None)
    if target is None:
        return
    for count in target.batches:
        if not count.interval or not count.past_prompt or count.query_len is None or count.active_loras:
            continue
        batch = count.batch(Role.TARGET)
        fitting = (
            graph.entry
            for graph in target.graphs
            if graph.entry.query_len in (None, batch.uniform_query_len) and graph.entry.num_tokens >= batch.num_tokens
        )
        own_first = min(fitting, key=lambda entry: (entry.query_len is None, entry.num_tokens), default=None)
        yield float(count.num_reqs), count.interval - prices.of(batch, own_first, 1)


def _points(role: ObservedRole, lengths: Collection[int]) -> Iterator[Point]:
    """Yield the times of a role: of profiled graphs, else of the steps on them; of eager steps, both.

    :param lengths: query lengths of the role's decodes; eager batches of other lengths are mixed ones, such as the
        dummy batches that vLLM spreads evenly over its requests.
    """
    profiled = any(graph.milliseconds for graph in role.graphs)
    for graph in role.graphs:
        if graph.milliseconds and not graph.entry.active_loras:
            yield entry_family(role.role, graph.entry), graph.entry.num_tokens, graph.milliseconds, 1
    for cost in role.eager:
        if cost.milliseconds:
            query_len = cost.query_len if cost.query_len in lengths else None
            yield (role.role, GraphMode.NONE, query_len, None), cost.num_tokens, cost.milliseconds, EAGER_REPEATS
    for batch in role.batches:
        if not batch.milliseconds or batch.active_loras or batch.num_tokens < 1:
            continue
        if batch.graph is None:
            query_len = batch.query_len if batch.past_prompt and batch.query_len in lengths else None
            family = (role.role, GraphMode.NONE, query_len, None)
            yield family, batch.num_tokens, batch.milliseconds, max(1, batch.samples)
        elif not profiled:
            entry = role.graphs[batch.graph].entry
            yield entry_family(role.role, entry), entry.num_tokens, batch.milliseconds, max(1, batch.samples)


def _non_decreasing(sizes: Mapping[int, Timing]) -> dict[int, Timing]:
    """Return times that never fall as the size grows.

    Neighbours that fall are averaged, by how often each was timed: a running maximum would let one slow step, as the
    first of a kind that compiles its kernels, count for all larger sizes.
    """
    pools: list[tuple[float, int, list[int]]] = []
    for tokens in sorted(sizes):
        mean, repeats, members = sizes[tokens].milliseconds, sizes[tokens].repeats, [tokens]
        while pools and pools[-1][0] > mean:
            before, count, others = pools.pop()
            mean = (mean * repeats + before * count) / (repeats + count)
            repeats, members = repeats + count, others + members
        pools.append((mean, repeats, members))
    return {
        tokens: Timing(mean, sizes[tokens].spread, sizes[tokens].repeats)
        for mean, _, members in pools
        for tokens in members
    }


def _weighed(timings: list[Timing]) -> Timing:
    """Return one timing of several: the median over all repeats, as far as medians of parts tell it."""
    repeats = [timing.milliseconds for timing in timings for _ in range(min(timing.repeats, 100))]
    return Timing(statistics.median(repeats), 0.0, sum(timing.repeats for timing in timings))


def _fit(observation: Observation, notes: list[str]) -> Fit:
    """Fit the costs of the graphs whose capture was measured; add to ``notes`` what is not known."""
    samples = [
        GraphSample(
            family=entry_family(role.role, graph.entry),
            tokens=graph.entry.num_tokens,
            seconds=graph.seconds,
            mib=graph.mib,
        )
        for role in observation.roles
        for graph in role.graphs
        if graph.seconds is not None and graph.mib is not None and not graph.entry.active_loras
    ]
    if not samples:
        notes.append("what graphs cost in memory and time was not measured")
        return Fit(graphs=(), base_mib=0.0, base_seconds=0.0)
    notes.append(
        "memory is what the device reported around each capture, allocator and driver together; what the largest "
        "graph of a role takes is taken to be in proportion to its tokens"
    )
    captures = [list(each) for _, each in groupby(samples, key=lambda sample: sample.family[0])]
    fit = fit_graphs(captures)
    rest = 0.0 if observation.graph_mib is None else observation.graph_mib - sum(sample.mib for sample in samples)
    total = sum(sample.seconds for sample in samples)
    seconds = 0.0 if observation.capture_seconds is None else observation.capture_seconds - total
    return Fit(
        graphs=fit.graphs,
        base_mib=round(fit.base_mib + max(0.0, rest) / len(captures), 6),
        base_seconds=round(fit.base_seconds + max(0.0, seconds), 6),
    )
