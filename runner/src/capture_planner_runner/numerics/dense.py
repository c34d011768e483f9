"""Dense forwards: whole sequences without pages, graphs or a backend, in the model's dtype or a higher one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import attrs
import torch
from torch.nn.utils.rnn import pad_sequence

from capture_planner.plugins.backend import Scoring
from capture_planner_runner.execution.attention import LayerCalls
from capture_planner_runner.models.protocols import Adapters, LayeredModel, Weight

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
                    attend=LayerCalls(functools.partial(attention, int(part[0])), torch.ones_like(positions)),
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
    windows: tuple[int | None, ...]
    kv_dtype: torch.dtype
    rounds_weights: bool
    scales: Mapping[int, float]
    scaled: torch.Tensor | None
    _kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = attrs.Factory(dict)
    """Keys and values of each layer so far, ``[sequences, tokens, num_kv_heads, head_dim]``."""

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
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        # A sink takes a share of attention and adds no value.
        total = total + (scoring.sinks.to(total).view(keys.shape[2], -1, 1, 1) - top).exp()
    return torch.einsum("nhgqs,nshd->nqhgd", round_off(weights), values) / total.permute(0, 3, 1, 2, 4)
