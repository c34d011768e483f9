"""Class B, shape algebra, and class C, dispatch: each captured shape is one that batches have."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterator

from capture_planner.analysis.coverage import Coverage, nearest_group_misses
from capture_planner.analysis.lint.core import RULES, Diagnostic, Severity, error, note, of_role, warning
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_families, request_step, token_step
from capture_planner.records.text import spans

HEAVY_RATIO = 2.0
HEAVY_TOKENS = 1024
"""Padding is heavy above both: 5 to 16 tokens is cheap, 3208 to 8192 is not (sglang#31487, #40253)."""


@error("CP010", "vllm#28207 vllm#36165", "list num_reqs only; num_tokens follows")
def tokens_not_requests_times_length(coverage: Coverage) -> Iterator[Diagnostic]:
    """A uniform graph whose num_tokens is not num_reqs times query_len.

    With K = 2, sizes that are not multiples of 3 left the last request of a vLLM decode graph short,
    and captured a prefill branch. Graphs keyed with num_reqs = num_tokens were never found by decodes
    of several tokens, which ran eager at half the speed.
    """
    for role in coverage.plan.roles:
        for entry in role.entries:
            if entry.query_len is not None and entry.num_tokens != (entry.num_reqs or 0) * entry.query_len:
                message = f"{entry} does not have {entry.num_reqs} x {entry.query_len} tokens"
                yield of_role(coverage, role, message, "entries")


@error("CP011", "vllm#48494 vllm#48329", "remove them; no batch is dispatched to them")
def query_length_of_another_role(coverage: Coverage) -> Iterator[Diagnostic]:
    """A uniform graph has a query length that its role never runs.

    Target and draft prefill run 1 + k tokens for each scheduled k; the draft prefill of a draft model, and of parallel
    drafting, runs more. Draft decodes run one. vLLM applied the target's formula to the drafter and got a length of -5.
    """
    for role in coverage.plan.roles:
        families = decode_families(role.role, coverage.plan)
        lengths = {family.query_len for family in families}
        lengths |= {shorter for family in families if family.varies for shorter in range(1, family.query_len)}
        # There is no family of draft decodes where K is 1 or the drafter makes no chain.
        if role.role is Role.DRAFT_DECODE:
            lengths.add(1)
        wrong = sorted({e.query_len for e in role.entries if e.query_len is not None} - lengths)
        if wrong:
            runs = ", ".join(map(str, sorted(lengths))) or "none"
            message = f"graphs of query length {', '.join(map(str, wrong))}, but the role runs {runs}"
            yield of_role(coverage, role, message, "entries")


@note(
    "CP012",
    "vllm#46324",
    "our runner is not affected; a crash of vLLM with such sizes was reported, its cause disputed: to rule it out, "
    "list multiples in sizes.num_tokens, else ignore CP012",
    at="sizes",
)
def unaligned_piecewise(coverage: Coverage) -> Iterator[Diagnostic]:
    """PIECEWISE sizes are not multiples of 1 + K in a speculative deployment.

    A thread reports an illegal memory access with such sizes in vLLM; the cause is disputed. It matters only to an
    engine that computes the number of requests of a PIECEWISE graph as tokens divided by 1 + K, which is then no whole
    number. Our runner does not: attention runs outside of the graph, on the requests that there are.
    """
    speculative = coverage.plan.speculative
    if speculative is None:
        return
    multiple = 1 + speculative.num_tokens
    sizes = {e.num_tokens for r in coverage.plan.roles for e in r.entries if e.mode is GraphMode.PIECEWISE}
    odd = sum(size % multiple != 0 for size in sizes)
    if odd:
        message = f"{odd} of {len(sizes)} piecewise sizes are not multiples of 1 + K, which is {multiple}"
        yield Diagnostic(message, path=("roles",))


@error("CP013", "vllm#28207", "round them up to multiples of the tensor-parallel size", at="parallel")
def unaligned_for_sequence_parallelism(coverage: Coverage) -> Iterator[Diagnostic]:
    """With sequence parallelism, padded tokens do not divide over the tensor-parallel ranks."""
    step = token_step(coverage.plan.parallel)
    for role in coverage.plan.roles:
        odd = sorted({e.num_tokens for e in role.entries if e.num_tokens % step})
        if odd:
            message = f"sizes {', '.join(map(str, odd[:8]))} are not multiples of {step}"
            yield of_role(coverage, role, message, "entries")


@warning("CP014", "vllm#48494", "raise num_tokens or lower the schedule", at="speculative.schedule")
def schedule_beyond_num_tokens(coverage: Coverage) -> Iterator[Diagnostic]:
    """A schedule has more draft tokens than num_tokens, and is clamped to it."""
    speculative = coverage.plan.speculative
    for index, (first, last, k) in enumerate(speculative.ranges if speculative else ()):
        if speculative and k > speculative.num_tokens:
            has = f"the schedule has {k} draft tokens for {first} to {last} requests"
            message = f"{has}, but num_tokens is {speculative.num_tokens}"
            yield Diagnostic(message, path=("speculative", "schedule", index))


@warning(
    "CP015",
    "vllm#50065",
    "raise the limits or remove them; they are right only if the engine rounds sizes up by a rule of its own, and all "
    "buffers are sized by entries",
    at="limits",
)
def entry_beyond_the_limits(coverage: Coverage) -> Iterator[Diagnostic]:
    """A graph has more requests or tokens than the limits admit, and no alignment is the reason.

    Its last rows are always padding. A buffer of max_num_reqs rows is too small for it: vLLM sized one by the limits,
    and the padded rows of the largest graph overran it.
    """
    yield from _beyond(coverage, aligned=False)


@note("CP016", "vllm#50065", "nothing to fix; size buffers by the entries, not by the limits", at="parallel")
def aligned_beyond_the_limits(coverage: Coverage) -> Iterator[Diagnostic]:
    """Sequence parallelism rounds a graph up beyond the limits: padded tokens are a multiple of the ranks."""
    yield from _beyond(coverage, aligned=True)


def _beyond(coverage: Coverage, *, aligned: bool) -> Iterator[Diagnostic]:
    """Yield the entries beyond the limits: those that sequence parallelism rounded up, or all others."""
    limits, parallel = coverage.plan.limits, coverage.plan.parallel
    admits = f"the limits admit {limits.max_num_reqs} requests and {limits.max_num_tokens} tokens"
    for role in coverage.plan.roles:
        for entry in role.entries:
            each, reqs = entry.tokens_each, entry.num_reqs or 0
            step = 1 if each is None else request_step(each, parallel)
            tokens = token_step(parallel) if each is None else step * each
            # Alignment adds less than one step; what is larger has another cause.
            within = reqs < limits.max_num_reqs + step and entry.num_tokens < limits.max_num_tokens + tokens
            if (reqs > limits.max_num_reqs or entry.num_tokens > limits.max_num_tokens) and within is aligned:
                rounded = ", rounded up for sequence parallelism" if aligned else ""
                yield of_role(coverage, role, f"{entry}: {admits}{rounded}", "entries")


@warning("CP020", "vllm#47460 vllm#53407 vllm#56136", "remove them or plan again from the spec")
def unreachable_entry(coverage: Coverage) -> Iterator[Diagnostic]:
    """A graph that no allowed batch uses: it wastes memory and start-up time.

    vLLM 0.33 captures every query length of a dynamic schedule at every size: its own dispatcher
    never uses 49 of the 102 full graphs of one schedule. Draft graphs were captured and never used.
    """
    for role in coverage.plan.roles:
        reached = coverage.reached(role.role)
        idle = [entry for entry in role.entries if entry not in reached]
        if idle:
            shown = "; ".join(str(entry) for entry in idle[:4]) + ("; ..." if len(idle) > 4 else "")
            message = f"{len(idle)} of {len(role.entries)} graphs serve no batch: {shown}"
            yield of_role(coverage, role, message, "entries")


@note(
    "CP021",
    "vllm#53407 vllm#56136",
    "our runner and vLLM under `launch` run them FULL; for the flags of vLLM by itself, use those of `export`",
    at="speculative.schedule",
)
def missed_by_nearest_size(coverage: Coverage) -> Iterator[Diagnostic]:
    """With the sizes of this plan, vLLM 0.33 by itself would miss full graphs: batches run PIECEWISE or eager.

    It looks only at the smallest captured size that holds a batch, which may belong to another query length of the
    schedule. Our dispatcher looks at all entries, and misses none; so does vLLM under the plan (`launch`).
    """
    for role in coverage.plan.roles:
        missed = nearest_group_misses(coverage.plan, role.role)
        if missed:
            sizes = f"{len(missed)} decode batch sizes, from {missed[0]} requests on"
            message = f"an engine that looks only at the nearest size would miss the full graph of {sizes}"
            yield of_role(coverage, role, message, "entries")


@error("CP022", "vllm#36165", "list it once")
def duplicate_entry(coverage: Coverage) -> Iterator[Diagnostic]:
    """A graph is listed twice, and would be captured twice under one key."""
    for role in coverage.plan.roles:
        for entry, count in Counter(role.entries).items():
            if count > 1:
                yield of_role(coverage, role, f"{entry} is listed {count} times", "entries")


@warning("CP023", "sglang#31487 sglang#40253", "add a size between, or use the default policy", at="sizes")
def heavy_padding(coverage: Coverage) -> Iterator[Diagnostic]:
    """A batch is padded to more than twice its tokens, and by more than 1024 tokens.

    Padding hurts where both are large: SGLang padded 3208 tokens to 8192, slower than eager; the
    fixed cap of 2 that followed rejected a cheap 5 to 16. Measured sizes bound the time that padding takes, so
    their tokens say nothing more.
    """
    if coverage.plan.forecast is not None and coverage.plan.is_steady:
        return
    for cell in coverage.cells:
        # Batches with adapters have the same sizes, and would repeat the finding.
        if cell.entry is None or cell.min_loras:
            continue
        real = cell.first * (cell.query_len or 1)
        if cell.worst > HEAVY_RATIO and cell.entry.num_tokens - real > HEAVY_TOKENS:
            unit = "requests" if cell.kind is Kind.DECODE else "tokens"
            padded = f"from {real} to {cell.entry.num_tokens} tokens"
            yield of_role(coverage, cell, f"a batch of {cell.first} {unit} is padded {padded}", "entries")


@error("CP024", "vllm#36165 vllm#39773", "set num_reqs for FULL graphs only")
def request_extent(coverage: Coverage) -> Iterator[Diagnostic]:
    """A FULL graph without num_reqs, or a PIECEWISE graph with it.

    A full graph contains attention, so its padded requests are part of the key; vLLM lost half its
    throughput to a key whose num_reqs differed. PIECEWISE runs attention outside, unpadded.
    """
    for role in coverage.plan.roles:
        for entry in role.entries:
            if (entry.mode is GraphMode.FULL) == (entry.num_reqs is None):
                verb = "has no" if entry.num_reqs is None else "must not have"
                yield of_role(coverage, role, f"{entry} {verb} num_reqs", "entries")


# What a person wrote -----------------------------------------------------------------------------


@note(
    "CP017",
    "vllm#32374",
    "give these batch sizes a range of their own, or let the range before end after them",
    at="speculative.schedule",
)
def schedule_gap(coverage: Coverage) -> Iterator[Diagnostic]:
    """A schedule has no range for some batch sizes, which draft as many tokens as the range before them says.

    vLLM 0.33 fills gaps and the batches after the last range in the same way (`build_dynamic_sd_schedule_lookup`).
    """
    most = coverage.plan.limits.max_num_reqs
    ranges = coverage.plan.speculative.ranges if coverage.plan.speculative else ()
    # The last pair shows a gap behind the last range.
    for index, (before, after) in enumerate(itertools.pairwise((*ranges, (most + 1, most + 1, 0)))):
        if before[1] + 1 < after[0] and before[1] < most:
            gap = spans([(before[1] + 1, min(after[0] - 1, most))], "request")
            message = f"no range of the schedule has {gap}, which draft {before[2]} as the range before them"
            yield Diagnostic(message, Role.TARGET, ("speculative", "schedule", index))


@note(
    "CP018",
    "vllm#32374",
    "end the range at max_num_reqs, or raise limits.max_num_reqs if such batches should run",
    at="speculative.schedule",
)
def schedule_beyond_max_num_reqs(coverage: Coverage) -> Iterator[Diagnostic]:
    """A range of a schedule has batch sizes that the limits do not admit."""
    most = coverage.plan.limits.max_num_reqs
    for index, (first, last, _) in enumerate(coverage.plan.speculative.ranges if coverage.plan.speculative else ()):
        if last > most:
            beyond = spans([(max(first, most + 1), last)], "request")
            message = f"the schedule has {beyond}, but max_num_reqs is {most}"
            yield Diagnostic(message, Role.TARGET, ("speculative", "schedule", index))


@note("CP053", "", "remove the code", at="ignore")
def unused_ignore(coverage: Coverage) -> Iterator[Diagnostic]:
    """`ignore` has a code that leaves out nothing: its rule finds nothing, is an error, or does not exist."""
    for index, code in enumerate(coverage.plan.ignore):
        rule = RULES.get(code)
        if rule is None:
            near = difflib.get_close_matches(code, RULES, n=1)
            message = f"no rule is called {code}" + (f"; did you mean {near[0]}?" if near else "")
        elif rule.severity is Severity.ERROR:
            message = f"{code} ({rule.name}) is an error, and errors are not ignored"
        # Whether this rule finds something depends on itself.
        elif rule.check is unused_ignore or any(rule.check(coverage)):
            continue
        else:
            message = f"{code} ({rule.name}) is ignored, and finds nothing"
        yield Diagnostic(message, path=("ignore", index))
