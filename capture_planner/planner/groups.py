"""Ask the backends: what each attention group of a role needs, and how far its backend goes."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from capture_planner.contract import Attention, Support
from capture_planner.environment import Environment
from capture_planner.errors import BackendError, PlanningError, Problem
from capture_planner.modes import Role
from capture_planner.registry import Registered, Registry
from capture_planner.resolve import GroupSupport
from capture_planner.spec import GroupSpec, Spec


@attrs.frozen(kw_only=True)
class Group:
    """An attention group while it is planned."""

    spec: GroupSpec
    registered: Registered
    attention: Attention
    support: Support

    @property
    def for_resolution(self) -> GroupSupport:
        return GroupSupport(group=self.spec.name, backend=self.registered.name, support=self.support)


def ask_backends(spec: Spec, role: Role, environment: Environment, registry: Registry) -> tuple[Group, ...]:
    """Ask the backend of each attention group of a role how far it goes."""
    groups = []
    for index, group in enumerate(groups_of(spec, role)):
        registered = _backend(spec, role, index, group, registry)
        attention = attention_of(spec, role, group)
        support = registered.support(role, attention, environment)
        groups.append(Group(spec=group, registered=registered, attention=attention, support=support))
    return tuple(groups)


def _backend(spec: Spec, role: Role, index: int, group: GroupSpec, registry: Registry) -> Registered:
    """Find a group's backend; an unknown one is a problem at the place that names it."""
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


def groups_of(spec: Spec, role: Role) -> tuple[GroupSpec, ...]:
    """Return the attention groups of a role: those that the spec names, or one of all layers."""
    if groups := spec.roles.of(role).groups:
        return groups
    drafts = spec.speculative is not None and role.is_drafter
    layers = spec.speculative.model.num_layers if spec.speculative and drafts else spec.model.num_layers
    return (GroupSpec(name="all", layers=layers),)


def attentions(spec: Spec) -> Iterator[tuple[Role, str, Attention]]:
    """Return what every group of every role asks of a backend."""
    for role in spec.active_roles:
        for group in groups_of(spec, role):
            yield role, group.name, attention_of(spec, role, group)


def attention_of(spec: Spec, role: Role, group: GroupSpec) -> Attention:
    """Say what a group asks of its backend, in one rank's heads."""
    model, tensor = spec.model, spec.parallel.tensor
    draft = spec.speculative.model if spec.speculative and role.is_drafter else None
    num_heads = (draft and draft.num_heads) or model.num_heads
    num_kv_heads = (draft and draft.num_kv_heads) or model.num_kv_heads
    return Attention(
        num_layers=group.layers,
        num_heads=max(num_heads // tensor, 1),
        num_kv_heads=max(num_kv_heads // tensor, 1),
        head_dim=(draft and draft.head_dim) or model.head_dim,
        max_model_len=model.max_model_len,
        max_query_len=max_query_len(spec, role),
        window=group.window,
        causal=model.causal,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype or model.dtype,
        latent=draft.latent if draft else model.latent,
        sinks=draft.sinks if draft else model.sinks,
        decode_context=spec.parallel.decode_context,
    )


def max_query_len(spec: Spec, role: Role) -> int:
    """Return the longest uniform query of a role: 1 + the largest k that is scheduled, or 1."""
    if spec.speculative is None or role is Role.DRAFT_DECODE:
        return 1
    return 1 + max(k for _, _, k in spec.speculative.tiers(spec.limits.max_num_reqs))
