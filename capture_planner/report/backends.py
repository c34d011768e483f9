"""What each attention backend supports, as a table; the JSON is the records themselves."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from rich.console import Group, RenderableType
from rich.text import Text

from capture_planner.errors import BackendError
from capture_planner.modes import GraphSupport, Role
from capture_planner.planning.groups import attentions
from capture_planner.plugins.discovery import left_out
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Spec
from capture_planner.report.terminal import table_of

PLAIN_MODEL = Attention(
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=131072, max_query_len=1
)
"""The layers of a plain 8B model, for questions that name no deployment."""

_SHORT = {
    GraphSupport.ALWAYS: "always",
    GraphSupport.UNIFORM_BATCH: "uniform",
    GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE: "single",
    GraphSupport.NEVER: "never",
}


@attrs.frozen(kw_only=True)
class GroupLevel:
    """How far a backend goes inside a full graph, for one attention group on one environment."""

    environment: str
    role: Role
    group: str
    level: GraphSupport
    reason: str


@attrs.frozen(kw_only=True)
class BackendSupport:
    """One installed backend, on each environment."""

    name: str
    distribution: str
    version: str
    support: tuple[GroupLevel, ...]


def backend_support(
    registry: Registry, environments: Sequence[Environment], spec: Spec | None
) -> tuple[BackendSupport, ...]:
    """Ask each backend about each environment: for the groups of a spec, or for a plain model.

    A backend that breaks its contract is left out with a ``PluginWarning``.
    """
    groups = [(Role.TARGET, "all", PLAIN_MODEL)] if spec is None else list(attentions(spec))
    found: list[BackendSupport] = []
    for name, registered in registry.items():
        with left_out(BackendError):
            levels = tuple(
                GroupLevel(
                    environment=environment.name, role=role, group=group, level=support.level, reason=support.reason
                )
                for environment in environments
                for role, group, attention in groups
                for support in (registered.support(role, attention, environment),)
            )
            found.append(
                BackendSupport(
                    name=name, distribution=registered.distribution, version=registered.version, support=levels
                )
            )
    return tuple(found)


def backends_table(backends: Sequence[BackendSupport], *, reasons: bool) -> RenderableType:
    """Backends against environments, or one environment with the reasons."""
    if reasons:
        groups = ((backend, each) for backend in backends for each in backend.support)
        rows = ((one.name, one.version, each.role, each.group, each.level.name, each.reason) for one, each in groups)
        return table_of("backend", "version", "role", "group", "support", "because", rows=rows)
    environments = list(dict.fromkeys(s.environment for backend in backends for s in backend.support))
    table = table_of("environment", *(backend.name for backend in backends))
    table.add_row("version", *(backend.version for backend in backends))
    for environment in environments:
        levels = (min(s.level for s in backend.support if s.environment == environment) for backend in backends)
        table.add_row(environment, *(_SHORT[level] for level in levels))
    legend = ", ".join(f"{short} = {level.name}" for level, short in _SHORT.items())
    return Group(table, Text(f"\n{legend}; add --environment NAME for the reasons", style="dim"))
