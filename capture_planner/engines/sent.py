"""Which batches an engine can never be sent, and why: its dispatcher answers them all the same."""

from __future__ import annotations

from capture_planner.engines.emulation import Emulation
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import most_loras
from capture_planner.records.text import counted


def why_never_sent(batch: Batch, emulation: Emulation) -> str | None:
    """Say why the engine can never be sent such a batch; None where it can.

    More is asked than by ``admissible.is_admissible``, for which a ``query_len`` that does not fit means a
    mixed batch: here each request is said to have so many tokens.
    """
    limits, reqs, tokens = emulation.limits, batch.num_reqs, batch.num_tokens
    loras, width = min(most_loras(batch.role, emulation), reqs), batch.query_len
    if reqs < 1:
        return "a batch has at least one request"
    if reqs > limits.max_num_reqs:
        return f"{counted(reqs, 'request')}, and at most {limits.max_num_reqs} run together"
    if tokens < reqs:
        return f"{counted(reqs, 'request')} have at least {counted(reqs, 'token')}, not {tokens}"
    if tokens > limits.max_num_tokens and not (reqs == 1 and emulation.whole_prompts):
        return f"{counted(tokens, 'token')}, and a batch has at most {limits.max_num_tokens}"
    if width is not None and reqs * width != tokens:
        return f"{counted(reqs, 'request')} of {counted(width, 'token')} have {reqs * width}, not {tokens}"
    if batch.active_loras > loras:
        return f"{counted(batch.active_loras, 'active adapter')}, and such a batch has at most {loras}"
    if batch.role is not Role.DRAFT_DECODE:
        return None
    if batch.uniform_query_len is None:
        return "in a draft decode each request has as many tokens, and its prompt behind it"
    if all(reqs not in family.requests for family in emulation.families(batch.role)):
        return f"no draft decode follows a batch of {counted(reqs, 'request')}"
    return None
