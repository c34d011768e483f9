"""EAGLE, EAGLE-3 and MTP heads in plain torch, over the weights as they are published.

All read what the target computed at one position and the token after it, and propose the token after that. What each
computes, and what its tensors are called, is as in vLLM 0.33 (``llama_eagle``, ``llama_eagle3``, ``deepseek_mtp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from capture_planner.errors import RunError
from capture_planner_runner.models.interface import INTERFACE, Call
from capture_planner_runner.models.loading import weights_of
from capture_planner_runner.models.protocols import Attend, TargetModel, Weight
from capture_planner_runner.models.spread import Vocabulary, spread

Config = Any
"""A ``LlamaConfig`` with EAGLE's additions, which are not typed."""

AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key of the target's layers that an EAGLE-3 head reads."""


class _Layer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """A decoder layer; called with states ``[1, T, hidden_size]`` and what ``_Head.arguments`` returns."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        # The library's norms are half a dozen operators each.
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, norm, _norm(config))
        self.self_attn.o_proj = nn.Linear(self.self_attn.o_proj.in_features, config.hidden_size, bias=False)


class _MixingLayer(_Layer):  # type: ignore[no-untyped-call]
    """The first layer of EAGLE-3: attention reads the normed embedding next to the normed state."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, width, bias=config.attention_bias))
        self.hidden_norm = _norm(config)
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(  # type: ignore[override, unused-ignore]
        self, embeddings: torch.Tensor, hidden: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """Return the residual stream ``[1, T, hidden_size]`` after this layer; both inputs are of that shape."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        residual = (normed if self.norm_before_residual else hidden) + self.self_attn(both, **arguments)[0]
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class _Head(nn.Module):
    """Common parts of all kinds: embeddings and logits, own ones or the target's, and rotary positions.

    ``own`` are the optional parts that there are weights for: embed_tokens, lm_head, d2t, fc.bias, mask_hidden.
    ``name`` says where its weights come from.
    """

    d2t: torch.Tensor | None
    """``int64[vocab_size]``: how far a drafted token is from the same token of the target."""

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str], name: str) -> None:
        super().__init__()
        self.name = name
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = getattr(config, "draft_vocab_size", None) or target.vocab_size
        self._vocabulary = Vocabulary(self.vocab_size, target.among)
        self.windows: tuple[int | None, ...] = (None,) * self.num_layers
        self.aux_layers: tuple[int, ...] = ()
        self.mask_token: int = getattr(config, "mask_token", 0)
        self.mask_hidden: nn.Parameter | None = None
        self._among = target.among
        self._target_embed, self._target_likeliest = target.embed, target.likeliest
        config._attn_implementation = INTERFACE
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.norm: nn.Module = nn.Identity()
        vocab, hidden = self.vocab_size, self.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if "embed_tokens.weight" in own else None
        self.lm_head = nn.Linear(hidden, vocab, bias=False) if "lm_head.weight" in own else None
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64) if "d2t" in own else None)

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Raise ``RunError``: only EAGLE-3 reads auxiliary states."""
        raise RunError(f"{self.name} reads the target's last hidden state, not auxiliary ones")

    @torch.no_grad()
    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return the likeliest token of each row ``[N, hidden_size]``, ``int64[N]`` of the target's."""
        normed = self.norm(hidden)
        own = self.lm_head
        token = self._target_likeliest(normed) if own is None else self._vocabulary.likeliest(own(normed))
        return token if self.d2t is None else token + self.d2t[token]

    def spread(self) -> None:
        """Leave of the layers, and of its own output embeddings, what this rank has: its plan counts on their heads.

        What mixes its inputs stays whole, and so do the output embeddings of MTP modules.
        """
        spread(self, LlamaConfig.base_model_tp_plan, kv_heads=self.num_kv_heads, among=self._among)
        if self.lm_head is not None:
            self._vocabulary.keep(self.lm_head)

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Do nothing: these heads are not given answers."""

    def weights(self) -> Iterator[Weight]:
        """Yield its own parameters and buffers; embeddings and logits may be the target's."""
        return weights_of(self.named_modules())

    def _add_mask(self, own: frozenset[str], width: int) -> None:
        if "mask_hidden" in own:
            self.mask_hidden = nn.Parameter(torch.randn(width))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embed = self._target_embed if self.embed_tokens is None else self.embed_tokens
        embeddings: torch.Tensor = embed(input_ids)
        return embeddings

    def arguments(self, states: torch.Tensor, positions: torch.Tensor, attend: Attend) -> dict[str, Any]:
        """Return what each layer is called with, next to its states."""
        rotations = self.rotary_emb(states, positions.unsqueeze(0))
        return {"position_embeddings": rotations, INTERFACE: Call(attend, (None,) * self.num_layers)}


class Eagle(_Head):
    """EAGLE: its input is mixed from the embedding and the target's last hidden state.

    The first layer has no input norm, nor is there a final one; its tokens are those that the
    target's output embeddings find likeliest, unless it has its own.
    """

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str], name: str) -> None:
        super().__init__(config, target, own, name)
        hidden = config.hidden_size
        self.fc = nn.Linear(hidden + target.hidden_size, hidden, bias="fc.bias" in own)
        self._add_mask(own, target.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(self.num_layers))
        self.layers[0].input_layernorm = nn.Identity()

    @torch.no_grad()
    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        states: torch.Tensor = self.fc(torch.cat([self._embed(input_ids), hidden], dim=-1))
        arguments, states = self.arguments(states, positions, attend), states.unsqueeze(0)
        for layer in self.layers:
            states = layer(states, **arguments)
        return states[0]


class Eagle3(_Head):
    """EAGLE-3: its input is mixed from auxiliary states of the target, and then its own last state.

    Attention of the first layer reads the normed embedding next to the normed state. What goes on to
    the next step is the residual stream before the final norm.
    """

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str], name: str) -> None:
        super().__init__(config, target, own, name)
        hidden, depth = config.hidden_size, target.num_layers
        nested = getattr(config, "eagle_config", None) or {}
        configured = getattr(config, AUX_LAYER_IDS, None) or nested.get(AUX_LAYER_IDS)
        wanted = configured or (2, depth // 2, depth - 3)
        # Small targets do not have the layers that real ones are tapped at; the same one may be twice.
        self.aux_layers = tuple(wanted if configured else (min(max(layer, 0), depth - 1) for layer in wanted))
        self.fc = nn.Linear(len(self.aux_layers) * target.hidden_size, hidden, bias="fc.bias" in own)
        self._add_mask(own, len(self.aux_layers) * target.hidden_size)
        self.layers = nn.ModuleList([_MixingLayer(config), *(_Layer(config, at) for at in range(1, self.num_layers))])
        self.norm = _norm(config)

    @torch.no_grad()
    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Return ``[T, hidden_size]`` of auxiliary states ``[T, n * target's hidden_size]``."""
        states: torch.Tensor = self.fc(aux)
        return states

    @torch.no_grad()
    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        arguments = self.arguments(hidden, positions, attend)
        first, *rest = self.layers
        states: torch.Tensor = first(self._embed(input_ids).unsqueeze(0), hidden.unsqueeze(0), **arguments)
        for layer in rest:
            states = layer(states, **arguments)
        return states[0]


class _SharedHead(nn.Module):
    """The final norm of an MTP module, and its output embeddings where it has its own."""

    def __init__(self, config: Config, has_own: bool) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if has_own else None


class _Module(_Layer):  # type: ignore[no-untyped-call]
    """One MTP module: embedding and state, each normed, are mixed and go through a decoder layer."""

    def __init__(self, config: Config, number: int, has_own_head: bool) -> None:
        super().__init__(config, number)
        self.enorm, self.hnorm = _norm(config), _norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = _SharedHead(config, has_own_head)

    def forward(  # type: ignore[override, unused-ignore]
        self, embeddings: torch.Tensor, hidden: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """Return the state ``[T, hidden_size]`` after the module's final norm; both inputs are of that shape."""
        mixed = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        states: torch.Tensor = super().forward(mixed.unsqueeze(0), **arguments)
        normed: torch.Tensor = self.shared_head.norm(states[0])
        return normed


class Mtp(_Head):
    """Multi-token prediction, as DeepSeek-V3 has it: a module that drafts a chain, or several, one draft each.

    The layers are dense Llama layers. What goes on to the next draft is the state after the module's final norm, which
    is also what its output embeddings read.
    """

    def __init__(self, config: Config, target: TargetModel, own: frozenset[str], name: str) -> None:
        super().__init__(config, target, own, name)
        self.layers = nn.ModuleList(
            _Module(config, number, f"layers.{number}.shared_head.head.weight" in own)
            for number in range(self.num_layers)
        )

    @torch.no_grad()
    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        # As in vLLM and SGLang: the first position has no token before it that a module was trained on.
        embeddings = torch.where(positions.unsqueeze(-1) == 0, 0, self._embed(input_ids))
        states: torch.Tensor = self.layers[module](embeddings, hidden, **self.arguments(hidden, positions, attend))
        return states

    @torch.no_grad()
    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return the likeliest token of each row ``[N, hidden_size]``, ``int64[N]``, by one module's head."""
        shared: Any = self.layers[module]
        own = shared.shared_head.head
        if own is None:
            return self._target_likeliest(hidden)
        logits: torch.Tensor = own(hidden)
        return logits.argmax(dim=-1)


def _norm(config: Config) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
