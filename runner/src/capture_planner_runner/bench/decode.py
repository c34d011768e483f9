"""Decode steps of the runner against their graphs, and the draft decodes of one step, each also without graphs.

Steps are timed in windows, because the runner may run ahead of its tokens when one step returns: a window begins in the
middle of serving and holds whole periods. Windows of bare replays alternate with them, so that both see the same
lengths and the same state of the machine.

Of draft decodes only the forwards are timed, on the staged values of a real decode: as one graph, as single-step
graphs, and eager. The host's time between single steps is reported separately, from the ledger: single steps are slower
where the host takes longer than the forward before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner.bench.record import ChainTiming, Decode, GraphReplays
from capture_planner_runner.bench.rig import Absence, Decoding, Rig, trimmed
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.ledger.rows import Forward
from capture_planner_runner.options import needs_host
from capture_planner_runner.runner import Runner

WARM = 3
"""Steps before each window, after which the runner is as far ahead as before the pause."""


def decode(rig: Rig, advance: Callable[[str], None]) -> tuple[Decode, ...]:
    """Measure at each number of requests whose step is served by graphs alone."""
    count = rig.effort.windows
    results: dict[int, Decode] = {}
    with rig.runner(trimmed(rig.plan, rig.sizes)) as runner:
        runner.capture()
        for size in rig.sizes:
            # Around each size, so that the others are measured if one fails.
            with rig.trying("decode"):
                results[size] = row(rig, runner, size, count, graphs=True)
                advance(counted(size, "request"))
    with rig.runner(without_graphs(rig.plan)) as runner:
        for size, result in results.items():
            with rig.trying("decode"):
                # An eager step takes several times as long, and fewer windows tell as much.
                eager = row(rig, runner, size, max(2, count // 2), graphs=False)
                results[size] = attrs.evolve(result, eager=eager.step)
                advance(f"{counted(size, 'request')}, eager")
    return tuple(results.values())


def row(rig: Rig, runner: Runner, size: int, count: int, *, graphs: bool) -> Decode:
    """Measure up to ``count`` windows, with one of bare replays after each if there are graphs.

    Raises ``Absence`` if not even one window fits.
    """
    effort = rig.effort
    steps: list[float] = []
    replays: list[float] = []
    with rig.decoding(runner, size, effort.windows * (effort.steps + WARM)) as decoding:
        replayed = decoding.replayed() if graphs else ()
        for _ in range(count):
            seconds = window(rig, decoding)
            # A request has ended: steps from here on are of another batch.
            if seconds is None:
                break
            steps.append(seconds)
            if graphs:
                replays.append(bare_replay(rig, runner, replayed))
        host = decoding.host_seconds(len(steps) * effort.steps)
    if not steps:
        raise Absence(
            f"a window of {counted(effort.steps, 'step')} is longer than a decode of {counted(size, 'request')}: the "
            f"model is at most {rig.plan.model.max_model_len} tokens long; try --quick, whose windows are shorter"
        )
    return Decode(
        num_reqs=size,
        graphs=replayed,
        windows=len(steps),
        steps=effort.steps,
        step=statistics.median(steps),
        bare=statistics.median(replays) if graphs else 0.0,
        eager=None,
        host=host,
    )


def window(rig: Rig, decoding: Decoding) -> float | None:
    """Return the seconds of a step, from a window of them; None if a request ended in it."""
    if not decoding.step(WARM):
        return None
    complete: list[bool] = []
    seconds = rig.clock.time(lambda: complete.append(decoding.step(rig.effort.steps)))
    return seconds / rig.effort.steps if complete[0] else None


def bare_replay(rig: Rig, runner: Runner, graphs: tuple[GraphReplays, ...]) -> float:
    """Return the seconds of one replay of all ``graphs``, on the staged values."""
    sequence = [runner.roles[each.role].graphs[each.entry] for each in graphs for _ in range(each.times)]

    def replays() -> None:
        for graph in sequence:
            graph.replay()

    return rig.repeated(runner, replays)


MOST = 8
"""Most requests of a measured chain: launches matter where forwards are short."""
HOST_STEPS = 8
"""Decode steps whose median is the host's time of a single step."""


def chain(rig: Rig, advance: Callable[[str], None]) -> tuple[ChainTiming, ...]:
    """Measure at each number of requests up to ``MOST``. Raises ``Absence`` without a chain."""
    possible = _sizes(rig.plan)
    sizes = tuple(size for size in rig.sizes if size in possible)
    if not sizes:
        captured_sizes = ", ".join(map(str, rig.sizes))
        raise Absence(
            f"a chain is measured at up to {MOST} requests, where two or more draft decodes are scheduled, and "
            f"--requests is {captured_sizes}; name one of {', '.join(map(str, possible))}"
        )
    single = _timings(rig, with_single_steps(rig.plan), sizes, advance)
    fused_plan = with_chains(rig.plan, rig.registry)
    fused = {} if fused_plan is None else _timings(rig, fused_plan, sizes, advance)
    eager = _timings(rig, without_graphs(rig.plan), sizes, advance)
    assert rig.plan.speculative is not None, "there are draft decodes"
    return tuple(
        ChainTiming(
            num_reqs=size,
            steps=rig.plan.speculative.draft_tokens(size) - 1,
            fused=fused[size][0] if size in fused else None,
            single=single[size][0],
            eager=eager[size][0],
            host=single[size][1],
        )
        for size in sizes
        if size in single and size in eager
    )


def _sizes(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of requests up to ``MOST`` after which two or more draft decodes follow."""
    if plan.speculative is None:
        raise Absence("the plan has no drafter")
    most = min(MOST, plan.limits.max_num_reqs)
    # K drafts are a draft prefill and K - 1 draft decodes.
    sizes = tuple(n for n in range(1, most + 1) if plan.speculative.draft_tokens(n) > 2)
    if not sizes:
        raise Absence("a chain has two or more draft decodes, so it needs a K of at least 3")
    if not plan.role(Role.DRAFT_DECODE).entries:
        raise Absence("the plan has no graph of a draft decode")
    return sizes


def with_single_steps(plan: Plan) -> Plan:
    """Return the plan with a graph of one draft decode in place of each chain."""
    role = plan.role(Role.DRAFT_DECODE)
    return _with(plan, (attrs.evolve(entry, draft_steps=None) for entry in role.entries))


def with_chains(plan: Plan, registry: Registry) -> Plan | None:
    """Return the plan with its draft decodes as chains, one for each scheduled length.

    None if a backend needs the host between draft steps, so that no graph can hold a chain.
    """
    role = plan.role(Role.DRAFT_DECODE)
    if needs_host(plan, role, registry):
        return None
    assert plan.speculative is not None, "a draft decode has a drafter"
    # A single draft decode has nothing to be fused with.
    lengths = {k - 1 for _, _, k in plan.speculative.tiers(plan.limits.max_num_reqs) if k > 2}
    return _with(plan, (attrs.evolve(entry, draft_steps=length) for entry in role.entries for length in lengths))


def _with(plan: Plan, entries: Iterable[Entry]) -> Plan:
    """Return the plan with these draft decodes, each once."""
    # Chains of several lengths become the same single step.
    unique = tuple(dict.fromkeys(entries))
    return replace(
        plan,
        roles=tuple(replace(role, entries=unique) if role.role is Role.DRAFT_DECODE else role for role in plan.roles),
    )


def _timings(
    rig: Rig, plan: Plan, sizes: tuple[int, ...], advance: Callable[[str], None]
) -> dict[int, tuple[float, float | None]]:
    """Return the median seconds of a chain, and of the host for a single step, at each number of requests."""
    results = {}
    with rig.runner(trimmed(plan, sizes, (Role.DRAFT_DECODE,))) as runner:
        runner.capture()
        for size in sizes:
            with rig.trying("chain"), rig.decoding(runner, size, HOST_STEPS) as decoding:
                host = host_seconds(rig, decoding.forwards(HOST_STEPS), size)
                once = _once(runner, plan, size)
                # The first one warms up.
                seconds = [rig.repeated(runner, once) for _ in range(rig.effort.windows + 1)][1:]
                results[size] = statistics.median(seconds), host
            advance(counted(size, "request"))
    return results


def host_seconds(rig: Rig, forwards: Sequence[Forward], size: int) -> float | None:
    """Return the host's median seconds of one draft decode: preparation, guards and, on a GPU, the launch.

    On a CPU the replay is the forward itself, and does not count. None if no graph was replayed.
    """
    seconds = [
        (forward.seconds if rig.device.type == "cuda" else forward.host_seconds) / forward.repeats
        for forward in forwards
        if forward.role is Role.DRAFT_DECODE and forward.num_reqs == size and forward.entry is not None
    ]
    return statistics.median(seconds) if seconds else None


def _once(runner: Runner, plan: Plan, size: int) -> Callable[[], object]:
    """Return a function that runs the draft decodes of one step, on the staged values."""
    role = runner.roles[Role.DRAFT_DECODE]
    assert plan.speculative is not None, "a draft decode has a drafter"
    steps = plan.speculative.draft_tokens(size) - 1
    batch = Batch.decode(Role.DRAFT_DECODE, size, 1)
    entry = runner.dispatcher.dispatch(batch).entry
    run: Callable[[], object]
    if entry is None:
        shape = Entry(mode=GraphMode.FULL, num_tokens=size, num_reqs=size, query_len=1)
        run = partial(role.execute, role.step(batch, None, role.warm_up_inputs(shape)), perf_counter())
    else:
        # One replay of a fused chain runs all of its steps.
        run, steps = role.graphs[entry].replay, steps if entry.draft_steps is None else 1

    def single_steps() -> None:
        for _ in range(steps):
            run()

    return single_steps
