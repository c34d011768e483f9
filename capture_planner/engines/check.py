"""The lint of emulated engines: what their own flags leave slow, unused or unsaid, and which flag mends it.

The rules of ``capture_planner.analysis.lint`` are about plans. These are about what an engine makes of its
flags: each is asked of the whole admissible space, through the engine's own dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from capture_planner.analysis.lint.core import BaseRule, BugClass, CheckT, Severity, register_in
from capture_planner.engines import remedies
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.walk import Asked, Run, runs, walk
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Kind
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class Walked:
    """What the rules look at: an emulation, and its answers to every admissible batch."""

    emulation: Emulation
    asked: tuple[Asked, ...]


@attrs.frozen(kw_only=True)
class Seen:
    """What a rule saw at one place."""

    role: Role
    says: str
    count: int = 1
    """How many batches, graphs or sizes it is about."""
    mend: str = ""
    """The very flag that mends it, where it can be worked out; empty: as the rule has it."""
    severity: Severity | None = None
    """Where it is less than the rule's."""


@attrs.frozen(kw_only=True)
class EngineRule(BaseRule):
    """A rule about engines."""

    mends: dict[str, str]
    """What to set, by the engine's name."""
    check: Callable[[Walked], Iterator[Seen]]


@attrs.frozen(kw_only=True)
class EngineFinding:
    """A rule with what it saw, and the flag that mends it."""

    rule: EngineRule
    seen: Seen
    mend: str

    @property
    def severity(self) -> Severity:
        """The rule's, but where no flag is to blame."""
        return self.seen.severity or self.rule.severity

    def __str__(self) -> str:
        threads = ", ".join(self.rule.threads)
        return f"{self.rule.code} {self.rule.name}: {self.seen.says}; {self.mend} ({threads})"


ENGINE_RULES: dict[str, EngineRule] = {}
"""All rules by code."""


def rule(
    code: str,
    severity: Severity,
    bug_class: BugClass,
    *threads: str,
    vllm: str,
    sglang: str,
    tensorrt_llm: str,
) -> Callable[[CheckT], CheckT]:
    """Register a check of an emulation under a stable code, with what mends it by engine."""
    mends = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm}
    facts = {"severity": severity, "bug_class": bug_class, "threads": threads}
    return register_in(ENGINE_RULES, EngineRule, code, mends=mends, **facts)


def check(emulation: Emulation) -> tuple[EngineFinding, ...]:
    """Return what every rule finds, by code."""
    walked = Walked(emulation=emulation, asked=walk(emulation))
    return tuple(
        EngineFinding(rule=each, seen=seen, mend=seen.mend or each.mends[emulation.engine])
        for _, each in sorted(ENGINE_RULES.items())
        for seen in each.check(walked)
    )


def _in_words(found: Iterable[Run], most: int = 3) -> str:
    """Name runs of batches: the first few whole, of the others their number."""
    listed = list(found)
    shown = "; ".join(map(str, listed[:most]))
    left = len(listed) - most
    return shown + (f"; and {left} more such ranges" if left > 0 else "")


def _some(sizes: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, sizes[:most])) + (", ..." if len(sizes) > most else "")


def _count(found: Iterable[Run]) -> int:
    return sum(run.last - run.first + 1 for run in found)


def _miss(count: int) -> str:
    return "1 batch misses" if count == 1 else f"{count} batches miss"


def _by_role(walked: Walked, of: Callable[[Asked], bool]) -> Iterator[tuple[Role, list[Run]]]:
    for manager in walked.emulation.managers:
        found = list(runs(a for a in walked.asked if a.batch.role is manager.role and of(a)))
        if found:
            yield manager.role, found


@rule(
    "EN001",
    Severity.WARNING,
    BugClass.A,
    "vllm#54933",
    "sglang#33483",
    vllm="raise --max-cudagraph-capture-size to the largest decode (requests times 1 + K), or list it in "
    "--cudagraph-capture-sizes",
    sglang="raise --cuda-graph-max-bs-decode to the most running requests, or list it in --cuda-graph-bs-decode",
    tensorrt_llm="raise cuda_graph_config.max_batch_size to max_batch_size, or list it in batch_sizes",
)
def decodes_without_graph(walked: Walked) -> Iterator[Seen]:
    """Decodes are to run from graphs, and the largest ones have none.

    At full load, when it matters most, every step then runs piecewise or eager.
    """
    emulation = walked.emulation
    wanted = {role: mode.decode_mode for role, mode in emulation.modes.items()}
    # Where no decode has a graph, somebody has asked for that.
    graphed = {one.batch.role for one in walked.asked if one.kind is Kind.DECODE and one.best is not None}

    def lacking(asked: Asked) -> bool:
        mode, best = wanted[asked.batch.role], asked.best
        if asked.kind is Kind.MIXED or mode is GraphMode.NONE:
            return False
        if mode is GraphMode.PIECEWISE:
            return best is None and asked.batch.role in graphed
        return best is None or best.mode is not GraphMode.FULL

    for role, found in _by_role(walked, lacking):
        eager = _count(runs(a for run in found for a in run.asked if a.answer.entry is None))
        how = "eager" if eager == _count(found) else "PIECEWISE" if not eager else "PIECEWISE or eager"
        full = "full graph" if wanted[role] is GraphMode.FULL else "graph"
        yield Seen(
            role=role,
            says=f"{role}: {_in_words(found)} have no {full} and run {how}",
            count=_count(found),
            mend=remedies.of_lacking(emulation, found),
        )


@rule(
    "EN002",
    Severity.WARNING,
    BugClass.C,
    "vllm#56136",
    "vllm#53407",
    vllm="give sizes of which each is a multiple of every query length: capture-planner export --to vllm "
    "writes such a list",
    sglang="leave --disable-cuda-graph-padding out, and give --cuda-graph-bs-decode sizes close to each other",
    tensorrt_llm="set cuda_graph_config.enable_padding: true",
)
def compatible_graph_missed(walked: Walked) -> Iterator[Seen]:
    """A full graph that fits the batch is captured, and the engine's dispatcher does not find it.

    vLLM looks at the smallest captured size alone: where that belongs to another query length, the batch
    runs piecewise or eager beside a graph of its own.
    """
    for role, found in _by_role(walked, lambda asked: asked.misses_full or asked.misses_any):
        one = found[0].asked[0]
        # SGLang means it: short prefills are not padded to more than twice their tokens.
        deliberate = walked.emulation.engine == "sglang" and all(run.kind is Kind.MIXED for run in found)
        yield Seen(
            role=role,
            says=f"{role}: {_miss(_count(found))} a graph that is captured: {_in_words(found)}; "
            f"one of {counted(one.batch.num_tokens, 'token')} runs {one.answer.mode.value} beside {one.best}",
            count=_count(found),
            mend=remedies.of_missed(walked.emulation, role, found),
            severity=Severity.NOTE if deliberate else None,
        )


@rule(
    "EN003",
    Severity.WARNING,
    BugClass.C,
    "vllm#56136",
    vllm="list in --cudagraph-capture-sizes only sizes that a batch of the schedule needs",
    sglang="list in --cuda-graph-bs-decode only sizes up to the most running requests",
    tensorrt_llm="list in cuda_graph_config.batch_sizes only sizes up to max_batch_size",
)
def graphs_never_reached(walked: Walked) -> Iterator[Seen]:
    """Graphs are captured that no admissible batch is answered with: start-up time and memory for nothing."""
    for manager in walked.emulation.managers:
        role = manager.role
        reached = {asked.answer.entry for asked in walked.asked if asked.batch.role is role}
        entries = [graph.entry for graph in manager.graphs]
        unused = [entry for entry in entries if entry not in reached]
        if unused:
            widths = {entry.query_len for entry in entries if entry.query_len}
            # Each size is captured for all of these, and some other batch may need the size.
            fixed = role.is_drafter or len(widths) > 1 or len({entry.active_loras for entry in entries}) > 1
            yield Seen(
                role=role,
                says=f"{role}: {len(unused)} of {counted(len(entries), 'graph')} serve no batch, "
                f"such as {unused[0]}",
                count=len(unused),
                mend=remedies.of_unreached(walked.emulation, role) if fixed else "",
                severity=Severity.NOTE if fixed else None,
            )


@rule(
    "EN004",
    Severity.WARNING,
    BugClass.B,
    "vllm#28207",
    vllm="give --cudagraph-capture-sizes that are multiples of 1 + K",
    sglang="give --cuda-graph-bs-decode whose sizes times the draft tokens fit the alignment",
    tensorrt_llm="give cuda_graph_config.batch_sizes that max_num_tokens admits",
)
def sizes_rounded_away(walked: Walked) -> Iterator[Seen]:
    """Sizes of the list give no decode graph of their own: they are rounded to another, or dropped."""
    emulation = walked.emulation
    dropped = [size for size in emulation.asked_sizes if size not in emulation.sizes]
    if dropped and emulation.sizes:
        yield Seen(
            role=Role.TARGET,
            says=f"{Role.TARGET}: {len(dropped)} of {len(emulation.asked_sizes)} sizes that are asked for are not "
            f"captured: {_some(dropped)}; captured are {_some(emulation.sizes)}",
            count=len(dropped),
            mend=remedies.of_dropped(emulation, dropped),
        )
    # The other engines count sizes in requests, and have no list but that of their graphs.
    for manager in emulation.managers if emulation.engine == "vllm" else ():
        decodes = [(g.entry.num_tokens, g.entry.query_len) for g in manager.graphs if g.entry.query_len]
        widths = sorted({query_len for _, query_len in decodes})
        kept = {num_tokens for num_tokens, _ in decodes}
        if len(widths) != 1 or widths == [1]:
            continue  # Of several widths each size is a multiple of some.
        most = widths[0] * emulation.limits.max_num_reqs
        gone = [size for size in emulation.sizes if size not in kept and size <= most]
        if gone:
            yield Seen(
                role=manager.role,
                says=f"{manager.role}: {len(gone)} of {len(emulation.sizes)} sizes give no decode graph of their "
                f"own at {widths[0]} tokens a request: {_some(gone)}",
                count=len(gone),
            )


@rule(
    "EN005",
    Severity.WARNING,
    BugClass.G,
    "vllm#49547",
    "vllm#50619",
    vllm="name a backend that supports it with --attention-backend, or ask for the mode that is left with "
    "-cc.cudagraph_mode",
    sglang="name a backend that supports it with --attention-backend",
    tensorrt_llm="leave out the option that rules it out",
)
def mode_lowered(walked: Walked) -> Iterator[Seen]:
    """The engine runs in a lower mode than was asked for, and says so in a log line at most."""
    for decision in walked.emulation.decisions:
        modes = {mode.value: mode for mode in GraphMode}
        before, after = modes.get(decision.before), modes.get(decision.after)
        if before is not None and after is not None and after < before:
            yield Seen(
                role=decision.role,
                says=f"{decision.role}: {before.value} became {after.value}: {decision.message}",
                mend=remedies.of_lowered(walked.emulation, decision),
            )


HEAVY_RATIO, HEAVY_TOKENS = 2, 32


@rule(
    "EN006",
    Severity.WARNING,
    BugClass.C,
    "sglang#31487",
    "sglang#40253",
    vllm="add sizes between to --cudagraph-capture-sizes",
    sglang="add sizes between to --cuda-graph-bs-decode or --cuda-graph-bs-prefill",
    tensorrt_llm="add sizes between to cuda_graph_config.batch_sizes",
)
def heavy_padding(walked: Walked) -> Iterator[Seen]:
    """A batch is padded to more than twice its tokens, by more than a few of them."""

    def heavy(asked: Asked) -> bool:
        entry, real = asked.answer.entry, asked.batch.num_tokens
        return (
            entry is not None
            and entry.num_tokens > HEAVY_RATIO * real
            and entry.num_tokens - real > HEAVY_TOKENS
        )

    for role, found in _by_role(walked, heavy):
        worst = max((a for run in found for a in run.asked), key=lambda a: a.answer.padded_tokens)
        real = worst.batch.num_tokens
        yield Seen(
            role=role,
            says=f"{role}: {_in_words(found)} are padded to more than twice their tokens, "
            f"{real} to {real + worst.answer.padded_tokens} at worst",
            count=_count(found),
            mend=remedies.of_padding(walked.emulation, found[0]),
        )
