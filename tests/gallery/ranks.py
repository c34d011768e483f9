"""Mutants that agree wrong: data-parallel ranks that go apart, and on a device hang or compute nonsense.

Most are a function in the place of ``ranks.agree``, which is what the healthy ranks ask; the others capture apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from capture_planner.analysis.data_parallel import Agreement, Answer, Submission, Vector, agree
from capture_planner.analysis.lint.core import BugClass
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.modes import Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_runner.capture import sessions
from capture_planner_runner.ranks.peers import Peers
from gallery.core import Mutant
from gallery.patching import patched
from support.runner_conformance import RunnerCheck
from support.runner_conformance.collective_capture import check_capture
from support.runner_conformance.rank_agreement import Agree, check_agreement


def each_for_itself(dispatcher: Dispatcher, vector: Vector) -> Agreement:
    """Each rank dispatches its own batch."""

    def alone(submitted: Submission, answer: Answer) -> Answer:
        if submitted.batch is None:
            return answer
        found = dispatcher.dispatch(submitted.batch)
        if found.entry is not None and submitted.lacks(found.entry):
            found = Dispatch(None, reason=Reason.RANK)
        return attrs.evolve(answer, dispatch=found)

    return _answered(agree(dispatcher, vector), alone)


def skipping_alone(dispatcher: Dispatcher, vector: Vector) -> Agreement:
    """A rank that skipped capture runs eager, and does not tell the others."""
    told = tuple(attrs.evolve(submitted, captured=True) for submitted in vector.ranks)
    agreement = agree(dispatcher, attrs.evolve(vector, ranks=told))

    def eager(submitted: Submission, answer: Answer) -> Answer:
        if submitted.captured or answer.dispatch.entry is None:
            return answer
        return attrs.evolve(answer, dispatch=Dispatch(None, reason=Reason.RANK))

    return _answered(attrs.evolve(agreement, vector=vector), eager)


def idle_runs_nothing(dispatcher: Dispatcher, vector: Vector) -> Agreement:
    """A rank without a batch submits nothing, and no forward of it meets the others' collectives."""

    def nothing(submitted: Submission, answer: Answer) -> Answer:
        if submitted.batch is not None:
            return answer
        return Answer(batch=None, dispatch=Dispatch(None, reason=Reason.IDLE))

    return _answered(agree(dispatcher, vector), nothing)


def drafter_with_the_target(dispatcher: Dispatcher, vector: Vector) -> Agreement:
    """The drafter goes by what was gathered for the target: as many tokens as are verified."""
    plan = dispatcher.plan
    if not vector.role.is_drafter or plan.speculative is None:
        return agree(dispatcher, vector)
    k = plan.speculative.num_tokens

    def verified(submitted: Submission) -> Submission:
        batch = submitted.batch
        if batch is None:
            return submitted
        target = attrs.evolve(batch, num_tokens=batch.num_reqs * (1 + k), query_len=1 + k)
        return attrs.evolve(submitted, batch=target)

    together = agree(dispatcher, attrs.evolve(vector, ranks=tuple(map(verified, vector.ranks))))
    return _answered(attrs.evolve(together, vector=vector), _own_batch)


def own_adapters(dispatcher: Dispatcher, vector: Vector) -> Agreement:
    """Tokens and requests are gathered; each rank counts the adapters of its own rows."""
    agreement = agree(dispatcher, vector)
    joint = agreement.joint

    def counted(submitted: Submission, answer: Answer) -> Answer:
        if joint is None or submitted.batch is None or vector.role is not Role.TARGET:
            return answer
        found = dispatcher.dispatch(attrs.evolve(joint, active_loras=submitted.batch.active_loras))
        if found.entry is not None and vector.lacking(found.entry):
            return answer
        return attrs.evolve(answer, dispatch=found)

    return _answered(agreement, counted)


def _answered(agreement: Agreement, change: Callable[[Submission, Answer], Answer]) -> Agreement:
    """Return the agreement with each rank's answer changed, and its own padding put right."""
    answers = tuple(
        _padded(change(submitted, answer))
        for submitted, answer in zip(agreement.vector.ranks, agreement.answers, strict=True)
    )
    return attrs.evolve(agreement, answers=answers)


def _own_batch(submitted: Submission, answer: Answer) -> Answer:
    return answer if submitted.batch is None else attrs.evolve(answer, batch=submitted.batch)


def _padded(answer: Answer) -> Answer:
    entry, batch = answer.dispatch.entry, answer.batch
    tokens, reqs = (0, 0) if entry is None or batch is None else _beyond(entry.num_tokens, entry.num_reqs, batch)
    return attrs.evolve(answer, dispatch=attrs.evolve(answer.dispatch, padded_tokens=tokens, padded_reqs=reqs))


def _beyond(tokens: int, reqs: int | None, batch: Batch) -> tuple[int, int]:
    return tokens - batch.num_tokens, 0 if reqs is None else reqs - batch.num_reqs


@attrs.frozen
class _Heedless:
    """Peers whose outcomes of a stage count for nothing in one place: of the error, or of the lack of memory."""

    beneath: Peers
    place: int

    def exchange(self, topic: str, value: Any) -> Any:
        found: Any = self.beneath.exchange(topic, value)
        own = self.beneath.place.rank
        kept = [rank == own for rank in range(len(found))]
        return tuple(
            [each if mine or number != self.place else None for number, each in enumerate(outcome)]
            for mine, outcome in zip(kept, found, strict=True)
        )


def _heedless(place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda peers, *given, **named: original(_Heedless(peers, place), *given, **named)

    return made


def _captured(name: str, *threads: str, says: str, place: int) -> Mutant:
    def check(seed: int) -> str | None:
        with patched((sessions, "on_every_rank", _heedless(place)))():
            return check_capture(seed)

    law = RunnerCheck.TOGETHER
    return Mutant(name=name, threads=threads, bug_class=BugClass.H, says=says, agreement=check, law=law)


def _mutant(name: str, *threads: str, says: str, agreed: Agree) -> Mutant:
    return Mutant(
        name=name, threads=threads, bug_class=BugClass.H, says=says, agreement=partial(check_agreement, agreed)
    )


MUTANTS: tuple[Mutant, ...] = (
    _captured(
        "each-rank-drops-its-own",
        "sglang#31195",
        says="a graph that does not fit on one rank is dropped there, and the others keep theirs",
        place=1,
    ),
    _captured(
        "error-stays-on-its-rank",
        says="an error in the capture of one rank does not end that of the others, which go on alone",
        place=0,
    ),
    _mutant(
        "each-rank-for-itself",
        "vllm#25906",
        says="each rank dispatches its own batch, so that they replay different graphs",
        agreed=each_for_itself,
    ),
    _mutant(
        "one-rank-skips-capture",
        "sglang#31195",
        says="a rank without graphs runs eager while the others replay",
        agreed=skipping_alone,
    ),
    _mutant(
        "idle-rank-submits-nothing",
        "vllm#25906",
        says="a rank without requests runs no forward while the others run one",
        agreed=idle_runs_nothing,
    ),
    _mutant(
        "drafter-agrees-with-the-target",
        "vllm#25906",
        says="the drafter is dispatched by what was gathered for the target",
        agreed=drafter_with_the_target,
    ),
    _mutant(
        "own-adapters-count",
        "vllm#25906",
        says="each rank chooses a graph by the adapters of its own batch",
        agreed=own_adapters,
    ),
)
