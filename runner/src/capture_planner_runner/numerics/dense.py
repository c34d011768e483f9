"""Dense forwards: whole sequences without pages, graphs or a backend, in the model's dtype or a higher one."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import attrs
import torch
from torch.nn.utils.rnn import pad_sequence

from capture_planner.plugins.backend import Scoring
from capture_planner_runner.execution.attention import LayerCalls
from capture_planner_runner.models.protocols import Adapters, LayeredModel, Weight
from capture_planner_runner.numerics.record import LayerScale

ROWS = 4096
"""Tokens of a forward at a time."""
QUERIES = 256
"""Queries of a sequence that attend at a time."""
_UNSCALED: Mapping[int, float] = MappingProxyType({})


class WiderWeights:
    """Weights in a higher precision, the same numbers; while they are used, modules have these.

    Raises ``torch.OutOfMemoryError`` where there is no memory for a second copy.
    """

    def __init__(self, weights: Iterable[Weight], dtype: torch.dtype) -> None:
        # By identity: tied weights are widened once.
        tensors = {id(tensor): tensor for _, module, name in weights for tensor in [getattr(module, name)]}
        self._pairs = [(t, t.data, t.data.to(dtype)) for t in tensors.values() if t.is_floating_point()]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use them in the modules until the context is left; then restore the old tensors, at the old addresses."""
        for tensor, _, wider in self._pairs:
            tensor.data = wider
        try:
            yield
        finally:
            for tensor, own, _ in self._pairs:
                tensor.data = own


@attrs.frozen(kw_only=True, eq=False)
class DenseForward:
    """Forwards of one model over whole sequences."""

    model: LayeredModel
    sequences: tuple[tuple[int, ...], ...]
    device: torch.device
    kv_dtype: torch.dtype
    """Dtype that keys and values are rounded to, as in the KV cache."""
    adapters: Adapters | None = None
    adapter: tuple[int, ...] = ()
    """LoRA adapter of each sequence, from 1; 0: none."""

    def hidden(
        self,
        *,
        chunks: int = 1,
        rounds_weights: bool = False,
        scales: Mapping[int, float] = _UNSCALED,
        scaled: torch.Tensor | None = None,
        count: int | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of the first ``count`` sequences, one after the other, ``[tokens, hidden_size]``.

        :param chunks: in how many forwards a batch of sequences is computed, as a chunked prefill is.
        :param rounds_weights: round the weights of attention to the model's dtype, as flash attention does.
        :param scales: by layer, what the output of attention is multiplied by.
        :param scaled: ``bool[tokens]``: whether that is done to a token; None: to all.
        """
        sequences = self.sequences[:count]
        shares = None if scaled is None else torch.split(scaled, [len(sequence) for sequence in sequences])
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        found: dict[int, torch.Tensor] = {}
        while order:
            # Sorted by length, so that little is padded: the last of a batch is the longest.
            size = next((n for n in range(len(order), 1, -1) if n * len(sequences[order[n - 1]]) <= ROWS), 1)
            some, order = order[:size], order[size:]
            mine = None if shares is None else pad_sequence([shares[index] for index in some], batch_first=True)
            batch = self._batch(some, chunks, rounds_weights, scales, mine)
            found |= {index: rows[: len(sequences[index])] for index, rows in zip(some, batch, strict=True)}
        # Back in the order of the sequences: batches were made by length.
        return torch.cat([found[index] for index in range(len(sequences))])

    def _batch(
        self,
        chosen: Sequence[int],
        chunks: int,
        rounds_weights: bool,
        scales: Mapping[int, float],
        scaled: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``[sequences, longest, hidden_size]``; padding is at the ends, where no token sees it.

        :param scaled: ``bool[sequences, longest]``
        """
        sequences = [self.sequences[index] for index in chosen]
        longest = max(map(len, sequences))
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences], device=self.device)
        attention = _DenseAttention(len(sequences), self.model.windows, self.kv_dtype, rounds_weights, scales, scaled)
        parts = []
        for part in torch.arange(longest, device=self.device).chunk(chunks):
            positions = part.repeat(len(sequences))
            with self._adapted(chosen, len(part)):
                hidden, _ = self.model.forward(
                    input_ids=ids[:, part].flatten(),
                    embeddings=None,
                    positions=positions.expand(3, -1) if self.model.mrope else positions,
                    # Slots of 1, since the null slot would mark the rows as padding.
                    attend=LayerCalls(
                        functools.partial(attention, int(part[0])), torch.ones_like(positions), attention.recur
                    ),
                )
            parts.append(hidden.view(len(sequences), len(part), -1))
        return torch.cat(parts, dim=1)

    def _adapted(self, chosen: Sequence[int], tokens: int) -> AbstractContextManager[None]:
        """Return what a forward of ``tokens`` of each sequence runs in."""
        mine = [self.adapter[index] for index in chosen] if self.adapters is not None else []
        if self.adapters is None or not any(mine):
            return nullcontext()
        active = sorted(set(mine))
        lanes = torch.tensor([active.index(adapter) for adapter in mine], dtype=torch.int32, device=self.device)
        there = torch.tensor(active, dtype=torch.int32, device=self.device)
        return self.adapters.applied(lanes.repeat_interleave(tokens), there)


@attrs.frozen(eq=False)
class _DenseAttention:
    """Attention over keys and values of a few sequences of one length, computed in float32 or float64."""

    count: int
    windows: Mapping[int, int | None]
    kv_dtype: torch.dtype
    rounds_weights: bool
    scales: Mapping[int, float]
    scaled: torch.Tensor | None
    _kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = attrs.Factory(dict)
    """Keys and values of each layer so far, ``[sequences, tokens, num_kv_heads, head_dim]``."""
    _states: dict[int, torch.Tensor] = attrs.Factory(dict)
    """The state of each recurrence, ``[sequences, width]``."""

    def __call__(
        self, first: int, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        dtype = query.dtype
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        new = tuple(part.to(self.kv_dtype).to(exact).view(self.count, -1, *part.shape[1:]) for part in (key, value))
        if layer in self._kept:
            new = tuple(torch.cat(pair, dim=1) for pair in zip(self._kept[layer], new, strict=True))
        keys, values = self._kept[layer] = new[0], new[1]
        queries = query.to(exact).view(self.count, -1, keys.shape[2], query.shape[1] // keys.shape[2], query.shape[2])
        round_off: Callable[[torch.Tensor], torch.Tensor] = lambda weights: (  # noqa: E731
            weights.to(dtype).to(exact) if self.rounds_weights else weights
        )
        found = [
            _weigh(part, keys, values, first + QUERIES * number, self.windows[layer], scoring, round_off)
            for number, part in enumerate(torch.split(queries, QUERIES, dim=1))
        ]
        out = torch.cat(found, dim=1).reshape(query.shape)
        factor = self.scales.get(layer, 1.0)
        if self.scaled is None or factor == 1.0:
            return (out * factor).to(dtype)
        rows = self.scaled[:, first : first + out.shape[0] // self.count].reshape(-1, 1, 1)
        return torch.where(rows, out * factor, out).to(dtype)

    def recur(self, number: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(inputs.dtype, torch.float32)
        added, fading = (each.to(exact).view(self.count, -1, each.shape[-1]) for each in (inputs, decays))
        states = recurred(added, fading, self._states.get(number))
        self._states[number] = states[:, -1]
        return states.view(inputs.shape).to(inputs.dtype)


def recurred(inputs: torch.Tensor, decays: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
    """Return the state after each token of sequences, ``[sequences, tokens, width]``, one token after the other.

    :param state: ``[sequences, width]`` before the first token; None: of zeros.
    """
    found = []
    for added, decay in zip(inputs.unbind(1), decays.exp().unbind(1), strict=True):
        state = added if state is None else decay * state + added
        found.append(state)
    return torch.stack(found, dim=1)


def _weigh(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    scoring: Scoring,
    round_off: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ``[n, q, kv heads, group, dim]`` for queries of that shape, from position ``first`` on."""
    scores = torch.einsum("nqhgd,nshd->nhgqs", queries, keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    seen = torch.arange(keys.shape[1], device=keys.device)
    rows = torch.arange(first, first + queries.shape[1], device=keys.device)[:, None]
    visible = seen <= rows
    if window is not None:
        # The window includes the query's own position.
        visible &= seen > rows - window
    scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    # The largest score is subtracted, so that exp does not overflow.
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        # A sink takes a share of attention and adds no value.
        total = total + (scoring.sinks.to(total).view(keys.shape[2], -1, 1, 1) - top).exp()
    return torch.einsum("nhgqs,nshd->nqhgd", round_off(weights), values) / total.permute(0, 3, 1, 2, 4)


TOKENS = 4096
"""Tokens of the reference that are recomputed for each part."""
STEP = 0.01
"""The scale that shows the direction: 1 % more."""
SIGMAS = 6
"""Standard errors that noise explains: a run has a few hundred estimates."""
FLOOR = 0.001
"""Scale error that is allowed without noise: other algorithms have a small bias (below 0.03 % on a CPU)."""
BLOCK = 16
"""Neighbouring rows of a sequence with dependent errors."""
FEWEST = 32
"""Fewest rows of a graph for an estimate of its own."""


@attrs.frozen(kw_only=True, eq=False)
class ComparedRows:
    """Served rows without gross and infinite errors."""

    hidden: torch.Tensor
    """``[rows, hidden_size]``"""
    tokens: torch.Tensor
    """``int64[rows]``: the row of the reference for each one."""
    served_by: Sequence[Sequence[str]]
    """Kinds of forwards of each row: its mode, and its graph."""
    modes: frozenset[str]
    """Kinds that are modes of graphs."""


def scales(
    dense: DenseForward,
    exact: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    served: ComparedRows,
    wider: Callable[[], AbstractContextManager[None]],
    advance: Callable[[str], None],
) -> Iterator[LayerScale]:
    """Yield the scale of each part of each layer over all rows, and of single graphs where it is beyond its bound.

    A scale of 1 % in one layer of many is far below the rounding noise of a row in half precision. But it moves every
    row in a direction that is known, and noise does not. So the difference of all rows from the reference is projected
    on that direction, which a forward of the reference with the part scaled shows. The same projection of exact runs,
    in blocks of rows, says how much of it is noise.

    :param exact: ``[tokens, hidden_size]`` of the reference, for whole sequences from the first on.
    :param runs: two exact runs in the model's dtype, for the same tokens.
    :param wider: makes the model the reference while it is entered.
    """
    count, tokens = _counted(dense.sequences)
    blocks = torch.tensor(_blocks(dense.sequences[:count]), device=exact.device)
    exact, first, second = exact[:tokens], *(run[:tokens].to(exact.dtype) for run in runs)
    # Exact runs round where the served one does: what differs between them is the noise, and less than the rounding.
    usual, apart = (first + second) / 2, second - first
    # Columns are weighted by the inverse of their noise: in trained models a few are far larger than the others.
    scatter = ((first - exact).square() + (second - exact).square()).mean(0)
    weights = torch.where(scatter > 0, 1 / scatter, 0.0)
    near = served.tokens < tokens
    at = served.tokens[near]
    own = served.hidden[near].to(exact.dtype) - usual[at]
    kinds = [kinds for kinds, is_near in zip(served.served_by, near.tolist(), strict=True) if is_near]
    counts = Counter(kind for each in kinds for kind in each)
    members = {
        kind: torch.tensor([kind in each for each in kinds], device=exact.device)
        for kind, number in counts.items()
        if FEWEST <= number < len(kinds)
    }
    members["all"] = torch.ones(len(kinds), dtype=torch.bool, device=exact.device)
    # An error in graphs only has another effect than one in all forwards, which makes the keys wrong as well.
    modes = {
        kind: torch.zeros(tokens, dtype=torch.bool, device=exact.device).index_fill_(0, at[rows], True)
        for kind, rows in members.items()
        if kind in served.modes
    }
    for layer in range(dense.model.num_layers):
        with wider():
            attention = (dense.hidden(scales={layer: 1 + STEP}, count=count) - exact) / STEP
            alone = {
                kind: (dense.hidden(scales={layer: 1 + STEP}, scaled=scaled, count=count) - exact) / STEP
                for kind, scaled in modes.items()
            }
            with dense.model.scaled(layer, 1 + STEP):
                whole = (dense.hidden(count=count) - exact) / STEP
        advance(f"layer {layer}")
        for part, direction, judged in (
            ("attention", attention, members),
            # What a layer adds besides attention: the difference of the two directions.
            ("rest", whole - attention, members),
            *(("attention", direction, {kind: members["all"]}) for kind, direction in alone.items()),
        ):
            weighted = direction * weights
            size = (direction * weighted).sum(1)
            error_of_scale = _standard_error((apart * weighted).sum(1), size, blocks)
            along, sizes = (own * weighted[at]).sum(1), size[at]
            for label, rows in judged.items():
                total = float(sizes[rows].sum())
                # A part that changes no row has no direction, so its scale cannot be estimated.
                if not total or not math.isfinite(total):
                    continue
                # The fewer rows, the more noise.
                bound = FLOOR + SIGMAS * error_of_scale * math.sqrt(max(float(size.sum()) / total, 1.0))
                error = float(along[rows].sum()) / total
                scale = LayerScale(
                    layer=layer, part=part, served_by=label, rows=int(rows.sum()), error=error, bound=bound
                )
                if math.isfinite(error) and math.isfinite(bound) and (label == "all" or not scale.is_within):
                    yield scale


def _counted(sequences: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many sequences from the first on are of ``TOKENS`` tokens together, and their tokens; at least one."""
    tokens = len(sequences[0])
    for count, sequence in enumerate(sequences[1:], 1):
        if tokens + len(sequence) > TOKENS:
            return count, tokens
        tokens += len(sequence)
    return len(sequences), tokens


def _blocks(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the block of each token: none goes on from one sequence to the next."""
    found: list[int] = []
    for sequence in sequences:
        first = found[-1] + 1 if found else 0
        found += [first + at // BLOCK for at in range(len(sequence))]
    return found


def _standard_error(along: torch.Tensor, size: torch.Tensor, blocks: torch.Tensor) -> float:
    """Return the standard error of a scale that least squares over all rows find, from the scatter of the blocks."""
    total, count = float(size.sum()), int(blocks[-1]) + 1
    if not total:
        return 0.0
    sums = torch.zeros(count, dtype=along.dtype, device=along.device).index_add_(0, blocks, along)
    return float(sums.norm()) / total
