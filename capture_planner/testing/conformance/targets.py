"""What a forward of the target must have done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from capture_planner.entry import Entry
from capture_planner.modes import Role
from capture_planner.testing.conformance.closeness import check_stored, compare_rows, is_likeliest
from capture_planner.testing.conformance.finding import Check
from capture_planner.testing.conformance.rows import Rows

if TYPE_CHECKING:
    from capture_planner.testing.conformance.stage import Stage


def check_target(stage: Stage, batch: Rows, *, eager: bool) -> None:
    body = stage.runner.parts.target
    entry = stage.entry(Role.TARGET, batch, eager=eager)
    for index, live, where, ids in batch.each():
        if where.stop > where.start:
            want = stage.target.tables.attended(stage.on(ids), live.computed).flatten(1)
            compare_rows(stage, batch, Role.TARGET, entry, index, body.hidden[where], want, eager=eager)
            if entry is not None and entry.query_len is not None:
                _check_likeliest(stage, batch, entry, body.tokens[where], want, stage.target.head)
    check_stored(stage, batch, 0, entry, Role.TARGET)
    if entry is not None:
        _check_written(stage, batch, entry)


def _check_written(stage: Stage, batch: Rows, entry: Entry) -> None:
    """Hold every row of a graph's output to be written, and its padding too."""
    hidden = stage.runner.parts.target.hidden[: entry.num_tokens]
    unwritten = _poisoned(hidden).any(1)
    if bool(unwritten.any()):
        # Arithmetic on the NaN of a null page may end in such a NaN too: once more, with clean pages.
        with stage.world.clean_pages():
            made = batch.made_by_role[Role.TARGET]
            stage.run(Role.TARGET, batch.batch(Role.TARGET), made, eager=False)
        unwritten &= _poisoned(hidden).any(1)
    if bool(unwritten.any()):
        says = f"row {int(unwritten.nonzero()[0])} of {len(hidden)} holds what was in its memory before"
        stage.refuse(Check.WRITTEN, says, batch, Role.TARGET, entry)


def _check_likeliest(
    stage: Stage,
    batch: Rows,
    entry: Entry | None,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    head: torch.Tensor,
) -> None:
    if not is_likeliest(stage, tokens, hidden, head):
        stage.refuse(Check.ROWS, "a token is not the likeliest of its row", batch, Role.TARGET, entry)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Say where every bit is set, as a poisoned pool has them: a NaN that no kernel makes."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.itemsize]) == -1
