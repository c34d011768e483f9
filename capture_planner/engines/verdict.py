"""The verdict on an emulation: what runs on graphs, what runs eager, and what it costs, each in one sentence.

An emulation knows how many graphs an engine captures, and of its model no more than attention and length, so memory and
time are ranges: from what was measured to what is reported in public. ``profile`` measures them on a machine, and
``tune`` and ``plan`` go by what it measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

import attrs

from capture_planner.engines.deployments import BatchAnswer
from capture_planner.engines.emulation import Emulation
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import union
from capture_planner.records.text import counted, ranges_text

LEAST = {False: (1.0, 0.03), True: (0.0, 0.004)}
"""MiB and seconds of a graph of the target, and (True) of a drafter, at least: vLLM 0.33 on an H200 with Qwen3-0.6B and
Qwen3-8B and an EAGLE-3 drafter (the shipped profiles, rounded down)."""

MOST = (25.0, 0.25)
"""MiB and seconds of a graph at most: public threads have 7 to 25 MiB (vllm#50780: 24) and 0.05 to 0.25 s."""

ONCE = (842.0, 0.8)
"""MiB and seconds that capturing takes at most before its first graph: the larger of the shipped profiles."""

SOURCE = "between those measured on an H200 and the most reported"


@attrs.frozen
class GraphBill:
    """Graphs, and the least and the most that they cost a rank at start-up."""

    graphs: int
    mib: tuple[float, float]
    seconds: tuple[float, float]

    def __str__(self) -> str:
        unit, of = ("GiB", 1024) if self.mib[1] >= 1024 else ("MiB", 1)
        low, high = (_number(each / of) for each in self.mib)
        return f"{low} to {high} {unit} and {_number(self.seconds[0])} to {_number(self.seconds[1])} s"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def bill(roles: Iterable[Role], once: tuple[float, float] = ONCE) -> GraphBill:
    """Return what graphs cost, each by its role; ``once``: MiB and seconds that capturing takes before the first."""
    drafts = [role.is_drafter for role in roles]
    mib, seconds = (
        # What comes before the first graph is paid only where there is one.
        (round(sum(LEAST[each][i] for each in drafts), 1), round(len(drafts) * MOST[i] + once[i] * bool(drafts), 1))
        for i in (0, 1)
    )
    return GraphBill(len(drafts), mib, seconds)


def change_text(before: Emulation, after: Emulation) -> str:
    """Say what other flags cost or save: ``928 more graphs, 1179 in all: 0.9 to 22.7 GiB and 28 to 232 s``."""
    old, new = (Counter(graph.role.is_drafter for graph in each.graphs) for each in (before, after))
    was, total = (len(each.graphs) + sum(len(one.budgets) for one in each.encoders) for each in (before, after))
    by = total - was
    # Other sizes, the same number: there is no price to tell.
    if not by:
        return f"as many graphs, {total}"
    more, fewer = (new, old) if by > 0 else (old, new)
    # Graphs of encoders were not measured, and may take next to nothing.
    least = [max(sum(LEAST[each][i] * (more[each] - fewer[each]) for each in LEAST), 0.0) for i in (0, 1)]
    mib, seconds = ((least[i], MOST[i] * abs(by)) for i in (0, 1))
    bill_ = GraphBill(abs(by), mib, seconds)
    return (
        f"{counted(abs(by), 'more graph' if by > 0 else 'fewer graph')}, {total} in all: {bill_}{' saved' * (by < 0)}"
    )


MOST_RANGES = 3
"""Ranges of batches that a sentence names; of more, only their number."""


@attrs.frozen(kw_only=True)
class EngineVerdict:
    """Three sentences about an emulation."""

    graphs: str
    eager: str
    cost: GraphBill
    by_flags: bool = False
    """Whether flags alone decide, so that graphs are the most there can be."""

    @property
    def lines(self) -> tuple[str, str, str]:
        """The sentences, each with the word that it answers."""
        price = f"{counted(self.cost.graphs, 'graph')}: {self.cost} at start-up, {SOURCE}"
        cost = price if self.cost.graphs else "nothing at start-up; the host launches every kernel of every step"
        if not self.by_flags:
            return f"graphs: {self.graphs}", f"eager: {self.eager}", f"cost: {cost}"
        return (
            f"graphs: at most, by the flags alone: {self.graphs}",
            f"eager: {self.eager}, whatever the model; which others depends on it",
            f"cost: at most {cost}" if self.cost.graphs else f"cost: {cost}",
        )


def verdict(emulation: Emulation, answers: Sequence[BatchAnswer]) -> EngineVerdict:
    """Return the verdict; ``answers`` are those of ``walk(emulation)``."""
    cost, alone = bill(graph.role for graph in emulation.graphs), bool(emulation.by_flags)
    if alone:
        # A model that has no graphs pays for none.
        cost = attrs.evolve(cost, mib=(0, cost.mib[1]), seconds=(0, cost.seconds[1]))
    # Without any graph there is one thing to say: why.
    if not emulation.graphs and not emulation.encoders:
        return EngineVerdict(graphs=f"none: {_why_none(emulation)}", eager="every batch", cost=cost)  # Of any model.
    graphs = _by_role(emulation, answers, lambda one: one.answer.entry is not None)
    eager = _by_role(emulation, answers, is_eager if not alone else is_eager_for_any_model)
    graphs, eager = (_with_encoder(text, emulation, run) for text, run in ((graphs, True), (eager, False)))
    return EngineVerdict(graphs=graphs or "none", eager=eager or "nothing", cost=cost, by_flags=alone)


def is_eager(one: BatchAnswer) -> bool:
    """Say whether a batch has no graph."""
    return one.answer.entry is None


def is_eager_for_any_model(one: BatchAnswer) -> bool:
    """Say whether flags alone leave a batch without a graph."""
    # Attention without graphs of decodes may turn their mode into PIECEWISE, which has graphs of other batches.
    return is_eager(one) and (one.batch.kind is Kind.DECODE or one.answer.reason is Reason.SIZES)


def _with_encoder(text: str, emulation: Emulation, on_graphs: bool) -> str:
    """Append which images run the encoder from graphs, or eager."""
    parts = [text] if text else []
    for each in emulation.encoders:
        # Images beyond the largest budget run eager: there is no larger graph.
        first, last = (1, each.budgets[-1]) if on_graphs else (each.budgets[-1] + 1, each.reach)
        if first <= last:
            price = f", {counted(len(each.budgets), 'graph')} more" if on_graphs else ""
            parts.append(f"encoder: images of {first} to {last} tokens{price}")
    return "; ".join(parts)


def _why_none(emulation: Emulation) -> str:
    """Say what leaves nothing to capture: the rule that lowered the mode, or what gave it."""
    none = GraphMode.NONE.value
    if any(mode is not GraphMode.NONE for mode in emulation.modes.values()):
        return "no size is left to capture"
    # The last rule that lowered the mode, or else the last setting, has decided it.
    messages = [each.message for each in emulation.decisions if each.role is Role.TARGET and each.after == none]
    sources = [each.source for each in emulation.settings if each.value == none and "mode" in each.name]
    return messages[-1] if messages else f"mode {none}, from {sources[-1]}" if sources else f"mode {none}"


def _by_role(emulation: Emulation, answers: Sequence[BatchAnswer], condition: Callable[[BatchAnswer], bool]) -> str:
    """Say which batches of each role meet a condition; roles of which the same is true are named together."""
    texts: dict[Role, str] = {}
    for manager in emulation.managers:
        own = [one for one in answers if one.batch.role is manager.role]
        meeting = [one for one in own if condition(one)]
        if meeting:
            texts[manager.role] = _batches(meeting, [one for one in own if not condition(one)])
    alike = grouped(texts, lambda role: texts[role])
    # With one role its name says nothing.
    if len(emulation.managers) == 1:
        return "".join(alike)
    return "; ".join(f"{' and '.join(roles)}: {text}" for text, roles in alike.items())


def _batches(meeting: Sequence[BatchAnswer], others: Iterable[BatchAnswer]) -> str:
    """Write batches: ``decodes of 1 to 128 requests (FULL), mixed batches of 1 to 512 tokens (PIECEWISE)``."""
    parts = []
    rest = {_key(one) for one in others}
    for kind, name, unit in ((Kind.DECODE, "decodes", "request"), (Kind.MIXED, "mixed batches", "token")):
        some = [one for one in meeting if one.batch.kind is kind]
        if some:
            ends = ranges(some)
            more = len(ends) - MOST_RANGES
            text = ranges_text(ends[:MOST_RANGES]) + (f" and {more} more ranges" if more > 0 else "")
            modes = {one.answer.mode for one in some} - {GraphMode.NONE}
            how = f" ({' or '.join(sorted(mode.value for mode in modes))})" if modes else ""
            parts.append(f"{name} of {text} {unit}{'' if ends[-1][1] == 1 else 's'}{how}{_adapters(some, rest)}")
    return ", ".join(parts)


def _adapters(some: Iterable[BatchAnswer], others: Set[object]) -> str:
    """Say with which adapters, where batches of the same size are answered in another way with others."""
    loras = {one.batch.active_loras > 0 for one in some if _key(one) in others}
    return "" if len(loras) != 1 else " with adapters" if loras == {True} else " without adapters"


def _key(one: BatchAnswer) -> object:
    return one.batch.kind, one.batch.num_tokens, one.batch.num_reqs


def ranges(answers: Iterable[BatchAnswer]) -> list[tuple[int, int]]:
    """Return the first and the last extent of each range, whatever adapters the batches have."""
    return union((one.extent, one.last) for one in answers)
