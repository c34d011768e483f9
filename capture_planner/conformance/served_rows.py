"""Rows of forwards that the scheduler started: a wrong token has a cause, and it may be a wrong row."""

from __future__ import annotations

from capture_planner.conformance.forward_checks import first_wrong_row, row_check
from capture_planner.conformance.stage import Stage
from capture_planner.modes import Role
from capture_planner.runtime.execution.inputs import ForwardStep
from capture_planner.runtime.execution.role import RoleRun


def check_served_rows(stage: Stage, role: RoleRun, step: ForwardStep) -> None:
    """Check the rows of a target's forward while requests are served; rows of tokens not yet known are left out."""
    serving = stage.watch.serving()
    if serving is None or role.role is not Role.TARGET:
        return
    inputs, width = step.inputs, stage.target.tables.shape.width
    places, starts = inputs.idx_mapping.tolist(), inputs.query_start_loc.tolist()
    unread = serving.scheduler.states.is_unread(inputs.idx_mapping)
    for row, place in enumerate(places):
        start, end = starts[row : row + 2]
        if start == end or unread[row]:
            continue
        first = int(inputs.positions[start])
        ids = serving.scheduler.states.tokens[place, : first + end - start]
        if (ids < 0).any():
            continue
        want = stage.target.tables.attended(stage.on_device(ids).long(), first).flatten(1)
        wrong = first_wrong_row(stage.runner.parts.target.hidden[start:end], want, width, stage.tolerance)
        if wrong is not None:
            message = f"attention of {wrong} of request {row} in a batch that is served"
            raise row_check(step.entry, eager=False).violation(message)
