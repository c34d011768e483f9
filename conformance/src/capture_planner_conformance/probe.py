"""The model that backends are tested with: attention, whose inputs are from tables.

A token's queries, keys and values depend on its id and its position and on nothing else, in every layer. So the tokens
of a request determine each of its rows, whatever its pages and whatever was computed before: ``Tables.rows`` computes
them densely, in float64. Rows that are padding hold garbage from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import attrs
import numpy as np
import torch
from torch import nn

from capture_planner.plugins.backend import Scoring
from capture_planner_conformance.scene import VOCABULARY, DraftScheme
from capture_planner_runner.models.loading import weights_of
from capture_planner_runner.models.protocols import Attend, Weight
from capture_planner_runner.ranks.collectives import WHOLE


@attrs.frozen(kw_only=True)
class LayerShape:
    """The layers of one model: heads, their width, and each layer's window."""

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
    """Queries, keys and values of each layer, by token and by position: ``[rows, layers, (heads + 2 kv_heads) * dim]``.

    A subclass can also have layers of another kind: tables of more ``sizes``, more in ``outputs`` and in
    ``rows``.
    """

    by_token: torch.Tensor
    by_position: torch.Tensor
    sinks: torch.Tensor
    """``[layers, heads]``: a logit of each head that has no value."""

    state_widths: tuple[int, ...] = ()
    """Elements of the state of each recurrence, as ``TargetModel.state_widths``."""

    def __init__(
        self, shape: LayerShape, vocabulary: int, longest: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self._known: dict[tuple[bytes, int], torch.Tensor] = {}
        for name, size in self.sizes(vocabulary, longest).items():
            # Buffers, so that graphs and guards know them as weights.
            self.register_buffer(name, torch.zeros(size, dtype=dtype, device=device))
        self.load(seed)

    def sizes(self, vocabulary: int, longest: int) -> dict[str, tuple[int, ...]]:
        """Return the sizes of all tables, by name."""
        layers, heads = self.shape.layers, self.shape.heads
        wide = (heads + 2 * self.shape.kv_heads) * self.shape.head_dim
        return {
            "by_token": (vocabulary, layers, wide),
            "by_position": (longest, layers, wide),
            "sinks": (layers, heads),
        }

    @property
    def width(self) -> int:
        """Elements of a row of all layers."""
        return self.shape.layers * self.shape.width

    def name(self, layer: int) -> str:
        """Return what the outputs of a layer are called in a finding."""
        return f"attention of layer {layer}"

    def load(self, seed: int) -> None:
        """Fill all tables anew, in place, as weights are reloaded."""
        # The cached rows are of the old tables.
        self._known.clear()
        draw = torch.Generator().manual_seed(seed)
        for table in self.buffers():
            # Drawn on the host in float32: a case has the same tables on every device, rounded to its dtype.
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[T, layers, heads, dim]``, keys and values ``[T, layers, kv_heads, dim]``.

        :param change: done to the rows first, ``[T, layers, (heads + 2 kv_heads) * dim]``.
        """
        rows = change(self.by_token[ids] + self.by_position[positions])
        queries, stored = self.shape.heads, self.shape.kv_heads
        heads = rows.view(*rows.shape[:2], queries + 2 * stored, self.shape.head_dim)
        return heads[:, :, :queries], heads[:, :, queries : queries + stored], heads[:, :, queries + stored :]

    def rows(self, ids: np.ndarray, first: int) -> torch.Tensor:
        """Return, in float64, what the layers make of the tokens from position ``first`` on, side by side.

        ``ids int64[S]`` are the tokens of one request from its first position on; returns ``[n, width]``.
        """
        # A batch runs eager and from a graph, and the rows are the same.
        key = ids.tobytes(), first
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                # All at once: it happens seldom, and a batch's rows are asked for twice in a row.
                self._known.clear()
            self._known[key] = self.computed(torch.from_numpy(ids).to(self.by_token.device), first)
        return self._known[key]

    def computed(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Compute what ``rows`` returns, of ``ids int64[S]`` on the device."""
        return self.attended(ids, first).flatten(1)

    def attended(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return, in float64, what the rows from position ``first`` on attend to: ``[n, layers, width]``.

        ``ids int64[S]`` are the tokens of one request from its first position on.
        """
        shape, positions = self.shape, torch.arange(len(ids), device=ids.device)
        query, *stored = self.split(ids, positions)
        # Rounded as the cache stores them, since that error is not the backend's.
        keys, values = (part.to(shape.kv_dtype or part.dtype).double() for part in stored)
        rows = positions[first:]
        grouped = query[first:].double()
        grouped = grouped.reshape(*grouped.shape[:2], shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        # [layers, kv_heads, heads of each, n, S]
        scores = grouped.permute(1, 2, 3, 0, 4) @ keys.permute(1, 2, 3, 0).unsqueeze(2) * shape.scale
        for layer, window in enumerate(shape.windows):
            seen = positions <= rows[:, None]
            if window is not None:
                # A window of w tokens has the row's own and w - 1 before it.
                seen &= positions > rows[:, None] - window
            # Capped before the mask: the tanh of minus infinity is finite, and hidden keys would be seen.
            if (cap := shape.softcap_of(layer)) is not None:
                scores[layer] = cap * (scores[layer] / cap).tanh()
            scores[layer].masked_fill_(~seen, -torch.inf)
        if shape.has_sinks:
            sinks = self.sinks.double().view(*scores.shape[:3], 1, 1).expand(*scores.shape[:4], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : len(ids)]  # a sink takes part in the sum, and has no value
        mean = weights @ values.permute(1, 2, 0, 3).unsqueeze(2)
        return mean.permute(3, 0, 1, 2, 4).flatten(2)

    def outputs(
        self,
        of_rows: Rows,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        layers: Iterable[int] | None = None,
    ) -> torch.Tensor:
        """Let the runner run every layer, or some; returns the outputs side by side, ``[T, layers * width]``."""
        attention = self.split(ids, positions, of_rows.spoiled(attend.real))
        found = []
        for layer in range(self.shape.layers) if layers is None else layers:
            query, keys, values = (part[:, layer].contiguous() for part in attention)
            found.append(attend(layer, query, keys, values, self.scoring(layer)).flatten(1))
        return torch.cat(found, dim=1)


@attrs.frozen(kw_only=True)
class Rows:
    """What a probe does with the rows of a batch, in addition to its layers."""

    padding: float | None = None
    """What rows of padding hold in all their elements; None: what is computed of padded ids and positions."""

    def spoiled(self, real: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what puts it into the rows ``[T, layers, ...]`` that are not ``real bool[T]``."""
        garbage = self.padding
        if garbage is None:
            return lambda rows: rows
        return lambda rows: torch.where(real[:, None, None], rows, garbage)  # no product, as garbage may be NaN

    def coupled(self, hidden: torch.Tensor, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return what becomes of the rows of a batch, ``[T, hidden_size]``: a subclass may couple them."""
        return hidden


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


class ProbeTarget(_Probe):
    """A ``TargetModel`` whose hidden states are the outputs of its layers, side by side."""

    adapters: torch.Tensor
    """``[adapters + 1, hidden_size]``: what each adapter adds to a row's hidden state; the first, 0, is none."""

    def __init__(
        self,
        tables: Tables,
        of_rows: Rows,
        vocabulary: int,
        longest: int,
        seed: int,
        *,
        agreeing: bool = False,
        adapters: int = 0,
    ) -> None:
        super().__init__(tables, of_rows, "probe", tables.width, vocabulary, seed, agreeing)
        vectors = torch.randn(adapters + 1, self.hidden_size, generator=torch.Generator().manual_seed(seed + 1))
        vectors[0] = 0
        self.register_buffer("adapters", vectors.to(self.head))
        self.added: torch.Tensor | None = None
        """``[T, hidden_size]``: what adapters add in this forward."""
        self.state_widths = tables.state_widths
        self.mrope, self.dtype = False, tables.by_token.dtype
        self.windows: Mapping[int, int | None] = dict(enumerate(tables.shape.windows))
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
        ids = input_ids.long()
        hidden = self.tables.outputs(self.of_rows, ids, positions, attend)
        hidden = self.of_rows.coupled(hidden if self.added is None else hidden + self.added, ids, attend.real)
        return hidden, hidden.repeat(1, len(aux_layers)) if aux_layers else None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not asked of a model that reads token ids."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).argmax(dim=-1)


class ProbeAdapters:
    """The ``Adapters`` of a probe, which has their weights."""

    def __init__(self, target: ProbeTarget) -> None:
        self.names = tuple(f"probe adapter {number}" for number in range(1, len(target.adapters)))
        self._target = target

    @contextmanager
    def applied(self, lanes: torch.Tensor, active: torch.Tensor) -> Iterator[None]:
        # Rows of padding have no lane, match none, and so take adapter 0, which adds nothing.
        own = lanes[:, None] == torch.arange(len(active), device=lanes.device)
        self._target.added = self._target.adapters.index_select(0, torch.where(own, active, 0).sum(1))
        try:
            yield
        finally:
            self._target.added = None

    def weights(self) -> Iterator[Weight]:
        return iter(())


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
        super().__init__(tables, of_rows, "probe drafter", target.hidden_size, target.vocab_size, seed, agreeing)
        self.kind = kind
        self.windows: Mapping[int, int | None] = dict(enumerate(tables.shape.windows))
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
            # A module is one layer of the tables, with a cache of its own.
            layers = layers[module : module + 1]
        ids = input_ids.long()
        mixed = self.mixed(self.tables.outputs(self.of_rows, ids, positions, attend, layers), hidden)
        return self.of_rows.coupled(mixed, ids, attend.real)

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
        return self.logits(hidden).argmax(-1)

    def logits(self, hidden: torch.Tensor, module: int = 0) -> torch.Tensor:
        return hidden @ self.head

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """It does not."""


MOST_KNOWN = 256
"""Requests whose dense rows are kept."""

GARBAGE = (float("nan"), 1e4)
"""What rows of padding hold: NaN, which a maximum may leave out, or more than any real element, and a float16."""

MASK_TOKEN = VOCABULARY - 1
"""The token in the rows of drafts that a parallel pass has yet to make."""

_UNLIKELY = 0.05
"""Of other logits, where two tokens are likelier than the rest."""
