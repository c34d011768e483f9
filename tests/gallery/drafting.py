"""Mutants of drafting: by other means than an EAGLE head of one layer, and of requests that are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import Role
from capture_planner.plugins.backend import Executor, Metadata, Reservation, Scoring
from capture_planner_reference.executor import ReferenceExecutor
from capture_planner_runner.execution.bodies import DraftDecodeBody, ModulesBody
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.inputs import Array, StepInputs
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.execution.updates import Updates
from capture_planner_runner.models.protocols import Attend, Drafter
from capture_planner_runner.serving import launching
from capture_planner_runner.serving.serving import Serving
from capture_planner_runner.serving.speculative import Verification
from capture_planner_runner.serving.states import ScheduledBatch
from gallery.core import Mutant
from gallery.padding import RenamedReference
from gallery.patching import patched


class QueriesOfTheTarget(RenamedReference):
    """Takes the decodes of a draft prefill for ones of the target's query length; ``make`` is the wrong executor."""

    def __init__(self, make: Callable[[Reservation, int], Executor]) -> None:
        super().__init__()
        self._make, self._longest = make, 1

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group: the wrong one of the draft prefill, which is reserved after the target."""
        if reservation.role is Role.TARGET:
            self._longest = reservation.attention.max_query_len
        if reservation.role is not Role.DRAFT_PREFILL:
            return super().reserve(reservation)
        return self._make(reservation, self._longest)


class RequestsByTheTargetsQuery(ReferenceExecutor):
    """Divides the tokens of a decode by the target's query length to get its requests."""

    def __init__(self, reservation: Reservation, longest: int) -> None:
        super().__init__(reservation)
        self._slots = reservation.attention.max_query_len - longest

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend; in a decode from a graph each request begins where it would in the target's."""
        entry = metadata.entry
        if self._slots and metadata.is_full and entry is not None and entry.query_len is not None:
            starts = metadata.fields["query_start_loc"]
            numbers = torch.arange(len(starts), dtype=starts.dtype, device=starts.device)
            wrong = (numbers * (entry.query_len - self._slots)).clamp(max=metadata.num_tokens)
            fields = {**metadata.fields, "query_start_loc": wrong}
            metadata = attrs.evolve(metadata, entry=attrs.evolve(entry, query_len=None), fields=fields)
        super().attend(layer, query, out, scoring, metadata)


class BufferOfTheTargetsRows(ReferenceExecutor):
    """Has room for the queries that the requests of a graph have in the target, and drops the others."""

    def __init__(self, reservation: Reservation, longest: int) -> None:
        super().__init__(reservation)
        self._slots = reservation.attention.max_query_len - longest

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend; in a decode from a graph rows beyond the buffer are zeros."""
        super().attend(layer, query, out, scoring, metadata)
        entry = metadata.entry
        if metadata.is_full and entry is not None and entry.query_len is not None:
            out[metadata.num_reqs * (entry.query_len - self._slots) :] = 0


@attrs.frozen
class _Restarting:
    """A drafter whose modules all go on from the same states."""

    beneath: Drafter
    states: torch.Tensor

    def forward(self, *, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        return self.beneath.forward(hidden=self.states, **given)

    def propose(self, *given: Any) -> torch.Tensor:
        return self.beneath.propose(*given)


def _from_the_target(original: Callable[..., None]) -> Callable[..., None]:
    def per_token(body: ModulesBody, extents: Extents, attend: Attend) -> None:
        drafter: Any = _Restarting(body.drafter, body.source(extents.tokens))
        original(attrs.evolve(body, drafter=drafter), extents, attend)

    return per_token


@attrs.frozen
class _Moving:
    """Moves the fields of a step on after each layer but the last, whose step does so."""

    beneath: Attend
    last: int
    move: Callable[[], None]

    def __call__(self, layer: int, *given: Any) -> torch.Tensor:
        out = self.beneath(layer, *given)
        if layer < self.last:
            self.move()
        return out

    def recur(self, *given: Any) -> torch.Tensor:
        return self.beneath.recur(*given)

    @property
    def real(self) -> torch.Tensor:
        return self.beneath.real


def _moved_by_layers(original: Callable[..., None]) -> Callable[..., None]:
    def per_token(body: DraftDecodeBody, extents: Extents, attend: Attend) -> None:
        def move() -> None:
            body.updates.advance(body.token_fields, extents.reqs)

        original(body, extents, _Moving(attend, body.drafter.num_layers - 1, move))

    return per_token


def _as_if_all_were_kept(original: Callable[..., StepInputs]) -> Callable[..., StepInputs]:
    def made(scheduled: ScheduledBatch, wanted: Array, *rest: Any) -> StepInputs:
        return original(scheduled, np.maximum(wanted, scheduled.base + scheduled.counts), *rest)

    return made


def _decodes_left_as_filled(original: Callable[..., None]) -> Callable[..., None]:
    def prepare(updates: Updates, verified: Any, prefill: Any, last: Any, decode: Any, outcome: Any = None) -> None:
        original(updates, verified, prefill, last, None, outcome)

    return prepare


def _steps_of_the_longest_tier(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(role: RoleRun, batch: Any, dispatch: Any, inputs: Any, steps: int, *rest: Any, **named: Any) -> Any:
        if isinstance(role.body, DraftDecodeBody):
            steps = role.body.state.proposed.shape[1] - 1
        return original(role, batch, dispatch, inputs, steps, *rest, **named)

    return run


def _last_token_counted(original: Callable[..., Verification]) -> Callable[..., Verification]:
    def settled(serving: Serving, step: Any) -> Verification:
        verification = original(serving, step)
        return attrs.evolve(verification, accepted=verification.gained)

    return settled


DRAFTING_BACKENDS: tuple[Mutant, ...] = (
    Mutant(
        name="requests-by-the-targets-query",
        threads=("vllm-ascend#14510",),
        bug_class=BugClass.C,
        says="The first pass of a draft model has K + 2 tokens a request, and its requests are counted as if it had "
        "K + 1",
        backend=lambda: QueriesOfTheTarget(RequestsByTheTargetsQuery),
    ),
    Mutant(
        name="buffer-of-the-targets-rows",
        threads=("vllm#50065", "vllm#53970", "vllm#32591"),
        bug_class=BugClass.E,
        says="A buffer of queries has room for 1 + K tokens of each request of a graph, and a parallel pass has more",
        backend=lambda: QueriesOfTheTarget(BufferOfTheTargetsRows),
    ),
)

DRAFTING_RUNNERS: tuple[Mutant, ...] = (
    Mutant(
        name="modules-from-the-targets-states",
        threads=("vllm#33561",),
        bug_class=BugClass.F,
        says="Each MTP module goes on from the target's states, where only the first one may",
        patch=patched((ModulesBody, "per_token", _from_the_target)),
    ),
    Mutant(
        name="fields-moved-on-by-each-layer",
        threads=("sglang#25015",),
        bug_class=BugClass.F,
        says="Draft decodes move positions and slots on before the forward that reads them is over: after each layer",
        patch=patched((DraftDecodeBody, "per_token", _moved_by_layers)),
    ),
    Mutant(
        name="draft-decodes-behind-rejected",
        threads=(),
        bug_class=BugClass.F,
        says="The host lets the first draft decode stand behind the drafts that were rejected",
        patch=patched((launching, "draft_decode_inputs", _as_if_all_were_kept)),
    ),
    Mutant(
        name="draft-decodes-left-as-filled",
        threads=(),
        bug_class=BugClass.F,
        says="Where drafts are verified on the device, draft decodes stand as if all of them had been kept",
        patch=patched((Updates, "prepare_drafts", _decodes_left_as_filled)),
    ),
    Mutant(
        name="steps-of-the-longest-tier",
        threads=(),
        bug_class=BugClass.B,
        says="A chain of single draft decodes runs the steps of the schedule's longest tier, and drops the surplus",
        patch=patched((RoleRun, "run_chain", _steps_of_the_longest_tier)),
    ),
    Mutant(
        name="accepted-counts-the-last-token",
        threads=(),
        bug_class=BugClass.J,
        says="The token after the accepted drafts is counted as one of them",
        patch=patched((Serving, "_settled", _last_token_counted)),
    ),
)
