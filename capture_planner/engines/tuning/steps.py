"""Steps: the batches of the target in a traffic, as far as a deployment admits them.

A drafter's passes follow from the target's batch, so a step is a batch of the target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount


@attrs.frozen(kw_only=True)
class Steps:
    """How often each batch of the target ran."""

    batches: Mapping[Batch, int]
    beyond: int = 0
    """Steps that are left out: their batches are beyond the limits."""
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """How many steps it counts."""
        return sum(self.batches.values())


def steps_of(traffic: Traffic, deployment: Emulation) -> Steps:
    """Return the steps of a traffic that a deployment can run.

    Where a source says no query length, a batch past its prompts is a decode if its numbers fit one; all else is mixed.

    :raises CapturePlannerError: the traffic has no batch of the target.
    """
    counts = [each for each in traffic.batches if each.role is Role.TARGET]
    sources = ", ".join(traffic.sources) or "the traffic"
    if not counts:
        others = sorted({each.role.value for each in traffic.batches})
        says = f"only of {', '.join(others)}" if others else "at all"
        raise CapturePlannerError(
            f"{sources}: no batches of the target, {says}; give traffic of the target: a drafter follows it"
        )
    families = deployment.families(Role.TARGET)
    batches: Counter[Batch] = Counter()
    beyond = 0
    for each in counts:
        batch = _batch(each, deployment, families)
        if batch is None:
            beyond += each.count
        else:
            batches[batch] += each.count
    notes = (*_beyond(beyond, traffic, deployment), *_foreign(batches, families), *_other_roles(traffic, deployment))
    return Steps(batches=batches, beyond=beyond, notes=notes)


def _batch(each: TrafficCount, deployment: Emulation, families: tuple[DecodeFamily, ...]) -> Batch | None:
    """Return the batch that was counted; None for one that the limits do not admit."""
    limits = deployment.limits
    width = each.query_len
    if width is None and each.past_prompt is not False:
        width = _width(each, families)
    reqs, tokens = each.num_reqs, each.num_tokens
    if width is not None:
        reqs = reqs if reqs is not None else None if tokens is None or tokens % width else tokens // width
        if reqs is None:
            width = None
    if tokens is None:
        tokens = None if reqs is None else reqs * (width or 1)
    if tokens is None:
        return None
    # Mixed batches of the same tokens differ by requests only where a graph has too little room for them.
    reqs = reqs if reqs is not None else min(tokens, limits.max_num_reqs)
    past = each.past_prompt if each.past_prompt is not None else width is not None
    if reqs > limits.max_num_reqs or (tokens > limits.max_num_tokens and not (reqs == 1 and deployment.whole_prompts)):
        return None
    loras = 0 if deployment.lora is None else min(each.active_loras, deployment.lora.max_active + 1, reqs)
    return Batch(
        role=Role.TARGET, num_reqs=reqs, num_tokens=tokens, query_len=width, past_prompt=past, active_loras=loras
    )


def _width(each: TrafficCount, families: tuple[DecodeFamily, ...]) -> int | None:
    """Return the query length of the decodes that the numbers fit, if they say so."""
    for family in families:
        width = family.query_len
        if each.num_reqs is not None and each.num_tokens is not None:
            fits = each.num_tokens == each.num_reqs * width and each.num_reqs in family.requests
        elif each.past_prompt:
            number = each.num_reqs if each.num_reqs is not None else (each.num_tokens or 0) // width
            fits = number in family.requests and each.num_tokens in (None, number * width)
        else:
            fits = False
        if fits:
            return width
    return None


def _beyond(beyond: int, traffic: Traffic, deployment: Emulation) -> Iterator[str]:
    if beyond:
        limits = deployment.limits
        yield (
            f"{beyond:,} of {traffic.steps:,} steps have more than {counted(limits.max_num_reqs, 'request')} or "
            f"{counted(limits.max_num_tokens, 'token')}, the limits of this deployment, and are left out"
        )


def _foreign(batches: Mapping[Batch, int], families: tuple[DecodeFamily, ...]) -> Iterator[str]:
    """Yield what shows that the traffic is of a deployment that drafts otherwise."""
    own = {family.query_len for family in families}
    other: Counter[int] = Counter()
    for batch, count in batches.items():
        width = batch.uniform_query_len
        if width is not None and width not in own:
            other[width] += count
    for width, count in sorted(other.items()):
        lengths = " or ".join(map(str, sorted(own))) or "no"
        yield (
            f"{count:,} steps are decodes of query length {width}; this deployment runs decodes of {lengths}, so they "
            "count as mixed batches: check that the traffic is of these draft lengths"
        )


def _other_roles(traffic: Traffic, deployment: Emulation) -> Iterator[str]:
    known = set(deployment.modes)
    for role in Role:
        count = sum(each.count for each in traffic.batches if each.role is role)
        if count and role not in known:
            ran = ", ".join(each.value for each in deployment.modes)
            yield f"{count:,} batches are of {role.value}, which this deployment does not run (it runs {ran}): left out"
