"""Sampling: the numbers, choices by weight, and rejection sampling that has the target's distribution."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from capture_planner.errors import RunError  # noqa: E402
from capture_planner.records.model import DraftModel, Method, Speculative  # noqa: E402
from capture_planner_runner.capture.variants import without_graphs  # noqa: E402
from capture_planner_runner.execution.sampling import SPLIT_MIX, Draw, Sampler, choose  # noqa: E402
from capture_planner_runner.options import Options, refuse_sampling  # noqa: E402
from support.runner_conformance import sampled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS, MASK = st.integers(-(1 << 63), (1 << 63) - 1), (1 << 64) - 1
ROWS = 20_000
MANY = settings(max_examples=max(settings.default.max_examples, 40))
LOGITS = st.lists(st.floats(-2, 2), min_size=5, max_size=5)


def mixed(bits: int) -> int:
    """The finalizer of SplitMix64, in whole numbers."""
    for shift, factor in ((30, SPLIT_MIX[1]), (27, SPLIT_MIX[2])):
        bits = (bits ^ bits >> shift) * factor & MASK
    return bits ^ bits >> 31


@given(WORDS, st.integers(0, 1 << 40), WORDS, st.sampled_from(Draw))
def test_a_number_is_a_hash_of_seed_key_position_and_purpose(key: int, position: int, seed: int, purpose: Draw) -> None:
    """Of 64 bits without a sign, of which torch has none."""
    step, rows = SPLIT_MIX[0], (torch.tensor([key]), torch.tensor([position]))
    (number,) = Sampler(temperature=1.0, seed=seed).draws(*rows, purpose).tolist()
    bits = mixed((mixed((key ^ seed + purpose * step) & MASK) + position * step) & MASK)
    assert number == (bits >> 12) * 2.0**-52


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9), st.floats(0, 1, exclude_max=True))
def test_a_choice_is_where_the_number_falls(weights: list[float], number: float) -> None:
    """An index of no weight is never chosen, and behind all of them it is only where none has any."""
    (chosen,) = choose(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([number], dtype=torch.float64)
    ).tolist()
    sums = list(accumulate(weights))
    assert chosen == sum(total <= number * sums[-1] for total in sums)
    assert weights[chosen] > 0 if any(weights) else chosen == len(weights)


@given(LOGITS, st.floats(0.05, 1))
def test_top_p_keeps_the_likeliest_tokens_that_reach_it(logits: list[float], top_p: float) -> None:
    """With those that are as likely as the last of them."""
    whole, found = (
        Sampler(temperature=1.0, top_p=share).probabilities(torch.tensor([logits]))[0] for share in (1.0, top_p)
    )
    kept = sampled.nucleus(whole.tolist(), top_p)
    least = min(share for share, of_kept in zip(whole.tolist(), kept, strict=True) if of_kept)
    expected = torch.where(whole < least, 0.0, whole)
    assert torch.allclose(found, expected / expected.sum())


@MANY
@given(LOGITS, LOGITS, st.integers(0, 1 << 32), st.sampled_from((1.0, 0.6)))
def test_answers_are_distributed_as_the_target_says(
    target: list[float], drafter: list[float], seed: int, top_p: float
) -> None:
    """Whatever drafts are drawn from; as many are accepted as both distributions have in common."""
    sampler = Sampler(temperature=0.7, top_p=top_p, seed=seed, proposed=torch.zeros(ROWS + 2, 1, 5))
    keys, rows = torch.randint(1 << 62, (ROWS,), generator=torch.Generator().manual_seed(seed)), torch.arange(ROWS)
    positions = torch.full((ROWS,), 3)
    drafts = sampler.draft(torch.tensor([drafter]).expand(ROWS, -1), keys, positions, rows)
    logits = torch.tensor([target])
    answers = sampler.answers(logits.expand(ROWS, -1), keys, positions, drafts, rows)
    p, q = sampler.probabilities(logits)[0], sampler.proposed[0, 0]
    assert not sampled.unlikely(Counter(answers.tolist()), dict(enumerate(p.tolist())))
    assert not sampled.unlikely(Counter(drafts.tolist()), dict(enumerate(q.tolist())))
    common = float(torch.minimum(p, q).sum())
    agreed = Counter((answers == drafts).tolist())
    # A token of the residual is never the draft, so what agrees was accepted.
    assert not sampled.unlikely(agreed, {True: common, False: max(1 - common, 0.0)}) or common > 1 - 1e-6


def test_drafts_of_the_same_distribution_are_all_accepted() -> None:
    """Nothing is left then that another token could be drawn from."""
    sampler = Sampler(temperature=1.0, proposed=torch.zeros(102, 1, 5))
    logits, rows = torch.randn(100, 5, generator=torch.Generator().manual_seed(0)), torch.arange(100)
    drafts = sampler.draft(logits, rows, rows, rows)
    assert torch.equal(sampler.answers(logits, rows, rows, drafts, rows), drafts)


def test_where_nothing_is_left_drafts_are_accepted() -> None:
    """Rounding may leave the drafter with more than the target has of every token; each answer is a token then."""
    sampler = Sampler(temperature=1.0, proposed=torch.zeros(102, 1, 5))
    logits, rows = torch.randn(100, 5, generator=torch.Generator().manual_seed(0)), torch.arange(100)
    assert sampler.proposed is not None
    sampler.proposed[:100, 0] = 2 * torch.softmax(logits, dim=-1)
    drafts = rows % 5
    assert torch.equal(sampler.answers(logits, rows, rows, drafts, rows), drafts)


DRAFTERS = {
    "none": None,
    "the target": Speculative(method=Method.DRAFT_MODEL, num_tokens=1, model=DraftModel(num_layers=1)),
    "chain": Speculative(method=Method.EAGLE, num_tokens=3),
    "parallel": Speculative(method=Method.EAGLE3, num_tokens=2, parallel_drafting=True),
    "modules": Speculative(method=Method.MTP, num_tokens=2, model=DraftModel(num_layers=2)),
}


@pytest.mark.parametrize("speculative", [*DRAFTERS.values()][1:], ids=[*DRAFTERS][1:])
def test_a_draft_is_verified_with_what_it_was_drawn_from(speculative: Speculative) -> None:
    """By its token and by its distribution, whatever kind drafts."""
    model, plan = sampled.target(), without_graphs(sampled.plan_of(speculative))
    drafter = sampled.drafter_of(plan, model, is_good=False)
    with sampled.notes_of_drafts() as verified:
        sampled.serve(plan, model, drafter, [sampled.requests_for(9)], Options(temperature=0.3))
    assert len({key for key, _ in verified}) == 9


@pytest.mark.parametrize(("name", "speculative"), [*DRAFTERS.items()][:3], ids=[*DRAFTERS][:3])
def test_served_sequences_are_distributed_as_the_target_says(name: str, speculative: Speculative | None) -> None:
    """From graphs, with a drafter that is the target, and with those that know nothing."""
    model, plan = sampled.target(), sampled.plan_of(speculative)
    options = Options(temperature=sampled.TEMPERATURE, top_p=0.95 if name == "the target" else 1.0, seed=7)
    drafter = sampled.drafter_of(plan, model, is_good=name == "the target")
    tokens = sampled.serve(plan, model, drafter, [sampled.requests_for(512)], options)
    assert sampled.unlikely(Counter(tokens.values()), sampled.exact(model, options)) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(temperature=0.001), "temperature is 0.001, expected 0 or 0.01 to 100"),
        (Options(temperature=-1.0), "temperature is -1, expected 0 or 0.01 to 100"),
        (Options(temperature=float("nan")), "temperature is nan, expected 0 or 0.01 to 100"),
        (Options(temperature=1.0, top_p=0.0), "top_p is 0, expected more than 0"),
        (Options(temperature=1.0, top_p=1.5), "top_p is 1.5, expected more than 0, and at most 1"),
    ],
)
def test_what_nothing_can_be_sampled_by_is_refused(options: Options, says: str) -> None:
    """With the bounds; greedy is temperature 0."""
    with pytest.raises(RunError, match=says):
        refuse_sampling(options)
    refuse_sampling(Options())
