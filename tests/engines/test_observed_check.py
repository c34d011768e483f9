"""Findings about observations, and what differs between a plan and an observation."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from capture_planner.analysis.lint import Severity
from capture_planner.codec.shipped import find_environment
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines import emulate
from capture_planner.engines.check import OBSERVED_RULES, check, check_observation
from capture_planner.engines.deployments import coverage_of, emulation_of, walk
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.export import compared
from capture_planner.engines.observed_diff import observed_diff
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch_space import batches as admissible_batches
from capture_planner.records.observation import BatchCount, Observation
from capture_planner.records.plan import Plan
from capture_planner.testing import arbitrary_plans, plans
from capture_planner_tuner.side_by_side import compare
from support.examples import at_most
from support.observing import observation_of

H100 = find_environment("h100")
TIERS = (
    '{"method":"eagle3","model":"x/y","num_speculative_tokens":2,'
    '"num_speculative_tokens_per_batch_size":[[1,16,2],[17,64,1]]}'
)
VLLM = ("--max-num-seqs", "64", "--max-num-batched-tokens", "1024")
COMMANDS = {
    "vllm": VLLM,
    "vllm-tiers": (*VLLM, "--speculative-config", TIERS),
    "vllm-small": (*VLLM, "--cudagraph-capture-sizes", "1", "2", "48"),
    "sglang": ("--max-running-requests", "64", "--chunked-prefill-size", "1024"),
    "tensorrt-llm": ("--max_batch_size", "64"),
}


@cache
def emulated(name: str) -> Emulation:
    """Return one of the engines, which several tests look at."""
    return emulate("vllm" if name.startswith("vllm") else name, COMMANDS[name], H100)


@cache
def observed(name: str) -> Observation:
    """Return what it was seen to do."""
    return observation_of(emulated(name))


SLOW = at_most(25, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", COMMANDS)
def test_findings_are_those_of_the_engine_that_was_observed(name: str) -> None:
    """Whatever is found about an engine's flags is found in what it was seen to do, with the same fix.

    But for what is assumed of the model: an engine knows its own.
    """
    found = [each for each in check_observation(observed(name)) if each.rule.code.startswith("EN")]
    expected = check(attrs.evolve(emulated(name), asked_sizes=()))
    assert [(each.rule.code, each.diagnosis.message, each.fix) for each in found] == [
        (each.rule.code, each.diagnosis.message, each.fix) for each in expected if each.rule.code != "EN007"
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_observation_answers_every_batch_as_the_engine(name: str) -> None:
    assert walk(emulation_of(observed(name))) == walk(emulated(name))


@SLOW
@given(plans(max_reqs=16, max_tokens=64, varying=False) | arbitrary_plans(max_tokens=64, varying=False))
def test_engine_that_does_what_the_plan_says_differs_in_nothing(plan: Plan) -> None:
    """Law 12 as it is checked: no difference in an observation of the plan itself."""
    assume(all(len(set(role.entries)) == len(role.entries) for role in plan.roles))
    found = observed_diff(plan, observation_of(plan))
    assert found.changes == ()
    assert found.notes == ()


@SLOW
@given(plans(max_reqs=16, max_tokens=64, varying=False), st.data())
def test_lost_graph_and_lost_answers_are_differences(plan: Plan, data: st.DataObject) -> None:
    """A graph that was not captured, a mode that was lowered, an answer that is another one."""
    observation = observation_of(plan)
    roles = [role for role in observation.roles if role.graphs and role.answers]
    assume(roles)
    role = data.draw(st.sampled_from(roles))
    way = data.draw(st.sampled_from(("mode", "graph", "answers")))
    if way == "mode":
        other = attrs.evolve(role, mode=next(mode for mode in GraphMode if mode is not role.mode))
    elif way == "graph":
        lost = len(role.graphs) - 1
        answers = [
            attrs.evolve(run, graph=None, reason=Reason.MEMORY) if run.graph == lost else run for run in role.answers
        ]
        other = attrs.evolve(role, graphs=role.graphs[:-1], answers=tuple(answers))
    else:
        reached = [run for run in role.answers if run.graph is not None]
        assume(reached)
        answers = [attrs.evolve(run, graph=None, reason=Reason.MEMORY) for run in role.answers]
        other = attrs.evolve(role, answers=tuple(answers))
    changed = replace(observation, roles=tuple(other if each is role else each for each in observation.roles))
    found = observed_diff(plan, changed)
    assert {"mode": "mode", "graph": "gone", "answers": "answer"}[way] in {each.subject for each in found.changes}
    assert all(each.role is role.role for each in found.changes)


@SLOW
@given(plans(max_reqs=16, max_tokens=64, varying=False), st.data())
def test_graph_of_another_kind_is_a_difference(plan: Plan, data: st.DataObject) -> None:
    """The same mode and extents for another query length, number of adapters or chain: captured, and answered."""
    observation = observation_of(plan)
    roles = [role for role in observation.roles if any(run.graph is not None for run in role.answers)]
    assume(roles)
    role = data.draw(st.sampled_from(roles))
    place = data.draw(st.sampled_from(sorted({run.graph for run in role.answers if run.graph is not None})))
    graph = role.graphs[place]
    entry, field = graph.entry, data.draw(st.sampled_from(("query_len", "active_loras", "draft_steps", "widest")))
    if field == "query_len":
        other = attrs.evolve(entry, query_len=None if entry.query_len else 1)
    elif field == "active_loras":
        other = attrs.evolve(entry, active_loras=entry.active_loras + 1)
    else:
        other = attrs.evolve(entry, draft_steps=(entry.draft_steps or 1) + 1)
    changed = attrs.evolve(graph, max_query_len=3) if field == "widest" else attrs.evolve(graph, entry=other)
    assume(all(each.entry != other for each in role.graphs))
    graphs = (*role.graphs[:place], changed, *role.graphs[place + 1 :])
    swapped = attrs.evolve(role, graphs=graphs)
    after = replace(observation, roles=tuple(swapped if each is role else each for each in observation.roles))
    subjects = {"gone", "added"} | (set() if field == "widest" else {"answer"})
    for old in (plan, observation):
        found = observed_diff(old, after).changes
        assert {each.subject for each in found} == subjects
        assert {each.role for each in found} == {role.role}


def test_batches_that_one_side_never_runs_are_no_difference() -> None:
    """With one draft from 17 requests on there is no draft decode, so none of them runs eager."""
    constant = TIERS.partition(',"num_speculative_tokens_per')[0] + "}"
    old, new = (
        observation_of(emulate("vllm", (*VLLM, "--speculative-config", config), H100)) for config in (constant, TIERS)
    )
    assert any(each.subject == "speculative" for each in observed_diff(old, new).changes)
    for both_admit in (True, False):
        proof = compared(emulation_of(old), emulation_of(new), both_admit=both_admit)
        beyond = [each for each in proof.differences if each.role is Role.DRAFT_DECODE and each.last > 16]
        assert bool(beyond) is not both_admit
    assert not any(
        each.role is Role.DRAFT_DECODE and each.subject == "answer" for each in observed_diff(old, new).changes
    )


@SLOW
@given(plans(max_reqs=16, max_tokens=64, varying=False))
def test_unasked_batches_are_unknown_and_no_difference(plan: Plan) -> None:
    """An observation without answers says so, and claims nothing about them."""
    observation = observation_of(plan)
    silent = replace(observation, roles=tuple(attrs.evolve(role, answers=()) for role in observation.roles))
    found = observed_diff(plan, silent)
    assert found.changes == ()
    assert "not asked" in found.notes[0]
    codes = {each.rule.code for each in check_observation(silent)}
    assert codes <= {"OB003"}
    compared = compare(plan, emulation_of(silent))
    assert compared.unknown > 0
    assert compared.holes == ()
    assert {cell.answer.reason for cell in coverage_of(emulation_of(silent)).cells} <= {Reason.UNKNOWN}


def test_unasked_batches_beyond_the_largest_graph_are_counted() -> None:
    """One by one, although nothing is captured there."""
    observation = observed("vllm-small")
    target = observation.roles[0]
    answers = [
        attrs.evolve(run, last=run.last - 10) if run.query_len is None and run.last == 1024 else run
        for run in target.answers
    ]
    partial = replace(observation, roles=(attrs.evolve(target, answers=tuple(answers)),))
    assert compared(emulation_of(observation), emulation_of(partial)).unknown == 10


@SLOW
@given(plans(max_reqs=16, max_tokens=64, varying=False))
def test_coverage_has_every_admissible_batch_once(plan: Plan) -> None:
    """Decodes by requests and mixed batches by tokens, for each number of adapters, with the plan's own answer."""
    cells, dispatcher = coverage_of(emulation_of(observation_of(plan))).cells, Dispatcher(plan)
    for role in plan.planned:
        for batch, _ in admissible_batches(role, plan):
            own = [
                cell
                for cell in cells
                if (cell.role, cell.kind, cell.query_len) == (role, batch.kind, batch.query_len)
                and cell.first <= batch.extent(batch.kind) <= cell.last
                and cell.min_loras <= batch.active_loras <= cell.max_loras
            ]
            assert [cell.entry for cell in own] == [dispatcher.dispatch(batch).entry]


def counted(observation: Observation, folder: Path, steps: int, seed: int) -> tuple[Observation, Counter[str]]:
    """Serve random decodes of the target, one in ten eager although there is a graph; how they ran, counted here."""
    generator = random.Random(seed)
    recorder = Recorder(folder, "rank0")
    recorder.begin(observation)
    emulation, ran = emulation_of(observation), Counter[str]()
    entries = [graph.entry for graph in observation.roles[0].graphs]
    asked = [each.batch for each in walk(emulation) if each.batch.role is Role.TARGET and each.batch.query_len]
    for _ in range(steps):
        batch = generator.choice(asked)
        answer = emulation.dispatch(batch)
        graph = None if answer.entry is None else entries.index(answer.entry)
        reason = answer.reason
        if graph is not None and generator.random() < 0.1:
            graph, reason = None, Reason.RANK
            ran["refused"] += 1
        ran["not full"] += answer.mode is not GraphMode.FULL
        recorder.count(Role.TARGET, batch.num_reqs, batch.num_tokens, batch.query_len, True, 0, graph, reason)
    recorder.close()
    return recorder.observation(), ran


@pytest.mark.parametrize("seed", range(3))
def test_findings_say_how_often_they_mattered(tmp_path: Path, seed: int) -> None:
    """Steps of decodes without a full graph, and those that ran eager although there is one."""
    observation, ran = counted(observed("vllm-small"), tmp_path, 500, seed)
    found = {each.rule.code: each for each in check_observation(observation)}
    assert (found["EN001"].steps, found["EN001"].total) == (ran["not full"], 500)
    assert f"{ran['not full']} of 500 steps" in found["EN001"].text
    assert found["OB002"].diagnosis.count == ran["refused"]
    planned = {each.rule.code: each for each in check_observation(replace(observation, plan="sha256:" + "0" * 64))}
    unused = [graph.entry for graph in observation.roles[0].graphs if not graph.replays]
    assert planned["OB001"].diagnosis.count == len(unused)
    # By itself the engine has one list: a size that any of its graphs needs is not to be left out.
    ran_on = {graph.entry.num_tokens for graph in observation.roles[0].graphs if graph.replays}
    left = sum(entry.num_tokens not in ran_on for entry in unused)
    assert left < len(unused)
    assert (found["OB001"].diagnosis.count if "OB001" in found else 0) == left
    assert observation.roles[0].eager_steps == ran["refused"] + sum(
        count.steps for count in observation.roles[0].batches if count.reason not in (None, Reason.RANK)
    )


def test_engine_without_a_distribution_is_checked_without_fixes() -> None:
    observation = replace(observed("vllm-small"), engine="unheard-of")
    found = {each.rule.code: each for each in check_observation(observation)}
    assert found["EN001"].diagnosis.count == check_observation(observed("vllm-small"))[0].diagnosis.count
    assert "no rules of unheard-of's flags" in found["EN001"].fix


@pytest.mark.parametrize("name", COMMANDS)
def test_engine_under_a_plan_is_fixed_by_its_spec(name: str) -> None:
    """Its flags do not give its sizes: no advice names one."""
    observation = replace(observed(name), plan="sha256:" + "0" * 64)
    found = check_observation(observation)
    assert {"spec" in each.fix for each in found if each.rule.code in ("EN001", "OB001")} <= {True}
    assert not [each.fix for each in found if "--" in each.fix or "cuda_graph" in each.fix]


def test_padding_under_a_plan_is_a_note() -> None:
    """A plan has its sizes by what they cost; other findings weigh as without one."""
    seen = Counter[str]()
    for name in COMMANDS:
        bare = check_observation(observed(name))
        planned = check_observation(replace(observed(name), plan="sha256:" + "0" * 64))
        for one, other in zip(planned, bare, strict=True):
            assert one.rule is other.rule
            assert one.severity is (Severity.NOTE if one.rule.code == "EN006" else other.severity)
            seen[one.rule.code] += one.severity is not other.severity
    assert seen["EN006"]


@pytest.mark.parametrize("code", OBSERVED_RULES)
def test_rule_of_observations_is_explained(code: str) -> None:
    rule = OBSERVED_RULES[code]
    assert rule.explanation.endswith(".")
    assert rule.remedy


def test_prompts_of_the_shape_of_a_decode_are_no_decodes() -> None:
    """Law 5: they count for no finding about decodes."""
    observation = observed("vllm-small")
    prompt = BatchCount(num_reqs=64, num_tokens=64, query_len=1, past_prompt=False, steps=7, reason=Reason.SIZES)
    target = attrs.evolve(observation.roles[0], batches=(prompt,))
    found = {each.rule.code: each for each in check_observation(replace(observation, roles=(target,)))}
    assert found["EN001"].steps == 0
