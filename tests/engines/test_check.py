"""The lint of engines: what it finds is there, counted batch by batch, and what is in order is left alone."""

import json
import re
import tempfile
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.analysis.lint.core import Severity, link
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, engines
from capture_planner.engines.check import BY_FLAGS, ENGINE_RULES, check
from capture_planner.engines.deployments import runs, walk
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.verdict import verdict
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.records.spec import Limits
from capture_planner_vllm.emulation.schedule import draft_tokens, normalized, query_lens
from capture_planner_vllm.emulation.table import TableManager
from engines.generators.vllm_managers import misses

H100 = find_environment("h100")
SEQS = 256
PUBLISHED = {
    ((1, 16, 2), (17, 256, 1)): (20, 102, 53),
    ((1, 16, 5), (17, 64, 3), (65, 256, 1)): (44, 150, 69),
    ((1, 16, 4), (17, 64, 2), (65, 256, 0)): (80, None, None),
}


def emulation(schedule, sizes, *, seqs=SEQS, tokens=8192, most=512, mode=GraphMode.FULL_AND_PIECEWISE):
    """The target of vLLM with a schedule and a list of sizes; no schedule: one token a request."""
    k = max((k for _, _, k in schedule), default=0)
    tiers = normalized([*schedule]) if schedule else ()
    widths = query_lens(draft_tokens(tiers, max_num_reqs=seqs, num_speculative=k))
    manager = TableManager(
        role=Role.TARGET, mode=mode, sizes=sizes, max_size=most, max_num_reqs=seqs, query_len=1 + k, query_lens=widths
    )
    speculative = None
    if schedule:
        speculative = Speculative(method=Method.EAGLE3, num_tokens=k, schedule=tuple(schedule), model=DraftModel())
    return Emulation(
        engine="vllm",
        version="test",
        command=(),
        settings=(),
        sizes=tuple(sizes),
        managers=(manager,),
        decisions=(),
        limits=Limits(max_num_reqs=seqs, max_num_tokens=tokens),
        speculative=speculative,
    )


def by_code(found):
    """Findings of the target by code."""
    return {each.rule.code: each for each in found if each.diagnosis.role is Role.TARGET}


@pytest.mark.parametrize("schedule", PUBLISHED, ids=lambda tiers: "/".join(str(k) for _, _, k in tiers))
def test_check_counts_missed_graphs_of_published_schedules(schedule):
    """20, 44 and 80 of 256 batch sizes beside a graph of their own, and the graphs that nothing reaches."""
    k = max(k for _, _, k in schedule)
    sizes = vllm_tokens(
        max_num_reqs=SEQS,
        max_num_tokens=8192,
        query_len=1 + k,
        platform_max=512,
        tiers=[(1 + tier, last) for _, last, tier in schedule],
    )
    found = by_code(check(emulation(schedule, sizes, most=max(sizes))))
    missed, captured, reached = PUBLISHED[schedule]
    assert found["EN002"].diagnosis.count == missed
    if captured is not None:
        assert found["EN003"].diagnosis.count == captured - reached
    assert "--cudagraph-capture-sizes" in found["EN003"].fix


@pytest.mark.parametrize("schedule", PUBLISHED, ids=lambda tiers: "/".join(str(k) for _, _, k in tiers))
def test_fix_of_missed_graphs_leaves_no_miss(schedule):
    """Given to the engine, no batch misses a graph any more, and no more full graphs are captured."""
    k = max(k for _, _, k in schedule)
    tiers = [(1 + tier, last) for _, last, tier in schedule]
    sizes = vllm_tokens(max_num_reqs=SEQS, max_num_tokens=8192, query_len=1 + k, platform_max=512, tiers=tiers)
    before = emulation(schedule, sizes, most=max(sizes))
    fix = by_code(check(before))["EN002"].fix
    assert fix.startswith("give --cudagraph-capture-sizes ")
    assert fix.endswith("; with these, no batch misses a graph")
    sizes_given = [int(word) for word in fix.replace(",", " ").split() if word.isdigit()]
    after = emulation(schedule, sizes_given, most=max(sizes_given))
    assert "EN002" not in by_code(check(after))
    full = [sum(graph.entry.query_len is not None for graph in each.graphs) for each in (before, after)]
    assert full[1] <= full[0]


@pytest.mark.parametrize("schedule", PUBLISHED, ids=lambda tiers: "/".join(str(k) for _, _, k in tiers))
def test_fix_of_missed_graphs_leaves_no_miss_of_the_drafter(schedule):
    """The whole command line, with the list that is named: neither target nor drafter misses a graph."""
    k = max(k for _, _, k in schedule)
    drafter = {"method": "eagle3", "model": "d", "num_speculative_tokens": k}
    drafter["num_speculative_tokens_per_batch_size"] = [list(tier) for tier in schedule]
    flags = ["m", "--max-num-seqs", str(SEQS), "--speculative-config", json.dumps(drafter)]
    found = [f for f in check(emulate("vllm", flags, H100)) if f.rule.code == "EN002"]
    assert [f.diagnosis.role for f in found] == [Role.TARGET, Role.DRAFT_PREFILL]
    assert found[0].diagnosis.count == PUBLISHED[schedule][0]
    sizes_given = [word for word in found[0].fix.replace(",", " ").split() if word.isdigit()]
    after = check(emulate("vllm", [*flags, "--cudagraph-capture-sizes", *sizes_given], H100))
    assert "EN002" not in by_code(after)


@st.composite
def emulations(draw):
    """Small targets with any schedule and any sizes."""
    seqs = draw(st.integers(1, 12))
    tiers, first = [], 1
    for last in sorted(draw(st.sets(st.integers(1, seqs), max_size=3)) | {seqs}):
        tiers.append((first, last, draw(st.integers(0, 4))))
        first = last + 1
    if not any(k for _, _, k in tiers):
        tiers = []
    sizes = sorted(draw(st.sets(st.integers(1, 48), min_size=1, max_size=6)))
    mode = draw(st.sampled_from(list(GraphMode)))
    return emulation(tiers, sizes, seqs=seqs, tokens=draw(st.integers(8, 64)), most=sizes[-1], mode=mode)


@given(emulations())
def test_walk_answers_every_admissible_batch_as_the_engine(emulated):
    """Decodes of each size that the schedule has, mixed batches of each number of tokens, once each."""
    asked = walk(emulated)
    limits = emulated.limits
    tokens = [n for a in asked if a.batch.kind is Kind.MIXED for n in range(a.extent, a.last + 1)]
    assert tokens == list(range(1, limits.max_num_tokens + 1))
    k = emulated.speculative
    tiers = normalized([*k.schedule]) if k is not None else ()
    lookup = draft_tokens(tiers, max_num_reqs=limits.max_num_reqs, num_speculative=k.num_tokens if k else 0)
    wanted = {
        (reqs, 1 + lookup[reqs])
        for reqs in range(1, limits.max_num_reqs + 1)
        if reqs * (1 + lookup[reqs]) <= limits.max_num_tokens
    }
    decodes = [
        (n, a.batch.query_len) for a in asked if a.batch.kind is Kind.DECODE for n in range(a.extent, a.last + 1)
    ]
    assert sorted(decodes) == sorted(wanted)
    for each in asked:
        assert each.answer == emulated.dispatch(each.batch)


@given(emulations())
def test_walk_range_of_batches_has_one_answer(emulated):
    """Beyond the largest graph one batch is asked for all that are larger."""
    for each in walk(emulated):
        if each.last > each.extent:
            batch = each.batch
            width = batch.query_len or 1
            last = attrs.evolve(
                batch,
                num_tokens=each.last * width if each.batch.kind is Kind.DECODE else each.last,
                num_reqs=each.last if each.batch.kind is Kind.DECODE else min(each.last, emulated.limits.max_num_reqs),
            )
            assert emulated.dispatch(last).entry is None
            assert each.answer.entry is None


@given(emulations())
def test_missed_graphs_equal_brute_force(emulated):
    """The count of EN002 is what the manager itself says of each decode and mixed batch."""
    (manager,) = emulated.managers
    found = by_code(check(emulated)).get("EN002")
    missed = 0
    for each in walk(emulated):
        if misses(manager, each.batch) or (each.best is not None and each.answer.entry is None):
            missed += each.last - each.extent + 1
    assert (found.diagnosis.count if found else 0) == missed


@given(emulations())
def test_unreached_graphs_equal_brute_force(emulated):
    """By force: every decode and every number of tokens, one by one, with the fewest and the most requests."""
    (manager,) = emulated.managers
    limits = emulated.limits
    answers = {each.answer.entry for each in walk(emulated)}
    for tokens in range(1, limits.max_num_tokens + 1):
        for reqs in {1, min(tokens, limits.max_num_reqs)}:
            batch = Batch(role=Role.TARGET, num_reqs=reqs, num_tokens=tokens, past_prompt=False)
            answers.add(manager.dispatch(batch).entry)
    unused = sum(graph.entry not in answers for graph in manager.graphs)
    found = by_code(check(emulated)).get("EN003")
    assert (found.diagnosis.count if found else 0) == unused


def test_graph_for_few_requests_serves_a_batch():
    """SGLang's full graphs of prefills have slots for few requests; a batch of the most requests is on none of them."""
    words = "--model-path Qwen/Qwen3-8B --disaggregation-mode prefill --cuda-graph-backend-prefill full"
    emulated = emulate("sglang", words.split(), find_environment("h100"))
    graphs = [graph.entry for graph in emulated.graphs]
    asked = (Batch(role=Role.TARGET, num_reqs=1, num_tokens=each.num_tokens, past_prompt=False) for each in graphs)
    assert all(each.num_reqs < emulated.limits.max_num_reqs for each in graphs)
    assert [emulated.dispatch(batch).entry for batch in asked] == graphs
    assert not {answer.answer.entry for answer in walk(emulated)}.issuperset(graphs)
    assert "EN003" not in by_code(check(emulated))


@given(emulations())
def test_best_graph_is_the_cheapest_compatible_one(emulated):
    """As looking at every graph finds it."""
    for asked in walk(emulated):
        serving = [g.entry for g in emulated.graphs if g.rejection(asked.batch) is None]
        assert asked.best == min(serving, key=lambda entry: entry.cost, default=None)


def test_runs_join_consecutive_batches():
    """Neighbours of one kind are one run; a gap begins another."""
    asked = [a for a in walk(emulation((), (8,), seqs=8, tokens=8)) if a.batch.kind is Kind.DECODE]
    joined = [(run.first, run.last) for run in runs(asked[:3] + asked[5:])]
    assert joined == [(1, 3), (6, 8)]


ASKED = {
    "vllm": ("m --max-num-batched-tokens 256 --max-num-seqs 8 --cudagraph-capture-sizes", 257),
    "sglang": ("--model-path m --tp-size 8 --attn-dp-size 4 --max-running-requests 64 --cuda-graph-bs-decode", 3),
    "tensorrt-llm": ("m --max_batch_size 16 --max_num_tokens 64 --config", 17),
}
"""Flags with room for some sizes, and one that is dropped."""


@pytest.mark.parametrize("engine", ASKED)
@given(st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=3, unique=True), st.booleans())
def test_check_counts_requested_sizes_that_are_not_captured(engine, sizes, beyond):
    """Of a list each size that is dropped is counted, whichever engine drops it; of a whole list none."""
    words, dropped = ASKED[engine]
    asked = sorted([*sizes, dropped] if beyond else sizes)
    flags = [*words.split(), *map(str, asked)]
    with tempfile.TemporaryDirectory() as folder:
        if engine == "tensorrt-llm":
            file = Path(folder, "options.yaml")
            file.write_text(f"cuda_graph_config: {{enable_padding: false, batch_sizes: {asked}}}\n")
            flags = [*words.split(), str(file)]
        emulated = emulate(engine, flags, H100)
    lost = set(asked) - set(emulated.sizes)
    assert (dropped in lost) == beyond
    found = [
        f.diagnosis.count for f in check(emulated) if f.rule.code == "EN004" and "listed sizes" in f.diagnosis.message
    ]
    assert found == ([len(lost)] if lost and emulated.sizes else [])


def fixed(flags, fix):
    """Flags with a remedy of EN001 or EN006 followed word for word: ``add N to FLAG`` or ``raise FLAG to N``."""
    added = re.match(r"add ([\d ]+) to (--\S+?),", fix)
    if fix.startswith("give --"):
        return [*flags, *fix.split()[1:]]
    if added is None:
        raised = re.fullmatch(r"raise (--\S+) to (\d+)", fix)
        return [*flags, *raised.groups()]
    at = flags.index(added[2]) + 1 if added[2] in flags else None
    assert at is not None, "sizes are added where some are listed"
    kept = [int(word) for word in flags[at:]]
    return [*flags[:at], *map(str, sorted({*kept, *map(int, added[1].split())}))]


LIMITED = {
    "vllm": ["m", "--max-num-seqs", "{}", "--cudagraph-capture-sizes"],
    "sglang": ["--model-path", "m", "--max-running-requests", "{}", "--cuda-graph-bs-decode"],
}


@settings(max_examples=max(settings.default.max_examples // 3, 3))
@given(st.sampled_from(sorted(LIMITED)), st.integers(1, 700), st.sets(st.integers(1, 400), max_size=4))
def test_fix_flags_remove_their_findings(engine, seqs, sizes):
    """Decodes without a graph, and those that are padded far, have one close by once the flags are followed."""
    flags = [word.format(seqs) for word in LIMITED[engine]]
    flags = [*flags, *map(str, sorted(sizes))] if sizes else flags[:-1]
    seen = []
    for _ in range(12):
        found = [f for f in check(emulate(engine, flags, H100)) if f.rule.code in ("EN001", "EN006")]
        decodes = [f for f in found if "decode" in f.diagnosis.message]
        if not decodes:
            break
        seen.append(decodes[0].fix)
        flags = fixed(flags, decodes[0].fix)
    assert not decodes, seen


def test_check_has_no_finding_for_a_complete_size_list():
    """One token a request, every size up to the limits."""
    assert check(emulation((), tuple(range(1, 9)), seqs=8, tokens=8)) == ()


@pytest.mark.parametrize("code", ENGINE_RULES)
def test_rule_has_an_explanation_a_thread_and_fixes(code):
    """It says what it means, where it was seen, and what to set in each engine."""
    rule = ENGINE_RULES[code]
    assert rule.code == code
    assert rule.explanation.endswith(".")
    assert rule.threads
    assert all(link(thread).startswith("https://github.com/") for thread in rule.threads)
    assert all(item.value.fixes.general[code] for item in engines().values())


UNKNOWN = {"vllm": ["deepseek-ai/DeepSeek-V9"], "sglang": ["--model-path", "zai-org/GLM-5.3-Flash"]}
CAPPED = {"vllm": ["--max-cudagraph-capture-size", "64"], "sglang": ["--cuda-graph-max-bs-decode", "64"]}


@pytest.mark.parametrize("name", UNKNOWN)
def test_flags_alone_have_findings_that_hold_for_any_model(name):
    """Decodes above the largest graph have none whatever the model; the verdict says so, and of graphs at most."""
    emulation = emulate(name, [*UNKNOWN[name], *CAPPED[name]], H100)
    found = by_code(check(emulation))
    assert set(found) <= BY_FLAGS
    assert "decodes of 65 to" in found["EN001"].diagnosis.message
    assert found["EN007"].severity is Severity.WARNING
    graphs, eager, cost = verdict(emulation, walk(emulation)).lines
    assert graphs.startswith("graphs: at most, by the flags alone: decodes of 1 to 64 requests (FULL)")
    assert "decodes of 65 to" in eager
    assert "whatever the model" in eager
    assert cost.startswith("cost: at most")
