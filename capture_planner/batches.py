"""Batches as JSON lines: the questions and answers of ``explain --batches``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from capture_planner.dispatch import Dispatcher
from capture_planner.entry import Batch
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.modes import Role
from capture_planner.plan import Plan

_REQUIRED = ("role", "num_reqs", "num_tokens")
_FIELDS = (*_REQUIRED, "query_len", "past_prompt", "active_loras")


def read_batches(lines: Iterable[bytes], name: str, plan: Plan) -> Iterator[Batch]:
    """Return the batches of a file, in order; empty lines are left out.

    Raises ``InvalidDocument`` with every wrong line of the file, before any batch is answered.
    """
    problems: list[Problem] = []
    batches = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            batches.append(_batch(line, plan))
        except _Wrong as wrong:
            problems.append(Problem(file=name, line=number, path=wrong.path, message=wrong.message))
    if problems:
        raise InvalidDocument(problems)
    return iter(batches)


class _Wrong(Exception):
    """What is wrong with one line."""

    def __init__(self, message: str, *path: str) -> None:
        self.message, self.path = message, path
        super().__init__(message)


def _batch(line: bytes, plan: Plan) -> Batch:
    try:
        data = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise _Wrong(f"expected an object with {', '.join(_FIELDS)}")
    for name in data:
        if name not in _FIELDS:
            raise _Wrong(f"unknown key; known are {', '.join(_FIELDS)}", name)
    for name in _REQUIRED:
        if name not in data:
            raise _Wrong("is missing", name)
    planned = [role.role.value for role in plan.roles]
    if data["role"] not in planned:
        raise _Wrong(f"expected one of {', '.join(planned)}, got {data['role']!r}", "role")
    past_prompt = data.get("past_prompt", True)
    if not isinstance(past_prompt, bool):
        raise _Wrong(f"expected true or false, got {past_prompt!r}", "past_prompt")
    return Batch(
        role=Role(data["role"]),
        num_reqs=_count(data, "num_reqs"),
        num_tokens=_count(data, "num_tokens"),
        query_len=None if data.get("query_len") is None else _count(data, "query_len"),
        past_prompt=past_prompt,
        active_loras=_count(data, "active_loras") if "active_loras" in data else 0,
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys are each given once."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise _Wrong("is given twice", twice)
    return data


def _count(data: dict[str, Any], name: str) -> int:
    value = data[name]
    if type(value) is not int or value < 0:
        raise _Wrong(f"expected a whole number from 0, got {value!r}", name)
    return value


def answer_line(batch: Batch, dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the answer to one batch; where it runs eager, its own extents and the reason."""
    answer = dispatcher.answer(batch)
    shape = answer.entry or batch
    return {
        "mode": answer.mode.value,
        "num_tokens": shape.num_tokens,
        "num_reqs": shape.num_reqs,
        "query_len": shape.query_len,
        "active_loras": shape.active_loras,
        "reason": answer.reason,
    }
