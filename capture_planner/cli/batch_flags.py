"""One batch, as the flags of ``explain`` describe it."""

from __future__ import annotations

from typing import Any

import click

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.text import counted


def batch_of(role: str, num_reqs: int, num_tokens: int | None, query_len: int | None, **others: Any) -> Batch:
    """Return the batch that flags of ``explain`` describe; raises ``click.UsageError`` where they contradict."""
    if num_tokens is None:
        if query_len is None:
            raise click.UsageError("Give --num-tokens, or --query-len for a uniform batch.")
        num_tokens = num_reqs * query_len
    if query_len is not None and num_tokens != num_reqs * query_len:
        raise click.UsageError(
            f"{counted(num_reqs, 'request')} with {counted(query_len, 'token')} each have "
            f"{num_reqs * query_len} tokens, not {num_tokens}; omit --query-len if requests differ."
        )
    if (longest := others["max_query_len"]) is not None:
        _refuse_longest(num_reqs, num_tokens, query_len, longest, past_prompt=others["past_prompt"])
    return Batch(role=Role(role), num_reqs=num_reqs, num_tokens=num_tokens, query_len=query_len, **others)


def _refuse_longest(num_reqs: int, num_tokens: int, query_len: int | None, longest: int, *, past_prompt: bool) -> None:
    if query_len is not None or not past_prompt:
        raise click.UsageError("--max-query-len is for decodes that differ; omit it with --query-len or --prompt.")
    if not longest <= num_tokens <= num_reqs * longest:
        raise click.UsageError(
            f"{counted(num_reqs, 'request')} of at most {counted(longest, 'token')} have {longest} to "
            f"{num_reqs * longest} tokens, not {num_tokens}."
        )
