"""The profile that an observation has in it: what an engine measured of its own graphs and steps."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate

from capture_planner.errors import CapturePlannerError
from capture_planner.measuring.fits import Fit, GraphSample, curves_of, entry_family, fit_graphs
from capture_planner.measuring.overheads import with_overheads
from capture_planner.modes import GraphMode, Pool
from capture_planner.planning.costs import Family
from capture_planner.records.batch_space import decode_families
from capture_planner.records.environment import Device
from capture_planner.records.model import Model
from capture_planner.records.observation import Observation, ObservedGraph, ObservedRole
from capture_planner.records.profile import Profile
from capture_planner.records.text import counted

Timed = tuple[float, int]
"""Milliseconds, and the number of steps that they are the median of."""

EAGER_REPEATS = 5
"""How many dummy steps an eager cost of an observation is the median of."""


def observed_profile(observation: Observation, model: Model, device: Device, command: str = "") -> Profile:
    """Return the figures of an observation as a profile of ``model`` on ``device``, which it has only the names of.

    Raises ``CapturePlannerError`` where it has no times: the engine neither profiled its graphs nor sampled its steps.
    """
    notes: list[str] = []
    if observation.model not in (None, model.name):
        notes.append(f"the engine served {observation.model}; its figures count as those of {model.name}")
    times: dict[Family, dict[int, list[Timed]]] = {}
    for role in observation.roles:
        replays = [graph for graph in role.graphs if graph.milliseconds]
        if role.graphs and not replays:
            notes.append(f"{role.role.value}: its graphs were not profiled; their times are those of sampled steps")
        lengths = {family.query_len for family in decode_families(role.role, observation)}
        for family, tokens, timed in _points(role, lengths):
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
        graphs=fit.graphs,
        pool=Pool.SHARED,  # vLLM's managers and its wrappers of pieces capture into one pool of the process
        base_mib=fit.base_mib,
        base_seconds=fit.base_seconds,
        notes=(*notes, *observation.notes),
    )
    return with_overheads(profile, observation)


def _points(role: ObservedRole, lengths: Collection[int]) -> Iterator[tuple[Family, int, Timed]]:
    """Yield the times of a role by family and padded tokens.

    They are of profiled graphs, else of the steps on them; of eager steps, both. Of sizes that the engine has no graph
    of, they are those of graphs that it captured for a moment.

    :param lengths: query lengths of the role's decodes; eager batches of other lengths are mixed ones, such as the
        dummy batches that vLLM spreads evenly over its requests.
    """

    def eager(query_len: int | None) -> Family:
        return role.role, GraphMode.NONE, query_len if query_len in lengths else None, None

    profiled = any(graph.milliseconds for graph in role.graphs)
    captured = {(graph.entry.mode, graph.entry.query_len, graph.entry.num_tokens) for graph in role.graphs}
    trials = [
        graph
        for graph in role.trials
        if (graph.entry.mode, graph.entry.query_len, graph.entry.num_tokens) not in captured
    ]
    for graph in (*role.graphs, *trials):
        if graph.milliseconds and not graph.entry.active_loras:
            yield entry_family(role.role, graph.entry), graph.entry.num_tokens, (graph.milliseconds, 1)
    for cost in role.eager:
        if cost.milliseconds:
            yield eager(cost.query_len), cost.num_tokens, (cost.milliseconds, EAGER_REPEATS)
    for batch in role.batches:
        if not batch.milliseconds or batch.active_loras or batch.num_tokens < 1:
            continue
        timed = batch.milliseconds, max(1, batch.samples)
        if batch.graph is None:
            yield eager(batch.query_len if batch.past_prompt else None), batch.num_tokens, timed
        elif not profiled:
            entry = role.graphs[batch.graph].entry
            yield entry_family(role.role, entry), entry.num_tokens, timed


def _least_of_larger(sizes: Mapping[int, Timed]) -> dict[int, float]:
    """Return for each size of graphs the least time of it and of all larger ones.

    A batch can run on a larger graph, so it never needs to take longer. And other work of the host makes a replay
    longer, never shorter: sizes that were timed in the same bad moment would else look worse than they are.
    """
    descending = sorted(sizes, reverse=True)
    return dict(zip(descending, accumulate((sizes[tokens][0] for tokens in descending), min), strict=True))


def _non_decreasing(sizes: Mapping[int, Timed]) -> dict[int, float]:
    """Return times that never fall as the size grows.

    Neighbours that fall are averaged, by how often each was timed: a running maximum would let one slow step, as the
    first of a kind that compiles its kernels, count for all larger sizes.
    """
    pools: list[tuple[float, int, list[int]]] = []
    for tokens in sorted(sizes):
        (mean, repeats), members = sizes[tokens], [tokens]
        while pools and pools[-1][0] > mean:
            before, count, others = pools.pop()
            mean = (mean * repeats + before * count) / (repeats + count)
            repeats, members = repeats + count, others + members
        pools.append((mean, repeats, members))
    return {tokens: mean for mean, _, members in pools for tokens in members}


def _weighed(timings: list[Timed]) -> Timed:
    """Return one timing of several: the median over all repeats, as far as medians of parts tell it."""
    medians = [milliseconds for milliseconds, repeats in timings for _ in range(min(repeats, 100))]
    return statistics.median(medians), sum(repeats for _, repeats in timings)


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
    rest = 0.0 if observation.graph_mib is None else observation.graph_mib - sum(sample.mib for sample in samples)
    total = sum(sample.seconds for sample in samples)
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
