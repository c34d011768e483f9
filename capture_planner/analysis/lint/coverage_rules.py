"""Class A, coverage, and class J, observability: no batch runs eager without a reason."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.analysis.coverage import Cell, Coverage
from capture_planner.analysis.lint.core import Diagnostic, error, of_role, warning
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_tiers, extra_slots, split_when
from capture_planner.records.text import counted, query_len_text, ranges_text


def describe(cells: list[Cell]) -> str:
    """Describe adjacent cells: ``decodes of 9 to 16 requests, query length 4``."""
    span = ranges_text([(min(cell.first for cell in cells), max(cell.last for cell in cells))])
    if cells[0].kind is Kind.MIXED:
        text = f"mixed batches of {span} tokens"
    else:
        length = query_len_text(cells[0].query_len, varies=cells[0].varies)
        text = f"decodes of {span} requests, query length {length}"
    least, most = min(cell.min_loras for cell in cells), max(cell.max_loras for cell in cells)
    return text + (f", {least} to {most} active LoRA" if most else "")


def merged(cells: list[Cell]) -> Iterator[list[Cell]]:
    """Group adjacent cells of one role, kind and query length."""

    def place(cell: Cell) -> tuple[str, str, int, bool, int]:
        return cell.role, cell.kind.value, cell.query_len or 0, cell.varies, cell.first

    def apart(before: Cell, after: Cell) -> bool:
        return place(before)[:-1] != place(after)[:-1] or after.first > before.last + 1

    return split_when(apart, sorted(cells, key=place))


@error(
    "CP001",
    "vllm#54933 vllm-ascend#16049",
    "plan again from the spec; a plan made by capture-planner covers or waives every batch",
    at="sizes",
)
def uncovered_batch(coverage: Coverage) -> Iterator[Diagnostic]:
    """Admissible batches have neither an entry nor a waiver.

    They run eager although no decision says so. vLLM truncated a largest size of 42 (6 requests of
    7 tokens) to 40, and served 25 instead of 133 tokens per second.
    """
    for run in merged(list(coverage.uncovered)):
        yield of_role(coverage, run[0], f"{describe(run)} have neither a graph nor a waiver")


@warning(
    "CP002",
    "vllm#54933 vllm#50488 sglang#33483",
    "choose a policy whose largest size is the largest decode (default and minimax do), or raise the budget",
    at="sizes",
)
def decode_without_full_graph(coverage: Coverage) -> Iterator[Diagnostic]:
    """The decode mode is FULL, but the largest decodes have no full graph.

    At full load every step then runs piecewise or eager. SGLang captured up to 32 requests while
    4096 were running: about four times the latency under load.
    """
    for role in coverage.plan.roles:
        if role.mode.decode_mode is not GraphMode.FULL:
            continue
        slow = [
            cell
            for cell in coverage.cells
            if cell.role is role.role
            and cell.kind is Kind.DECODE
            and cell.answer.mode is not GraphMode.FULL
            # CP001 reports those.
            and cell.answer.reason is not Reason.UNCOVERED
        ]
        for run in merged(slow):
            reason = run[-1].answer.reason
            how = f"eager ({reason})" if reason else "PIECEWISE"
            yield of_role(coverage, role, f"{describe(run)} run {how}, although the decode mode is FULL", "waivers")


@warning(
    "CP003",
    "vllm#54933",
    "raise max_num_tokens to requests times tokens each, or lower max_num_reqs",
    at="limits.max_num_tokens",
)
def tokens_limit_requests(coverage: Coverage) -> Iterator[Diagnostic]:
    """max_num_tokens is too small for a decode of max_num_reqs requests at the query length.

    The scheduler can then never decode all requests in one step, and larger sizes are unreachable.
    """
    limits, slots = coverage.plan.limits, extra_slots(coverage.plan)
    for first, last, k in decode_tiers(coverage.plan):
        # The first draft pass has its slots in the same budget of tokens.
        width = 1 + k + slots
        if last * width > limits.max_num_tokens:
            need = f"{counted(last, 'request')} of {counted(width, 'token')} need {last * width} tokens"
            beyond = f"batches of {max(limits.max_num_tokens // width + 1, first)} to {last} requests cannot be decoded"
            message = f"{need}, but max_num_tokens is {limits.max_num_tokens}: {beyond}"
            yield Diagnostic(message, Role.TARGET, ("limits", "max_num_tokens"))


@error("CP004", "vllm#47460", "plan again from the spec")
def roles_of_the_deployment(coverage: Coverage) -> Iterator[Diagnostic]:
    """The plan has a role that the deployment does not run, or lacks one that it runs."""
    runs = coverage.plan.speculative.roles if coverage.plan.speculative else (Role.TARGET,)
    for role in Role:
        planned = role in coverage.plan.planned
        if planned and role not in runs:
            yield Diagnostic(f"the deployment does not run {role}, but the plan has it", role, ("roles",))
        elif not planned and role in runs:
            yield Diagnostic(f"the deployment runs {role}, but the plan lacks it", role, ("roles",))


_NO_REASON = (Reason.UNCOVERED, Reason.NOT_ADMISSIBLE, Reason.RANK, Reason.IDLE)
"""Reasons that a single batch or step can have, but not a class of batches."""


@error("CP050", "vllm#36165", "give a reason (mode, sizes, backend_cap or budget) and a sentence")
def unexplained_waiver(coverage: Coverage) -> Iterator[Diagnostic]:
    """A waiver gives no reason that a reader can act on."""
    for role in coverage.plan.roles:
        for index, waiver in enumerate(role.waivers):
            if not waiver.message.strip() or waiver.reason in _NO_REASON:
                extent, given = f"{waiver.first} to {waiver.last}", f"{waiver.reason}: {waiver.message!r}"
                yield of_role(coverage, role, f"the waiver of {extent} gives no reason ({given})", "waivers", index)


@warning("CP051", "vllm#47460 sglang#40253", "plan again from the spec")
def idle_waiver(coverage: Coverage) -> Iterator[Diagnostic]:
    """A waiver covers no batch: all of its batches have a graph or are inadmissible.

    An engine that follows it runs batches eager that a graph would serve: SGLang's cap of twice the
    tokens rejected 5 tokens for a graph of 16, which was cheap.
    """
    # Waivers of several roles can be equal, so the role is part of the key.
    used = {(cell.role, cell.answer.waiver) for cell in coverage.cells if cell.answer.waiver is not None}
    for role in coverage.plan.roles:
        for index, waiver in enumerate(role.waivers):
            if (role.role, waiver) not in used:
                extent = f"{waiver.first} to {waiver.last} ({waiver.kind.value})"
                message = f"the waiver of {extent} covers no admissible batch without a graph"
                cells = (c for c in coverage.cells if c.role is role.role and c.kind is waiver.kind)
                served = next((c for c in cells if c.first <= waiver.last and waiver.first <= c.last), None)
                if served is not None:
                    message += f": {served.entry} serves {max(served.first, waiver.first)}"
                yield of_role(coverage, role, message, "waivers", index)


@warning(
    "CP052",
    "vllm#36165 vllm#20098",
    "`show` has the decision that led to it; choose another backend or mode, or ignore this where it is accepted",
    at="mode",
)
def decodes_run_eager(coverage: Coverage) -> Iterator[Diagnostic]:
    """No decode of a role has a graph.

    Decodes gain most from graphs. The waivers and decisions have the reason. A mode of NONE that the
    spec requests is not reported.
    """
    for role in coverage.plan.roles:
        cells = [c for c in coverage.cells if c.role is role.role and c.kind is Kind.DECODE]
        if cells and role.requested is not GraphMode.NONE and all(c.entry is None for c in cells):
            message = f"every decode runs eager (mode {role.mode.value}, requested {role.requested.value})"
            yield of_role(coverage, role, message, "mode")
