"""The draft decodes of one step: as one graph, as a graph of one replayed, and eager.

Only the forwards are timed, on what a real decode staged. What the host does between single steps is
left out of these times, and stands beside them as the ledger has it: single steps are slower where the
host takes longer than the forward before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import attrs
import torch

from capture_planner.bench.record import Chain
from capture_planner.bench.rig import Absence, Kept, Rig, trimmed
from capture_planner.modes import Refresh, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.runtime.execution.capture import without_graphs
from capture_planner.runtime.execution.fields import Extents
from capture_planner.runtime.ledger import Forward
from capture_planner.runtime.runner import Runner

MOST = 8
"""Most requests at which a chain is measured: where forwards are short, launches are what counts."""
HOST_STEPS = 8
"""Steps of a decode that the host's time of a single step is the median of."""


@attrs.frozen
class _Timed:
    """Seconds of all draft decodes of a step, and of the host for one of them."""

    seconds: float
    host: float | None


def chain(rig: Rig, advance: Callable[[str], None]) -> tuple[Chain, ...]:
    """Measure at each number of requests up to ``MOST``. Raises ``Absence`` without a chain."""
    sizes = _sizes(rig.plan)
    wanted = tuple(n for n in rig.sizes if n in sizes)
    if not wanted:
        measured = ", ".join(map(str, rig.sizes))
        raise Absence(
            f"a chain is measured at up to {MOST} requests, where two or more draft decodes are scheduled, and "
            f"--requests is {measured}; name one of {', '.join(map(str, sizes))}"
        )
    single = _measured(rig, with_single_steps(rig.plan), wanted, advance)
    fused_plan = with_chains(rig.plan, rig.registry)
    fused = {} if fused_plan is None else _measured(rig, fused_plan, wanted, advance)
    eager = _measured(rig, without_graphs(rig.plan), wanted, advance)
    assert rig.plan.speculative is not None, "there are draft decodes"
    return tuple(
        Chain(
            num_reqs=size,
            steps=rig.plan.speculative.draft_tokens(size) - 1,
            fused=fused[size].seconds if size in fused else None,
            single=single[size].seconds,
            eager=eager[size].seconds,
            host=single[size].host,
        )
        for size in wanted
        if size in single and size in eager
    )


def _sizes(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of requests up to ``MOST`` after which two or more draft decodes follow."""
    if plan.speculative is None:
        raise Absence("the plan has no drafter")
    most = min(MOST, plan.limits.max_num_reqs)
    found = tuple(n for n in range(1, most + 1) if plan.speculative.draft_tokens(n) > 2)
    if not found:
        raise Absence("a chain has two or more draft decodes, so it needs a K of at least 3")
    if not plan.role(Role.DRAFT_DECODE).entries:
        raise Absence("the plan has no graph of a draft decode")
    return found


def with_single_steps(plan: Plan) -> Plan:
    """Return the plan with a graph of one draft decode in place of each chain."""
    role = plan.role(Role.DRAFT_DECODE)
    return _with(plan, (attrs.evolve(entry, draft_steps=None) for entry in role.entries))


def with_chains(plan: Plan, registry: Registry) -> Plan | None:
    """Return the plan with its draft decodes as chains, for each length that is scheduled.

    None where a backend needs the host between draft steps: then no graph can hold a chain.
    """
    role = plan.role(Role.DRAFT_DECODE)
    for group in role.groups:
        attention = Attention.of(plan, Role.DRAFT_DECODE, layers=group.layers, window=group.window)
        refresh = registry[group.backend].refresh(Role.DRAFT_DECODE, attention, plan.environment)
        if refresh is Refresh.HOST:
            return None
    assert plan.speculative is not None, "a draft decode has a drafter"
    lengths = {k - 1 for _, _, k in plan.speculative.tiers(plan.limits.max_num_reqs) if k > 2}
    return _with(
        plan, (attrs.evolve(entry, draft_steps=length) for entry in role.entries for length in lengths)
    )


def _with(plan: Plan, entries: object) -> Plan:
    kept: tuple[Entry, ...] = tuple(dict.fromkeys(entries))  # type: ignore[call-overload]
    return replace(
        plan,
        roles=tuple(
            replace(role, entries=kept) if role.role is Role.DRAFT_DECODE else role for role in plan.roles
        ),
    )


def _measured(
    rig: Rig, plan: Plan, sizes: tuple[int, ...], advance: Callable[[str], None]
) -> dict[int, _Timed]:
    """Return the median times of a chain at each number of requests."""
    found = {}
    with rig.runner(trimmed(plan, sizes, (Role.DRAFT_DECODE,))) as runner:
        runner.capture()
        for size in sizes:
            with rig.trying("chain"):
                decoding = rig.decoding(runner, size, HOST_STEPS)
                try:
                    host = _host(rig, decoding.forwards(HOST_STEPS), size)
                    found[size] = _Timed(_median(rig, runner, _once(runner, plan, size)), host)
                finally:
                    decoding.end()
            advance(counted(size, "request"))
    return found


def _host(rig: Rig, forwards: Sequence[Forward], size: int) -> float | None:
    """Return the host's median seconds of one draft decode: preparation and guards, on a GPU the launch too.

    On a CPU a replay is the forward itself, so that it is left out. None where no graph was replayed.
    """
    found = [
        (done.seconds if rig.device.type == "cuda" else done.host_seconds) / done.repeats
        for done in forwards
        if done.role is Role.DRAFT_DECODE and done.num_reqs == size and done.entry is not None
    ]
    return statistics.median(found) if found else None


def _median(rig: Rig, runner: Runner, once: Callable[[], object]) -> float:
    kept = Kept(runner)

    def many() -> None:
        for _ in range(rig.effort.steps):
            once()

    found = []
    with torch.no_grad():
        for _ in range(rig.effort.windows + 1):
            found.append(rig.clock.time(many) / rig.effort.steps)
            kept.restore()
    return statistics.median(found[1:])


def _once(runner: Runner, plan: Plan, size: int) -> Callable[[], object]:
    """Return what runs the draft decodes of one step, on what is staged."""
    role = runner.parts.roles[Role.DRAFT_DECODE]
    assert plan.speculative is not None, "a draft decode has a drafter"
    steps = plan.speculative.draft_tokens(size) - 1
    answer = role.dispatcher.dispatch(Batch.decode(Role.DRAFT_DECODE, size, 1))
    entry = answer.entry
    if entry is None:
        extents = Extents(tokens=size, reqs=size, pages=role.fields.capacity.pages)

        def eager() -> None:
            for _ in range(steps):
                role.again(answer, None, extents, perf_counter())

        return eager
    graph = role.graphs[entry]
    if entry.draft_steps is not None:
        return graph.replay

    def replays() -> None:
        for _ in range(steps):
            graph.replay()

    return replays
