"""Check sampling of the runner, on a model of four tokens.

A request has the same tokens from graphs in a batch as eager and alone. Over many requests with one prompt, sequences
come as often as the target says. Sequences are counted, not tokens: so numbers that two positions or two requests share
show, too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

import torch

from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_conformance.stage import under_test
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.execution.sampling import Sampler
from capture_planner_runner.models.drafters import DraftLanguageModel, choose_drafter
from capture_planner_runner.models.huggingface import HuggingFaceModel, load_target
from capture_planner_runner.models.protocols import Drafter
from capture_planner_runner.numerics.dense import DenseForward
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

VOCABULARY = 4
MODEL = Model(
    name="tiny", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, vocab_size=VOCABULARY,
    max_model_len=16, dtype=DataType.FLOAT64,
)  # fmt: skip
PLACES, LENGTH = 32, 3
PROMPT = (1, 3, 2)
TEMPERATURE = 0.03
"""Low, so that random weights have likely and unlikely tokens."""
Outcome = TypeVar("Outcome")
DEVIATIONS = 9.0
"""Standard deviations of chi-square that are allowed: none comes this far by chance."""


def target() -> HuggingFaceModel:
    """Return the model, with random weights."""
    return load_target(None, MODEL, device=torch.device("cpu"), dtype=torch.float64, seed=1)


def plan_of(speculative: Speculative | None) -> Plan:
    """Return a plan whose graphs leave much padding."""
    subject = under_test("reference")
    tokens = PLACES * (2 + (0 if speculative is None else speculative.num_tokens + speculative.extra_slots))
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=PLACES, max_num_tokens=tokens),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend=subject.backend,
        speculative=speculative,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(2, PLACES), num_tokens=(16, tokens)),
    )
    return make_plan(spec, subject.environment, subject.registry)


def drafter_of(plan: Plan, model: HuggingFaceModel, *, is_good: bool) -> Drafter | None:
    """Return a drafter that knows nothing, or the target itself; None of a plan without one."""
    if plan.speculative is None:
        return None
    return (
        DraftLanguageModel(model)
        if is_good
        else choose_drafter("random", plan.speculative, model, num_states=PLACES, length=MODEL.max_model_len + 9)
    )


def requests_for(count: int) -> list[Request]:
    """Return requests with one prompt, all at once."""
    return [Request(name=f"r{n}", arrival=0.0, prompt=PROMPT, max_new_tokens=LENGTH) for n in range(count)]


def serve(
    plan: Plan, model: HuggingFaceModel, drafter: Drafter | None, batches: Iterable[Sequence[Request]], options: Options
) -> dict[str, tuple[int, ...]]:
    """Serve batches of requests one after the other, and return their tokens by name."""
    subject = under_test("reference")
    pages = PageFormat(page_size=4, num_pages=1 + PLACES * 5)
    with Runner(plan, model, drafter, subject.registry, subject.grapher, pages=pages, options=options) as runner:
        runner.capture()
        return {done.name: done.tokens for batch in batches for done in runner.serve(batch)}


@torch.no_grad()
def exact(model: HuggingFaceModel, options: Options) -> dict[tuple[int, ...], float]:
    """Return the probability of each output, token by token of a dense forward."""
    outputs = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    sequences = tuple(PROMPT + output[:-1] for output in outputs)
    dense = DenseForward(model=model, sequences=sequences, device=torch.device("cpu"), kv_dtype=torch.float64)
    logits = model.logits(dense.hidden()).view(len(outputs), -1, VOCABULARY)[:, len(PROMPT) - 1 :]
    found = {}
    for output, rows in zip(outputs, torch.softmax(logits / options.temperature, dim=-1).tolist(), strict=True):
        shares = (nucleus(row, options.top_p)[token] for row, token in zip(rows, output, strict=True))
        found[output] = math.prod(shares)
    return found


def nucleus(probabilities: Sequence[float], top_p: float) -> list[float]:
    """Return the probabilities of the likeliest tokens that reach ``top_p`` together; of the others 0."""
    kept, total = [0.0] * len(probabilities), 0.0
    for token in sorted(range(len(probabilities)), key=lambda token: -probabilities[token]):
        if total >= top_p:
            break
        kept[token] = probabilities[token]
        total += probabilities[token]
    return [share / total for share in kept]


def unlikely(counts: Mapping[Outcome, int], shares: Mapping[Outcome, float]) -> str | None:
    """Return what is wrong with how often outcomes came, by chi-square; None where it may be chance."""
    total = sum(counts.values())
    if never := [outcome for outcome, count in counts.items() if count and not shares.get(outcome)]:
        return f"{never[0]} came {counts[never[0]]} times, and cannot"
    # Rare outcomes are counted as one, so that each count is about normal.
    cells = [(counts.get(outcome, 0), share * total) for outcome, share in shares.items() if share]
    common = [(count, expected) for count, expected in cells if expected >= 8]
    rest = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 8), strict=True)]
    if rest and rest[1] >= 8:
        common.append((int(rest[0]), rest[1]))
    value = sum((count - expected) ** 2 / expected for count, expected in common)
    freedom = max(len(common) - 1, 1)
    if value <= freedom + DEVIATIONS * math.sqrt(2 * freedom):
        return None
    return f"chi-square is {value:.1f} with {freedom} degrees of freedom, over {total:,} outcomes"


@contextmanager
def notes_of_drafts() -> Iterator[list[tuple[int, int]]]:
    """Note the key and the position of each draft that is verified, in eager runs of this context.

    It is asserted that each is verified with what it was drawn from.
    """
    drawn: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    verified: list[tuple[int, int]] = []
    draft, answers = Sampler.draft, Sampler.answers

    def noted_draft(sampler: Sampler, *given: torch.Tensor) -> torch.Tensor:
        tokens, (_, keys, positions, rows) = draft(sampler, *given), given
        assert sampler.proposed is not None
        weights = sampler.proposed.flatten(0, 1)[rows].clone()
        drawn.update(zip(_places(keys, positions), zip(tokens.tolist(), weights, strict=True), strict=True))
        return tokens

    def noted_answers(sampler: Sampler, *given: torch.Tensor) -> torch.Tensor:
        if sampler.proposed is not None:
            _, keys, positions, drafts, rows = given
            proposed, no_draft = sampler.proposed.flatten(0, 1), len(sampler.proposed[:-1].flatten(0, 1))
            assert not proposed[no_draft:].any()
            for place, token, row in zip(_places(keys, positions), drafts.tolist(), rows.tolist(), strict=True):
                if row < no_draft:
                    assert token == drawn[place][0]
                    assert torch.equal(proposed[row], drawn[place][1])
                    verified.append(place)
        return answers(sampler, *given)

    with mock.patch.object(Sampler, "draft", noted_draft), mock.patch.object(Sampler, "answers", noted_answers):
        yield verified


def _places(keys: torch.Tensor, positions: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(keys.tolist(), positions.tolist(), strict=True))


def check_sampling(seed: int, count: int = 768) -> str | None:
    """Serve so many requests with a drafter that knows nothing; return what is wrong with their tokens, or None."""
    plan, model = plan_of(Speculative(method=Method.EAGLE, num_tokens=2)), target()
    drafter, options = drafter_of(plan, model, is_good=False), Options(temperature=TEMPERATURE, seed=seed)
    requests = requests_for(count)
    tokens = serve(plan, model, drafter, [requests], options)
    alone = serve(without_graphs(plan), model, drafter, [[request] for request in requests[:: count // 8]], options)
    for name, expected in alone.items():
        if tokens[name] != expected:
            return f"{name} has the tokens {tokens[name]} from graphs in a batch, and {expected} eager and alone"
    return unlikely(Counter(tokens.values()), exact(model, options))
