"""Agreement: what data-parallel ranks run in a step, as each works out from what all submit.

One small all-gather serves all roles of a step. It is launched before the tokens of the previous step are read, where
steps run ahead, so that the device has work meanwhile. Replicas that have nothing to do run along on dummy batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Protocol

import attrs
import numpy as np

from capture_planner.analysis.data_parallel import Agreement, Answer, Submission, Vector, agree
from capture_planner.dispatch.dispatcher import AnyDispatcher, Dispatch, Dispatcher
from capture_planner.errors import RankError
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.runtime.execution.inputs import Array, query_lens
from capture_planner.runtime.ledger import RankStep
from capture_planner.runtime.ranks.peers import Peers
from capture_planner.runtime.serving.inputs import DraftRows, own_prefill_counts
from capture_planner.runtime.serving.states import RequestStates, ScheduledBatch
from capture_planner.runtime.session import Session

_HEAD, _EACH = 2, 6
"""Numbers of a rank in the all-gather: of the step, and of each role."""

_MOST_KNOWN = 1 << 12


class StepRanks(Protocol):
    """The ranks that run steps together, as serving sees them."""

    all_done: bool
    """Whether no rank has requests."""
    others_work: bool
    """Whether this rank is idle in a step in which another is not."""
    is_steady: bool
    """Whether the target runs what it ran in the step before."""
    answers: Mapping[Role, Answer]
    """What this rank runs, where it is idle."""
    draft_tokens: int
    """k of the step."""

    def tokens(self, role: Role) -> Array | None:
        """Return the padded tokens of each replica in a role, ``int32[replicas]``; None: there is one."""

    def joint(self, batch: Batch) -> Batch:
        """Return the batch that was dispatched for all replicas, of which ``batch`` is what this one runs."""

    def begin(self, scheduled: ScheduledBatch | None, *, is_done: bool) -> ScheduledBatch | None:
        """Agree on a step, and return this rank's batch, with the drafts that all make after it.

        :param is_done: this rank has served all its requests.
        """


class OneReplica:
    """A model that is there once: nothing is to be agreed on."""

    all_done, others_work, is_steady = True, False, True
    answers: Mapping[Role, Answer] = {}
    draft_tokens = 0

    def tokens(self, role: Role) -> Array | None:
        return None

    def joint(self, batch: Batch) -> Batch:
        return batch

    def begin(self, scheduled: ScheduledBatch | None, *, is_done: bool) -> ScheduledBatch | None:
        return scheduled


class Replicas:
    """Several replicas of a model. It is also their dispatcher: a batch is served as it was agreed on.

    :param dispatcher: of the plan as captured, the same on every rank.
    :param captured: whether this rank has the graphs of the plan.
    """

    def __init__(
        self,
        dispatcher: AnyDispatcher,
        peers: Peers,
        session: Session,
        states: RequestStates,
        draft: DraftRows | None,
        *,
        captured: bool,
    ) -> None:
        self.all_done, self.others_work, self.is_steady, self.draft_tokens = False, False, False, 0
        self.answers: Mapping[Role, Answer] = {}
        self._across: Mapping[Role, Array] = {}
        self._joint: Mapping[Role, Batch] = {}
        self._dispatcher, self._peers, self._session = dispatcher, peers, session
        self._states, self._draft, self._captured = states, draft, captured
        self._roles = tuple(role.role for role in dispatcher.plan.roles)
        self._known: dict[bytes, _StepAgreement] = {}
        self._known_of = dispatcher.plan
        self._alone = Dispatcher(dispatcher.plan)
        self._entry: Entry | None = None

    def begin(self, scheduled: ScheduledBatch | None, *, is_done: bool) -> ScheduledBatch | None:
        """Agree on a step. Raises ``RankError`` where ranks of one replica have other batches than each other."""
        started = perf_counter()
        numbers = self._replicas(self._peers.agree(self._numbers(scheduled, is_done)))
        agreed = self._agreed(numbers)
        self.answers, self._across, target = agreed.answers, agreed.across, agreed.target
        self._joint = agreed.joint
        self.all_done = bool(numbers[:, 0].all())
        self.others_work = scheduled is None and target.joint is not None
        self.draft_tokens = target.draft_tokens or 0
        self.is_steady, self._entry = target.entry is self._entry, target.entry
        if target.joint is not None:
            seconds = perf_counter() - started
            rows = tuple(map(tuple, numbers.tolist()))
            self._session.add_rank_step(
                RankStep(
                    numbers=rows,
                    seconds=seconds,
                    is_idle=scheduled is None,
                    eager_by_others=agreed.eager_by_others,
                    larger_by_others=agreed.larger_by_others,
                )
            )
        if scheduled is None or scheduled.draft_tokens == self.draft_tokens:
            return scheduled
        return attrs.evolve(scheduled, draft_tokens=self.draft_tokens)

    def tokens(self, role: Role) -> Array | None:
        return self._across[role]

    def joint(self, batch: Batch) -> Batch:
        return self._joint[batch.role]

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return what serves the batch that this rank submitted for its role."""
        answer = self.answers[batch.role]
        if answer.batch != batch:
            raise RankError(f"{batch.role.value}: {batch} was not agreed on, {answer.batch} was")
        return answer.dispatch

    def _numbers(self, scheduled: ScheduledBatch | None, is_done: bool) -> list[int]:
        numbers = [int(is_done), int(self._captured)]
        for role in self._roles:
            batch = None if scheduled is None else self._batch(role, scheduled)
            numbers += _packed(batch)
        return numbers

    def _batch(self, role: Role, scheduled: ScheduledBatch) -> Batch:
        """Return a role's batch of a step, which is known before anything of the step has run."""
        if role is Role.DRAFT_DECODE:
            return Batch.decode(role, scheduled.num_reqs, 1)
        tokens, query_len, loras = scheduled.num_tokens, scheduled.query_len, 0
        longest = scheduled.max_query_len
        if role is Role.TARGET:
            mine = self._states.adapter[scheduled.state_indices]
            loras = len(np.unique(mine)) if self._states.has_adapters and mine.any() else 0
        elif self._draft is not None and self._draft.is_own:
            first = self._states.computed[scheduled.state_indices]
            counts = own_prefill_counts(scheduled, first, self._states.max_model_len, self._draft)
            tokens, (query_len, longest) = int(counts.sum()), query_lens(counts, prompts=scheduled.prompts > 0)
        return Batch(
            role=role,
            num_reqs=scheduled.num_reqs,
            num_tokens=tokens,
            query_len=query_len,
            past_prompt=scheduled.prompts == 0,
            active_loras=loras,
            max_query_len=longest,
        )

    def _replicas(self, numbers: Array) -> Array:
        """Return the numbers of each replica, whose ranks have the same."""
        place = self._peers.place
        by_replica = numbers.reshape(place.data_size, place.tensor_size, -1)
        if (by_replica != by_replica[:, :1]).any():
            data, tensor = np.argwhere((by_replica != by_replica[:, :1]).any(axis=2))[0].tolist()
            first = data * place.tensor_size
            raise RankError(
                f"ranks {first} and {first + tensor} share a model and have other batches; they were not given the "
                "same requests, or their tokens differ",
                (first, first + tensor),
            )
        replicas: Array = by_replica[:, 0]
        return replicas

    def _agreed(self, numbers: Array) -> _StepAgreement:
        """Return what is agreed on; the same numbers come again and again."""
        if self._known_of is not self._dispatcher.plan:  # graphs were captured between steps
            self._known, self._known_of = {}, self._dispatcher.plan
            # One of its own: what stands before that of a lazy plan would take each answer for a wish.
            self._alone = Dispatcher(self._known_of)
        key = numbers.tobytes()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            vectors = vectors_of(self._roles, numbers.tolist())
            agreements = {role: agree(self._dispatcher, vector) for role, vector in vectors.items()}
            known = self._known[key] = _StepAgreement.of(agreements, self._peers.place.data, self._alone)
        return known


@attrs.frozen(eq=False)
class _StepAgreement:
    """What all replicas run in a step, seen from one of them."""

    target: Agreement
    answers: Mapping[Role, Answer]
    """Of this replica."""
    across: Mapping[Role, Array]
    """The tokens of all, padding included."""
    eager_by_others: int
    larger_by_others: int
    joint: Mapping[Role, Batch]
    """What was dispatched for all; empty where no replica has work."""

    @classmethod
    def of(cls, agreements: Mapping[Role, Agreement], place: int, dispatcher: Dispatcher) -> _StepAgreement:
        """Return the step as the replica at ``place`` sees it; the dispatcher says what it would run alone."""
        eager = larger = 0
        for agreement in agreements.values():
            mine = agreement.vector.ranks[place]
            if mine.batch is not None and mine.captured:
                alone = dispatcher.dispatch(mine.batch).entry
                eager += alone is not None and agreement.entry is None
                larger += agreement.entry is not None and alone != agreement.entry
        return cls(
            agreements[Role.TARGET],
            {role: agreement.answers[place] for role, agreement in agreements.items()},
            {role: np.array([*map(_padded, each.answers)], np.int32) for role, each in agreements.items()},
            eager,
            larger,
            {role: each.joint for role, each in agreements.items() if each.joint is not None},
        )


def vectors_of(roles: Sequence[Role], numbers: Sequence[Sequence[int]]) -> dict[Role, Vector]:
    """Return what the replicas submitted for each role of the plan: the ``numbers`` of a ``RankStep``."""
    return {
        role: Vector(
            role=role,
            ranks=tuple(
                Submission(batch=_unpacked(role, row[at : at + _EACH]), captured=bool(row[1])) for row in numbers
            ),
        )
        for role, at in zip(roles, range(_HEAD, _HEAD + _EACH * len(roles), _EACH), strict=True)
    }


def _padded(answer: Answer) -> int:
    return 0 if answer.batch is None else answer.batch.num_tokens + answer.dispatch.padded_tokens


def _packed(batch: Batch | None) -> tuple[int, ...]:
    if batch is None:
        return (0,) * _EACH
    lengths = batch.query_len or 0, batch.max_query_len or 0
    return batch.num_reqs, batch.num_tokens, *lengths, int(batch.past_prompt), batch.active_loras


def _unpacked(role: Role, numbers: Sequence[int]) -> Batch | None:
    reqs, tokens, query_len, max_query_len, past_prompt, loras = numbers
    if not reqs:
        return None
    return Batch(
        role=role,
        num_reqs=reqs,
        num_tokens=tokens,
        query_len=query_len or None,
        past_prompt=bool(past_prompt),
        active_loras=loras,
        max_query_len=max_query_len or None,
    )
