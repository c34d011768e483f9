"""What vllm_ranks.py checks of the workers of one vLLM: it holds for equal workers, and names what differs."""

import functools
from pathlib import Path

import attrs
import pytest
from _rank_checks import agreement_findings, answer_findings, capture_findings, step_findings

from capture_planner import codec
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.observation import BatchCount, ObservedVector
from support.observing import observation_of

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "tiny-mtp-cpu.cpu.yaml")


@functools.cache
def captured():
    """An observation of the plan, before any step."""
    return observation_of(PLAN)


def worker(rank, reqs=3, tokens=12):
    """A worker that captured the plan, and ran one decode as planned."""
    seen = replace(captured(), rank=rank, world_size=2, idle_steps=rank)
    (target, *others) = seen.roles
    entry = Dispatcher(PLAN).dispatch(Batch.decode(Role.TARGET, reqs, 4)).entry
    graph = [each.entry for each in target.graphs].index(entry)
    count = BatchCount(num_reqs=reqs, num_tokens=4 * reqs, query_len=4, steps=5, graph=graph)
    vector = ObservedVector(
        num_reqs=(3, 2),
        num_tokens=(tokens, 8),
        query_len=(4, 4),
        past_prompt=(True, True),
        modes=(GraphMode.FULL, GraphMode.FULL),
        steps=5,
        graph=graph,
    )
    return replace(seen, roles=(replace(target, batches=(count,), vectors=(vector,)), *others))


def failed(workers):
    """The findings that do not hold."""
    found = [*capture_findings(PLAN, workers), *answer_findings(PLAN, workers)]
    return [text for text, holds in (*found, *step_findings(PLAN, workers), *agreement_findings(workers)) if not holds]


def changed(seen, **values):
    """A worker whose target is another."""
    return replace(seen, roles=(replace(seen.roles[0], **values), *seen.roles[1:]))


def test_equal_workers_hold():
    """With the plan's graphs, and the same steps."""
    assert failed([worker(0), worker(1)]) == []


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda seen: replace(seen, plan=None), "on 2 workers"),
        (lambda seen: changed(seen, graphs=seen.roles[0].graphs[::-1]), "same in order"),
        (lambda seen: changed(seen, answers=()), "decodes answered"),
        (lambda seen: worker(1, reqs=4), "same steps"),
        (
            lambda seen: changed(
                seen, batches=(attrs.evolve(seen.roles[0].batches[0], graph=None, reason=Reason.UNKNOWN),)
            ),
            "0 of 5 passes",
        ),
        (
            lambda seen: changed(seen, vectors=(replace(seen.roles[0].vectors[0], graph=None, reason=Reason.RANK),)),
            "ranks differ",
        ),
    ],
    ids=["other plan", "other order", "other answers", "other steps", "eager step", "no agreement"],
)
def test_worker_that_differs_is_found(other, name):
    """Each finding fails for what it is about."""
    assert any(name in text for text in failed([worker(0), other(worker(1))]))
