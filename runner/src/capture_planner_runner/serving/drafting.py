"""DraftPasses: the state of verification and drafter on the device, between the forwards of a step."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from capture_planner.modes import Role
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.fields import ACCEPTED_COUNTS, SAMPLED_COUNTS, Fields
from capture_planner_runner.execution.updates import (
    DraftState,
    StepAhead,
    TokenFields,
    Updates,
    VerificationInputs,
    VerificationOutcome,
)
from capture_planner_runner.serving.inputs import DraftRows


@attrs.frozen(kw_only=True, eq=False)
class DraftPasses:
    """The device's part of speculation, around the forwards of target and drafter."""

    rows: DraftRows
    """The rows of the first draft pass."""
    state: DraftState
    outcome: VerificationOutcome | None
    """Result of verification, for a next step that is launched before the host reads it; None: none is."""
    target: TargetBody
    prefill: Fields
    """Fields of the draft prefill."""
    token_fields: Mapping[Role, TokenFields]
    """Each role's fields that advance by a token."""
    updates: Updates
    places: int
    """Numbers of synthetic acceptance that each request has, see ``fields.accepted_field``."""

    def correct(self, num_reqs: int, most: int, *, is_synthetic: bool) -> None:
        """Bring the rows whose tokens the host has not read to what verification kept of the step before.

        :param most: the most rows of a request that is past its prompt.
        :param is_synthetic: acceptance is drawn, and is in the target's fields.
        """
        if self.outcome is None:
            return
        step = StepAhead(
            target=self.token_fields[Role.TARGET],
            prefill=self.token_fields[Role.DRAFT_PREFILL],
            starts=self.target.fields["query_start_loc"][: num_reqs + 1],
            most=most,
            accepted=self._accepted_counts(num_reqs) if is_synthetic else None,
        )
        self.updates.correct(step, self.state, self.outcome)

    def verify(self, num_reqs: int, num_tokens: int, most: int, *, is_synthetic: bool, has_decodes: bool) -> None:
        """Verify the drafts of a step, and put what was kept into the fields of the drafter's forwards."""
        fields = self.target.fields
        self.updates.prepare_drafts(
            VerificationInputs(
                fields=self.token_fields[Role.TARGET],
                starts=fields["query_start_loc"][: num_reqs + 1],
                counts=fields[SAMPLED_COUNTS][:num_reqs],
                answers=self.target.tokens[:num_tokens],
                most=most,
                accepted=self._accepted_counts(num_reqs) if is_synthetic else None,
            ),
            self.token_fields[Role.DRAFT_PREFILL],
            self.prefill["last_token_indices"],
            self.token_fields[Role.DRAFT_DECODE] if has_decodes else None,
            self.outcome,
        )

    def _accepted_counts(self, num_reqs: int) -> torch.Tensor:
        """Return how many drafts synthetic acceptance accepts, ``int32[num_reqs, places]``."""
        return self.target.fields[ACCEPTED_COUNTS].view(-1, self.places)[:num_reqs]
