"""Plan: what was decided and why. Frozen, comparable, and all that a runner needs.

The same spec, environment and backends give the same plan, and writing and reading it changes nothing.
Nothing downstream decides again.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from capture_planner.errors import DispatchError, Problem
from capture_planner.modes import GraphMode, Pool, Reason, Role
from capture_planner.records._base import (
    ByteCount,
    Count,
    Name,
    NonNegative,
    Pattern,
    Sum,
    digest,
    duplicates,
    field,
    record,
    replace,
)
from capture_planner.records.backend import MetadataField, PaddingContract, Support, Workspace
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.environment import Environment
from capture_planner.records.fingerprint import Fingerprint, Fingerprints
from capture_planner.records.model import Model, Speculative
from capture_planner.records.promise import Promise
from capture_planner.records.spec import (
    SCHEMA_VERSION,
    Budget,
    CapturePolicy,
    CaptureTiming,
    Limits,
    Lora,
    Objective,
    Parallel,
    Piecewise,
    RuleCode,
    SchemaVersion,
    Spec,
)

MAX_GRAPHS = 1 << 14
"""Most graphs in a plan: many times what any engine captures."""

MAX_SIZES = 1 << 12
"""Most sizes over all ladders of a plan, each of which may be captured for several adapter counts."""

SPEC_FIELDS = ("model", "limits", "speculative", "lora", "parallel", "piecewise", "budget", "pool", "capture", "ignore")
"""Fields that a plan takes over from its spec."""

Digest = Annotated[str, Pattern(r"sha256:[0-9a-f]{64}", "a sha256 digest")]
Rule = Annotated[str, Pattern(r"[a-z][a-z0-9-]{0,63}", "a rule's name")]


@record
class Decision:
    """One step of a mode resolution, or one choice of sizes."""

    rule: Rule = field("the rule's stable name")
    before: str = field("the value before")
    after: str = field("the value after")
    role: Role = field("the role whose limits caused it")
    backend: str | None = field("the backend that caused it, if one did", default=None)
    group: str | None = field("the attention group that caused it, if one did", default=None)
    message: str = field("the decision in a sentence", key="says")


@record
class Waiver:
    """A class of batches that the plan leaves eager on purpose.

    ``first`` and ``last`` count requests for decodes and tokens for mixed batches.
    """

    kind: Kind = field("decode or mixed")
    query_len: NonNegative | None = field("the decode's query length; None for mixed", default=None)
    max_query_len: NonNegative | None = field(
        "the most tokens of a request, where decodes vary; None: they do not", default=None
    )
    first: NonNegative = field("smallest extent waived: requests of a decode, tokens of a mixed batch")
    last: NonNegative = field("largest extent waived")
    min_loras: NonNegative = field("fewest active adapters waived", default=0)
    max_loras: NonNegative = field("most active adapters waived", default=0)
    reason: Reason = field("why, from the closed set")
    message: str = field("why, in a sentence", key="says")

    def covers(self, batch: Batch, kind: Kind) -> bool:
        """Whether the waiver is about ``batch``, which the schedule makes a batch of ``kind``."""
        longest = batch.decode_query_len
        return (
            self.kind is kind
            and (self.query_len is None or self.query_len == batch.query_len)
            and (self.max_query_len is None or (longest is not None and longest <= self.max_query_len))
            and self.first <= batch.extent(kind) <= self.last
            and self.min_loras <= batch.active_loras <= self.max_loras
        )


@record
class GroupPlan:
    """One attention group of a role: its backend, and what the backend declared."""

    name: Name = field("the group's name")
    layers: NonNegative = field("number of layers in it")
    window: NonNegative | None = field("sliding window, in tokens; None: full attention", default=None)
    backend: Name = field("the attention backend's name")
    distribution: Name = field("the distribution that brought the backend")
    version: str = field("the distribution's version")
    support: Support = field("backend's support inside a full graph")
    workspace: Workspace = field("memory it needs before capture", factory=Workspace)
    padding: PaddingContract = field("the metadata fields it reads", factory=PaddingContract)


def _in_capture_order(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.capture_order))


@record
class RolePlan:
    """What was decided for one role."""

    role: Role = field("the role")
    requested: GraphMode = field("the requested mode")
    mode: GraphMode = field("the resolved mode")
    groups: tuple[GroupPlan, ...] = field("attention groups")
    decisions: tuple[Decision, ...] = field("decisions behind it, in order", default=())
    entries: tuple[Entry, ...] = field("graphs, in capture order", default=(), converter=_in_capture_order)
    lazy: tuple[Entry, ...] = field(
        "of the graphs, those captured on first use", default=(), converter=_in_capture_order
    )
    waivers: tuple[Waiver, ...] = field("batches left eager on purpose", default=())
    inputs: tuple[MetadataField, ...] = field("fields that the runner owns and pads", default=())

    @property
    def at_start(self) -> tuple[Entry, ...]:
        """The graphs that are captured before the first request, in capture order."""
        lazy = frozenset(self.lazy)
        return tuple(entry for entry in self.entries if entry not in lazy)


@record
class StatePool:
    """The states of a model's recurrent layers: a pool of rows, one for each running request.

    Row 0 is for padded requests. Every padded request of a graph may need a row of its own (vllm#34094). A row holds
    the states after the last 1 + K tokens, since verification may reject up to K of them: the next step goes on from
    the state after the last accepted one.
    """

    rows: Count = field("rows: one for each request of the largest padded batch, and row 0")
    positions: Count = field("states that a row holds of each layer: 1 + K, or 1")
    size: ByteCount = field("device memory on one rank, over all rows and layers")

    @classmethod
    def of(cls, spec: "Spec | Plan", roles: Sequence[RolePlan], speculative: Speculative | None) -> "StatePool | None":
        """Return the pool that the graphs of some roles need; None for a model without recurrent layers."""
        recurrent = spec.model.recurrent
        if recurrent is None:
            return None
        # Sizes may be rounded up beyond max_num_reqs, and each padded request needs a row (vllm#34094).
        rows = 1 + max(spec.limits.max_num_reqs, *(entry.num_reqs or 0 for role in roles for entry in role.entries), 0)
        positions = 1 + (speculative.num_tokens if speculative else 0)
        # Ranks share the state of a layer; a remainder takes its room on each.
        size = rows * positions * recurrent.layers * -(-recurrent.state // spec.parallel.tensor)
        return cls(rows=rows, positions=positions, size=size)


@record
class Forecast:
    """What measured sizes are expected to cost, by the traffic and the profile that they were chosen by."""

    traffic: Digest | None = field("digest of the traffic; None: flat, where none was given", default=None)
    profile: Digest = field("digest of the profile")
    objective: Objective = field("minimized figure: mean, token, a percentile, or regret", default="mean")
    expected: Sum = field("value of the objective: milliseconds, or the worst ratio for regret")
    mean_step_ms: Sum = field("mean time of a step of the traffic, in milliseconds")
    regret: float = field("excess of the mean step over that with every size captured, as a share")
    eager_share: Sum = field("share of steps in which a pass runs eager")
    graphs: NonNegative = field("graphs captured")
    mib: Sum = field("device memory of the graphs, in MiB")
    seconds: Sum = field("time to capture, in seconds")
    next_graph_ms: Sum = field("saving of one more graph next to others, in ms of the mean step", default=0.0)
    slowdown: Sum = field(
        "most excess of a step over that on a graph of its own size, as a share; 0 for regret", default=0.0
    )
    max_slowdown: Sum = field("bound on that excess; 0 for regret", default=0.0)
    prior: Sum = field("weight of the flat prior and of smoothing against the counts of the traffic, as a share")


@record
class Plan:
    """Every graph of a deployment, and every decision that led to it."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    spec_digest: Digest = field("digest of its spec", key="spec")
    environment: Environment = field("the machine that it is for")
    model: Model = field("the served model")
    limits: Limits = field("the scheduler's limits")
    speculative: Speculative | None = field("speculative decoding; None: off", default=None)
    lora: Lora | None = field("LoRA adapters; None: off", default=None)
    parallel: Parallel = field("placement of the model on devices", factory=Parallel)
    piecewise: Piecewise = field("limits of the model's compilation", factory=Piecewise)
    budget: Budget = field("bounds on graphs, memory and time", factory=Budget)
    pool: Pool = field("one memory pool for all roles, or one each", default=Pool.SHARED)
    capture: CaptureTiming = field("time of captures", factory=CaptureTiming)
    ignore: tuple[RuleCode, ...] = field("codes of notes and warnings that check leaves out", default=())
    forecast: Forecast | None = field("expected costs of measured sizes; None: not measured", default=None)
    promise: Promise | None = field(
        "promise of when it was proposed; None: nothing was measured on the engine itself", default=None
    )
    states: StatePool | None = field("the pool of recurrent states; None: no layer is recurrent", default=None)
    roles: tuple[RolePlan, ...] = field("the roles, target first")
    fingerprints: Fingerprints | None = field(
        "fingerprints of the graphs of the plan's last run; None: not recorded", default=None
    )

    @classmethod
    def of(
        cls,
        spec: Spec,
        environment: Environment,
        roles: tuple[RolePlan, ...],
        forecast: Forecast | None = None,
        speculative: Speculative | None = None,
    ) -> "Plan":
        """Return the plan of a spec: what was decided for its roles, and what it says itself.

        :param speculative: the spec's, with the schedule that was chosen for it; None: as in the spec.
        """
        stated = {name: getattr(spec, name) for name in SPEC_FIELDS}
        # A measured schedule is part of the decision: the plan has its ranges.
        stated["speculative"] = speculative or spec.speculative
        states = StatePool.of(spec, roles, stated["speculative"])
        return cls(
            spec_digest=digest(spec), environment=environment, roles=roles, forecast=forecast, states=states, **stated
        )

    def _problems(self) -> Iterator[Problem]:
        yield from duplicates(self.planned, "the role {} is planned twice", "roles", "role")
        if self.speculative is not None:
            yield from self.speculative.head_problems(self.model, self.parallel.tensor)
        # Nothing downstream decides again, so the ranges have to be here.
        if self.speculative is not None and self.speculative.is_measured:
            message = "a plan has the ranges of its schedule, got measured"
            remedy = "plan the spec again, with its traffic and profile"
            yield Problem(path=("speculative", "schedule"), message=message, remedy=remedy)
        if self.capture.policy is CapturePolicy.START:
            message, remedy = "graphs on first use, and capture.policy is start", "set capture to lazy, with its budget"
            for index, role in enumerate(self.roles):
                if role.lazy:
                    yield Problem(path=("roles", index, "lazy"), message=message, remedy=remedy)

    def role(self, role: Role | str) -> RolePlan:
        """Return the plan of one role, or of a role's name; raises ``DispatchError`` where it has none."""
        for each in self.roles:
            if each.role == role:
                return each
        raise DispatchError(f"the plan has no role {role!s}; it has {', '.join(r.role for r in self.roles)}")

    def allowed_graphs(self) -> tuple[int, str] | None:
        """Return the most graphs that fit and the bound in words, or None without a bound.

        A forecast has the memory and the time of its own graphs, so that only the number of graphs is left.
        """
        if self.forecast is None:
            return self.budget.allowed_graphs()
        # The budget divides memory and time by a fixed cost of each graph, which the forecast replaces.
        return replace(self.budget, memory=None, seconds=None).allowed_graphs()

    def fingerprinted(self) -> Iterator[tuple[tuple[Role, Entry], Fingerprint]]:
        """Yield the fingerprint of each graph that has one, by its role and entry."""
        found = {} if self.fingerprints is None else self.fingerprints.by_graph()
        for role in self.roles:
            for index, entry in enumerate(role.entries):
                if (role.role, index) in found:
                    yield (role.role, entry), found[role.role, index]

    @property
    def is_steady(self) -> bool:
        """Whether no step takes longer than the bound of measured sizes allows; True of other sizes."""
        forecast = self.forecast
        # Figures of a forecast are rounded to six digits.
        return forecast is None or forecast.slowdown <= forecast.max_slowdown * (1 + 1e-5)

    @property
    def planned(self) -> tuple[Role, ...]:
        """The roles of the plan, target first."""
        return tuple(role.role for role in self.roles)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a line for each role, instead of all graphs."""
        # Not at the top: it imports a table of all entities, which every start would pay for.
        from html import escape

        lines = [f"{self.model.name} on {self.environment.name}: {self.num_graphs} graphs"]
        lines += [f"  {role.role.value}: {role.mode.value}, {len(role.entries)} graphs" for role in self.roles]
        # An f-string of Python 3.11 takes no backslash.
        return f"<pre>{escape(chr(10).join(lines))}</pre>"

    @property
    def num_graphs(self) -> int:
        """How many graphs the plan captures, over all roles."""
        return sum(len(role.entries) for role in self.roles)

    @property
    def num_lazy(self) -> int:
        """How many of them are captured on first use."""
        return sum(len(role.entries) - len(role.at_start) for role in self.roles)
