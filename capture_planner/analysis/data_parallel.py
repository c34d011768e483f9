"""agree(dispatcher, vector): what every data-parallel rank runs, given the batches of all ranks.

Ranks that share a layer's collectives (expert or attention parallelism) must run the same shapes: all replay the same
entry, or all run eager. In each step each rank submits its batch of a role; the gathered submissions are the vector.
``agree`` depends on the vector and the plan only, so each rank computes the same answer alone. Nothing communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from capture_planner.analysis.explain import WHY_NONE
from capture_planner.dispatch.dispatcher import AnyDispatcher, Dispatch, Dispatcher, served
from capture_planner.errors import Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import raise_any
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import draft_steps, query_len_of
from capture_planner.records.observation import ObservedVector
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted

MIN_RANKS, MAX_RANKS = 2, 16
"""How many ranks are simulated; more where the plan has more."""


@attrs.frozen(kw_only=True)
class Submission:
    """What one rank submits for one step of one role; raises ``InvalidValue`` for an impossible batch."""

    batch: Batch | None = None
    """Its batch, unpadded; None: the rank is idle."""
    captured: bool = True
    """False: the rank uses no graphs at all, as it skipped capture, or cannot use them in this step."""
    missing: frozenset[Entry] = frozenset()
    """Entries of the plan that this rank did not capture, for lack of memory for example."""

    def __attrs_post_init__(self) -> None:
        batch = self.batch
        if batch is None:
            return
        raise_any(
            Problem(path=("batch", name), message=f"{message}, got {getattr(batch, name)}")
            for name, (wrong, message) in {
                "num_reqs": (batch.num_reqs < 1, "a batch has at least one request; an idle rank has no batch"),
                "num_tokens": (batch.num_tokens < batch.num_reqs, "fewer tokens than requests"),
                "active_loras": (batch.active_loras < 0, "the number of adapters is negative"),
            }.items()
            if wrong
        )

    def lacks(self, entry: Entry) -> bool:
        """Whether this rank cannot replay ``entry``."""
        return not self.captured or entry in self.missing


@attrs.frozen(kw_only=True)
class Vector:
    """The submissions of all ranks for one step of one role.

    Raises ``InvalidValue`` without ranks, and for a batch of another role.
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
            problems.append(Problem(path=("ranks",), message="a vector has at least one rank"))
        raise_any(problems)

    def lacking(self, entry: Entry) -> tuple[int, ...]:
        """Return the ranks that cannot replay ``entry``."""
        return tuple(rank for rank, submitted in enumerate(self.ranks) if submitted.lacks(entry))

    def joint(self) -> Batch | None:
        """Return the smallest batch whose graph serves every rank; None if all are idle.

        It has the most tokens, requests and adapters of any rank. It is a uniform decode only if every rank with work
        has one, of the same query length, and a decode with the longest request of all if every one has a decode.
        """
        batches = [submitted.batch for submitted in self.ranks if submitted.batch is not None]
        if not batches:
            return None
        lengths = {batch.uniform_query_len for batch in batches}
        uniform = lengths.pop() if len(lengths) == 1 else None
        longest = [batch.decode_query_len for batch in batches]
        return Batch(
            role=self.role,
            num_reqs=max(batch.num_reqs for batch in batches),
            num_tokens=max(batch.num_tokens for batch in batches),
            query_len=uniform,
            past_prompt=all(batch.past_prompt for batch in batches),
            # Drafters take no adapters (vLLM 0.33).
            active_loras=0 if self.role.is_drafter else max(batch.active_loras for batch in batches),
            # A rank with a mixed batch makes the joint batch a mixed one.
            max_query_len=None if uniform or None in longest else max(length or 0 for length in longest),
        )


@attrs.frozen(kw_only=True)
class Answer:
    """What one rank runs."""

    batch: Batch | None
    """Its batch; a dummy batch on an idle rank; None if no rank has work."""
    dispatch: Dispatch
    """The entry and the reason, which all ranks share, with the padding of this rank."""


@attrs.frozen(kw_only=True)
class Agreement:
    """What all ranks run: the same for each, except for the padding."""

    vector: Vector
    joint: Batch | None = None
    """The batch that was dispatched for all; None if all are idle, and no forward runs."""
    draft_tokens: int | None = None
    """Tokens that each rank drafts after this batch, by the schedule for the joint number of requests."""
    lost_entry: Entry | None = None
    """The entry of the joint batch if some rank has not captured it, else None."""
    answers: tuple[Answer, ...]
    """By rank."""

    @property
    def entry(self) -> Entry | None:
        """The graph that every rank replays, or None."""
        return self.answers[0].dispatch.entry

    @property
    def reason(self) -> Reason | None:
        """Why no rank replays a graph; None if all do."""
        return self.answers[0].dispatch.reason


def agree(dispatcher: AnyDispatcher, vector: Vector) -> Agreement:
    """Return what each rank runs.

    The joint batch is dispatched like any other. If a rank has not captured its entry, all ranks take the cheapest
    compatible entry that every rank has, or run eager. Raises ``DispatchError`` for a role that the plan does not have.
    """
    plan, joint = dispatcher.plan, vector.joint()
    if joint is None:
        # Raises for a role that the plan does not have, as it does where a rank has work.
        plan.role(vector.role)
        none = Answer(batch=None, dispatch=Dispatch(None, reason=Reason.IDLE))
        return Agreement(vector=vector, answers=(none,) * len(vector.ranks))
    # Padding differs from rank to rank: ``served`` computes it for each batch.
    common = attrs.evolve(dispatcher.dispatch(joint), padded_tokens=0, padded_reqs=0)
    lost_entry = common.entry if common.entry is not None and vector.lacking(common.entry) else None
    if lost_entry is not None:
        # The cheapest compatible entry that every rank has: a scan, as it is seldom needed.
        steps = draft_steps(joint.role, joint.num_reqs, plan.speculative)
        able = [each for each in plan.role(joint.role).entries if each.rejection(joint, steps) is None]
        entry = min((e for e in able if not vector.lacking(e)), key=lambda e: e.cost, default=None)
        common = Dispatch(entry, reason=Reason.RANK if entry is None else None)
    idle = _dummy(plan, joint)
    return Agreement(
        vector=vector,
        joint=joint,
        draft_tokens=None if plan.speculative is None else plan.speculative.draft_tokens(joint.num_reqs),
        lost_entry=lost_entry,
        answers=tuple(
            Answer(batch=batch, dispatch=common if common.entry is None else served(common.entry, batch))
            for batch in (submitted.batch or idle for submitted in vector.ranks)
        ),
    )


def without_agreed_entry(dispatcher: Dispatcher, vector: Vector, lost: Collection[int]) -> Vector:
    """Return the vector as if the ranks in ``lost`` lacked the entry that all agree on; raises ``DispatchError``."""
    agreement = agree(dispatcher, vector)
    entry = agreement.lost_entry or agreement.entry
    if entry is None:
        return vector
    ranks = list(vector.ranks)
    for rank in lost:
        ranks[rank] = attrs.evolve(ranks[rank], missing=ranks[rank].missing | {entry})
    return attrs.evolve(vector, ranks=tuple(ranks))


def _dummy(plan: Plan, joint: Batch) -> Batch:
    """Return the dummy batch of an idle rank: one decode of the joint or the scheduled length."""
    # An idle rank must not make the others run more: no more tokens than the joint batch or its longest request has.
    query_len = query_len_of(joint.role, plan, joint.num_reqs)
    most = joint.decode_query_len or joint.num_tokens
    return Batch.decode(joint.role, 1, joint.query_len or min(query_len, most))


# Explanations ----------------------------------------------------------------------------------


def explain_rank(dispatcher: Dispatcher, agreement: Agreement, rank: int) -> str:
    """Explain in a sentence why a rank runs what it runs, and which other ranks are the cause."""
    vector, joint, entry = agreement.vector, agreement.joint, agreement.entry
    if joint is None:
        return "no rank has work: no forward runs"
    own, answer = vector.ranks[rank].batch, agreement.answers[rank]
    assert answer.batch is not None
    prefix = "" if own is not None else f"idle, with a dummy batch of {shape_text(answer.batch)}; "
    lacking = () if agreement.lost_entry is None else vector.lacking(agreement.lost_entry)
    causes = [_missing(agreement, lacking, rank)] if lacking else []
    if entry is None:
        assert agreement.reason is not None
        if agreement.reason is Reason.RANK:
            # RANK is the reason only where a rank lacks the joint graph, so that a cause is known.
            return f"{prefix}all run eager: {causes[0]}"
        waiver = answer.dispatch.waiver
        detail = f" ({waiver.message})" if waiver is not None else ""
        return f"{prefix}all run eager: joint batch of {shape_text(joint)}: {WHY_NONE[agreement.reason]}{detail}"
    if own is None:
        causes.append("same as the other ranks")
    elif dispatcher.dispatch(own).entry == entry:
        causes.append("same as it would run alone")
    else:
        causes += _larger(vector, joint, own)
    return prefix + ("; ".join(causes) or "the graph that serves every rank")


def shape_text(batch: Batch) -> str:
    """Return requests and tokens of a batch in words."""
    if batch.uniform_query_len is not None:
        return f"{counted(batch.num_reqs, 'request')} of {counted(batch.uniform_query_len, 'token')}"
    longest = batch.decode_query_len
    kind = "mixed" if longest is None else f"up to {longest} each"
    return f"{counted(batch.num_reqs, 'request')}, {counted(batch.num_tokens, 'token')}, {kind}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 1``, ``ranks 1, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _missing(agreement: Agreement, lacking: tuple[int, ...], rank: int) -> str:
    """Name the ranks that cannot replay the joint batch's entry, seen from ``rank``."""
    others = tuple(other for other in lacking if other != rank)
    names = (["this rank"] if rank in lacking else []) + ([ranks_text(others)] if others else [])
    have = f"{' and '.join(names)} {_has(lacking)}"
    # To name one graph would suggest that the others are captured.
    if all(not agreement.vector.ranks[other].captured for other in lacking):
        return f"{have} no graphs"
    return f"{have} not captured {agreement.lost_entry}"


def _larger(vector: Vector, joint: Batch, own: Batch) -> list[str]:
    """Name the ranks that make the joint batch larger than this rank's own, or mixed."""
    batches = {rank: each.batch for rank, each in enumerate(vector.ranks) if each.batch is not None}
    causes = []
    length = own.uniform_query_len
    if length is not None and joint.uniform_query_len is None:
        others = tuple(rank for rank, batch in batches.items() if batch.uniform_query_len != length)
        causes.append(f"{ranks_text(others)} {_has(others)} no decodes of {counted(length, 'token')}")
    more: dict[int, list[str]] = {}
    for name, noun in (("num_reqs", "requests"), ("num_tokens", "tokens"), ("active_loras", "active LoRA")):
        most = getattr(joint, name)
        # The tokens of a uniform decode follow from its requests.
        if getattr(own, name) < most and not (name == "num_tokens" and joint.query_len is not None):
            # One rank with the most is enough to explain it.
            rank = next(rank for rank, batch in batches.items() if getattr(batch, name) == most)
            more.setdefault(rank, []).append(f"{most} {noun}")
    return causes + [f"rank {rank} has {' and '.join(most)}" for rank, most in more.items()]


def explain_share(role: Role, vector: ObservedVector, rank: int, entry: Entry | None) -> str:
    """Explain in a sentence why a rank ran what all ran, ``entry`` or eager, and which other ranks are the cause."""
    batch = vector.batch(role, rank)
    prefix = "idle; " if batch is None else ""
    if entry is None:
        return prefix + _eager(role, vector, rank)
    causes = []
    uniform = None if batch is None else batch.uniform_query_len
    others = [other for other in range(vector.num_ranks) if vector.num_reqs[other] and other != rank]
    if uniform is not None and entry.query_len is None:
        mixed = [other for other in others if vector.query_len[other] != uniform]
        if mixed:
            causes.append(f"{ranks_text(mixed)} {_has(mixed)} no decodes of {counted(uniform, 'token')}")
    most = max(vector.num_tokens)
    if vector.num_tokens[rank] < most:
        causes.append(f"rank {vector.num_tokens.index(most)} has {counted(most, 'token')}")
    return prefix + ("; ".join(causes) or "the graph of its own batch")


def _eager(role: Role, vector: ObservedVector, rank: int) -> str:
    lacking = [other for other in range(vector.num_ranks) if vector.modes[other] is GraphMode.NONE]
    if rank in lacking:
        others = [other for other in lacking if other != rank]
        more = f", and neither {_has(others)} {ranks_text(others)}" if others else ""
        return f"all ran eager: this rank has no graph{more}"
    if lacking:
        first = vector.batch(role, lacking[0])
        shape = f" for {shape_text(first)}" if first is not None and len(lacking) == 1 else ""
        return f"all ran eager: {ranks_text(lacking)} {_has(lacking)} no graph{shape}"
    lengths = {length for length, reqs in zip(vector.query_len, vector.num_reqs, strict=True) if reqs}
    length = lengths.pop() if len(lengths) == 1 else None
    kind = "mixed" if length is None else f"decodes of {counted(length, 'token')}"
    return f"all ran eager: each has a graph by itself, and together they have {max(vector.num_tokens)} tokens, {kind}"
