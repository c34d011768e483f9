"""Arrivals: from a trace of requests to the batches that a deployment's scheduler makes of it, counted.

The model of time is simple: all steps take equally long, and no draft is accepted. Which sizes occur
depends on the load far more than on either.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily, Deployment, draft_prefill_of, extra_slots

STEP_SECONDS = 0.02
"""Duration of a step: each request gets fifty tokens per second."""


class Arrival(Protocol):
    """One request of a trace, as ``analysis.trace.read_trace`` returns it."""

    @property
    def arrival(self) -> float:
        """Seconds from the start."""
        ...

    @property
    def prompt(self) -> int: ...
    @property
    def output(self) -> int: ...


@attrs.define(eq=False)
class _RunningRequest:
    """Tokens of a running request's prompt and of its output that are left."""

    prompt: int
    output: int

    def read(self, tokens: int) -> None:
        """Read tokens of the prompt; the last one comes with the first token of the output."""
        self.prompt -= tokens
        self.output -= not self.prompt

    def write(self, tokens: int) -> None:
        self.output -= tokens


def batches_of(
    requests: Iterable[Arrival], deployment: Deployment, *, step_seconds: float = STEP_SECONDS
) -> Counter[Batch]:
    """Return how often each batch of the target runs, from the first request to the last token.

    Continuous batching: requests that decode come first, then prompts in order of arrival, cut where
    the tokens end. Where the decodes alone take up the tokens, they take turns.
    """
    limits, speculative, slots = deployment.limits, deployment.speculative, extra_slots(deployment)
    arriving = deque(sorted(requests, key=lambda request: request.arrival))
    running: deque[_RunningRequest] = deque()
    met: Counter[Batch] = Counter()
    clock = 0.0

    def width(num_reqs: int) -> int:
        return 1 if speculative is None else 1 + speculative.draft_tokens(num_reqs)

    while arriving or running:
        if not running:
            clock = max(clock, arriving[0].arrival)
        while arriving and arriving[0].arrival <= clock and len(running) < limits.max_num_reqs:
            request = arriving.popleft()
            running.append(_RunningRequest(request.prompt, request.output))
        decoding = [live for live in running if not live.prompt]
        prompting = [live for live in running if live.prompt]
        each = width(len(running))
        if prompting and len(decoding) * (each + slots) + slots < limits.max_num_tokens:
            counts = [each] * len(decoding)
            left = limits.max_num_tokens - len(decoding) * (each + slots)
            for live in prompting:
                chunk = min(left - slots, live.prompt)
                if chunk < 1:
                    break
                live.read(chunk)
                left -= chunk + slots
                counts.append(chunk)
            steps = 1
        else:
            count = len(decoding)
            while count > 1 and count * (width(count) + slots) > limits.max_num_tokens:
                count -= 1
            decoding = decoding[:count]
            counts = [min(width(count), limits.max_num_tokens - slots)] * count
            steps = 1
            if count == len(running):
                # Nothing changes until a request ends or another comes.
                steps = min(live.output for live in decoding)
                if arriving and count < limits.max_num_reqs:
                    steps = min(steps, math.ceil((arriving[0].arrival - clock) / step_seconds))
            else:
                served = set(map(id, decoding))
                running = deque([*(live for live in running if id(live) not in served), *decoding])
            prompting = []
        for live in decoding:
            live.write(steps)
        met[_batch(counts, prompts=bool(prompting))] += steps
        clock += steps * step_seconds
        running = deque(live for live in running if live.prompt or live.output > 0)
    return met


def _batch(counts: list[int], *, prompts: bool) -> Batch:
    alike = counts[0] if len(set(counts)) == 1 else None
    return Batch(
        role=Role.TARGET, num_reqs=len(counts), num_tokens=sum(counts), query_len=alike, past_prompt=not prompts
    )


def for_role(met: Counter[Batch], role: Role, families: Iterable[DecodeFamily], *, slots: int = 0) -> Counter[Batch]:
    """Return what a role runs where the target runs these batches; ``families`` are the role's decodes.

    Draft prefill runs the target's, with ``slots`` more rows for each request; draft decodes follow it, as often as one
    pass follows another.
    """
    if role is Role.DRAFT_PREFILL:
        return Counter({draft_prefill_of(batch, slots): count for batch, count in met.items()})
    if role is Role.TARGET:
        return Counter({attrs.evolve(batch, role=role): count for batch, count in met.items()})
    drafted: Counter[Batch] = Counter()
    for batch, count in met.items():
        for family in families:
            if batch.num_reqs in family.requests:
                drafted[Batch.decode(role, batch.num_reqs, family.query_len)] += count * (family.draft_steps or 1)
    return drafted
