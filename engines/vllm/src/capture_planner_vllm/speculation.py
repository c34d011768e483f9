"""``--speculative-config`` of vLLM: which drafter it names, and how many tokens it drafts."""

from __future__ import annotations

import attrs

from capture_planner.engines.parsing import did_you_mean
from capture_planner_vllm.draft_parts import check_parts
from capture_planner_vllm.flags import Given, refusal
from capture_planner_vllm.model import Model, read_model
from capture_planner_vllm.parts import Part, names, whole_number
from capture_planner_vllm.settings import Drafter
from capture_planner_vllm.unemulated import not_emulated

FLAG = "--speculative-config"
_NAMED = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_BY_ARCHITECTURE = {
    "dflash": ("MuseGlimmerAssistantModel",),
    "dspark": ("Qwen3DSparkModel", "Qwen3OmniDSparkModel", "MuseSparkDSparkModel", "Gemma4DSparkModel"),
}
"""The drafts of which vLLM knows the method by their architecture."""
_PREFIXES = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash"}
"""What the name of a draft's architecture begins with, once vLLM rewrites it."""
_MODEL_FREE = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class")
_NOT_EMULATED = ("extract_hidden_states",)
_PARALLEL = ("dflash", "dspark")
_CANDIDATES = ("DFlash2", "LiLiCorr", "DFlashQwen3XPress")
_SUFFIX_DEPTH = 24
_SUFFIX: dict[str, tuple[float, float | None]] = {
    "max_tree_depth": (1, None),
    "max_cached_requests": (0, None),
    "max_spec_factor": (0, None),
    "min_token_prob": (0, 1),
}
"""The range of each ``suffix_decoding_`` part, which vLLM checks where it decodes so."""


@attrs.frozen(kw_only=True)
class Speculation:
    """The drafter as vLLM resolves it."""

    method: str
    tokens: int
    schedule: tuple[tuple[int, int, int], ...] | None
    model: Model
    drafter: Drafter
    tensor: int
    """Ranks that share the draft model; an independent one may run on each alone."""
    backend: str | None
    adaptive: bool
    eager: bool
    """``enforce_eager`` of the drafter, which model runner V1 alone heeds."""
    unpadded: bool
    parallel: bool
    heterogeneous: bool
    draft_lm_head: bool
    copies: int
    """How many settings of its own the draft has; for each, vLLM copies the whole configuration."""
    length: int
    """Tokens that the draft model is given."""
    cache: str | None
    """``kv_cache_dtype`` of the draft where it has its own."""
    max_len: int | None
    """Tokens that the draft model is given, where they can bound the target's."""

    @property
    def has_draft_cache(self) -> bool:
        return self.drafter is not Drafter.NONE or self.method == "draft_model"

    @property
    def width(self) -> int:
        """Tokens of each request in a parallel drafter's pass; 0 for the others."""
        if self.drafter is not Drafter.PARALLEL:
            return 0
        return self.tokens + (0 if self.method == "dspark" and self.model.anchored else 1)

    @property
    def lookahead(self) -> int:
        """KV slots that the drafter writes beyond what the target is scheduled for."""
        return (self.width or self.tokens) if self.has_draft_cache else 0


def speculation(given: Given, target: Model, tensor: int, max_len: int) -> Speculation | None:
    """Return the drafter that the flags name, or None; raises ``FlagError`` as vLLM would refuse it."""
    value = given.get("speculative_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refusal(
            FLAG, "vLLM wants a JSON object", 'as in {"method": "ngram", "num_speculative_tokens": 3}'
        )
    part = Part(FLAG, "speculative_config", {key.replace("-", "_"): item for key, item in value.items()})
    if "num_speculative_tokens" in part.given and part.given["num_speculative_tokens"] is None:
        raise part.refuse("num_speculative_tokens", "vLLM wants a whole number, not null", "give K")
    tokens = part.integer("num_speculative_tokens", least=1)
    draft_tensor = part.integer("draft_tensor_parallel_size", least=1)
    asked = part.integer("max_model_len", least=1)
    if part.given.get("tensor_parallel_size") is not None:
        raise part.refuse("tensor_parallel_size", "vLLM refuses it here", "give draft_tensor_parallel_size")
    backend = _backend(part)
    schedule = _schedule(part)
    method, name = _method(part, target, tokens)
    _suffix(part, method)
    draft = target
    if method in ("ngram", "ngram_gpu"):
        _lookup(part)
    elif method not in _MODEL_FREE:
        draft = target if name is None else read_model(FLAG, name)
        if name is None and tokens is None:
            key = "num_speculative_tokens"
            raise part.refuse(key, "vLLM needs the number of drafted tokens, or a model", "give K")
        method = _by_model(part, method, name or target.name, draft, tokens)
        tokens = _tokens(part, method, tokens, draft)
        _check_draft(part, draft, target, method, tensor, draft_tensor)
    if method == "suffix" and tokens is None:
        tokens = part.integer("suffix_decoding_max_tree_depth") or _SUFFIX_DEPTH
    if tokens is None:
        raise part.refuse("num_speculative_tokens", "vLLM needs the number of drafted tokens", "give K")
    if method in _NOT_EMULATED:
        raise not_emulated(FLAG, method, "emulate EAGLE, MTP, DFlash or n-gram", "method")
    if (
        draft.modules is not None
        and not draft.modules.followed
        and method not in ("draft_model", *_MODEL_FREE)
    ):
        raise not_emulated(FLAG, f"the modules of {draft.architecture}", "emulate another model", "method")
    if draft.architecture == "MuseGlimmerAssistantModel":
        raise not_emulated(FLAG, draft.architecture, "name another draft", "model")
    if method == "dspark" and draft.architecture not in ("", "Qwen3DSparkModel"):
        raise not_emulated(FLAG, f"DSpark of {draft.architecture}", "name a Qwen3 draft", "model")
    wanted = _rewritten(method, draft)
    if method == "dflash" and wanted.startswith(_CANDIDATES):
        raise not_emulated(FLAG, draft.architecture, "name a DFlash draft without a head", "model")
    if wanted and wanted not in names()["drafts"]:
        reason = f"vLLM looks for {wanted} and has no such drafter"
        raise part.refuse("model", reason, f"name a draft that is made for {method}")
    check_parts(part, method, tokens, draft, loaded=method not in _MODEL_FREE)
    longest = _draft_length(part, asked, draft, target, max_len) if method not in _MODEL_FREE else None
    adaptive = part.boolean("enable_adaptive_verification", False) or False
    if method != "dspark" and adaptive and part.boolean("use_local_argmax_reduction", False):
        raise part.refuse(
            "enable_adaptive_verification", "vLLM needs the draft's logits for it", "drop one of both"
        )
    heterogeneous = part.boolean("use_heterogeneous_vocab", False) or False
    if heterogeneous and method != "draft_model":
        raise part.refuse("use_heterogeneous_vocab", "vLLM takes it for draft_model only", "leave it out")
    different = draft.vocabulary != target.vocabulary and draft.known and target.known
    if method == "draft_model" and different and not heterogeneous:
        raise part.refuse(
            "model",
            f"vLLM wants one vocabulary; the target has {target.vocabulary} tokens, the draft {draft.vocabulary}",
            "name a draft model with the target's tokenizer",
        )
    several = draft.modules is not None and min(draft.modules.stages, tokens) > 1
    kinds = {
        "eagle": Drafter.CHAIN,
        "eagle3": Drafter.CHAIN,
        "dflash": Drafter.PARALLEL,
        "dspark": Drafter.PARALLEL,
        "mtp": Drafter.MODULES if several else Drafter.CHAIN,
    }
    return Speculation(
        method=method,
        tokens=tokens,
        schedule=schedule,
        model=draft,
        drafter=kinds.get(method, Drafter.NONE),
        tensor=(draft_tensor or tensor) if method == "draft_model" else tensor,
        backend=backend,
        adaptive=adaptive,
        eager=part.boolean("enforce_eager", False) or False,
        unpadded=part.boolean("disable_padded_drafter_batch", False) or False,
        parallel=method not in _PARALLEL and (part.boolean("parallel_drafting", False) or False),
        heterogeneous=heterogeneous,
        draft_lm_head=part.given.get("draft_lm_head_quantization") is not None,
        copies=sum(part.given.get(key) is not None for key in ("moe_backend", "kv_cache_dtype"))
        + (backend is not None),
        length=longest or max_len,
        cache=_cache(part, checked=method not in _MODEL_FREE),
        max_len=longest if method == "draft_model" or not draft.stretches else None,
    )


def _backend(part: Part) -> str | None:
    text = part.text("attention_backend")
    if text is None or text.lower() == "auto":
        return None
    if text.upper() not in names()["backends"]:
        raise part.refuse("attention_backend", f"vLLM has no backend {text}", "give one of its backends")
    return text.upper()


def _cache(part: Part, *, checked: bool) -> str | None:
    text = part.text("kv_cache_dtype")
    if checked and text is not None and text not in names()["cache_dtypes"]:
        raise part.refuse("kv_cache_dtype", f"vLLM has no KV cache dtype {text}", "give one of its dtypes")
    return text


def _schedule(part: Part) -> tuple[tuple[int, int, int], ...] | None:
    key = "num_speculative_tokens_per_batch_size"
    value = part.given.get(key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise part.refuse(key, "vLLM wants a list of [first, last, K]", "as in [[1, 16, 3], [17, 256, 1]]")
    found: list[tuple[int, int, int]] = []
    for index, entry in enumerate(value):
        match [whole_number(item) for item in entry] if isinstance(entry, list) else []:
            case [int(first), int(last), int(k)]:
                found.append((first, last, k))
            case _:
                says = f"vLLM wants [first, last, K], got {entry!r}"
                raise refusal(FLAG, says, "give three whole numbers", key, index)
    return tuple(found)


def _method(part: Part, target: Model, tokens: int | None) -> tuple[str, str | None]:
    """Return the method that the words name, and the draft model's name where it is not the target's."""
    method, model = part.text("method"), part.text("model")
    if method is not None and method not in names()["methods"]:
        remedy = did_you_mean(method, names()["methods"], f"one of {', '.join(names()['methods'][:7])}")
        raise part.refuse("method", f"vLLM has no method {method!r}", remedy)
    if method is None:
        dotted = model is not None and "/" not in model and len(model.split(".")) > 1
        if dotted and model is not None and all(word.isidentifier() for word in model.split(".")):
            method = "custom_class"
        else:
            method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    if method in names()["mtp_types"]:
        method = "mtp"
    if model is None and method not in (*_MODEL_FREE, "mtp", "dspark"):
        raise part.refuse("model", f"vLLM needs a draft model for {method}", "name one")
    return method, model


def _lookup(part: Part) -> None:
    high, low = (part.integer(f"prompt_lookup_{end}", least=1) for end in ("max", "min"))
    if high is not None and low is not None and low > high:
        raise part.refuse(
            "prompt_lookup_min", f"vLLM wants it at most prompt_lookup_max, {high}", "swap them"
        )


def _suffix(part: Part, method: str) -> None:
    for name, (least, most) in _SUFFIX.items():
        key = f"suffix_decoding_{name}"
        if key not in part.given:
            continue
        whole = name.startswith("max_") and name != "max_spec_factor"
        value = part.integer(key) if whole else part.number(key)
        if value is None:
            raise part.refuse(key, "vLLM wants a number, not null", "leave it out")
        if method == "suffix" and not (least <= value and (most is None or value <= most)):
            wanted = f"at least {least}" if most is None else f"{least} to {most}"
            raise part.refuse(key, f"vLLM wants {wanted}, got {value}", f"give {wanted}")


def _by_model(part: Part, method: str, name: str, draft: Model, tokens: int | None) -> str:
    """Return the method that vLLM reads off the draft model's name, architecture and type."""
    if method in ("eagle", "eagle3", "dflash", "dspark"):
        return method
    for text, named in _NAMED.items():
        if text in name.lower() or draft.architecture in _BY_ARCHITECTURE.get(named, ()):
            return named
    if draft.architecture == "DSparkDraftModel" and draft.model_type == "qwen3":
        return "dspark"
    if draft.modules is not None or (method == "mtp" and not draft.known):
        if tokens is None:
            key = "num_speculative_tokens"
            raise part.refuse(key, "vLLM reads no number of tokens off the modules", "give K")
        return "mtp"
    if method == "draft_model":
        return method
    raise part.refuse("method", f"vLLM finds no module for {method} in {name}", "name a model that ships one")


def _rewritten(method: str, draft: Model) -> str:
    """Return the architecture that vLLM looks for in a draft of a method, or nothing where it takes any."""
    if method not in _PREFIXES or not draft.architecture or draft.model_type in ("", "eagle", "speculators"):
        return ""
    found = draft.modules.architecture if draft.modules is not None else draft.architecture
    prefix, ends = _PREFIXES[method], method != "eagle"
    alone = (
        found.startswith(prefix)
        or (ends and found.endswith(prefix))
        or (method, found) == ("dflash", "LiLiCorrDraftModel")
    )
    return found if alone else prefix + found


def _tokens(part: Part, method: str, tokens: int | None, draft: Model) -> int | None:
    if method == "dspark" and tokens is None:
        return draft.block or None
    modules = draft.modules.count if draft.modules is not None else None
    if tokens is None:
        return modules
    if modules is not None and tokens > modules and (not modules or tokens % modules):
        raise part.refuse(
            "num_speculative_tokens", f"vLLM wants a multiple of the {modules} modules", "give one"
        )
    return tokens


def _check_draft(
    part: Part, draft: Model, target: Model, method: str, tensor: int, draft_tensor: int | None
) -> None:
    if draft_tensor not in (None, 1, tensor):
        raise part.refuse(
            "draft_tensor_parallel_size", f"vLLM takes 1 or the target's {tensor}", "give one of both"
        )
    if draft.heads % (draft_tensor or tensor):
        raise part.refuse(
            "model", f"vLLM cannot split {draft.heads} heads over {draft_tensor or tensor}", "give a divisor"
        )


def _draft_length(part: Part, asked: int | None, draft: Model, target: Model, max_len: int) -> int:
    if asked is None:
        return min(draft.max_len, max_len) if draft.known else max_len
    reason = f"vLLM refuses {asked}, beyond what a model is made for"
    if draft.known and asked > draft.max_len:
        raise part.refuse("max_model_len", reason, "give less")
    if asked > max_len:
        refuse = target.refusal if max_len == target.max_len else refusal
        raise refuse(FLAG, reason, "give less", "max_model_len")
    return asked
