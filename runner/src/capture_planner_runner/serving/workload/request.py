"""A request, and what makes one admissible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import attrs

from capture_planner.analysis.trace import MAX_LENGTH
from capture_planner.errors import Problem, RunError
from capture_planner.records._base import raise_any
from capture_planner.records.text import counted

MAX_REFUSALS = 10
"""Lines of a refusal, before the count of the rest."""


def outside(name: str, value: float, low: float, high: float = math.inf) -> Iterator[Problem]:
    """Yield a problem for a value that is not within its bounds, both included; NaN never is."""
    if not low <= value <= high:
        bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
        yield Problem(path=(name,), message=f"expected {bounds}, got {value}")


@attrs.frozen(kw_only=True)
class Request:
    """One request. Raises ``InvalidValue`` for a time that is none, or for no output tokens."""

    name: str
    arrival: float
    """Seconds from the start of the run."""
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    """Token ids that end the output; empty: its length alone does."""
    adapter: int = 0
    """Which of the run's LoRA adapters it has, counted from 1; 0: none."""

    def __attrs_post_init__(self) -> None:
        problems = list(outside("max_new_tokens", self.max_new_tokens, 1, MAX_LENGTH))
        if not 0 <= self.arrival < math.inf:
            problems.append(Problem(path=("arrival",), message=f"expected seconds from 0, got {self.arrival}"))
        raise_any(problems)

    def cut(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return what of these output tokens is asked for: not past the length, nor past a stop."""
        tokens = tokens[: self.max_new_tokens]
        stops = (index for index, token in enumerate(tokens) if token in self.stop)
        return tokens[: next(stops, len(tokens)) + 1]

    def lengthened(self, more: int, longest: int) -> Request:
        """Return the request with so many more output tokens, as far as ``longest`` allows, and with no stop."""
        most = min(self.max_new_tokens + more, longest - len(self.prompt))
        return attrs.evolve(self, max_new_tokens=most, stop=frozenset())

    def is_answered(self, tokens: tuple[int, ...], *, is_cut_off: bool) -> bool:
        """Say whether these are all output tokens that are asked for, and no more; of one that was cut off, so far."""
        is_ended = len(tokens) == self.max_new_tokens or not self.stop.isdisjoint(tokens[-1:])
        return self.cut(tokens) == tokens and (is_cut_off or is_ended)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest output together."""
        return len(self.prompt) + self.max_new_tokens


def admit(requests: Iterable[Request], *, max_model_len: int, vocab_size: int, clip: bool) -> tuple[Request, ...]:
    """Return requests that a model can serve, in the order given.

    Each has a prompt; its tokens, and those that stop it, are of the vocabulary; prompt and output fit
    into ``max_model_len`` together. With ``clip``, those that do not fit are cut: prompt and output
    keep their shares of the length, at least one token each, and a prompt keeps its last tokens.

    Raises ``RunError`` for any other request, and for none at all: ten lines, and a count of the rest.
    """
    requests = tuple(requests)
    if not requests:
        raise RunError("there are no requests to serve")
    longest = math.inf if clip and max_model_len >= 2 else max_model_len
    wrong = [text for request in requests for text in _refusals(request, longest, vocab_size)]
    if wrong:
        lines = wrong[:MAX_REFUSALS]
        if rest := len(wrong) - len(lines):
            lines.append(f"and {rest} more")
        if any(request.length > longest for request in requests):
            remedy = "name a larger max_model_len in the spec"
            lines.append(remedy if clip else f"{remedy}, or shorten requests with --clip")
        raise RunError("\n".join(lines))
    return tuple(_clipped(request, max_model_len) for request in requests)


def _refusals(request: Request, longest: float, vocab_size: int) -> Iterator[str]:
    if not request.prompt:
        yield f"{request.name}: the prompt is empty"
    tokens = itertools.chain(request.prompt, request.stop)
    foreign = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if foreign is not None:
        yield (
            f"{request.name}: token {foreign} is not in the model's vocabulary of {vocab_size}; "
            "take the tokenizer of the model"
        )
    if request.length > longest:
        prompt = counted(len(request.prompt), "prompt token")
        output = counted(request.max_new_tokens, "output token")
        yield f"{request.name}: {prompt} and {output} are more than max_model_len, {longest}"


def _clipped(request: Request, max_model_len: int) -> Request:
    """Cut a request with a prompt to a length of at least 2; one that fits stays as it is."""
    if request.length <= max_model_len:
        return request
    output = max(1, max_model_len * request.max_new_tokens // request.length)
    prompt = request.prompt[output - max_model_len :]
    return attrs.evolve(request, prompt=prompt, max_new_tokens=output)
