"""Compare the forwards of a drafter with what its attention is defined as, however drafts are made."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from capture_planner.conformance.draft_rows import MASKED, DraftRowsOfRequest, sources_of
from capture_planner.conformance.draft_scheme import DraftScheme
from capture_planner.conformance.failure import Check, located
from capture_planner.conformance.forward_checks import (
    check_slots,
    coupled_rows,
    error_text,
    first_wrong_row,
    is_likeliest,
    row_check,
)
from capture_planner.conformance.probe import ProbeDrafter
from capture_planner.conformance.scene_batch import SceneBatch
from capture_planner.conformance.stage import Stage
from capture_planner.modes import Role
from capture_planner.runtime.execution.inputs import StepInputs
from capture_planner.runtime.execution.updates import DraftState


def check_drafts(stage: Stage, drafter: ProbeDrafter, batch: SceneBatch, target: StepInputs, k: int) -> None:
    """Run the draft prefill and the draft decodes of a batch, eager and from graphs, and check each."""
    made, described = batch.draft_prefill(target), batch.batch(Role.DRAFT_PREFILL)
    given = stage.runner.parts.target.hidden[: len(batch.ids)].double().clone()
    pass_ = FirstPass(stage, drafter, batch, given)

    def forward(eager: bool) -> None:
        entry = stage.run(described, made, eager=eager)
        with located(described, entry):
            pass_.check(row_check(entry, eager=eager))

    stage.both_ways(forward)
    if k > 1 and Role.DRAFT_DECODE in stage.runner.parts.roles:
        _check_decodes(stage, drafter, batch, k)


@attrs.frozen(eq=False)
class FirstPass:
    """A first draft pass that was run; ``given float64[T, hidden_size]`` are the target's states."""

    stage: Stage
    drafter: ProbeDrafter
    batch: SceneBatch
    given: torch.Tensor

    def check(self, rows_check: Check) -> None:
        """Check its states, its drafts, and its slots."""
        stage, batch, state = self.stage, self.batch, _state(self.stage)
        rows = batch.draft_rows
        hidden = stage.runner.parts.roles[Role.DRAFT_PREFILL].body.hidden  # type: ignore[attr-defined]
        places, starts = _places(stage, batch), np.cumsum([0, *(each.count for each in rows)])
        is_modules = stage.scene.drafter is DraftScheme.MODULES
        want = list(self._modules(state.proposed[places])) if is_modules else [self._states(rows)]
        for index, each in enumerate(rows):
            # Rows that follow the last one read tokens that modules have yet to draft.
            seen = slice(starts[index], starts[index] + each.last + 1) if is_modules else slice(*starts[index:][:2])
            wrong = first_wrong_row(hidden[seen], want[-1][seen], self.drafter.hidden_size, stage.tolerance)
            if wrong is not None:
                raise rows_check.violation(f"the state of {wrong} of request {index} in the batch")
        proposed = state.proposed[places]
        last = torch.tensor([start + each.last for start, each in zip(starts[:-1], rows, strict=True)])
        ends = torch.from_numpy(starts[1:]) - 1
        check_state(rows_check, state.hidden[places], want[-1][last], stage.tolerance)
        made = len(want) if is_modules else stage.scene.drafts if stage.scene.drafter.is_parallel else 1
        for number in range(made):
            states = want[number][last] if is_modules else want[0][torch.minimum(last + number, ends)]
            if not is_likeliest(proposed[:, number], states, self.drafter.head, stage.tolerance):
                raise Check.STATE.violation(f"draft {number + 1} is not the likeliest token of its row")
        if not torch.equal(state.token[places], proposed[:, made - 1 if is_modules else 0]):
            raise Check.STATE.violation("the last draft is not the token that a draft decode goes on from")
        if not is_modules:
            check_slots(stage, batch, Role.DRAFT_PREFILL)

    def _states(self, rows: tuple[DraftRowsOfRequest, ...]) -> torch.Tensor:
        """Return the states of a drafter that runs once, ``float64[T, hidden_size]``."""
        stage, drafter = self.stage, self.drafter
        attention = torch.cat([drafter.tables.rows(stage.on_device(each.ids), each.first) for each in rows])
        sources = stage.on_device(sources_of(rows, self.batch.starts))
        given = self.given[sources.clamp(min=0, max=len(self.given) - 1)]
        if (mask := drafter.mask_hidden) is not None:
            given = torch.where((sources == MASKED)[:, None], mask.double(), given)
        ids = np.concatenate([each.ids[each.first :] for each in rows])
        return coupled_rows(stage, drafter, drafter.mixed(attention, given), ids)

    def _modules(self, proposed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the states after each module, ``float64[T, hidden_size]``, of rows up to each request's last.

        A module reads its tokens one position later than the one before it, the last of them what that one drafted;
        of earlier steps its cache holds final tokens.
        """
        rows, hidden = self.batch.draft_rows, self.given.clone()
        fed = [each.ids[each.first : each.first + each.last + 1] for each in rows]
        for number in range(self.stage.scene.drafts):
            hidden = hidden.clone()
            for index, (each, ids) in enumerate(zip(rows, fed, strict=True)):
                before = each.live.tokens[1 + number : each.first + 1 + number]
                attention = self.drafter.tables.attended(
                    self.stage.on_device(np.concatenate([before, ids])), each.first
                )[:, number]
                seen = slice(int(self.batch.starts[index]), int(self.batch.starts[index]) + len(ids))
                hidden[seen] = self.drafter.mixed(attention, hidden[seen])
                fed[index] = np.append(ids[1:], proposed[index, number].item())
            yield hidden


def _check_decodes(stage: Stage, drafter: ProbeDrafter, batch: SceneBatch, k: int) -> None:
    """Run the draft decodes, eager and from graphs, from the same state."""
    state, places = _state(stage), _places(stage, batch)
    before = {name: getattr(state, name).clone() for name in ("token", "hidden", "proposed", "column")}
    made, described = batch.draft_decode(), batch.batch(Role.DRAFT_DECODE)
    shift, longest = int(stage.scene.drafter.reads_states), stage.scene.shape.longest
    settled = [row[0].computed + batch.settled(*row) for row in batch.rows]
    ends = [end + 1 - shift for end in settled]

    def forward(eager: bool) -> None:
        for name, tensor in before.items():
            getattr(state, name).copy_(tensor)
        for (live, _, _), end in zip(batch.rows, settled, strict=True):
            # Up to its end, so that both runs of a chain begin with the same cache.
            stage.world.compute(attrs.evolve(live, computed=min(end, longest)))
        entry = stage.run(described, made, eager=eager, steps=k - 1)
        with located(described, entry):
            check(row_check(entry, eager=eager))

    def check(rows_check: Check) -> None:
        hidden = before["hidden"][places].double()
        proposed = state.proposed[places, :k]
        for number in range(1, k):
            within = [row for row, end in enumerate(ends) if end + number <= longest]
            for row in within:
                known = batch.rows[row][0].tokens[shift : settled[row] + 1].tolist()
                ids = torch.tensor([*known, *proposed[row, :number].tolist()], device=hidden.device)
                attention = drafter.tables.rows(ids, len(ids) - 1)
                hidden[row] = drafter.mixed(attention, hidden[row : row + 1])[0]
            if within:
                # Rows past the model's end write the null slot, and count as padding.
                read = proposed[within, number - 1].cpu().numpy()
                hidden[within] = coupled_rows(stage, drafter, hidden[within], read)
            drafts = proposed[within, number]
            if within and not is_likeliest(drafts, hidden[within], drafter.head, stage.tolerance):
                raise rows_check.violation(f"draft {number + 1} is not the likeliest token of its row")
        if len(within) == len(batch.rows):
            check_state(rows_check, state.hidden[places], hidden, stage.tolerance)

    stage.both_ways(forward)


def check_state(check: Check, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Check what a request's drafter goes on from, a row for each request."""
    off = (got.double() - want).norm(dim=1)
    wrong = ~(off <= 2 * tolerance * (want.norm(dim=1) + 0.1))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        message = f"is {error_text(off[row], want[row].norm())}"
        raise check.violation(f"the draft state of request {row} in the batch {message}")


def _state(stage: Stage) -> DraftState:
    state = stage.runner.parts.state
    assert state is not None, "a drafter has a state"
    return state


def _places(stage: Stage, batch: SceneBatch) -> torch.Tensor:
    return stage.on_device(np.array([live.place for live, _, _ in batch.rows]))
