"""The lint of emulated engines: what their own flags leave slow, unused or unsaid, and which flag mends it.

The rules of ``capture_planner.lint`` are about plans. These are about what an engine makes of its
flags: each is asked of the whole admissible space, through the engine's own dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from capture_planner.engines.core import Emulation
from capture_planner.engines.export.mend import mend_vllm, target_decodes
from capture_planner.engines.walk import Asked, Run, runs, walk
from capture_planner.lint.core import BugClass, Charge, Checking, Severity, registering
from capture_planner.modes import GraphMode, Role
from capture_planner.plan import Kind
from capture_planner.words import counted


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


@attrs.frozen(kw_only=True)
class EngineRule(Charge):
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
) -> Callable[[Checking], Checking]:
    """Register a check of an emulation under a stable code, with what mends it by engine."""
    mends = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm}
    facts = {"severity": severity, "bug_class": bug_class, "threads": threads}
    return registering(ENGINE_RULES, EngineRule, code, mends=mends, **facts)


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
    """Decodes are to run from full graphs, and the largest ones have none.

    At full load, when it matters most, every step then runs piecewise or eager.
    """
    wanted = {role for role, mode in walked.emulation.modes.items() if mode.decode_mode is GraphMode.FULL}

    def without_full(asked: Asked) -> bool:
        full = asked.best is not None and asked.best.mode is GraphMode.FULL
        return asked.kind is Kind.DECODE and asked.batch.role in wanted and not full

    for role, found in _by_role(walked, without_full):
        eager = _count(runs(a for run in found for a in run.asked if a.best is None))
        how = "eager" if eager == _count(found) else "PIECEWISE" if not eager else "PIECEWISE or eager"
        yield Seen(
            role=role,
            says=f"{role}: {_in_words(found)} have no full graph and run {how}",
            count=_count(found),
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
        yield Seen(
            role=role,
            says=f"{role}: {_count(found)} batches miss a graph that is captured: {_in_words(found)}; "
            f"{one.batch.num_tokens} tokens run {one.answer.mode.value} beside {one.best}",
            count=_count(found),
            mend=_of_missed(walked.emulation, role, found),
        )


def _of_missed(emulation: Emulation, role: Role, found: Iterable[Run]) -> str:
    """Return the very flags that mend missed graphs, where they can be worked out; else nothing."""
    modes, decodes = emulation.modes, any(run.kind is Kind.DECODE for run in found)
    if emulation.engine == "sglang" and not decodes:
        # It takes no graph that pads a prefill to more than twice its tokens.
        return "list sizes in --cuda-graph-bs-prefill at most twice each batch, as far as ranks divide them"
    if emulation.engine != "vllm" or not modes[role].is_separate:
        return ""
    if role is Role.DRAFT_PREFILL and modes[role] is modes[Role.TARGET]:
        return "the list of sizes that mends the target mends this too"
    return _sizes_for_vllm(emulation) if role is Role.TARGET else ""


def _sizes_for_vllm(emulation: Emulation) -> str:
    """Return the list of sizes with which no decode of vLLM's target misses a graph.

    It has no more FULL graphs than there are now, where such a list exists.
    """
    full = [graph.entry for graph in emulation.graphs if graph.role is Role.TARGET and graph.entry.query_len]
    made = mend_vllm(
        target_decodes(emulation),
        emulation.limits.max_num_reqs,
        graphs=len({(entry.num_tokens, entry.query_len) for entry in full}),
        wider=emulation.sizes,
        query_lens={entry.query_len for entry in full if entry.query_len},
    )
    return f"give --cudagraph-capture-sizes {' '.join(map(str, made.sizes))}, with which none does"


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
        unused = [graph.entry for graph in manager.graphs if graph.entry not in reached]
        if unused:
            yield Seen(
                role=role,
                says=f"{role}: {len(unused)} of {counted(len(manager.graphs), 'graph')} serve no batch, "
                f"such as {unused[0]}",
                count=len(unused),
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
        )
    for manager in emulation.managers:
        decodes = [(g.entry.num_tokens, g.entry.query_len) for g in manager.graphs if g.entry.query_len]
        widths = sorted({query_len for _, query_len in decodes})
        kept = {num_tokens for num_tokens, _ in decodes}
        gone = [size for size in emulation.sizes if size not in kept]
        # The other engines count sizes in requests, and have no list but that of their graphs.
        if emulation.engine == "vllm" and widths not in ([], [1]) and gone:
            yield Seen(
                role=manager.role,
                says=f"{manager.role}: {len(gone)} of {len(emulation.sizes)} sizes give no decode graph of their "
                f"own at {' or '.join(map(str, widths))} tokens a request: {_some(gone)}",
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
                says=f"{decision.role}: {before.value} became {after.value}: {decision.says}",
            )
