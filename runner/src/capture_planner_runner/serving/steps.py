"""Steps: their batches and the graphs that serve them, planned before anything runs, and what is in flight after.

Replicas agree on each step: every one submits its batches, and computes what all run from what all submitted. One small
all-gather serves all roles of a step. Where steps run ahead, it is before the tokens of the step in flight are read, so
that the device has work meanwhile. A replica without requests runs dummy batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.analysis.data_parallel import Agreement, Answer, Submission, Vector, agree
from capture_planner.dispatch.dispatcher import AnyDispatcher, Dispatch
from capture_planner.errors import RankError
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry
from capture_planner_runner.execution.inputs import Array, StepInputs, query_lens
from capture_planner_runner.ledger.rows import RankStep
from capture_planner_runner.ledger.session import Session
from capture_planner_runner.options import ExecutionPolicy
from capture_planner_runner.ranks.peers import Peers
from capture_planner_runner.serving.inputs import DraftRows, active_adapters, own_prefill_counts
from capture_planner_runner.serving.speculative import Verification
from capture_planner_runner.serving.states import RequestStates, ScheduledBatch


# Without slots, since one is made at every step, and that is quicker.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class PlannedStep:
    """One step as it is planned: each batch is made, and dispatched, here and nowhere else.

    Ranks, launch, warm-up and captures on first use read it. A step of no request on any rank has no batches.
    """

    scheduled: ScheduledBatch | None
    """The rows of the requests; None: this rank has none, and runs dummy batches where others have work."""
    batches: Mapping[Role, Batch]
    """The batch of each forward that runs; without draft decodes where k is less than 2."""
    dispatches: Mapping[Role, Dispatch]
    draft_tokens: int
    """k: tokens that are drafted for each request after this step."""
    drafts_on_device: bool = False
    """Whether verification and the drafter's fields are computed on the device."""
    needs_tokens: bool = False
    """Whether the host needs the tokens of the step in flight before it can launch this one."""
    is_steady: bool = True
    """Whether the target may run the graph of the step before, so that its fields can have advanced in it."""
    num_tokens_across_dp: Mapping[Role, Array] = attrs.field(factory=dict)
    """``int32[replicas]`` of each role: padded tokens of all replicas; empty for one replica."""
    joint: Mapping[Role, Batch] = attrs.Factory(lambda self: self.batches, takes_self=True)
    """The batches that were dispatched: of replicas those that stand for all of them."""

    def across(self, role: Role, inputs: StepInputs) -> StepInputs:
        """Return a role's inputs with the tokens of all replicas, where there are several."""
        tokens = self.num_tokens_across_dp.get(role)
        return inputs if tokens is None else attrs.evolve(inputs, num_tokens_across_dp=tokens)

    @property
    def is_idle(self) -> bool:
        """Whether this rank runs dummy batches, because other ranks have requests."""
        return self.scheduled is None and bool(self.batches)

    @property
    def is_full(self) -> bool:
        """Whether FULL graphs serve all forwards."""
        return all(map(is_full, self.dispatches.values()))


def is_full(dispatch: Dispatch) -> bool:
    """Say whether a FULL graph serves a batch."""
    return dispatch.entry is not None and dispatch.entry.num_reqs is not None


def batch_of(role: Role, scheduled: ScheduledBatch, states: RequestStates, draft: DraftRows | None) -> Batch:
    """Return the batch of one role, which is known before anything of the step has run."""
    if role is Role.DRAFT_DECODE:
        return Batch.decode(role, scheduled.num_reqs, 1)
    num_tokens, loras = scheduled.num_tokens, 0
    query_len, max_query_len = scheduled.query_len, scheduled.max_query_len
    if role is Role.TARGET and states.has_adapters:
        loras = len(active_adapters(scheduled, states))
    elif role.is_drafter and draft is not None and draft.is_own:
        counts = own_prefill_counts(scheduled, states, draft)
        num_tokens = int(counts.sum())
        query_len, max_query_len = query_lens(counts, prompts=scheduled.prompts > 0)
    return Batch(
        role=role,
        num_reqs=scheduled.num_reqs,
        num_tokens=num_tokens,
        query_len=query_len,
        past_prompt=scheduled.prompts == 0,
        active_loras=loras,
        max_query_len=max_query_len,
    )


PendingTokens = Callable[[], Array]
"""Waits for values that the device still computes, and returns them."""


def copy_to_host(tensor: torch.Tensor) -> PendingTokens:
    """Start to copy a small tensor to the host, and return a function that waits for the copy."""
    if tensor.device.type == "cpu":
        # The next step overwrites the tensor before this one is read.
        here = tensor.numpy().copy()
        return lambda: here
    # A copy into pageable memory would wait for the device here, and steps could not run ahead.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def arrived() -> Array:
        copied.synchronize()
        array: Array = pinned.numpy()
        return array

    return arrived


@attrs.frozen(kw_only=True, eq=False)
class PendingStep:
    """A step that is launched, whose tokens are not read yet."""

    index: int
    planned: PlannedStep
    scheduled: ScheduledBatch
    inputs: StepInputs
    started: float
    tokens: PendingTokens
    """``int64[T]``: the target's next token after each row that is read."""
    proposed: PendingTokens | None
    """``int64[states + 1, K]``: the drafts, where the drafter is launched too."""
    advanced: Verification | None
    """Advance of the states at launch, before the tokens; None: verification decides it."""
    is_on_device: bool
    """Whether the next step can be launched before the host has read anything of this one."""


_HEAD, _EACH = 2, 6
"""Numbers of a rank in the all-gather: of the step, and of each role."""

_MOST_KNOWN = 1 << 12
"""Agreements that are cached."""


@attrs.define(eq=False)
class StepPlanner:
    """Plans the steps of a model that is there once: makes the batches of a step, and dispatches each of them.

    :param dispatcher: says which graph serves a batch, as captured.
    :param draft: the rows of the first draft pass; None without a drafter.
    """

    _dispatcher: AnyDispatcher
    _states: RequestStates
    _policy: ExecutionPolicy
    _draft: DraftRows | None
    all_done: bool = True
    """Whether no other rank has requests."""
    _roles: tuple[Role, ...] = attrs.field(init=False)
    _roles_of_one_draft: tuple[Role, ...] = attrs.field(init=False)
    """Without draft decodes, which make the second draft and those after it."""

    def __attrs_post_init__(self) -> None:
        self._roles = tuple(role.role for role in self._dispatcher.plan.roles)
        self._roles_of_one_draft = tuple(role for role in self._roles if role is not Role.DRAFT_DECODE)

    def plan(self, scheduled: ScheduledBatch | None, *, is_done: bool) -> PlannedStep:
        """Return what runs in the next step; ``scheduled`` None: this rank has no batch.

        :param is_done: this rank has served all its requests.
        """
        if scheduled is None:
            return PlannedStep(scheduled=None, batches={}, dispatches={}, draft_tokens=0)
        roles = self._roles if scheduled.draft_tokens > 1 else self._roles_of_one_draft
        batches = {role: batch_of(role, scheduled, self._states, self._draft) for role in roles}
        dispatches = {role: self._dispatcher.dispatch(batch) for role, batch in batches.items()}
        on_device = self._drafts_on_device(dispatches)
        return PlannedStep(
            scheduled=scheduled,
            batches=batches,
            dispatches=dispatches,
            draft_tokens=scheduled.draft_tokens,
            drafts_on_device=on_device,
            needs_tokens=self._needs_tokens(scheduled, dispatches, on_device=on_device),
        )

    def _drafts_on_device(self, dispatches: Mapping[Role, Dispatch]) -> bool:
        """Say whether the drafter's fields can be computed without the host."""
        if self._draft is None or not self._policy.drafts_on_device:
            return False
        decodes = dispatches.get(Role.DRAFT_DECODE)
        # Eager attention, and a backend that plans on the host, are prepared with the real lengths of the draft
        # decodes, which depend on what verification keeps.
        return decodes is None or (decodes.entry is not None and not self._policy.draft_decodes_need_host)

    def _needs_tokens(self, scheduled: ScheduledBatch, dispatches: Mapping[Role, Dispatch], *, on_device: bool) -> bool:
        """Say whether the host needs the tokens of the step in flight before it can launch this one."""
        if self._draft is None:
            return False
        if not on_device:
            return True
        # While drafts of these requests are verified, lengths are upper bounds. Only a FULL graph can run with them.
        is_verifying = self._states.is_verifying(scheduled.state_indices).any()
        rows = (dispatches[role] for role in (Role.TARGET, Role.DRAFT_PREFILL))
        return bool(is_verifying) and not all(map(is_full, rows))


class ReplicaPlanner(StepPlanner):
    """Plans the steps of several replicas of a model, which agree on each: a collective.

    :param dispatcher: of the plan as captured, the same on every rank.
    :param captured: whether this rank has the graphs of the plan.
    """

    def __init__(
        self,
        dispatcher: AnyDispatcher,
        states: RequestStates,
        policy: ExecutionPolicy,
        draft: DraftRows | None,
        peers: Peers,
        session: Session,
        *,
        captured: bool,
    ) -> None:
        super().__init__(dispatcher, states, policy, draft, all_done=False)
        self._peers, self._session, self._captured = peers, session, captured
        self._known: dict[bytes, _StepAgreement] = {}
        self._known_of = dispatcher.plan
        self._entry: Entry | None = None

    def plan(self, scheduled: ScheduledBatch | None, *, is_done: bool) -> PlannedStep:
        """Agree on a step. Raises ``RankError`` where ranks of one replica have other batches than each other."""
        started = perf_counter()
        numbers = self._replicas(self._peers.agree(self._numbers(scheduled, is_done)))
        agreed = self._agreed(numbers)
        self.all_done = bool(numbers[:, 0].all())
        is_steady, self._entry = agreed.entry is self._entry, agreed.entry
        if not agreed.planned.batches:  # no rank has work, or all are done
            return agreed.planned
        self._session.add_rank_step(
            RankStep(
                numbers=tuple(map(tuple, numbers.tolist())),
                seconds=perf_counter() - started,
                is_idle=scheduled is None,
                eager_by_others=agreed.eager_by_others,
                larger_by_others=agreed.larger_by_others,
            )
        )
        # k of the joint batch: a replica that drafted more steps than others would be alone in the collectives.
        if scheduled is not None and scheduled.draft_tokens != agreed.planned.draft_tokens:
            scheduled = attrs.evolve(scheduled, draft_tokens=agreed.planned.draft_tokens)
        return attrs.evolve(agreed.planned, scheduled=scheduled, is_steady=is_steady)

    def _numbers(self, scheduled: ScheduledBatch | None, is_done: bool) -> list[int]:
        numbers = [int(is_done), int(self._captured)]
        # Of every role, so that the rows of all ranks have the same length.
        for role in self._roles:
            batch = None if scheduled is None else batch_of(role, scheduled, self._states, self._draft)
            numbers += _packed(batch)
        return numbers

    def _replicas(self, numbers: Array) -> Array:
        """Return the numbers of each replica, whose ranks have the same."""
        place = self._peers.place
        by_replica = numbers.reshape(place.data_size, place.tensor_size, -1)
        # With different batches, ranks that share a model enter collectives of different shapes and hang (vllm#25906).
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
        key = numbers.tobytes()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                # Rare: a workload has few combinations of batches, and they are cheap to work out again.
                self._known.clear()
            vectors = vectors_of(self._roles, numbers.tolist())
            agreements = {role: agree(self._dispatcher, vector) for role, vector in vectors.items()}
            known = self._known[key] = self._seen_from_here(agreements)
        return known

    def _seen_from_here(self, agreements: Mapping[Role, Agreement]) -> _StepAgreement:
        """Return what this replica runs in a step, and how often that differs from what it would run alone."""
        place, eager, larger = self._peers.place.data, 0, 0
        for agreement in agreements.values():
            mine = agreement.vector.ranks[place]
            if mine.batch is not None and mine.captured:
                alone = self._dispatcher.dispatch(mine.batch).entry
                eager += alone is not None and agreement.entry is None
                larger += agreement.entry is not None and alone != agreement.entry
        target = agreements[Role.TARGET]
        k = target.draft_tokens or 0
        roles = self._roles if k > 1 else self._roles_of_one_draft
        answers = {role: agreements[role].answers[place] for role in roles}
        dispatches = {role: answer.dispatch for role, answer in answers.items()}
        planned = PlannedStep(
            scheduled=None,
            batches={role: answer.batch for role, answer in answers.items() if answer.batch is not None},
            dispatches=dispatches,
            draft_tokens=k,
            drafts_on_device=self._drafts_on_device(dispatches),
            num_tokens_across_dp={
                role: np.array([*map(_padded, each.answers)], np.int32) for role, each in agreements.items()
            },
            joint={role: each.joint for role, each in agreements.items() if each.joint is not None},
        )
        return _StepAgreement(planned, target.entry, eager, larger)


@attrs.frozen(eq=False)
class _StepAgreement:
    planned: PlannedStep
    """The step as one replica runs it, without its requests; without batches where no replica has work."""
    entry: Entry | None
    """The target's graph."""
    eager_by_others: int
    larger_by_others: int


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
    lengths = batch.query_len or 0, batch.max_query_len or 0  # 0 is None: no length is 0
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
