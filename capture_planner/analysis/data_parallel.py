"""agree(dispatcher, vector): what every data-parallel rank runs, from what all of them submitted.

Ranks that share a layer's collectives (expert or attention parallelism) must run the same shapes: all
replay the same entry, or all run eager. In each step and for each role a rank submits its batch; the
gathered submissions are the vector, the same on every rank. ``agree`` takes that vector and the plan
and nothing else, so that each rank finds the same answer alone. Simulated: nothing here communicates.

Target, draft prefill and draft decode each have a vector of their own. No torch is needed.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from capture_planner.analysis.explain import WHY_NONE
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.errors import InvalidValue, Problem
from capture_planner.modes import Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import draft_steps
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted

MIN_RANKS, MAX_RANKS = 2, 16
"""How many ranks are simulated; more than the most where a plan has more itself."""


@attrs.frozen(kw_only=True)
class Submission:
    """What one rank puts into the vector for one step of one role.

    Raises ``InvalidValue`` for a batch that no scheduler can send: without a request, with fewer
    tokens than requests, or with a negative number of adapters.
    """

    batch: Batch | None = None
    """Its batch, unpadded; None where it is idle."""
    captured: bool = True
    """False where it uses no graph at all: it skipped capture, or cannot use graphs in this step."""
    missing: frozenset[Entry] = frozenset()
    """Entries of the plan that this rank alone did not capture, as when it had less memory left."""

    def __attrs_post_init__(self) -> None:
        batch = self.batch
        if batch is None:
            return
        checks = {
            "num_reqs": (batch.num_reqs < 1, "a batch has a request at least; an idle rank has no batch"),
            "num_tokens": (batch.num_tokens < batch.num_reqs, "fewer tokens than requests"),
            "active_loras": (batch.active_loras < 0, "a count of adapters is not negative"),
        }
        problems = [
            Problem(path=("batch", name), message=f"{message}, got {getattr(batch, name)}")
            for name, (wrong, message) in checks.items()
            if wrong
        ]
        if problems:
            raise InvalidValue(problems)

    def lacks(self, entry: Entry) -> bool:
        """Say whether this rank cannot replay ``entry``."""
        return not self.captured or entry in self.missing


@attrs.frozen(kw_only=True)
class Vector:
    """The submissions of all ranks for one step of one role, by rank.

    Raises ``InvalidValue`` where there is no rank, or where a batch is of another role.
    """

    role: Role
    ranks: tuple[Submission, ...]

    def __attrs_post_init__(self) -> None:
        problems = [
            Problem(
                path=("ranks", rank, "batch", "role"),
                message=f"expected {self.role}, got {submitted.batch.role}",
                remedy="each role has a vector of its own",
            )
            for rank, submitted in enumerate(self.ranks)
            if submitted.batch is not None and submitted.batch.role is not self.role
        ]
        if not self.ranks:
            problems.append(Problem(path=("ranks",), message="a vector has one rank at least"))
        if problems:
            raise InvalidValue(problems)

    def lacking(self, entry: Entry) -> tuple[int, ...]:
        """Return the ranks that cannot replay ``entry``."""
        return tuple(rank for rank, submitted in enumerate(self.ranks) if submitted.lacks(entry))

    def joint(self) -> Batch | None:
        """Return the smallest batch whose graph serves every rank; None where all are idle.

        Most tokens, most requests and most adapters of any rank. It is a uniform decode only if each
        rank that has work is one, of the same query length and past its prompt. Idle ranks have no
        say in it.
        """
        batches = [submitted.batch for submitted in self.ranks if submitted.batch is not None]
        if not batches:
            return None
        lengths = {batch.uniform_query_len for batch in batches}
        return Batch(
            role=self.role,
            num_reqs=max(batch.num_reqs for batch in batches),
            num_tokens=max(batch.num_tokens for batch in batches),
            query_len=lengths.pop() if len(lengths) == 1 else None,
            past_prompt=all(batch.past_prompt for batch in batches),
            active_loras=0 if self.role.is_drafter else max(batch.active_loras for batch in batches),
        )


@attrs.frozen(kw_only=True)
class Answer:
    """What one rank runs."""

    batch: Batch | None
    """Its own batch; of an idle rank the batch that stands in; None where no rank runs anything."""
    dispatch: Dispatch
    """The entry and the reason, which all ranks share, with the padding of this rank."""


@attrs.frozen(kw_only=True)
class Agreement:
    """What all ranks run: everything but the padding is the same for each of them."""

    vector: Vector
    joint: Batch | None
    """The batch that was dispatched for all; None where all are idle, and no forward runs."""
    draft_tokens: int | None
    """Tokens that each rank drafts after this batch: the schedule's for the joint number of requests."""
    passed_over: Entry | None
    """The entry that the joint batch would have had, if every rank had captured it."""
    answers: tuple[Answer, ...]
    """By rank."""

    @property
    def entry(self) -> Entry | None:
        """The graph that every rank replays, or None."""
        return self.answers[0].dispatch.entry

    @property
    def reason(self) -> Reason | None:
        """Why no rank replays a graph; None where all do."""
        return self.answers[0].dispatch.reason


def agree(dispatcher: Dispatcher, vector: Vector) -> Agreement:
    """Return what each rank runs.

    The joint batch is dispatched as any other. Where a rank lacks its entry, all take the cheapest
    compatible one that every rank has, and run eager, unpadded, where there is none. The answer
    depends on the plan and the vector alone, not on the rank, nor on what ``dispatcher`` was asked
    before. Raises ``DispatchError`` for a role that the plan does not have.
    """
    plan, joint = dispatcher.plan, vector.joint()
    if joint is None:
        plan.role(vector.role)
        none = Answer(batch=None, dispatch=Dispatch(None, reason=Reason.IDLE))
        return Agreement(
            vector=vector,
            joint=None,
            draft_tokens=None,
            passed_over=None,
            answers=(none,) * len(vector.ranks),
        )
    common = dispatcher.dispatch(joint)
    passed_over = common.entry if common.entry is not None and vector.lacking(common.entry) else None
    if passed_over is not None:
        entry = _next(plan, vector, joint)
        common = Dispatch(entry, reason=Reason.RANK if entry is None else None)
    idle = _stand_in(plan, joint)
    return Agreement(
        vector=vector,
        joint=joint,
        draft_tokens=None if plan.speculative is None else plan.speculative.draft_tokens(joint.num_reqs),
        passed_over=passed_over,
        answers=tuple(_answer(common, submitted.batch or idle) for submitted in vector.ranks),
    )


def without_agreed_entry(dispatcher: Dispatcher, vector: Vector, lost: Collection[int]) -> Vector:
    """Return the vector with ranks that lost the very entry that all would have replayed.

    The same vector where there is none. Raises ``DispatchError`` as ``agree`` does.
    """
    agreement = agree(dispatcher, vector)
    entry = agreement.passed_over or agreement.entry
    if entry is None:
        return vector
    return attrs.evolve(
        vector,
        ranks=tuple(
            attrs.evolve(submitted, missing=submitted.missing | {entry}) if rank in lost else submitted
            for rank, submitted in enumerate(vector.ranks)
        ),
    )


def _next(plan: Plan, vector: Vector, joint: Batch) -> Entry | None:
    """Return the cheapest compatible entry that every rank has, by a scan: it is seldom needed."""
    steps = draft_steps(joint.role, joint.num_reqs, plan.speculative)
    able = (
        entry
        for entry in plan.role(joint.role).entries
        if not vector.lacking(entry) and entry.rejection(joint, steps) is None
    )
    return min(able, key=lambda entry: entry.cost, default=None)


def _stand_in(plan: Plan, joint: Batch) -> Batch:
    """Return what an idle rank runs: one decode of the joint length, else of the scheduled one.

    Never more tokens than the joint batch has: an idle rank must not make the others run more.
    """
    k = 0
    if plan.speculative is not None and joint.role is not Role.DRAFT_DECODE:
        k = plan.speculative.draft_tokens(joint.num_reqs)
    query_len = joint.query_len or min(1 + k, joint.num_tokens)
    return Batch.decode(joint.role, 1, query_len)


def _answer(common: Dispatch, batch: Batch) -> Answer:
    entry = common.entry
    if entry is None:
        return Answer(batch=batch, dispatch=attrs.evolve(common, padded_tokens=0, padded_reqs=0))
    tokens = entry.num_tokens - batch.num_tokens
    reqs = 0 if entry.num_reqs is None else entry.num_reqs - batch.num_reqs
    return Answer(batch=batch, dispatch=Dispatch(entry, tokens, reqs))


# Why -------------------------------------------------------------------------------------------


def explain_rank(dispatcher: Dispatcher, agreement: Agreement, rank: int) -> str:
    """Say in a sentence why this rank runs what it runs, and which other ranks are the cause."""
    vector, joint, entry = agreement.vector, agreement.joint, agreement.entry
    if joint is None:
        return "no rank has work: no forward runs"
    own = vector.ranks[rank].batch
    answer = agreement.answers[rank]
    assert answer.batch is not None
    role = "" if own is not None else f"idle: {_shape(answer.batch)} stands in for its batch; "
    lacking = () if agreement.passed_over is None else vector.lacking(agreement.passed_over)
    if entry is None:
        if agreement.reason is Reason.RANK:
            return f"{role}all run eager: {_lacks(agreement, lacking, rank)}"
        assert agreement.reason is not None
        waiver = answer.dispatch.waiver
        detail = f" ({waiver.message})" if waiver is not None else ""
        why = WHY_NONE[agreement.reason]
        return f"{role}all run eager: of the joint batch, {_shape(joint)}, {why}{detail}"
    causes = [_lacks(agreement, lacking, rank)] if lacking else []
    if own is None:
        return role + "; ".join([*causes, "as the others"])
    if dispatcher.dispatch(own).entry == entry:
        return "; ".join([*causes, "what it would run alone"])
    return "; ".join([*causes, *_swayed(vector, joint, own)]) or "what serves every rank"


def _shape(batch: Batch) -> str:
    if batch.uniform_query_len is not None:
        return f"{counted(batch.num_reqs, 'request')} of {counted(batch.uniform_query_len, 'token')}"
    return f"{counted(batch.num_reqs, 'request')}, {counted(batch.num_tokens, 'token')}, mixed"


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _lacks(agreement: Agreement, lacking: tuple[int, ...], rank: int) -> str:
    others = tuple(other for other in lacking if other != rank)
    ranks = " and ".join(
        (*(("this rank",) if rank in lacking else ()), *((_ranks(others),) if others else ()))
    )
    have = "has" if len(lacking) == 1 else "have"
    if all(not agreement.vector.ranks[other].captured for other in lacking):
        return f"{ranks} {have} no graphs"
    return f"{ranks} {have} not captured {agreement.passed_over}"


def _swayed(vector: Vector, joint: Batch, own: Batch) -> list[str]:
    """Say on which ranks the joint batch is more than this rank's own."""
    batches = {r: s.batch for r, s in enumerate(vector.ranks) if s.batch is not None}
    causes = []
    length = own.uniform_query_len
    if length is not None and joint.uniform_query_len is None:
        others = tuple(rank for rank, batch in batches.items() if batch.uniform_query_len != length)
        verb = "has" if len(others) == 1 else "have"
        causes.append(f"{_ranks(others)} {verb} no decodes of {counted(length, 'token')}")
    more: dict[int, list[str]] = {}
    for name, noun in (("num_reqs", "requests"), ("num_tokens", "tokens"), ("active_loras", "active LoRA")):
        most = getattr(joint, name)
        if getattr(own, name) < most and not (name == "num_tokens" and joint.query_len is not None):
            rank = next(rank for rank, batch in batches.items() if getattr(batch, name) == most)
            more.setdefault(rank, []).append(f"{most} {noun}")
    return causes + [f"rank {rank} has {' and '.join(most)}" for rank, most in more.items()]
