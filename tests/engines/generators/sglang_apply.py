"""Seeded plans for SGLang to execute: any sizes by role, with speculation and adapters, or without."""

from __future__ import annotations

from pathlib import Path
from random import Random

from capture_planner import codec
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.spec import Limits, Lora, Parallel

_LOCKED = Path(__file__).parents[3] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml"
_BASE = codec.load_plan(_LOCKED)
_MODES = (GraphMode.FULL_DECODE_ONLY,) * 6 + (GraphMode.FULL_AND_PIECEWISE,) * 4
_OTHERS = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)


def plan(random: Random) -> Plan:
    """Return a plan; a role in ten is eager, or has graphs that SGLang does not have."""
    most = random.choice((1, 7, 48, 64, 200, 256, random.randint(1, 512)))
    drafts = random.choice((0, 0, 1, 2, 3, 5))
    width = 1 + drafts
    tokens = max(random.choice((2048, 8192)), most * width)
    lora = random.random() < 0.2
    roles = [_role(random, Role.TARGET, most, width, lora=lora)]
    if drafts:
        roles.append(_role(random, Role.DRAFT_PREFILL, most, width))
        steps = random.choice((drafts - 1, None))
        roles.append(_role(random, Role.DRAFT_DECODE, most, 1, steps=steps, none=drafts < 2))
    return replace(
        _BASE,
        limits=Limits(max_num_reqs=most, max_num_tokens=tokens),
        speculative=_speculative(random, drafts) if drafts else None,
        lora=Lora(max_active=random.randint(1, 8)) if lora else None,
        parallel=Parallel(),
        roles=tuple(roles),
    )


def _speculative(random: Random, drafts: int) -> Speculative:
    return Speculative(
        method=random.choice((Method.EAGLE, Method.EAGLE3)), num_tokens=drafts, chain=random.choice((*Chain,))
    )


def _role(
    random: Random,
    role: Role,
    most: int,
    width: int,
    *,
    lora: bool = False,
    steps: int | None = None,
    none: bool = False,
) -> RolePlan:
    mode = random.choice(_MODES if random.random() < 0.9 else _OTHERS)
    if role is Role.DRAFT_DECODE and mode is not GraphMode.NONE:
        mode = GraphMode.FULL_DECODE_ONLY
    sizes = {random.randint(1, most) for _ in range(random.choice((1, 2, 5, 12, 40)))}
    if random.random() < 0.7:
        sizes.add(most)
    entries = []
    if mode.is_separate and not none:
        entries += [
            Entry(
                mode=GraphMode.FULL,
                num_tokens=size * width,
                num_reqs=size,
                query_len=width,
                active_loras=adapters,
                draft_steps=steps,
            )
            for size in sizes
            for adapters in ((0, 2, 9) if lora else (0,))
        ]
    if mode.has_piecewise:
        entries += [Entry(mode=GraphMode.PIECEWISE, num_tokens=size) for size in sizes]
    if mode is GraphMode.FULL:
        entries += [Entry(mode=GraphMode.FULL, num_tokens=size * width, num_reqs=size) for size in sizes]
    like = _BASE.role(role)
    return replace(like, requested=mode, mode=mode, entries=tuple(entries), decisions=(), waivers=())
