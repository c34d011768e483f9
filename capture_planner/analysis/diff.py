"""What changes on the machine when one plan replaces another."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from capture_planner.analysis.rerouted import rerouted
from capture_planner.codec import format_bytes, label, to_data
from capture_planner.codec.rows import ENTRIES
from capture_planner.modes import Role
from capture_planner.records._base import grouped, key_of
from capture_planner.records.backend import Support
from capture_planner.records.batch import Entry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import SPEC_FIELDS, Forecast, GroupPlan, Plan, RolePlan
from capture_planner.records.text import counted, rounded_bytes


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
    changes = (*_whole(old, new), *_roles(old, new, _batches(old, new)), *_fingerprints(old, new))
    if changes or old == new:
        return changes
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


def _batches(old: Plan, new: Plan) -> Mapping[Role, Sequence[Change]]:
    """Return the batches of each role that run otherwise."""
    before, after = (
        [getattr(plan, name) for name in _DISPATCHED] + [(role.role, role.entries, role.waivers) for role in plan.roles]
        for plan in (old, new)
    )
    changes = () if before == after else rerouted(old, new)
    by_role = grouped(changes, lambda each: each.role)
    return {role: [Change(role, "batches", each.message) for each in alike] for role, alike in by_role.items()}


def _roles(old: Plan, new: Plan, batches: Mapping[Role, Sequence[Change]]) -> Iterator[Change]:
    before = {role.role: role for role in old.roles}
    after = {role.role: role for role in new.roles}
    for role in Role:
        if role in before and role not in after:
            yield Change(role, "role", f"{role} is gone, with {graphs_text(before[role].entries)}")
        elif role in after and role not in before:
            yield Change(role, "role", f"{role} is new, with {graphs_text(after[role].entries)}")
        elif role in before:
            yield from _role(before[role], after[role], batches.get(role, ()))


def _role(old: RolePlan, new: RolePlan, batches: Sequence[Change]) -> Iterator[Change]:
    changes = [*_modes(old, new), *_groups(old, new), *_entries(old, new), *batches, *_waivers(old, new)]
    if not changes and old != new:
        message = f"{new.role}: the same graphs, but different {_differing(old, new)}"
        changes.append(Change(new.role, "decision", message))
    yield from changes


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


def _fingerprints(old: Plan, new: Plan) -> Iterator[Change]:
    """Yield the graphs that are made of something else, where both plans have fingerprints."""
    before, after = (dict(plan.fingerprinted()) for plan in (old, new))
    for (role, entry), text in changed(before, after):
        yield Change(role, "fingerprint", f"{role} {entry}: {text}", entries=(entry,))


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
        loras = f" with {', '.join(map(str, row.active_loras))} LoRA" if row.active_loras != (0,) else ""
        parts.append(f"{kind} at {shown} {unit}{loras}")
    return f"{len(entries)} graph{'s' if len(entries) > 1 else ''}: {'; '.join(parts)}"
