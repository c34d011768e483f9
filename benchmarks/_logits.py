"""Logits of a run against those of a dense forward: no pages, no graph, one attention call a layer."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from capture_planner.runtime.execution.bodies import TargetBody
from capture_planner.runtime.execution.calls import LayerCalls
from capture_planner.runtime.execution.inputs import ForwardStep
from capture_planner.runtime.execution.role import ForwardObserver, ForwardTimes, RoleRun
from capture_planner.runtime.models.protocols import Scoring, TargetModel

ROWS = 4096
"""Rows of a dense forward at a time; logits of a large vocabulary take a gigabyte or two."""


class Watching(ForwardObserver):
    """What the target's forwards left, and the tokens that it belongs to.

    Everything is read on the device and in its stream's order, before and after each forward, so that
    nothing needs to be settled on the host. It keeps copies, and nothing of the runner.
    """

    def __init__(self) -> None:
        self._kept: list[dict[str, torch.Tensor]] = []

    def forward(self, role: RoleRun, step: ForwardStep, started: float) -> ForwardTimes:
        """Run a step, and copy what the target reads and leaves."""
        body = role.body
        if not isinstance(body, TargetBody):
            return super().forward(role, step, started)
        tokens, reqs = step.extents.tokens, step.extents.reqs
        rows = {"input_ids": tokens, "positions": tokens, "query_start_loc": reqs + 1, "idx_mapping": reqs}
        # Before: a graph may end with the fields of the next step.
        now = {name: role.fields[name][:size].clone() for name, size in rows.items()}
        now["answers"] = body.tokens.clone()
        times = super().forward(role, step, started)
        self._kept.append(now | {"hidden": body.hidden[:tokens].clone()})
        return times

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
