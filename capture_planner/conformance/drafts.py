"""What the forwards of a drafter must have done: its prefill, and its decodes one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from capture_planner.conformance.closeness import check_stored, compare_rows, is_likeliest, of_rows
from capture_planner.conformance.finding import Check
from capture_planner.conformance.probe import ProbeDrafter
from capture_planner.conformance.rows import Rows
from capture_planner.conformance.world import Live
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.runtime.execution.inputs import StepInputs

if TYPE_CHECKING:
    from capture_planner.conformance.stage import Stage


def _drafting(stage: Stage) -> ProbeDrafter:
    assert stage.drafter is not None, "asked where there is a drafter"
    return stage.drafter


def check_drafts(stage: Stage, batch: Rows, target: StepInputs, k: int) -> None:
    """Run the draft prefill and the draft decodes of a batch, eager and from graphs, and check each."""
    parts, drafter = stage.runner.parts, _drafting(stage)
    state = parts.state
    assert state is not None, "a drafter has a state"
    made = batch.draft_prefill(target)
    given = parts.target.hidden[: len(batch.ids)].clone()
    places = stage.on(target.idx_mapping).long()
    ends = [start + batch.settled(*row) for start, row in zip(batch.starts[:-1], batch.rows, strict=True)]
    last = torch.tensor(ends, device=places.device) - 1

    def forward(eager: bool) -> None:
        entry = stage.run(Role.DRAFT_PREFILL, batch.batch(Role.DRAFT_PREFILL), made, eager=eager)
        hidden = parts.roles[Role.DRAFT_PREFILL].body.hidden  # type: ignore[attr-defined]
        expected: list[torch.Tensor] = []
        for index, live, where, ids in batch.each(shift=1):
            attention = drafter.tables.attended(stage.on(ids), live.computed).flatten(1)
            want = drafter.mixed(attention, given[where].double())
            compare_rows(
                stage, batch, Role.DRAFT_PREFILL, entry, index, hidden[where], want, eager=eager, what="state"
            )
            expected.append(want)
        every = torch.cat(expected)
        _check_state(stage, batch, Role.DRAFT_PREFILL, entry, state.hidden[places], every[last], eager=eager)
        tokens = state.proposed[places, 0]
        if not is_likeliest(stage, tokens, every[last], drafter.head) or not torch.equal(
            state.token[places], tokens
        ):
            stage.refuse(Check.STATE, "the first draft", batch, Role.DRAFT_PREFILL, entry)
        check_stored(stage, batch, 1, entry, Role.DRAFT_PREFILL)

    stage.both_ways(forward)
    if k > 1:
        _chain(stage, batch, k, places)


def _chain(stage: Stage, batch: Rows, k: int, places: torch.Tensor) -> None:
    """Run the draft decodes, eager and from graphs, from the same beginning."""
    state, drafter = stage.runner.parts.state, _drafting(stage)
    assert state is not None, "a drafter has a state"
    before = {name: getattr(state, name).clone() for name in ("token", "hidden", "proposed", "column")}
    made = batch.draft_decode()

    def forward(eager: bool) -> None:
        for name, tensor in before.items():
            getattr(state, name).copy_(tensor)
        ends = [row[0].computed + batch.settled(*row) for row in batch.rows]
        for (live, _, _), end in zip(batch.rows, ends, strict=True):
            _settle_draft(stage, live, end)
        entry = stage.run(Role.DRAFT_DECODE, batch.batch(Role.DRAFT_DECODE), made, eager=eager, steps=k - 1)
        hidden = before["hidden"][places].double()
        proposed = state.proposed[places, :k]
        for number in range(1, k):
            within = [row for row, end in enumerate(ends) if end + number <= stage.scene.shape.longest]
            for row in within:
                settled = batch.rows[row][0].tokens[1 : ends[row] + 1].tolist()
                ids = torch.tensor([*settled, *proposed[row, :number].tolist()], device=hidden.device)
                attention = drafter.tables.attended(ids, len(ids) - 1).flatten(1)
                hidden[row] = drafter.mixed(attention, hidden[row : row + 1])[0]
            if within and not is_likeliest(stage, proposed[within, number], hidden[within], drafter.head):
                stage.refuse(
                    of_rows(entry, eager=eager),
                    f"draft {number + 1} is not the likeliest token of its row",
                    batch,
                    Role.DRAFT_DECODE,
                    entry,
                )
        if len(within) == len(batch.rows):
            _check_state(stage, batch, Role.DRAFT_DECODE, entry, state.hidden[places], hidden, eager=eager)

    stage.both_ways(forward)


def _settle_draft(stage: Stage, live: Live, upto: int) -> None:
    """Write the drafter's cache up to a position, so that both runs of a chain begin alike."""
    computed, live.computed = live.computed, min(upto, stage.scene.shape.longest)
    stage.world.compute(live)
    live.computed = computed


def _check_state(
    stage: Stage,
    batch: Rows,
    role: Role,
    entry: Entry | None,
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    eager: bool,
) -> None:
    off = (got.double() - want).norm(dim=1)
    wrong = ~(off <= 2 * stage.tolerance * (want.norm(dim=1) + 0.1))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        stage.refuse(
            of_rows(entry, eager=eager),
            f"the state that request {row} of the batch drafts on from is off by "
            f"{float(off[row] / want[row].norm()):.2g} of its norm",
            batch,
            role,
            entry,
        )
