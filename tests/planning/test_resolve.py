"""What a resolution says; the ladder itself is in property/test_law6_resolution.py."""

import pytest

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.planning.resolve import (
    GroupSupport,
    ResolvedMode,
    resolve,
    resolve_draft_decode,
    resolve_draft_prefill,
    resolve_varying,
    weakest,
)
from capture_planner.records.backend import Support
from capture_planner.records.spec import Piecewise


def group(level, name="all"):
    """A group on the backend alpha."""
    return GroupSupport(group=name, backend="alpha", support=Support(level=level, reason="SM75"))


def test_resolve_rejects_full_without_full_graph_support():
    """As in vLLM."""
    full = ResolvedMode(role=Role.TARGET, mode=GraphMode.FULL)
    with pytest.raises(PlanningError) as caught:
        resolve(full, [group(GraphSupport.NEVER)], max_query_len=1, piecewise=Piecewise())
    assert str(caught.value) == (
        "mode: FULL is not possible: alpha declares NEVER: SM75; "
        "request PIECEWISE or FULL_AND_PIECEWISE, or choose another backend"
    )


def test_weakest_returns_the_first_of_equals():
    """So that the answer does not depend on anything else."""
    groups = [group(GraphSupport.ALWAYS, "a"), group(GraphSupport.NEVER, "b"), group(GraphSupport.NEVER, "c")]
    assert weakest(groups).group == "b"


@pytest.mark.parametrize(
    ("wanted", "rule", "after", "why"),
    [
        (GraphMode.PIECEWISE, "role-asks-for-less", "PIECEWISE", "the lower mode is used"),
        (GraphMode.FULL, "role-asks-for-more", "FULL_AND_PIECEWISE", "is never above its target's"),
    ],
)
def test_drafter_mode_other_than_the_targets_is_a_decision(wanted, rule, after, why):
    """Less holds, more does not; both are decisions."""
    found = resolve_draft_prefill(
        GraphMode.FULL_AND_PIECEWISE, wanted, [group(GraphSupport.ALWAYS)], max_query_len=4, piecewise=Piecewise()
    )
    assert [(d.rule, d.after) for d in found.decisions] == [(rule, after)]
    assert why in found.decisions[0].message


def test_decisions_without_a_backend_name_none():
    """Neither the pieces of a model nor the nature of a draft decode is a backend's doing."""
    pieces = resolve(
        ResolvedMode(role=Role.TARGET, mode=GraphMode.FULL_AND_PIECEWISE),
        [group(GraphSupport.ALWAYS)],
        max_query_len=1,
        piecewise=Piecewise(capturable=False),
    )
    every = [group(GraphSupport.ALWAYS)]
    modules = resolve_draft_prefill(
        GraphMode.FULL_AND_PIECEWISE, None, every, max_query_len=4, piecewise=Piecewise(), modules=True
    )
    none = resolve_draft_decode(GraphMode.PIECEWISE, None, [group(GraphSupport.ALWAYS)])
    full = resolve_draft_decode(GraphMode.FULL, None, [group(GraphSupport.ALWAYS)])
    for found, rule in (
        (pieces, "piecewise-not-capturable"),
        (modules, "modules-never-piecewise"),
        (none, "draft-decode-never-piecewise"),
        (full, "draft-decode-only"),
    ):
        assert [(d.rule, d.backend, d.group) for d in found.decisions] == [(rule, None, None)]


@pytest.mark.parametrize(("query_len", "mode"), [(1, GraphMode.FULL_DECODE_ONLY), (2, GraphMode.PIECEWISE)])
def test_decodes_of_two_tokens_need_uniform_batch(query_len, mode):
    """K = 1 is speculation: a backend for single tokens cannot run it in a full graph."""
    groups = [group(GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)]
    decodes = ResolvedMode(role=Role.TARGET, mode=GraphMode.FULL_DECODE_ONLY)
    found = resolve(decodes, groups, max_query_len=query_len, piecewise=Piecewise())
    assert found.mode is mode


def test_draft_decode_names_the_unsupporting_backend():
    """And its reason."""
    found = resolve_draft_decode(GraphMode.FULL, None, [group(GraphSupport.NEVER)])
    assert [d.rule for d in found.decisions] == ["draft-decode-only", "decode-full-unsupported"]
    assert found.decisions[-1].backend == "alpha"
    assert "SM75" in found.decisions[-1].message


@pytest.mark.parametrize("level", GraphSupport)
@pytest.mark.parametrize("mode", GraphMode)
def test_decodes_vary_in_full_graphs_where_the_weakest_group_takes_any_batch(mode, level):
    """Elsewhere the decision names the backend with its reason; decodes without full graphs take any lengths."""
    found = resolve_varying(Role.TARGET, mode, [group(GraphSupport.ALWAYS, "a"), group(level, "b")])
    assert (found is None) == (mode.decode_mode is not GraphMode.FULL or level is GraphSupport.ALWAYS)
    if found is not None:
        assert (found.before, found.after, found.backend, found.group) == ("varying", "uniform", "alpha", "b")
        assert f"alpha declares {level.name}: SM75" in found.message
