"""Parts of ``--speculative-config`` that decide nothing about graphs, and that vLLM 0.33 checks all the same."""

from __future__ import annotations

from capture_planner_vllm.flags import table
from capture_planner_vllm.model import Model
from capture_planner_vllm.parts import Part, names

_CHOICES = {
    "rejection_sample_method": ("standard", "synthetic", "block", "fly"),
    "draft_sample_method": ("greedy", "probabilistic"),
    "draft_lm_head_quantization": ("fp8", "nvfp4"),
}
_NEVER_NULL = ("rejection_sample_method", "draft_sample_method")
_SHARED_HEADS = ("eagle", "eagle3", "mtp")
_LEAST = {"dspark_draft_topk": 1, "xpress_topc": 0, "fly_window_size": 1, "fly_entropy_top_k": 1}


def check_parts(part: Part, method: str, tokens: int, draft: Model, *, loaded: bool) -> None:
    """Raise ``FlagError`` for the first part that vLLM refuses.

    ``tokens`` is K; ``loaded`` says that the method has a draft model, whose parts are checked then only.
    """
    given = {key: value for key, value in part.given.items() if value is not None}
    for key, known in (*_CHOICES.items(), ("moe_backend", table()["moe_backend"]["choices"])):
        if (key in given and given[key] not in known) or (
            key in _NEVER_NULL and key in part.given.keys() - given
        ):
            raise part.refuse(
                key, f"vLLM does not know {part.given[key]!r}", f"give one of {', '.join(known)}"
            )
    for key in ("revision", "code_revision", "quantization"):
        part.text(key)
    for key, least in _LEAST.items():
        part.integer(key, least=least)
    if loaded:
        _check_draft(part, method, draft)
    if "draft_lm_head_quantization" in given and method not in _SHARED_HEADS:
        raise part.refuse(
            "draft_lm_head_quantization", f"vLLM has no shared head for {method}", "leave it out"
        )
    if "index_share_for_mtp_iteration" in given and method != "mtp":
        raise part.refuse("index_share_for_mtp_iteration", "vLLM takes it for mtp only", "leave it out")
    if method == "custom_class" and "model" not in given:
        raise part.refuse("model", "vLLM wants the path of your class there", "as in package.Proposer")
    if part.boolean("use_heterogeneous_vocab", False):
        if given.get("draft_sample_method", "greedy") != "greedy":
            raise part.refuse(
                "draft_sample_method", "vLLM drafts greedily between vocabularies", "give greedy"
            )
        if part.boolean("use_local_argmax_reduction", False):
            reason = "vLLM needs all logits between vocabularies"
            raise part.refuse("use_local_argmax_reduction", reason, "leave it out")
    _check_rejection(part, tokens)


def _check_draft(part: Part, method: str, draft: Model) -> None:
    quantization, topk = part.text("quantization"), part.integer("dspark_draft_topk")
    if quantization is not None and quantization not in names()["quantization"]:
        raise part.refuse(
            "quantization", f"vLLM has no quantization {quantization}", "give one of its methods"
        )
    if part.given.get("xpress_topc") is not None:
        raise part.refuse("xpress_topc", "vLLM takes it for XPress only", "leave it out")
    if topk is None:
        return
    if method != "dspark":
        raise part.refuse("dspark_draft_topk", "vLLM takes it for dspark only", "leave it out")
    if draft.known and topk > draft.vocabulary:
        reason = f"vLLM refuses {topk}, more than the draft's {draft.vocabulary} tokens"
        raise part.refuse("dspark_draft_topk", reason, "give less")


def _check_rejection(part: Part, tokens: int) -> None:
    method = part.given.get("rejection_sample_method", "standard")
    rates, length = (part.given.get(f"synthetic_acceptance_{name}") for name in ("rates", "length"))
    if method != "synthetic":
        for name, value in (("rates", rates), ("length", length)):
            if value is not None:
                key = f"synthetic_acceptance_{name}"
                raise part.refuse(key, "vLLM takes it with synthetic rejection only", "leave it out")
    elif (rates is None) == (length is None):
        reason = "vLLM wants either synthetic_acceptance_rates or synthetic_acceptance_length with it"
        raise part.refuse("rejection_sample_method", reason, "give one of both")
    elif length is not None:
        mean = part.number("synthetic_acceptance_length") or 0
        if not 1 <= mean <= tokens + 1:
            reason = f"vLLM wants 1 to {tokens + 1} tokens, got {length}"
            raise part.refuse("synthetic_acceptance_length", reason, "give one of these")
    elif not _falls(rates, tokens):
        reason = f"vLLM wants {tokens} rates from 0 to 1, none above the one before it"
        raise part.refuse("synthetic_acceptance_rates", reason, "as in [0.8, 0.6, 0.4]")
    window = part.integer("fly_window_size")
    if method == "fly" and (tokens < 2 or (window is not None and window >= tokens)):
        key = "fly_window_size" if tokens > 1 else "num_speculative_tokens"
        raise part.refuse(key, f"vLLM wants more drafted tokens than the window, got {tokens}", "draft more")


def _falls(rates: object, tokens: int) -> bool:
    if not isinstance(rates, list) or len(rates) != tokens:
        return False
    if not all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates):
        return False
    return sorted(rates, reverse=True) == rates
