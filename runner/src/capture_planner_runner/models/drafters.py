"""Drafters: heads and draft models, loaded from a folder or of the plan's numbers; and oracles.

EAGLE, EAGLE-3 and MTP heads are in plain torch, over the weights as they are published. All read what the target
computed at one position and the token after it, and propose the token after that. What each computes, and what its
tensors are called, is as in vLLM 0.33 (``llama_eagle``, ``llama_eagle3``, ``deepseek_mtp``).

A draft model is a whole model that reads only tokens, and has the target's vocabulary. Oracles know what the target
will say, so that how often drafts are accepted can be chosen: all of a real drafter's work is done, so that a step
takes what it takes; only its proposals are replaced. The answers are in one persistent table, read inside the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from capture_planner.errors import RunError
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner_runner.models.huggingface import HuggingFaceModel, load_target, refuse_moving_rope
from capture_planner_runner.models.interface import INTERFACE, Call
from capture_planner_runner.models.loading import (
    Source,
    StoredTensor,
    contradictions,
    fill,
    held_back,
    library_errors,
    locate,
    mask_token_of,
    read_tensors,
    seeded,
    weights_of,
)
from capture_planner_runner.models.protocols import Attend, Drafter, TargetModel, Weight
from capture_planner_runner.models.spread import Vocabulary, spread

Config = Any
"""A ``LlamaConfig`` with EAGLE's additions, which are not typed."""

AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key of the target's layers that an EAGLE-3 head reads."""


class _Layer(LlamaDecoderLayer):
    """A decoder layer; called with states ``[1, T, hidden_size]`` and what ``_Head.arguments`` returns."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        # The library's norms are half a dozen operators each.
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, norm, _norm(config))
        self.self_attn.o_proj = nn.Linear(self.self_attn.o_proj.in_features, config.hidden_size, bias=False)


class _MixingLayer(_Layer):
    """The first layer of EAGLE-3: attention reads the normed embedding next to the normed state."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        # Attention reads the embedding next to the state, so its projections are twice as wide as the library's.
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
        self.windows: Mapping[int, int | None] = dict.fromkeys(range(self.num_layers))
        self.aux_layers: tuple[int, ...] = ()
        self.mask_token: int = getattr(config, "mask_token", 0)
        self.mask_hidden: nn.Parameter | None = None
        self._among = target.among
        self._target_embed, self._target_likeliest = target.embed, target.likeliest
        self._target_logits, self._target_vocab_size = target.logits, target.vocab_size
        # The library's layers find the runner's attention by this name.
        config._attn_implementation = INTERFACE
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.norm: nn.Module = nn.Identity()
        # Only what the folder has weights for is made; the rest is the target's, as published heads leave it out.
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
        # A reduced vocabulary counts its own tokens: ``d2t`` is how far each is from the target's.
        token = self._target_likeliest(normed) if own is None else self._vocabulary.likeliest(own(normed))
        return token if self.d2t is None else token + self.d2t[token]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return the logits of each row, ``[N, the target's vocab_size]``; of the other tokens, minus infinity."""
        normed = self.norm(hidden)
        if self.lm_head is None:
            return self._target_logits(normed)
        own = self._vocabulary.whole(self.lm_head(normed))
        if self.d2t is None:
            return own
        # Tokens that the head cannot draft have probability 0, so that none is drawn.
        tokens = torch.arange(self.vocab_size, device=own.device) + self.d2t
        return own.new_full((len(own), self._target_vocab_size), -torch.inf).index_copy_(1, tokens, own)

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
        return {"position_embeddings": rotations, INTERFACE: Call(attend, self.windows)}


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
        # EAGLE's first layer reads what ``fc`` mixes as it is: its checkpoints have no norm for it.
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
        # Published heads have the key at the top or in ``eagle_config``.
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


class _Module(_Layer):
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
        own = self._own_head(module)
        return self._target_likeliest(hidden) if own is None else own(hidden).argmax(dim=-1)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return the logits of each row ``[N, vocab_size]``, by one module's head."""
        own = self._own_head(module)
        return self._target_logits(hidden) if own is None else own(hidden)

    def _own_head(self, module: int) -> Any:
        shared: Any = self.layers[module]
        return shared.shared_head.head


def _norm(config: Config) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DraftLanguageModel:
    """A ``Drafter`` that is a complete language model: embeddings, layers and output embeddings.

    :param mask_token: what stands in the rows of drafts yet to be made, where it drafts in parallel (PARD).
    """

    def __init__(self, model: HuggingFaceModel, mask_token: int = 0) -> None:
        self._model = model
        self.name, self.windows = model.name, model.windows
        self.num_layers, self.hidden_size = model.num_layers, model.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.aux_layers: tuple[int, ...] = ()
        self.mask_token, self.mask_hidden = mask_token, None

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Raise ``RunError``: nothing of the target is read."""
        raise RunError(f"{self.name} is a draft model, which reads no states of the target")

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        """Return its hidden states ``[T, hidden_size]``; ``hidden`` is not read."""
        states, _ = self._model.forward(input_ids=input_ids, embeddings=None, positions=positions, attend=attend)
        return states

    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return its likeliest token after each row, ``int64[N]``."""
        return self._model.likeliest(hidden)

    def logits(self, hidden: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return its logits after each row, ``[N, vocab_size]``."""
        return self._model.logits(hidden)

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Do nothing: it is not given answers."""

    def weights(self) -> Iterator[Weight]:
        return self._model.weights()


def load_draft_model(
    source: Path | None, speculative: Speculative, target: TargetModel, *, seed: int = 0
) -> DraftLanguageModel:
    """Return the model at ``source``, or a Llama of the plan's numbers with random weights, as ``load_target`` does.

    Raises ``RunError`` for a model with another vocabulary than the target's, with fewer positions, with multimodal
    rope, or with other numbers than the plan has.
    """
    draft = speculative.model
    if draft.latent is not None or draft.sinks:
        raise RunError("speculative.model: no draft model here has latent attention or sinks; leave them out")
    _, module, attribute = next(target.weights())
    device: torch.device = getattr(module, attribute).device
    shape = Model(
        name="draft-model",
        num_layers=draft.num_layers,
        num_heads=draft.num_heads or target.num_heads,
        num_kv_heads=draft.num_kv_heads or target.num_kv_heads,
        head_dim=draft.head_dim or target.head_dim,
        max_model_len=target.max_model_len,
        hidden_size=target.hidden_size if source is None else None,
        vocab_size=draft.vocab_size or target.vocab_size,
        dtype=DataType(str(target.dtype).removeprefix("torch.")),
    )
    model = load_target(source, shape, device=device, dtype=target.dtype, seed=seed, among=target.among)
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
    pairs = [(name, getattr(shape, name), getattr(model, name)) for name in names]
    problems = contradictions("speculative.model", pairs, model.name)
    if model.vocab_size != target.vocab_size:
        problems.append(
            f"speculative.model: {model.name} has {model.vocab_size} tokens, the target {target.vocab_size}; they need "
            "the same vocabulary"
        )
    if model.state_widths:
        problems.append(f"speculative.model: {model.name} has recurrent layers, which no draft model here has")
    if model.max_model_len < target.max_model_len:
        problems.append(
            f"speculative.model: {model.name} has at most {model.max_model_len} positions, the target "
            f"{target.max_model_len}"
        )
    if model.mrope or model.sinks:
        kind = "multimodal rope" if model.mrope else "attention sinks"
        problems.append(f"speculative.model: {model.name} has {kind}, which no draft model here has")
    if problems:
        raise RunError("\n".join(problems))
    mask = 0
    if speculative.parallel_drafting:
        mask = target.vocab_size - 1 if source is None else mask_token_of(locate(source), target.vocab_size)
    return DraftLanguageModel(model, mask)


__all__ = ["Eagle", "Eagle3", "Mtp", "load_drafter"]

Head = Eagle | Eagle3 | Mtp

_KINDS: dict[Method, type[Head]] = {Method.EAGLE: Eagle, Method.EAGLE3: Eagle3, Method.MTP: Mtp}

_UNUSED = ("t2d", "rotary_emb.inv_freq")
"""Tensors of published files that follow from others: the inverse of d2t, and rotary frequencies."""


def load_drafter(
    source: Path | None, speculative: Speculative, target: TargetModel, *, seed: int = 0
) -> Head | DraftLanguageModel:
    """Return the head or the draft model at ``source``, or one of the plan's numbers with random weights.

    ``source`` is a local folder (config.json and safetensors, in the published layout) or a configuration file; weights
    that are not there are random, the same for the same ``seed``. It is on the target's device and in its dtype.
    Embeddings and output embeddings that a folder does not have are the target's.

    MTP modules are in the folder of their target, as the layers after its own; nothing else there is read.

    Raises ``RunError`` for a folder that contradicts the plan, for more drafts than there are modules, and, in one
    error, for all tensors that are missing, unexpected or of another shape.
    """
    if speculative.method is Method.DRAFT_MODEL:
        return load_draft_model(source, speculative, target, seed=seed)
    kind = _KINDS[speculative.method]
    modules = speculative.model.num_layers
    if speculative.is_modules and speculative.num_tokens > modules:
        raise RunError(
            f"speculative.num_tokens: {speculative.num_tokens} drafts of {modules} modules, one token each; "
            f"plan {modules} or fewer, or one module"
        )
    found = None if source is None else locate(source)
    config = _planned(speculative, target) if found is None else _read(found, speculative, target)
    is_random = found is None or not found.files
    tensors = {} if found is None else read_tensors(found.files)
    if kind is Mtp:
        tensors = _modules(tensors, config.first_module)
    else:
        tensors = _published(tensors, with_mask=speculative.parallel_drafting)
    _, module, attribute = next(target.weights())
    device: torch.device = getattr(module, attribute).device
    reduced = (getattr(config, "draft_vocab_size", None) or target.vocab_size) != target.vocab_size
    own = frozenset(tensors)
    if is_random:
        own = frozenset(["lm_head.weight", *["d2t"] * reduced] if kind is Eagle3 else [])
    if speculative.parallel_drafting:
        own |= {"mask_hidden"}
    if reduced and not is_random:
        # The target's output embeddings do not fit: these must be there, or are listed as missing.
        own |= {"lm_head.weight", "d2t"}
    origin = "the plan's numbers" if found is None else found.label
    name = f"{kind.__name__} of {origin}" + (f", random weights (seed {seed})" if is_random else "")
    with library_errors(f"{name} cannot be made"), seeded(seed, device):
        drafter = kind(config, target, own, name).eval().requires_grad_(False)
        # Parameters only: rotary frequencies stay in float32, as in the target.
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(target.dtype)
        if is_random and drafter.d2t is not None:
            # Distinct tokens in ascending order: d2t holds how far each is from its index.
            chosen = torch.randperm(target.vocab_size)[: drafter.vocab_size].sort().values
            drafter.d2t.copy_(chosen - torch.arange(drafter.vocab_size))
    if found is not None and found.files:
        fill(drafter, tensors, found.config.parent)
    if any(not 0 <= layer < target.num_layers for layer in drafter.aux_layers):
        raise RunError(
            f"{drafter.name}: {AUX_LAYER_IDS} {list(drafter.aux_layers)}, the target has {target.num_layers} layers"
        )
    if drafter.embed_tokens is None and drafter.hidden_size != target.hidden_size:
        raise RunError(
            f"{drafter.name}: hidden_size {drafter.hidden_size} without embed_tokens.weight; the target's "
            f"embeddings are {target.hidden_size} wide"
        )
    # The numbers come from a file: a wrong one would index past the target's embeddings.
    if drafter.d2t is not None:
        tokens = drafter.d2t + torch.arange(drafter.vocab_size, device=drafter.d2t.device)
        if int(tokens.min()) < 0 or int(tokens.max()) >= target.vocab_size:
            raise RunError(f"{drafter.name}: d2t leads outside the target's {target.vocab_size} tokens")
        # Of two drafted tokens that are the same token of the target, only one has a probability there.
        if len(set(tokens.tolist())) < len(tokens):
            raise RunError(f"{drafter.name}: d2t leads to a token of the target twice, expected each once")
    # After the weights were filled in: a folder has those of the whole head.
    with library_errors(f"{name} cannot be spread over ranks"):
        drafter.spread()
    return drafter


def _planned(speculative: Speculative, target: TargetModel) -> Config:
    """Return the configuration of a head of the plan's numbers; what it does not say is the target's."""
    draft = speculative.model
    if draft.latent is not None or draft.sinks:
        raise RunError("speculative.model: no head here has latent attention or sinks; leave them out")
    vocab = draft.vocab_size or target.vocab_size
    if vocab > target.vocab_size or (speculative.method is not Method.EAGLE3 and vocab != target.vocab_size):
        raise RunError(
            f"speculative.model.vocab_size: {vocab} of the target's {target.vocab_size}; only eagle3 has a "
            "reduced vocabulary, and no larger one"
        )
    with library_errors("speculative.model: no random head has its numbers"):
        config: Config = LlamaConfig(
            num_hidden_layers=draft.num_layers,
            num_attention_heads=draft.num_heads or target.num_heads,
            num_key_value_heads=draft.num_kv_heads or target.num_kv_heads,
            head_dim=draft.head_dim or target.head_dim,
            hidden_size=target.hidden_size,
            intermediate_size=3 * target.hidden_size,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_model_len,
        )
    config.draft_vocab_size, config.first_module = vocab, 0
    # Any token will do where the weights are random.
    config.mask_token = target.vocab_size - 1
    return config


def _read(found: Source, speculative: Speculative, target: TargetModel) -> Config:
    """Return the configuration of a folder. Raises one ``RunError`` for all that is against it."""
    values = found.read_config()
    is_mtp = speculative.method is Method.MTP
    with library_errors(f"{found.config}: not the configuration of a Llama head"):
        config: Config = LlamaConfig.from_dict(values)
        refuse_moving_rope(config, str(found.config))
        if is_mtp:
            config.first_module, config.num_hidden_layers = config.num_hidden_layers, _module_count(values)
        config.mask_token = mask_token_of(found, target.vocab_size) if speculative.parallel_drafting else 0
        draft, eagle = speculative.model, values.get("eagle_config") or {}
        pairs = [
            ("num_layers", draft.num_layers, config.num_hidden_layers),
            ("num_heads", draft.num_heads or target.num_heads, config.num_attention_heads),
            ("num_kv_heads", draft.num_kv_heads or target.num_kv_heads, config.num_key_value_heads),
            ("head_dim", draft.head_dim or target.head_dim, config.head_dim),
            ("vocab_size", draft.vocab_size, values.get("draft_vocab_size") or config.vocab_size),
        ]
        problems = contradictions("speculative.model", pairs, found.config)
        if config.vocab_size != target.vocab_size:
            problems.append(f"{found.config}: vocab_size {config.vocab_size}, the target has {target.vocab_size}")
        if config.hidden_act != "silu":
            problems.append(f"{found.config}: hidden_act {config.hidden_act}, supported: silu")
        if is_mtp:
            keys = [key for key in _UNSUPPORTED_MODULES if values.get(key)]
            problems += [f"{found.config}: {key} is not supported: MTP modules here are dense layers" for key in keys]
        if config.hidden_size != target.hidden_size and speculative.method is not Method.EAGLE3:
            problems.append(f"{found.config}: hidden_size {config.hidden_size}, the target has {target.hidden_size}")
        unsupported = [
            name for name in ("norm_before_fc", "fc_norm", "norm_output") if eagle.get(name) or values.get(name)
        ]
        if eagle.get("use_aux_hidden_state", True) is False:
            unsupported.append("use_aux_hidden_state: false")
        problems += [f"{found.config}: {name} is not supported" for name in unsupported]
    if problems:
        raise RunError("\n".join(problems))
    return config


_NUMBER = re.compile("[0-9]{1,6}")

_UNSUPPORTED_MODULES = ("kv_lora_rank", "n_routed_experts", "num_experts", "num_local_experts")
"""Keys of latent attention and of experts, which modules here do not have."""


def _module_count(values: dict[str, Any]) -> int:
    """Return the MTP modules of a target's configuration."""
    count = values.get("num_nextn_predict_layers")
    return count if isinstance(count, int) else 0


def _modules(found: dict[str, StoredTensor], first: int) -> dict[str, StoredTensor]:
    """Return the tensors of the layers from ``first`` on as layers from 0; their embeddings are one tensor."""
    renamed: dict[str, StoredTensor] = {}
    for name, item in found.items():
        kind, _, rest = name.removeprefix("model.").partition(".")
        number, _, rest = rest.partition(".")
        if kind != "layers" or not _NUMBER.fullmatch(number) or int(number) < first or rest.endswith(_UNUSED):
            continue
        new = rest if rest == "embed_tokens.weight" else f"layers.{int(number) - first}.{rest}"
        renamed.setdefault(new, item)
    return renamed


def _published(found: dict[str, StoredTensor], *, with_mask: bool) -> dict[str, StoredTensor]:
    """Return tensors under one naming: without a prefix, the first layer as layers.0, the mask's state flat."""
    renamed: dict[str, StoredTensor] = {}
    for name, item in found.items():
        new = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if new in renamed:
            raise RunError(f"{item.file}: {name} is there under another name too, as {new}; keep one of them")
        if new == "mask_hidden":
            if with_mask:
                renamed[new] = attrs.evolve(item, tensor=item.tensor.flatten())
        elif not new.endswith(_UNUSED):
            renamed[new] = item
    return renamed


Kind = Literal["copy", "miss", "chance"]
"""Proposals are always right, never right, or right by chance."""

_BITS = 31
_MASK = (1 << _BITS) - 1


class OracleDrafter(nn.Module):
    """A ``Drafter`` that does the work of another and proposes from a table of answers.

    ``num_states`` requests are served at a time; the row ``num_states`` is for padding. ``length`` is
    the longest sequence, in tokens: a position past it is taken for the last. With ``miss`` the
    proposal is the answer's successor in the vocabulary. With ``chance`` a position is answered
    rightly with probability ``chance``, which depends only on the position and ``seed``.

    Raises ``RunError`` for a vocabulary of fewer than two tokens, and for a chance that is none.
    """

    table: torch.Tensor
    """``int64[num_states + 1, length]``: the token at each position of each request; 0 where not learned."""

    def __init__(
        self,
        drafter: Drafter,
        kind: Kind,
        *,
        num_states: int,
        length: int,
        vocab_size: int,
        chance: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if vocab_size < 2 or not 0.0 <= chance <= 1.0:
            raise RunError(
                f"a drafter that answers by {kind}: vocab_size {vocab_size} and chance {chance}; expected "
                "at least 2 tokens and a chance from 0 to 1"
            )
        self._drafter, self._kind = drafter, kind
        self._vocab_size, self._seed = vocab_size, seed & _MASK
        self._threshold = round(chance * (1 << _BITS))
        self.name = f"{kind} over {drafter.name}" + (f" (chance {chance:g})" if kind == "chance" else "")
        self.num_layers, self.hidden_size = drafter.num_layers, drafter.hidden_size
        self.num_heads, self.num_kv_heads = drafter.num_heads, drafter.num_kv_heads
        self.head_dim, self.aux_layers, self.windows = drafter.head_dim, drafter.aux_layers, drafter.windows
        self.mask_token = drafter.mask_token
        device = next((getattr(module, name).device for _, module, name in drafter.weights()), None)
        self.register_buffer("table", torch.zeros(num_states + 1, length, dtype=torch.int64, device=device))

    @property
    def mask_hidden(self) -> torch.Tensor | None:
        return self._drafter.mask_hidden

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        return self._drafter.combine(aux)

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        return self._drafter.forward(
            input_ids=input_ids, positions=positions, hidden=hidden, attend=attend, module=module
        )

    @torch.no_grad()
    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return the answer for each row, or a token that is not it, ``int64[N]``."""
        # Its logits are part of a step's work, so they are computed, and then not used.
        self._drafter.propose(hidden, state_indices, positions, module)
        answers = self.table[state_indices, positions.clamp(0, self.table.shape[1] - 1)]
        # The table is read inside the graph, so that a replay proposes for the requests of its step.
        if self._kind == "copy":
            return answers
        others = (answers + 1) % self._vocab_size
        if self._kind == "miss":
            return others
        return torch.where(_scatter(positions, self._seed) < self._threshold, answers, others)

    def logits(self, hidden: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Raise ``RunError``: it knows tokens, and draws none."""
        raise RunError(f"{self.name} proposes one token, and samples none; take a drafter that has probabilities")

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Note that the request with ``state_index`` will read ``tokens`` from its first position on.

        What was noted there before is forgotten. Raises ``RunError`` for an index that does not exist, or
        is for padding, and for more tokens than the table is long.
        """
        states, length = self.table.shape[0] - 1, self.table.shape[1]
        if not 0 <= state_index < states or len(tokens) > length:
            raise RunError(
                f"{len(tokens)} answers for request state {state_index}: the table has states 0 to {states - 1}, of "
                f"{length} tokens"
            )
        row = torch.zeros(length, dtype=torch.int64)
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self.table[state_index].copy_(row)

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer of the real drafter, and the table."""
        yield from self._drafter.weights()
        yield from weights_of([("", self)])


@held_back()
def choose_drafter(
    choice: Kind | Literal["random"] | Path,
    speculative: Speculative,
    target: TargetModel,
    *,
    num_states: int,
    length: int,
    chance: float = 0.5,
    seed: int = 0,
) -> Drafter:
    """Return the drafter that a run asks for: ``copy``, ``miss``, ``chance``, ``random``, or a folder.

    All but a folder are drafters of the plan's numbers with random weights; the first three answer from
    a table of ``num_states`` requests and ``length`` tokens. Raises ``RunError`` as ``load_drafter`` does.
    """
    drafter = load_drafter(choice if isinstance(choice, Path) else None, speculative, target, seed=seed)
    if isinstance(choice, Path) or choice == "random":
        return drafter
    return OracleDrafter(
        drafter, choice, num_states=num_states, length=length, vocab_size=target.vocab_size, chance=chance, seed=seed
    )


def _scatter(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a number below ``2**31`` for each position, ``int64[N]``; neighbours are far apart.

    Every product stays below ``2**63``, so that it is the same on all devices.
    """
    mixed = (positions + seed) & _MASK
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & _MASK
    return mixed ^ (mixed >> 16)
