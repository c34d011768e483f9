"""The interfaces of target models and drafters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from capture_planner.plugins.backend import Scoring
from capture_planner_runner.ranks.collectives import Collectives


class Attend(Protocol):
    """Attention as layers of a model call it in a forward of T rows; the runner supplies it."""

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, /
    ) -> torch.Tensor:
        """Attend in one layer, and return ``[T, num_heads, head_dim]``.

        Keys and values ``[T, num_kv_heads, head_dim]`` are written into the paged cache, and the backend attends with
        queries ``[T, num_heads, head_dim]``.
        """

    def recur(self, number: int, inputs: torch.Tensor, decays: torch.Tensor, /) -> torch.Tensor:
        """Run one recurrence of a recurrent layer, and return the state after each token, ``[T, width]``.

        :param number: counts the recurrences of the model. A layer may have several.
        :param inputs: ``[T, width]``, added to the state.
        :param decays: ``[T, width]``, logarithms of what the state is multiplied by before.
        """

    @property
    def real(self) -> torch.Tensor:
        """Which rows are tokens of requests, ``bool[T]``; the others are padding, and may hold NaN.

        An operator that couples rows (a maximum over the batch, the load of an expert, a sum over rows) must leave
        padding out: zeros in its place are not enough for all of them.
        """


Weight = tuple[str, nn.Module, str]
"""A parameter or buffer that graphs hold the pointer of: full name, its module, its attribute."""


class _Network(Protocol):
    name: str
    """Kind of the model and source of its weights, for the report."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer that a forward reads."""


class TargetModel(_Network, Protocol):
    """The served model, over a flat batch of T tokens of any number of requests."""

    vocab_size: int
    max_model_len: int
    windows: Mapping[int, int | None]
    """The sliding window of each layer that attends, by its number; None: full attention."""
    state_widths: tuple[int, ...]
    """Elements of the state of each recurrence, in the order of ``recur``'s numbers; empty: no layer is recurrent."""
    mrope: bool
    """True if positions have three sections (multimodal rope), and the shape ``[3, T]``."""
    dtype: torch.dtype
    among: Collectives
    """Collectives of the ranks that share it. Heads are counted over all of them, and each has its part."""

    def forward(
        self,
        *,
        input_ids: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states after the final norm, ``[T, hidden_size]``, and auxiliary ones.

        Exactly one of ``input_ids int[T]`` and ``embeddings [T, hidden_size]`` is given. ``positions`` is ``int64[T]``,
        or ``int64[3, T]`` with multimodal rope. Auxiliary states are what enters the layers ``aux_layers``, side by
        side: ``[T, len(aux_layers) * hidden_size]``; None where there are none. Reads no device value on the host.
        """

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[T, hidden_size]`` of ``int[T]`` tokens."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[N, vocab_size]`` for hidden states ``[N, hidden_size]``."""

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the token with the largest logit, ``int64[N]``, for hidden states ``[N, hidden_size]``."""


class LayeredModel(TargetModel, Protocol):
    """A target whose layers each add to a residual stream, and can be scaled one by one."""

    def scaled(self, layer: int, factor: float) -> AbstractContextManager[None]:
        """Multiply what a layer adds to the residual stream by ``factor``, until the context is left."""


class Adapters(Protocol):
    """LoRA adapters of a target, any number of which are active in one batch."""

    names: tuple[str, ...]
    """Kind of each adapter and source of its weights. Requests count them from 1; 0 is none."""

    def applied(self, lanes: torch.Tensor, active: torch.Tensor) -> AbstractContextManager[None]:
        """Return what a forward of the target runs in, so that each row has what its adapter adds.

        ``active int32[n]`` are adapters, and 0 for those that there are not; ``lanes int32[T]`` say which of them a
        row has, -1 for none. Their values are read on the device: a graph holds n adapters, whichever they are.
        """

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer that a forward reads."""


class Drafter(_Network, Protocol):
    """A model that proposes tokens, most of them from the target's hidden states."""

    windows: Mapping[int, int | None]
    """The sliding window of each layer, by its number; None: full attention."""
    mask_token: int
    """The token of a draft that a parallel pass has yet to make; 0 where it drafts one after another."""
    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs it reads; empty: it reads the target's last hidden state."""

    @property
    def mask_hidden(self) -> torch.Tensor | None:
        """``[width]``: the state of a mask token's row, in place of the target's hidden or auxiliary ones."""

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Return its hidden input ``[T, hidden_size]`` of the target's auxiliary states (EAGLE-3)."""

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        """Return ``[T, hidden_size]``: what ``propose`` reads, and the hidden input of the next step.

        ``input_ids int[T]`` stand one position after the tokens that ``hidden`` belongs to;
        ``positions int64[T]`` belong to ``hidden``. A draft model reads no ``hidden``: its tokens stand at their
        positions. ``module``: the one of several that drafts now; it attends only in its own layers.
        """

    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return one token for each row, ``int64[N]``, in the target's vocabulary.

        ``state_indices int64[N]`` say which request a row is (the last index is for padded rows), and
        ``positions int64[N]`` where the proposed token will stand. Captured: no host reads.
        """

    def logits(self, hidden: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return ``[N, the target's vocab_size]`` for each row; of tokens that it never proposes, minus infinity."""

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Note that the request with ``state_index`` will read ``tokens`` from its first position on.

        Only drafters that were given the target's answers (``copy``, ``miss``, ``chance``) use it.
        """
