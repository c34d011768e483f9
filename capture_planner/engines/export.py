"""Exports: the flags of an engine that come closest to a plan, what they lose, and the proof.

The proof is re-emulation: every admissible batch is asked of the plan and of the flags, decodes by requests, mixed
batches by tokens, each with the most requests and the fewest adapters of a range in which neither side has a size that
ends.
"""

from __future__ import annotations

import enum
import json
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs

from capture_planner.analysis.coverage import coverage
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import CapturedGraph, Emulation, Emulator
from capture_planner.engines.parsing import as_words
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import decode_tiers, mixed_tokens, most_loras, split_at, split_when
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.text import counted

DRAFT_MODEL = "DRAFT_MODEL"
"""Stands where an engine wants the drafter's path, which a plan does not know: to be replaced."""

BACKEND = "attention-backend"
"""The setting of the attention backend, of vLLM and of SGLang."""

Scope = tuple[Role, Kind]
"""Batches of one kind of one role."""


class Effect(enum.StrEnum):
    """Difference between an engine's answer to a batch and the plan's; the first three are losses."""

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
    """Batches that the engine answers differently, all in one way; the graphs are the largest batch's."""

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
    """Number of batches: counts of requests (decodes) or of tokens (mixed), times adapter counts."""


@attrs.frozen(kw_only=True)
class Cost:
    """Cost of a loss, counted by re-emulation."""

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
    """The loss in a sentence."""
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
    """Number of admissible batches that were compared."""
    differences: tuple[BatchDifference, ...]
    unrun: tuple[Role, ...] = ()
    """Roles of the plan for which the engine runs no separate passes; not compared."""
    assumptions: tuple[str, ...] = ()
    """What the emulation assumes."""
    unknown: int = 0
    """Number of batches that an observation has no answer for; not compared."""

    @property
    def captured(self) -> int:
        """Number of graphs that the engine captures."""
        return len(self.same) + len(self.adds)

    @property
    def exact(self) -> bool:
        """Whether the engine has the plan's graphs, and answers every batch alike."""
        return not (self.lacks or self.adds or self.differences or self.unrun)

    @property
    def loss(self) -> Cost | None:
        """Total loss of the plan: graphs that the engine lacks, and batches with a lesser one; else None."""
        cost = _cost(self.adds, self.lacks, self.differences)
        # Graphs that the engine adds, and batches that it serves better, are no loss.
        lost = self.lacks or self.unrun or cost.padded or cost.weaker or cost.eager
        return cost if lost else None

    def count(self, effect: Effect, role: Role | None = None, kind: Kind | None = None) -> int:
        """Return how many batches have that effect, of all or of one role or kind."""
        return sum(
            found.batches
            for found in self.differences
            if found.effect is effect and role in (None, found.role) and kind in (None, found.kind)
        )

    def cost(self, scope: Sequence[Scope]) -> Cost:
        """Return all that differs in a scope."""
        adds, lacks = ([each for each in graphs if graph_scope(each) in scope] for graphs in (self.adds, self.lacks))
        return _cost(adds, lacks, [each for each in self.differences if (each.role, each.kind) in scope])


def _cost(adds: Sequence[CapturedGraph], lacks: Sequence[CapturedGraph], found: Iterable[BatchDifference]) -> Cost:
    batches: Counter[Effect] = Counter()
    for each in found:
        batches[each.effect] += each.batches
    return Cost(
        graphs_added=len(adds),
        graphs_lost=len(lacks),
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
    """Values by the engine's names: its flags without dashes, or its file's keys."""
    file_name: str
    by_file: bool = False
    """Whether the settings stand in the file only, and the flags name the file."""
    front: tuple[str, ...] = ()
    """Words in front of the flags: the model, where the engine has no flag for it."""
    sizes: tuple[int, ...] = ()
    """Capture sizes of uniform decodes, in the engine's unit: tokens for vLLM, else requests."""
    losses: tuple[Loss, ...] = ()
    proof: Proof | None = None
    """Result of re-emulation; None before it, and where the engine refuses the flags."""
    drafter_backend: tuple[str, str] | None = None
    """Setting of the drafter's attention backend: a flag, and a key of its JSON value."""
    coarser: Callable[[Fraction], Export] | None = attrs.field(default=None, eq=False, repr=False)
    """The same with the fewest sizes that pad a batch to at most so many times its tokens, for a plan's budget; None:
    the exporter has one list of sizes only."""
    unproved: str | None = None
    """Reason why there is no proof, as the engine says it; None where there is one, and before it."""

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
    # Only parallel drafting runs other batches than a chain does.
    if plan.speculative is None or not plan.speculative.parallel_drafting:
        return ()
    method = plan.speculative.method.value
    says = f"{engine} has no parallel drafting with {method}: its drafter makes one after another"
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
    # Decodes with graphs of their own have sizes in requests; others share those of mixed batches.
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


DRAFTER_BACKEND = "drafter-backend"
"""The loss of the drafter's attention backend."""


def backend_setting(
    plan: Plan, names: Mapping[str, str], engine: str, *, drafter: bool = False
) -> tuple[str | None, tuple[Loss, ...]]:
    """Return the engine's name of the plan's attention backend, and what is lost where it has none.

    :param names: the engine's names of backends, by ours.
    :param drafter: whether it is the drafter's; else the target's.
    """
    roles = [role for role in plan.roles if role.role.is_drafter is drafter]
    found = list(dict.fromkeys(group.backend for role in roles for group in role.groups))
    if drafter:
        name, subject, end = DRAFTER_BACKEND, "the drafter's passes", " for the drafter, and chooses its own"
        scope = tuple(scope for role in roles for scope in both(role.role))
    else:
        # A drafter may have the target's backend, so that all batches are in question.
        name, subject, end = "backend", "the target's groups", "; it chooses its own, which decides the modes"
        scope = all_scopes(plan)
    if len(found) > 1:
        says = f"{subject} run on {', '.join(found)}; {engine} takes one backend for all of them"
        return None, (Loss(name, says, scope),)
    if found and found[0] not in names:
        return None, (Loss(name, f"{engine} has no attention backend {found[0]}{end}", scope),)
    return names[found[0]] if found else None, ()


def prove(export: Export, plan: Plan, emulate: Emulator) -> Export:
    """Return the export with its proof, and with the cost of each loss.

    A backend that the engine refuses on this machine is left out, which is a loss. Where the engine refuses
    the flags for another reason, as on a machine without a GPU, there is no proof, and ``unproved`` says why.
    """
    try:
        emulation = emulated(export, plan.environment, emulate)
    except FlagError as error:
        machine = plan.environment.name
        # One refused setting at a time is left out and proved anew, the most particular first.
        if (other := _without_drafter_backend(export, plan, error)) is not None:
            return prove(other, plan, emulate)
        # Refused for another reason than the backend: there is nothing to leave out.
        if export.backend is None or not all(problem.path[:1] == (f"--{BACKEND}",) for problem in error.problems):
            reason = "; ".join(map(str, error.problems))
            says = f"{export.engine} does not start with these flags on {machine}"
            # Flags that cannot be followed may well start: that is no refusal of the engine's.
            if isinstance(error, NotEmulated):
                says = f"{export.engine} may start with these flags on {machine}, and that cannot be followed here"
            return attrs.evolve(export, unproved=f"{says}: {reason}")
        says = (
            f"the plan's backend is left out, and the engine chooses its own, which decides the modes; on {machine}: "
            + "; ".join(problem.message for problem in error.problems)
        )
        lost = Loss("backend", says, all_scopes(plan))
        settings = {name: value for name, value in export.settings.items() if name != BACKEND}
        return prove(attrs.evolve(export, settings=settings, losses=(*export.losses, lost)), plan, emulate)
    proof = compared(plan, emulation)
    losses = tuple(attrs.evolve(loss, cost=proof.cost(loss.scope)) for loss in export.losses)
    return attrs.evolve(export, losses=losses, proof=proof)


def _without_drafter_backend(export: Export, plan: Plan, error: FlagError) -> Export | None:
    """Return the export without the drafter's backend, where the engine refuses that and nothing else."""
    flag, key = export.drafter_backend or ("", "")
    # Another refusal would stay without this setting.
    others = any(problem.path[:1] != (f"--{flag}",) for problem in error.problems)
    if others or key not in export.settings.get(flag, {}):
        return None
    value = {name: item for name, item in export.settings[flag].items() if name != key}
    says = "the plan's backend of the drafter is left out, and the engine chooses its own; " + "; ".join(
        problem.message for problem in error.problems
    )
    lost = Loss(DRAFTER_BACKEND, says, tuple(scope for scope in all_scopes(plan) if scope[0].is_drafter))
    settings = {**export.settings, flag: value}
    return attrs.evolve(export, settings=settings, drafter_backend=None, losses=(*export.losses, lost))


def emulated(export: Export, environment: Environment, emulate: Emulator) -> Emulation:
    """Emulate the export, its file on disk meanwhile; raises ``FlagError`` with the file's name as it is exported."""
    # Flags in words need no file.
    if not export.by_file:
        return emulate(export.flags, environment)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, export.file_name)
        path.write_text(export.file, encoding="utf-8")
        try:
            return emulate(export.command(str(path)), environment)
        except FlagError as error:
            raise type(error)(
                attrs.evolve(problem, file=problem.file and export.file_name) for problem in error.problems
            ) from None


def compared(plan: Plan | Emulation, emulation: Emulation, *, both_admit: bool = False) -> Proof:
    """Compare a plan, or an emulation, with an emulation; ``both_admit``: only batches that both of them admit."""
    left = emulation_of(plan)
    ours, theirs = (Counter(map(_plain, each.graphs)) for each in (left, emulation))
    batches = unknown = 0
    differences: list[BatchDifference] = []
    for role in (role for role in left.modes if role in emulation.modes):
        for batch, last, max_loras, min_reqs in _batches(role, left, emulation):
            size = batch.extent(batch.kind)
            count = (last - size + 1) * (max_loras - batch.active_loras + 1)
            batches += count
            answers = left.dispatch(batch), emulation.dispatch(batch)
            # Two deployments may have other limits; those are compared as such.
            if both_admit and any(answer.reason is Reason.NOT_ADMISSIBLE for answer in answers):
                continue
            if any(answer.reason is Reason.UNKNOWN for answer in answers):
                unknown += count
                continue
            planned, emulated = (answer.entry for answer in answers)
            found = effect(planned, emulated)
            if found is None:
                continue
            differences.append(
                BatchDifference(
                    role=role,
                    kind=batch.kind,
                    query_len=batch.query_len,
                    first=size,
                    last=last,
                    min_reqs=min_reqs,
                    max_reqs=batch.num_reqs,
                    min_loras=batch.active_loras,
                    max_loras=max_loras,
                    effect=found,
                    planned=planned,
                    emulated=emulated,
                    batches=count,
                )
            )
    named = attrgetter("role", "kind", "query_len", "min_loras", "effect", "planned", "emulated")

    def apart(before: BatchDifference, after: BatchDifference) -> bool:
        return before.last + 1 != after.first or named(before) != named(after)

    return Proof(
        same=tuple((ours & theirs).elements()),
        lacks=tuple((ours - theirs).elements()),
        adds=tuple((theirs - ours).elements()),
        batches=batches,
        differences=tuple(
            attrs.evolve(
                run[-1],
                first=run[0].first,
                min_reqs=min(each.min_reqs for each in run),
                batches=sum(each.batches for each in run),
            )
            for run in split_when(apart, differences)
        ),
        unrun=tuple(role for role in left.modes if role not in emulation.modes),
        assumptions=emulation.assumptions,
        unknown=unknown,
    )


def _plain(graph: CapturedGraph) -> CapturedGraph:
    entry = single(graph.entry)
    return graph if entry is graph.entry else attrs.evolve(graph, entry=entry)


def single(entry: Entry) -> Entry:
    """Return the entry as a plan has it: a chain of one draft decode is a single step."""
    return attrs.evolve(entry, draft_steps=None) if entry.draft_steps == 1 else entry


def effect(ours: Entry | None, theirs: Entry | None) -> Effect | None:
    """Say how the engine's graph for a batch differs from the plan's, or None where it does not."""
    # Eager on both sides is no difference.
    if ours is None or theirs is None:
        if ours is theirs:
            return None
        return Effect.CAPTURED if ours is None else Effect.EAGER
    if ours.mode is not theirs.mode:
        return Effect.WEAKER if ours.mode is GraphMode.FULL else Effect.STRONGER
    # More of any padded axis is a loss, even where another has less.
    shapes = [(e.num_tokens, e.num_reqs or 0, e.active_loras) for e in (ours, theirs)]
    if shapes[0] == shapes[1]:
        return None if single(ours) == single(theirs) else Effect.OTHER
    return Effect.PADDED if any(b > a for a, b in zip(*shapes, strict=True)) else Effect.TIGHTER


def _batches(role: Role, left: Emulation, emulation: Emulation) -> Iterator[tuple[Batch, int, int, int]]:
    """Yield every batch to compare, with the last extent, the most adapters and the fewest requests it represents."""
    entries = [graph.entry for graph in (*left.graphs, *emulation.graphs) if graph.role is role]
    # A full graph's room for requests ends with it.
    rooms = {entry.num_reqs or 0 for entry in entries if entry.query_len is None}
    requests = list(split_at(1, left.limits.max_num_reqs, rooms))
    # Beyond the largest graph both run eager, but an engine may not have been asked about each batch there.
    asked, largest = left.asked or emulation.asked, max((entry.num_tokens for entry in entries), default=0)
    mixed, upto = mixed_tokens(role, left), None if asked else largest
    for low, high in split_at(0, most_loras(role, left), {0, *(entry.active_loras for entry in entries)}):
        for family in left.families(role):
            for count, _ in family.requests.counts(low):
                yield Batch.decode(role, count, family.query_len, low), count, min(high, count), count
        for fewest, most in requests:
            fewest = max(fewest, low)
            for tokens, last in mixed.counts(fewest, upto) if fewest <= most else ():
                yield Batch.mixed(role, min(most, tokens), tokens, low), last, high, fewest


RATIOS = tuple(Fraction(part, 8) for part in (*range(9, 17), *range(18, 33, 2), 40, 48, 64, 96, 128, 256, 512))
"""Worst padded/real ratios that are tried, the least first."""


def within_budget(export: Export, plan: Plan, emulate: Emulator) -> Export:
    """Return a proved export with at most the graphs that the plan's budget allows, and what that costs.

    An engine captures each size for every role, query length and adapter case, and so may capture more graphs than the
    plan has. Where no list of sizes has few enough, or the engine's exporter knows no coarser ones, that is a loss too.
    """
    bound = plan.allowed_graphs()
    captured = 0 if export.proof is None else export.proof.captured
    # Nothing to do for a plan without a budget, or within it.
    if bound is None or captured <= bound[0]:
        return export
    allowed, limit = bound
    says = f"with these sizes {export.engine} captures {counted(captured, 'graph')}, and {limit} allows {allowed}"
    coarser = export.coarser
    if coarser is None:
        return _lost(export, plan, f"{says}; give fewer sizes")

    @cache
    def thinned(ratio: Fraction) -> tuple[Export, int]:
        other = coarser(ratio)
        # What the first proof left out stays out.
        settings = {name: value for name, value in other.settings.items() if name in export.settings}
        if export.drafter_backend is None and other.drafter_backend is not None:
            flag, key = other.drafter_backend
            settings |= {flag: {name: value for name, value in settings.get(flag, {}).items() if name != key}}
        other = attrs.evolve(other, settings=settings)
        return other, len(emulated(other, plan.environment, emulate).graphs)

    # Coarser sizes never make more graphs, so the first ratio that fits is found by halving.
    least = bisect_left(RATIOS, True, key=lambda ratio: thinned(ratio)[1] <= allowed)
    ratio = RATIOS[min(least, len(RATIOS) - 1)]
    other, graphs = thinned(ratio)
    sizes = f"{len(other.sizes)} sizes instead of {len(export.sizes)}"
    says = (
        f"{limit} allows {counted(allowed, 'graph')}, and {export.engine} would capture {captured} with the sizes of "
        f"the plan; {sizes} make {graphs}, and pad decodes by up to {float(ratio - 1):.0%}"
        if graphs <= allowed
        else f"{limit} allows {counted(allowed, 'graph')}, and {export.engine} captures {graphs} even with {sizes}"
    )
    return _lost(prove(other, plan, emulate), plan, says)


def _lost(export: Export, plan: Plan, says: str) -> Export:
    scope = all_scopes(plan)
    cost = None if export.proof is None else export.proof.cost(scope)
    return attrs.evolve(export, losses=(Loss("budget", says, scope, cost), *export.losses))
