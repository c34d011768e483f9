"""Attention groups: what each asks of its backend, and what the backend supports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from capture_planner.errors import BackendError, PlanningError, Problem
from capture_planner.modes import Role
from capture_planner.planning.resolve import GroupSupport
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records.backend import Attention
from capture_planner.records.environment import Environment
from capture_planner.records.spec import GroupSpec, Spec


@attrs.frozen(kw_only=True)
class Group(GroupSupport):
    """An attention group while it is planned."""

    spec: GroupSpec
    registered: RegisteredBackend
    attention: Attention


def ask_backends(spec: Spec, role: Role, environment: Environment, registry: Registry) -> tuple[Group, ...]:
    """Return the attention groups of a role with the support that their backends declare.

    Raises ``PlanningError`` for a backend that is not installed.
    """
    groups = []
    for index, group in enumerate(groups_of(spec, role)):
        registered = _backend(spec, role, index, group, registry)
        attention = Attention.of(spec, role, layers=group.layers, window=group.window)
        support = registered.support(role, attention, environment)
        named = {"group": group.name, "backend": registered.name}
        groups.append(Group(spec=group, registered=registered, attention=attention, support=support, **named))
    return tuple(groups)


def _backend(spec: Spec, role: Role, index: int, group: GroupSpec, registry: Registry) -> RegisteredBackend:
    """Return a group's backend; where it is unknown, the error points to the place that names it."""
    wanted = spec.roles.of(role)
    path: tuple[str | int, ...]
    if group.backend is not None:
        name, path = group.backend, ("roles", role.value, "groups", index, "backend")
    elif wanted.backend is not None:
        name, path = wanted.backend, ("roles", role.value, "backend")
    else:
        name, path = spec.backend, ("backend",)
    try:
        return registry[name]
    except BackendError as error:
        raise PlanningError([Problem(path=path, message=str(error))]) from None


def fewest_graphs(groups: Iterable[Group]) -> Group | None:
    """Return the group whose backend can hold the fewest full graphs; None: no backend has a limit."""
    capped = [group for group in groups if group.support.max_graphs is not None]
    return min(capped, key=lambda group: group.support.max_graphs or 0, default=None)


def groups_of(spec: Spec, role: Role) -> tuple[GroupSpec, ...]:
    """Return the attention groups of a role: the spec's, or one group of all layers."""
    if groups := spec.roles.of(role).groups:
        return groups
    return (GroupSpec(name="all", layers=spec.num_layers(role)),)


def attentions(spec: Spec) -> Iterator[tuple[Role, str, Attention]]:
    """Yield role, group name and what the group asks of its backend, for every group."""
    for role in spec.active_roles:
        for group in groups_of(spec, role):
            yield role, group.name, Attention.of(spec, role, layers=group.layers, window=group.window)
