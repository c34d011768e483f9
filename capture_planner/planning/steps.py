"""From traffic to steps: the target's batches with how often each ran, and the passes that a step makes of one.

Drafters follow the target: draft prefill runs its batch, with some methods more rows, and draft decodes come after it.
So what a traffic says of a drafter's own passes is not needed: one that counts the target's steps alone is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import (
    DecodeFamily,
    Deployment,
    decode_families,
    draft_prefill_of,
    extra_slots,
    most_loras,
)
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount


@attrs.frozen
class Steps:
    """How often each batch of the target ran, with sentences on what the traffic did not say."""

    counts: Mapping[Batch, int]
    """Steps by batch, in a fixed order."""
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What is assumed of decodes of query lengths that this deployment does not have."""

    @property
    def total(self) -> int:
        """How many steps there are."""
        return sum(self.counts.values())

    def percentile(self, percent: float, time: Callable[[Batch], float]) -> Batch:
        """Return the batch of the step within whose time ``percent`` of the steps end; there must be some."""
        left = self.total * percent / 100
        batches = sorted(self.counts, key=time)
        for batch in batches:
            left -= self.counts[batch]
            if left <= 1e-9:
                return batch
        return batches[-1]


def steps_of(traffic: Traffic, deployment: Deployment) -> Steps:
    """Return the target's steps of a traffic, as far as the deployment's limits admit them.

    Without a query length, a batch of the target is a decode if its tokens are what the schedule gives a number of
    requests and nothing says that it has prompts; every other batch is mixed. A mixed batch of unknown requests has as
    many as a step has on average, for the draft decodes that follow it.
    """
    families = decode_families(Role.TARGET, deployment)
    limits, loras, slots = deployment.limits, most_loras(Role.TARGET, deployment), extra_slots(deployment)
    lines = [line for line in traffic.batches if line.role is Role.TARGET]
    known = [line for line in lines if line.num_reqs is not None]
    weight = sum(line.count for line in known)
    typical = sum((line.num_reqs or 0) * line.count for line in known) // weight if weight else limits.max_num_reqs
    found: Counter[Batch] = Counter()
    guessed: Counter[str] = Counter()
    foreign: Counter[int] = Counter()
    for line in lines:
        batch = _batch(line, families, max(typical, 1))
        if batch is None:
            guessed["without tokens or requests are left out"] += line.count
        elif batch.num_tokens + batch.num_reqs * slots > limits.max_num_tokens or batch.num_reqs > limits.max_num_reqs:
            guessed["beyond the limits are left out"] += line.count
        else:
            found[attrs.evolve(batch, active_loras=min(line.active_loras, loras, batch.num_reqs))] += line.count
            if line.past_prompt is not False and line.query_len is not None and not _has(families, batch):
                foreign[line.query_len] += line.count
            if line.num_reqs is None:
                which = "decodes" if batch.query_len else f"mixed batches of {typical} requests"
                guessed[f"of unknown requests are taken for {which}"] += line.count
            elif line.past_prompt is None and batch.query_len:
                guessed["of unknown phase have the shape of decodes and are taken for them"] += line.count
    notes = tuple(f"{counted(count, 'step')} {what}" for what, count in sorted(guessed.items()))
    return Steps(
        dict(sorted(found.items(), key=lambda item: _order(item[0]))), notes, tuple(_foreign(foreign, families))
    )


def _has(families: tuple[DecodeFamily, ...], batch: Batch) -> bool:
    """Say whether a batch is one of the deployment's own decodes."""
    return any(each.query_len == batch.query_len and batch.num_reqs in each.requests for each in families)


def _foreign(steps: Counter[int], families: tuple[DecodeFamily, ...]) -> Iterator[str]:
    """Say how many decodes have a query length that the deployment does not run, at all or for so many requests."""
    if steps:
        recorded, own = (
            " or ".join(map(str, sorted(lengths))) for lengths in (steps, {each.query_len for each in families})
        )
        yield (
            f"{counted(steps.total(), 'step')} are decodes of query length {recorded}; this deployment has those of "
            f"{own}: they count with the tokens that they had, and not as its decodes; record "
            "traffic with its draft lengths"
        )


def _order(batch: Batch) -> tuple[int, ...]:
    return batch.num_tokens, batch.num_reqs, batch.query_len or 0, batch.past_prompt, batch.active_loras


def _batch(line: TrafficCount, families: tuple[DecodeFamily, ...], typical: int) -> Batch | None:
    """Return the batch that a line is about, or None where its tokens are not known, nor a decode that it is."""
    requests, tokens, query_len = line.num_reqs, line.num_tokens, line.query_len
    if line.past_prompt is not False:
        for family in families:
            each = family.query_len
            if query_len not in (None, each):
                continue
            number = requests or (tokens or 0) // each
            if number in family.requests and tokens in (None, number * each):
                return Batch.decode(Role.TARGET, number, each)
    if tokens is None:
        return None
    return Batch(
        role=Role.TARGET,
        num_reqs=min(requests or typical, tokens),
        num_tokens=tokens,
        query_len=query_len if requests is not None else None,
        past_prompt=line.past_prompt is True,
    )


def passes_of(batch: Batch, deployment: Deployment) -> Iterator[tuple[Batch, int]]:
    """Yield the batch of each role that runs in a step of the target's ``batch``, with how often it runs."""
    yield batch, 1
    if deployment.speculative is not None:
        yield draft_prefill_of(batch, deployment.speculative.extra_slots), 1
        draft_steps = deployment.speculative.draft_tokens(batch.num_reqs) - 1
        if draft_steps >= 1 and deployment.speculative.is_chain:
            yield Batch.decode(Role.DRAFT_DECODE, batch.num_reqs, 1), draft_steps
