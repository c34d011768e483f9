"""Mutants of sampling: numbers that come again or are shared, and rejection sampling that is not quite so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner_runner.execution.sampling import Draw, Sampler
from gallery.core import Mutant
from gallery.patching import Patch, patched
from support.runner_conformance.sampled import check_sampling

Draws = Callable[[Sampler, torch.Tensor, torch.Tensor, Draw], torch.Tensor]
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _of_the_capture(original: Draws) -> Draws:
    """Draw at the position of a warm-up."""
    return lambda sampler, keys, positions, purpose: original(sampler, keys, torch.zeros_like(positions), purpose)


def _in_order(original: Draws) -> Draws:
    """Hand numbers out by row, as a generator does."""
    return lambda sampler, keys, positions, purpose: original(
        sampler, torch.arange(len(keys), device=keys.device), positions, purpose
    )


def _shared(original: Draws) -> Draws:
    """Draw all drafts by one key."""
    return lambda sampler, keys, positions, purpose: original(
        sampler, torch.zeros_like(keys) if purpose is Draw.DRAFT else keys, positions, purpose
    )


def _raw(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep the drafter's probabilities at temperature 1."""

    def draft(
        sampler: Sampler, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        tokens = original(sampler, logits, keys, positions, rows)
        assert sampler.proposed is not None
        sampler.proposed.flatten(0, 1).index_copy_(0, rows, torch.softmax(logits.float(), dim=-1))
        return tokens

    return draft


def _answers(accept: Callable[[Any, Any, Any], torch.Tensor], left: Callable[[Any, Any], torch.Tensor]) -> Any:
    """Make rejection sampling that accepts, and draws from what is left, by these rules of p and q."""

    def made(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def answers(
            sampler: Sampler,
            logits: torch.Tensor,
            keys: torch.Tensor,
            positions: torch.Tensor,
            drafts: torch.Tensor | None = None,
            rows: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if drafts is None or sampler.proposed is None:
                return original(sampler, logits, keys, positions)
            p, q = sampler.probabilities(logits), sampler.proposed.flatten(0, 1)[rows]
            at = drafts.unsqueeze(1)
            numbers = sampler.draws(keys, positions, Draw.ACCEPT)
            accepted = accept(numbers, p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]) & (q.sum(1) > 0)
            # The number is not scaled to the sum of what is left: past it, the last token is chosen.
            sums = left(p, q).cumsum(-1, dtype=torch.float64)
            chosen = (sums <= sampler.draws(keys, positions, Draw.TOKEN).unsqueeze(1)).sum(-1)
            return torch.where(accepted, drafts, chosen.clamp(max=p.shape[1] - 1))

        return answers

    return made


def _rejecting(numbers: Any, p: Any, q: Any) -> Any:
    return numbers * q < p


def _residual(p: Any, q: Any) -> Any:
    return (p - q).clamp(min=0)


def _normed(p: Any, q: Any) -> Any:
    left = _residual(p, q)
    return left / left.sum(1, keepdim=True)


def _mutant(name: str, threads: tuple[str, ...], bug_class: BugClass, says: str, patch: Patch) -> Mutant:
    def check(seed: int) -> str | None:
        with patch():
            return check_sampling(seed)

    return Mutant(name=name, threads=threads, bug_class=bug_class, says=says, sampling=check)


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "numbers-of-the-capture",
        ("NVIDIA/Megatron-LM#5697",),
        BugClass.F,
        "The state of the generator stays where the capture left it, and each replay draws the same numbers",
        patched((Sampler, "draws", _of_the_capture)),
    ),
    _mutant(
        "padding-draws-numbers",
        ("vllm#6038",),
        BugClass.D,
        "Numbers go to the rows of a batch in order, padding included, so that tokens depend on the batch",
        patched((Sampler, "draws", _in_order)),
    ),
    _mutant(
        "drafts-share-a-seed",
        ("TRT-LLM#19487",),
        BugClass.S,
        "All requests draw their drafts by one seed, and those with the same prompt get the same tokens",
        patched((Sampler, "draws", _shared)),
    ),
    _mutant(
        "probabilities-not-drafted-from",
        ("huggingface/transformers#47932",),
        BugClass.S,
        "Drafts are verified by other probabilities of the drafter than they were drawn from",
        patched((Sampler, "draft", _raw)),
    ),
    _mutant(
        "accepted-upside-down",
        (),
        BugClass.S,
        "A draft is accepted with the drafter's probability by the target's, q/p, instead of p/q",
        patched((Sampler, "answers", _answers(lambda numbers, p, q: numbers * p < q, _normed))),
    ),
    _mutant(
        "residual-not-normalised",
        (),
        BugClass.S,
        "After a rejected draft, a number from 0 to 1 chooses from what is left, which adds up to less",
        patched((Sampler, "answers", _answers(_rejecting, _residual))),
    ),
)
