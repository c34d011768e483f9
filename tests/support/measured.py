"""Measurements that are made up: times that step with the size, and decodes of any number of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Family
from capture_planner.records.environment import Device, DeviceKind
from capture_planner.records.model import Model
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.traffic import Traffic, TrafficCount

GPU = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)
MODEL = Model(name="m", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)


def curves(
    *, per_token: float = 0.02, target: float = 2.0, draft: float = 0.2, roles: Sequence[Role] = tuple(Role)
) -> tuple[CostCurve, ...]:
    """Return times of graphs that are flat up to 64 tokens and grow above, and eager times that are twice as long."""
    curves = []
    for role in roles:
        floor = target if role is Role.TARGET else draft
        times = (floor, floor, floor * (1 + per_token * 480))
        for mode, factor in ((GraphMode.FULL, 1), (GraphMode.NONE, 2)):
            curves.append(
                CostCurve(
                    role=role,
                    mode=mode,
                    query_len=1 if role is Role.DRAFT_DECODE else 4,
                    tokens=(1, 64, 1024),
                    milliseconds=tuple(time * factor for time in times),
                )
            )
    return tuple(curves)


def lines(
    families: Iterable[Family], tokens: tuple[int, int], ends: Callable[[int], tuple[float, float]]
) -> tuple[CostCurve, ...]:
    """Return a line for each family of passes; ``ends`` are the times of both tokens by the family's place."""
    return tuple(
        CostCurve(role=role, mode=mode, query_len=each, draft_steps=steps, tokens=tokens, milliseconds=ends(index))
        for index, (role, mode, each, steps) in enumerate(families)
    )


def profile(
    *, per_token: float = 0.02, target: float = 2.0, draft: float = 0.2, roles: Sequence[Role] = tuple(Role)
) -> Profile:
    """Return a profile of such times."""
    return Profile(
        source="test",
        date="2026-11-22T12:00:00Z",
        device=GPU,
        model=MODEL,
        curves=curves(per_token=per_token, target=target, draft=draft, roles=roles),
        step_milliseconds=0.3,
    )


def decodes(counts: Mapping[int, int], query_len: int = 4) -> Traffic:
    """Return a traffic of decodes: steps by requests."""
    return Traffic(
        sources=("test",),
        batches=tuple(
            TrafficCount(
                role=Role.TARGET,
                num_reqs=num_reqs,
                num_tokens=num_reqs * query_len,
                query_len=query_len,
                past_prompt=True,
                count=count,
            )
            for num_reqs, count in counts.items()
        ),
    )
