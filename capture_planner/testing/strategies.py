"""Strategies: specs, machines, backends, plans, batches and files, small but with their extremes.

What a strategy gives is always valid, unless its name says otherwise. A field that joins a record
joins its strategy here; ``tests/test_strategies.py`` fails until it does.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from hypothesis import assume, reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner import codec
from capture_planner._record import digest, replace
from capture_planner.admissible import decode_families
from capture_planner.contract import (
    Attention,
    Axis,
    Bound,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Support,
    Where,
    Workspace,
)
from capture_planner.entry import Batch, Entry
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import PlanningError
from capture_planner.model import DataType, DraftModel, Latent, Method, Model, Speculative
from capture_planner.modes import Chain, GraphMode, GraphSupport, Pool, Reason, Refresh, Role
from capture_planner.plan import Decision, GroupPlan, Kind, Plan, RolePlan, Waiver
from capture_planner.planner import plan
from capture_planner.registry import Registered, Registry
from capture_planner.spec import (
    Budget,
    GroupSpec,
    Limits,
    Lora,
    Parallel,
    Piecewise,
    Policy,
    Roles,
    RoleSpec,
    Sizes,
    Spec,
)

T = TypeVar("T")

BACKENDS = ("alpha", "beta", "gamma")
"""Names that specs choose from, where none are given."""

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64)
"""Counts on both sides of the steps that sizes have."""


def _maybe(strategy: SearchStrategy[T]) -> SearchStrategy[T | None]:
    return st.none() | strategy


def _names() -> SearchStrategy[str]:
    plain = st.sampled_from(("tiny", "Qwen/Qwen3-8B", "null", "no", "8", "8.7", "1e3", "0x1F", "true", "a b"))
    return plain | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/+ -]{0,11}", fullmatch=True)


def _versions() -> SearchStrategy[str]:
    return st.sampled_from(("2.13.0", "13.0", "8", "1e5", "3.0.0.post1")) | st.from_regex(
        r"[0-9][0-9A-Za-z.+-]{0,9}", fullmatch=True
    )


def _text() -> SearchStrategy[str]:
    return st.sampled_from(
        ("as asked", "no", "8", "- a: [b]", "# not a comment", "two\nlines", " é ")
    ) | st.text(
        string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", ""), min_size=1, max_size=20
    )


def _byte_counts() -> SearchStrategy[int]:
    units = st.sampled_from((1, 1 << 10, 1 << 20, 1 << 30))
    return st.builds(lambda n, unit: n * unit, st.integers(0, 2000), units) | st.integers(0, 1 << 60)


def _counts(most: int = 64) -> SearchStrategy[int]:
    return st.sampled_from([n for n in _COUNTS if n <= most]) | st.integers(1, most)


# Specs -----------------------------------------------------------------------------------------


def _latents() -> SearchStrategy[Latent]:
    return st.builds(Latent, kv_lora_rank=st.sampled_from((64, 512)), rope_head_dim=st.sampled_from((32, 64)))


@st.composite
def _models(draw: DrawFn, tensor: int) -> Model:
    """Draw a model whose heads divide over ``tensor`` ranks."""
    kv_heads = draw(st.sampled_from((tensor, 2 * tensor, 1)))
    queries = kv_heads if kv_heads % tensor == 0 else kv_heads * tensor
    return Model(
        name=draw(_names()),
        num_layers=draw(st.integers(1, 6)),
        num_heads=queries * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((64, 96, 128, 576))),
        max_model_len=draw(st.sampled_from((1, 4096, 131072))),
        hidden_size=draw(_maybe(st.sampled_from((512, 4096)))),
        vocab_size=draw(_maybe(st.sampled_from((1000, 151936)))),
        dtype=draw(st.sampled_from(DataType)),
        kv_dtype=draw(_maybe(st.sampled_from(DataType))),
        causal=draw(st.booleans()),
        latent=draw(_maybe(_latents())),
        sinks=draw(st.booleans()),
        mrope=draw(st.booleans()),
        embeddings=draw(st.booleans()),
    )


@st.composite
def _limits(draw: DrawFn, max_reqs: int, max_tokens: int) -> Limits:
    most = draw(_counts(min(max_reqs, 64)) | st.sampled_from((max_reqs, min(max_reqs, 64))))
    tokens = st.sampled_from((most, 2 * most, 4 * most, 256, 512, 1024, 4096)) | st.integers(1, 300)
    return Limits(max_num_reqs=most, max_num_tokens=min(draw(tokens), max_tokens))


@st.composite
def _schedules(draw: DrawFn, longest: int) -> tuple[tuple[int, int, int], ...]:
    """Draw ranges by batch size that start at 1, with gaps between them, some k above ``longest``."""
    ranges, first = [], 1
    for _ in range(draw(st.integers(0, 4))):
        last = first + draw(st.integers(0, 20))
        ranges.append((first, last, draw(st.integers(0, longest + 1))))
        first = last + 1 + draw(st.sampled_from((0, 0, 1, 7)))
    return tuple(ranges)


@st.composite
def _speculatives(draw: DrawFn) -> Speculative:
    longest = draw(st.sampled_from((1, 2, 3, 4, 5, 6, 15)))
    model = st.builds(
        DraftModel,
        num_layers=st.sampled_from((2, 1, 3, 4)),
        num_heads=_maybe(st.sampled_from((4, 8))),
        num_kv_heads=_maybe(st.sampled_from((2, 4))),
        head_dim=_maybe(st.sampled_from((64, 128))),
        latent=_maybe(_latents()),
        sinks=st.booleans(),
        vocab_size=_maybe(st.sampled_from((1000, 32000))),
    )
    return Speculative(
        method=draw(st.sampled_from(Method)),
        num_tokens=longest,
        schedule=draw(st.just(()) | _schedules(longest)),
        model=draw(st.just(DraftModel()) | model),
        chain=draw(st.sampled_from(Chain)),
    )


@st.composite
def _sizes(draw: DrawFn) -> Sizes:
    """Draw any policy with the options that it takes."""
    policy = draw(st.sampled_from(Policy))
    listed = st.lists(_counts(128), max_size=6).map(tuple)
    tokens = reqs = None
    if policy is Policy.EXPLICIT:
        tokens, reqs = draw(_maybe(listed)), draw(_maybe(listed))
        if not tokens and not reqs:
            tokens = (draw(_counts()),)
    elif policy is Policy.VLLM:
        tokens = draw(_maybe(listed))
    return Sizes(
        policy=policy,
        graphs=draw(st.integers(1, 12)) if policy is Policy.MINIMAX else None,
        num_tokens=tokens,
        num_reqs=reqs,
        max_tokens=draw(_maybe(st.sampled_from((1, 32, 100, 2048)))),
        max_reqs=draw(_maybe(_counts())),
        padding=draw(_maybe(st.booleans())) if policy in (Policy.SGLANG, Policy.TENSORRT_LLM) else None,
    )


@st.composite
def _role_specs(draw: DrawFn, layers: int, names: Sequence[str]) -> RoleSpec:
    groups: list[GroupSpec] = []
    for number in range(draw(st.sampled_from((0, 1, 2, 3)))):
        left = layers - sum(group.layers for group in groups)
        if left == 0:
            break
        window, backend = draw(_maybe(st.sampled_from((128, 4096)))), draw(_maybe(st.sampled_from(names)))
        count = draw(st.integers(1, left))
        groups.append(
            GroupSpec(
                name=draw(st.sampled_from((f"group {number}", f"g{number}"))),
                layers=count,
                backend=backend,
                window=window,
            )
        )
    if groups and (left := layers - sum(group.layers for group in groups)):
        groups[-1] = replace(groups[-1], layers=groups[-1].layers + left)
    return RoleSpec(
        backend=draw(_maybe(st.sampled_from(names))),
        mode=draw(_maybe(st.sampled_from(GraphMode))),
        sizes=draw(_maybe(_sizes())),
        groups=tuple(groups),
    )


def _budgets() -> SearchStrategy[Budget]:
    plain: SearchStrategy[Budget] = st.just(Budget())
    return plain | st.builds(
        Budget,
        max_graphs=_maybe(_counts()),
        memory=_maybe(st.integers(0, 80).map(lambda n: n * (25 << 20)) | _byte_counts()),
        seconds=_maybe(st.sampled_from((0.1, 1, 2.5, 20, 1e9))),
        memory_per_graph=st.sampled_from((25 << 20, 7 << 20, 1, 0)),
        seconds_per_graph=st.sampled_from((0.25, 0.05, 1, 1e-9)),
    )


@st.composite
def specs(
    draw: DrawFn, *, max_reqs: int = 512, max_tokens: int = 4096, backends: Sequence[str] = BACKENDS
) -> Spec:
    """Return specs: any field of any block takes part. ``backends`` are the names they choose from."""
    tensor = draw(st.sampled_from((1, 1, 2, 3, 4)))
    model = draw(_models(tensor))
    speculative = draw(_maybe(_speculatives()))
    layers = dict.fromkeys(Role, speculative.model.num_layers if speculative else 0)
    layers[Role.TARGET] = model.num_layers
    roles = {}
    for role in Role:
        if role is Role.TARGET or speculative is not None:
            roles[role.value] = draw(_role_specs(layers[role], backends) | st.just(RoleSpec()))
    return Spec(
        model=model,
        limits=draw(_limits(max_reqs, max_tokens)),
        mode=draw(st.sampled_from(GraphMode)),
        backend=draw(st.sampled_from(backends)),
        speculative=speculative,
        sizes=draw(st.just(Sizes()) | _sizes()),
        roles=Roles(**roles),
        parallel=Parallel(
            data=draw(st.sampled_from((1, 1, 8))),
            tensor=tensor,
            sequence=draw(st.booleans()),
            decode_context=draw(st.sampled_from((1, 1, 2))),
        ),
        lora=draw(_maybe(st.builds(Lora, max_active=_counts(17), specialize=st.booleans()))),
        piecewise=Piecewise(split_attention=draw(st.booleans()), capturable=draw(st.booleans())),
        budget=draw(_budgets()),
        pool=draw(st.sampled_from(Pool)),
    )


# Machines and backends -------------------------------------------------------------------------


@st.composite
def environments(draw: DrawFn) -> Environment:
    """Return machines: CPUs and GPUs of every generation, with any packages."""
    cuda = draw(st.booleans())
    capabilities = st.sampled_from(("7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "12.0"))
    device = Device(
        kind=DeviceKind.CUDA if cuda else DeviceKind.CPU,
        name=draw(_names()),
        capability=draw(capabilities) if cuda else None,
        memory=draw(st.sampled_from((16 << 30, 24 << 30, 48 << 30, 80 << 30, 180 << 30)) | _byte_counts()),
        multiprocessors=draw(st.integers(1, 200)) if cuda else None,
    )
    return Environment(
        name=draw(_names()),
        device=device,
        driver=draw(_maybe(_versions())),
        cuda=draw(_maybe(_versions())),
        packages=draw(st.dictionaries(_names(), _versions(), max_size=3)),
    )


def _supports() -> SearchStrategy[Support]:
    return st.builds(
        Support,
        level=st.sampled_from(GraphSupport),
        reason=_text(),
        max_num_reqs=st.none() | st.none() | _counts(),
        max_graphs=st.none() | st.none() | _counts(),
    )


@st.composite
def _fields(draw: DrawFn) -> MetadataField:
    fill = draw(st.sampled_from(Fill))
    counts = fill in (Fill.REPEAT_LAST, Fill.REAL_TOTAL)
    dtypes = ("int32", "int64") if counts else ("int32", "int64", "uint8", "bool", "float32")
    dtype = draw(st.sampled_from(dtypes))
    low, high = {"uint8": (0, 255), "bool": (0, 1)}.get(dtype, (-(1 << 31), (1 << 31) - 1))
    return MetadataField(
        name=draw(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)),
        axis=draw(st.sampled_from(Axis)),
        inner=None if counts else draw(_maybe(st.sampled_from(Axis))),
        dtype=dtype,
        fill=fill,
        value=draw(st.integers(low, high)) if fill is Fill.CONSTANT else None,
        lifetime=draw(st.sampled_from(Lifetime)),
        indexes=draw(_maybe(st.sampled_from(Bound))),
        where=draw(st.sampled_from(Where)),
        offset=draw(st.sampled_from((0, 1, 4096))),
        scale=draw(st.sampled_from((1, 8))),
        align=draw(st.sampled_from((1, 128))),
    )


def padding_contracts() -> SearchStrategy[PaddingContract]:
    """Return contracts of any few fields."""
    fields = st.lists(_fields(), max_size=3, unique_by=lambda field: field.name)
    return fields.map(lambda drawn: PaddingContract(fields=tuple(drawn)))


@attrs.frozen(kw_only=True)
class FakeBackend:
    """A backend that answers what it was told to, and is pure as a real one must be."""

    name: str
    supports: Mapping[Role, Support]
    windowed: GraphSupport = GraphSupport.ALWAYS
    """At most this much for groups with a sliding window."""
    refreshes: Refresh = Refresh.HOST
    contract: PaddingContract = attrs.field(factory=PaddingContract)
    bytes_per_token: int = 0

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """Answer the support of the role, less for a sliding window."""
        told = self.supports[role]
        return told if model.window is None else replace(told, level=min(told.level, self.windowed))

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Answer one contract for all."""
        return self.contract

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """Answer one refresh for all."""
        return self.refreshes

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Answer bytes for the largest entry."""
        tokens = max((entry.num_tokens for entry in entries), default=0)
        return Workspace(device=tokens * self.bytes_per_token, pinned=limits.max_num_reqs, formula="tokens")


@st.composite
def backends(draw: DrawFn, name: str | None = None) -> FakeBackend:
    """Return backends of any support by role, caps, refresh and padding contract."""
    return FakeBackend(
        name=draw(_names()) if name is None else name,
        supports={role: draw(_supports()) for role in Role},
        windowed=draw(st.sampled_from(GraphSupport)),
        refreshes=draw(st.sampled_from(Refresh)),
        contract=draw(padding_contracts()),
        bytes_per_token=draw(st.integers(0, 4096)),
    )


@st.composite
def registries(draw: DrawFn, names: Iterable[str] = BACKENDS) -> Registry:
    """Return registries with one backend of each name."""
    return Registry(
        Registered(backend=draw(backends(name)), distribution=f"dist-{name}", version=draw(_versions()))
        for name in names
    )


@attrs.frozen(kw_only=True)
class Deployment:
    """A spec, the machine it is for, and the backends it names: all that ``plan`` takes."""

    spec: Spec
    environment: Environment
    registry: Registry

    def plan(self) -> Plan:
        """Return the plan; raises ``PlanningError`` where there is none."""
        return plan(self.spec, self.environment, self.registry)


def deployments(*, max_reqs: int = 512, max_tokens: int = 4096) -> SearchStrategy[Deployment]:
    """Return specs with an environment and a registry that has every backend they name."""
    return st.builds(
        Deployment,
        spec=specs(max_reqs=max_reqs, max_tokens=max_tokens),
        environment=environments(),
        registry=registries(),
    )


# Plans and batches -----------------------------------------------------------------------------


@st.composite
def plans(draw: DrawFn, *, max_reqs: int = 64, max_tokens: int = 4096) -> Plan:
    """Return plans that the planner made."""
    try:
        return draw(deployments(max_reqs=max_reqs, max_tokens=max_tokens)).plan()
    except PlanningError:
        reject()


def _entries(lora: bool) -> SearchStrategy[Entry]:
    """Return graphs as no planner would make them: any extents beside each other."""
    shapes = {
        "num_tokens": _counts(),
        "query_len": _maybe(st.sampled_from((1, 2, 3, 4))),
        "active_loras": st.sampled_from((0, 1, 2, 4, 5)) if lora else st.just(0),
        "draft_steps": st.none() | st.integers(1, 3),
    }
    anything = st.builds(
        Entry,
        mode=st.sampled_from((GraphMode.FULL, GraphMode.PIECEWISE)),
        num_reqs=_maybe(_counts()),
        **shapes,
    )
    return anything | anything.map(
        lambda e: attrs.evolve(e, num_reqs=e.num_tokens, num_tokens=e.num_tokens * (e.query_len or 1))
    )


@st.composite
def _waivers(draw: DrawFn) -> Waiver:
    first = draw(st.integers(0, 64))
    return Waiver(
        kind=draw(st.sampled_from(Kind)),
        query_len=draw(_maybe(st.integers(1, 4))),
        first=first,
        last=first + draw(st.integers(0, 64)),
        min_loras=draw(st.integers(0, 2)),
        max_loras=draw(st.integers(0, 6)),
        reason=draw(st.sampled_from(Reason)),
        says=draw(_text()),
    )


@st.composite
def _role_plans(draw: DrawFn, role: Role, lora: bool) -> RolePlan:
    group = st.builds(
        GroupPlan,
        name=_names(),
        layers=st.integers(0, 6),
        window=_maybe(st.integers(0, 4096)),
        backend=st.sampled_from(BACKENDS),
        distribution=_names(),
        version=_text(),
        support=_supports(),
        workspace=st.builds(Workspace, device=_byte_counts(), pinned=_byte_counts(), formula=_text()),
        padding=padding_contracts(),
    )
    decision = st.builds(
        Decision,
        rule=st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True),
        before=_text(),
        after=_text(),
        role=st.sampled_from(Role),
        backend=_maybe(_text()),
        group=_maybe(_text()),
        says=_text(),
    )
    return RolePlan(
        role=role,
        requested=draw(st.sampled_from(GraphMode)),
        mode=draw(st.sampled_from(GraphMode)),
        groups=tuple(draw(st.lists(group, max_size=2))),
        decisions=tuple(draw(st.lists(decision, max_size=2))),
        entries=tuple(draw(st.lists(_entries(lora), max_size=12))),
        waivers=tuple(draw(st.lists(_waivers(), max_size=2))),
        inputs=draw(padding_contracts()).fields,
    )


@st.composite
def arbitrary_plans(draw: DrawFn, *, max_tokens: int = 4096) -> Plan:
    """Return valid plans as a person could write them, however unwise: overlaps, holes, any order."""
    spec = draw(specs(max_reqs=64, max_tokens=max_tokens))
    roles = draw(st.lists(st.sampled_from(Role), min_size=1, unique=True))
    return Plan(
        spec=digest(spec),
        environment=draw(environments()),
        model=spec.model,
        limits=spec.limits,
        speculative=spec.speculative,
        lora=spec.lora,
        parallel=spec.parallel,
        piecewise=spec.piecewise,
        budget=spec.budget,
        pool=spec.pool,
        roles=tuple(draw(_role_plans(role, spec.lora is not None)) for role in roles),
    )


@st.composite
def batches(draw: DrawFn, plan: Plan, role: Role | None = None) -> Batch:
    """Return batches for a plan: admissible ones and others, biased to the edges of its sizes.

    Of one role where it is given, else of any that the plan has.
    """
    assume(plan.roles)
    planned = draw(st.sampled_from(plan.roles)) if role is None else plan.role(role)
    families = decode_families(planned.role, plan)
    edges = {1, plan.limits.max_num_reqs} | {entry.num_reqs or entry.num_tokens for entry in planned.entries}
    for family in families:
        edges |= {edge for interval in family.requests.intervals for edge in interval}
    near = st.sampled_from([edge + shift for edge in sorted(edges) for shift in (-1, 0, 1)])
    num_reqs = draw(near | st.integers(-1, plan.limits.max_num_reqs + 2))
    lengths = (
        {1}
        | {family.query_len for family in families}
        | {e.query_len for e in planned.entries if e.query_len}
    )
    query_len = draw(st.none() | st.sampled_from(sorted(lengths)) | st.integers(0, 5))
    totals = {plan.limits.max_num_tokens} | {entry.num_tokens for entry in planned.entries}
    any_total = st.sampled_from([total + shift for total in sorted(totals) for shift in (-1, 0, 1)])
    total: SearchStrategy[int] = any_total | st.integers(num_reqs, num_reqs + 64)
    if query_len is not None:
        total = st.just(num_reqs * query_len) | st.just(num_reqs * query_len) | total
    most_loras = 0 if plan.lora is None else plan.lora.max_active + 1
    return Batch(
        role=planned.role,
        num_reqs=num_reqs,
        num_tokens=draw(total),
        query_len=query_len,
        past_prompt=draw(st.booleans()),
        active_loras=draw(st.just(0) | st.integers(0, most_loras) | st.integers(-1, most_loras + 1)),
    )


# Files -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Document:
    """The text of a file that is, or once was, a record of ``kind``."""

    kind: type[Any]
    text: str
    mutated: bool


_SCRAPS = (
    "",
    "null",
    "no",
    "8.7",
    '"8"',
    "-1",
    "99999999999999999999",
    "[]",
    "{}",
    "[1, 2",
    "!!python/name:os.system x",
    "&a [*a]",
    "*a",
    "<<: {a: 1}",
    "? x",
    "---",
    "\t",
    "\x00",
    "é",
    "FULL",
    ".inf",
)


@st.composite
def _mutations(draw: DrawFn, text: str) -> str:
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    scrap = draw(st.sampled_from(_SCRAPS) | st.text(max_size=8))
    way = draw(st.sampled_from(("drop", "double", "value", "insert", "cut", "indent")))
    if way == "drop":
        del lines[at]
    elif way == "double":
        lines.insert(at, lines[at])
    elif way == "value":
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon} {scrap}"
    elif way == "insert":
        lines.insert(at, scrap)
    elif way == "cut":
        del lines[at + 1 :]
        lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
    else:
        lines[at] = "  " + lines[at]
    return "\n".join(lines)


@st.composite
def documents(draw: DrawFn) -> Document:
    """Return the text of specs, environments and plans, half of them damaged in a place or two."""
    value: Any = draw(specs(max_reqs=64) | environments() | arbitrary_plans())
    text, damage = codec.dumps(value), draw(st.sampled_from((0, 0, 1, 2)))
    for _ in range(damage):
        text = draw(_mutations(text))
    return Document(kind=type(value), text=text, mutated=damage > 0)
