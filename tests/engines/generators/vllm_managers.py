"""Random configurations of vLLM's graph managers with batches, and our answers as plain data.

The same seed gives the same cases on every machine. A row of a batch is (tokens scheduled, whether
prompt tokens are left), so that an engine can be given what it sees, and we what a Batch says of it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph, Manager
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_vllm.emulation import legacy, schedule
from capture_planner_vllm.emulation.drafter import DraftDecode, draft_modes
from capture_planner_vllm.emulation.managers import managers
from capture_planner_vllm.emulation.overlap import Overlap
from capture_planner_vllm.emulation.settings import DrafterKind, RunnerVersion, VllmSettings, lora_cases
from capture_planner_vllm.emulation.table import TableManager
from engines.generators import vllm_ranks

Rows = tuple[tuple[int, bool], ...]


@attrs.frozen(kw_only=True)
class Configuration:
    """What is drawn: the engine is configured with it, and our settings are made from it."""

    runner: RunnerVersion
    mode: GraphMode
    sizes: tuple[int, ...]
    max_size: int
    max_num_seqs: int
    num_speculative_tokens: int = 0
    schedule: tuple[schedule.Tier, ...] | None = None
    drafter: DrafterKind = DrafterKind.NONE
    draft_query_len: int = 0
    draft_fused: bool = False
    varlen: bool = False
    overlap: Overlap | None = None
    """Every answer is then of two ranks that run the same batch."""
    max_loras: int = 0
    capture_fewer: bool = True
    """vLLM's ``cudagraph_specialize_lora``."""
    specialize_lora: bool = False
    """vLLM's ``specialize_active_lora``."""

    @property
    def drafted(self) -> tuple[int, ...]:
        """Draft tokens of each batch size; index 0 is unused."""
        tiers = () if self.schedule is None else schedule.normalized([*self.schedule])
        most = self.num_speculative_tokens
        return schedule.draft_tokens(tiers, max_num_reqs=self.max_num_seqs, num_speculative=most)

    @property
    def settings(self) -> VllmSettings:
        """The settings, as the flags' own way would end with them."""
        sizes = self.sizes
        if self.runner is RunnerVersion.V1:
            width = 1 + self.num_speculative_tokens
            sizes = legacy.speculative_sizes(sizes, self.max_size, query_len=width, mode=self.mode)
        prefill = decode = None
        if self.drafter is not DrafterKind.NONE:
            prefill, decode = draft_modes(self.mode, self.drafter, self.runner)
        return VllmSettings(
            runner=self.runner,
            sizes=sizes,
            max_size=self.max_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=sizes[-1],
            max_model_len=1 << 20,
            requested_mode=self.mode,
            configured_mode=self.mode,
            mode=self.mode,
            draft_prefill_mode=prefill,
            draft_decode_mode=decode,
            drafter=self.drafter,
            num_speculative_tokens=self.num_speculative_tokens,
            schedule=self.schedule,
            drafted=self.drafted,
            draft_query_len=self.draft_query_len,
            draft_fused=self.draft_fused,
            lora_cases=lora_cases(
                self.max_loras, self.runner, separate=self.capture_fewer, specialize=self.specialize_lora
            ),
            varlen=self.varlen,
            overlap=self.overlap,
            max_loras=self.max_loras,
            specialize_lora=self.specialize_lora,
        )


@attrs.frozen(kw_only=True)
class Case:
    """A configuration with single-rank batches, and steps of several ranks."""

    configuration: Configuration
    batches: tuple[tuple[Rows, int], ...]
    """Rows and active adapters."""
    steps: tuple[tuple[tuple[Rows, int], ...], ...]
    """Each a batch per rank; a rank without rows is idle. None with a dynamic schedule."""


_SMALL = Configuration(
    runner=RunnerVersion.V2,
    mode=GraphMode.FULL_AND_PIECEWISE,
    sizes=(1, 2, 4, 8),
    max_size=8,
    max_num_seqs=2,
    num_speculative_tokens=3,
)
_CHAINED = attrs.evolve(_SMALL, schedule=((1, 1, 3), (2, 2, 1)), drafter=DrafterKind.CHAIN, draft_fused=True)
_WHOLE = attrs.evolve(_SMALL, varlen=True, drafter=DrafterKind.PARALLEL, draft_query_len=3)
_SPLIT = Configuration(
    runner=RunnerVersion.V1,
    mode=GraphMode.FULL_AND_PIECEWISE,
    sizes=(8, 32),
    max_size=32,
    max_num_seqs=32,
    overlap=Overlap(microbatches=2, decode_tokens=32, prefill_tokens=16),
)
BOUNDARIES = (
    # A tier of one draft token, which has no chain.
    Case(configuration=_CHAINED, batches=(), steps=()),
    # The largest size holds all requests at their widest, and the draft pass has K tokens of each.
    Case(configuration=_WHOLE, batches=(), steps=()),
    # Batches at both thresholds; padding doubles the second, whose second half would be padding alone.
    Case(configuration=_SPLIT, batches=((((1, False),) * 32, 0), (((16, True),), 0)), steps=()),
)
"""Cases at the values where a comparison of a rule changes its answer."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Return ``count`` random cases. Each has its own seed, so that one can be made again alone."""
    for index in range(count):
        yield case(seed, index)


def case(seed: int, index: int) -> Case:
    """Return the case of that number."""
    rng = random.Random(f"vllm-managers-{seed}-{index}")
    found = _configuration(rng)
    # The engine drops a dynamic schedule under data parallelism, and splits batches only where ranks agree to.
    dynamic = found.schedule is not None or found.overlap is not None
    return Case(
        configuration=found,
        batches=tuple(_batch(rng, found) for _ in range(12)),
        steps=tuple(_step(rng, found) for _ in range(4)) if not dynamic else (),
    )


@attrs.frozen(kw_only=True)
class ScheduleCase:
    """A dynamic schedule as JSON may have it, often one that is refused."""

    schedule: Any
    max_num_seqs: int
    num_speculative_tokens: int


def schedule_case(seed: int, index: int) -> ScheduleCase:
    """Return the schedule of that number."""
    rng = random.Random(f"vllm-schedule-{seed}-{index}")
    reqs, k = rng.randint(1, 60), rng.randint(1, 8)
    raw: Any = [list(tier) for tier in _tiers(rng, reqs, k)]
    kind = rng.random()
    if kind < 0.4:
        entry, field = rng.choice(raw), rng.randrange(3)
        entry[field] = rng.choice([0, -1, 1, 2, 500, 2.9, "3", "x", None, True, [1], entry[field] + 1])
    elif kind < 0.5:
        raw = rng.choice([[], None, {"1": 2}, "1:2", [[1, 2]], [5], [(1, 4, 2)], raw[1:], [*raw, raw[0]]])
    return ScheduleCase(schedule=raw, max_num_seqs=reqs, num_speculative_tokens=k)


def schedule_answer(case: ScheduleCase) -> list[int] | None:
    """Return our draft tokens of each batch size, or None where the schedule is refused."""
    try:
        tiers = schedule.normalized(case.schedule)
    except FlagError:
        return None
    k = case.num_speculative_tokens
    return [*schedule.draft_tokens(tiers, max_num_reqs=case.max_num_seqs, num_speculative=k)]


def as_batch(role: Role, rows: Rows, loras: int) -> Batch:
    """Return what a Batch says of the rows; draft decodes have one token of each."""
    if role is Role.DRAFT_DECODE:
        return Batch(role=role, num_reqs=len(rows), num_tokens=len(rows), query_len=1)
    lengths = {tokens for tokens, _ in rows}
    return Batch(
        role=role,
        num_reqs=len(rows),
        num_tokens=sum(tokens for tokens, _ in rows),
        query_len=lengths.pop() if len(lengths) == 1 else None,
        past_prompt=not any(is_prompt for _, is_prompt in rows),
        active_loras=loras,
    )


def answers(case: Case) -> dict[str, Any]:
    """Return our answers: the graphs of each role in order, each batch's answers, each step's."""
    found = managers(case.configuration.settings)
    return {
        "graphs": {manager.role.value: summary([graph_row(g) for g in manager.graphs]) for manager in found},
        "batches": [
            [answer_row(manager, as_batch(manager.role, rows, loras), None) for manager in found]
            for rows, loras in case.batches
        ],
        "steps": [_step_answers(found, step) for step in case.steps],
    }


def misses(manager: TableManager, batch: Batch) -> bool:
    """Say whether a batch gets no FULL graph although a captured one could replay it."""
    query = manager.query(batch)
    graph = manager.find(query)
    if graph is not None and graph.entry.mode is GraphMode.FULL:
        return False
    return any(graph.entry.mode is GraphMode.FULL for graph in manager.compatible(query))


def summary(rows: list[list[Any]]) -> list[Any]:
    """Return few graphs as they are, and many as their number and a digest."""
    if len(rows) <= 16:
        return rows
    text = json.dumps(rows, separators=(",", ":"))
    return [len(rows), hashlib.sha256(text.encode()).hexdigest()[:20]]


def graph_row(graph: CapturedGraph) -> list[Any]:
    """Return a graph as numbers."""
    entry = graph.entry
    return [
        entry.mode.value[0],
        entry.num_tokens,
        entry.num_reqs,
        entry.query_len,
        graph.max_query_len,
        entry.active_loras,
        entry.draft_steps,
        graph.microbatches,
    ]


def answer_row(manager: Manager, batch: Batch, answer: Dispatch | None) -> list[Any]:
    """Return an answer as numbers: the graph, or the rows that run eager, or nothing where no pass runs."""
    answer = manager.dispatch(batch) if answer is None else answer
    entry = answer.entry
    tokens = batch.num_tokens
    if isinstance(manager, DraftDecode):
        tokens = batch.num_reqs * manager.table.query_len
        if answer.reason is Reason.NOT_ADMISSIBLE:
            return []
    if entry is None:
        return ["N", tokens + answer.padded_tokens]
    assert entry.num_tokens == tokens + answer.padded_tokens
    assert entry.num_reqs is None or entry.num_reqs == batch.num_reqs + answer.padded_reqs
    row = [entry.mode.value[0], entry.num_tokens, entry.num_reqs, entry.query_len, entry.active_loras]
    return row if entry.draft_steps is None else [*row, entry.draft_steps]


def _step_answers(found: Sequence[Manager], step: Sequence[tuple[Rows, int]]) -> list[list[list[Any]]]:
    target, *drafters = found
    if isinstance(target, legacy.PaddedManager):
        return _legacy_step(found, step)
    assert isinstance(target, TableManager)
    batches = [as_batch(Role.TARGET, rows, loras) if rows else vllm_ranks.idle(target) for rows, loras in step]
    given, agreement = vllm_ranks.agree(target, batches)
    assert agreement is not None
    ranks = [[answer_row(target, batch, answer)] for batch, answer in zip(batches, given, strict=True)]
    for manager in drafters:
        assert not isinstance(manager, TableManager | legacy.PaddedManager)
        answers = vllm_ranks.draft(manager, batches, agreement)  # type: ignore[arg-type]
        for rank, batch, answer in zip(ranks, batches, answers, strict=True):
            rank.append(answer_row(manager, batch, answer))
    return ranks


def _legacy_step(found: Sequence[Manager], step: Sequence[tuple[Rows, int]]) -> list[list[list[Any]]]:
    ranks: list[list[list[Any]]] = [[] for _ in step]
    for manager in found:
        assert isinstance(manager, legacy.PaddedManager)
        batches = [
            as_batch(manager.role, rows, loras) if rows else vllm_ranks.legacy_idle(manager) for rows, loras in step
        ]
        answers = vllm_ranks.legacy(manager, batches)
        for rank, batch, answer in zip(ranks, batches, answers, strict=True):
            rank.append(answer_row(manager, batch, answer))
    return ranks


def _configuration(rng: random.Random) -> Configuration:
    runner = RunnerVersion.V1 if rng.random() < 0.2 else RunnerVersion.V2
    reqs = rng.choice([1, 2, 3, 5, 8, 13, 16, 24, 32, 48, 64, 100, 128, 256, 300])
    k = rng.choice([0, 0, 1, 2, 3, 4, 5, 7])
    chain, modules, parallel = DrafterKind.CHAIN, DrafterKind.MODULES, DrafterKind.PARALLEL
    drafter = DrafterKind.NONE
    if k:
        drafter = rng.choice([DrafterKind.NONE, chain, chain, chain, modules, parallel])
    if runner is RunnerVersion.V1 and drafter in (modules, parallel):
        drafter = chain
    tiers = _tiers(rng, reqs, k) if k and runner is RunnerVersion.V2 and rng.random() < 0.45 else None
    sizes, top = _sizes(rng, reqs, k, tiers)
    mode = rng.choice(
        [*GraphMode, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE]
    )
    if runner is RunnerVersion.V1 and mode.decode_mode is GraphMode.FULL and top < 1 + k:
        mode = GraphMode.PIECEWISE
    max_loras = rng.choice([0, 0, 0, 1, 2, 3, 4, 6, 8])
    overlap = _overlap(rng) if rng.random() < 0.15 else None
    if overlap is not None:
        max_loras, tiers = 0, None
        if runner is RunnerVersion.V2:
            k, drafter = 0, DrafterKind.NONE
        elif mode is GraphMode.FULL:
            mode = GraphMode.FULL_AND_PIECEWISE
    return Configuration(
        runner=runner,
        mode=mode,
        sizes=sizes,
        max_size=top,
        max_num_seqs=reqs,
        num_speculative_tokens=k,
        schedule=tiers,
        drafter=drafter,
        draft_query_len=rng.choice([k, 1 + k]) if drafter is parallel else 0,
        draft_fused=drafter is chain and runner is RunnerVersion.V2 and rng.random() < 0.5,
        varlen=k > 0 and runner is RunnerVersion.V2 and tiers is None and rng.random() < 0.15,
        overlap=overlap,
        max_loras=max_loras,
        capture_fewer=rng.random() < 0.8,
        specialize_lora=max_loras > 0 and rng.random() < 0.5,
    )


def _overlap(rng: random.Random) -> Overlap:
    parts = rng.choice([2, 2, 2, 3])
    least = rng.choice([parts, parts, 16, 32, 100])
    return Overlap(microbatches=parts, decode_tokens=least, prefill_tokens=rng.choice([parts, 64, 512]))


def _tiers(rng: random.Random, reqs: int, k: int) -> tuple[tuple[int, int, int], ...]:
    tiers, first = [], 1
    for _ in range(rng.randint(1, 4)):
        last = first + rng.randint(0, max(reqs // 2, 1))
        tiers.append((first, last, rng.randint(0, k + 1)))
        first = last + rng.choice([1, 1, 1, 4])
    rng.shuffle(tiers)
    return tuple(tiers)


def _sizes(
    rng: random.Random, reqs: int, k: int, tiers: Sequence[tuple[int, int, int]] | None
) -> tuple[tuple[int, ...], int]:
    if rng.random() < 0.5:
        few = {rng.randint(1, rng.choice([16, 64, 300])) for _ in range(rng.randint(1, 14))}
        return tuple(sorted(few)), max(few)
    # Like the engine's defaults: a grid, and the same grid in decodes of each width.
    top = rng.choice([rng.randint(1, reqs * (1 + k) * 2), 64, 512, 1024])
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    widths = {1 + min(tier[2], k) for tier in tiers or ()} or {1 + k}
    sizes = {size * width for size in (*grid, reqs) for width in (1, *widths) if size <= reqs or width == 1}
    kept = tuple(sorted(size for size in sizes if size <= min(top, max(reqs * (1 + k) * 2, 16))))
    return kept, kept[-1]


def _batch(rng: random.Random, found: Configuration) -> tuple[Rows, int]:
    top = found.max_num_seqs
    reqs = rng.randint(1, top) if rng.random() < 0.6 else rng.randint(1, min(top, 24))
    k = found.num_speculative_tokens
    if found.schedule is not None:
        k = found.drafted[reqs]
    kind = rng.random()
    if kind < 0.6:
        rows = [(1 + k, False)] * reqs
    elif kind < 0.75:
        rows = [(rng.randint(1, 1 + found.num_speculative_tokens), False) for _ in range(reqs)]
    else:
        rows = [(1 + k, False)] * reqs
        for index in range(rng.randint(1, min(3, reqs))):
            rows[index] = (rng.choice([1, 1 + k, rng.randint(1, 60)]), True)
    # More adapters than there can be are clamped by one dispatcher, and not found by the other.
    loras = rng.randint(0, found.max_loras + (3 if rng.random() < 0.2 else 1)) if found.max_loras else 0
    return tuple(rows), loras


def _step(rng: random.Random, found: Configuration) -> tuple[tuple[Rows, int], ...]:
    ranks = [_batch(rng, found) for _ in range(rng.randint(2, 4))]
    return tuple(rank if index == 0 or rng.random() < 0.85 else ((), 0) for index, rank in enumerate(ranks))
