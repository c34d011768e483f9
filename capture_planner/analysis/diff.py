"""What changes on the machine when one plan replaces another, and which batches run otherwise.

For the batches both plans are walked in cells of batches with one answer (``coverage``). Where two cells overlap, all
batches of the overlap have one answer before and one after.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from capture_planner.analysis.coverage import Cell, coverage
from capture_planner.codec import format_bytes, label, to_data
from capture_planner.codec.rows import ENTRIES
from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import grouped, key_of
from capture_planner.records.backend import Support
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.batch_space import query_len_of, union
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import SPEC_FIELDS, Forecast, GroupPlan, Plan, RolePlan
from capture_planner.records.text import counted, query_len_text, rounded_bytes, spans


@attrs.frozen
class FieldChange:
    """A field of the spec or of the machine that differs, with both values as files write them."""

    path: tuple[str, ...]
    """Keys from the top of a plan: ``limits``, ``max_num_reqs``."""
    before: str
    after: str


@attrs.frozen
class Change:
    """One difference, as data and in words. ``role`` is None for the whole plan."""

    role: Role | None
    subject: str
    """role, mode, backend, added, gone, lazy, batches, waiver, decision, environment, forecast, fingerprint, or a field
    of a plan."""
    message: str
    entries: tuple[Entry, ...] = ()
    fields: tuple[FieldChange, ...] = ()
    """Fields of the spec or the machine that differ; empty for a consequence of one."""


def diff(old: Plan, new: Plan) -> tuple[Change, ...]:
    """Return the differences from ``old`` to ``new``, the whole plan first, then role by role."""
    before, after = (dict(plan.fingerprinted()) for plan in (old, new))
    # Graphs that are made of something else, where both plans have fingerprints.
    fingerprints = (
        Change(role, "fingerprint", f"{role} {entry}: {text}", entries=(entry,))
        for (role, entry), text in changed(before, after)
    )
    changes = (*_whole(old, new), *_roles(old, new), *fingerprints)
    if changes or old == new:
        return changes
    # Plans may differ in a field that no sentence is about, and must not pass for equal.
    return (Change(None, "plan", f"the plans differ in {_differing(old, new)} and nothing else"),)


def _whole(old: Plan, new: Plan) -> Iterator[Change]:
    for name in (*SPEC_FIELDS, "environment"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            fields = tuple(_field_changes(name, before, after))
            yield Change(None, name, f"{name}: {differing_fields(before, after)}", fields=fields)
    yield from _measurements(old.forecast, new.forecast)


def _measurements(old: Forecast | None, new: Forecast | None) -> Iterator[Change]:
    if old is None or new is None:
        if old is not new:
            yield Change(None, "forecast", f"sizes {'no longer ' if new is None else ''}go by measurements")
        return
    others = [name for name in ("traffic", "profile") if getattr(old, name) != getattr(new, name)]
    if others:
        times = f"the mean step is expected to take {new.mean_step_ms:.4g} ms, and took {old.mean_step_ms:.4g} ms"
        yield Change(None, "forecast", f"sizes go by another {' and another '.join(others)}; {times}")


def differing_fields(before: object, after: object) -> str:
    """Describe what differs between two records, field by field, with sizes as files have them."""
    differing = _field_changes("", before, after)
    return ", ".join(f"{'.'.join(each.path[1:])} {each.before} became {each.after}".strip() for each in differing)


def _field_changes(name: str, before: object, after: object) -> Iterator[FieldChange]:
    """Yield what differs between two records, field by field; their paths begin with a name."""
    if before is None or after is None:
        yield FieldChange((name,), "off" if before is None else "on", "off" if after is None else "on")
        return
    # Files leave out defaults, which the record has; where both have a leaf, it is shown as in files.
    left, right = (dict((*_leaves(value), *_leaves(to_data(value)))) for value in (before, after))
    for leaf in {**left, **right}:
        if left.get(leaf) != right.get(leaf):
            path = (name, *leaf.split(".")) if leaf else (name,)
            yield FieldChange(path, _shown(left.get(leaf)), _shown(right.get(leaf)))


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf of a record, or of its plain data, with its dotted name."""
    kind: Any = type(value)
    if attrs.has(kind):
        items = {f.name: getattr(value, f.name) for f in attrs.fields(kind) if f.init}
    elif isinstance(value, Mapping):
        items = dict(value)
    else:
        yield name, value
        return
    for key, item in items.items():
        yield from _leaves(item, f"{name}.{key}" if name else key)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return label(value)
    return str(list(value)) if isinstance(value, tuple) else str(value)


_DISPATCHED = ("limits", "speculative", "lora", "parallel")
"""Fields of a plan that decide, with its entries and waivers, which batches there are and what serves them."""


def _batches(old: Plan, new: Plan) -> Iterable[BatchChange]:
    """Return the batches that run otherwise."""
    before, after = (
        [getattr(plan, name) for name in _DISPATCHED] + [(role.role, role.entries, role.waivers) for role in plan.roles]
        for plan in (old, new)
    )
    # A walk over both plans takes long, and finds nothing where these are equal.
    return () if before == after else rerouted(old, new)


def _roles(old: Plan, new: Plan) -> Iterator[Change]:
    batches = grouped(_batches(old, new), lambda each: each.role)
    before = {role.role: role for role in old.roles}
    after = {role.role: role for role in new.roles}
    for role in Role:
        if role in before and role not in after:
            yield Change(role, "role", f"{role} is gone, with {graphs_text(before[role].entries)}")
        elif role in after and role not in before:
            yield Change(role, "role", f"{role} is new, with {graphs_text(after[role].entries)}")
        elif role in before:
            old_role, new_role = before[role], after[role]
            found = [*_modes(old_role, new_role), *_groups(old_role, new_role), *_entries(old_role, new_role)]
            found += (Change(role, "batches", each.message) for each in batches.get(role, ()))
            found += _waivers(old_role, new_role)
            yield from found
            # Decisions can differ and lead to the same graphs.
            if not found and old_role != new_role:
                message = f"{role}: the same graphs, but different {_differing(old_role, new_role)}"
                yield Change(role, "decision", message)


def _differing(old: Any, new: Any) -> str:
    return " and ".join(key_of(f) for f in attrs.fields(type(old)) if getattr(old, f.name) != getattr(new, f.name))


def _modes(old: RolePlan, new: RolePlan) -> Iterator[Change]:
    role = new.role
    for name, before, after in (("requested mode", old.requested, new.requested), ("mode", old.mode, new.mode)):
        if before is not after:
            yield Change(role, "mode", f"{role}: {name} {before.value} became {after.value}")
    if old.inputs != new.inputs:
        yield Change(role, "inputs", f"{role}: the fields that the runner pads changed")


def _entries(old: RolePlan, new: RolePlan) -> Iterator[Change]:
    before, after = Counter(old.entries), Counter(new.entries)
    lazy, was_lazy = Counter(new.lazy), Counter(old.lazy)
    changes = (
        ("added", "also captures", after - before),
        ("gone", "no longer captures", before - after),
        ("lazy", "leaves to their first use", lazy - was_lazy),
        # A graph that is gone is not captured at start either.
        ("lazy", "captures at start", (was_lazy - lazy) & after),
    )
    for subject, word, entries in changes:
        if entries:
            ordered = tuple(sorted(entries.elements(), key=lambda e: e.capture_order))
            yield Change(new.role, subject, f"{new.role} {word} {graphs_text(ordered)}", entries=ordered)


def _waivers(old: RolePlan, new: RolePlan) -> Iterator[Change]:
    waived, waives = ({waiver.message for waiver in role.waivers} for role in (old, new))
    for waiver in new.waivers:
        if waiver not in old.waivers:
            # The same sentence with another range is no new waiver.
            word = "waives differently" if waiver.message in waived else "newly waives"
            yield Change(new.role, "waiver", f"{new.role} {word}: {waiver.message}")
    for waiver in old.waivers:
        if waiver.message not in waives:
            yield Change(new.role, "waiver", f"{new.role} no longer waives: {waiver.message}")


def _groups(old: RolePlan, new: RolePlan) -> Iterator[Change]:
    before = {group.name: group for group in old.groups}
    after = {group.name: group for group in new.groups}
    for name in {**before, **after}:
        left, right = before.get(name), after.get(name)
        if left == right:
            continue
        if left is None or right is None:
            message = f"the attention group {name} is {'new' if left is None else 'gone'}"
        else:
            words = "; ".join(_group(left, right)) or f"different {_differing(left, right)}"
            message = f"group {name}: {words}"
        yield Change(new.role, "backend", f"{new.role}: {message}")


def _group(old: GroupPlan, new: GroupPlan) -> Iterator[str]:
    for name in ("layers", "backend", "distribution", "version"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name} {getattr(old, name)} became {getattr(new, name)}"
    if old.support.level is not new.support.level:
        yield f"support {old.support.level.name} became {new.support.level.name}"
    elif old.support != new.support:
        was, now = _caps(old.support), _caps(new.support)
        caps = "" if was == now else f", caps {was} became {now}"
        yield f"support {new.support.level.name} now because: {new.support.reason.rstrip('.')}{caps}"
    for name in ("device", "pinned"):
        before, after = getattr(old.workspace, name), getattr(new.workspace, name)
        if before != after:
            texts = [rounded_bytes(size) for size in (before, after)]
            # Sizes that differ may be equal once they are rounded.
            old_size, new_size = texts if texts[0] != texts[1] else map(format_bytes, (before, after))
            yield f"{name} workspace {old_size} became {new_size}"
    pads, padded = ({field.name: field for field in group.padding.fields} for group in (new, old))
    for word, names in (
        ("also pads", pads.keys() - padded.keys()),
        ("no longer pads", padded.keys() - pads.keys()),
        ("pads differently", {name for name in pads.keys() & padded.keys() if pads[name] != padded[name]}),
    ):
        if names:
            yield f"{word} {', '.join(sorted(names))}"


def _caps(support: Support) -> str:
    caps = {"graphs": support.max_graphs, "requests": support.max_num_reqs}
    return ", ".join(f"{most} {name}" for name, most in caps.items() if most is not None) or "none"


MAX_KERNELS = 4
"""Kernels that a sentence names."""

Key = TypeVar("Key")


def changed(old: Mapping[Key, Fingerprint], new: Mapping[Key, Fingerprint]) -> Iterator[tuple[Key, str]]:
    """Yield each graph of both runs whose fingerprint differs, with what differs in it."""
    for key, before in old.items():
        after = new.get(key)
        if after is not None and after != before:
            yield key, change_of(before, after)


def change_of(old: Fingerprint, new: Fingerprint) -> str:
    """Describe how one graph differs from another: kernels that came and went, nodes, or only their launch."""
    gone, added = Counter(old.kernels) - Counter(new.kernels), Counter(new.kernels) - Counter(old.kernels)
    parts = []
    if gone and added:
        parts.append(f"{_named(gone)} replaced by {_named(added)}")
    elif gone or added:
        parts.append(f"without {_named(gone)}" if gone else f"also {_named(added)}")
    if old.nodes != new.nodes:
        parts.append(f"{counted(old.nodes, 'node')} became {new.nodes:,}")
    return "; ".join(parts) or "the same kernels with other launch dimensions, arguments' shapes or order"


def _named(kernels: Counter[str]) -> str:
    listed = [f"{name} ({count}x)" for name, count in sorted(kernels.items())]
    rest = [f"{len(listed) - MAX_KERNELS} more"] if len(listed) > MAX_KERNELS else []
    return ", ".join([*listed[:MAX_KERNELS], *rest])


def graphs_text(entries: tuple[Entry, ...]) -> str:
    """Describe entries: ``3 graphs: FULL decodes of 4 at 16, 8, 1 requests``."""
    if not entries:
        return "no graphs"
    parts = []
    for row in ENTRIES.pack(entries):
        sizes = row.num_reqs if row.decodes and row.num_reqs else row.num_tokens or ()
        shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
        kind = f"{row.mode.value} decodes of {row.decodes}" if row.decodes else f"{row.mode.value} mixed"
        unit = "requests" if row.decodes else "tokens"
        kind += f", chain of {row.draft_steps}," if row.draft_steps else ""
        loras = f" with {' or '.join(map(str, row.active_loras))} LoRA" if row.active_loras != (0,) else ""
        parts.append(f"{kind} at {shown} {unit}{loras}")
    return f"{len(entries)} graph{'s' if len(entries) > 1 else ''}: {'; '.join(parts)}"


# Batches that run otherwise ----------------------------------------------------------------------


Span = tuple[int, int]


@attrs.frozen(kw_only=True)
class _Overlap:
    """Batches of one kind with one answer before and one after; None: not admitted."""

    span: Span
    """Requests of decodes, tokens of mixed batches."""
    loras: Span
    before: Dispatch | None
    after: Dispatch | None
    width: int
    by_loras: bool = False
    """True where one plan admits them for its number of adapters alone."""

    @property
    def change(self) -> tuple[object, ...] | None:
        """What the message of a change has in common for all its batches; None where nothing changes."""
        old, new = (None if each is None else (each.mode, each.reason) for each in (self.before, self.after))
        if old != new:
            return old, new, self.by_loras
        before, after = _tokens(self.before), _tokens(self.after)
        return None if before == after else (old, new, after > before)

    def worst(self, answer: Dispatch | None) -> float:
        """Return the most padding of a batch, as a share of its own tokens; -1 without a graph."""
        return _tokens(answer) / (self.span[0] * self.width) - 1


def _tokens(answer: Dispatch | None) -> int:
    return 0 if answer is None or answer.entry is None else answer.entry.num_tokens


@attrs.frozen(kw_only=True)
class BatchChange:
    """Batches of one role that all run otherwise in one way, in words."""

    role: Role
    kind: Kind
    query_len: int | None
    ranges: tuple[Span, ...]
    """Requests of decodes, tokens of mixed batches: ascending."""
    message: str


def rerouted(old: Plan, new: Plan) -> Iterator[BatchChange]:
    """Yield the batches that run otherwise under ``new``, of the roles that both plans have.

    Mixed batches are told apart by their tokens: those that only have more requests than before are not new.
    """
    vary = frozenset(_varying(old)) & frozenset(_varying(new))
    before, after = (grouped(_compared(plan, vary), lambda cell: _key(cell, vary)) for plan in (old, new))
    keys = {**before, **after}
    for key in sorted(keys, key=lambda each: (list(Role).index(each[0]), each[1].value, each[2] or 0, each[3])):
        role, kind, query_len, varies = key
        # A role that comes or goes is a change by itself (``_roles``).
        if role in old.planned and role in new.planned:
            length = query_len_text(query_len, varies=varies)
            overlaps = _overlaps(before.get(key, []), after.get(key, []), query_len or 1)
            changes = grouped((each for each in overlaps if each.change is not None), lambda each: each.change)
            for alike in changes.values():
                ranges = union(each.span for each in alike)
                message = f"{role}: {_batches_text(alike, kind, length, ranges)}: {_change(alike, before.get(key, []))}"
                yield BatchChange(role=role, kind=kind, query_len=query_len, ranges=tuple(ranges), message=message)


def _varying(plan: Plan) -> tuple[Role, ...]:
    return () if plan.speculative is None else plan.speculative.varying_decodes


def _compared(plan: Plan, vary: Collection[Role]) -> Iterator[Cell]:
    """Yield the cells of a plan; for decodes that vary in this plan alone, only those with the most tokens."""
    alone = frozenset(_varying(plan)) - frozenset(vary)
    for cell in coverage(plan).cells:
        of_all = cell.role not in alone or cell.kind is Kind.MIXED
        if of_all or cell.query_len == query_len_of(cell.role, plan, cell.first):
            yield cell


def _key(cell: Cell, vary: Collection[Role]) -> tuple[Role, Kind, int | None, bool]:
    """Return what cells that are compared have in common; ``vary``: roles whose decodes vary in both plans."""
    return cell.role, cell.kind, cell.query_len, cell.varies and cell.role in vary


def _overlaps(old: Sequence[Cell], new: Sequence[Cell], width: int) -> Iterator[_Overlap]:
    """Yield the overlaps of cells, and what only one of the plans admits."""
    ordered = sorted(new, key=lambda cell: (cell.first, cell.last))
    lasts = [cell.last for cell in ordered]
    for mine in old:
        for theirs in ordered[bisect_left(lasts, mine.first) :]:
            # Cells ascend, so all that follow begin even later.
            if theirs.first > mine.last:
                break
            loras = max(mine.min_loras, theirs.min_loras), min(mine.max_loras, theirs.max_loras)
            # A batch has as many tokens as requests, at least, and as many requests as adapters.
            least = max(mine.first, theirs.first, mine.min_reqs, theirs.min_reqs, loras[0])
            span = least, min(mine.last, theirs.last)
            by_requests = mine.min_reqs <= theirs.max_reqs and theirs.min_reqs <= mine.max_reqs
            if span[0] <= span[1] and loras[0] <= loras[1] and by_requests:
                yield _Overlap(span=span, loras=loras, before=mine.answer, after=theirs.answer, width=width)
    for cells, others, is_new in ((old, new, False), (new, old, True)):
        admitted = union((cell.first, cell.last) for cell in others)
        # A plan that admits fewer adapters rejects batches whose size both admit.
        most = max(map(_most_loras, others), default=0)
        for cell in cells:
            before, after = (None, cell.answer) if is_new else (cell.answer, None)
            pieces = _outside((cell.first, cell.last), admitted)
            for span in pieces:
                loras = cell.min_loras, cell.max_loras
                yield _Overlap(span=span, loras=loras, before=before, after=after, width=width)
            for first, last in _outside((cell.first, cell.last), pieces) if _most_loras(cell) > most else ():
                loras = max(cell.min_loras, most + 1), _most_loras(cell)
                span = max(first, loras[0]), last
                if span[0] <= last:
                    yield _Overlap(span=span, loras=loras, before=before, after=after, width=width, by_loras=True)


def _most_loras(cell: Cell) -> int:
    """Return the most adapters of a batch, which has as many requests at least."""
    return min(cell.max_loras, cell.max_reqs)


def _outside(span: Span, admitted: Sequence[Span]) -> list[Span]:
    """Return the parts of a range that no admitted range has."""
    parts, (first, last) = [], span
    for low, high in admitted:
        if high >= first and low <= last:
            parts.append((first, low - 1))
            first = high + 1
    return [(low, high) for low, high in (*parts, (first, last)) if low <= high]


def _batches_text(alike: Sequence[_Overlap], kind: Kind, length: str, ranges: Sequence[Span]) -> str:
    least, most = min(each.loras[0] for each in alike), max(each.loras[1] for each in alike)
    if kind is Kind.MIXED:
        text = f"mixed batches of {spans(ranges, 'token')}"
    else:
        text = f"decodes of {spans(ranges, 'request')}" + (f", query length {length}" if length != "1" else "")
    return text + (f", {spans([(least, most)], 'active adapter')}" if least else "")


def _change(alike: Sequence[_Overlap], before: Sequence[Cell]) -> str:
    """Say what changes for batches that all change in one way; ``before``: the cells of their kind until now."""
    one, start = alike[0], min(each.span[0] for each in alike)
    old, new = (_mode(each) for each in (one.before, one.after))
    was, now = _padding(each.worst(each.before) for each in alike), _padding(each.worst(each.after) for each in alike)
    if one.after is None:
        return f"no longer admitted; they ran {old} {was}".rstrip()
    if one.before is None:
        smaller = [cell for cell in before if cell.last < start and cell.min_loras <= one.loras[0]]
        largest = max(smaller, key=lambda cell: cell.last, default=None)
        # New batches that run as the largest did until now need no comparison.
        other = largest is not None and not one.by_loras and _mode(largest.answer) != new
        ran = f"; {largest.last}, the most until now, run {_mode(largest.answer)}" if largest and other else ""
        return f"new, run {new} {now}".rstrip() + ran
    if old == new:
        return f"still {new}, {now} instead of {was.removeprefix('padded by up to ') if 'up' in now else was}"
    return f"{old} {was}".rstrip() + f" became {new} {now}".rstrip()


def _mode(answer: Dispatch | None) -> str:
    if answer is None:
        return ""
    return f"eager ({answer.reason})" if answer.mode is GraphMode.NONE else answer.mode.value


def _padding(worst: Iterable[float]) -> str:
    """Write the most padding, as a share of the batch's own tokens; nothing where no graph pads."""
    most = max(worst)
    return "" if most < 0 else f"padded by up to {most:.0%}" if most else "unpadded"
