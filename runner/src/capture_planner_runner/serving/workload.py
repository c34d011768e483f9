"""Requests: generated, read from a trace of lengths or from prompts, and admitted or refused.

Whatever the source, requests come in the order of arrival, and a seed gives the same requests each
time (with the same numpy: what its distributions draw may change between versions). No torch here;
a tokenizer is imported when prompts are read, and not before.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from capture_planner.analysis.trace import MAX_LENGTH, MAX_PROBLEMS, MAX_SECONDS, read_trace, text_of
from capture_planner.codec.reading import unique_keys
from capture_planner.errors import InvalidDocument, InvalidValue, Problem, RunError
from capture_planner.records._base import raise_any
from capture_planner.records.text import counted

MAX_REFUSALS = 10
"""Lines of a refusal, before the count of the rest."""


def outside(name: str, value: float, low: float, high: float = math.inf) -> Iterator[Problem]:
    """Yield a problem for a value that is not within its bounds, both included; NaN never is."""
    # Not `value < low or value > high`: NaN compares false with both, and would pass.
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
        return tokens[: next(stops, len(tokens)) + 1]  # the stop token is part of the output

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
    # The shortest request has a token of each kind, so a model of one token admits none, clipped or not.
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
    # From the end. `output` is less than max_model_len, as the prompt has a token: never `[0:]`, the whole prompt.
    prompt = request.prompt[output - max_model_len :]
    return attrs.evolve(request, prompt=prompt, max_new_tokens=output)


MAX_TOKENS = 1 << 28
"""Most prompt tokens of a workload; they take 2 GiB."""


def generated(
    count: int,
    *,
    seed: int,
    rate: float | None,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    vocab_size: int,
) -> tuple[Request, ...]:
    """Return ``count`` requests that arrive as a Poisson process.

    ``rate`` is in requests per second; None or infinity: all arrive at 0. Lengths are uniform between
    the two ends of a range, both included. A smaller ``count`` gives the first requests of a larger
    one, and ``rate`` changes arrivals only. Raises ``InvalidValue`` for numbers that are no workload.
    """
    rate = math.inf if rate is None else rate
    problems = [
        *outside("count", count, 0, MAX_LENGTH),
        *outside("seed", seed, 0),
        *outside("rate", rate, 1e-6),
        *outside("vocab_size", vocab_size, 1, MAX_LENGTH),
    ]
    for name, (low, high) in {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}.items():
        if not 1 <= low <= high <= MAX_LENGTH:
            message = f"expected a range within 1 to {MAX_LENGTH}, got {low} to {high}"
            problems.append(Problem(path=(name,), message=message))
    if not problems and (most := count * prompt_tokens[1]) > MAX_TOKENS:
        message = f"the prompts may have {most} tokens in all, more than {MAX_TOKENS}"
        problems.append(Problem(path=("count",), message=message, remedy="ask for fewer requests"))
    raise_any(problems)
    rng = np.random.Generator(np.random.PCG64(seed))
    tokens = _tokens(rng, vocab_size)
    requests = []
    now = 0.0
    # All draws of a request follow each other: the first requests are the same whatever the count.
    for index in range(count):
        # The same draw at any rate, so that another rate moves arrivals and nothing else; an infinite one gives 0.
        now += rng.standard_exponential() / rate
        length = int(rng.integers(*prompt_tokens, endpoint=True))
        most = int(rng.integers(*output_tokens, endpoint=True))
        requests.append(Request(name=f"request-{index}", arrival=now, max_new_tokens=most, prompt=tokens(length)))
    return tuple(requests)


def with_adapters(requests: Sequence[Request], count: int, *, seed: int) -> tuple[Request, ...]:
    """Return the requests, each with one of ``count`` LoRA adapters or with none, all as often."""
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(count, size=len(requests), endpoint=True)
    return tuple(attrs.evolve(each, adapter=int(adapter)) for each, adapter in zip(requests, drawn, strict=True))


def from_trace(
    path: str | Path, *, vocab_size: int, seed: int, limit: int | None = None, speed: float = 1.0
) -> tuple[Request, ...]:
    """Return the requests of a CSV trace, with random tokens of the lengths that it gives.

    The header names three columns, in any case and order; others are ignored. They are the arrival
    (``t``, ``timestamp``, ``arrival``, ``arrival_time``), the tokens of the prompt (``in_len``,
    ``ContextTokens``, ``input_tokens``, ``input_length``, ``prompt_tokens``) and of the output
    (``out_len``, ``GeneratedTokens``, ``output_tokens``, ``output_length``). Arrivals are seconds from
    the start, or dates with a time of day, which count from the earliest. Rows need no order.

    ``limit`` keeps the first to arrive. ``speed`` divides arrivals; infinity: all arrive at 0. A
    request is named after its file and line. Raises ``InvalidDocument`` with every problem of the file
    (up to 100), and ``InvalidValue`` for the other arguments.
    """
    problems = [
        *outside("vocab_size", vocab_size, 1, MAX_LENGTH),
        *outside("seed", seed, 0),
        *outside("limit", 1 if limit is None else limit, 1),
        *outside("speed", speed, 1e-6),
    ]
    raise_any(problems)
    # The sort is stable: rows of the same second stay in the order of the file.
    rows = sorted(read_trace(path), key=lambda row: row.arrival)[:limit]
    if (total := sum(row.prompt for row in rows)) > MAX_TOKENS:
        message = f"the prompts have {total} tokens in all, more than {MAX_TOKENS}"
        raise InvalidDocument([Problem(file=str(path), message=message, remedy="limit the requests")])
    tokens = _tokens(np.random.Generator(np.random.PCG64(seed)), vocab_size)
    names = (f"{Path(path).name}:{row.line}" for row in rows)
    return tuple(
        Request(name=name, arrival=row.arrival / speed, prompt=tokens(row.prompt), max_new_tokens=row.output)
        for name, row in zip(names, rows, strict=True)
    )


def _tokens(rng: np.random.Generator, vocab_size: int) -> Callable[[int], tuple[int, ...]]:
    # One object for each id, shared by all prompts: 8 bytes a token, where traces have many millions.
    ids = np.arange(vocab_size).astype(object)
    return lambda length: tuple(ids[rng.integers(vocab_size, size=length)])


Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, without special tokens."""


def from_prompts(
    path: str | Path, tokenizer_folder: str | Path, *, max_new_tokens: int
) -> tuple[tuple[Request, ...], Decode]:
    """Return the requests of a file of prompts, and what turns their tokens back into text.

    A ``.jsonl`` file holds an object on each line: ``{"prompt": text, "max_new_tokens": int,
    "arrival": seconds}``, of which the last two may be left out. Any other file holds a prompt on each
    line, and all arrive at 0. Blank lines are left out. A request is named after its file and line.

    The tokenizer is what transformers' ``AutoTokenizer`` reads from a local folder, without running
    code that lies there. Its end-of-sequence token, if it has one, stops each request.

    Raises ``InvalidDocument`` with every problem of the file (up to 100), ``InvalidValue`` for
    ``max_new_tokens``, and ``RunError`` where the folder holds no tokenizer.
    """
    raise_any(outside("max_new_tokens", max_new_tokens, 1, MAX_LENGTH))
    prompts = _read(path, max_new_tokens)
    tokenizer = _tokenizer(tokenizer_folder)
    stop = frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)})
    requests = tuple(
        Request(
            name=f"{Path(path).name}:{prompt.line}",
            arrival=prompt.arrival,
            # Not verbose: transformers warns of its own length limit, and `admit` has the model's.
            prompt=tuple(tokenizer.encode(prompt.text, verbose=False)),
            max_new_tokens=prompt.max_new_tokens,
            stop=stop,
        )
        for prompt in sorted(prompts, key=lambda prompt: prompt.arrival)
    )

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return requests, decode


@attrs.frozen
class _Prompt:
    text: str
    max_new_tokens: int
    arrival: float
    line: int


def _wrong(message: str, *path: str, column: int = 1) -> InvalidValue:
    """Return the error of one line: a message, the key, and the column."""
    return InvalidValue([Problem(path=path, message=message, column=column)])


def _read(path: str | Path, max_new_tokens: int) -> list[_Prompt]:
    file, as_json = str(path), Path(path).suffix.lower() == ".jsonl"
    problems: list[Problem] = []
    prompts = []
    # Not `splitlines`, which also breaks at form feeds and U+2028; a prompt may contain them.
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = _object(line) if as_json else {"prompt": line}
            prompts.append(_prompt(data, max_new_tokens, number))
        except InvalidValue as error:
            (wrong,) = error.problems
            problems.append(attrs.evolve(wrong, file=file, line=number, column=wrong.column or 1))
            if len(problems) == MAX_PROBLEMS:
                break
    if not prompts and not problems:
        problems.append(Problem(file=file, message="no prompts", remedy="write one on each line"))
    if problems:
        raise InvalidDocument(problems)
    return prompts


def _object(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise _wrong(f"not JSON: {error.msg}", column=error.colno) from None
    # JSON of thousands of brackets, or an integer of more digits than `int` converts (4,300).
    except (ValueError, RecursionError) as error:
        raise _wrong(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise _wrong(f"expected an object with {', '.join(_KEYS)}")
    return data


_KEYS = ("prompt", "max_new_tokens", "arrival")


def _prompt(data: dict[str, Any], max_new_tokens: int, line: int) -> _Prompt:
    for key in data:
        if key not in _KEYS:
            raise _wrong(f"unknown key; known are {', '.join(_KEYS)}", key)
    text = data.get("prompt")
    if not isinstance(text, str):
        raise _wrong("expected text" if "prompt" in data else "is missing", "prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong("half of a surrogate pair, which is not text", "prompt") from None
    most = data.get("max_new_tokens", max_new_tokens)
    if type(most) is not int or not 1 <= most <= MAX_LENGTH:  # not isinstance: `true` is an int
        raise _wrong(f"expected a whole number from 1 to {MAX_LENGTH}", "max_new_tokens")
    arrival = data.get("arrival", 0.0)
    if type(arrival) not in (int, float) or not 0 <= arrival <= MAX_SECONDS:
        raise _wrong(f"expected seconds from 0 to {MAX_SECONDS}", "arrival")
    return _Prompt(text, most, float(arrival), line)


def _tokenizer(folder: str | Path) -> Any:
    if not Path(folder).is_dir():  # transformers would take any other text for a name on the hub
        raise RunError(f"{folder}: no such folder; name one that holds a tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RunError(f"prompts need the transformers package: {error}; install it") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever its readers raise for a file that is not what they expect
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise RunError(f"{folder}: holds no tokenizer that transformers can read: {said}") from error
