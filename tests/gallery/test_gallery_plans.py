"""Mutants of plans and ranks: each has its one bug, and its healthy twin has nothing."""

import pytest

from capture_planner.analysis.data_parallel import agree
from capture_planner.analysis.lint import RULES, Severity, lint
from gallery import plans as planned
from gallery import ranks
from support.mutants import searched
from support.runner_conformance.rank_agreement import check_agreement

FOUND_BY = {
    "list-ends-below-the-ceiling": "CP002",
    "ceiling-left-out": "CP001",
    "captured-to-32": "CP002",
    "decode-sizes-off-the-multiple": "CP010",
    "edited-beyond-the-limits": "CP015",
    "draft-query-below-one": "CP011",
    "every-tier-at-every-size": "CP020",
    "prefill-sizes-far-apart": "CP023",
    "cheap-padding-refused": "CP051",
    "piecewise-draft-decode": "CP030",
    "drafter-decides-for-the-target": "CP033",
    "drafter-decides-in-silence": "CP032",
    "doubling-sizes": "CP045",
    "six-sizes-evenly-spread": "CP045",
    "one-size-of-mixed-batches": "CP049",
    "widened-default": "CP043",
    "memory-from-two-samples": "CP040",
    "capture-time-not-counted": "CP040",
    "graphs-for-each-adapter-count": "CP042",
    "platform-limit-forgotten": "CP041",
    "state-pool-of-the-memory": "CP046",
    "state-pool-without-padding": "CP046",
    "captured-never-dispatched": "CP037",
    "requests-are-tokens": "CP010",
}
MUTANTS = pytest.mark.parametrize("mutant", planned.MUTANTS, ids=lambda mutant: mutant.name)


def wrong(plan):
    """The codes of all errors and warnings."""
    return {found.rule.code for found in lint(plan) if found.rule.severity is not Severity.NOTE}


def test_every_mutant_of_a_plan_is_here():
    """With the rule that must find it."""
    assert set(FOUND_BY) == {mutant.name for mutant in planned.MUTANTS} == set(planned.HEALTHY)


@MUTANTS
def test_a_plan_is_found_by_its_rule_and_its_healthy_twin_passes(mutant):
    """The bug is the difference between the two, and the rule is about that."""
    assert FOUND_BY[mutant.name] in wrong(mutant.plan())
    assert not wrong(planned.HEALTHY[mutant.name]())


@MUTANTS
def test_a_plan_is_made_anew_and_the_planner_is_left_as_it_was(mutant):
    """What a mutant replaces is put back: asked again, both answer the same."""
    healthy = planned.HEALTHY[mutant.name]()
    assert mutant.plan() == mutant.plan() != healthy
    assert planned.HEALTHY[mutant.name]() == healthy


@MUTANTS
def test_a_rule_that_finds_a_plan_knows_its_class(mutant):
    """The rule cites a thread of the mutant, or is of its class: the bug is found for what it is."""
    rule = RULES[FOUND_BY[mutant.name]]
    assert set(rule.threads) & set(mutant.threads) or rule.bug_class is mutant.bug_class


def test_ranks_as_they_are_agree():
    """Nothing is found in what is healthy."""
    assert check_agreement(agree, 1, vectors=100) is None


@searched(ranks.MUTANTS)
def test_ranks_that_go_apart_are_found_with_any_seed(mutant):
    """Small, with two ranks or three; and the same seed finds the same."""
    says = mutant.agreement(1)
    assert says is not None
    assert says.count("|") <= 2
    assert mutant.agreement(1) == says
