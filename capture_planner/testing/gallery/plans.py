"""Mutants that plan wrong: a spec that an engine's rule spoils, or a plan as the engine would have made it.

No backend runs here. Each mutant starts from a deployment whose plan has neither errors nor warnings
(``HEALTHY`` has that plan under the mutant's name) and differs from it by one bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from capture_planner import planner
from capture_planner._record import replace
from capture_planner.catalog import find_environment
from capture_planner.contract import Support
from capture_planner.entry import Entry
from capture_planner.environment import Environment
from capture_planner.lint.core import BugClass
from capture_planner.model import Method, Model, Speculative
from capture_planner.modes import GraphMode, GraphSupport, Reason, Role
from capture_planner.plan import Decision, Kind, Plan, RolePlan, Waiver
from capture_planner.planner.groups import Group, ask_backends
from capture_planner.planner.role import RoleInProgress
from capture_planner.registry import Registered, Registry
from capture_planner.resolve import Resolved
from capture_planner.sizing.policies import Context
from capture_planner.spec import Budget, Limits, Lora, Policy, Roles, RoleSpec, Sizes, Spec
from capture_planner.testing.gallery.core import Mutant, replaced
from capture_planner.testing.strategies import FakeBackend

MODEL = Model(name="m", num_layers=93, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=32768)


@attrs.frozen(kw_only=True)
class Deployed:
    """A spec, the machine it is for, and backends ``wide`` and ``narrow``: the latter has no full graphs."""

    spec: Spec
    environment: Environment
    registry: Registry

    def plan(self) -> Plan:
        """Plan it."""
        return planner.plan(self.spec, self.environment, self.registry)


def deployed(
    *,
    reqs: int,
    tokens: int,
    machine: str = "h100",
    drafts: int = 0,
    schedule: tuple[tuple[int, int, int], ...] = (),
    max_graphs: int | None = None,
    **changes: object,
) -> Deployed:
    """Return a deployment of so many requests and tokens; ``max_graphs`` is what the backend can hold."""
    registry = Registry(
        Registered(
            backend=FakeBackend(
                name=name,
                supports=dict.fromkeys(Role, Support(level=level, reason="told", max_graphs=max_graphs)),
            ),
            distribution=name,
            version="1",
        )
        for name, level in (("wide", GraphSupport.ALWAYS), ("narrow", GraphSupport.NEVER))
    )
    speculative = Speculative(method=Method.EAGLE3, num_tokens=drafts, schedule=schedule) if drafts else None
    limits = Limits(max_num_reqs=reqs, max_num_tokens=tokens)
    plain = Spec(model=MODEL, limits=limits, backend="wide", speculative=speculative)
    return Deployed(spec=replace(plain, **changes), environment=find_environment(machine), registry=registry)


def with_sizes(deployment: Deployed, **sizes: Any) -> Deployed:
    """Return the deployment with sizes chosen otherwise."""
    return attrs.evolve(deployment, spec=replace(deployment.spec, sizes=Sizes(**sizes)))


def on_role(plan: Plan, role: Role, change: Callable[[RolePlan], RolePlan]) -> Plan:
    """Return the plan with one role changed."""
    return replace(plan, roles=tuple(change(r) if r.role is role else r for r in plan.roles))


# A, coverage -----------------------------------------------------------------------------------

_VERIFIED = deployed(reqs=6, tokens=512, drafts=6)
"""Six requests of seven tokens: the largest decode has 42."""


def _list_ends_at_40() -> Plan:
    """The engine's own list, asked for a maximum of 42: its step of 8 ends at 40."""
    return with_sizes(_VERIFIED, policy=Policy.VLLM, max_tokens=42).plan()


_OFF_STRIDE = deployed(reqs=12, tokens=512, mode=GraphMode.FULL_DECODE_ONLY)
"""Twelve requests: no step of the engine's list."""


def _ceiling_left_out() -> Plan:
    """Sizes go to the last step below the maximum, 8, and nothing says that 9 to 12 run eager."""
    return on_role(
        _OFF_STRIDE.plan(),
        Role.TARGET,
        lambda role: replace(role, entries=tuple(entry for entry in role.entries if entry.num_tokens <= 8)),
    )


_CROWDED = deployed(reqs=4096, tokens=8192)


def _captured_to_32() -> Plan:
    return with_sizes(_CROWDED, policy=Policy.SGLANG, max_reqs=32).plan()


# B, shape algebra ------------------------------------------------------------------------------

_TRIPLES = deployed(reqs=8, tokens=512, drafts=2)


def _requests_from_rounded_tokens() -> Plan:
    """Sizes are tokens, and requests are what they hold of them, rounded up: the last one is short."""

    def rounded(role: RolePlan) -> RolePlan:
        mixed = [entry for entry in role.entries if entry.query_len is None]
        uniform = (
            Entry(mode=GraphMode.FULL, num_tokens=size, num_reqs=-(-size // 3), query_len=3)
            for size in (1, 2, 4, 8, 16, 24)
        )
        return replace(role, entries=(*mixed, *uniform))

    return on_role(_TRIPLES.plan(), Role.TARGET, rounded)


_FEWER_WHEN_FULL = ((1, 8, 7), (9, 32, 1))
_TIERS = deployed(reqs=32, tokens=1024, drafts=7, schedule=_FEWER_WHEN_FULL)


def _target_formula_for_the_drafter() -> Plan:
    """Each tier shortens the query by as much as it drafts less: 1 + (1 - 7) where the query has one token."""

    def tiers(role: RolePlan) -> RolePlan:
        lengths = [1 + (k - 7) for *_, k in _FEWER_WHEN_FULL]
        return replace(
            role,
            entries=tuple(
                attrs.evolve(entry, query_len=length, num_tokens=(entry.num_reqs or 0) * length)
                for entry in role.entries
                for length in lengths
            ),
        )

    return on_role(_TIERS.plan(), Role.DRAFT_DECODE, tiers)


# C, dispatch -----------------------------------------------------------------------------------

_SCHEDULED = deployed(reqs=64, tokens=1024, drafts=2, schedule=((1, 16, 2), (17, 64, 1)))


def _every_tier_at_every_size() -> Plan:
    """Each query length of the schedule is captured at each size, whatever the schedule sends there."""

    def all_tiers(role: RolePlan) -> RolePlan:
        uniform = [entry for entry in role.entries if entry.query_len is not None]
        more = {
            attrs.evolve(entry, query_len=length, num_tokens=(entry.num_reqs or 0) * length)
            for entry in uniform
            for length in {other.query_len for other in uniform if other.query_len}
        }
        return replace(role, entries=tuple({*role.entries, *more}))

    return on_role(_SCHEDULED.plan(), Role.TARGET, all_tiers)


_DOUBLING = tuple(1 << i for i in range(12))
_PREFILLS = deployed(reqs=64, tokens=8192, mode=GraphMode.PIECEWISE)


def _prefill_sizes(*tokens: int) -> Plan:
    return with_sizes(_PREFILLS, policy=Policy.EXPLICIT, num_tokens=tokens).plan()


def _cheap_padding_refused() -> Plan:
    """What a graph would pad to more than twice its tokens runs eager, and be it 5 tokens of 16."""
    refused = Waiver(
        kind=Kind.MIXED, first=5, last=7, reason=Reason.SIZES, says="a graph would pad to more than twice"
    )
    return on_role(
        _prefill_sizes(1, 2, 4, 16, 32, 64, 128, 256, 512),
        Role.TARGET,
        lambda role: replace(role, waivers=(refused, *role.waivers)),
    )


# G, mode resolution ----------------------------------------------------------------------------

_DRAFTED = deployed(reqs=32, tokens=512, drafts=3)


def _piecewise_draft_decode() -> Plan:
    """The draft decode takes the target's mixed mode."""

    def piecewise(role: RolePlan) -> RolePlan:
        graphs = tuple(Entry(mode=GraphMode.PIECEWISE, num_tokens=e.num_tokens) for e in role.entries)
        step = Decision(
            rule="mode-of-the-target",
            before=role.mode.value,
            after=GraphMode.PIECEWISE.value,
            role=role.role,
            says="as the target's mixed batches",
        )
        return replace(
            role, mode=GraphMode.PIECEWISE, entries=tuple(set(graphs)), decisions=(*role.decisions, step)
        )

    return on_role(_DRAFTED.plan(), Role.DRAFT_DECODE, piecewise)


_FIVE_LAYERS = deployed(reqs=32, tokens=512, drafts=3, roles=Roles(draft_prefill=RoleSpec(backend="narrow")))


def _weakest_of_all_models(told: bool) -> Plan:
    """The mode is resolved over every attention group there is, those of the drafter with the target's."""
    drafter = ask_backends(
        _FIVE_LAYERS.spec, Role.DRAFT_PREFILL, _FIVE_LAYERS.environment, _FIVE_LAYERS.registry
    )

    def over_all(resolve: Callable[..., tuple[GraphMode, Resolved]]) -> Callable[..., object]:
        def resolved(
            spec: Spec, role: Role, groups: Sequence[Group], target: GraphMode | None
        ) -> tuple[GraphMode, Resolved]:
            every = (*groups, *drafter) if role is Role.TARGET else groups
            requested, found = resolve(spec, role, every, target)
            quiet = role is Role.TARGET and not told
            return requested, attrs.evolve(found, decisions=()) if quiet else found

        return resolved

    with replaced(planner, "_resolve", over_all):
        return _FIVE_LAYERS.plan()


# I, resources ----------------------------------------------------------------------------------

_DENSE = deployed(reqs=2048, tokens=8192)


def _doubling() -> Plan:
    return with_sizes(_DENSE, policy=Policy.POWERS_OF_TWO).plan()


_WIDE = deployed(reqs=512, tokens=8192)


def _evenly_spread() -> Plan:
    return with_sizes(_WIDE, policy=Policy.EXPLICIT, num_reqs=(1, 88, 192, 304, 408, 512)).plan()


_SMALL_MACHINE = deployed(machine="l40s", reqs=256, tokens=4096, drafts=7)


def _widened_default() -> Plan:
    """The list goes on to the largest verification, in the steps that it had for one token each."""

    def widened(_: object) -> property:
        return property(lambda context: context.limits.max_num_reqs * context.max_query_len)

    with replaced(Context, "default_tokens", widened):
        return with_sizes(_SMALL_MACHINE, policy=Policy.VLLM).plan()


_MEMORY = deployed(reqs=256, tokens=4096, drafts=3, budget=Budget(memory=1 << 30))
_SECONDS = deployed(reqs=256, tokens=4096, drafts=3, budget=Budget(memory=4 << 30, seconds=10))


def _budgeted(bounded: Deployed, allowed: Callable[[Budget], int]) -> Plan:
    """Plan with another idea of what the budget allows."""
    with replaced(Budget, "allowed_graphs", lambda _: lambda budget: (allowed(budget), "the estimate")):
        return bounded.plan()


def _two_samples() -> Plan:
    """The first graph is measured, and each further one counts as the second, which shares its pool."""
    return _budgeted(
        _MEMORY, lambda budget: 1 + ((budget.memory or 0) - budget.memory_per_graph) // (1 << 20)
    )


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
    with replaced(RoleInProgress, "fit_backend", lambda _: lambda self: None):
        return _LIMITED.plan()


# J, observability ------------------------------------------------------------------------------


def _captured_never_dispatched() -> Plan:
    """The drafter's graphs are captured, and its dispatcher never gets their keys."""

    def without_keys(role: RolePlan) -> RolePlan:
        step = Decision(
            rule="keys-of-other-drafters",
            before=role.mode.value,
            after=GraphMode.NONE.value,
            role=role.role,
            says="keys are made for the other methods",
        )
        return replace(role, mode=GraphMode.NONE, decisions=(*role.decisions, step))

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

HEALTHY: dict[str, Callable[[], Plan]] = {}
"""By a mutant's name: the plan without its bug."""


def _mutant(
    name: str,
    bug_class: BugClass,
    *threads: str,
    says: str,
    healthy: Deployed | Callable[[], Plan],
    plan: Callable[[], Plan],
) -> Mutant:
    HEALTHY[name] = healthy.plan if isinstance(healthy, Deployed) else healthy
    return Mutant(name=name, threads=threads, bug_class=bug_class, says=says, plan=plan)


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "list-ends-below-the-ceiling",
        BugClass.A,
        "vllm#54933",
        says="a largest size of 42 (6 requests of 7 tokens) becomes 40, the last step of the list",
        healthy=_VERIFIED,
        plan=_list_ends_at_40,
    ),
    _mutant(
        "ceiling-left-out",
        BugClass.A,
        "vllm-ascend#16049",
        says="at most 12 requests, sizes to 8: larger decodes run eager, and nothing says so",
        healthy=_OFF_STRIDE,
        plan=_ceiling_left_out,
    ),
    _mutant(
        "captured-to-32",
        BugClass.A,
        "sglang#33483",
        says="graphs for up to 32 requests where 4096 run",
        healthy=_CROWDED,
        plan=_captured_to_32,
    ),
    _mutant(
        "decode-sizes-off-the-multiple",
        BugClass.B,
        "vllm#28207",
        says="with K = 2, decode graphs have 1, 2, 4, 8 tokens: no multiples of 3, the last request is short",
        healthy=_TRIPLES,
        plan=_requests_from_rounded_tokens,
    ),
    _mutant(
        "draft-query-below-one",
        BugClass.B,
        "vllm#48494",
        "vllm#48329",
        says="the target's query length of a tier is applied to draft decodes: 1 + (1 - 7) = -5 tokens",
        healthy=_TIERS,
        plan=_target_formula_for_the_drafter,
    ),
    _mutant(
        "every-tier-at-every-size",
        BugClass.C,
        "vllm#56136",
        "vllm#53407",
        says="every query length of a schedule is captured at every size",
        healthy=_SCHEDULED,
        plan=_every_tier_at_every_size,
    ),
    _mutant(
        "prefill-sizes-far-apart",
        BugClass.C,
        "sglang#31487",
        says="3208 tokens of prompts are padded to 8192",
        healthy=lambda: _prefill_sizes(*_DOUBLING, 3200, 4096, 6144, 8192),
        plan=lambda: _prefill_sizes(*_DOUBLING, 3200, 8192),
    ),
    _mutant(
        "cheap-padding-refused",
        BugClass.C,
        "sglang#40253",
        says="a fixed cap of twice the tokens leaves 5 tokens eager beside a graph of 16",
        healthy=lambda: _prefill_sizes(1, 2, 4, 16, 32, 64, 128, 256, 512),
        plan=_cheap_padding_refused,
    ),
    _mutant(
        "piecewise-draft-decode",
        BugClass.G,
        "vllm#39773",
        says="draft decodes run PIECEWISE, which does not pad requests",
        healthy=_DRAFTED,
        plan=_piecewise_draft_decode,
    ),
    _mutant(
        "drafter-decides-for-the-target",
        BugClass.G,
        "vllm#49547",
        says="the backend of the drafter's few layers takes the target's full graphs away",
        healthy=_FIVE_LAYERS,
        plan=lambda: _weakest_of_all_models(told=True),
    ),
    _mutant(
        "drafter-decides-in-silence",
        BugClass.G,
        "vllm#50619",
        says="the same, and no decision says so",
        healthy=_FIVE_LAYERS,
        plan=lambda: _weakest_of_all_models(told=False),
    ),
    _mutant(
        "doubling-sizes",
        BugClass.I,
        "TRT-LLM#12895",
        says="sizes double, so that up to half of a decode is padding, with memory to spare",
        healthy=_DENSE,
        plan=_doubling,
    ),
    _mutant(
        "six-sizes-evenly-spread",
        BugClass.I,
        "vllm-ascend#1168",
        says="a limit on graphs leaves six sizes, evenly spread: 2 requests run as 88",
        healthy=_WIDE,
        plan=_evenly_spread,
    ),
    _mutant(
        "widened-default",
        BugClass.I,
        "vllm#50488",
        says="the default list is widened to the largest verification, whatever its graphs cost",
        healthy=_SMALL_MACHINE,
        plan=_widened_default,
    ),
    _mutant(
        "memory-from-two-samples",
        BugClass.I,
        "vllm#57475",
        "vllm#51590",
        says="the memory of all graphs is extrapolated from two",
        healthy=_MEMORY,
        plan=_two_samples,
    ),
    _mutant(
        "capture-time-not-counted",
        BugClass.I,
        "vllm#20098",
        says="as many graphs as fit into memory, whatever the start-up takes",
        healthy=_SECONDS,
        plan=_time_not_counted,
    ),
    _mutant(
        "graphs-for-each-adapter-count",
        BugClass.I,
        "vllm#32005",
        "vllm#36370",
        says="every number of active adapters has graphs of its own",
        healthy=_ADAPTERS,
        plan=_each_adapter_count,
    ),
    _mutant(
        "platform-limit-forgotten",
        BugClass.I,
        "vllm-ascend#8585",
        says="graphs are planned for a whole device, and the platform here holds fewer",
        healthy=_LIMITED,
        plan=_platform_limit_forgotten,
    ),
    _mutant(
        "captured-never-dispatched",
        BugClass.J,
        "vllm#47460",
        says="draft graphs are captured, and the drafter runs eager in silence",
        healthy=_DRAFTED,
        plan=_captured_never_dispatched,
    ),
    _mutant(
        "requests-are-tokens",
        BugClass.J,
        "vllm#36165",
        says="decode graphs are kept under as many requests as tokens, where no decode looks for them",
        healthy=_DRAFTED,
        plan=_requests_are_tokens,
    ),
)
