"""What an export is: the flags that come closest to a plan, what they lose, and the proof of it."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from capture_planner.analysis.coverage import coverage
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.engines.parsing import as_words
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.text import counted

DRAFT_MODEL = "DRAFT_MODEL"
"""Stands where an engine wants the drafter's path, which a plan does not know: to be replaced."""

BACKEND = "attention-backend"
"""The setting of the attention backend, of vLLM and of SGLang."""

Scope = tuple[Role, Kind]
"""Batches of one kind of one role."""


class Effect(enum.StrEnum):
    """How an engine answers a batch otherwise than the plan; the first three are losses."""

    EAGER = "eager"
    """The plan has a graph, the engine runs it eager."""
    WEAKER = "weaker"
    """FULL in the plan, PIECEWISE in the engine."""
    PADDED = "padded"
    """The same mode, and the engine pads it further: tokens, requests or adapters."""
    TIGHTER = "tighter"
    """The same mode, and the engine pads it less."""
    STRONGER = "stronger"
    """PIECEWISE in the plan, FULL in the engine."""
    CAPTURED = "captured"
    """Eager in the plan, and the engine has a graph."""
    OTHER = "other"
    """The same mode and padding, on a graph for other query lengths or for another chain of draft decodes."""


@attrs.frozen(kw_only=True)
class BatchDifference:
    """Batches that the engine answers otherwise, all in one way; the graphs are the largest batch's."""

    role: Role
    kind: Kind
    query_len: int | None
    first: int
    """Requests of decodes, tokens of mixed batches, as ``last``."""
    last: int
    min_reqs: int
    max_reqs: int
    min_loras: int
    max_loras: int
    effect: Effect
    planned: Entry | None
    emulated: Entry | None
    batches: int
    """How many batches: counts of requests (decodes) or of tokens (mixed), times adapter counts."""


@attrs.frozen(kw_only=True)
class Cost:
    """What a loss costs, counted by re-emulation."""

    graphs_added: int = 0
    """Graphs of the engine that the plan has not."""
    graphs_lost: int = 0
    """Graphs of the plan that the engine has not."""
    padded: int = 0
    """Batches that the engine pads further."""
    weaker: int = 0
    """Batches that lose their FULL graph and keep a PIECEWISE one."""
    eager: int = 0
    """Batches that lose their graph."""

    def __str__(self) -> str:
        return (
            f"{self.graphs_added} graphs added, {self.graphs_lost} lost; {self.padded} batches padded further, "
            f"{self.weaker} piecewise, {self.eager} eager"
        )


@attrs.frozen
class Loss:
    """Something of a plan that the engine cannot express."""

    name: str
    """Stable, as in ``one-size-list``."""
    says: str
    """What is lost, in a sentence."""
    scope: tuple[Scope, ...] = ()
    """The batches it can touch; empty where it touches none."""
    cost: Cost | None = None
    """All that differs in its scope; None before the proof. Losses that share a scope share its cost."""


@attrs.frozen(kw_only=True)
class Proof:
    """A plan compared with the emulation of its export, graph by graph and batch by batch."""

    same: tuple[CapturedGraph, ...]
    """Graphs that both have."""
    lacks: tuple[CapturedGraph, ...]
    """Graphs of the plan that the engine has not."""
    adds: tuple[CapturedGraph, ...]
    """Graphs of the engine that the plan has not."""
    batches: int
    """How many admissible batches were compared."""
    differences: tuple[BatchDifference, ...]
    unrun: tuple[Role, ...] = ()
    """Roles of the plan that the engine does not run as forwards of their own; not compared."""
    unknown: int = 0
    """How many batches an observation has no answer for; not compared."""

    @property
    def captured(self) -> int:
        """How many graphs the engine captures."""
        return len(self.same) + len(self.adds)

    @property
    def exact(self) -> bool:
        """Whether the engine has the plan's graphs, and answers every batch alike."""
        return not (self.lacks or self.adds or self.differences or self.unrun)

    @property
    def loss(self) -> Cost | None:
        """What is lost of the plan, in all: graphs that the engine lacks, and batches with a lesser one; else None."""
        batches = {effect: self.count(effect) for effect in (Effect.PADDED, Effect.WEAKER, Effect.EAGER)}
        if not (self.lacks or self.unrun or any(batches.values())):
            return None
        return Cost(
            graphs_added=len(self.adds),
            graphs_lost=len(self.lacks),
            padded=batches[Effect.PADDED],
            weaker=batches[Effect.WEAKER],
            eager=batches[Effect.EAGER],
        )

    def count(self, effect: Effect, role: Role | None = None, kind: Kind | None = None) -> int:
        """Return how many batches have that effect, of all or of one role or kind."""
        return sum(
            found.batches
            for found in self.differences
            if found.effect is effect and role in (None, found.role) and kind in (None, found.kind)
        )

    def cost(self, scope: Sequence[Scope]) -> Cost:
        """Return all that differs in a scope."""
        batches: Counter[Effect] = Counter()
        for difference in self.differences:
            if (difference.role, difference.kind) in scope:
                batches[difference.effect] += difference.batches
        return Cost(
            graphs_added=sum(graph_scope(graph) in scope for graph in self.adds),
            graphs_lost=sum(graph_scope(graph) in scope for graph in self.lacks),
            padded=batches[Effect.PADDED],
            weaker=batches[Effect.WEAKER],
            eager=batches[Effect.EAGER],
        )


def graph_scope(graph: CapturedGraph) -> Scope:
    """Return the batches that a graph is for."""
    uniform = graph.entry.query_len is not None or graph.max_query_len is not None
    return graph.role, Kind.DECODE if uniform else Kind.MIXED


@attrs.frozen(kw_only=True)
class Export:
    """The flags of an engine that come closest to a plan; ``DRAFT_MODEL`` stands for the drafter, not named in it."""

    engine: str
    settings: Mapping[str, Any]
    """What is set, under the engine's names: of its flags without dashes, or of its file's keys."""
    file_name: str
    by_file: bool = False
    """Whether the settings stand in the file only, and the flags name the file."""
    front: tuple[str, ...] = ()
    """Words in front of the flags: the model, where the engine has no flag for it."""
    sizes: tuple[int, ...] = ()
    """Capture sizes of uniform decodes, in the engine's unit: tokens for vLLM, else requests."""
    losses: tuple[Loss, ...] = ()
    proof: Proof | None = None
    """What re-emulation found; None before it, and where the engine refuses the flags."""
    drafter_backend: tuple[str, str] | None = None
    """Where the drafter's attention backend is set: a flag, and a key of its JSON value."""
    coarser: Callable[[Fraction], Export] | None = attrs.field(default=None, eq=False, repr=False)
    """The same with the fewest sizes that pad a batch to at most so many times its tokens, for a plan's budget; None:
    the exporter has one list of sizes only."""
    unproved: str | None = None
    """Why there is no proof: the engine's reason; None where there is one, and before it."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Words of the engine's command line."""
        return self.command(self.file_name)

    @property
    def file(self) -> str:
        """Text of the engine's configuration file: the same as the flags, or what they refer to."""
        return "".join(f"{name}: {_yaml_value(value)}\n" for name, value in self.settings.items())

    @property
    def backend(self) -> str | None:
        """The attention backend that is set; None where it is left to the engine."""
        return self.settings.get(BACKEND)

    def command(self, path: str) -> tuple[str, ...]:
        """Return the flags, with the file at ``path`` where they need it."""
        return (*self.front, *as_words({"config": path} if self.by_file else self.settings))


def _yaml_value(value: Any) -> str:
    # As JSON, which is YAML; but JSON would make texts of keys that are numbers.
    if not isinstance(value, Mapping):
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(key)}: {_yaml_value(each)}" for key, each in value.items()) + "}"


def both(role: Role) -> tuple[Scope, ...]:
    """Return the scope of all batches of a role."""
    return tuple((role, kind) for kind in Kind)


def all_scopes(plan: Plan) -> tuple[Scope, ...]:
    """Return the scope of all batches of a plan."""
    return tuple(scope for role in plan.roles for scope in both(role.role))


def drafter_losses(plan: Plan, name: str, says: str) -> Iterator[Loss]:
    """Yield a loss of each drafter's role, with the role and its number of graphs put into ``says``."""
    for drafter in (each for each in plan.roles if each.role.is_drafter):
        text = says.format(role=drafter.role.value, graphs=counted(len(drafter.entries), "graph"))
        yield Loss(f"{drafter.role.value.replace('_', '-')}-{name}", text, both(drafter.role))


def parallel_loss(plan: Plan, engine: str) -> tuple[Loss, ...]:
    """Return the loss of parallel drafting, for an engine whose drafter of that method drafts a chain."""
    if plan.speculative is None or not plan.speculative.parallel_drafting:
        return ()
    says = (
        f"{engine} has no parallel drafting with {plan.speculative.method.value}: its drafter makes one after another"
    )
    return (Loss("parallel-drafting", says, both(Role.DRAFT_PREFILL)),)


def lazy_loss(plan: Plan, engine: str) -> Iterator[Loss]:
    """Yield the loss of lazy capture. It costs no batch its graph: the engine captures all of them at start."""
    if plan.num_lazy:
        graphs = counted(plan.num_lazy, "graph")
        yield Loss("lazy-capture", f"{engine} captures at start; the plan leaves {graphs} to their first use")


def longest_draft(plan: Plan) -> int:
    """Return the most tokens that any batch drafts: less than num_tokens where no batch reaches it."""
    return max(k for *_, k in decode_tiers(plan))


def decode_sizes(plan: Plan, target: RolePlan, width: int) -> tuple[int, ...]:
    """Return the batch sizes of decodes, in requests: of all widths together, for an engine with one list."""
    if target.mode.is_separate:
        return tuple(sorted({e.num_reqs for e in target.entries if e.query_len is not None and e.num_reqs}))
    most = min(plan.limits.max_num_reqs, plan.limits.max_num_tokens // width)
    return tuple(sorted(size for size in {min(entry.num_tokens // width, most) for entry in target.entries} if size))


def fallback_loss(plan: Plan, engine: str) -> tuple[Loss, ...]:
    """Name the decodes that the plan runs on piecewise graphs of mixed batches, which the engine does not."""
    decodes = (cell for cell in coverage(plan).cells if cell.role is Role.TARGET and cell.kind is Kind.DECODE)
    if not any(cell.answer.mode is GraphMode.PIECEWISE for cell in decodes):
        return ()
    says = f"decodes without a full graph run on graphs of mixed batches in the plan; {engine} runs them eager"
    return (Loss("piecewise-decodes", says, ((Role.TARGET, Kind.DECODE),)),)


def backend_setting(plan: Plan, names: Mapping[str, str], engine: str) -> tuple[str | None, tuple[Loss, ...]]:
    """Return the engine's name of the plan's attention backend, and what is lost where it has none."""
    found = list(dict.fromkeys(group.backend for group in plan.role(Role.TARGET).groups))
    if len(found) > 1:
        says = f"the target's groups run on {', '.join(found)}; {engine} takes one backend for all of them"
        return None, (Loss("backend", says, all_scopes(plan)),)
    if found and found[0] not in names:
        says = f"{engine} has no attention backend {found[0]}; it chooses its own, which decides the modes"
        return None, (Loss("backend", says, all_scopes(plan)),)
    return names[found[0]] if found else None, ()


def drafter_backend_setting(plan: Plan, names: Mapping[str, str], engine: str) -> tuple[str | None, tuple[Loss, ...]]:
    """Return the engine's name of the drafter's attention backend, and what is lost where it has none."""
    drafters = [role for role in plan.roles if role.role.is_drafter]
    found = list(dict.fromkeys(group.backend for role in drafters for group in role.groups))
    scopes = tuple(scope for role in drafters for scope in both(role.role))
    if len(found) > 1:
        says = f"the drafter's passes run on {', '.join(found)}; {engine} takes one backend for all of them"
        return None, (Loss(DRAFTER_BACKEND, says, scopes),)
    if found and found[0] not in names:
        says = f"{engine} has no attention backend {found[0]} for the drafter, and chooses its own"
        return None, (Loss(DRAFTER_BACKEND, says, scopes),)
    return names[found[0]] if found else None, ()


DRAFTER_BACKEND = "drafter-backend"
"""The loss of the drafter's attention backend."""
