"""The model that backends are tested with: attention and recurrences, whose inputs are from tables.

A token's queries, keys and values depend on its id and its position and on nothing else, in every layer, and so do
the inputs and decays of recurrent layers. So the tokens of a request determine each of its rows, whatever its pages
and whatever was computed before: ``Tables.rows`` computes them densely, in float64.

Rows that are padding hold garbage from the beginning, and an operator at the end couples the rows of a batch (see
``coupled``): padding that is not left out of it changes real rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import attrs
import torch
from torch import nn

from capture_planner.conformance.draft_scheme import DraftScheme
from capture_planner.conformance.scene import VOCABULARY
from capture_planner.runtime.models.loading import weights_of
from capture_planner.runtime.models.protocols import Attend, Scoring, Weight
from capture_planner.runtime.ranks.collectives import WHOLE


@attrs.frozen(kw_only=True)
class LayerShape:
    """The layers of one model: heads, their width, each attention layer's window, and recurrent layers."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    scale_factor: float = 1.0
    """How the scale differs from one over the root of ``head_dim``."""
    softcap: float | None = None
    """Of layers without a window; others have twice as much."""
    has_sinks: bool = False
    kv_dtype: torch.dtype | None = None
    """What keys and values are stored in; None: as they are."""
    recurrent: int = 0
    """Recurrent layers, whose states are as wide as a layer's attention output."""

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
    """What layers get, by token and by position.

    Queries, keys and values, ``[rows, layers, (heads + 2 kv_heads) * dim]``, and the inputs and decays of recurrent
    layers, ``[rows, recurrent, 2 * width]``.
    """

    by_token: torch.Tensor
    by_position: torch.Tensor
    states_by_token: torch.Tensor
    states_by_position: torch.Tensor
    sinks: torch.Tensor
    """``[layers, heads]``: a logit of each head that has no value."""

    def __init__(
        self, shape: LayerShape, vocabulary: int, longest: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        self.shape = shape
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = {"by_token": (vocabulary, shape.layers, wide), "by_position": (longest, shape.layers, wide)}
        states = {"by_token": vocabulary, "by_position": longest}
        sizes |= {f"states_{name}": (rows, shape.recurrent, 2 * shape.width) for name, rows in states.items()}
        for name, size in (sizes | {"sinks": (shape.layers, shape.heads)}).items():
            self.register_buffer(name, torch.zeros(size, dtype=dtype, device=device))
        self.load(seed)

    def load(self, seed: int) -> None:
        """Fill all tables anew, in place, as weights are reloaded."""
        draw = torch.Generator().manual_seed(seed)
        for table in (self.by_token, self.by_position, self.sinks, self.states_by_token, self.states_by_position):
            table.copy_(torch.randn(table.shape, generator=draw, dtype=torch.float32) * 0.75)

    def scoring(self, layer: int) -> Scoring:
        """Return how a layer turns products into weights."""
        sinks = self.sinks[layer] if self.shape.has_sinks else None
        return Scoring(scale=self.shape.scale, softcap=self.shape.softcap_of(layer), sinks=sinks)

    def split(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> tuple[torch.Tensor, ...]:
        """Return queries ``[T, layers, heads, dim]``, keys and values ``[T, layers, kv_heads, dim]``.

        :param change: done to the rows first, ``[T, layers, (heads + 2 kv_heads) * dim]``.
        """
        rows = change(self.by_token[ids] + self.by_position[positions])
        shape, dim = self.shape, self.shape.head_dim
        widths = [shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]
        parts = torch.split(rows, widths, dim=-1)
        return tuple(part.reshape(*part.shape[:-1], part.shape[-1] // dim, dim) for part in parts)

    def recurrences(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of recurrent layers, and the logarithms of their decays: ``[T, recurrent, width]``.

        :param change: done to the rows first, ``[T, recurrent, 2 * width]``.
        """
        inputs, decays = change(self.states_by_token[ids] + self.states_by_position[positions]).chunk(2, dim=-1)
        return inputs, -nn.functional.softplus(decays) / _LASTING

    def rows(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return, in float64, what the layers make of the tokens from position ``first`` on, side by side.

        ``ids int64[S]`` are the tokens of one request from its first position on; returns
        ``[n, (layers + recurrent) * width]``.
        """
        return torch.cat([self.attended(ids, first).flatten(1), self.states(ids)[first:].flatten(1)], dim=1)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return, in float64, the states after each of a request's tokens, ``[S, recurrent, width]``."""
        inputs, decays = (part.double() for part in self.recurrences(ids, torch.arange(len(ids), device=ids.device)))
        earlier = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=ids.device).tril()[:, :, None, None]
        found: list[torch.Tensor] = []
        last = torch.zeros_like(inputs[:1])
        for added, kept in zip(torch.split(inputs, _CHUNK), torch.split(decays, _CHUNK), strict=True):
            total, rows = kept.cumsum(0), len(added)
            spread = (total[:, None] - total).exp() * added
            within = torch.where(earlier[:rows, :rows], spread, 0).sum(1)
            found.append(within + total.exp() * last)
            last = found[-1][-1:]
        return torch.cat(found)

    def attended(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return, in float64, what the rows from position ``first`` on attend to: ``[n, layers, width]``.

        ``ids int64[S]`` are the tokens of one request from its first position on.
        """
        shape, positions = self.shape, torch.arange(len(ids), device=ids.device)
        query, *stored = self.split(ids, positions)
        keys, values = (part.to(shape.kv_dtype or part.dtype).double() for part in stored)
        rows = positions[first:]
        grouped = query.double()[first:].reshape(
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


@attrs.frozen(kw_only=True)
class Rows:
    """What a probe does with the rows of a batch, in addition to its layers."""

    coupled: bool = False
    """Whether rows depend on each other."""
    padding: float | None = None
    """What rows of padding hold in all their elements; None: what is computed of padded ids and positions."""

    def spoiled(self, real: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what puts it into the rows ``[T, layers, ...]`` that are not ``real bool[T]``."""
        garbage = self.padding
        if garbage is None:
            return lambda rows: rows
        return lambda rows: torch.where(real[:, None, None], rows, garbage)


class _Probe(nn.Module):
    """What target and drafter have in common: tables, and a head of random weights."""

    head: torch.Tensor

    def __init__(
        self, tables: Tables, of_rows: Rows, name: str, hidden_size: int, vocabulary: int, seed: int, agreeing: bool
    ) -> None:
        super().__init__()
        shape = tables.shape
        self.tables, self.of_rows, self.name, self.hidden_size = tables, of_rows, name, hidden_size
        self.num_layers, self.num_heads, self.num_kv_heads = shape.layers, shape.heads, shape.kv_heads
        self.head_dim = shape.head_dim
        draw = torch.Generator().manual_seed(seed)
        head = torch.randn(hidden_size, vocabulary, generator=draw, dtype=torch.float32)
        if agreeing:
            # A row is on either side of a plane: two models with heads of their own agree in half of the cases.
            head[:, 1], head[:, 2:] = -head[:, 0], head[:, 2:] * _UNLIKELY
        self.register_buffer("head", head.to(tables.by_token))

    def weights(self) -> Iterator[Weight]:
        return weights_of(self.named_modules())

    def coupled(self, hidden: torch.Tensor, ids: torch.Tensor, attend: Attend | None = None) -> torch.Tensor:
        """Return what becomes of the rows of a batch ``[T, hidden_size]``, where they are coupled.

        Without ``attend`` all are real.
        """
        if not self.of_rows.coupled:
            return hidden
        real = torch.ones_like(ids, dtype=torch.bool) if attend is None else attend.real
        return coupled(hidden, ids, real)


class ProbeTarget(_Probe):
    """A ``TargetModel`` whose hidden states are the outputs of its layers, side by side."""

    def __init__(
        self, tables: Tables, of_rows: Rows, vocabulary: int, longest: int, seed: int, *, agreeing: bool = False
    ) -> None:
        shape = tables.shape
        width = (shape.layers + shape.recurrent) * shape.width
        super().__init__(tables, of_rows, "probe", width, vocabulary, seed, agreeing)
        self.state_width = shape.width if shape.recurrent else 0
        self.mrope, self.windows, self.dtype = False, tables.shape.windows, tables.by_token.dtype
        self.vocab_size, self.max_model_len, self.among = vocabulary, longest, WHOLE

    def forward(
        self,
        *,
        input_ids: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return all outputs of layers, ``[T, hidden_size]``; auxiliary states are the same, once more."""
        assert input_ids is not None and embeddings is None, "a probe reads token ids"
        hidden = self.coupled(outputs(self.tables, self.of_rows, input_ids, positions, attend), input_ids, attend)
        return hidden, hidden.repeat(1, len(aux_layers)) if aux_layers else None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not asked of a model that reads token ids."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).argmax(dim=-1)


class ProbeDrafter(_Probe):
    """A ``Drafter``: attention outputs of its own tables, mixed half and half with what it was given.

    A draft model's are not mixed with anything.
    """

    mask: torch.Tensor

    def __init__(
        self,
        tables: Tables,
        of_rows: Rows,
        target: ProbeTarget,
        kind: DraftScheme,
        seed: int,
        *,
        agreeing: bool = False,
    ) -> None:
        if kind is DraftScheme.MODULES:
            # Rows whose tokens are yet to be drafted read what comes next in the batch, padding included.
            of_rows = attrs.evolve(of_rows, coupled=False)
        super().__init__(tables, of_rows, "probe drafter", target.hidden_size, target.vocab_size, seed, agreeing)
        self.kind, self.windows = kind, tables.shape.windows
        self.aux_layers: tuple[int, ...] = (0,) if kind.reads_aux else ()
        self.mask_token = MASK_TOKEN
        mask = torch.randn(self.hidden_size, generator=torch.Generator().manual_seed(seed + 1))
        self.register_buffer("mask", mask.to(self.head))

    @property
    def mask_hidden(self) -> torch.Tensor | None:
        """``[hidden_size]``: what the rows of mask tokens go on from."""
        return self.mask if self.kind is DraftScheme.PARALLEL else None

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Return the first of the auxiliary states: they are all alike."""
        return aux[:, : self.hidden_size]

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        layers = range(self.tables.shape.layers)
        if self.kind is DraftScheme.MODULES:
            layers = layers[module : module + 1]
        mixed = self.mixed(outputs(self.tables, self.of_rows, input_ids, positions, attend, layers), hidden)
        return self.coupled(mixed, input_ids, attend)

    def mixed(self, attention: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a row becomes of its attention ``[T, layers * width]`` and of what it was given."""
        if attention.shape[1] > self.hidden_size:  # more layers than the target's: all of them count
            attention = attention.view(len(attention), -1, self.hidden_size).mean(1)
        times = -(-self.hidden_size // attention.shape[1])
        own = attention.repeat(1, times)[:, : self.hidden_size]
        return (own + hidden) * 0.5 if self.kind.reads_states else own

    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        return (hidden @ self.head).argmax(-1)

    def learn(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """It does not."""


def outputs(
    tables: Tables,
    of_rows: Rows,
    ids: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
    layers: Iterable[int] | None = None,
) -> torch.Tensor:
    """Let the runner run every layer, or some; returns the outputs side by side, ``[T, (layers + recurrent) * width]``.

    :param layers: which of the layers that attend.
    """
    ids, real = ids.long(), attend.real
    attention = tables.split(ids, positions, of_rows.spoiled(real))
    found = []
    for layer in range(tables.shape.layers) if layers is None else layers:
        query, keys, values = (part[:, layer].contiguous() for part in attention)
        found.append(attend(layer, query, keys, values, tables.scoring(layer)).flatten(1))
    if tables.shape.recurrent:
        inputs, decays = tables.recurrences(ids, positions, of_rows.spoiled(real))
        found += [attend.recur(layer, inputs[:, layer], decays[:, layer]) for layer in range(tables.shape.recurrent)]
    return torch.cat(found, dim=1)


def coupled(hidden: torch.Tensor, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return rows ``[T, hidden_size]`` that depend on all real rows of a batch.

    They are scaled by the largest element of all, as activations quantized per tensor are (vllm#37442, #38436), and
    by the load of an expert, which a router chooses by the token's id. Real rows must not depend on padding.
    """
    largest = torch.where(real[:, None], hidden.abs(), 0).amax().clamp(min=torch.finfo(hidden.dtype).tiny)
    same_expert = (ids[:, None] - ids) % _EXPERTS == 0
    load = (same_expert & real).sum(1)
    return hidden / largest * (_LEVEL * (1 + load / _EXPERTS)).to(hidden.dtype)[:, None]


_CHUNK = 64
"""Tokens whose states are computed from each other at once: all of a long sequence would take gigabytes."""

_LASTING = 8.0
"""The larger, the longer a state lasts: it loses a tenth with a token."""

GARBAGE = (float("nan"), 1e4)
"""What rows of padding hold: NaN, which a maximum may leave out, or more than any real element, and a float16."""

MASK_TOKEN = VOCABULARY - 1
"""The token in the rows of drafts that a parallel pass has yet to make."""

_EXPERTS = 4

_UNLIKELY = 0.05
"""Of other logits, where two tokens are likelier than the rest."""

_LEVEL = 4.0
"""The largest element of coupled rows, about as large as of rows that are not."""
