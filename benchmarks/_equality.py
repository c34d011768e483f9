"""What graphs are held to, on a deployment that is served in several ways.

The same kernels: graphs and ``Options(replay=False)`` run the same kernels at the same padded extents, so
not one token may differ, in any dtype. Other kernels: eager steps and plain greedy decoding sum in
another order, so in float32 a token may differ only where two are as likely. Logits: whatever the
target's forwards left, against a dense forward in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
from _deployments import REGISTRY, Deployment, Tokens
from _logits import errors, gap, in_float32

from capture_planner.modes import Pool, Role
from capture_planner.records._base import replace
from capture_planner.records.text import counted
from capture_planner.runtime.models.protocols import TargetModel
from capture_planner.runtime.plan_variants import without_graphs, without_speculation

TIE = 1e-5
"""Two logits are as likely in float32 where they differ by less than this share of the norm of all."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
"""Most error of a row's logits, relative to its norm. In float32 a kernel that rounds to TF32 is out."""


def differing(tokens: Tokens, others: Tokens) -> list[str]:
    """Return the requests that were given other tokens."""
    return [name for name in tokens if tokens[name] != others[name]]


def gaps(deployment: Deployment, reference: TargetModel, tokens: Tokens, others: Tokens) -> list[float]:
    """Return, for each request that differs, how far apart the first two different tokens are."""
    prompts = {request.name: request.prompt for request in deployment.requests}
    distances = []
    for name in differing(tokens, others):
        pairs = zip(tokens[name], others[name], strict=True)
        at, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        before = prompts[name] + tokens[name][:at]
        distances.append(gap(reference, before, (one, other), deployment.device))
    return distances


def check(
    deployment: Deployment, *, eager: bool = False, other_pool: bool = False, poison: bool = False, **options: Any
) -> dict[str, Any]:
    """Serve a deployment in every way, and return what was seen; counts of requests that differ.

    ``eager``: once more without graphs at real extents. ``other_pool``: once more with the other kind of
    pool. ``poison``: everything that a forward of the graphs may not depend on is overwritten before it.
    Other options apply to all runs of the plan.
    """
    plain = deployment.serve(without_speculation(deployment.plan, REGISTRY)).tokens
    answers = {request.name: request.prompt + plain[request.name] for request in deployment.requests}
    graphs = deployment.serve(deployment.plan, answers, watch=True, poison=poison, **options)
    same = deployment.serve(deployment.plan, answers, replay=False, **options)
    reference = in_float32(deployment.target)
    assert graphs.watching is not None, "the graphs' run is watched"
    of_run, of_dtype = errors(deployment.target, reference, graphs.watching, deployment.device)
    session, speculative = graphs.session, deployment.plan.speculative
    others = {"plain": plain}
    if eager:
        others["eager"] = deployment.serve(without_graphs(deployment.plan), answers, **options).tokens
    record: dict[str, Any] = {
        "model": deployment.plan.model.name,
        "dtype": deployment.plan.model.dtype.value,
        "k": 0 if speculative is None else speculative.num_tokens,
        "schedule": speculative is not None and bool(speculative.schedule),
        "chain": None if speculative is None else speculative.chain.value,
        "fused graphs": sum((captured.entry.draft_steps or 1) > 1 for captured in session.captured),
        "mode": deployment.plan.role(Role.TARGET).requested.value,
        "resolved": deployment.plan.role(Role.TARGET).mode.value,
        "pool": deployment.plan.pool.value,
        "page size": deployment.pages.page_size,
        "drafter": deployment.kind,
        "poisoned": poison,
        "ran ahead": graphs.ahead,
        "not compiled": graphs.not_compiled,
        "graphs": len(session.captured),
        "steps": len(session.steps),
        "forwards": len(session.forwards),
        "from graphs": dict(Counter(f"{f.role.value} {f.mode.value}" for f in session.forwards if f.entry)),
        "requests": len(graphs.tokens),
        "tokens": sum(map(len, graphs.tokens.values())),
        "accepted": sum(step.accepted for step in session.steps),
        "differ from the same kernels": len(differing(graphs.tokens, same.tokens)),
        "logits": attrs.asdict(of_run),
        "logits of the dtype alone": attrs.asdict(of_dtype),
    }
    for name, tokens in others.items():
        apart = gaps(deployment, reference, graphs.tokens, tokens)
        record[f"differ from {name}"] = len(apart)
        record[f"differ from {name}, not by a tie"] = sum(each > TIE for each in apart)
        record[f"widest gap to {name}"] = max(apart, default=0.0)
    if other_pool:
        (pool,) = set(Pool) - {deployment.plan.pool}
        second = deployment.serve(replace(deployment.plan, pool=pool), answers, **options)
        sizes = {deployment.plan.pool.value: graphs.pool_bytes, pool.value: second.pool_bytes}
        record["other pool"] = {
            "bytes": sizes,
            "saved": sizes[Pool.PER_ROLE.value] - sizes[Pool.SHARED.value],
            "differ": len(differing(graphs.tokens, second.tokens)),
        }
    return record


def faults(record: Mapping[str, Any]) -> list[str]:
    """Return, in sentences, what must not be in what was seen."""
    wrong = {"the same kernels": record["differ from the same kernels"]}
    if record["dtype"] == "float32":
        for name in ("plain", "eager"):
            wrong[f"{name} steps, and not by a tie"] = record.get(f"differ from {name}, not by a tie", 0)
    wrong["the other pool"] = record.get("other pool", {}).get("differ", 0)
    messages = [f"{counted(n, 'request')} with other tokens than {name}" for name, n in wrong.items() if n]
    if record["logits"]["worst"] > TOLERANCE[record["dtype"]]:
        messages.append(f"a row's logits are {record['logits']['worst']:.2g} of their norm off")
    messages += [f"not compiled: {reason}" for reason in record["not compiled"]]
    if not record["from graphs"]:
        messages.append("no forward came from a graph")
    return messages
