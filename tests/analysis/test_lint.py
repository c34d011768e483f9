"""The lint: for each rule a plan that has its bug, and the smallest fix that removes it."""

import re
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.lint import RULES, Severity, lint
from capture_planner.modes import Chain, GraphMode, GraphSupport, Pool, Reason, Refresh, Role
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Method, Model, Recurrent, Speculative
from capture_planner.records.plan import Decision, Forecast, Plan, Waiver
from capture_planner.records.spec import (
    Budget,
    CapturePolicy,
    CaptureTiming,
    Limits,
    Lora,
    Parallel,
    Policy,
    Sizes,
    Spec,
)
from capture_planner.testing import FakeBackend, plans

GPU = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)
MACHINE = Environment(name="h100", device=GPU)
MODEL = Model(name="m", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)
EAGLE = Speculative(method=Method.EAGLE, num_tokens=3)
FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def made(level=GraphSupport.ALWAYS, *, reqs=16, tokens=512, refresh=Refresh.HOST, **changes):
    """Plan for a backend of one level."""
    told = dict.fromkeys(Role, Support(level=level, reason="told"))
    backend = FakeBackend(name="alpha", supports=told, refreshes=refresh)
    registry = Registry([RegisteredBackend(backend=backend, distribution="d", version="1")])
    limits = Limits(max_num_reqs=reqs, max_num_tokens=tokens)
    return plan(Spec(**{"model": MODEL, "limits": limits, "backend": "alpha"} | changes), MACHINE, registry)


def with_role(whole: Plan, index=0, **changes):
    """Change one role of a plan."""
    roles = list(whole.roles)
    roles[index] = replace(roles[index], **changes)
    return replace(whole, roles=tuple(roles))


def entry(**changes):
    """A full graph of 16 single tokens, or another."""
    return Entry(**{"mode": FULL, "num_tokens": 16, "num_reqs": 16, "query_len": 1} | changes)


def plus(whole, *entries, index=0):
    """Add graphs to a role."""
    return with_role(whole, index, entries=(*whole.roles[index].entries, *entries))


PLAIN, DRAFTED = made(), made(speculative=EAGLE)
RECURRENT = made(model=replace(MODEL, recurrent=Recurrent(layers=1, state=64)))
LAZY = made(capture=CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 29, seconds_per_minute=1.0))
FUSED = made(speculative=EAGLE, refresh=Refresh.IN_GRAPH)
SUPPORT = PLAIN.roles[0].groups[0].support
WAIVER = Waiver(kind=Kind.MIXED, first=600, last=700, reason=Reason.SIZES, message="so decided")
STEP = Decision(rule="r", before="FULL", after="NONE", role=Role.DRAFT_DECODE, backend="x", message="s")


def on_groups(whole, index=0, **changes):
    """Change the support of a role's group."""
    group = whole.roles[index].groups[0]
    return with_role(whole, index, groups=(replace(group, support=replace(group.support, **changes)),))


# code: (a plan that has the finding, its smallest fix, which has not)
CASES = {
    "CP001": (with_role(PLAIN, entries=()), PLAIN),
    "CP002": (made(sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(4,), num_tokens=(16,))), PLAIN),
    "CP003": (made(tokens=8), PLAIN),
    "CP004": (replace(PLAIN, speculative=EAGLE), PLAIN),
    "CP010": (plus(PLAIN, entry(num_tokens=17)), PLAIN),
    "CP011": (plus(PLAIN, entry(num_tokens=32, query_len=2)), PLAIN),
    "CP012": (DRAFTED, replace(DRAFTED, speculative=None)),
    "CP013": (replace(PLAIN, parallel=Parallel(tensor=2, sequence=True)), PLAIN),
    "CP014": (replace(DRAFTED, speculative=replace(EAGLE, schedule=((1, 16, 4),))), DRAFTED),
    "CP015": (plus(PLAIN, entry(num_tokens=99, num_reqs=99)), PLAIN),
    "CP016": (made(reqs=15, parallel=Parallel(tensor=2, sequence=True)), PLAIN),
    "CP017": (
        replace(DRAFTED, speculative=replace(EAGLE, schedule=((1, 4, 3), (9, 16, 1)))),
        replace(DRAFTED, speculative=replace(EAGLE, schedule=((1, 8, 3), (9, 16, 1)))),
    ),
    "CP018": (
        replace(DRAFTED, speculative=replace(EAGLE, schedule=((1, 8, 3), (9, 17, 1)))),
        replace(DRAFTED, speculative=replace(EAGLE, schedule=((1, 8, 3), (9, 16, 1)))),
    ),
    "CP020": (plus(PLAIN, entry(num_tokens=99, num_reqs=99)), PLAIN),
    "CP021": (
        made(
            reqs=256,
            tokens=4096,
            speculative=replace(EAGLE, schedule=((1, 16, 2), (17, 256, 1))),
            sizes=Sizes(policy=Policy.VLLM),
        ),
        PLAIN,
    ),
    "CP022": (plus(PLAIN, PLAIN.roles[0].entries[-1]), PLAIN),
    "CP023": (made(tokens=8192, sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(1, 4096))), PLAIN),
    "CP024": (plus(PLAIN, entry(mode=PIECEWISE, query_len=None)), PLAIN),
    "CP030": (
        with_role(DRAFTED, 2, mode=PIECEWISE, entries=()),
        with_role(DRAFTED, 2, mode=GraphMode.NONE, entries=()),
    ),
    "CP031": (with_role(PLAIN, requested=GraphMode.NONE), PLAIN),
    "CP032": (with_role(made(GraphSupport.NEVER), decisions=()), made(GraphSupport.NEVER)),
    "CP033": (with_role(DRAFTED, decisions=(STEP,)), DRAFTED),
    "CP034": (on_groups(PLAIN, level=GraphSupport.NEVER), PLAIN),
    "CP035": (made(GraphSupport.NEVER), PLAIN),
    "CP036": (with_role(DRAFTED, 0, mode=GraphMode.NONE), DRAFTED),
    "CP037": (plus(PLAIN, entry(query_len=None)), PLAIN),
    "CP040": (replace(PLAIN, budget=Budget(max_graphs=1)), PLAIN),
    "CP041": (on_groups(PLAIN, max_graphs=1), PLAIN),
    "CP042": (
        made(reqs=64, tokens=512, lora=Lora(max_active=32, specialize=True)),
        made(reqs=64, tokens=512, lora=Lora(max_active=32)),
    ),
    "CP043": (replace(PLAIN, environment=replace(MACHINE, device=replace(GPU, memory=1 << 30))), PLAIN),
    "CP044": (replace(DRAFTED, pool=Pool.PER_ROLE), DRAFTED),
    "CP045": (
        made(reqs=256, sizes=Sizes(policy=Policy.POWERS_OF_TWO)),
        made(reqs=256, sizes=Sizes(policy=Policy.TENSORRT_LLM, padding=True, max_reqs=256)),
    ),
    "CP046": (replace(RECURRENT, states=replace(RECURRENT.states, rows=16)), RECURRENT),
    "CP047": (with_role(LAZY, lazy=LAZY.roles[0].entries), LAZY),
    "CP048": (with_role(LAZY, lazy=(entry(num_tokens=9999),)), LAZY),
    "CP049": (
        made(sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(512,), num_reqs=(16,))),
        made(sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(8, 64, 512), num_reqs=(16,))),
    ),
    "CP050": (with_role(PLAIN, waivers=(replace(WAIVER, message=" "),)), with_role(PLAIN, waivers=(WAIVER,))),
    "CP051": (with_role(PLAIN, waivers=(WAIVER, *PLAIN.roles[0].waivers)), PLAIN),
    "CP052": (with_role(PLAIN, entries=()), PLAIN),
    "CP053": (replace(PLAIN, ignore=("CP012",)), replace(DRAFTED, ignore=("CP012",))),
}


@given(st.lists(st.sampled_from(LAZY.roles[0].entries), max_size=8))
def test_each_graph_that_lazy_lists_more_than_once_is_found(lazy):
    """With the number of times; each once is no fault."""
    found = [str(each) for each in lint(with_role(LAZY, lazy=tuple(lazy))) if each.rule.code == "CP048"]
    twice = {each: count for each, count in Counter(lazy).items() if count > 1}
    assert len(found) == len(twice)
    for each, count in twice.items():
        assert any(f"{each} is listed {count} times in lazy" in text for text in found)


def codes(whole):
    """The codes of all findings."""
    return {finding.rule.code for finding in lint(whole)}


def test_lint_rules_all_have_a_case():
    """A new rule comes with its bug and the fix."""
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("code", sorted(CASES))
def test_lint_rule_finds_its_bug_and_accepts_the_fix(code):
    """Found before, not found after."""
    broken, fixed = CASES[code]
    assert code in codes(broken)
    assert code not in codes(fixed)


def test_lint_reports_chains_that_were_not_requested():
    """More than was asked is CP031, as a higher mode is."""
    assert any(entry.draft_steps for entry in FUSED.role(Role.DRAFT_DECODE).entries)
    single = replace(FUSED, speculative=replace(EAGLE, chain=Chain.SINGLE))
    assert "CP031" in codes(single)
    assert "CP031" not in codes(FUSED)


def test_lint_reports_coarse_sizes_only_with_room_for_more():
    """CP045 asks for graphs, so it is silent where budget or backend allow none."""
    broken, _ = CASES["CP045"]
    for graphs, found in ((broken.num_graphs, False), (broken.num_graphs + 1, True)):
        assert ("CP045" in codes(replace(broken, budget=Budget(max_graphs=graphs)))) == found
    full = sum(entry.mode is FULL for entry in broken.roles[0].entries)
    for graphs, found in ((full, False), (full + 1, True)):
        assert ("CP045" in codes(on_groups(broken, max_graphs=graphs))) == found


def test_graphs_on_first_use_do_not_count_at_start():
    """Graphs that are captured on first use have a memory budget of their own."""
    small = replace(MACHINE, device=replace(GPU, memory=1 << 30))
    late, tiny = replace(LAZY, environment=small), replace(MACHINE, device=replace(GPU, memory=1 << 28))
    assert LAZY.num_graphs == PLAIN.num_graphs > LAZY.num_graphs - LAZY.num_lazy > 0
    assert "CP043" not in {finding.rule.code for finding in lint(late)}
    (found,) = [finding for finding in lint(replace(LAZY, environment=tiny)) if finding.rule.code == "CP043"]
    assert f"{LAZY.num_graphs - LAZY.num_lazy} graphs at start may take" in str(found)


def test_lint_reports_no_coarse_sizes_that_were_measured():
    """What the traffic does not run may be padded far: by its costs, no size between is worth a graph."""
    broken, _ = CASES["CP045"]
    amounts = dict.fromkeys(("expected", "mean_step_ms", "regret", "eager_share", "mib", "seconds", "prior"), 1.0)
    forecast = Forecast(profile="sha256:" + "0" * 64, graphs=broken.num_graphs, **amounts)
    assert "CP045" in codes(broken)
    assert "CP045" not in codes(replace(broken, forecast=forecast))


@pytest.mark.parametrize("broken", [case[0] for case in CASES.values()], ids=list(CASES))
def test_lint_finding_has_message_path_and_remedy(broken):
    """Every finding has a sentence, a remedy, and a path that leads into the plan."""
    for finding in lint(broken):
        assert finding.diagnostic.message
        assert finding.rule.remedy
        assert str(finding).startswith(f"{finding.rule.code} {finding.rule.name}: ")
        value = broken
        for part in finding.diagnostic.path:
            value = value[part] if isinstance(part, int) else getattr(value, part)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_lint_rule_has_an_explanation(rule):
    """A stable code, a name, an explanation, and threads in which the bug was seen."""
    assert re.fullmatch(r"CP0\d\d", rule.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
    assert rule.explanation
    assert rule.threads or rule.code == "CP053"  # about the file itself
    assert all(re.fullmatch(r"[A-Za-z-]+#\d+", thread) for thread in rule.threads)
    assert all(part in {f.name for f in attrs.fields(Spec)} for part in rule.spec_path[:1])


def test_lint_codes_and_names_are_unique():
    """Neither is given twice."""
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
    assert [rule.code for rule in RULES.values()] == list(RULES)


@given(st.sampled_from([case[0] for case in CASES.values()]), st.sets(st.sampled_from([*RULES, "CP999"])))
def test_ignored_codes_leave_out_notes_and_warnings_alone(broken, ignored):
    """The same from the plan and from the caller; what the plan ignores in vain is a note."""
    kept = [f for f in lint(broken) if f.severity is Severity.ERROR or f.rule.code not in ignored]
    assert list(lint(broken, ignored)) == kept
    own = replace(broken, ignore=tuple(sorted(ignored)))
    assert [f for f in lint(own) if f.rule.code != "CP053"] == [f for f in kept if f.rule.code != "CP053"]
    named = {code for code in ignored if any(code in str(f) for f in lint(own) if f.rule.code == "CP053")}
    useful = {f.rule.code for f in lint(replace(broken, ignore=())) if f.severity is not Severity.ERROR}
    assert named == (set() if "CP053" in ignored else ignored - useful)


@given(plans(max_reqs=64))
def test_lint_has_no_error_for_a_new_plan(whole):
    """What the planner makes is never wrong by its own lint, and has neither idle graphs nor waivers."""
    errors = [
        str(finding)
        for finding in lint(whole)
        if finding.rule.severity is Severity.ERROR or finding.rule.code in ("CP020", "CP051")
    ]
    assert not errors
