"""What graphs are held to, on a deployment that is served in several ways.

The same kernels: graphs and ``Options(replay=False)`` run the same kernels at the same padded extents, so
not one token may differ, in any dtype. Other kernels: eager steps and plain greedy decoding sum in
another order, so in float32 a token may differ only where two are as likely. Logits: whatever the
target's forwards left, against a dense forward in float32.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from _deployments import REGISTRY, Deployment, Tokens
from torch.nn.functional import scaled_dot_product_attention

from capture_planner.modes import Pool, Role
from capture_planner.plugins.backend import Scoring
from capture_planner.records._base import replace
from capture_planner.records.text import counted
from capture_planner_runner.capture.variants import without_graphs, without_speculation
from capture_planner_runner.execution.attention import LayerCalls
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardObserver, RoleRun
from capture_planner_runner.models.protocols import TargetModel

ROWS = 4096
"""Rows of a dense forward at a time; logits of a large vocabulary take a gigabyte or two."""


class Watching(ForwardObserver):
    """What the target's forwards left, and the tokens that it belongs to.

    Everything is read on the device and in its stream's order, before and after each forward, so that
    nothing needs to be settled on the host. It keeps copies, and nothing of the runner.
    """

    def __init__(self) -> None:
        self._kept: list[dict[str, torch.Tensor]] = []

    @contextmanager
    def forward(self, role: RoleRun, step: ForwardStep) -> Iterator[None]:
        """Copy what the target reads and leaves."""
        body = role.body
        if not isinstance(body, TargetBody):
            yield
            return
        tokens, reqs = step.extents.tokens, step.extents.reqs
        rows = {"input_ids": tokens, "positions": tokens, "query_start_loc": reqs + 1, "idx_mapping": reqs}
        # Before: a graph may end with the fields of the next step.
        now = {name: role.fields[name][:size].clone() for name, size in rows.items()}
        now["answers"] = body.tokens.clone()
        yield
        self._kept.append(now | {"hidden": body.hidden[:tokens].clone()})

    def fed(self) -> list[list[int]]:
        """Return the tokens that each forward was given, drafts and padding included."""
        return [_tokens(kept).tolist() for kept in self._kept]

    def sequences(self) -> tuple[list[list[int]], list[tuple[int, int]], torch.Tensor]:
        """Return the sequences that were served, and every row of a forward that is one's.

        A row is ``(sequence, position)``; the third holds its hidden state, ``[rows, hidden_size]``. Rows
        behind a refused draft belong to no sequence, and are omitted.
        """
        sequences: list[list[int]] = []
        of_place: dict[int, int] = {}
        parts: list[tuple[int, int, list[int], int]] = []
        first = 0
        for kept in self._kept:
            ids = _tokens(kept)
            read = (ids, *(kept[name] for name in ("positions", "query_start_loc", "idx_mapping")))
            tokens, at, starts, places = (tensor.tolist() for tensor in read)
            for place, (start, end) in zip(places, itertools.pairwise(starts), strict=True):
                if place < 0:
                    continue
                if at[start] == 0:
                    of_place[place] = len(sequences)
                    sequences.append([])
                # What was said instead of a refused draft takes its position.
                sequences[of_place[place]][at[start] :] = tokens[start:end]
                parts.append((of_place[place], at[start], tokens[start:end], first + start))
            first += len(tokens)
        found: list[tuple[int, int]] = []
        chosen: list[int] = []
        for sequence, start, tokens, row in parts:
            said = sequences[sequence][start:]
            alike = next((i for i, token in enumerate(tokens) if said[i : i + 1] != [token]), len(tokens))
            found += [(sequence, start + i) for i in range(alike)]
            chosen += range(row, row + alike)
        hidden = torch.cat([kept["hidden"] for kept in self._kept])
        return sequences, found, hidden[torch.tensor(chosen, device=hidden.device)]


def _tokens(kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tokens of a forward; -1 - i stands for the answer of the step before to its row i."""
    ids = kept["input_ids"]
    return torch.where(ids < 0, kept["answers"][(-1 - ids).clamp(min=0)], ids)


def in_float32(target: TargetModel) -> TargetModel:
    """Return a copy whose parameters are the same numbers in float32."""
    made = copy.deepcopy(target)
    for _, module, name in made.weights():
        tensor = getattr(module, name)
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return made


@torch.no_grad()
def dense(target: TargetModel, sequences: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return the hidden states of all sequences, one after the other, ``[tokens, hidden_size]``."""
    longest = max(map(len, sequences))
    each = max(ROWS // longest, 1)
    found: list[torch.Tensor] = []
    for first in range(0, len(sequences), each):
        some = sequences[first : first + each]
        # Padded at their ends, where a causal mask hides what is there.
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in some], device=device)
        hidden, _ = target.forward(
            input_ids=ids.flatten(),
            embeddings=None,
            positions=torch.arange(longest, device=device).repeat(len(some)),
            attend=LayerCalls(functools.partial(_attend, len(some)), torch.ones_like(ids.flatten())),
        )
        rows = hidden.view(len(some), longest, -1)
        found += [row[: len(tokens)] for row, tokens in zip(rows, some, strict=True)]
    return torch.cat(found)


def _attend(
    count: int, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attend within each of ``count`` sequences of the same length."""
    group = query.shape[1] // keys.shape[1]
    q, k, v = (
        part.view(count, -1, *part.shape[1:]).transpose(1, 2)
        for part in (query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1))
    )
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale)
    return out.transpose(1, 2).reshape(query.shape)


@attrs.frozen(kw_only=True)
class Errors:
    """``||logits - reference|| / ||reference||`` of each row, in short."""

    rows: int
    worst: float
    median: float

    @classmethod
    def of(cls, errors: torch.Tensor) -> Errors:
        return cls(rows=len(errors), worst=float(errors.max()), median=float(errors.median()))


@torch.no_grad()
def errors(
    target: TargetModel, reference: TargetModel, watching: Watching, device: torch.device
) -> tuple[Errors, Errors]:
    """Return the errors of the watched forwards, and those that a dense forward in their dtype has."""
    sequences, rows, hidden = watching.sequences()
    begins = [0, *itertools.accumulate(map(len, sequences))]
    where = torch.tensor([begins[sequence] + at for sequence, at in rows], device=device)
    exact, rounded = (dense(model, sequences, device)[where] for model in (reference, target))
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for first in range(0, len(rows), ROWS):
        some = slice(first, first + ROWS)
        expected = reference.logits(exact[some]).float()
        norm = expected.norm(dim=-1)
        for states, into in zip((hidden, rounded), found, strict=True):
            into.append((target.logits(states[some]).float() - expected).norm(dim=-1) / norm)
    of_run, of_dtype = (Errors.of(torch.cat(each)) for each in found)
    return of_run, of_dtype


@torch.no_grad()
def gap(reference: TargetModel, before: Sequence[int], tokens: tuple[int, int], device: torch.device) -> float:
    """Return how far apart the logits of two next tokens are, relative to the norm of them all."""
    logits = reference.logits(dense(reference, [before], device)[-1:])[0].float()
    first, second = tokens
    return float((logits[first] - logits[second]).abs() / logits.norm())


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
    watching = Watching()
    graphs = deployment.serve(deployment.plan, answers, observer=watching, poison=poison, **options)
    same = deployment.serve(deployment.plan, answers, replay=False, **options)
    reference = in_float32(deployment.target)
    of_run, of_dtype = errors(deployment.target, reference, watching, deployment.device)
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
