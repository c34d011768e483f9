"""Documents for the fuzzer that break no rule of their schema, as large as the rules let them be."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from ruamel.yaml import YAML


def _number(rng: random.Random) -> int:
    """Return a legal count, log-uniform, often at an edge."""
    if rng.random() < 0.3:
        return rng.choice((1, 2, 3, 255, 256, 1 << 19, (1 << 20) - 1, 1 << 20))
    return max(int(2 ** rng.uniform(0, 20)), 1)


def _sizes(rng: random.Random) -> dict[str, Any]:
    policy = rng.choice(("default", "minimax", "explicit", "powers_of_two", "vllm", "sglang", "tensorrt_llm"))
    sizes: dict[str, Any] = {"policy": policy}
    if policy == "minimax":
        sizes["graphs"] = _number(rng)
    if policy == "explicit" or (policy == "vllm" and rng.random() < 0.3):
        sizes["num_tokens"] = [_number(rng) for _ in range(rng.choice((1, 3, 30, 3000, 12_000)))]
    if policy == "explicit" and rng.random() < 0.8:
        sizes["num_reqs"] = [_number(rng) for _ in range(rng.choice((1, 3, 30, 3000, 12_000)))]
    if policy in ("sglang", "tensorrt_llm") and rng.random() < 0.7:
        sizes["padding"] = rng.random() < 0.5
    for bound in ("max_tokens", "max_reqs"):
        if rng.random() < 0.4:
            sizes[bound] = _number(rng)
    return sizes


def _schedule(rng: random.Random, most: int) -> list[list[int]]:
    """Return tiers over up to ``most`` requests: few, or thousands."""
    count = rng.choice((1, 2, 3, 4, 20, 200, 5000))
    firsts = sorted({1, *(rng.randint(1, max(most, 2)) for _ in range(count))})
    ends = [first - 1 for first in firsts[1:]] + [max(most, firsts[-1])]
    return [[first, last, rng.randint(0, rng.choice((1, 4, 255)))] for first, last in zip(firsts, ends, strict=True)]


def _wrapped(data: Any) -> str:
    """Write data as JSON in lines of moderate length, as limits on lines are not what is tried here."""
    return re.sub(r"(.{1,2000}), ", r"\1,\n  ", json.dumps(data))


def legal(rng: random.Random, base: str, kind: str) -> tuple[str, str]:
    """A document that breaks no rule of its schema, as large as the rules let it be."""
    if kind == "environment":
        packages = {f"p{i}": "1." + str(i) for i in range(rng.choice((0, 10, 100, 1000, 14_000)))}
        device = {"kind": "cpu", "name": "x" * 128, "memory": "999999999999999B"}
        return "legal: environment", _wrapped({"version": 1, "name": "big", "device": device, "packages": packages})
    data = YAML(typ="safe", pure=True).load(base)
    if kind == "plan":
        return "legal: plan", _wrapped(_legal_plan(rng, data))
    reqs, tokens = _number(rng), _number(rng)
    data["limits"] = {"max_num_reqs": reqs, "max_num_tokens": tokens}
    data["mode"] = rng.choice(("FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"))
    data["backend"] = rng.choice(("flashinfer", "flash_attention", "reference"))
    data["sizes"] = _sizes(rng)
    data.pop("roles", None)
    if rng.random() < 0.6:
        data.pop("budget", None)
    elif rng.random() < 0.5:
        data["budget"] = {"max_graphs": _number(rng)}
    if rng.random() < 0.5:
        data["lora"] = {"max_active": _number(rng), "specialize": rng.random() < 0.6}
    if rng.random() < 0.6:
        data["speculative"] = {"method": "eagle3", "num_tokens": rng.choice((1, 2, 3, 7, 255))}
        if rng.random() < 0.7:
            data["speculative"]["schedule"] = _schedule(rng, reqs)
        if rng.random() < 0.3:
            roles = rng.sample(("target", "draft_prefill", "draft_decode"), 2)
            data["roles"] = {role: {"sizes": _sizes(rng)} for role in roles}
    else:
        data.pop("speculative", None)
    if rng.random() < 0.3:
        tensor = rng.choice((1, 2, 4, 8))
        data["parallel"] = {"tensor": tensor, "sequence": True}
    return "legal: spec", _wrapped(data)


def _legal_plan(rng: random.Random, data: Any) -> Any:
    """Give a plan entries that no planner would, within the schema."""
    data["limits"] = {"max_num_reqs": _number(rng), "max_num_tokens": _number(rng)}
    if rng.random() < 0.4:
        data["lora"] = {"max_active": _number(rng), "specialize": rng.random() < 0.6}
    if "speculative" in data and rng.random() < 0.5:
        data["speculative"]["schedule"] = _schedule(rng, data["limits"]["max_num_reqs"])
    for role in data["roles"]:
        rows = []
        for _ in range(rng.choice((1, 2, 4, 40))):
            count = rng.choice((1, 5, 5, 30, 30, 100, 100, 1000, 4000))
            full, uniform = rng.random() < 0.6, rng.random() < 0.5
            row: dict[str, Any] = {"mode": "FULL" if full else "PIECEWISE"}
            if full and uniform:
                row["query_len"] = rng.choice((1, 2, 3, 4, 256))
            if full:
                row["num_reqs"] = [_number(rng) for _ in range(count)]
            if not (full and uniform) or rng.random() < 0.2:
                row["num_tokens"] = [_number(rng) for _ in range(count)]
            if rng.random() < 0.3:
                loras = rng.sample(range(1 << 20), rng.choice((1, 3, 20, 500, 4000)))
                row["active_loras"] = sorted(loras, reverse=True)
            if rng.random() < 0.1:
                row["draft_steps"] = _number(rng)
            rows.append(row)
            if sum(len(row.get("num_reqs", ())) + len(row.get("num_tokens", ())) for row in rows) > 8000:
                break
        role["entries"] = rows
        if rng.random() < 0.3:
            waiver = {"first": 0, "last": 1 << 20, "reason": "sizes", "says": "x"}
            kinds = ("decode", "mixed")
            role["waivers"] = [
                {"kind": rng.choice(kinds), **waiver, "first": _number(rng), "max_loras": _number(rng)}
                for _ in range(rng.choice((1, 10, 500)))
            ]
    return data
