"""The model that backends are tested with: attention alone, with queries, keys and values from tables.

A token's queries, keys and values depend on its id and its position and on nothing else, in every layer. So
the tokens of a request determine each of its rows, whatever its pages and whatever was computed before:
``Tables.attended`` computes the rows densely, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch
from torch import nn

from capture_planner.runtime.models.loading import weights_of
from capture_planner.runtime.models.protocols import Attend, Scoring, Weight


@attrs.frozen(kw_only=True)
class AttentionShape:
    """The attention of one model: heads, their width, and each layer's window."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    scale_factor: float = 1.0
    """How the scale differs from one over the root of ``head_dim``."""
    softcap: float | None = None
    """Of layers without a window; others have twice as much."""
    has_sinks: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def width(self) -> int:
        """Elements of a layer's attention output."""
        return self.heads * self.head_dim

    @property
    def scale(self) -> float:
        """What products are multiplied by."""
        return self.scale_factor / math.sqrt(self.head_dim)

    def softcap_of(self, layer: int) -> float | None:
        """Return what the scores of a layer are capped at."""
        return None if self.softcap is None else self.softcap * (1 if self.windows[layer] is None else 2)


class Tables(nn.Module):
    """Queries, keys and values by token and by position, ``[rows, layers, (heads + 2 kv_heads) * dim]``."""

    by_token: torch.Tensor
    by_position: torch.Tensor
    sinks: torch.Tensor
    """``[layers, heads]``: a logit of each head that has no value."""

    def __init__(
        self, shape: AttentionShape, vocabulary: int, longest: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        self.shape = shape
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = {"by_token": (vocabulary, shape.layers, wide), "by_position": (longest, shape.layers, wide)}
        for name, size in (sizes | {"sinks": (shape.layers, shape.heads)}).items():
            self.register_buffer(name, torch.zeros(size, dtype=dtype, device=device))
        self.load(seed)

    def load(self, seed: int) -> None:
        """Fill all tables anew, in place, as weights are reloaded."""
        draw = torch.Generator().manual_seed(seed)
        for table in (self.by_token, self.by_position, self.sinks):
            table.copy_(torch.randn(table.shape, generator=draw, dtype=torch.float32) * 0.75)

    def scoring(self, layer: int) -> Scoring:
        """Return how a layer turns products into weights."""
        sinks = self.sinks[layer] if self.shape.has_sinks else None
        return Scoring(scale=self.shape.scale, softcap=self.shape.softcap_of(layer), sinks=sinks)

    def split(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries ``[T, layers, heads, dim]``, keys and values ``[T, layers, kv_heads, dim]``."""
        rows = self.by_token[ids] + self.by_position[positions]
        shape, dim = self.shape, self.shape.head_dim
        widths = [shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]
        parts = torch.split(rows, widths, dim=-1)
        return tuple(part.reshape(*part.shape[:-1], part.shape[-1] // dim, dim) for part in parts)

    def attended(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return, in float64, what the rows from position ``first`` on attend to: ``[n, layers, width]``.

        ``ids int64[S]`` are the tokens of one request from its first position on.
        """
        shape, positions = self.shape, torch.arange(len(ids), device=ids.device)
        query, keys, values = (part.double() for part in self.split(ids, positions))
        rows = positions[first:]
        grouped = query[first:].reshape(
            len(rows), shape.layers, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
        )
        scores = torch.einsum("qlhgd,slhd->lhgqs", grouped, keys) * shape.scale
        for layer, window in enumerate(shape.windows):
            seen = positions <= rows[:, None]
            if window is not None:
                seen &= positions > rows[:, None] - window
            if (cap := shape.softcap_of(layer)) is not None:
                scores[layer] = cap * (scores[layer] / cap).tanh()
            scores[layer].masked_fill_(~seen, -torch.inf)
        if shape.has_sinks:
            sinks = self.sinks.double().view(*scores.shape[:3], 1, 1).expand(*scores.shape[:4], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : len(ids)]
        mean = torch.einsum("lhgqs,slhd->qlhgd", weights, values)
        return mean.flatten(2)


class _Probe(nn.Module):
    """What target and drafter have in common: tables, and a head of random weights."""

    head: torch.Tensor

    def __init__(self, tables: Tables, name: str, hidden_size: int, vocabulary: int, seed: int) -> None:
        super().__init__()
        shape = tables.shape
        self.tables, self.name, self.hidden_size = tables, name, hidden_size
        self.num_layers, self.num_heads, self.num_kv_heads = shape.layers, shape.heads, shape.kv_heads
        self.head_dim = shape.head_dim
        draw = torch.Generator().manual_seed(seed)
        head = torch.randn(hidden_size, vocabulary, generator=draw, dtype=torch.float32)
        self.register_buffer("head", head.to(tables.by_token))

    def weights(self) -> Iterator[Weight]:
        return weights_of(self.named_modules())


class ProbeTarget(_Probe):
    """A ``TargetModel`` whose hidden states are the attention outputs of its layers, side by side."""

    def __init__(self, tables: Tables, vocabulary: int, longest: int, seed: int) -> None:
        super().__init__(tables, "probe", tables.shape.layers * tables.shape.width, vocabulary, seed)
        self.mrope, self.windows, self.dtype = False, tables.shape.windows, tables.by_token.dtype
        self.vocab_size, self.max_model_len = vocabulary, longest

    def forward(
        self,
        *,
        input_ids: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return all attention outputs, ``[T, hidden_size]``; auxiliary states are the same, once more."""
        assert input_ids is not None and embeddings is None, "a probe reads token ids"
        hidden = attended(self.tables, input_ids, positions, attend)
        return hidden, hidden.repeat(1, len(aux_layers)) if aux_layers else None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not asked of a model that reads token ids."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head


class ProbeDrafter(_Probe):
    """A ``Drafter``: attention outputs of its own tables, mixed half and half with what it was given."""

    def __init__(self, tables: Tables, target: ProbeTarget, aux_layers: tuple[int, ...], seed: int) -> None:
        super().__init__(tables, "probe drafter", target.hidden_size, target.vocab_size, seed)
        self.aux_layers, self.windows = aux_layers, tables.shape.windows
        self.mask_token, self.mask_hidden = 0, None

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Return the first of the auxiliary states: they are all alike."""
        return aux[:, : self.hidden_size]

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        return self.mixed(attended(self.tables, input_ids, positions, attend), hidden)

    def mixed(self, attention: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a row becomes of its attention ``[T, layers * width]`` and of what it was given."""
        times = -(-self.hidden_size // attention.shape[1])
        return (attention.repeat(1, times)[:, : self.hidden_size] + hidden) * 0.5

    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        return (hidden @ self.head).argmax(-1)

    def learn(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """It does not."""


def attended(tables: Tables, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Let the runner attend in every layer; returns the outputs side by side, ``[T, layers * width]``."""
    query, keys, values = tables.split(ids.long(), positions)
    found = []
    for layer in range(tables.shape.layers):
        q, k, v = (part[:, layer].contiguous() for part in (query, keys, values))
        found.append(attend(layer, q, k, v, tables.scoring(layer)).flatten(1))
    return torch.cat(found, dim=1)
