"""What an engine captures and how it dispatches: the same record for every engine.

An emulation is what one release does with its own flags: which graphs it captures, in which order, and which
of them serves a batch. It is *exact*: where the engine leaves a hole, the emulation leaves it too.
``capture_planner.dispatch.dispatcher`` is what we would do with the same graphs.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.encoders import EncoderGraphs
from capture_planner.errors import DispatchError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry, Rejection
from capture_planner.records.batch_space import DecodeFamily, decode_families
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Limits, Lora, Parallel


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

    def rejection(self, batch: Batch, draft_steps: int | None = None) -> Rejection | None:
        """Return why the graph cannot serve a batch, or None where it can: compatibility, not dispatch."""
        if self.prompts_only and batch.uniform_query_len is not None:
            return Rejection.QUERY_LEN
        if self.max_query_len is not None:
            if not batch.past_prompt:
                return Rejection.PROMPT
            if (batch.query_len or batch.max_query_len or 1) > self.max_query_len:
                return Rejection.QUERY_LEN
        return self.entry.rejection(batch, draft_steps)


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
    """What an engine's rules did, in order."""

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
    """What one engine does with its flags."""

    engine: str
    """The name of the ``Engine``."""
    version: str
    command: tuple[str, ...]
    """The engine's own flags, as they were given."""
    settings: tuple[Setting, ...]
    """What the engine ends up with, as far as it matters for graphs."""
    sizes: tuple[int, ...]
    """The engine's list of capture sizes, ascending, in tokens or requests: ``Engine.sizes_in_tokens``."""
    asked_sizes: tuple[int, ...] = ()
    """The sizes that the flags list, as they do; empty where the list is the engine's own."""
    managers: tuple[Manager, ...]
    """One for each role that can have graphs, target first."""
    encoders: tuple[EncoderGraphs, ...] = ()
    """The graphs of a multimodal model's encoder; none: it runs eager."""
    decisions: tuple[Decision, ...]
    """What the engine's rules made of the flags, in order: rewrites of modes, clamps, dropped sizes."""
    limits: Limits
    whole_prompts: bool = False
    """Whether one prompt by itself may be longer than max_num_tokens (SGLang without chunks)."""
    speculative: Speculative | None = None
    drafts: tuple[DecodeFamily, ...] | None = None
    """The passes of draft decodes, where they are not one token of each request, k - 1 times."""
    lora: Lora | None = None
    parallel: Parallel = attrs.Factory(Parallel)
    assumptions: tuple[str, ...] = ()
    """Sentences, the first lines of every answer: what is assumed, which results depend on it, and what to do. Empty
    where the emulation is exact."""
    notes: tuple[str, ...] = ()
    """What of the command line decides nothing and was skipped."""

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
