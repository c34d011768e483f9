"""What a forward of the target must have done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture_planner.conformance.closeness import check_stored, compare_rows, is_likeliest
from capture_planner.conformance.finding import Check
from capture_planner.conformance.rows import Rows
from capture_planner.modes import Role
from capture_planner.records.batch import Entry

if TYPE_CHECKING:
    from capture_planner.conformance.stage import Stage


def check_target(stage: Stage, batch: Rows, entry: Entry | None, *, eager: bool) -> None:
    """Check hidden states, tokens and slots of the forward that was just run."""
    body = stage.runner.parts.target
    for index, live, where, ids in batch.each():
        if where.stop > where.start:
            want = stage.target.tables.attended(stage.on(ids), live.computed).flatten(1)
            compare_rows(stage, batch, Role.TARGET, entry, index, body.hidden[where], want, eager=eager)
            holds_head = entry is not None and entry.query_len is not None
            if holds_head and not is_likeliest(stage, body.tokens[where], want, stage.target.head):
                stage.refuse(Check.ROWS, "a token is not the likeliest of its row", batch, Role.TARGET, entry)
    check_stored(stage, batch, 0, entry, Role.TARGET)
