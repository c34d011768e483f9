"""Class A, coverage, and class J, observability: no batch is slow in silence."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.analysis.coverage import Cell, Coverage
from capture_planner.analysis.lint.core import BugClass, Diagnostic, Severity, rule
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_families, decode_tiers
from capture_planner.records.text import counted


def describe(cells: list[Cell]) -> str:
    """Write a run of cells as people would: ``decodes of 9 to 16 requests (query length 4)``."""
    first, last = min(cell.first for cell in cells), max(cell.last for cell in cells)
    span = f"{first}" if first == last else f"{first} to {last}"
    if cells[0].kind is Kind.MIXED:
        text = f"mixed batches of {span} tokens"
    else:
        text = f"decodes of {span} requests, query length {cells[0].query_len}"
    least, most = min(cell.min_loras for cell in cells), max(cell.max_loras for cell in cells)
    return text + (f", {least} to {most} active LoRA" if most else "")


def merged(cells: list[Cell]) -> Iterator[list[Cell]]:
    """Group cells of one role, kind and query length that follow each other."""
    run: list[Cell] = []
    for cell in sorted(cells, key=lambda c: (c.role, c.kind.value, c.query_len or 0, c.first)):
        if run and (
            (cell.role, cell.kind, cell.query_len) != (run[0].role, run[0].kind, run[0].query_len)
            or cell.first > max(c.last for c in run) + 1
        ):
            yield run
            run = []
        run.append(cell)
    if run:
        yield run


@rule(
    "CP001",
    Severity.ERROR,
    BugClass.A,
    "vllm#54933",
    "vllm-ascend#16049",
    remedy="plan again from the spec; a plan made by capture-planner covers or waives every batch",
    spec_path=("sizes",),
)
def uncovered_batch(coverage: Coverage) -> Iterator[Diagnostic]:
    """Batches that the limits admit have neither an entry nor a waiver.

    They would run eager, and nobody decided that. vLLM truncated a largest size of 42 (6 requests
    of 7 tokens) to 40, and served 25 instead of 133 tokens per second.
    """
    for run in merged(list(coverage.uncovered)):
        yield Diagnostic(
            role=run[0].role,
            path=_role_path(coverage, run[0].role),
            message=f"{run[0].role}: {describe(run)} have neither a graph nor a waiver",
        )


@rule(
    "CP002",
    Severity.WARNING,
    BugClass.A,
    "vllm#54933",
    "vllm#50488",
    "sglang#33483",
    remedy="choose a policy whose largest size is the largest decode (default and minimax do), "
    "or raise the budget",
    spec_path=("sizes",),
)
def decode_without_full_graph(coverage: Coverage) -> Iterator[Diagnostic]:
    """The decode mode is FULL, and yet the largest decodes have no full graph.

    At full load every step then runs piecewise or eager. SGLang captured up to 32 requests where
    4096 were running: about four times the latency, for as long as the load lasted.
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
            and cell.answer.reason is not Reason.UNCOVERED
        ]
        for run in merged(slow):
            reason = run[-1].answer.reason
            how = f"eager ({reason})" if reason else "PIECEWISE"
            yield Diagnostic(
                role=role.role,
                path=_role_path(coverage, role.role, "waivers"),
                message=f"{role.role}: {describe(run)} run {how}, although decodes are to run FULL",
            )


@rule(
    "CP003",
    Severity.WARNING,
    BugClass.A,
    "vllm#54933",
    remedy="raise max_num_tokens to requests times tokens each, or lower max_num_reqs",
    spec_path=("limits", "max_num_tokens"),
)
def tokens_limit_requests(coverage: Coverage) -> Iterator[Diagnostic]:
    """max_num_tokens is too small for a decode of max_num_reqs requests at the query length.

    The scheduler can then never run all requests in one step, and sizes above are unreachable.
    """
    limits = coverage.plan.limits
    for first, last, k in decode_tiers(coverage.plan):
        if last * (1 + k) > limits.max_num_tokens:
            fits = limits.max_num_tokens // (1 + k)
            yield Diagnostic(
                role=Role.TARGET,
                path=("limits", "max_num_tokens"),
                message=f"{counted(last, 'request')} of {counted(1 + k, 'token')} need {last * (1 + k)} tokens, and "
                f"max_num_tokens is {limits.max_num_tokens}: batches of {max(fits + 1, first)} to {last} "
                "requests cannot be decoded",
            )


@rule("CP004", Severity.ERROR, BugClass.A, "vllm#47460", remedy="plan again from the spec")
def roles_of_the_deployment(coverage: Coverage) -> Iterator[Diagnostic]:
    """The plan has a role that the deployment does not run, or lacks one that it runs."""
    planned = [role.role for role in coverage.plan.roles]
    runs = list(Role) if coverage.plan.speculative else [Role.TARGET]
    for role in Role:
        if (role in planned) != (role in runs):
            yield Diagnostic(
                role=role,
                path=("roles",),
                message=f"the deployment {'runs' if role in runs else 'does not run'} {role}, and the plan "
                f"{'has' if role in planned else 'lacks'} it",
            )


_NO_REASON = (Reason.UNCOVERED, Reason.NOT_ADMISSIBLE, Reason.RANK, Reason.IDLE)
"""Reasons that one batch or one step can have, and a class of batches cannot."""


@rule(
    "CP050",
    Severity.ERROR,
    BugClass.J,
    "vllm#36165",
    remedy="say why these batches run eager: mode, sizes, backend_cap or budget, and a sentence",
)
def unexplained_waiver(coverage: Coverage) -> Iterator[Diagnostic]:
    """A waiver has no reason that a person could act on."""
    for role in coverage.plan.roles:
        for index, waiver in enumerate(role.waivers):
            if not waiver.message.strip() or waiver.reason in _NO_REASON:
                yield Diagnostic(
                    role=role.role,
                    path=_role_path(coverage, role.role, "waivers", index),
                    message=f"{role.role}: a waiver of {waiver.first} to {waiver.last} gives no reason "
                    f"({waiver.reason}: {waiver.message!r})",
                )


@rule("CP051", Severity.WARNING, BugClass.J, "vllm#47460", "sglang#40253", remedy="plan again from the spec")
def idle_waiver(coverage: Coverage) -> Iterator[Diagnostic]:
    """A waiver excuses no batch: all that it names have a graph, or cannot occur.

    Whoever believes it leaves batches eager that a graph serves: SGLang's cap of twice the tokens turned
    away 5 tokens from a graph of 16, which was cheap.
    """
    used = {(cell.role, cell.answer.waiver) for cell in coverage.cells if cell.answer.waiver is not None}
    for role in coverage.plan.roles:
        for index, waiver in enumerate(role.waivers):
            if (role.role, waiver) not in used:
                yield Diagnostic(
                    role=role.role,
                    path=_role_path(coverage, role.role, "waivers", index),
                    message=f"{role.role}: the waiver of {waiver.first} to {waiver.last} "
                    f"({waiver.kind.value}) excuses no batch that there can be",
                )


@rule(
    "CP052",
    Severity.NOTE,
    BugClass.J,
    "vllm#36165",
    "vllm#20098",
    remedy="see the role's decisions for the backend or rule that decided it",
    spec_path=("mode",),
)
def decodes_run_eager(coverage: Coverage) -> Iterator[Diagnostic]:
    """A role that runs at every step has no graph for any of its decodes.

    The reason is in the waivers and decisions; it is worth a look, as decodes are the steps that
    gain most from a graph. A mode of NONE that the spec asks for is not reported.
    """
    for role in coverage.plan.roles:
        families = decode_families(role.role, coverage.plan)
        cells = [c for c in coverage.cells if c.role is role.role and c.kind is Kind.DECODE]
        if (
            families
            and role.requested is not GraphMode.NONE
            and cells
            and all(c.entry is None for c in cells)
        ):
            yield Diagnostic(
                role=role.role,
                path=_role_path(coverage, role.role, "mode"),
                message=f"{role.role}: every decode runs eager (mode {role.mode.value}, {role.requested.value} wanted)",
            )


def _role_path(coverage: Coverage, role: Role, *rest: str | int) -> tuple[str | int, ...]:
    index = [planned.role for planned in coverage.plan.roles].index(role)
    return ("roles", index, *rest)
