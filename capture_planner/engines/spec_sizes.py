"""The sizes of a spec that make its plan capture the graphs that an engine captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.spec_of import DerivedSpec
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Roles, Sizes, Spec
from capture_planner.records.text import counted

Graph = tuple[Role, Entry]


def with_sizes(derived: DerivedSpec, emulation: Emulation, plan: Callable[[Spec], Plan]) -> DerivedSpec:
    """Return the spec with the sizes whose plan comes closest to the engine's graphs, and what differs still.

    :param derived: the deployment, with sizes to be chosen.
    :param plan: makes the plan of a spec on the engine's machine.
    """
    theirs = graphs_of(emulation)
    best: tuple[int, Spec, frozenset[Graph]] | None = None
    reasons: list[str] = []
    for spec in _candidates(derived.spec, emulation):
        try:
            ours = frozenset((role.role, entry) for role in plan(spec).roles for entry in role.entries)
        except CapturePlannerError as error:
            reasons.append(str(error))
            continue
        missing = len(ours ^ theirs)
        if best is None or missing < best[0]:
            best = (missing, spec, ours)
        if not missing:
            break
    if best is None:
        says = f"no plan can be made of it: {reasons[-1]}"
        return attrs.evolve(derived, assumptions=(*derived.assumptions, says))
    _, spec, ours = best
    return attrs.evolve(derived, spec=spec, assumptions=(*derived.assumptions, *_differs(theirs, ours, emulation)))


def graphs_of(emulation: Emulation) -> frozenset[Graph]:
    """Return each graph of an engine once, as a plan has it."""
    return frozenset((graph.role, graph.entry) for graph in emulation.graphs)


def _differs(theirs: frozenset[Graph], ours: frozenset[Graph], emulation: Emulation) -> Iterator[str]:
    for graphs, where in ((theirs - ours, "its plan leaves out"), (ours - theirs, "its plan adds")):
        if graphs:
            role, entry = max(graphs, key=lambda graph: (graph[1].num_tokens, graph[0].value))
            count = counted(len(graphs), "graph")
            yield f"{where} {count} of {emulation.engine}'s {len(theirs)}, such as {role} {entry}"


def _candidates(spec: Spec, emulation: Emulation) -> Iterator[Spec]:
    """Yield specs whose plans may have the engine's graphs, the shortest first."""
    name = emulation.engine.replace("-", "_")
    if name in {policy.value for policy in Policy}:
        policy = Policy(name)
        yield replace(spec, sizes=Sizes(policy=policy))
        if policy is Policy.VLLM and emulation.sizes:
            yield replace(spec, sizes=Sizes(policy=policy, num_tokens=emulation.sizes))
        tokens, reqs = _sizes_of(emulation, Role.TARGET)
        yield replace(
            spec, sizes=Sizes(policy=policy, max_tokens=max(tokens, default=None), max_reqs=max(reqs, default=None))
        )
    explicit = {role: _explicit(emulation, role) for role in emulation.modes}
    if any(explicit.values()):
        roles = {
            role.value: replace(spec.roles.of(role), sizes=explicit.get(role))
            if explicit.get(role)
            else spec.roles.of(role)
            for role in Role
        }
        yield replace(spec, roles=Roles(**roles))
    yield spec


def _explicit(emulation: Emulation, role: Role) -> Sizes | None:
    tokens, reqs = _sizes_of(emulation, role)
    return Sizes(policy=Policy.EXPLICIT, num_tokens=tokens or None, num_reqs=reqs or None) if tokens or reqs else None


def _sizes_of(emulation: Emulation, role: Role) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a role's graphs: tokens of those for any batch, requests of those for decodes."""
    entries = [graph.entry for graph in emulation.graphs if graph.role is role]
    tokens = {entry.num_tokens for entry in entries if entry.query_len is None}
    reqs = {entry.num_reqs for entry in entries if entry.query_len is not None and entry.num_reqs is not None}
    return tuple(sorted(tokens)), tuple(sorted(reqs))
