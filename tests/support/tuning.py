"""A machine and a load to tune for: the staircase of an H100, from the study of capture sizes, and a small service."""

from __future__ import annotations

import random
from collections.abc import Iterable

from capture_planner.modes import GraphMode, Role
from capture_planner.records.environment import Device, DeviceKind
from capture_planner.records.model import Model, Speculative
from capture_planner.records.profile import CostCurve, GraphCost, Profile

STAIRCASE = {1: 1.44, 8: 1.49, 64: 1.55, 128: 1.68, 192: 1.80, 256: 1.99, 272: 2.18, 384: 2.63, 512: 3.25, 1024: 5.4}
"""Milliseconds of a replay by tokens: 8 dense layers of an 8B shape on an H100."""

LAUNCHES = 4.0
"""Milliseconds that an eager pass takes at least."""

MODEL = Model(
    name="Qwen/Qwen3-8B",
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=40960,
    hidden_size=4096,
    vocab_size=151936,
)
DEVICE = Device(kind=DeviceKind.CUDA, name="NVIDIA H200", capability="9.0", memory=140 << 30, multiprocessors=132)


def profile(
    roles: Iterable[Role] = (Role.TARGET,),
    *,
    speculative: Speculative | None = None,
    spread: float | None = 0.01,
    model: Model = MODEL,
    device: Device = DEVICE,
) -> Profile:
    """Return a profile in which drafters cost a tenth of the target."""
    width = 1 if speculative is None else 1 + speculative.num_tokens
    curves, graphs = [], []
    for role in roles:
        scale = 0.1 if role.is_drafter else 1.0
        decodes = 1 if role is Role.DRAFT_DECODE else width
        families: list[tuple[GraphMode, int | None]] = [(GraphMode.FULL, decodes), (GraphMode.NONE, None)]
        families += [] if role is Role.DRAFT_DECODE else [(GraphMode.PIECEWISE, None)]
        for mode, query_len in families:
            eager = LAUNCHES if mode is GraphMode.NONE else 0.0
            extra = 0.2 if mode is GraphMode.PIECEWISE else 0.0
            times = tuple(scale * max(each + extra, eager) for each in STAIRCASE.values())
            curve = CostCurve(role=role, mode=mode, query_len=query_len, tokens=tuple(STAIRCASE), milliseconds=times)
            curves.append(curve)
            if mode is not GraphMode.NONE:
                cost = GraphCost(role=role, mode=mode, query_len=query_len, mib=2.0, driver_mib=8.0, seconds=0.05)
                graphs.append(cost)
    return Profile(
        source="a study of capture sizes",
        date="2026-11-22T12:00:00Z",
        device=device,
        model=model,
        speculative=speculative,
        curves=tuple(curves),
        graphs=tuple(graphs),
        base_mib=20.0,
        base_seconds=0.5,
        step_milliseconds=0.3,
        spread=spread,
    )


def vllm_log(steps: int, sizes: Iterable[int], *, width: int = 1, longest: int = 512, seed: int = 0) -> str:
    """Return vLLM's lines about so many steps: decodes of ``sizes`` requests, and one prompt in ten steps."""
    draw, counts = random.Random(seed), tuple(sizes)
    lines = []
    for step in range(steps):
        reqs = draw.choice(counts)
        prompts = 1 if step % 10 == 0 else 0
        tokens = prompts * draw.randrange(8, longest)
        lines.append(
            f"(EngineCore_DP0 pid=41) INFO 11-22 06:{step // 3000 % 60:02}:{step // 50 % 60:02} [loggers.py:312] "
            f"Engine 000: Iteration({step}): {prompts} context requests, {tokens} context tokens, {reqs} generation "
            f"requests, {reqs * width} generation tokens, iteration elapsed time: 9.81 ms, GPU KV cache usage: 3.1%"
        )
    return "\n".join(lines) + "\n"
