"""Requests of prompts that people wrote, and the tokenizer that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from capture_planner.analysis.trace import MAX_LENGTH, MAX_PROBLEMS, MAX_SECONDS, text_of
from capture_planner.codec.reading import unique_keys
from capture_planner.errors import InvalidDocument, InvalidValue, Problem, RunError
from capture_planner.records._base import raise_any
from capture_planner_runner.serving.workload.request import Request, outside

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
    if type(most) is not int or not 1 <= most <= MAX_LENGTH:
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
