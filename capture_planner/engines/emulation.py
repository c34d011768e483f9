"""What an engine captures and how it dispatches: the same record for every engine.

An emulation is what one release does with its own flags: which graphs it captures, in which order, and which
of them serves a batch. It is *exact*: where the engine leaves a hole, the emulation leaves it too.
``capture_planner.dispatch.dispatcher`` is what we would do with the same graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.errors import DispatchError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry, Rejection
from capture_planner.records.batch_space import DecodeFamily, decode_families
from capture_planner.records.environment import Environment
from capture_planner.records.model import Speculative
from capture_planner.records.observation import ObservedGraph
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Limits, Lora, Parallel


@attrs.frozen(kw_only=True)
class EncoderGraphs:
    """The graphs of a multimodal model's encoder: one per budget, separate from the language model's graphs."""

    budgets: tuple[int, ...]
    """In tokens that leave the encoder, ascending."""
    max_items: int
    """Most images or videos in one replay."""
    reach: int
    """The most tokens that one batch of images can become."""

    def budget(self, tokens: int, items: int = 1) -> int | None:
        """Return the budget that images of so many tokens in all are padded to; None: they run eager, or apart."""
        # Images are packed whole, so the smallest budget that holds all tokens is the one.
        at = bisect_left(self.budgets, tokens)
        return self.budgets[at] if items <= self.max_items and at < len(self.budgets) else None


@attrs.frozen(kw_only=True)
class CapturedGraph:
    """One graph that an engine captures."""

    role: Role
    entry: Entry
    max_query_len: int | None = None
    """Set where a graph serves any mix of decodes up to so many tokens each: vLLM's varlen graphs."""
    microbatches: int = 1
    """Parts of a batch that overlap in the graph; it serves only batches that the engine splits in so many."""
    prompts_only: bool = attrs.field(default=False, eq=False)
    """Whether decodes never run on it: SGLang's graphs of prefills."""

    @classmethod
    def of(cls, role: Role, graph: ObservedGraph) -> CapturedGraph:
        """Return an observed graph as emulations have it."""
        return cls(role=role, entry=graph.entry, max_query_len=graph.max_query_len, prompts_only=graph.prompts_only)

    def rejection(self, batch: Batch, draft_steps: int | None = None) -> Rejection | None:
        """Return why the graph cannot serve a batch, or None where it can: compatibility, not dispatch."""
        # Decodes have graphs of their own there, and never try these.
        if self.prompts_only and batch.uniform_query_len is not None:
            return Rejection.QUERY_LEN
        if self.max_query_len is not None:
            # A graph for decodes of any length has no prompts.
            if not batch.past_prompt:
                return Rejection.PROMPT
            if (batch.query_len or batch.max_query_len or 1) > self.max_query_len:
                return Rejection.QUERY_LEN
        return self.entry.rejection(batch, draft_steps)


def draft_steps_of(batch: Batch, families: Iterable[DecodeFamily]) -> int | None:
    """Return the passes of the chain of draft decodes that a batch is one of, by its role's ``families``, or None."""
    alike = (each for each in families if each.query_len == batch.query_len)
    return next((family.draft_steps for family in alike if batch.num_reqs in family.requests), None)


BY_MODEL = "by the model"
"""The value of a setting that a model decides whose rules are not emulated."""


@attrs.frozen(kw_only=True)
class Setting:
    """One value that the engine ends up with, and where it comes from."""

    name: str
    """As the engine's flag is called, without dashes: ``max_num_seqs``."""
    value: Any
    """Plain data: a number, a text, a list, None."""
    source: str
    """``flag``, ``file``, ``default``, or the rule that rewrote it; of what the model decides, where its facts
    come from: ``model``, ``cache``, ``known``, ``family`` or ``assumed``."""


class Decisions(list[Decision]):
    """Steps of an engine's rules, in order."""

    def note(
        self, rule: str, before: object, after: object, says: str, role: Role = Role.TARGET, backend: str | None = None
    ) -> None:
        """Record a step that changed a value."""
        self.append(
            Decision(rule=rule, role=role, backend=backend, before=written(before), after=written(after), message=says)
        )


def written(value: object) -> str:
    """Return a value as decisions have it: of more than twelve items the first six and the last three."""
    if isinstance(value, list | tuple):
        words = [str(item) for item in value]
        return ", ".join(words if len(words) <= 12 else [*words[:6], "...", *words[-3:]]) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


class Manager(Protocol):
    """One role's graphs and the rule by which the engine finds one."""

    @property
    def role(self) -> Role: ...
    @property
    def mode(self) -> GraphMode:
        """The mode that the engine has resolved for the role."""

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """In the order in which the engine captures them."""

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return what the engine answers once everything is captured, for an inadmissible batch too."""


@attrs.frozen(kw_only=True)
class Emulation:
    """An engine's graphs, settings and dispatch with its flags."""

    engine: str
    """The name of the ``Engine``."""
    version: str
    command: tuple[str, ...]
    """The engine's own flags, as they were given."""
    settings: tuple[Setting, ...]
    """Final settings of the engine, as far as they matter for graphs."""
    sizes: tuple[int, ...]
    """The engine's list of capture sizes, ascending, in tokens or requests: ``Engine.sizes_in_tokens``."""
    asked_sizes: tuple[int, ...] = ()
    """The sizes that the flags list, as they do; empty where the list is the engine's own."""
    managers: tuple[Manager, ...]
    """One for each role that can have graphs, target first."""
    encoders: tuple[EncoderGraphs, ...] = ()
    """The graphs of a multimodal model's encoder; none: it runs eager."""
    decisions: tuple[Decision, ...]
    """Steps of the engine's rules, in order: rewrites of modes, clamps, dropped sizes."""
    limits: Limits
    whole_prompts: bool = False
    """Whether one prompt by itself may be longer than max_num_tokens (SGLang without chunks)."""
    speculative: Speculative | None = None
    drafts: tuple[DecodeFamily, ...] | None = None
    """The passes of draft decodes, where they are not one token of each request, k - 1 times."""
    lora: Lora | None = None
    parallel: Parallel = attrs.Factory(Parallel)
    by_flags: str = ""
    """Why flags alone decide the answer, such as a model whose rules are not emulated; empty: the model's facts are in.

    Sizes and limits hold then, and a batch without a graph has none. The graphs are the most that there can be: the
    model can lower the mode, and drafters and encoders are left out."""
    assumptions: tuple[str, ...] = ()
    """Sentences, the first lines of every answer: what is assumed, which results depend on it, and what to do. Empty
    where the emulation is exact."""
    of_line: tuple[str, ...] = ()
    """Assumptions that come from reading the command line."""
    notes: tuple[str, ...] = ()
    """Skipped parts of the command line, which decide nothing."""
    asked: bool = False
    """Whether answers are only those that an engine was asked for; others have ``Reason.UNKNOWN``."""

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """All graphs, in the order in which the engine captures them, role by role."""
        return tuple(graph for manager in self.managers for graph in manager.graphs)

    @property
    def modes(self) -> dict[Role, GraphMode]:
        """The resolved mode of each role."""
        return {manager.role: manager.mode for manager in self.managers}

    def families(self, role: Role) -> tuple[DecodeFamily, ...]:
        """Return the uniform decodes that a role can meet."""
        # Trees and chains that the schedule does not tell.
        if role is Role.DRAFT_DECODE and self.drafts is not None:
            return self.drafts
        return decode_families(role, self)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Answer a batch as the engine's dispatcher does; raises ``DispatchError`` for a role it does not run."""
        for manager in self.managers:
            if manager.role is batch.role:
                return manager.dispatch(batch)
        roles = ", ".join(manager.role for manager in self.managers)
        raise DispatchError(f"{self.engine} runs no role {batch.role} with these flags; it runs {roles}")


Emulator = Callable[[Sequence[str], Environment], Emulation]
"""Emulates the words of an engine's command line on a machine; raises ``FlagError``."""
