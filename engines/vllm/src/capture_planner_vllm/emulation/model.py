"""The facts of a model that vLLM's settings depend on: read from its ``config.json``, or assumed.

A model that is neither a local folder nor a known name counts as a dense decoder of ``ASSUMED_LENGTH`` tokens
with grouped-query attention; its settings have the source ``assumed``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED, FAMILY, KNOWN, Checkpoint
from capture_planner.engines.parsing import refusal
from capture_planner.errors import FlagError
from capture_planner_vllm.emulation.mtp import Modules, modules
from capture_planner_vllm.emulation.speculators import as_draft
from capture_planner_vllm.emulation.tables import names, rules

ASSUMED_LENGTH = 32768
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
COUNTS_AS = f"a dense decoder of {ASSUMED_LENGTH} tokens"
WIDE = "GptOssForCausalLM"
"""The architecture whose largest capture size is 1024 on every GPU."""
_MAMBA2 = ("FalconH1", "GraniteMoeHybrid", "NemotronH")
_SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_UNEQUAL = "MiMoV2FlashForCausalLM"
# vLLM's default_max_len where config.json states no length (config/model.py).
_LENGTH_LEFT_OUT = 2048
_MODELOPT = "modelopt"
_DIFFUSES = re.compile("diffusion", re.IGNORECASE)
_BOTH_WAYS, _POOLED = "attention in both directions", "pooling by modules.json"
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding whose factor is included in the stated length."""
_TABLES = ("default", "linear", "llama3", "ntk", "proportional")
"""Kinds of rotary embedding that extend by a longer table of positions."""


@attrs.frozen(kw_only=True)
class ModelFacts:
    """The facts of one model, and where they come from."""

    name: str
    source: str = ASSUMED
    like: str | None = None
    """The known model whose facts these are, where the name is of its family."""
    architecture: str = ""
    model_type: str = ""
    heads: int = 0
    """Attention heads, or 0 if unknown: those of some known models are not listed."""
    kv_heads: int = 0
    head_size: int = 128
    max_len: int = ASSUMED_LENGTH
    """Tokens of the longest sequence, unless a flag sets it."""
    experts: int = 0
    mla: bool = False
    encoder_decoder: bool = False
    vocabulary: int = 0
    modules: Modules | None = None
    """The module for multi-token prediction where the model is used as a draft."""
    dtype: str = "bfloat16"
    """As in the file; float32 where it has none."""
    quantization: str | None = None
    """The checkpoint's quantization method."""
    cache: str | None = None
    """The checkpoint's KV cache dtype."""
    nope_size: int = 128
    """The part of MLA's heads without positional encoding."""
    top: int = 0
    """The tokens that each query of sparse MLA attends to; 0: to all."""
    unequal: bool = False
    """Whether heads of values are smaller than those of keys, outside MLA."""
    sinks: bool = False
    soft_cap: bool = False
    """Whether attention logits are capped."""
    chunked: bool = False
    """Whether attention is cut into chunks, which no graph captures."""
    recurrent: bool = False
    """Whether some layers have a state in place of a KV cache (Mamba, gated delta nets)."""
    varies: bool = False
    """Whether those layers are Mamba 2's, whose graphs serve any mix of query lengths."""
    multimodal: bool = False
    causal: bool = False
    """Whether every layer of a parallel draft attends to earlier tokens only."""
    anchored: bool = True
    """Whether a DSpark draft's first token is a draft too, so that a pass has K tokens."""
    block: int = 0
    """K of a DSpark draft."""
    window: int | None = None
    """Tokens of the sliding window that the file states."""
    stretches: bool = True
    """Whether longer sequences only need a longer table of positions (not so for YaRN)."""
    limit: int = ASSUMED_LENGTH
    """The largest ``--max-model-len`` that vLLM accepts."""
    odd: str | None = None
    """A feature of the model that is not emulated: flags alone decide the answer."""

    @property
    def sparse(self) -> bool:
        return self.top > 0

    @property
    def known(self) -> bool:
        return self.source != ASSUMED

    @property
    def exact(self) -> bool:
        """Whether its facts are here, and all of them are emulated."""
        return self.known and self.odd is None

    @property
    def decodes(self) -> bool:
        """Whether it generates text token by token, with the flags' sizes and limits."""
        if _DIFFUSES.search(self.name) or self.odd in (_BOTH_WAYS, _POOLED):
            return False
        generates = self.architecture.endswith(("ForCausalLM", "ForConditionalGeneration")) or not self.architecture
        return generates and self.architecture not in rules()["own_sizes"]

    def refusal(self, flag: str, reason: str, remedy: str, *inside: str | int) -> FlagError:
        """Return the error for a flag that the model's facts rule out; it names them where they are assumed."""
        if not self.known:
            reason = f"{checkpoints.assumption(self.name, COUNTS_AS)}; {reason}"
            remedy = f"{checkpoints.remedy(self.name)}{f', or {remedy}' if remedy else ''}"
        return refusal(flag, reason, remedy, *inside)


_OVERRIDES = {"architectures", "max_position_embeddings", "rope_scaling", "rope_parameters"}
"""Fields of ``--hf-overrides`` that change the length or the class of a model and nothing else."""


def overrides(text: str | None) -> dict[str, Any] | None:
    """Return the fields of ``--hf-overrides``; None where one of them is not emulated."""
    try:
        given = json.loads(text or "{}")
    except ValueError:
        return None
    inner = given.get("text_config", {}) if isinstance(given, dict) else None
    if not isinstance(inner, dict) or not {*given, *inner} <= {*_OVERRIDES, "text_config"}:
        return None
    return dict(given)


def read_target(name: str, replaced: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the facts of the served model; of an unknown one whose name is of another family, that alone.

    :param replaced: fields of ``--hf-overrides``.
    """
    found = read_model("--model", name, replaced)
    family = None if found.known else checkpoints.other_family(name)
    if family is None:
        return found
    # Of this family vLLM's largest size is another, too.
    architecture = WIDE if re.search("gpt-?oss", family, re.IGNORECASE) else ""
    return attrs.evolve(found, architecture=architecture, odd=f"a name of another family ({family})")


def read_model(flag: str, name: str, replaced: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the facts of a model by folder or name; raises ``FlagError`` for a broken ``config.json``."""
    try:
        checkpoint = checkpoints.find(name)
        if replaced and checkpoint.source != ASSUMED:
            checkpoint = _overridden(checkpoint, replaced)
        return _from_config(checkpoint) if checkpoint.source != ASSUMED else ModelFacts(name=name)
    except FileNotFoundError as error:
        remedy = "name a model's folder; a plan is checked without --engine"
        raise refusal(flag, f"vLLM finds no config.json in {name}", remedy) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        file = Path(name) / "config.json"
        raise refusal(flag, f"vLLM cannot read {file}: {error}", "give a model's own config.json") from error


def _overridden(checkpoint: Checkpoint, replaced: Mapping[str, Any]) -> Checkpoint:
    config, part = checkpoint.config, "text_config"
    architecture = (config.get("architectures") or [""])[0]
    flat = architecture in (*names()["decoders"], *names()["hybrids"]) or config.get("is_encoder_decoder")
    # vLLM adds the part to a model that has none, and then reads the attention heads from it alone.
    if part in replaced and flat and not config.get(part):
        message = f"vLLM finds no attention heads in the {part} that it adds to {checkpoint.name}"
        raise refusal("--hf-overrides", message, f"write its fields outside of {part}", part)
    # A part of the configuration keeps what is not replaced.
    text = {**(config.get(part) or {}), **replaced.get(part, {})}
    config = {**config, **replaced}
    return attrs.evolve(checkpoint, config={**config, part: text} if text else config)


def _from_config(checkpoint: Checkpoint) -> ModelFacts:
    checkpoint = as_draft(checkpoint)
    config, text = checkpoint.config, checkpoint.text
    heads = int(text.get("num_attention_heads") or text.get("encoder_attention_heads") or 0)
    width = int(text.get("hidden_size") or text.get("d_model") or 0)
    # By model_type too, as vLLM's is_deepseek_mla: a rank alone makes no model MLA.
    mla = text.get("kv_lora_rank") is not None and str(text.get("model_type") or "") in names()["mla_types"]
    quantized = _quantization(config.get("quantization_config") or text.get("quantization_config") or {})
    size = int(text.get("head_dim") or (width // heads if heads else 0) or 128)
    # The cache holds the compressed state and the rotary part, as one head.
    if mla:
        size = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    architecture = str((config.get("architectures") or [""])[0])
    max_len, limit = _lengths(checkpoint)
    # The list of known models has no dtypes: all of them are served in 16 bits.
    unstated = "bfloat16" if checkpoint.source in (KNOWN, FAMILY) else "float32"
    return ModelFacts(
        name=checkpoint.name,
        source=checkpoint.source,
        like=checkpoint.like,
        architecture=architecture,
        model_type=str(config.get("model_type") or ""),
        heads=heads,
        kv_heads=1 if mla else _first(text, "kv_heads", heads),
        head_size=size,
        max_len=max_len,
        limit=limit,
        experts=_first(text, "experts", 0),
        mla=mla,
        encoder_decoder=bool(config.get("is_encoder_decoder")),
        vocabulary=int(text.get("vocab_size") or 0),
        modules=modules(config, text),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or unstated).removeprefix("torch."),
        quantization=quantized.get("quant_method"),
        cache=_cache(quantized),
        nope_size=int(text.get("qk_nope_head_dim") or 1),
        top=int(text.get("index_topk") or 0),
        unequal=architecture == _UNEQUAL and text.get("v_head_dim", size) != size,
        sinks=_sinks(architecture, text),
        soft_cap=bool(text.get("attn_logit_softcapping")),
        chunked=text.get("attention_chunk_size") is not None and architecture != _UNEQUAL,
        recurrent=architecture in names()["hybrids"] and _has_state(config),
        varies=architecture.startswith(_MAMBA2),
        odd=_odd(checkpoint, architecture),
        multimodal=architecture in names()["multimodal"],
        causal=_causal(text),
        anchored=bool(text.get("sample_from_anchor", True)),
        block=int(text.get("block_size") or text.get("dspark_block_size") or 0),
        window=text.get("sliding_window"),
        stretches=all(rope["rope_type"] in _TABLES for rope in checkpoint.rope),
    )


def _first(text: Mapping[str, Any], kind: str, default: int) -> int:
    """Return the first of the keys for a number that is there and not 0."""
    return next((int(text[key]) for key in rules()["config_keys"][kind] if text.get(key)), default)


def _lengths(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the default maximum length, and the largest that a flag may set."""
    text = checkpoint.text
    stated = [text[key] for key in rules()["config_keys"]["lengths"] if text.get(key) is not None]
    # The list of known models has what rules read: without a length it is not known.
    unstated = ASSUMED_LENGTH if checkpoint.source in (KNOWN, FAMILY) else _LENGTH_LEFT_OUT
    longest = text.get("model_max_length") or min(stated, default=unstated)
    kinds = [rope["rope_type"] for rope in checkpoint.rope]
    # Gemma 3 states its scaled length (config/model.py).
    if "gemma3" not in str(text.get("model_type")):
        factors = [rope.get("factor", 1) for rope in checkpoint.rope if rope["rope_type"] not in _SCALED]
        longest = int(longest * ((factors or [1])[-1] or 1))
    limit = max(int(longest), int(text.get("model_max_length") or 0))
    # Short sequences get worse with scaled positions, so vLLM's default is the length before scaling.
    if "longrope" in kinds or "su" in kinds:
        return int(text.get("original_max_position_embeddings") or longest), limit
    return int(longest), limit


def _quantization(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checkpoint's quantization with its method, which of ModelOpt's the algorithm names."""
    named, inner, by = given.get("quant_method"), given.get("quantization"), (given.get("producer") or {}).get("name")
    own = inner if isinstance(inner, dict) else given
    # ModelOpt's own format has no quant_method, but a producer (_normalize_quantization_config).
    if named not in (None, "", _MODELOPT) or (not named and (own is given or by != _MODELOPT)):
        return given
    methods = {"NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8", "MIXED_PRECISION": "modelopt_mixed"}
    return {**given, "quant_method": methods.get(str(own.get("quant_algo")).upper(), _MODELOPT)}


def _cache(quantized: Mapping[str, Any]) -> str | None:
    """Return the KV cache dtype of a quantized checkpoint."""
    scheme = quantized.get("kv_cache_scheme")
    if not str(quantized.get("quant_method") or "").startswith("modelopt"):
        return "fp8" if scheme is not None and quantized.get("quant_method") == "compressed-tensors" else None
    inner = quantized.get("quantization") or quantized
    asked = inner.get("kv_cache_scheme") or scheme
    asked = asked or inner.get("kv_cache_quant_algo") or quantized.get("kv_cache_quant_algo")
    if isinstance(asked, dict):
        is_float, bits = asked.get("type") == "float", asked.get("num_bits")
        if is_float and bits == 8 and asked.get("dynamic") is False:
            return "fp8_e4m3"
        return "nvfp4" if is_float and bits == 4 else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(asked).lower())


def _sinks(architecture: str, text: Mapping[str, Any]) -> bool:
    if architecture not in (*names()["sinks"], "GraniteMoeSWAForCausalLM"):
        return False
    granite = architecture.startswith("Granite")
    return not granite or bool(text.get("attention_sinks", text.get("layer_types") is not None))


def _has_state(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    # A model of a hybrid architecture may have attention layers alone, and lists them.
    return kinds is None or not all(kind in ("attention", "full_attention") for kind in kinds)


def _causal(text: Mapping[str, Any]) -> bool:
    """Say whether every layer of a DFlash draft attends to earlier tokens only."""
    asked = text.get("is_causal")
    if asked is None:
        asked = (text.get("dflash_config") or {}).get("causal")
    if asked is not None:
        return bool(asked)
    kinds = text.get("layer_types") or [""]
    return all(kind == "sliding_attention" for kind in kinds)


def _odd(checkpoint: Checkpoint, architecture: str) -> str | None:
    """Return the feature of a model that is not emulated, or None where it counts as a decoder."""
    config, text = checkpoint.config, checkpoint.text
    inner = str((text.get("architectures") or [""])[0]) if text is not config else ""
    known = (*names()["decoders"], *names()["hybrids"], *names()["multimodal"], "")
    for each in (architecture, inner):
        if each not in known:
            return f"the architecture {each}"
    if config.get("model_type") in names()["prefix_types"] and architecture in names()["multimodal"]:
        return "attention that sees images in both directions"
    if text.get("index_topk") is not None and architecture not in _SPARSE:
        return "sparse attention"
    for key, feature in rules()["unemulated_config_keys"].items():
        if text.get(key) is not None:
            return str(feature)
    if text.get("is_causal") is False:
        return _BOTH_WAYS
    heads = text.get("num_attention_heads") or text.get("encoder_attention_heads")
    if architecture in names()["multimodal"] and not heads and checkpoint.source not in (KNOWN, FAMILY):
        return "a text model that config.json does not describe as text_config"
    return _POOLED if (Path(checkpoint.name) / "modules.json").is_file() else None
