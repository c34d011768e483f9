"""Spec: what is wanted, written by a person. Not yet what is possible."""

import enum
from collections.abc import Iterator
from typing import Annotated

from capture_planner.errors import Problem
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records._base import ByteCount, Count, Interval, Name, Pattern, Positive, duplicates, field, record
from capture_planner.records.batch import Kind
from capture_planner.records.model import Method, Model, Speculative, head_problems
from capture_planner.records.text import counted, format_bytes

SCHEMA_VERSION = 1
"""The version of the spec, plan and environment files. A newer one is an error."""

SchemaVersion = Annotated[int, Interval(1)]
Requests = Annotated[int, Interval(1, 1 << 16)]
QueryLength = Annotated[int, Interval(1, 512)]
"""Up to 511: a parallel pass of a draft model with K = 255 has 1 + K rows of the target, K - 1 masks and one more."""
FileName = Annotated[str, Pattern(r"[^\x00-\x1f]{1,1024}", "the path of a file")]
RuleCode = Annotated[str, Pattern(r"CP[0-9]{3}", "the code of a lint rule, such as CP012")]
Objective = Annotated[
    str, Pattern(r"mean|token|regret|p[1-9][0-9]?(\.[0-9]{1,3})?", "mean, token, regret, or a percentile as p99")
]


class Policy(enum.Enum):
    """How capture sizes are chosen."""

    DEFAULT = "default"
    """Minimax, to the last request, with a number of graphs chosen from the limits."""
    MINIMAX = "minimax"
    """The ladder of ``graphs`` sizes whose worst padded/real ratio is least."""
    EXPLICIT = "explicit"
    """The sizes given, and no others."""
    POWERS_OF_TWO = "powers_of_two"
    """1, 2, 4, ... and the maximum."""
    VLLM = "vllm"
    """The list of vLLM 0.33."""
    SGLANG = "sglang"
    """The lists of SGLang 0.5.23."""
    TENSORRT_LLM = "tensorrt_llm"
    """The list of TensorRT-LLM."""
    MEASURED = "measured"
    """For all roles at once, the sizes that cost least by a traffic and a profile, within the budget."""


@record
class Limits:
    """The scheduler's limits, which decide which batches are admissible."""

    max_num_reqs: Requests = field("most requests in one batch (vLLM: max_num_seqs)")
    max_num_tokens: Count = field("most tokens in one batch (vLLM: max_num_batched_tokens)")


_OPTIONS = {
    "graphs": {Policy.MINIMAX},
    "num_tokens": {Policy.EXPLICIT, Policy.VLLM},
    "num_reqs": {Policy.EXPLICIT},
    "padding": {Policy.SGLANG, Policy.TENSORRT_LLM},
    "traffic": {Policy.MEASURED},
    "profile": {Policy.MEASURED},
    "objective": {Policy.MEASURED},
    "max_slowdown": {Policy.MEASURED},
}


@record
class Sizes:
    """Which capture sizes, for mixed batches (in tokens) and uniform decodes (in requests)."""

    policy: Policy = field("rule that chooses the sizes", default=Policy.DEFAULT)
    graphs: Annotated[int, Interval(1, 4096)] | None = field("minimax: sizes in each ladder", default=None)
    num_tokens: tuple[Count, ...] | None = field(
        "explicit: token counts for mixed batches; vllm: cudagraph_capture_sizes", default=None
    )
    num_reqs: tuple[Count, ...] | None = field("explicit: request counts for uniform decodes", default=None)
    max_tokens: Count | None = field("largest size for mixed batches, in tokens", default=None)
    max_reqs: Requests | None = field("largest size for uniform decodes, in requests", default=None)
    padding: bool | None = field(
        "sglang, tensorrt_llm: the engine's list with padding on or off; None: its default", default=None
    )
    traffic: FileName | None = field("measured: the file of the traffic, relative to the spec", default=None)
    profile: FileName | None = field("measured: the file of the profile, relative to the spec", default=None)
    objective: Objective | None = field(
        "measured: what is least: the mean time of a step, the same weighted by requests (token), a percentile as p99, "
        "or the worst regret; None: mean",
        default=None,
    )
    max_slowdown: Positive | None = field(
        "measured: by how much longer a step may take than on a graph of its own size, whatever the traffic, as a "
        "share; None: 0.15",
        default=None,
    )

    def _problems(self) -> Iterator[Problem]:
        # An option of another policy would have no effect.
        for option, policies in _OPTIONS.items():
            if getattr(self, option) is not None and self.policy not in policies:
                message = f"the policy {self.policy.value} takes no {option}"
                remedy = f"only {' and '.join(sorted(policy.value for policy in policies))} does"
                yield Problem(path=(option,), message=message, remedy=remedy)
        if self.policy is Policy.MINIMAX and self.graphs is None:
            yield Problem(path=("graphs",), message="the policy minimax needs a number of graphs")
        if self.policy is Policy.EXPLICIT and not (self.num_tokens or self.num_reqs):
            yield Problem(message="the policy explicit needs sizes", remedy="give num_tokens, num_reqs or both")


@record
class GroupSpec:
    """Layers of one role that share a KV layout and a backend."""

    name: Name = field("the group's name")
    layers: Count = field("number of the role's layers in it")
    backend: Name | None = field("attention backend; None: the role's", default=None)
    window: Count | None = field("sliding window, in tokens; None: full attention", default=None)


@record
class RoleSpec:
    """Differences of one role from the rest of the spec."""

    backend: Name | None = field("attention backend; None: the spec's", default=None)
    mode: GraphMode | None = field("graph mode; None: the spec's", default=None)
    sizes: Sizes | None = field("capture sizes; None: the spec's", default=None)
    groups: tuple[GroupSpec, ...] = field("attention groups; empty: one, of all layers", default=())

    def _problems(self) -> Iterator[Problem]:
        return duplicates([group.name for group in self.groups], "a second group is named {!r}", "groups", "name")


@record
class Roles:
    """Differences by role."""

    target: RoleSpec = field("the served model", factory=RoleSpec)
    draft_prefill: RoleSpec = field("draft position 0, query length 1 + K", factory=RoleSpec)
    draft_decode: RoleSpec = field("later draft positions, query length 1", factory=RoleSpec)

    def of(self, role: Role) -> RoleSpec:
        """Return the differences of one role."""
        wanted: RoleSpec = getattr(self, role.value)
        return wanted


@record
class Parallel:
    """How the model is spread over devices."""

    data: Count = field("data-parallel ranks, each with its own batches", default=1)
    tensor: Count = field("tensor-parallel ranks, sharing each batch", default=1)
    sequence: bool = field(
        "sequence parallelism: padded tokens are a multiple of the tensor-parallel size", default=False
    )
    decode_context: Count = field("decode-context-parallel ranks (KV split over sequence)", default=1)


@record
class Lora:
    """LoRA adapters. Graphs are planned by the number of active adapters, as in vLLM 0.33.

    Active are the distinct adapters that the requests of one batch use. Adapters that are loaded, on the device or the
    host, and used by no request of the batch do not count. In a batch with adapters, requests without one count as one
    adapter more: 4 adapters and such requests make 5. So graphs are planned for 0 adapters and for max_active + 1, and
    with ``specialize`` also for each power of two up to max_active. Drafters run without adapters: their graphs have no
    such cases.
    """

    max_active: Requests = field("most distinct adapters in one batch (vLLM: max_loras), however many are loaded")
    specialize: bool = field("plan graphs for the powers of two below too", default=False)

    def cases(self) -> tuple[int, ...]:
        """Return the adapter counts to plan for, ascending, 0 included."""
        # Requests without an adapter count as one more (vLLM 0.33).
        top = self.max_active + 1
        if not self.specialize:
            return (0, top)
        return (0, *(1 << i for i in range(self.max_active.bit_length())), top)


@record
class Piecewise:
    """What the model's compilation allows; it decides how modes are lowered."""

    split_attention: bool = field("attention can be split out of the graph", default=True)
    capturable: bool = field("pieces between attention can be captured", default=True)


@record
class KindGraphs:
    """Graphs by kind of batch: a whole number of them, or below 1 a share of max_graphs."""

    decode: Positive | None = field("most graphs of uniform decodes, over all roles; None: no bound", default=None)
    mixed: Positive | None = field("most graphs of mixed batches, over all roles; None: no bound", default=None)

    def _problems(self) -> Iterator[Problem]:
        for kind, amount in (("decode", self.decode), ("mixed", self.mixed)):
            if amount is not None and amount >= 1 and amount != int(amount):
                yield Problem(path=(kind,), message=f"{amount} is neither a whole number nor a share below 1")


@record
class Budget:
    """What graphs may cost. Costs per graph are the worst of public reports until measured."""

    max_graphs: Count | None = field("most graphs over all roles; None: no bound", default=None)
    graphs: KindGraphs = field("most graphs by kind of batch", factory=KindGraphs)
    memory: ByteCount | None = field("most device memory for graphs, as in 2GiB", default=None)
    seconds: Positive | None = field("most time to capture, in seconds", default=None)
    memory_per_graph: ByteCount = field("memory of one graph (reports: 7 to 25 MiB)", default=25 << 20)
    seconds_per_graph: Positive = field("time to capture one graph (reports: 0.05 to 0.25 s)", default=0.25)

    def _problems(self) -> Iterator[Problem]:
        shares = [share for share in (self.graphs.decode, self.graphs.mixed) if share is not None and share < 1]
        if shares and self.max_graphs is None:
            remedy = "give max_graphs too, or numbers of graphs"
            yield Problem(path=("graphs",), message="a share needs max_graphs", remedy=remedy)
        if sum(shares) > 1:
            yield Problem(path=("graphs",), message=f"the shares sum to {sum(shares):g}, more than 1")

    def allowed_of(self, kind: Kind) -> int | None:
        """Return the most graphs of one kind of batch, or None without a bound; a share is rounded down."""
        amount: float | None = getattr(self.graphs, kind.value)
        if amount is None or amount >= 1:
            return None if amount is None else int(amount)
        # 0.29 of 100 is 28.999999999999996 as a float.
        return int((self.max_graphs or 0) * amount + 1e-9)

    def allowed_graphs(self) -> tuple[int, str] | None:
        """Return the most graphs that fit over all kinds, and the bound in words, or None without a bound."""
        return min(self.bounds(), default=None)

    def bounds(self) -> tuple[tuple[int, str], ...]:
        """Return the most graphs over all kinds by each limit, with the limit in words."""
        bounds = []
        if self.max_graphs is not None:
            bounds.append((self.max_graphs, f"max_graphs {self.max_graphs}"))
        if self.memory is not None:
            # memory_per_graph may be 0: graphs that cost nothing.
            graphs = self.memory // max(self.memory_per_graph, 1)
            each = format_bytes(self.memory_per_graph)
            bounds.append((graphs, f"memory {format_bytes(self.memory)} at {each} a graph"))
        if self.seconds is not None:
            # A tiny seconds_per_graph makes the quotient infinite, which int refuses.
            graphs = int(min(self.seconds / self.seconds_per_graph, 1e9) + 1e-9)
            bounds.append((graphs, f"seconds {self.seconds:g} at {self.seconds_per_graph:g} s a graph"))
        return tuple(bounds)


LAZY_EXAMPLE = "write capture: {policy: lazy, memory: 512MiB, seconds_per_minute: 1.0}"
"""What a spec says for lazy capture, budget included."""


class CapturePolicy(enum.Enum):
    """When graphs are captured."""

    START = "start"
    """All of them before the first request."""
    LAZY = "lazy"
    """At start those that are worth it, each of the others on first use, within a budget."""


@record
class CaptureTiming:
    """When graphs are captured, and what captures between the steps of requests may cost."""

    policy: CapturePolicy = field("start, or lazy: some graphs on first use", default=CapturePolicy.START)
    memory: ByteCount | None = field(
        "lazy: device memory that is reserved for graphs captured on first use", default=None
    )
    seconds_per_minute: Positive | None = field("lazy: time of a minute in which graphs may be captured", default=None)

    def _problems(self) -> Iterator[Problem]:
        lazy = self.policy is CapturePolicy.LAZY
        for name, given in (("memory", self.memory), ("seconds_per_minute", self.seconds_per_minute)):
            # Captures between steps delay requests, so lazy capture never goes without bounds.
            if given is None and lazy:
                yield Problem(path=(name,), message="lazy capture needs a budget", remedy=LAZY_EXAMPLE)
            elif given is not None and not lazy:
                yield Problem(path=(name,), message=f"the policy start takes no {name}", remedy="only lazy does")


@record
class Spec:
    """A deployment: its model, its limits, and the graphs that are wanted for it."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    model: Model = field("the served model")
    limits: Limits = field("the scheduler's limits")
    mode: GraphMode = field("the graph mode wanted", default=GraphMode.FULL_AND_PIECEWISE)
    backend: Name = field("attention backend of every role that names no other")
    speculative: Speculative | None = field("speculative decoding; None: off", default=None)
    sizes: Sizes = field("capture sizes of every role that names no other", factory=Sizes)
    roles: Roles = field("differences by role", factory=Roles)
    parallel: Parallel = field("placement of the model on devices", factory=Parallel)
    lora: Lora | None = field("LoRA adapters; None: off", default=None)
    piecewise: Piecewise = field("limits of the model's compilation", factory=Piecewise)
    budget: Budget = field("bounds on graphs, memory and time", factory=Budget)
    pool: Pool = field("one memory pool for all roles, or one each", default=Pool.SHARED)
    capture: CaptureTiming = field("time of captures; a word is the policy", factory=CaptureTiming)
    ignore: tuple[RuleCode, ...] = field("codes of notes and warnings that check leaves out", default=())

    def _problems(self) -> Iterator[Problem]:
        tensor, heads, kv_heads = self.parallel.tensor, self.model.num_heads, self.model.num_kv_heads
        # The model has checked its heads among themselves.
        yield from head_problems(heads, kv_heads, tensor, grouped=(), spread=("parallel", "tensor"))
        if self.speculative is not None:
            yield from self.speculative.head_problems(self.model, tensor)
            yield from self._draft_pass_problems(self.speculative)
            if self.speculative.varying_decodes and self.sizes.policy is Policy.MEASURED:
                message = "a profile has no times of varying decodes to choose sizes by"
                remedy = "choose sizes by another policy, or leave it out"
                yield Problem(path=("speculative", "varying_decodes"), message=message, remedy=remedy)
        for role in Role:
            # What a spec says of a role that never runs would be ignored.
            if role not in self.active_roles and self.roles.of(role) != RoleSpec():
                if self.speculative is None:
                    reason, remedy = "the spec has no speculative decoding", "add speculative or remove this"
                else:
                    reason, remedy = "all drafts are made in the draft prefill", "remove this"
                yield Problem(path=("roles", role.value), message=f"{reason}, so this role never runs", remedy=remedy)
        yield from self._half_measured()
        for role in Role:
            groups = self.roles.of(role).groups
            grouped, layers = sum(group.layers for group in groups), self.num_layers(role)
            # A layer outside all groups would have no backend.
            if groups and grouped != layers:
                of_model = f"{layers} that attend" if self.model.recurrent else str(layers)
                message = f"the groups have {grouped} layers, the model {of_model}"
                yield Problem(path=("roles", role.value, "groups"), message=message)

    def _draft_pass_problems(self, speculative: Speculative) -> Iterator[Problem]:
        """Yield what the first draft pass is in the way of: its room in a batch, and its vocabulary."""
        slots, most = speculative.extra_slots, self.limits.max_num_tokens
        # One request has a token of the target and its slots.
        if most <= slots:
            message = f"{most} tokens hold no request: its first draft pass has {counted(slots, 'row')} more than it"
            yield Problem(path=("limits", "max_num_tokens"), message=message, remedy=f"give more than {slots}")
        own, theirs = speculative.model.vocab_size, self.model.vocab_size
        # A draft model reads token ids of the target; an EAGLE head may have a reduced vocabulary.
        if speculative.method is Method.DRAFT_MODEL and None not in (own, theirs) and own != theirs:
            message = f"a draft model of {own} tokens for a target of {theirs}; they need the same vocabulary"
            yield Problem(path=("speculative", "model", "vocab_size"), message=message, remedy="leave it out")

    def _half_measured(self) -> Iterator[Problem]:
        """Yield each role whose sizes are measured where others are not: all are chosen in one decision."""
        for role in Role:
            sizes = self.roles.of(role).sizes
            if sizes is None:
                continue
            path = ("roles", role.value, "sizes")
            if Policy.MEASURED in (sizes.policy, self.sizes.policy) and sizes.policy is not self.sizes.policy:
                message = "measured sizes are chosen for all roles together"
                remedy = "give the policy measured in sizes, and at most max_tokens and max_reqs here"
                yield Problem(path=(*path, "policy"), message=message, remedy=remedy)
            elif sizes.policy is Policy.MEASURED:
                for name in ("traffic", "profile", "objective", "max_slowdown"):
                    if getattr(sizes, name) is not None:
                        message = f"the {name} counts for all roles"
                        yield Problem(path=(*path, name), message=message, remedy="give it in sizes")

    def num_layers(self, role: Role) -> int:
        """Return how many layers of a role attend."""
        drafter = self.speculative if role.is_drafter else None
        return self.model.attention_layers if drafter is None else drafter.model.num_layers

    @property
    def active_roles(self) -> tuple[Role, ...]:
        """The roles that this deployment runs."""
        return (Role.TARGET,) if self.speculative is None else self.speculative.roles
