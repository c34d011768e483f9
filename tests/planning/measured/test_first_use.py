"""Lazy capture: what is captured at start pays for itself by the traffic, or is the largest graph of its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs
from hypothesis import event, given, reject
from hypothesis import strategies as st

from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.diff import diff
from capture_planner.analysis.explain import explain
from capture_planner.analysis.lint import lint
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import PlanningError
from capture_planner.modes import Chain, GraphMode, GraphSupport, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import passes_of, steps_of
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import grouped, replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import decode_families
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.profile import GraphCost
from capture_planner.records.spec import CapturePolicy, CaptureTiming, Limits, Policy, Sizes, Spec
from capture_planner.report.plans import price_lines
from capture_planner.testing import FakeBackend, PlanInputs, deployments
from capture_planner_runner.capture.variants import at_start
from support.measured import GPU, MODEL, decodes, lines, profile

LAZY = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 29, seconds_per_minute=1.0)


def planned(inputs: PlanInputs) -> tuple[Plan, Plan]:
    """Return the plan of a deployment with all graphs at start, and with some on first use."""
    specs = [replace(inputs.spec, capture=timing) for timing in (CaptureTiming(), LAZY)]
    try:
        plain, lazy = (attrs.evolve(inputs, spec=spec).plan() for spec in specs)
    except PlanningError:
        reject()
    return plain, lazy


def ladders(role: RolePlan) -> Iterator[tuple[tuple[GraphMode, int | None, ...], dict[int, list[Entry]]]]:
    """Yield the graphs of each kind of batch, by their tokens."""
    for kind, entries in grouped(role.entries, lambda e: (e.mode, e.query_len, e.draft_steps, e.max_query_len)).items():
        yield kind, grouped(entries, lambda entry: entry.num_tokens)


def largest_decodes(plan: Plan, role: RolePlan) -> set[int]:
    """Return the tokens of the largest decodes of a role, where those have no graphs of their own."""
    if role.mode.is_separate:
        return set()
    return {family.requests.ceiling * family.query_len for family in decode_families(role.role, plan)}


@given(deployments(max_reqs=32, max_tokens=256, measured=False))
def test_without_traffic_only_the_largest_graphs_are_captured_at_start(inputs: PlanInputs) -> None:
    """And nothing else differs: the graphs are the same, every batch has one at start, and a decision says so."""
    plain, lazy = planned(inputs)
    assert replace(lazy, capture=CaptureTiming(), spec_digest=plain.spec_digest, roles=()) == replace(plain, roles=())
    assert "CP047" not in {finding.rule.code for finding in lint(lazy)}
    for before, role in zip(plain.roles, lazy.roles, strict=True):
        assert (role.entries, role.waivers, role.groups) == (before.entries, before.waivers, before.groups)
        for _, sizes in ladders(role):
            for tokens, entries in sizes.items():
                assert (entries[0] in role.lazy) == all(entry in role.lazy for entry in entries)
                if entries[0] not in role.lazy:
                    assert tokens == max(sizes) or tokens in largest_decodes(lazy, role)
            assert sizes[max(sizes)][0] not in role.lazy
        if role.entries:
            assert "no traffic was given" in role.decisions[-1].message


@given(deployments(max_reqs=32, max_tokens=256, measured=False))
def test_what_is_captured_on_first_use_is_said(inputs: PlanInputs) -> None:
    """By the cost of the plan, by what changed, and by the explanation of each batch: it names what serves before."""
    plain, lazy = planned(inputs)
    is_gpu = inputs.environment.device.kind is DeviceKind.CUDA
    assert any("on first use, within 512MiB" in line for line in price_lines(lazy)) == (is_gpu and lazy.num_lazy > 0)
    started = Dispatcher(at_start(lazy))
    for changes, words in ((diff(plain, lazy), "leaves to their first use"), (diff(lazy, plain), "captures at start")):
        said = [change.entries for change in changes if change.subject == "lazy"]
        assert [entry for each in said for entry in each] == [entry for role in lazy.roles for entry in role.lazy]
        assert all(words in change.message for change in changes if change.subject == "lazy")
    for cell in coverage(lazy).cells:
        explained, before = explain(lazy, cell.largest), started.dispatch(cell.largest).entry
        is_lazy = cell.entry in lazy.role(cell.role).lazy
        assert ("captured on first use" in explained.message) == is_lazy
        assert not is_lazy or (before is not None and explained.message.endswith(str(before)))


@given(deployments(max_reqs=32, max_tokens=256, measured=True))
def test_with_traffic_a_graph_is_captured_at_start_if_its_time_comes_back(inputs: PlanInputs) -> None:
    """By every pass that it serves: on the next larger graph at start they would take longer, by what it takes."""
    assert_worth(inputs, planned(inputs)[1])


def assert_worth(inputs: PlanInputs, plan: Plan) -> None:
    """Add up, for each graph of a lazy plan, what it saves and what its capture takes."""
    assert inputs.measurements is not None
    assert inputs.measurements.traffic is not None
    costs, dispatcher = Costs(inputs.measurements.profile), Dispatcher(plan)
    uses: Counter[tuple[Role, Entry | None]] = Counter()
    for batch, count in steps_of(inputs.measurements.traffic, plan).counts.items():
        for each, repeats in passes_of(batch, plan):
            entry = dispatcher.dispatch(each).entry
            uses[each.role, entry] += count * (1 if entry is None or entry.draft_steps else repeats)
    for role in plan.roles:
        for kind, sizes in ladders(role):
            family = (role.role, *kind[:3])
            curve, cost = costs.graph(family), costs.cost_of(family)
            at_start = sorted(tokens for tokens, entries in sizes.items() if entries[0] not in role.lazy)
            assert at_start[-1] == max(sizes)
            for tokens, entries in sizes.items():
                if tokens == max(sizes) or tokens in largest_decodes(plan, role):
                    assert entries[0] not in role.lazy
                    continue
                above = next(each for each in at_start if each > tokens)
                passes = sum(uses[role.role, entry] for entry in entries)
                saved = passes * (curve(above) - curve(tokens)) / 1000
                seconds = plan.budget.seconds_per_graph
                if cost is not None:
                    seconds = cost.seconds + cost.seconds_per_token * tokens
                is_worth = passes > 0 and saved >= seconds * len(entries)
                assert (entries[0] in role.lazy) == (not is_worth)
                event(f"worth it: {is_worth}")


@given(st.dictionaries(st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 90), min_size=2))
def test_graphs_of_several_tokens_pay_for_themselves(counts: dict[int, int]) -> None:
    """Times that double with the size, decodes of four tokens each, and draft steps that are replayed twice."""
    backend = FakeBackend(name="alpha", supports=dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="told")))
    costs = [GraphCost(role=role, mode=GraphMode.FULL, mib=1.0, seconds=0.4, seconds_per_token=0.05) for role in Role]
    families = [(role, mode, None, None) for role in Role for mode in (GraphMode.FULL, GraphMode.NONE)]
    curves = lines(families, (1, 65), lambda index: (0.5, 32.5) if index % 2 == 0 else (40.0, 104.0))
    inputs = PlanInputs(
        spec=Spec(
            model=MODEL,
            limits=Limits(max_num_reqs=16, max_num_tokens=128),
            backend="alpha",
            mode=GraphMode.FULL_DECODE_ONLY,
            speculative=Speculative(method=Method.EAGLE, num_tokens=3, chain=Chain.SINGLE),
            sizes=Sizes(policy=Policy.POWERS_OF_TWO),
            capture=LAZY,
        ),
        environment=Environment(name="h100", device=GPU),
        registry=Registry([RegisteredBackend(backend=backend, distribution="d", version="1")]),
        measurements=Measurements(
            profile=replace(profile(), curves=curves, graphs=tuple(costs)), traffic=decodes(counts)
        ),
    )
    assert_worth(inputs, inputs.plan())
