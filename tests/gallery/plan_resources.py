"""Mutants of plans, classes G, I and J: modes, budgets, and what is slow in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import GraphMode, Role
from capture_planner.planning import planner, resolve
from capture_planner.planning.resolve import GroupSupport, ResolvedMode, ask_backends
from capture_planner.planning.sizing.policies import Context
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.model import Recurrent
from capture_planner.records.plan import Decision, Plan, RolePlan
from capture_planner.records.spec import Budget, Lora, Policy, Roles, RoleSpec, Spec
from gallery.core import replaced
from gallery.planned import MODEL, PlanCase, PlanMutant, deployed, on_role, planted, with_sizes


def _in_mode(role: RolePlan, mode: GraphMode, rule: str, message: str) -> RolePlan:
    """Return a role in another mode, with the decision that says so."""
    step = Decision(rule=rule, before=role.mode.value, after=mode.value, role=role.role, message=message)
    return replace(role, mode=mode, decisions=(*role.decisions, step))


# G, mode resolution ----------------------------------------------------------------------------

_DRAFTED = deployed(reqs=32, tokens=512, drafts=3)


def _piecewise_draft_decode() -> Plan:
    """The draft decode takes the target's mixed mode."""

    def piecewise(role: RolePlan) -> RolePlan:
        graphs = {Entry(mode=GraphMode.PIECEWISE, num_tokens=e.num_tokens) for e in role.entries}
        role = _in_mode(role, GraphMode.PIECEWISE, "mode-of-the-target", "as the target's mixed batches")
        return replace(role, entries=tuple(graphs))

    return on_role(_DRAFTED.plan(), Role.DRAFT_DECODE, piecewise)


_FIVE_LAYERS = deployed(reqs=32, tokens=512, drafts=3, roles=Roles(draft_prefill=RoleSpec(backend="narrow")))


def _weakest_of_all_models(recorded: bool) -> Plan:
    """The mode is resolved over every attention group, the drafter's with the target's."""
    drafter = ask_backends(_FIVE_LAYERS.spec, Role.DRAFT_PREFILL, _FIVE_LAYERS.environment, _FIVE_LAYERS.registry)

    def over_all(own: Callable[..., tuple[GraphMode, ResolvedMode]]) -> Callable[..., object]:
        def resolved(
            spec: Spec, role: Role, groups: Sequence[GroupSupport], target: GraphMode | None
        ) -> tuple[GraphMode, ResolvedMode]:
            every = (*groups, *drafter) if role is Role.TARGET else groups
            requested, resolution = own(spec, role, every, target)
            quiet = role is Role.TARGET and not recorded
            return requested, attrs.evolve(resolution, decisions=()) if quiet else resolution

        return resolved

    with replaced(resolve, "_resolve", over_all):
        return _FIVE_LAYERS.plan()


# I, resources ----------------------------------------------------------------------------------

_DENSE = deployed(reqs=2048, tokens=8192)


def _doubling() -> Plan:
    return with_sizes(_DENSE, policy=Policy.POWERS_OF_TWO).plan()


_WIDE = deployed(reqs=512, tokens=8192)


def _evenly_spread() -> Plan:
    return with_sizes(_WIDE, policy=Policy.EXPLICIT, num_reqs=(1, 88, 192, 304, 408, 512)).plan()


def _mixed_sizes(*tokens: int) -> Plan:
    reqs = (1, 2, 4, *range(8, 513, 8))
    return with_sizes(_WIDE, policy=Policy.EXPLICIT, num_reqs=reqs, num_tokens=tokens).plan()


_SMALL_MACHINE = deployed(machine="l40s", reqs=256, tokens=4096, drafts=7)


def _widened_default() -> Plan:
    """The list goes on to the largest verification, in the steps that it had for one token each."""

    def widened(_: object) -> property:
        return property(lambda context: context.limits.max_num_reqs * context.max_query_len)

    with replaced(Context, "default_tokens", widened):
        return with_sizes(_SMALL_MACHINE, policy=Policy.VLLM).plan()


_MEMORY = deployed(reqs=256, tokens=4096, drafts=3, budget=Budget(memory=1 << 30))
_SECONDS = deployed(reqs=256, tokens=4096, drafts=3, budget=Budget(memory=4 << 30, seconds=10))


def _budgeted(bounded: PlanCase, allowed: Callable[[Budget], int]) -> Plan:
    """Plan with another idea of what the budget allows."""
    with replaced(Budget, "allowed_graphs", lambda _: lambda budget: (allowed(budget), "the estimate")):
        return bounded.plan()


def _two_samples() -> Plan:
    """The first graph is measured, and each further one counts as the second, which shares its pool."""
    return _budgeted(_MEMORY, lambda budget: 1 + ((budget.memory or 0) - budget.memory_per_graph) // (1 << 20))


def _time_not_counted() -> Plan:
    return _budgeted(_SECONDS, lambda budget: (budget.memory or 0) // budget.memory_per_graph)


_ADAPTERS = deployed(reqs=64, tokens=512, lora=Lora(max_active=16))


def _each_adapter_count() -> Plan:
    """A graph for every number of active adapters, at every size."""

    def each(role: RolePlan) -> RolePlan:
        return replace(
            role,
            entries=tuple(
                {
                    attrs.evolve(entry, active_loras=count)
                    for entry in role.entries
                    for count in range(min(17, entry.num_reqs or entry.num_tokens) + 1)
                }
            ),
        )

    return on_role(_ADAPTERS.plan(), Role.TARGET, each)


_LIMITED = deployed(reqs=64, tokens=512, max_graphs=8)


def _platform_limit_forgotten() -> Plan:
    with replaced(planner, "fewest_graphs", lambda _: lambda groups: None):
        return _LIMITED.plan()


_RECURRENT = deployed(reqs=64, tokens=512, model=replace(MODEL, recurrent=Recurrent(layers=69, state=1 << 20)))


def _with_rows(rows: int) -> Plan:
    plan = _RECURRENT.plan()
    assert plan.states is not None
    return replace(plan, states=replace(plan.states, rows=rows))


def _pool_of_the_memory() -> Plan:
    return _with_rows(40)


def _pool_without_padding() -> Plan:
    return _with_rows(_RECURRENT.spec.limits.max_num_reqs)


# J, observability ------------------------------------------------------------------------------


def _captured_never_dispatched() -> Plan:
    """The drafter's graphs are captured, and its dispatcher never gets their keys."""

    def without_keys(role: RolePlan) -> RolePlan:
        return _in_mode(role, GraphMode.NONE, "keys-of-other-drafters", "keys are made for the other methods")

    return on_role(_DRAFTED.plan(), Role.DRAFT_PREFILL, without_keys)


def _requests_are_tokens() -> Plan:
    """Captured under as many requests as tokens, and looked for under tokens by query length."""
    return on_role(
        _DRAFTED.plan(),
        Role.TARGET,
        lambda role: replace(
            role,
            entries=tuple(
                entry if entry.query_len is None else attrs.evolve(entry, num_reqs=entry.num_tokens)
                for entry in role.entries
            ),
        ),
    )


# All -------------------------------------------------------------------------------------------

PLANTED: tuple[PlanMutant, ...] = (
    planted(
        "piecewise-draft-decode",
        BugClass.G,
        "vllm#39773",
        says="draft decodes run PIECEWISE, which does not pad requests",
        healthy=_DRAFTED,
        plan=_piecewise_draft_decode,
    ),
    planted(
        "drafter-decides-for-the-target",
        BugClass.G,
        "vllm#49547",
        says="the backend of the drafter's few layers takes the target's full graphs away",
        healthy=_FIVE_LAYERS,
        plan=lambda: _weakest_of_all_models(recorded=True),
    ),
    planted(
        "drafter-decides-in-silence",
        BugClass.G,
        "vllm#50619",
        says="the same, and no decision says so",
        healthy=_FIVE_LAYERS,
        plan=lambda: _weakest_of_all_models(recorded=False),
    ),
    planted(
        "doubling-sizes",
        BugClass.I,
        "TRT-LLM#12895",
        says="sizes double, so that up to half of a decode is padding, with memory to spare",
        healthy=_DENSE,
        plan=_doubling,
    ),
    planted(
        "six-sizes-evenly-spread",
        BugClass.I,
        "vllm-ascend#1168",
        says="a limit on graphs leaves six sizes, evenly spread: 2 requests run as 88",
        healthy=_WIDE,
        plan=_evenly_spread,
    ),
    planted(
        "one-size-of-mixed-batches",
        BugClass.I,
        "vllm-ascend#1168",
        says="the only size of mixed batches is 512: a prompt of two tokens runs as long as one of 512",
        healthy=lambda: _mixed_sizes(*(1 << power for power in range(10))),
        plan=lambda: _mixed_sizes(512),
    ),
    planted(
        "widened-default",
        BugClass.I,
        "vllm#50488",
        says="the default list is widened to the largest verification, whatever its graphs cost",
        healthy=_SMALL_MACHINE,
        plan=_widened_default,
    ),
    planted(
        "memory-from-two-samples",
        BugClass.I,
        "vllm#57475",
        "vllm#51590",
        says="the memory of all graphs is extrapolated from two",
        healthy=_MEMORY,
        plan=_two_samples,
    ),
    planted(
        "capture-time-not-counted",
        BugClass.I,
        "vllm#20098",
        says="as many graphs as fit into memory, whatever the start-up takes",
        healthy=_SECONDS,
        plan=_time_not_counted,
    ),
    planted(
        "graphs-for-each-adapter-count",
        BugClass.I,
        "vllm#32005",
        "vllm#36370",
        says="every number of active adapters has graphs of its own",
        healthy=_ADAPTERS,
        plan=_each_adapter_count,
    ),
    planted(
        "platform-limit-forgotten",
        BugClass.I,
        "vllm-ascend#8585",
        says="graphs are planned for a whole device, and the platform here holds fewer",
        healthy=_LIMITED,
        plan=_platform_limit_forgotten,
    ),
    planted(
        "state-pool-of-the-memory",
        BugClass.I,
        "vllm#34094",
        says="the pool of recurrent states has as many rows as memory is left for, fewer than a graph has requests",
        healthy=_RECURRENT,
        plan=_pool_of_the_memory,
    ),
    planted(
        "state-pool-without-padding",
        BugClass.I,
        "TRT-LLM#13151",
        says="the pool of recurrent states has a row for each running request and none for padding",
        healthy=_RECURRENT,
        plan=_pool_without_padding,
    ),
    planted(
        "captured-never-dispatched",
        BugClass.J,
        "vllm#47460",
        says="draft graphs are captured, and the drafter runs eager in silence",
        healthy=_DRAFTED,
        plan=_captured_never_dispatched,
    ),
    planted(
        "requests-are-tokens",
        BugClass.J,
        "vllm#36165",
        says="decode graphs are kept under as many requests as tokens, where no decode looks for them",
        healthy=_DRAFTED,
        plan=_requests_are_tokens,
    ),
)
