"""vLLM's graph managers: the published misses, and the rules in words against the managers."""

import random

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, GraphSupport, Reason, Role
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.records.batch import Batch, Entry
from capture_planner_vllm.emulation import legacy, schedule
from capture_planner_vllm.emulation.drafter import DraftDecode, DraftPrefill, draft_modes
from capture_planner_vllm.emulation.managers import managers
from capture_planner_vllm.emulation.settings import DrafterKind, RunnerVersion
from capture_planner_vllm.emulation.table import TableManager
from engines.generators import vllm_managers as cases
from engines.generators import vllm_ranks

PUBLISHED = [
    (((1, 16, 2), (17, 256, 1)), 20, 102, 53),
    (((1, 16, 5), (17, 64, 3), (65, 256, 1)), 44, 150, 69),
    (((1, 16, 4), (17, 64, 2), (65, 256, 0)), 80, 141, 54),
]
SIZES = st.sets(st.integers(1, 8) | st.integers(1, 80), min_size=1, max_size=10).map(lambda found: tuple(sorted(found)))
SEEDS = st.integers(0, 10_000)


def of_schedule(tiers: tuple[schedule.Tier, ...], mode: GraphMode) -> tuple[TableManager, list[Batch]]:
    """Return the target's manager with the default sizes, and the decode of every batch size."""
    k = max(tier[2] for tier in tiers)
    sizes = vllm_tokens(
        max_num_reqs=256,
        max_num_tokens=8192,
        query_len=1 + k,
        platform_max=512,
        tiers=[(1 + drafts, last) for _, last, drafts in tiers],
    )
    lookup = schedule.draft_tokens(tiers, max_num_reqs=256, num_speculative=k)
    manager = TableManager(
        role=Role.TARGET,
        mode=mode,
        sizes=sizes,
        max_size=sizes[-1],
        max_num_reqs=256,
        query_len=1 + k,
        query_lens=schedule.query_lens(lookup),
    )
    return manager, [decode(reqs, 1 + lookup[reqs]) for reqs in range(1, 257)]


def decode(reqs: int, width: int) -> Batch:
    return Batch(role=Role.TARGET, num_reqs=reqs, num_tokens=reqs * width, query_len=width)


def mixed(reqs: int, tokens: int) -> Batch:
    return Batch(role=Role.TARGET, num_reqs=reqs, num_tokens=tokens, past_prompt=False)


@pytest.mark.parametrize(("tiers", "missed", "captured", "reachable"), PUBLISHED)
def test_published_schedules_miss_graphs(
    tiers: tuple[schedule.Tier, ...], missed: int, captured: int, reachable: int
) -> None:
    """Decodes miss a compatible graph, and graphs are out of reach, as often as the engine was seen to."""
    manager, batches = of_schedule(tiers, GraphMode.FULL_AND_PIECEWISE)
    assert sum(cases.misses(manager, batch) for batch in batches) == missed
    full = [graph.entry for graph in manager.graphs if graph.entry.mode is GraphMode.FULL]
    reached = {manager.dispatch(batch).entry for batch in batches} & {*full}
    assert (len(full), len(reached)) == (captured, reachable)


def test_missed_graph_of_the_published_example() -> None:
    """5 decodes of 3 tokens run piecewise, or eager and shadowed, although a graph for 6 of 3 is there."""
    tiers = PUBLISHED[0][0]
    manager, _ = of_schedule(tiers, GraphMode.FULL_AND_PIECEWISE)
    batch = decode(5, 3)
    assert manager.dispatch(batch).mode is GraphMode.PIECEWISE
    wanted = Entry(mode=GraphMode.FULL, num_tokens=18, num_reqs=6, query_len=3)
    assert wanted in {graph.entry for graph in manager.compatible(manager.query(batch))}
    alone, _ = of_schedule(tiers, GraphMode.FULL_DECODE_ONLY)
    assert alone.dispatch(batch).reason is Reason.SHADOWED


def test_published_sizes_1_to_32_give_four_full_graphs() -> None:
    """Sizes 1 to 32 with K = 2 give full graphs of 3, 6, 9 and 18 tokens only."""
    sizes = (1, 2, 4, 8, 16, 32)
    manager = TableManager(
        role=Role.TARGET,
        mode=GraphMode.FULL_DECODE_ONLY,
        sizes=sizes,
        max_size=32,
        max_num_reqs=256,
        query_len=3,
        query_lens=(3,),
    )
    assert [graph.entry.num_tokens for graph in manager.graphs] == [18, 9, 6, 3]


def test_published_limits_leave_large_batches_without_a_graph() -> None:
    """With K = 3, 256 requests and 512 tokens, batches from 129 requests on are beyond the sizes."""
    manager, _ = of_schedule(((1, 256, 3),), GraphMode.FULL_AND_PIECEWISE)
    answers = [manager.dispatch(decode(reqs, 4)) for reqs in range(1, 257)]
    assert [answer.mode for answer in answers[:128]] == [GraphMode.FULL] * 128
    assert {answer.reason for answer in answers[128:]} == {Reason.SIZES}


@given(SIZES, st.sets(st.integers(1, 5), min_size=1), st.integers(1, 20), st.booleans(), st.sampled_from(GraphMode))
def test_dispatch_table_equals_brute_force(
    sizes: tuple[int, ...], widths: set[int], reqs: int, varlen: bool, mode: GraphMode
) -> None:
    """Of each mode only the smallest captured size that holds the tokens is looked at, FULL first."""
    widest = max(widths)
    manager = TableManager(
        role=Role.TARGET,
        mode=mode,
        sizes=sizes,
        max_size=sizes[-1],
        max_num_reqs=reqs,
        query_len=widest,
        query_lens=tuple(sorted(widths)),
        varlen=varlen,
    )
    graphs = manager.graphs
    order = [(g.entry.mode is GraphMode.FULL, -g.entry.num_tokens) for g in graphs]
    assert order == sorted(order)
    assert len(set(graphs)) == len(graphs)
    rng = random.Random(sum(sizes))
    batches = [decode(n, width) for n in range(1, reqs + 1) for width in widths]
    batches += [mixed(rng.randint(1, min(n, reqs)), n) for n in range(1, 90)]
    for batch in batches:
        large = [g for g in graphs if g.entry.num_tokens >= batch.num_tokens]
        compatible = [
            g
            for g in large
            if (g.entry.num_reqs is None or g.entry.num_reqs >= batch.num_reqs)
            and g.entry.query_len in (None, batch.uniform_query_len)
            and (g.max_query_len is None or batch.past_prompt)
        ]
        found = []
        for kind in (GraphMode.FULL, GraphMode.PIECEWISE):
            nearest = min((g.entry.num_tokens for g in large if g.entry.mode is kind), default=0)
            found += [g.entry for g in compatible if g.entry.mode is kind and g.entry.num_tokens == nearest]
        answer = manager.dispatch(batch)
        assert answer.entry == (found[0] if found else None)
        assert (answer.reason is Reason.SHADOWED) == bool(compatible and not found)
        assert (answer.reason is None) == bool(found)


@given(SEEDS)
def test_dispatch_has_an_entry_or_a_reason(seed: int) -> None:
    """Every batch has an entry or a reason, with padding that leads from the batch to the entry."""
    case = cases.case(1, seed)
    for manager in managers(case.configuration.settings):
        entries = {graph.entry for graph in manager.graphs}
        for rows, loras in case.batches:
            answer = manager.dispatch(cases.as_batch(manager.role, rows, loras))
            assert (answer.entry is None) == (answer.reason is not None)
            assert answer.entry is None or answer.entry in entries
            assert min(answer.padded_tokens, answer.padded_reqs) >= 0


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (Batch(role=Role.TARGET, num_reqs=0, num_tokens=0), Reason.NOT_ADMISSIBLE),
        (decode(9, 3), Reason.NOT_ADMISSIBLE),
        (attrs.evolve(decode(2, 3), active_loras=1), Reason.NOT_ADMISSIBLE),
        (decode(2, 2), Reason.MODE),
        (mixed(2, 6), Reason.MODE),
        (decode(8, 3), Reason.SIZES),
    ],
)
def test_each_reason_has_its_kind_of_batch(batch: Batch, reason: Reason) -> None:
    """Each reason is given for its own kind of batch."""
    manager = TableManager(
        role=Role.TARGET,
        mode=GraphMode.FULL_DECODE_ONLY,
        sizes=(3, 6, 12),
        max_size=12,
        max_num_reqs=8,
        query_len=3,
        query_lens=(3,),
    )
    assert manager.dispatch(batch).reason is reason


def test_empty_batch_has_no_graph() -> None:
    """No table leads from a batch without tokens, or without requests, to its smallest graph."""
    empty = Batch(role=Role.TARGET, num_reqs=0, num_tokens=0)
    target, _ = of_schedule(((1, 256, 0),), GraphMode.PIECEWISE)
    old = legacy.PaddedManager(role=Role.TARGET, mode=GraphMode.PIECEWISE, sizes=(1, 2), max_num_reqs=8, query_len=1)
    for manager in (target, old):
        assert manager.dispatch(empty).reason is Reason.NOT_ADMISSIBLE


def test_prompt_in_the_shape_of_a_decode_has_no_decode_graph() -> None:
    """A uniform graph and a varlen graph refuse prompts; the legacy and the first table do not."""
    batch = attrs.evolve(decode(2, 3), past_prompt=False)
    for varlen in (False, True):
        manager = TableManager(
            role=Role.TARGET,
            mode=GraphMode.FULL_DECODE_ONLY,
            sizes=(3, 6),
            max_size=6,
            max_num_reqs=8,
            query_len=3,
            query_lens=(3,),
            varlen=varlen,
        )
        assert manager.dispatch(decode(2, 3)).mode is GraphMode.FULL
        assert manager.dispatch(batch).reason is Reason.MODE
    mode = GraphMode.FULL_DECODE_ONLY
    old = legacy.PaddedManager(role=Role.TARGET, mode=mode, sizes=(3, 6), max_num_reqs=8, query_len=3)
    assert old.dispatch(batch).mode is GraphMode.FULL


def test_drafter_is_asked_with_the_targets_padding() -> None:
    """Where the target misses its graph and pads, the drafter can find its own at the padded size."""
    target, batches = of_schedule(PUBLISHED[0][0], GraphMode.FULL_AND_PIECEWISE)
    table = attrs.evolve(target, role=Role.DRAFT_PREFILL)
    prefill = DraftPrefill(table=table, target=target)
    batch = batches[20]
    assert target.dispatch(batch).entry == Entry(mode=GraphMode.PIECEWISE, num_tokens=48)
    assert table.dispatch(batch).entry == Entry(mode=GraphMode.PIECEWISE, num_tokens=48)
    answer = prefill.dispatch(batch)
    assert answer.entry == Entry(mode=GraphMode.FULL, num_tokens=48, num_reqs=24, query_len=2)
    assert (answer.padded_tokens, answer.padded_reqs) == (6, 3)
    differing = [b for b in batches if prefill.dispatch(b).mode is not target.dispatch(b).mode]
    assert len(differing) == 15
    assert all(cases.misses(target, b) for b in differing)


@given(SEEDS)
def test_drafters_capture_nothing_where_the_target_does_not(seed: int) -> None:
    """GPUModelRunner.capture_model asks the target alone; sizes below 1 + K are no full decode, and are a draft's."""
    found = cases.case(2, seed).configuration
    drafts = {"num_speculative_tokens": 3, "drafter": "chain", "draft_query_len": 0, "schedule": None, "varlen": False}
    sizes = {"mode": GraphMode.FULL_DECODE_ONLY, "sizes": (1,), "max_size": 1}
    target, *drafters = managers(attrs.evolve(found, runner="v2", **sizes, **drafts).settings)  # type: ignore[arg-type]
    assert not target.graphs
    assert len(drafters) == 2
    for manager in drafters:
        assert not manager.graphs
        answer = manager.dispatch(Batch(role=manager.role, num_reqs=1, num_tokens=1, query_len=1))
        assert answer.mode is GraphMode.NONE


@given(SEEDS)
def test_drafter_managers_capture_the_schedules_chains(seed: int) -> None:
    """Draft decodes are never piecewise; chains are those of the schedule, each at every size."""
    found = cases.case(2, seed).configuration
    runner = found.runner
    for manager in managers(found.settings):
        if not isinstance(manager, DraftDecode):
            continue
        assert runner == "v2"
        full = GraphMode.FULL in found.mode.decode_mode.allowed
        assert {graph.entry.mode for graph in manager.graphs} <= ({GraphMode.FULL} if full else set())
        lookup = found.drafted
        steps = {graph.entry.draft_steps for graph in manager.graphs}
        expected = {n - 1 for n in lookup if n > 1} if found.draft_fused else {None}
        assert steps == (expected if manager.table.graphs else set())
        for reqs in range(1, found.max_num_seqs + 1):
            answer = manager.dispatch(Batch(role=manager.role, num_reqs=reqs, num_tokens=reqs, query_len=1))
            least = 1 if found.drafter == "parallel" else 2
            assert (answer.reason is Reason.NOT_ADMISSIBLE) == (lookup[reqs] < least)
            if answer.entry is not None and found.draft_fused:
                assert answer.entry.draft_steps == lookup[reqs] - 1


def test_chain_that_is_not_captured_runs_eager_and_padded() -> None:
    """A longer chain is never taken for a shorter one."""
    table = TableManager(
        role=Role.DRAFT_DECODE,
        mode=GraphMode.FULL_DECODE_ONLY,
        sizes=(1, 4, 8),
        max_size=8,
        max_num_reqs=8,
        query_len=1,
        query_lens=(1,),
    )
    manager = DraftDecode(table=table, draft_tokens=(0, *(3,) * 8), chains=(3,))
    answer = manager.dispatch(Batch(role=Role.DRAFT_DECODE, num_reqs=3, num_tokens=3, query_len=1))
    assert (answer.entry, answer.reason, answer.padded_tokens) == (None, Reason.MODE, 1)


@given(SEEDS)
def test_ranks_agree(seed: int) -> None:
    """All ranks run the same number of rows in the same mode, or none has a graph and none pads."""
    case = cases.case(3, seed)
    target = managers(case.configuration.settings)[0]
    assume(isinstance(target, TableManager))
    for step in case.steps:
        batches = [
            cases.as_batch(Role.TARGET, rows, loras) if rows else vllm_ranks.idle(target) for rows, loras in step
        ]
        alone = [target.dispatch(batch) for batch in batches]
        answers, agreement = vllm_ranks.agree(target, batches)
        assert agreement is not None
        assert agreement.eager == any(answer.entry is None for answer in alone)
        assert len({answer.mode for answer in answers}) == 1
        if agreement.eager:
            assert {answer.padded_tokens for answer in answers} == {0}
            assert agreement.num_tokens == tuple(batch.num_tokens for batch in batches)
        else:
            rows = {b.num_tokens + a.padded_tokens for b, a in zip(batches, answers, strict=True)}
            assert rows == {*agreement.num_tokens}
            assert len(rows) == 1
        assert vllm_ranks.agree(target, batches[:1]) == ((alone[0],), None)


def test_idle_ranks_run_nothing() -> None:
    """Where no rank has a token, nothing runs and nothing is agreed."""
    target = managers(cases.case(3, 0).configuration.settings)[0]
    assert isinstance(target, TableManager)
    nothing = Batch(role=Role.TARGET, num_reqs=0, num_tokens=0)
    answers, agreement = vllm_ranks.agree(target, [nothing, nothing])
    assert agreement is None
    assert {answer.reason for answer in answers} == {Reason.IDLE}


@given(SIZES, st.integers(1, 6), st.sampled_from(GraphMode))
def test_legacy_sizes_are_multiples(sizes: tuple[int, ...], width: int, mode: GraphMode) -> None:
    """Where decodes of several tokens run in full graphs, sizes are multiples up to the largest, or refused."""
    if mode.decode_mode is not GraphMode.FULL or width == 1:
        assert legacy.speculative_sizes(sizes, sizes[-1], query_len=width, mode=mode) == sizes
    elif sizes[-1] < width:
        with pytest.raises(FlagError, match="no capture size"):
            legacy.speculative_sizes(sizes, sizes[-1], query_len=width, mode=mode)
    else:
        kept = legacy.speculative_sizes(sizes, sizes[-1], query_len=width, mode=mode)
        multiples = range(width, sizes[-1] + 1, width)
        assert {*kept} == {m for m in multiples if any(m - width < s <= m for s in sizes)} or kept == (width,)
        assert legacy.speculative_sizes(kept, kept[-1], query_len=width, mode=mode) == kept


@given(SEEDS)
def test_schedule_gap_uses_the_range_before(seed: int) -> None:
    """Each batch size drafts as its range says, or as the last range before it, and never above K."""
    case = cases.schedule_case(4, seed)
    assume(cases.schedule_answer(case) is not None)
    tiers = schedule.normalized(case.schedule)
    k, reqs = case.num_speculative_tokens, case.max_num_seqs
    lookup = schedule.draft_tokens(tiers, max_num_reqs=reqs, num_speculative=k)
    last, dense = 0, [0]
    for n in range(1, reqs + 1):
        last = next((drafts for start, end, drafts in tiers if start <= n <= end), last)
        dense.append(min(last, k))
    assert [*lookup] == dense
    assert [*schedule.query_lens(lookup)] == sorted({1 + drafts for drafts in dense[1:]})


@given(SEEDS)
def test_invalid_schedule_is_refused(seed: int) -> None:
    """A schedule without an answer is an error that names its part of the configuration."""
    case = cases.schedule_case(4, seed)
    assume(cases.schedule_answer(case) is None)
    with pytest.raises(FlagError, match="num_speculative_tokens_per_batch_size"):
        schedule.normalized(case.schedule)


@given(st.sampled_from(GraphMode), st.sampled_from(DrafterKind), st.booleans(), st.sampled_from(GraphSupport))
def test_modes_of_drafters(mode: GraphMode, drafter: DrafterKind, breakable: bool, support: GraphSupport) -> None:
    """A drafter captures no more than its target, pieces in its first pass only, and eager drafts nothing."""
    first_, later = draft_modes(mode, drafter, RunnerVersion.V2, breakable=breakable, support=support)
    assert (first_ is None) == (drafter in (DrafterKind.NONE, DrafterKind.PARALLEL))
    assert (later is None) == (drafter in (DrafterKind.NONE, DrafterKind.MODULES))
    assert first_ is None or first_ <= mode
    assert later in (None, GraphMode.NONE, GraphMode.FULL_DECODE_ONLY)
    assert later is not GraphMode.FULL_DECODE_ONLY or mode.decode_mode is GraphMode.FULL
    if drafter is DrafterKind.MODULES and first_ is not None:
        assert breakable or not first_.has_piecewise
    if drafter is DrafterKind.PARALLEL and support < GraphSupport.UNIFORM_BATCH:
        assert later is GraphMode.NONE
    assert set(draft_modes(mode, drafter, RunnerVersion.V1, eager=True)) == {GraphMode.NONE}
