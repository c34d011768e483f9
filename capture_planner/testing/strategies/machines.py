"""Machines, and backends that only plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention, Axis, Fill, MetadataField, PaddingContract, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Spec
from capture_planner.testing.strategies.measurements import measurements
from capture_planner.testing.strategies.specs import specs
from capture_planner.testing.strategies.values import (
    BACKENDS,
    BYTE_COUNTS,
    NAMES,
    TEXTS,
    VERSIONS,
    composite,
    counts,
    maybe,
    one_of,
    record_of,
    words,
)

_MEMORIES = one_of((16 << 30, 24 << 30, 48 << 30, 80 << 30, 180 << 30)) | BYTE_COUNTS


@composite
def environments(draw: DrawFn) -> Environment:
    """Return machines: CPUs and GPUs of every generation, with any packages."""
    cuda = draw(st.booleans())
    capabilities = one_of(("7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "12.0"))
    device = record_of(
        draw,
        Device,
        kind=DeviceKind.CUDA if cuda else DeviceKind.CPU,
        capability=draw(capabilities) if cuda else None,
        memory=draw(_MEMORIES),
        multiprocessors=draw(st.integers(1, 200)) if cuda else None,
    )
    return record_of(draw, Environment, device=device)


SUPPORTS = st.builds(
    Support,
    level=one_of(GraphSupport),
    reason=TEXTS,
    max_num_reqs=st.none() | st.none() | counts(),
    max_graphs=st.none() | st.none() | counts(),
)


@composite
def _fields(draw: DrawFn) -> MetadataField:
    fill = draw(one_of(Fill))
    # These fills are for vectors of whole numbers; ``MetadataField`` refuses others.
    counts = fill in (Fill.REPEAT_LAST, Fill.REAL_TOTAL)
    dtypes = ("int32", "int64") if counts else ("int32", "int64", "uint8", "bool", "float32")
    dtype = draw(one_of(dtypes))
    low, high = {"uint8": (0, 255), "bool": (0, 1)}.get(dtype, (-(1 << 31), (1 << 31) - 1))
    return record_of(
        draw,
        MetadataField,
        name=draw(words("abcdefghijklmnopqrstuvwxyz", "0123456789_", 8)),
        inner=None if counts else draw(maybe(one_of(Axis))),
        dtype=dtype,
        fill=fill,
        value=draw(st.integers(low, high)) if fill is Fill.CONSTANT else None,
        offset=draw(one_of((0, 1, 4096))),
        scale=draw(one_of((1, 8))),
        align=draw(one_of((1, 128))),
    )


@functools.cache
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
        # So that the groups of a role may differ in their support.
        return told if model.window is None else replace(told, level=min(told.level, self.windowed))

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        return self.contract

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        return self.refreshes

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        tokens = max((entry.num_tokens for entry in entries), default=0)
        return Workspace(device=tokens * self.bytes_per_token, pinned=limits.max_num_reqs, formula="tokens")


@composite
def backends(draw: DrawFn, name: str | None = None) -> FakeBackend:
    """Return backends of any support by role, caps, refresh and padding contract."""
    return FakeBackend(
        name=draw(NAMES) if name is None else name,
        supports={role: draw(SUPPORTS) for role in Role},
        windowed=draw(one_of(GraphSupport)),
        refreshes=draw(one_of(Refresh)),
        contract=draw(padding_contracts()),
        bytes_per_token=draw(st.integers(0, 4096)),
    )


@composite
def registries(draw: DrawFn, names: Iterable[str] = BACKENDS) -> Registry:
    """Return registries with one backend of each name."""
    return Registry(_registered(draw(backends(name)), draw(VERSIONS)) for name in names)


def _registered(backend: FakeBackend, version: str) -> RegisteredBackend:
    return RegisteredBackend(backend=backend, distribution=f"dist-{backend.name}", version=version)


_ALWAYS = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="it is not asked"))
_UNUSED = {name: _registered(FakeBackend(name=name, supports=_ALWAYS), "1") for name in BACKENDS}


def _named(spec: Spec) -> tuple[str, ...]:
    """Return the names of the backends that a spec chooses: no other one is asked."""
    roles = [spec.roles.of(role) for role in Role]
    chosen = {each.backend for each in roles} | {group.backend for each in roles for group in each.groups}
    return tuple(sorted({spec.backend, *(name for name in chosen if name is not None)}))


@attrs.frozen(kw_only=True)
class PlanInputs:
    """A spec, the machine it is for, the backends it names, and measurements: all that ``plan`` takes."""

    spec: Spec
    environment: Environment
    registry: Registry
    measurements: Measurements | None = None

    def plan(self) -> Plan:
        """Return the plan; raises ``PlanningError`` if none exists."""
        return plan(self.spec, self.environment, self.registry, self.measurements)


@composite
def deployments(
    draw: DrawFn,
    *,
    max_reqs: int = 512,
    max_tokens: int = 4096,
    measured: bool | None = None,
    where: Callable[[Spec], bool] | None = None,
    varying: bool = True,
) -> PlanInputs:
    """Return specs with an environment, a registry that has every backend they name, and what they measured.

    :param measured: whether sizes are measured; None: sometimes, and the schedule of draft lengths too.
    :param where: which specs are wanted; others are left before anything else is drawn.
    :param varying: whether decodes may vary in length.
    """
    scheduled = measured is None
    # Only a deployment has the measurements that a measured schedule needs.
    each = specs(max_reqs=max_reqs, max_tokens=max_tokens, measured=measured, scheduled=scheduled, varying=varying)
    # Filtered before the rest is drawn, which takes most of the time.
    spec = draw(each if where is None else each.filter(where))
    environment, drawn = draw(environments()), draw(registries(_named(spec)))
    # The registry has every name that a spec can choose, so no plan fails for a missing backend.
    registry = Registry((_UNUSED | dict(drawn)).values())
    is_measured = spec.sizes.policy is Policy.MEASURED or (
        spec.speculative is not None and spec.speculative.is_measured
    )
    known = draw(measurements(spec, environment)) if is_measured else None
    return PlanInputs(spec=spec, environment=environment, registry=registry, measurements=known)
