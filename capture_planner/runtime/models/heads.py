"""EAGLE and EAGLE-3 heads in plain torch, over the weights as they are published.

Both read what the target computed at one position and the token after it, and propose the token
after that. What each computes, and what its tensors are called, is as in vLLM 0.33 (``llama_eagle``,
``llama_eagle3``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from capture_planner.errors import RunError
from capture_planner.runtime.models.loading import weights_of
from capture_planner.runtime.models.protocols import Attend, Scoring, TargetModel, Weight

Config = Any
"""A ``LlamaConfig`` with what EAGLE adds to it, which has no types of its own."""

AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Where a configuration says which layers of the target an EAGLE-3 head reads."""


class _Attention(nn.Module):
    """Grouped-query attention with rotary positions, over inputs of ``width``."""

    def __init__(self, config: Config, layer: int, width: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.scoring = Scoring(scale=config.head_dim**-0.5)
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return ``[T, hidden_size]`` for ``states [T, width]``; ``cos`` and ``sin [T, 1, head_dim]``."""
        query, key, value = (
            projection(states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(self.layer, _rotate(query, cos, sin), _rotate(key, cos, sin), value, self.scoring)
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected


class _Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[T, hidden_size]``."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class _Block(nn.Module):
    """Attention and MLP of a decoder layer, each added to the residual stream."""

    def __init__(self, config: Config, layer: int, width: int, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = _Attention(config, layer, width)
        self.mlp = _Mlp(config)
        self.input_layernorm = _norm(config) if has_input_norm else nn.Identity()
        self.post_attention_layernorm = _norm(config)

    def _add(
        self, residual: torch.Tensor, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        residual = residual + self.self_attn(normed, cos, sin, attend)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class _Layer(_Block):
    """A decoder layer."""

    def forward(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the residual stream ``[T, hidden_size]`` after this layer."""
        return self._add(states, self.input_layernorm(states), cos, sin, attend)


class _MixingLayer(_Block):
    """The first layer of EAGLE-3: attention reads the normed embedding next to the normed state."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = _norm(config)
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the residual stream ``[T, hidden_size]`` after this layer."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return self._add(normed if self.norm_before_residual else hidden, both, cos, sin, attend)


class _Head(nn.Module):
    """What the two kinds share: embeddings and logits, their own or the target's, and rotary positions.

    ``own`` are the optional parts that there are weights for: embed_tokens, lm_head, d2t, fc.bias.
    """

    d2t: torch.Tensor | None
    """``int64[vocab_size]``: how far a drafted token is from the same token of the target."""

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str]) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = getattr(config, "draft_vocab_size", None) or target.vocab_size
        self.aux_layers: tuple[int, ...] = ()
        self._target_embed, self._target_logits = target.embed, target.logits
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.embed_tokens, self.lm_head = None, None
        if "embed_tokens.weight" in own:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if "lm_head.weight" in own:
            self.lm_head = nn.Linear(config.hidden_size, self.vocab_size, bias=False)
        d2t = torch.zeros(self.vocab_size, dtype=torch.int64) if "d2t" in own else None
        self.register_buffer("d2t", d2t)

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Raise ``RunError``: only EAGLE-3 reads auxiliary states."""
        raise RunError(f"{self.name} reads the target's last hidden state, not auxiliary ones")

    @torch.no_grad()
    def propose(self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token of each row ``[N, hidden_size]``, ``int64[N]`` of the target's."""
        normed = self._before_logits(hidden)
        logits = self._target_logits(normed) if self.lm_head is None else self.lm_head(normed)
        token = logits.argmax(dim=-1)
        return token if self.d2t is None else token + self.d2t[token]

    def learn(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Do nothing: these heads are not given answers."""

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer of its own; embeddings and logits may be the target's."""
        return weights_of(self.named_modules())

    def _before_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is None:
            return self._target_embed(input_ids)
        embeddings: torch.Tensor = self.embed_tokens(input_ids)
        return embeddings

    def _rotations(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, ``[T, 1, head_dim]``."""
        cos, sin = self.rotary_emb(states, positions.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


class Eagle(_Head):
    """EAGLE: its input is mixed from the embedding and the target's last hidden state.

    The first layer has no input norm, nor is there a final one; its tokens are those that the
    target's output embeddings find likeliest, unless it has its own.
    """

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str]) -> None:
        super().__init__(config, target, own)
        hidden = config.hidden_size
        self.fc = nn.Linear(hidden + target.hidden_size, hidden, bias="fc.bias" in own)
        self.layers = nn.ModuleList(
            _Layer(config, layer, hidden, has_input_norm=layer > 0) for layer in range(self.num_layers)
        )

    @torch.no_grad()
    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return ``[T, hidden_size]``, as ``Drafter`` says."""
        states: torch.Tensor = self.fc(torch.cat([self._embed(input_ids), hidden], dim=-1))
        cos, sin = self._rotations(states, positions)
        for layer in self.layers:
            states = layer(states, cos, sin, attend)
        return states


class Eagle3(_Head):
    """EAGLE-3: its input is mixed from auxiliary states of the target, and then its own last state.

    Attention of the first layer reads the normed embedding next to the normed state. What goes on to
    the next step is the residual stream before the final norm.
    """

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str]) -> None:
        super().__init__(config, target, own)
        hidden, depth = config.hidden_size, target.num_layers
        nested = getattr(config, "eagle_config", None) or {}
        configured = getattr(config, AUX_LAYER_IDS, None) or nested.get(AUX_LAYER_IDS)
        wanted = configured or (2, depth // 2, depth - 3)
        # Small targets do not have the layers that real ones are tapped at; the same one may be twice.
        self.aux_layers = tuple(wanted if configured else (min(max(layer, 0), depth - 1) for layer in wanted))
        self.fc = nn.Linear(len(self.aux_layers) * target.hidden_size, hidden, bias="fc.bias" in own)
        rest = (_Layer(config, layer, hidden) for layer in range(1, self.num_layers))
        self.layers = nn.ModuleList([_MixingLayer(config), *rest])
        self.norm = _norm(config)

    @torch.no_grad()
    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Return ``[T, hidden_size]`` of auxiliary states ``[T, n * target's hidden_size]``."""
        states: torch.Tensor = self.fc(aux)
        return states

    @torch.no_grad()
    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return ``[T, hidden_size]``, as ``Drafter`` says."""
        cos, sin = self._rotations(hidden, positions)
        first, *rest = self.layers
        states: torch.Tensor = first(self._embed(input_ids), hidden, cos, sin, attend)
        for layer in rest:
            states = layer(states, cos, sin, attend)
        return states

    def _before_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(hidden)
        return normed


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the halves of each head: ``[T, heads, head_dim]``."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _norm(config: Config) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
