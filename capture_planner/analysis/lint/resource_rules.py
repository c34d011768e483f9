"""Class I, resources: graphs fit the budget, the backend and the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from capture_planner.analysis.coverage import Coverage
from capture_planner.analysis.lint.core import Diagnostic, error, note, of_role, warning
from capture_planner.modes import GraphMode, Pool
from capture_planner.records.batch import Kind, batch_text
from capture_planner.records.batch_space import draft_steps
from capture_planner.records.plan import RolePlan
from capture_planner.records.text import counted

MEMORY_SHARE = 0.1
"""The share of device memory above which graphs should have a budget."""

MANY_GRAPHS = 256
"""67 graphs were reported as a slow start-up (vllm#20098); LoRA multiplied 51 graphs into 300 (#32005)."""

COARSE_RATIO = 1.5
COARSE_TOKENS = 64
"""Decode sizes are coarse where both are exceeded, as for 129 requests in a graph of 256. TensorRT-LLM
replaced doubling by steps of 64, for up to 1.5 times the throughput (TRT-LLM#12895)."""

COARSE_MIXED_RATIO = 8.0
"""Mixed sizes are coarse above it, with as many padded rows: 5 tokens in a graph of 16 are cheap, 2 in one of 512 are
not."""


@error("CP040", "vllm#50488 TRT-LLM#12895", "plan again from the spec, or raise the budget", at="budget")
def over_budget(coverage: Coverage) -> Iterator[Diagnostic]:
    """The plan has more graphs than its budget allows."""
    bound = coverage.plan.allowed_graphs()
    if bound is not None and coverage.plan.num_graphs > bound[0]:
        yield Diagnostic(f"{coverage.plan.num_graphs} graphs, but {bound[1]} allows {bound[0]}", path=("budget",))


@error("CP041", "vllm-ascend#8585", "plan again from the spec")
def over_backend_cap(coverage: Coverage) -> Iterator[Diagnostic]:
    """A role has more full graphs, or larger ones, than its backend can hold."""
    for role in coverage.plan.roles:
        full = [entry for entry in role.entries if entry.mode is GraphMode.FULL]
        widest = max((entry.num_reqs or 0 for entry in full), default=0)
        for number, group in enumerate(role.groups):
            support = group.support
            excess = []
            if support.max_graphs is not None and len(full) > support.max_graphs:
                excess.append(f"{len(full)} full graphs (at most {support.max_graphs})")
            if support.max_num_reqs is not None and widest > support.max_num_reqs:
                excess.append(f"a graph of {widest} requests (at most {support.max_num_reqs})")
            if excess:
                yield of_role(coverage, role, f"{group.backend} gets {' and '.join(excess)}", "groups", number)


@warning("CP042", "vllm#32005 vllm#36370", "set lora.specialize to false, or budget.max_graphs", at="lora")
def lora_multiplies_graphs(coverage: Coverage) -> Iterator[Diagnostic]:
    """LoRA cases multiply a long list of graphs.

    Specializing on the number of active adapters multiplied vLLM's keys; fewer cases cut one
    start-up from 94 to 29 seconds.
    """
    plan = coverage.plan
    if plan.lora is None or plan.num_graphs <= MANY_GRAPHS:
        return
    plain = sum(entry.active_loras == 0 for role in plan.roles for entry in role.entries)
    yield Diagnostic(f"{len(plan.lora.cases())} LoRA cases turn {plain} graphs into {plan.num_graphs}", path=("lora",))


@warning("CP043", "vllm#57475 vllm#51590 vllm#20098", "set budget.memory or budget.max_graphs", at="budget")
def capture_cost(coverage: Coverage) -> Iterator[Diagnostic]:
    """There is no budget, and graphs may take more than a tenth of the device's memory.

    At the worst public figure, 25 MiB per graph. Estimates extrapolated from two graphs were several
    times too low: 1.3 GiB estimated, 4.7 to 16.9 GiB taken. Graphs on first use have a budget of their own.
    """
    plan, budget = coverage.plan, coverage.plan.budget
    number = plan.num_graphs - plan.num_lazy
    need, memory = number * budget.memory_per_graph, plan.environment.device.memory
    # Measured sizes were chosen by the costs of a profile; the public figure is for other plans.
    if budget.allowed_graphs() is None and plan.forecast is None and need > MEMORY_SHARE * memory:
        graphs = f"{counted(number, 'graph')}{' at start' if plan.num_lazy else ''}"
        cost = f"{need / (1 << 30):.1f} of {memory / (1 << 30):.0f} GiB and {number * budget.seconds_per_graph:.0f} s"
        yield Diagnostic(f"{graphs} may take {cost} to capture", path=("budget",))


@note("CP044", "vllm#44078", "set pool to shared unless you measured a difference", at="pool")
def separate_pools(coverage: Coverage) -> Iterator[Diagnostic]:
    """The drafter's graphs have their own memory pool.

    vLLM removed it: no loss of accuracy or acceptance (GSM8K went from 75.5 to 76.5 %), about 0.27 GiB saved.
    """
    # One role has one pool either way.
    if coverage.plan.pool is Pool.PER_ROLE and len(coverage.plan.roles) > 1:
        yield Diagnostic("each role has its own pool, which cost vLLM about 0.27 GiB", path=("pool",))


@warning("CP045", "TRT-LLM#12895 vllm-ascend#1168", "add sizes between, or use the default policy", at="sizes")
def coarse_decode_sizes(coverage: Coverage) -> Iterator[Diagnostic]:
    """Decodes are padded by more than half and by many rows, although more graphs would fit.

    With sizes that double, up to half of a step is padding. Steps of 64 cost TensorRT-LLM 0.3 GiB and
    gave up to 1.5 times the throughput; steps of 8 cost 2.6 GiB. With six evenly spaced sizes, vLLM
    Ascend ran 2 requests as 88. Not reported where the budget or the backend leaves no room or left sizes out, nor of
    measured sizes, which leave out what the traffic does not run.
    """
    for role in _with_room(coverage):
        decodes = [cell for cell in coverage.cells if cell.role is role.role and cell.kind is Kind.DECODE]
        served = [(cell, cell.entry.num_tokens) for cell in decodes if cell.entry is not None and not cell.min_loras]
        # The smallest decode of each of these cells is mostly padding.
        coarse = [
            (cell, tokens, real)
            for cell, tokens in served
            if cell.worst > COARSE_RATIO and tokens - (real := cell.first * (cell.query_len or 1)) > COARSE_TOKENS
        ]
        if coarse:
            worst, tokens, real = max(coarse, key=lambda found: found[0].worst)
            padded = f"{worst.first} requests are padded from {real} to {tokens} tokens"
            yield of_role(coverage, role, f"{padded}, although more graphs would fit", "entries")


@warning("CP049", "vllm-ascend#1168", "add sizes below, or use the default policy", at="sizes")
def coarse_mixed_sizes(coverage: Coverage) -> Iterator[Diagnostic]:
    """A mixed batch is padded to more than eight times its tokens, although more graphs would fit.

    A short prompt next to a few decodes is such a batch: where the smallest size is 512, each of its steps takes the
    time of 512 tokens. Not reported where more graphs do not fit, nor of measured sizes.
    """
    for role in _with_room(coverage):
        for cell in coverage.cells:
            entry = cell.entry
            if cell.role is not role.role or cell.kind is Kind.DECODE or entry is None or cell.min_loras:
                continue
            if cell.worst > COARSE_MIXED_RATIO and entry.num_tokens - cell.first > COARSE_TOKENS:
                message = f"{counted(cell.first, 'token')} of a mixed batch run as {entry.num_tokens}"
                yield of_role(coverage, role, f"{message}, although more graphs would fit", "entries")
                break


def _with_room(coverage: Coverage) -> Iterator[RolePlan]:
    """Yield the roles to which graphs could be added: neither budget nor backend forbids it, nor do measured sizes."""
    bound = coverage.plan.allowed_graphs()
    if coverage.plan.forecast is not None or (bound is not None and coverage.plan.num_graphs >= bound[0]):
        return
    for role in coverage.plan.roles:
        full = sum(entry.mode is GraphMode.FULL for entry in role.entries)
        is_capped = any(g.support.max_graphs is not None and full >= g.support.max_graphs for g in role.groups)
        # Where sizes were left out for the budget no more fit, even below its number of graphs.
        if not is_capped and all(decision.rule != "budget" for decision in role.decisions):
            yield role


@error("CP046", "vllm#34094 TRT-LLM#13151", "plan again from the spec", at="model.recurrent")
def small_state_pool(coverage: Coverage) -> Iterator[Diagnostic]:
    """The pool of recurrent states has no row for each request of the largest padded batch, and one for padding.

    A kernel of a decode's graph reads and writes a row for each padded request. Where there are fewer, it goes past
    the end of the pool, or padding takes the row of a running request. Also an error: recurrent layers and no pool.
    """
    plan = coverage.plan
    if plan.model.recurrent is None:
        return
    entries = [entry for role in plan.roles for entry in role.entries]
    # Alignment can make a graph larger than the limits (CP016).
    most = max(plan.limits.max_num_reqs, *(entry.num_reqs or 0 for entry in entries), 0)
    rows = plan.states.rows if plan.states else 0
    if rows < most + 1:
        message = f"the pool of recurrent states has {rows} rows, and {most} requests and padding take {most + 1}"
        yield Diagnostic(message, path=("states",))


@warning(
    "CP047",
    "vllm-omni#7180",
    "leave the largest graph of each kind out of lazy, or plan again from the spec",
    at="capture",
)
def nothing_at_start(coverage: Coverage) -> Iterator[Diagnostic]:
    """Batches that no graph captured at start serves: until theirs is captured on first use, they run eager.

    The planner captures the largest graph of each kind at start, which serves all that smaller ones would. Where it is
    lazy too, each batch that is large enough waits for its turn, and where the budget refuses the graph it stays eager.
    """
    for role in coverage.plan.roles:
        if not role.lazy:
            continue
        for cell in (each for each in coverage.cells if each.role is role.role and each.entry in role.lazy):
            batch = cell.largest
            steps = draft_steps(role.role, batch.num_reqs, coverage.plan.speculative)
            if all(entry.rejection(batch, steps) is not None for entry in role.at_start):
                message = f"{batch_text(batch)}: {cell.entry} is captured on first use, and no graph at start serves it"
                yield of_role(coverage, role, message, "lazy")
                break


@error("CP048", "vllm-omni#7180", "list the graph once, and in entries too, or plan again from the spec")
def lazy_without_entry(coverage: Coverage) -> Iterator[Diagnostic]:
    """A graph in lazy has no entry of its own: its role has no such graph, or lazy lists it more than once.

    No batch is dispatched to what is not in entries, and `show` lists a graph twice that lazy lists twice.
    """
    for role in coverage.plan.roles:
        listed = Counter(role.lazy)
        foreign = [entry for entry in listed if entry not in {*role.entries}]
        if foreign:
            yield of_role(coverage, role, f"{foreign[0]} is in lazy, and not in entries", "lazy")
        for entry, count in listed.items():
            if count > 1:
                yield of_role(coverage, role, f"{entry} is listed {count} times in lazy", "lazy")
