"""Which batches an engine can never be sent, and why: its dispatcher answers them all the same."""

from __future__ import annotations

from capture_planner.engines.core import Emulation
from capture_planner.entry import Batch
from capture_planner.modes import Role
from capture_planner.words import counted


def _takes_whole_prompts(emulation: Emulation) -> bool:
    """Say whether a prompt may be longer than a batch: SGLang without chunks takes one such by itself."""
    chunk = next((each.value for each in emulation.settings if each.name == "chunked_prefill_size"), 1)
    return int(chunk) <= 0


def why_never_sent(batch: Batch, emulation: Emulation) -> str | None:
    """Say why the engine can never be sent such a batch; None where it can.

    More is asked than by ``admissible.is_admissible``, for which a ``query_len`` that does not fit means a
    mixed batch: here each request is said to have so many tokens.
    """
    limits, reqs, tokens = emulation.limits, batch.num_reqs, batch.num_tokens
    loras = 0 if emulation.lora is None else min(emulation.lora.max_active + 1, reqs)
    width, schedule = batch.query_len, emulation.speculative and emulation.speculative.schedule
    if reqs < 1:
        return "a batch has at least one request"
    if reqs > limits.max_num_reqs:
        return f"{counted(reqs, 'request')}, and at most {limits.max_num_reqs} run together"
    if tokens < reqs:
        return f"{counted(reqs, 'request')} have at least {counted(reqs, 'token')}, not {tokens}"
    if tokens > limits.max_num_tokens and not (reqs == 1 and _takes_whole_prompts(emulation)):
        return f"{counted(tokens, 'token')}, and a batch has at most {limits.max_num_tokens}"
    if width is not None and reqs * width != tokens:
        return f"{counted(reqs, 'request')} of {counted(width, 'token')} have {reqs * width}, not {tokens}"
    if batch.active_loras > loras:
        return f"{counted(batch.active_loras, 'active adapter')}, and such a batch has at most {loras}"
    if batch.role is not Role.DRAFT_DECODE:
        return None
    if batch.uniform_query_len is None:
        return "in a draft decode each request has as many tokens, and its prompt behind it"
    if schedule and emulation.speculative and emulation.speculative.draft_tokens(reqs) < 2:
        return f"the schedule has no draft decode for {counted(reqs, 'request')}"
    return None
