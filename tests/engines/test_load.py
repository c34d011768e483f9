"""Load in the question: which findings a traffic or a concurrency touches, and which are allowed and not reached."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.lint.core import Severity
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.engines.check import check
from capture_planner.engines.deployments import walk
from capture_planner.engines.load import EngineLoad, ranked, reached_graphs
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.traffic import Traffic, TrafficCount

H100 = find_environment("h100")
LINES = {
    "vllm": ["Qwen/Qwen3-8B", "--max-num-seqs", "96", "--max-cudagraph-capture-size", "{}"],
    "sglang": ["--model-path", "Qwen/Qwen3-8B", "--max-running-requests", "96", "--cuda-graph-max-bs-decode", "{}"],
}
DECODES = st.dictionaries(st.integers(1, 120), st.integers(1, 9), min_size=1, max_size=6)
PROMPTS = st.dictionaries(st.integers(1, 9000), st.integers(1, 9), max_size=4)


@cache
def answered(engine, ceiling):
    """Return an emulation whose decodes above a ceiling have no graph, with its findings."""
    emulation = emulate(engine, [word.format(ceiling) for word in LINES[engine]], H100)
    return emulation, check(emulation)


def traffic(decodes, prompts):
    """Return a traffic of decodes by requests, and of batches with prompts by tokens."""
    counts = [
        TrafficCount(role=Role.TARGET, num_reqs=reqs, past_prompt=True, count=count) for reqs, count in decodes.items()
    ]
    counts += [
        TrafficCount(role=Role.TARGET, num_tokens=tokens, past_prompt=False, count=count)
        for tokens, count in prompts.items()
    ]
    return Traffic(sources=("test",), batches=tuple(counts))


@given(st.sampled_from(sorted(LINES)), st.sampled_from([8, 64]), DECODES, PROMPTS)
def test_steps_of_a_finding_are_those_of_its_batches(engine, ceiling, decodes, prompts):
    """Each is counted as often as its batches ran; what none ran is allowed, and not reached, and a note."""
    _, findings = answered(engine, ceiling)
    load = EngineLoad.of_traffic(traffic(decodes, prompts))
    total = sum([*decodes.values(), *prompts.values()])
    found = ranked(findings, load)
    for each in found:
        if each.diagnosis.concerns is None:
            assert each.steps is None
            continue
        touched = sum(
            count
            for counts, kind in ((decodes, Kind.DECODE), (prompts, Kind.MIXED))
            for extent, count in counts.items()
            if any(run.batch.kind is kind and run.first <= extent <= run.last for run in each.diagnosis.runs)
        )
        assert (each.steps, each.total) == (touched, total)
        assert ("allowed, and not reached" in each.diagnosis.message) == (touched == 0) == (not each.is_reached)
        if touched == 0:
            assert each.severity is Severity.NOTE
    steps = [each.steps for each in found if each.steps is not None]
    assert steps == sorted(steps, reverse=True)
    assert sorted(each.rule.code for each in found) == sorted(each.rule.code for each in findings)


@given(st.sampled_from(sorted(LINES)), st.sampled_from([8, 64]), st.integers(1, 200))
def test_a_concurrency_reaches_decodes_up_to_it(engine, ceiling, most):
    """With so many requests at once no decode has more; batches with prompts may have any tokens."""
    emulation, findings = answered(engine, ceiling)
    for each in ranked(findings, EngineLoad.at(most)):
        if each.diagnosis.concerns is None:
            continue
        reached = any(run.batch.kind is Kind.MIXED or run.first <= most for run in each.diagnosis.runs)
        assert ("allowed, and not reached" in each.diagnosis.message) == (not reached)
    captured, reached = reached_graphs(emulation, EngineLoad.at(most))
    entries = {
        one.answer.entry
        for one in walk(emulation)
        if one.answer.entry and (one.batch.kind is Kind.MIXED or one.batch.num_reqs <= most)
    }
    assert (captured, reached) == (len({graph.entry for graph in emulation.graphs}), len(entries))


def test_check_takes_a_load(run, tmp_path):
    """What is not reached fails no build; the report says how many graphs are, and JSON counts the steps."""
    words = ("check", "--engine", "vllm", "Qwen/Qwen3-8B", "--max-num-seqs", "96", "--max-cudagraph-capture-size", "8")
    alone = run(*words, "-e", "h100")
    assert "decodes of 9 to 96 requests" in alone.out
    few = run(*words, "-e", "h100", "--concurrency", "4")
    assert "allowed, and not reached with 4 requests at once" in few.out
    assert "graphs are reached with 4 requests at once" in few.out
    many = run(*words, "-e", "h100", "--concurrency", "64")
    assert "reached by decodes of 9 to 64 requests with 64 requests at once" in many.out
    assert (alone.code, few.code, many.code) == (2, 0, 2)
    assert "exclude each other" in run(*words, "--concurrency", "4", "--traffic", "x").err
    assert "--engine" in run("check", "plans/locked/llama-3.1-8b.h100.yaml", "--concurrency", "4").err
