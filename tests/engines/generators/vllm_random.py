"""Random plans for vLLM with the sizes of each role drawn apart, which ``vllm_starts.py`` starts engines under.

The planner makes a small plan of the drawn deployment; then each role's graphs are replaced by random ones. So a full
decode can be larger than every graph of mixed batches, a drafter has other sizes than the target, and some graphs are
beyond the limits, which the plugin has to leave out.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from capture_planner.codec import load_environment
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import decode_families, draft_steps
from capture_planner.records.environment import Environment
from capture_planner.records.model import DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Lora, Policy, Sizes, Spec

MACHINE = Path(__file__).parents[3] / "plans" / "environments" / "h200.yaml"
MODES = (
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL_DECODE_ONLY,
    GraphMode.PIECEWISE,
    GraphMode.FULL,
)
MOST_DRAFTS = 5
BEYOND = 16
"""Requests and tokens that a graph may be above the limits by."""


def random_plan(
    draw: random.Random,
    *,
    model: Model,
    max_num_reqs: Sequence[int],
    max_num_tokens: Sequence[int],
    modes: Sequence[GraphMode] = MODES,
    backend: str = "flash_attention",
    adapters: Sequence[int] = (0, 0, 1, 3),
    most_graphs: int = 6,
) -> Plan:
    """Return a random plan on an H200.

    :param max_num_reqs: limits to choose from; likewise ``max_num_tokens`` and ``adapters``, where 0 is no LoRA.
    :param most_graphs: most graphs of a role, of each kind of batch and adapter case.
    """
    spec = _spec(draw, model, draw.choice(max_num_reqs), draw.choice(max_num_tokens), draw.choice(modes), backend)
    loras = draw.choice(adapters)
    spec = replace(spec, lora=Lora(max_active=loras, specialize=draw.random() < 0.5) if loras else None)
    plan = make_plan(spec, *_machine())
    target = _target(draw, plan, most_graphs)
    entries = {Role.TARGET: target}
    if spec.speculative is not None:
        entries[Role.DRAFT_PREFILL] = _draft_prefill(draw, plan, target, most_graphs)
        entries[Role.DRAFT_DECODE] = _draft_decode(draw, plan, most_graphs)
    roles = (replace(role, entries=tuple(dict.fromkeys(entries[role.role]))) for role in plan.roles)
    return replace(plan, roles=tuple(roles))


@functools.cache
def _machine() -> tuple[Environment, Registry]:
    """Return the H200 and the backends that are installed."""
    return load_environment(MACHINE), registry.load_backends()


def _spec(draw: random.Random, model: Model, reqs: int, tokens: int, mode: GraphMode, backend: str) -> Spec:
    drafts = draw.randint(0, MOST_DRAFTS)
    speculative = None
    if drafts:
        speculative = Speculative(
            method=Method.EAGLE3,
            num_tokens=drafts,
            schedule=_schedule(draw, drafts, reqs) if drafts > 1 and draw.random() < 0.4 else (),
            chain=draw.choice(list(Chain)),
            model=DraftModel(vocab_size=model.vocab_size),
        )
    return Spec(
        model=model,
        limits=Limits(max_num_reqs=reqs, max_num_tokens=tokens),
        mode=mode,
        backend=backend,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(1,), num_tokens=(1,)),
        speculative=speculative,
    )


def _schedule(draw: random.Random, drafts: int, reqs: int) -> tuple[tuple[int, int, int], ...]:
    """Return two or three ranges of requests with fewer drafts each; the first has the most."""
    edges = sorted(draw.sample(range(2, reqs + 1), min(draw.randint(1, 2), reqs - 1)))
    lengths = sorted((draw.randint(0, drafts - 1) for _ in edges), reverse=True)
    starts = [1, *edges]
    return tuple(
        (first, last - 1, length)
        for first, last, length in zip(starts, [*edges, reqs + 1], [drafts, *lengths], strict=True)
    )


def _sizes(draw: random.Random, most: int, limit: int) -> list[int]:
    """Return up to ``most`` sizes, few of them above the limit, all of them small in some draws and large in others."""
    largest = limit + (draw.randint(1, BEYOND) if draw.random() < 0.2 else 0)
    if draw.random() < 0.4:
        largest = draw.randint(1, largest)
    return sorted({draw.randint(1, largest) for _ in range(draw.randint(0, most))})


def _cases(draw: random.Random, plan: Plan) -> list[int]:
    """Return the adapter cases that a role's graphs are captured for: all of them, or some."""
    cases = [0] if plan.lora is None else list(plan.lora.cases())
    return cases if draw.random() < 0.7 else sorted(draw.sample(cases, draw.randint(1, len(cases))))


def _target(draw: random.Random, plan: Plan, most: int) -> list[Entry]:
    mode, limits = plan.role(Role.TARGET).mode, plan.limits
    found = []
    for case in _cases(draw, plan):
        if mode.decode_mode is GraphMode.FULL:
            for length in sorted({family.query_len for family in decode_families(Role.TARGET, plan)}):
                counts = _sizes(draw, most, min(limits.max_num_reqs, limits.max_num_tokens // length))
                found += [_decode(count, length, case) for count in counts]
        if mode.mixed_mode is not GraphMode.NONE:
            largest = draw.choice((limits.max_num_tokens, limits.max_num_tokens, 1 + limits.max_num_tokens // 8))
            for tokens in _sizes(draw, most, largest):
                reqs = min(tokens, limits.max_num_reqs) if mode.mixed_mode is GraphMode.FULL else None
                found.append(Entry(mode=mode.mixed_mode, num_tokens=tokens, num_reqs=reqs, active_loras=case))
    if any(entry.num_tokens <= limits.max_num_tokens for entry in found):
        return found
    # Without any graph it would be a plan of mode NONE.
    if mode.mixed_mode is GraphMode.NONE:
        return [_decode(1, next(iter(decode_families(Role.TARGET, plan))).query_len)]
    reqs = 1 if mode.mixed_mode is GraphMode.FULL else None
    return [Entry(mode=mode.mixed_mode, num_tokens=1, num_reqs=reqs)]


def _decode(num_reqs: int, length: int, case: int = 0, steps: int | None = None) -> Entry:
    tokens = num_reqs * length
    return Entry(
        mode=GraphMode.FULL,
        num_tokens=tokens,
        num_reqs=num_reqs,
        query_len=length,
        active_loras=case,
        draft_steps=steps,
    )


def _draft_prefill(draw: random.Random, plan: Plan, target: Iterable[Entry], most: int) -> list[Entry]:
    """Return some of the target's full shapes, one that it may not have, and sizes of mixed batches."""
    mode, limits = plan.role(Role.DRAFT_PREFILL).mode, plan.limits
    shapes = [entry for entry in target if entry.mode is GraphMode.FULL and entry.active_loras == 0]
    found = draw.sample(shapes, draw.randint(0, len(shapes)))
    if mode.decode_mode is GraphMode.FULL and plan.speculative is not None:
        found += [_decode(count, 1 + plan.speculative.num_tokens) for count in _sizes(draw, 1, limits.max_num_reqs)]
    if mode.mixed_mode is GraphMode.PIECEWISE:
        found += [Entry(mode=mode.mixed_mode, num_tokens=size) for size in _sizes(draw, most, limits.max_num_tokens)]
    return found


def _draft_decode(draw: random.Random, plan: Plan, most: int) -> list[Entry]:
    """Return single draft decodes, or chains of the lengths that the schedule has."""
    if plan.role(Role.DRAFT_DECODE).mode.decode_mode is not GraphMode.FULL or plan.speculative is None:
        return []
    sizes = _sizes(draw, most, plan.limits.max_num_reqs)
    if plan.speculative.chain is Chain.SINGLE:
        return [_decode(count, 1) for count in sizes]
    every = range(1, plan.limits.max_num_reqs + 1)
    lengths = {draft_steps(Role.DRAFT_DECODE, count, plan.speculative) for count in every} - {0, None}
    return [_decode(count, 1, steps=length) for count in sizes for length in sorted(lengths, key=str)]
