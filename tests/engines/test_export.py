"""Exports: flags that say what the plan says, losses with numbers, and a proof that can fail."""

from pathlib import Path

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from ruamel.yaml import YAML

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.engines import engines, find_engine
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.export import (
    DRAFT_MODEL,
    Effect,
    compared,
    effect,
    emulated,
    graph_scope,
    prove,
    within_budget,
)
from capture_planner.engines.parsing import as_words
from capture_planner.errors import DispatchError, FlagError, Problem, RunError
from capture_planner.modes import GraphMode, Reason, Refresh, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import decode_families, decode_tiers, is_admissible
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Policy, Sizes
from capture_planner.report.engine import export_report
from capture_planner.report.plain import plain
from capture_planner.report.terminal import tables
from capture_planner.testing import batches, plans
from capture_planner.testing.strategies.plans import entries
from support.export_plans import SCHEDULES, made
from support.small_engines import EMULATORS, vllm_table

NAMES = st.sampled_from(sorted(engines()))
PLANS = plans(max_reqs=16, max_tokens=96, varying=False)


@st.composite
def deployed(draw, tiers):
    """Return plans of plain deployments: a fixed width (0, 1), or a schedule whose lengths fall."""
    reqs = draw(st.integers(max(tiers, 1), 40))
    policy = draw(st.sampled_from((Policy.DEFAULT, Policy.VLLM, Policy.SGLANG, Policy.POWERS_OF_TWO)))
    options = {"sizes": Sizes(policy=policy), "refresh": draw(st.sampled_from(Refresh))}
    if tiers == 1:
        options["speculative"] = Speculative(method=Method.MTP, num_tokens=draw(st.integers(1, 4)))
    elif tiers > 1:
        ends = draw(st.lists(st.integers(1, reqs - 1), min_size=tiers - 1, max_size=tiers - 1, unique=True))
        lengths = draw(st.lists(st.integers(0, 6), min_size=tiers, max_size=tiers, unique=True))
        bounds = [0, *sorted(ends), reqs]
        lengths = sorted(lengths, reverse=True)
        options["schedule"] = tuple((bounds[i] + 1, bounds[i + 1], lengths[i]) for i in range(tiers))
    return made(reqs=reqs, tokens=512, **options)


def export_text(export):
    """What people are shown of an export."""
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(tables(export_report(export, Path("file"), None)))
    return capture.get()


def proved(engine, planned):
    """Return the export of a plan with its proof, by the restated engine."""
    return prove(find_engine(engine).export(planned), planned, EMULATORS[engine])


@given(PLANS)
def test_proof_of_an_exact_engine_has_no_difference(planned):
    """Nothing differs from an engine that executes the plan."""
    proof = compared(planned, emulation_of(planned))
    assert proof.exact
    assert len(proof.same) == planned.num_graphs


@given(entries(lora=True, varying=False), st.data())
def test_effect_sees_every_field_of_an_entry(ours, data):
    """Equal graphs alone have none; a chain of one draft decode is a single step."""
    name = data.draw(st.sampled_from(("num_tokens", "num_reqs", "query_len", "active_loras", "draft_steps")))
    theirs = attrs.evolve(ours, **{name: data.draw(st.integers(1, 3))})
    pair = [attrs.evolve(e, draft_steps=None if e.draft_steps == 1 else e.draft_steps) for e in (ours, theirs)]
    assert (effect(ours, theirs) is None) is (pair[0] == pair[1])


@given(PLANS, st.data())
def test_proof_names_a_missing_graph_and_its_batches(planned, data):
    """Without one of its graphs, the proof names it, and the batches that it served if it served any."""
    whole = emulation_of(planned)
    assume(whole.graphs)
    gone = data.draw(st.sampled_from(whole.graphs))

    def dispatch(batch):
        answer = whole.dispatch(batch)
        lost = batch.role is gone.role and answer.entry == gone.entry
        return Dispatch(None, reason=Reason.SIZES) if lost else answer

    managers = tuple(
        attrs.evolve(manager, graphs=tuple(graph for graph in manager.graphs if graph != gone), dispatch=dispatch)
        for manager in whole.managers
    )
    proof = compared(planned, attrs.evolve(whole, managers=managers))
    assert proof.lacks == (gone,)
    assert not proof.exact
    assert {d.effect for d in proof.differences} <= {Effect.EAGER}
    assert {d.planned for d in proof.differences} <= {gone.entry}


@given(NAMES, PLANS, st.data())
def test_proof_holds_for_every_batch(engine, planned, data):
    """An admissible batch differs exactly where the proof says so, and as it says."""
    export = find_engine(engine).export(planned)
    emulation = emulated(export, planned.environment, EMULATORS[engine])
    proof = compared(planned, emulation)
    batch = data.draw(batches(planned))
    tiers = decode_families(batch.role, planned)
    assume(batch.role not in proof.unrun and is_admissible(batch, planned, tiers))
    uniform = any(f.query_len == batch.uniform_query_len and batch.num_reqs in f.requests for f in tiers)
    kind = Kind.DECODE if uniform else Kind.MIXED
    if kind is Kind.MIXED:
        batch = attrs.evolve(batch, query_len=None, past_prompt=False)
    if batch.role.is_drafter:
        batch = attrs.evolve(batch, active_loras=0)
    count = batch.num_reqs if uniform else batch.num_tokens
    said = [
        d
        for d in proof.differences
        if (d.role, d.kind) == (batch.role, kind)
        and d.query_len == batch.query_len
        and d.first <= count <= d.last
        and d.min_loras <= batch.active_loras <= d.max_loras
        and (uniform or d.min_reqs <= batch.num_reqs <= d.max_reqs)
    ]
    found = effect(Dispatcher(planned).dispatch(batch).entry, emulation.dispatch(batch).entry)
    assert [d.effect for d in said] == ([] if found is None else [found])


@given(NAMES, PLANS)
def test_proof_counts_each_graph_once(engine, planned):
    """What both have and what one has make up each side; losses cost what differs in their scope."""
    export = find_engine(engine).export(planned)
    assert all(loss.cost is None and loss.says for loss in export.losses)
    assert len({loss.name for loss in export.losses}) == len(export.losses)
    assert ("lazy-capture" in {loss.name for loss in export.losses}) == (planned.num_lazy > 0)
    proven = prove(export, planned, EMULATORS[engine])
    proof = proven.proof
    emulation = emulated(export, planned.environment, EMULATORS[engine])
    assert len(proof.same) + len(proof.lacks) == planned.num_graphs
    assert len(proof.same) + len(proof.adds) == len(emulation.graphs)
    assert all(loss.cost == proof.cost(loss.scope) for loss in proven.losses)
    assert proof.assumptions == emulation.assumptions
    assert plain(proven)["proof"]["exact"] is proof.exact


@given(NAMES, PLANS)
def test_nothing_is_lost_only_where_the_proof_says_so(engine, planned):
    """Whatever losses a plugin names, such as none."""
    export = attrs.evolve(proved(engine, planned), losses=())
    proof = export.proof
    lesser = any(d.effect in (Effect.EAGER, Effect.WEAKER, Effect.PADDED) for d in proof.differences)
    lost = bool(proof.lacks or proof.unrun or lesser)
    text = export_text(export)
    assert ("nothing of the plan is lost" in text) is not lost
    assert ("names no loss" in text) is lost
    assert (proof.loss is None) is not lost
    assert ("runs no separate passes of" in text) is bool(proof.unrun)


@given(NAMES, PLANS)
def test_export_names_every_loss(engine, planned):
    """Where a batch or a graph is lost, the export had said so before it was tried."""
    export = proved(engine, planned)
    said = {scope for loss in export.losses for scope in loss.scope}
    losses = (Effect.EAGER, Effect.WEAKER, Effect.PADDED)
    lost = {(d.role, d.kind) for d in export.proof.differences if d.effect in losses}
    assert lost | {graph_scope(graph) for graph in export.proof.lacks} <= said


@given(NAMES, PLANS)
def test_export_file_equals_export_flags(engine, planned):
    """The file is YAML, and gives the same words; where the flags refer to it, they hold nothing else."""
    export = find_engine(engine).export(planned)
    data = YAML(typ="safe", pure=True).load(export.file)
    assert data == export.settings
    if export.by_file:
        assert export.command("/x.yaml") == (planned.model.name, "--config", "/x.yaml")
        assert data["max_batch_size"] == planned.limits.max_num_reqs
    else:
        assert tuple(as_words(data)) == export.flags
    named = planned.speculative is not None and planned.speculative.method is not Method.MTP
    drafts = engine == "vllm" or any(k for *_, k in decode_tiers(planned))
    assert (DRAFT_MODEL in export.file) == (named and drafts)


@given(PLANS)
def test_vllm_export_keeps_full_decodes(planned):
    """Every target decode with a FULL graph has one in vLLM, whatever the schedule and the sizes.

    Not so where the schedule is dropped, or alignment pads a graph beyond the limits.
    """
    assume(planned.parallel.data == 1 and not planned.parallel.sequence)
    proof = proved("vllm", planned).proof
    for lost in (Effect.EAGER, Effect.WEAKER):
        assert proof.count(lost, Role.TARGET, Kind.DECODE) == 0


@given(deployed(tiers=0), st.booleans())
def test_vllm_export_of_one_size_list_is_exact(planned, full):
    """Where one list is what the plan has, vLLM has the same graphs and answers alike."""
    if full:
        planned = made(reqs=planned.limits.max_num_reqs, tokens=512, mode=GraphMode.FULL)
    else:
        sizes = tuple(sorted({e.num_reqs for e in planned.role(Role.TARGET).entries if e.num_reqs}))
        only = Sizes(policy=Policy.EXPLICIT, num_reqs=sizes, num_tokens=sizes)
        planned = made(reqs=planned.limits.max_num_reqs, tokens=512, sizes=only)
    assert proved("vllm", planned).proof.exact


@given(deployed(tiers=0) | deployed(tiers=1))
def test_sglang_export_keeps_decodes_of_one_query_length(planned):
    """Without a schedule, target decodes are answered as planned."""
    proof = proved("sglang", planned).proof
    assert not [d for d in proof.differences if (d.role, d.kind) == (Role.TARGET, Kind.DECODE)]


@given(deployed(tiers=0) | deployed(tiers=1) | deployed(tiers=2) | deployed(tiers=3))
def test_tensorrt_llm_export_keeps_decodes_of_a_falling_schedule(planned):
    """Target decodes keep their graphs and are padded no further: each length has its last batch."""
    proof = proved("tensorrt-llm", planned).proof
    for lost in (Effect.EAGER, Effect.WEAKER, Effect.PADDED):
        assert proof.count(lost, Role.TARGET, Kind.DECODE) == 0
    assert set(proof.unrun) == {role.role for role in planned.roles} - {Role.TARGET}


def test_rising_schedule_is_a_loss():
    """SGLang takes none, TensorRT-LLM none that rises; both say so, and how many batches it costs."""
    planned = made(((1, 4, 1), (5, 16, 3)), reqs=16)
    for engine in ("sglang", "tensorrt-llm"):
        losses = {loss.name: loss for loss in proved(engine, planned).losses}
        assert losses["schedule"].cost.eager + losses["schedule"].cost.weaker >= 4
    falling = made(((1, 4, 3), (5, 16, 1)), reqs=16)
    assert "schedule" not in {loss.name for loss in proved("tensorrt-llm", falling).losses}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", [Policy.VLLM, Policy.DEFAULT, Policy.POWERS_OF_TWO])
def test_export_of_published_schedules_misses_no_batch(schedule, policy):
    """With vLLM's own sizes and with ours, no batch of the published schedules loses its graph."""
    planned = made(schedule, sizes=Sizes(policy=policy))
    export = proved("vllm", planned)
    names = {loss.name: loss for loss in export.losses}
    assert "sizes-replaced" in names
    for role in (Role.TARGET, Role.DRAFT_PREFILL):
        assert export.proof.count(Effect.WEAKER, role, Kind.DECODE) == 0
        assert export.proof.count(Effect.EAGER, role, Kind.DECODE) == 0
    assert names["sizes-replaced"].cost == export.proof.cost(names["sizes-replaced"].scope)
    assert names["sizes-replaced"].cost.weaker == 0


def test_plan_sizes_given_to_vllm_miss_batches():
    """The plan's own sizes, given to vLLM as they are, do miss batches: the other list is needed."""
    for schedule in SCHEDULES:
        planned = made(schedule, sizes=Sizes(policy=Policy.VLLM))
        sizes = sorted({entry.num_tokens for entry in planned.role(Role.TARGET).entries})
        widths = sorted({1 + k for *_, k in schedule})
        table = vllm_table(Role.TARGET, GraphMode.FULL_AND_PIECEWISE, sizes, widths, 256)
        weaker = 0
        for first, last, k in schedule:
            for count in range(first, last + 1):
                batch = Batch(role=Role.TARGET, num_reqs=count, num_tokens=count * (1 + k), query_len=1 + k)
                weaker += table.dispatch(batch).mode is not GraphMode.FULL
        assert weaker > 0


@pytest.mark.parametrize("engine", sorted(engines()))
def test_export_of_a_plan_without_graphs_is_exact(engine):
    """NONE stays NONE: nothing is captured, nothing differs."""
    proof = proved(engine, made(mode=GraphMode.NONE)).proof
    assert (proof.same, proof.lacks, proof.adds, proof.differences) == ((), (), (), ())


@pytest.mark.parametrize("engine", sorted(engines()))
def test_export_refuses_a_plan_without_target(engine):
    """There is nothing to serve."""
    planned = made(SCHEDULES[0])
    with pytest.raises(DispatchError, match="no role target"):
        find_engine(engine).export(attrs.evolve(planned, roles=planned.roles[1:]))


@pytest.mark.parametrize("engine", sorted(engines()))
def test_a_plan_of_varying_decodes_is_refused(engine):
    """No engine has such graphs at a plan's sizes: one line says so, from the export and from the launch."""
    uniform = made(speculative=Speculative(method=Method.EAGLE3, num_tokens=3))
    planned = replace(uniform, speculative=replace(uniform.speculative, varying_decodes=(Role.TARGET,)))
    found = find_engine(engine)
    calls = [found.export] if found.launch is None else [found.export, lambda plan: found.launch(plan, [])]
    for call in calls:
        with pytest.raises((FlagError, RunError), match=r"vary in length, and|has speculative decoding"):
            call(planned)


def test_unknown_backend_is_a_loss():
    """VLLM and SGLang name theirs; another one is a loss with a sentence."""
    planned = made()
    for engine, name in (("vllm", "FLASH_ATTN"), ("sglang", "fa3")):
        flags = find_engine(engine).export(planned).flags
        assert flags[flags.index("--attention-backend") + 1] == name
        role = planned.roles[0]
        groups = tuple(attrs.evolve(group, backend="reference") for group in role.groups)
        other = find_engine(engine).export(attrs.evolve(planned, roles=(attrs.evolve(role, groups=groups),)))
        assert "--attention-backend" not in other.flags
        assert "no attention backend reference" in {loss.name: loss for loss in other.losses}["backend"].says


def refusing(engine, *flags):
    """Return the restated engine, which refuses a command line with any of these words."""

    def emulate(words, machine):
        if set(flags) & set(words):
            path = ("--attention-backend",) if "--attention-backend" in flags else ("--environment",)
            raise FlagError([Problem(path=path, message="it has no such kernel", remedy="buy another")])
        return EMULATORS[engine](words, machine)

    return emulate


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_refused_backend_is_a_loss_and_not_exported(engine):
    """It is a loss with the engine's reason; flags and file are without it, and what is left is proved."""
    planned = made()
    export = find_engine(engine).export(planned)
    found = prove(export, planned, refusing(engine, "--attention-backend"))
    assert found.backend is None
    kept = tuple(word for word in export.flags if word not in ("--attention-backend", export.backend))
    assert found.flags == kept
    assert tuple(as_words(YAML(typ="safe", pure=True).load(found.file))) == found.flags
    (lost,) = [loss for loss in found.losses if loss.name == "backend"]
    assert "it has no such kernel" in lost.says
    assert "h100" in lost.says
    assert found.unproved is None
    assert found.proof.batches == prove(export, planned, EMULATORS[engine]).proof.batches
    assert lost.cost == found.proof.cost(lost.scope)


@pytest.mark.parametrize("engine", sorted(engines()))
def test_refused_flags_have_no_proof(engine):
    """They are there, with no proof, and the engine's reason in its place; losses have no cost."""
    planned = made()
    export = find_engine(engine).export(planned)
    found = prove(export, planned, refusing(engine, export.flags[0]))
    assert found == attrs.evolve(export, unproved=found.unproved)
    assert "it has no such kernel; buy another" in found.unproved
    assert (plain(found)["proof"], plain(found)["unproved"]) == (None, found.unproved)


def test_refused_file_has_its_output_name():
    """Not that of the file that lay on disk for the proof."""
    planned = made()

    def emulate(command, machine):
        path = command[command.index("--config") + 1]
        raise FlagError([Problem(path=("--config",), file=path, line=3, message="no")])

    found = prove(find_engine("tensorrt-llm").export(planned), planned, emulate)
    assert found.unproved.endswith("tensorrt-llm.yaml:3: --config: no")
    assert "/" not in found.unproved


@given(PLANS)
def test_vllm_export_captures_no_more_than_the_budget_allows(planned):
    """Or it says that no list of sizes does; full decodes keep a full graph all the same."""
    emulator = EMULATORS["vllm"]
    export = within_budget(proved("vllm", planned), planned, emulator)
    bound = planned.allowed_graphs()
    captured = len(emulated(export, planned.environment, emulator).graphs)
    says = [loss.says for loss in export.losses if loss.name == "budget"]
    assert captured == export.proof.captured
    assert bound is None or captured <= bound[0] or "even with" in says[0]
    if planned.parallel.data == 1 and not planned.parallel.sequence:
        for lost in (Effect.EAGER, Effect.WEAKER):
            assert export.proof.count(lost, Role.TARGET, Kind.DECODE) == 0
