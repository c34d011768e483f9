"""``--speculative-config`` of vLLM: which drafter it names, and how many tokens it drafts.

Parts that have no effect on graphs are accepted whatever their value: sampling and rejection methods, lookup
and suffix parameters, revisions.
"""

from __future__ import annotations

import attrs

from capture_planner.engines.parsing import did_you_mean, refusal
from capture_planner_vllm.emulation.attention import backend_name
from capture_planner_vllm.emulation.flags import CommandLine
from capture_planner_vllm.emulation.model import ModelFacts, read_model
from capture_planner_vllm.emulation.parts import Part, whole_number
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.releases import has
from capture_planner_vllm.emulation.settings import DrafterKind
from capture_planner_vllm.emulation.tables import names, rules

SPECULATIVE = "--speculative-config"
_TOKENS = "num_speculative_tokens"
_MODEL_FREE = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class")
_PARALLEL = ("dflash", "dspark")
_CANDIDATES = ("DFlash2", "LiLiCorr", "DFlashQwen3XPress")
_HEADS = ("medusa", "mlp_speculator")
"""Methods that 0.33 no longer has."""
_SUFFIX_DEPTH = 24


@attrs.frozen(kw_only=True)
class Speculation:
    """The drafter as vLLM resolves it."""

    method: str
    tokens: int
    """Draft tokens: K."""
    schedule: tuple[tuple[int, int, int], ...] | None
    model: ModelFacts
    drafter: DrafterKind
    tensor: int
    """Ranks that share the draft model; an independent one may run on each alone."""
    backend: str | None
    adaptive: bool
    eager: bool
    """``enforce_eager`` of the drafter, which only model runner V1 applies."""
    unpadded: bool
    parallel: bool
    heterogeneous: bool
    copies: int
    """How many settings of its own the draft has; for each, vLLM copies the whole configuration."""
    length: int | None
    """The maximum length of an independent draft model, in tokens; None for other drafters."""
    cache: str | None
    """``kv_cache_dtype`` of the draft where it has its own."""
    max_len: int | None
    """The draft model's maximum length in tokens, where it can bound the target's."""

    @property
    def has_draft_cache(self) -> bool:
        return self.drafter is not DrafterKind.NONE or self.method == "draft_model"

    @property
    def width(self) -> int:
        """Tokens of each request in a parallel drafter's pass; 0 for the others."""
        if self.drafter is not DrafterKind.PARALLEL:
            return 0
        return self.tokens + (0 if self.method == "dspark" and self.model.anchored else 1)

    @property
    def lookahead(self) -> int:
        """Slots for drafts that the token budget has to exceed."""
        if not has("lookahead-slots"):
            extra = self.tokens - (self.method not in ("dflash", "draft_model"))
            wide = self.parallel or self.method in _PARALLEL
            return extra if wide else int(self.method == "draft_model")
        return (self.width or self.tokens) if self.has_draft_cache else 0


def speculation(line: CommandLine, target: ModelFacts, tensor: int, max_len: int) -> Speculation | None:
    """Return the drafter that the flags name, or None.

    ``tensor`` are the target's tensor-parallel ranks, ``max_len`` is its maximum length in tokens. Raises
    ``FlagError`` where vLLM rejects the flags, ``NotEmulated`` for drafters that are unknown here.
    """
    value = line.get("speculative_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refusal(SPECULATIVE, "expected a JSON object", 'as in {"method": "ngram", "num_speculative_tokens": 3}')
    part = Part(SPECULATIVE, "speculative_config", {key.replace("-", "_"): item for key, item in value.items()})
    ranks = part.integer("draft_tensor_parallel_size", least=1)
    key = "attention_backend"
    schedule, backend = _schedule(part), backend_name(SPECULATIVE, part.text(key), key)
    method, name = _method(part)
    loaded = method not in _MODEL_FREE
    draft = read_model(SPECULATIVE, name) if loaded and name is not None else target
    method, tokens = _method_and_tokens(part, method, name, draft, target)
    longest = max_len
    if loaded:
        if target.odd is None:
            _check_draft(part, method, draft, target)
        _check_ranks(part, draft, ranks, tensor)
        longest = _draft_length(part, draft, target, max_len)
    own_settings = ("moe_backend", "kv_cache_dtype")
    return Speculation(
        method=method,
        tokens=tokens,
        schedule=schedule,
        model=draft,
        drafter=_drafter(method, draft, tokens),
        # A draft head runs in the target's process group, a whole model in its own (standalone_ar/speculator.py).
        tensor=(ranks or tensor) if method == "draft_model" else tensor,
        backend=backend,
        adaptive=bool(part.boolean("enable_adaptive_verification")),
        eager=bool(part.boolean("enforce_eager")),
        unpadded=bool(part.boolean("disable_padded_drafter_batch")),
        parallel=method not in _PARALLEL and bool(part.boolean("parallel_drafting")),
        heterogeneous=_heterogeneous(part, method),
        copies=sum(part.given.get(name) is not None for name in own_settings) + (backend is not None),
        length=longest if method == "draft_model" else None,
        cache=_cache(part, checked=loaded or not has("draft-cache-by-model")),
        max_len=longest if loaded and (method == "draft_model" or not draft.stretches) else None,
    )


def _drafter(method: str, draft: ModelFacts, tokens: int) -> DrafterKind:
    if method == "mtp" and draft.modules is not None and min(draft.modules.stages, tokens) > 1:
        return DrafterKind.MODULES
    return DrafterKind(rules()["speculative_methods"]["drafters"].get(method, "none"))


def _cache(part: Part, *, checked: bool) -> str | None:
    text = part.text("kv_cache_dtype")
    if checked and text is not None and text not in names()["cache_dtypes"]:
        raise part.refuse("kv_cache_dtype", f"vLLM has no KV cache dtype {text}", "give one of its dtypes")
    return text


def _heterogeneous(part: Part, method: str) -> bool:
    key = "use_heterogeneous_vocab"
    if part.boolean(key) and method != "draft_model":
        raise part.refuse(key, "vLLM supports it for method draft_model only", "leave it out")
    return bool(part.boolean(key))


def _schedule(part: Part) -> tuple[tuple[int, int, int], ...] | None:
    key = "num_speculative_tokens_per_batch_size"
    value = part.given.get(key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise part.refuse(key, "expected a list of [first, last, K]", "as in [[1, 16, 3], [17, 256, 1]]")
    tiers: list[tuple[int, int, int]] = []
    for index, entry in enumerate(value):
        match [whole_number(item) for item in entry] if isinstance(entry, list) else []:
            case [int(first), int(last), int(k)]:
                tiers.append((first, last, k))
            case _:
                message = f"expected [first, last, K], got {entry!r}"
                raise refusal(SPECULATIVE, message, "give three whole numbers", key, index)
    return tuple(tiers)


def _method(part: Part) -> tuple[str, str | None]:
    """Return the method that the words name, and the draft model's name where it is not the target's."""
    method, model = part.text("method"), part.text("model")
    if method is not None and method not in names()["methods"]:
        remedy = did_you_mean(method, names()["methods"], f"give one of {', '.join(names()['methods'][:7])}")
        raise part.refuse("method", f"vLLM has no method {method!r}", remedy)
    if method is None:
        # An import path has dots and no slash; names of models have dots too, as in Qwen/Qwen2.5-0.5B.
        words = model.split(".") if model is not None and "/" not in model else []
        if len(words) > 1 and all(word.isidentifier() for word in words):
            method = "custom_class"
        else:
            method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    if method in names()["mtp_types"]:
        method = "mtp"
    if model is None and method == "custom_class":
        raise part.refuse("model", "vLLM needs the import path of your class", "as in package.Proposer")
    if model is None and method not in (*_MODEL_FREE, "mtp", "dspark"):
        raise part.refuse("model", f"vLLM needs a draft model for {method}", "name one")
    return method, model


def _method_and_tokens(
    part: Part, method: str, name: str | None, draft: ModelFacts, target: ModelFacts
) -> tuple[str, int]:
    """Return the method as vLLM infers it from the draft, and the draft tokens."""
    if _TOKENS in part.given and part.given[_TOKENS] is None:
        raise part.refuse(_TOKENS, "expected a whole number, got null", "give K")
    tokens = part.integer(_TOKENS, least=1)
    if method == "suffix" and tokens is None:
        tokens = part.integer("suffix_decoding_max_tree_depth", least=1) or _SUFFIX_DEPTH
    if method not in _MODEL_FREE:
        method = _by_model(part, method, name or target.name, draft)
        count = draft.modules.count if draft.modules is not None else None
        # vLLM never reads K off the module of method mtp, but does off one that another method drafts with.
        if tokens is None and name is not None and method != "mtp":
            tokens = (draft.block or None) if method == "dspark" else count
        # The modules take turns, so that K is whole rounds of them.
        elif tokens is not None and count is not None and tokens > count and (not count or tokens % count):
            raise part.refuse(_TOKENS, f"vLLM requires a multiple of the {count} modules", "give one")
    if tokens is None:
        raise part.refuse(_TOKENS, "vLLM needs the number of draft tokens", "give K")
    if method == "extract_hidden_states":
        raise not_emulated(SPECULATIVE, method, "emulate EAGLE, MTP, DFlash or n-gram", "method")
    return method, tokens


def _by_model(part: Part, method: str, name: str, draft: ModelFacts) -> str:
    """Return the method that vLLM infers from the draft model's name, architecture and type."""
    if method in ("eagle", "eagle3", "dflash", "dspark"):
        return method
    table = rules()["speculative_methods"]
    by_architecture = table["by_architecture"].get(draft.architecture)
    for text, named in table["by_name"].items():
        # By the draft's name first, as in vLLM: AngelSlim/Qwen3-8B_eagle3 drafts by EAGLE-3.
        if text in name.lower() or by_architecture == named:
            return str(named)
    if draft.architecture == "DSparkDraftModel" and draft.model_type == "qwen3":
        return "dspark"
    if {method, draft.model_type} & set(_HEADS) & set(names()["methods"]):
        raise not_emulated(SPECULATIVE, "a draft of heads alone", "emulate EAGLE, MTP or DFlash", "method")
    if draft.modules is not None or (method == "mtp" and not draft.known):
        return "mtp"
    if method == "draft_model":
        return method
    raise part.refuse("method", f"vLLM finds no {method} module in {name}", "name a model that ships one")


def _check_draft(part: Part, method: str, draft: ModelFacts, target: ModelFacts) -> None:
    """Raise for a draft model that vLLM has no drafter for, or whose graphs are not emulated."""
    architecture, modules = draft.architecture, draft.modules
    if modules is not None and not modules.emulated and method != "draft_model":
        raise not_emulated(SPECULATIVE, f"the modules of {architecture}", "emulate another model", "method")
    if architecture == "MuseGlimmerAssistantModel":
        raise not_emulated(SPECULATIVE, architecture, "name another draft", "model")
    if method == "dspark" and architecture not in ("", "Qwen3DSparkModel"):
        raise not_emulated(SPECULATIVE, f"DSpark of {architecture}", "name a Qwen3 draft", "model")
    name = _rewritten(method, draft)
    if method == "dflash" and name.startswith(_CANDIDATES):
        raise not_emulated(SPECULATIVE, architecture, "name a DFlash draft without a head", "model")
    if name and name not in names()["drafts"]:
        remedy = f"name a draft that is made for {method}"
        raise part.refuse("model", f"vLLM looks for {name} and has no such drafter", remedy)
    different = draft.vocabulary != target.vocabulary and draft.known and target.known
    # Drafts are verified by token id, and the ids of two vocabularies differ.
    if method == "draft_model" and different and not _heterogeneous(part, method):
        sizes = f"the target's vocabulary has {target.vocabulary} tokens, the draft's {draft.vocabulary}"
        raise part.refuse("model", sizes, "name a draft model with the target's tokenizer")


def _rewritten(method: str, draft: ModelFacts) -> str:
    """Return the architecture that vLLM looks for in a draft of a method, or nothing where any will do."""
    prefix: str | None = rules()["speculative_methods"]["architecture_prefixes"].get(method)
    if prefix is None or not draft.architecture or draft.model_type in ("", "eagle", "speculators"):
        return ""
    name = draft.modules.architecture if draft.modules is not None else draft.architecture
    as_it_is = name.startswith(prefix) or (method != "eagle" and name.endswith(prefix))
    return name if as_it_is or (method, name) == ("dflash", "LiLiCorrDraftModel") else prefix + name


def _check_ranks(part: Part, draft: ModelFacts, ranks: int | None, tensor: int) -> None:
    if ranks not in (None, 1, tensor):
        message = f"vLLM accepts 1 or the target's {tensor}, got {ranks}"
        raise part.refuse("draft_tensor_parallel_size", message, "give one of both")
    if draft.heads % (ranks or tensor):
        message = f"{draft.heads} attention heads cannot be split over {ranks or tensor} ranks"
        raise part.refuse("model", message, "give a divisor")


def _draft_length(part: Part, draft: ModelFacts, target: ModelFacts, max_len: int) -> int:
    length = part.integer("max_model_len", least=1)
    if length is None:
        return min(draft.max_len, max_len) if draft.known else max_len
    message = f"{length} tokens exceed the model's maximum length"
    if draft.known and length > draft.max_len:
        raise part.refuse("max_model_len", message, "give less")
    if length > max_len:
        error = target.refusal if max_len == target.max_len else refusal
        raise error(SPECULATIVE, message, "give less", "max_model_len")
    return length
