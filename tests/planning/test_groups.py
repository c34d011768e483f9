"""Attention groups: those of a spec, what each asks of its backend, and which backend that is."""

from __future__ import annotations

import pytest
from hypothesis import given

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.resolve import ask_backends, attentions, groups_of
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.spec import GroupSpec, Limits, Roles, RoleSpec, Spec
from capture_planner.testing import PlanInputs, deployments
from support.measured import MODEL
from support.runs import CPU


@given(deployments(max_reqs=8, max_tokens=32, measured=False))
def test_every_group_of_every_role_asks_its_backend(inputs: PlanInputs) -> None:
    """The spec's groups, or one of all layers; the backend's answer is that of its own name."""
    spec = inputs.spec
    listed = list(attentions(spec))
    for role in spec.active_roles:
        groups = spec.roles.of(role).groups or (GroupSpec(name="all", layers=spec.num_layers(role)),)
        assert groups_of(spec, role) == groups
        wanted = [
            (role, each.name, Attention.of(spec, role, layers=each.layers, window=each.window)) for each in groups
        ]
        assert [each for each in listed if each[0] is role] == wanted
        found = ask_backends(spec, role, inputs.environment, inputs.registry)
        assert [(role, each.spec.name, each.attention) for each in found] == wanted
        for each in found:
            assert each.registered.name == (each.spec.backend or spec.roles.of(role).backend or spec.backend)
            assert each.support == each.registered.support(role, each.attention, inputs.environment)
            assert (each.group, each.backend) == (each.spec.name, each.registered.name)


@pytest.mark.parametrize("place", ["group", "role", "spec"])
def test_backend_that_is_not_installed_is_named_where_it_is_given(place: str) -> None:
    """In the second group, in the role, or in the spec."""
    groups = tuple(
        GroupSpec(name=name, layers=MODEL.num_layers // 2, backend="nosuch" if place == name else None)
        for name in ("first", "group")
    )
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=4, max_num_tokens=16),
        mode=GraphMode.FULL,
        backend="nosuch" if place == "spec" else "reference",
        roles=Roles(target=RoleSpec(groups=groups, backend="nosuch" if place == "role" else None)),
    )

    backends = registry.load_backends()
    with pytest.raises(PlanningError) as raised:
        ask_backends(spec, Role.TARGET, CPU, backends)
    (problem,) = raised.value.problems
    assert (
        problem.path
        == {
            "group": ("roles", "target", "groups", 1, "backend"),
            "role": ("roles", "target", "backend"),
            "spec": ("backend",),
        }[place]
    )
    right = replace(spec, backend="reference", roles=Roles())
    assert len(ask_backends(right, Role.TARGET, CPU, backends)) == 1
