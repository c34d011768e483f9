"""Loading drafters: from a folder in the published layout, or of the plan's numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import LlamaConfig

from capture_planner.errors import RunError
from capture_planner.records.model import Method, Speculative
from capture_planner_runner.models.draft_model import DraftLanguageModel, load_draft_model
from capture_planner_runner.models.heads import AUX_LAYER_IDS, Config, Eagle, Eagle3, Mtp
from capture_planner_runner.models.huggingface import refuse_moving_rope
from capture_planner_runner.models.loading import (
    Source,
    StoredTensor,
    contradictions,
    fill,
    library_errors,
    locate,
    mask_token_of,
    read_tensors,
    seeded,
)
from capture_planner_runner.models.protocols import TargetModel

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
            chosen = torch.randperm(target.vocab_size)[: drafter.vocab_size].sort().values
            drafter.d2t.copy_(chosen - torch.arange(drafter.vocab_size))
    if found is not None and found.files:
        fill(drafter, tensors, found.config.parent)
    _check(drafter, target)
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


def _check(drafter: Head, target: TargetModel) -> None:
    """Raise ``RunError`` where a head names layers or tokens that its target does not have."""
    if any(not 0 <= layer < target.num_layers for layer in drafter.aux_layers):
        raise RunError(
            f"{drafter.name}: {AUX_LAYER_IDS} {list(drafter.aux_layers)}, the target has {target.num_layers} layers"
        )
    if drafter.embed_tokens is None and drafter.hidden_size != target.hidden_size:
        raise RunError(
            f"{drafter.name}: hidden_size {drafter.hidden_size} without embed_tokens.weight; the target's "
            f"embeddings are {target.hidden_size} wide"
        )
    if drafter.d2t is not None:
        tokens = drafter.d2t + torch.arange(drafter.vocab_size, device=drafter.d2t.device)
        if int(tokens.min()) < 0 or int(tokens.max()) >= target.vocab_size:
            raise RunError(f"{drafter.name}: d2t leads outside the target's {target.vocab_size} tokens")
