"""What a finding has to do with: the row behind a wrong token, the garbage that it needs, the padding."""

from __future__ import annotations

import attrs

from capture_planner.conformance.failure import Check, Failure
from capture_planner.conformance.features import FEATURES
from capture_planner.conformance.machine import play
from capture_planner.conformance.scene import Case, RunBatch, loads
from capture_planner.conformance.served_rows import check_served_rows
from capture_planner.conformance.stage import Stage
from capture_planner.conformance.subject import Subject
from capture_planner.records._base import replace

EXACT = "it passes at exact sizes and fails padded"


def with_causes(subject: Subject, failure: Failure) -> Failure:
    """Return the failure with its causes: one source of garbage at a time is spared, to see if it is gone.

    If one of them is a field, the failure names it with its axis. A wrong token becomes the wrong row behind it, if
    there is one. A failure that does not come at every run has no causes: its absence proves nothing.
    """
    if not failure.case or failure.failed is not None:
        return failure
    case = loads(failure.case)
    try:
        with Stage(subject, case.scene) as stage:
            buffers = [buffer for role in stage.runner.parts.roles.values() for buffer in role.fields]
            axes = {buffer.key: buffer.field.axis.value for buffer in buffers}
            sources = stage.watch.sources()
    except Exception:  # A scene that cannot be set up has no garbage.
        return failure
    if failure.check is Check.TOKENS:
        row = play(subject, case, after=check_served_rows).failure
        failure = failure if row is None or row.entry is None else row
    causes = tuple(source for source in sources if play(subject, case, spared=(source,)).failure is None)
    field, axis = failure.field, failure.axis
    if not field:
        field = next((source for source in causes if source in axes), "")
        axis = axes.get(field, axis)
    notes = (EXACT,) if failure.entry is not None and _passes_exact(subject, case) else ()
    return attrs.evolve(failure, causes=causes, field=field, axis=axis, notes=(*failure.notes, *notes))


def _passes_exact(subject: Subject, case: Case) -> bool:
    """Say whether a case passes where each of its batches has a graph of exactly its size."""
    batches = [step.rows for step in case.steps if isinstance(step, RunBatch)]
    if not batches or not case.scene.size_tokens:
        return False
    tokens = {sum(count for _, count, _ in rows) for rows in batches}
    reqs = {len(rows) for rows in batches}
    scene = case.scene
    exact = replace(
        scene,
        size_tokens=tuple(sorted({*tokens, scene.num_tokens})),
        size_reqs=tuple(sorted({*reqs, scene.num_reqs})),
        **{name: FEATURES[name][0] for name in ("ranks", "beyond")},
    )
    played = play(subject, replace(case, scene=exact))
    graphs = sum(count for name, count in played.log.forwards.items() if not name.endswith("NONE"))
    return played.failure is None and graphs > 0 and not played.log.padded and not played.skipped
