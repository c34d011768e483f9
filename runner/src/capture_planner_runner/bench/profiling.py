"""Measure the profile of a deployment: what passes and graphs of each size cost on this machine.

Each size needs a graph, captured for it. A few at a time are captured into the pool of a runner of their own, which
is released with them, so that memory stays bounded.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from time import monotonic, perf_counter

import attrs
import torch

import capture_planner
from capture_planner.errors import RunError
from capture_planner.measuring.fits import GraphSample, curves_of, entry_family, fit_graphs
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Family
from capture_planner.plugins.profiler import ProfileSettings, Progress
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import decode_families, query_len_of
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.profile import Profile, family_name
from capture_planner.records.text import counted
from capture_planner_runner import host
from capture_planner_runner.bench.decode import bare_replay, window
from capture_planner_runner.bench.rig import QUICK, ROOM, Effort, Rig, inputs_with_context
from capture_planner_runner.bench.staircase import (
    Size,
    SizeRange,
    Timing,
    in_tokens,
    largest_spread,
    open_gaps,
    rounds,
    steady,
    time_notes,
)
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.compilation.forwards import compiled_seconds
from capture_planner_runner.launch.cache_memory import HOST_MEMORY
from capture_planner_runner.launch.request import refuse_plan
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.runner import Runner

WINDOW = 0.005
"""Seconds of one repeat: as many passes in a row as fill it."""
MOST_PASSES = 20


def ranges_of(plan: Plan, *, named: bool) -> tuple[SizeRange[Family], ...]:
    """Return the sizes that are measured: of each family of graphs in the plan, and of eager passes.

    Sizes are requests of decodes and tokens of mixed batches. Decodes go up to the limits; mixed batches up to the
    largest size of the plan, and eagerly up to the limits.

    :param named: whether the sizes of the plan's graphs are measured in any case.
    """
    return tuple(
        each for role in plan.roles for each in (*_graph_ranges(plan, role, named=named), *_eager_ranges(plan, role))
    )


def _graph_ranges(plan: Plan, role: RolePlan, *, named: bool) -> Iterable[SizeRange[Family]]:
    capped = any(waiver.reason is Reason.BACKEND_CAP for waiver in role.waivers)
    by_family: dict[Family, list[int]] = {}
    for entry in role.entries:
        family = (role.role, entry.mode, entry.query_len, entry.draft_steps)
        by_family.setdefault(family, []).append(entry.num_tokens // (entry.query_len or 1))
    for family, sizes in by_family.items():
        last = max(sizes)
        # Where a backend captures fewer requests than the limits admit, no graph is above its cap.
        if family[2] is not None and not capped:
            last = max(last, _most_requests(plan, role.role, family[2], family[3]))
        yield SizeRange(key=family, last=last, named=tuple(sorted(set(sizes))) if named else ())


def _eager_ranges(plan: Plan, role: RolePlan) -> Iterable[SizeRange[Family]]:
    """Yield eager passes at a few sizes each: powers of 8, the ceiling of the graphs, and above it."""
    most = plan.limits.max_num_tokens
    mixed = [entry.num_tokens for entry in role.entries if entry.query_len is None]
    ceiling = max(mixed, default=0)
    for query_len in sorted({family.query_len for family in decode_families(role.role, plan)}):
        last = _most_requests(plan, role.role, query_len, None)
        yield _few((role.role, GraphMode.NONE, query_len, None), last, ())
    if role.role is not Role.DRAFT_DECODE:
        above = [ceiling, ceiling * 3 // 2, *(ceiling << shift for shift in range(1, 12))] if ceiling else []
        yield _few((role.role, GraphMode.NONE, None, None), most, above)


def _few(family: Family, last: int, named: Iterable[int]) -> SizeRange[Family]:
    sizes = {size for size in (*(8**power for power in range(7)), *named) if size <= last}
    return SizeRange(key=family, last=last, named=tuple(sorted(sizes)), search=False)


def _most_requests(plan: Plan, role: Role, query_len: int, draft_steps: int | None) -> int:
    """Return the most requests that decode at a query length, as the limits and the schedule admit."""
    return max(
        family.requests.intervals[-1][1]
        for family in decode_families(role, plan)
        if family.query_len == query_len and draft_steps in (None, family.draft_steps)
    )


def entry_of(family: Family, size: int, max_num_reqs: int) -> Entry:
    """Return the graph of a family and a size."""
    _, mode, query_len, draft_steps = family
    # Each request of a mixed FULL graph has a token at least, and there are no more than the limit.
    reqs = size if query_len else None if mode is GraphMode.PIECEWISE else min(size, max_num_reqs)
    tokens = size * (query_len or 1)
    return Entry(mode=mode, num_tokens=tokens, num_reqs=reqs, query_len=query_len, draft_steps=draft_steps)


def plan_with(plan: Plan, registry: Registry, graphs: Iterable[tuple[Role, Entry]]) -> Plan:
    """Return the plan with these graphs alone; its backends are asked anew what workspaces they need."""
    # Two sizes may be served by the same graph.
    listed = list(dict.fromkeys(graphs))
    roles = []
    for before, after in zip(plan.roles, without_graphs(plan).roles, strict=True):
        entries = tuple(entry for role, entry in listed if role is before.role)
        groups = []
        for group in before.groups:
            attention = Attention.of(plan, before.role, layers=group.layers, window=group.window)
            workspace = registry[group.backend].workspace(
                before.role, attention, plan.environment, entries, plan.limits
            )
            groups.append(replace(group, workspace=workspace))
        # A role without graphs here is eager, as in a plan without any.
        changed = replace(before, entries=entries) if entries else after
        roles.append(replace(changed, groups=tuple(groups), waivers=after.waivers))
    return replace(plan, roles=tuple(roles))


def passes(rig: Rig, runner: Runner, family: Family, size: int, context: int) -> Callable[[], float]:
    """Return what measures passes of one size in a row, in milliseconds of one: a graph's, or eager ones.

    The graph was captured. What is timed is what the runner does after preparation: guards, the replay with whatever
    runs between and behind its pieces, or the eager forward.
    """
    role, (_, mode, query_len, _) = runner.roles[family[0]], family
    shape = entry_of(family, size, rig.plan.limits.max_num_reqs)
    if mode is GraphMode.NONE:
        # For the extents of its inputs alone: the pass runs eager.
        shape = attrs.evolve(shape, mode=GraphMode.FULL)
    inputs = inputs_with_context(rig, role, shape, context, ROOM)
    batch = Batch(
        role=role.role,
        num_reqs=inputs.num_reqs,
        num_tokens=inputs.num_tokens,
        query_len=query_len,
        past_prompt=query_len is not None,
    )
    step = role.step(batch, None if mode is GraphMode.NONE else shape, inputs)
    role.stage_inputs(step)
    role.prepare_backends(step)

    def once() -> None:
        role.execute(step, perf_counter())

    single = attrs.evolve(rig, effort=attrs.evolve(rig.effort, steps=1))
    single.repeated(runner, once)  # warms up
    count = max(1, min(MOST_PASSES, int(WINDOW / max(single.repeated(runner, once), 1e-6))))
    several = attrs.evolve(rig, effort=attrs.evolve(rig.effort, steps=count))
    return lambda: several.repeated(runner, once) * 1e3


GROUP = 12
"""Graphs that are captured together, and released."""
CACHE_SHARE = 0.5
"""Largest share of a GPU's free memory for the KV cache, if its pages are not stated."""
MIB = 1 << 20


@attrs.frozen(kw_only=True, eq=False)
class Findings:
    """What was measured so far; complete at every moment, so that an interruption loses nothing."""

    times: dict[Family, dict[int, Timing]]
    milliseconds: dict[Family, dict[int, float]]
    """The medians of ``times``."""
    captures: list[list[tuple[GraphCapture, float]]] = attrs.Factory(list)
    """Graphs that were captured together, in order, each with the seconds that compiling its kernels took."""
    steps: list[float] = attrs.Factory(list)
    """Seconds of steps apart from their passes."""
    notes: list[str] = attrs.Factory(list)

    @classmethod
    def none(cls, families: Sequence[Family]) -> Findings:
        return cls(times={family: {} for family in families}, milliseconds={family: {} for family in families})

    def add(self, family: Family, size: int, timing: Timing) -> None:
        """Keep a timing; of a size that was measured before, the lower one."""
        before = self.times[family].get(size)
        if before is None or timing.milliseconds < before.milliseconds:
            self.times[family][size] = timing
            self.milliseconds[family][size] = timing.milliseconds


def profile(plan: Plan, registry: Registry, settings: ProfileSettings, progress: Progress) -> Profile:
    """Measure a plan's families of graphs at sizes of its own and of others, and eager passes.

    An interruption ends in a profile of what was measured before it; its notes say so. Raises ``RunError`` or
    ``BackendError`` where the plan cannot be executed here, and ``RunError`` where nothing was measured.
    """
    rig = _rig(plan, registry, settings)
    context = min(settings.context, max(0, plan.model.max_model_len - _longest_query(plan) - ROOM))
    ranges = ranges_of(plan, named=settings.entries)
    findings = Findings.none([each.key for each in ranges])
    if context < settings.context:
        findings.notes.append(f"requests have {context} tokens in the KV cache, as the model has no room for more")
    try:
        with progress("prepare", 1) as advance, rig.runner(plan):
            advance(rig.model.name)  # its layers are compiled, once for all that follows
        with progress("profile", max(1, round(settings.seconds))) as advance:
            _measure(rig, ranges, findings, context, _Deadline(settings.seconds, advance))
    except KeyboardInterrupt:
        findings.notes.append("interrupted: what was measured before is here")
    if not any(findings.times.values()):
        reasons = "; ".join([absent.says for absent in rig.absent] or findings.notes)
        raise RunError(f"no size was measured: {reasons or 'the time was over before the first'}; raise --seconds")
    return _profile_of(rig, settings, findings, context)


class _Deadline:
    """The time that is left, shown second by second."""

    def __init__(self, seconds: float, advance: Callable[[str], None]) -> None:
        self._started, self._seconds, self._advance, self._shown = monotonic(), seconds, advance, 0

    def is_over(self) -> bool:
        return monotonic() - self._started >= self._seconds

    def show(self, text: str) -> None:
        for _ in range(self._shown, min(int(monotonic() - self._started), round(self._seconds))):
            self._shown += 1
            self._advance(text)


def _rig(plan: Plan, registry: Registry, settings: ProfileSettings) -> Rig:
    """Load the model, and return what measures it; what can be refused is, before."""
    refuse_plan(plan, any_environment=settings.any_environment, any_plan=settings.any_plan)
    if not plan.num_graphs:
        raise RunError("the plan captures no graph, so there is nothing to profile; choose a mode with graphs")
    if any(entry.max_query_len is not None for role in plan.roles for entry in role.entries):
        raise RunError(
            "a profile has times of graphs by one query length, and the plan has graphs of varying decodes; profile it "
            "without speculative.varying_decodes"
        )
    is_gpu = host.device_of(plan.environment).type == "cuda"
    page_size = settings.page_size or (64 if is_gpu else 16)

    def pages(page: int, free: float) -> int:
        """Return pages for every request at the context, within a share of the memory."""
        length = min(plan.model.max_model_len, settings.context + _longest_query(plan) + ROOM)
        room = CACHE_SHARE * free if is_gpu else HOST_MEMORY
        return settings.pages or max(8, min(plan.limits.max_num_reqs * -(-length // page_size), int(room) // page))

    return Rig.of(
        plan,
        registry,
        model=settings.model,
        seed=settings.seed,
        page_size=page_size,
        pages=pages,
        effort=Effort(windows=3, steps=10) if is_gpu else QUICK,
        sizes=tuple(sorted({1, min(8, plan.limits.max_num_reqs), min(64, plan.limits.max_num_reqs)})),
    )


def _longest_query(plan: Plan) -> int:
    return max(family.query_len for role in plan.roles for family in decode_families(role.role, plan) or ())


def _measure(
    rig: Rig, ranges: Sequence[SizeRange[Family]], findings: Findings, context: int, deadline: _Deadline
) -> None:
    """Measure sizes in rounds until nothing is left to find, or the time is over."""
    for number, batch in enumerate(rounds(ranges, findings.milliseconds, GROUP)):
        if deadline.is_over():
            findings.notes.append("the time was over before every step was found")
            return
        _round(rig, batch, findings, context, deadline)
        if number == 0:
            # After a round, which loaded the kernels, and before others, so that every profile has it.
            with rig.trying("step"):
                findings.steps.extend(_steps(rig))


def _round(rig: Rig, batch: Sequence[Size[Family]], findings: Findings, context: int, deadline: _Deadline) -> None:
    """Measure the sizes of a round together; where that breaks, each by itself, so that one costs no other."""
    # `trying` records an error and goes on, so only the end of its block shows success.
    done = False
    with rig.trying(f"{counted(len(batch), 'size')} together"):
        _together(rig, batch, findings, context, deadline)
        done = True
    if not done and len(batch) > 1:
        for size in batch:
            _round(rig, [size], findings, context, deadline)


def _together(rig: Rig, batch: Sequence[Size[Family]], findings: Findings, context: int, deadline: _Deadline) -> None:
    """Capture the graphs of some sizes into one pool, and time them and their eager passes."""
    most = rig.plan.limits.max_num_reqs
    graphs = [(family[0], entry_of(family, size, most)) for family, size in batch if family[1] is not GraphMode.NONE]
    with rig.runner(plan_with(rig.plan, rig.registry, graphs)) as runner:
        shares = list[float]()
        with compiled_seconds() as seconds:

            def captured(graph: GraphCapture) -> None:
                deadline.show(f"capture {graph.role.value} {graph.entry}")
                # What was compiled since the last capture was compiled for this graph.
                shares.append(sum(seconds))
                seconds.clear()

            runner.capture(progress=captured)
        findings.captures.append([*zip(runner.session.captured, shares, strict=True)])
        lost = {(graph.role, graph.entry) for graph in runner.session.captured if graph.waiver is not None}
        for family, size in batch:
            name = f"{family_name(*family)} of {size}"
            if (family[0], entry_of(family, size, most)) in lost:
                findings.notes.append(f"{name}: its graph did not fit into memory")
                continue
            with rig.trying(name):
                findings.add(family, size, steady(passes(rig, runner, family, size, context), deadline.is_over))
            deadline.show(name)


def _steps(rig: Rig) -> Iterator[float]:
    """Yield the seconds of decode steps apart from their passes, at each of the rig's numbers of requests."""
    roles = [role.role for role in rig.plan.roles]
    graphs = [(role, entry) for role in roles for size in rig.sizes for entry in _serving(rig, role, size)]
    with rig.runner(plan_with(rig.plan, rig.registry, graphs)) as runner:
        runner.capture()
        for size in rig.sizes:
            with rig.trying(f"step of {size}"), rig.decoding(runner, size, 2 * (rig.effort.steps + 3)) as decoding:
                replayed = decoding.replayed()
                seconds = window(rig, decoding)
                if seconds is not None:
                    # Noise can make the graphs alone take longer than the step.
                    yield max(0.0, seconds - bare_replay(rig, runner, replayed))


def _serving(rig: Rig, role: Role, size: int) -> Iterator[Entry]:
    """Yield the graphs of a role that serve a decode of ``size`` requests, one for each family that may."""
    wanted = query_len_of(role, rig.plan, size)
    families = dict.fromkeys(entry_family(role, entry) for entry in rig.plan.role(role).entries)
    for family in families:
        if family[2] == wanted:
            yield entry_of(family, size, rig.plan.limits.max_num_reqs)
        elif family[2] is None:
            yield entry_of(family, size * wanted, rig.plan.limits.max_num_reqs)


def _profile_of(rig: Rig, settings: ProfileSettings, findings: Findings, context: int) -> Profile:
    """Return the record of what was found."""
    here = host.this_environment("here")
    times = in_tokens(findings.times)
    captures = [
        [
            GraphSample(
                family=entry_family(graph.role, graph.entry),
                tokens=graph.entry.num_tokens,
                # Triton times its compilation itself, so the difference may come out below 0.
                seconds=max(0.0, graph.seconds - compiled),
                mib=graph.memory / MIB,
                alone_mib=graph.alone / MIB,
                driver_mib=graph.driver / MIB,
            )
            for graph, compiled in group
            if graph.waiver is None
        ]
        for group in findings.captures
    ]
    fit = fit_graphs([group for group in captures if group])
    used = sorted({group.backend for role in rig.plan.roles for group in role.groups})
    notes = [*findings.notes, *(f"{absent.figure}: {absent.says}" for absent in rig.absent)]
    if compiled := sum(compiled for group in findings.captures for _, compiled in group):
        notes.append(
            f"compiling kernels took {compiled:.2f} s of the captures; a start that finds them in the cache does not"
        )
    notes += [*open_gaps(findings.times), *time_notes(times), f"the model is {rig.model.name}", *(host.notes())]
    return Profile(
        source=f"capture-planner {capture_planner.__version__}",
        command=settings.command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=rig.plan.environment.device,
        driver=here.driver,
        torch=str(torch.__version__).partition("+")[0],
        packages={"transformers": metadata.version("transformers")}
        | {name: rig.registry[name].version for name in used}
        | {name: version for name, version in here.packages.items() if name != "torch"},
        model=rig.plan.model,
        speculative=rig.plan.speculative,
        parallel=rig.plan.parallel,
        context=context or None,
        curves=curves_of(
            {
                family: {tokens: timing.milliseconds for tokens, timing in sizes.items()}
                for family, sizes in times.items()
            }
        ),
        graphs=fit.graphs,
        base_mib=fit.base_mib,
        base_seconds=fit.base_seconds,
        step_milliseconds=round(statistics.median(findings.steps) * 1e3, 6) if findings.steps else 0.0,
        spread=largest_spread(times),
        notes=tuple(notes),
    )
