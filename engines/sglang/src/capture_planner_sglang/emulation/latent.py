"""SGLang's rules for latent attention (MLA): DeepSeek V2 to V3.1, Kimi K2, GLM-4.7-Flash, and the drafts in them.

Sources in 0.5.23, below ``sglang/srt``: overrides.py, model_override_base.py, cuda_graph_hook.py and
model_overrides/deepseek_v2.py of arg_groups (backends, pages, prefills), layers/attention/attention_registry.py (which
device a backend takes), speculative/draft_utils.py and eagle_worker_v2.py (drafts).
"""

from __future__ import annotations

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED
from capture_planner.engines.parsing import refusal, unfollowed
from capture_planner_sglang.emulation.releases import has
from capture_planner_sglang.emulation.resolution import FULL, PREFILL, Startup

LATENT_BACKENDS = ("fa3", "fa4", "flashinfer", "triton", "flashmla", "trtllm_mla", "cutedsl_mla")
"""Attention backends for latent attention on CUDA devices."""
MOST_PREFILL = 8192
"""Tokens of the largest prefill graph unless a flag gives more."""
_ONE_BRANCH = ("flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla")
_TRTLLM_DEFAULT = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
_PREFILLS_OFF = "DeepseekV3ForCausalLM"
_BACKEND = "--attention-backend"


def default_backend(r: Startup) -> str:
    """Return the attention backend where --attention-backend names none."""
    args, major = r.args, r.environment.device.sm[0]
    halves = (args.prefill_attention_backend, args.decode_attention_backend)
    if major == 10 and halves == (None, None) and r.model.architecture in _TRTLLM_DEFAULT:
        return "trtllm_mla"
    return {9: "fa3", 10: "flashinfer"}.get(major, "triton")


def check_backends(r: Startup) -> None:
    """Refuse backends that the device or the KV cache does not have, and fill in the prefills' half of cutedsl_mla."""
    args, major = r.args, r.environment.device.sm[0]
    named = {args.attention_backend, args.decode_attention_backend}
    if "fa3" in r.attention and major != 9:
        raise refusal(_BACKEND, "SGLang's fa3 has latent attention on SM90 only", "name another, such as triton")
    if "trtllm_mla" in named and major < 10:
        raise refusal(_BACKEND, "SGLang's trtllm_mla needs SM100 or SM120", "name another, such as flashmla")
    if "trtllm_mla" in named and args.kv_cache_dtype not in ("fp8_e4m3", "bf16", "auto"):
        raise refusal("--kv-cache-dtype", "SGLang's trtllm_mla has no such KV cache", "give fp8_e4m3, bf16 or auto")
    if "cutedsl_mla" not in {*named, args.prefill_attention_backend}:
        return
    if args.prefill_attention_backend == "cutedsl_mla":
        raise refusal("--prefill-attention-backend", "SGLang's cutedsl_mla runs decodes only", "give trtllm_mla")
    if major != 10:
        raise refusal(_BACKEND, "SGLang's cutedsl_mla needs SM100", "name another, such as flashmla")
    if args.prefill_attention_backend is None:
        says = "cutedsl_mla runs decodes only, so prefills run on trtllm_mla"
        r.rewrite("prefill_attention_backend", "trtllm_mla", "prefills-of-cutedsl", says)
        r.attention = ("trtllm_mla", r.attention[1])


def choose_page(r: Startup) -> None:
    """Rewrite a page size that the backends do not have."""
    args = r.args
    named = {args.attention_backend, args.decode_attention_backend}
    if "flashmla" in named and args.page_size != 64:
        r.rewrite("page_size", 64, "page-of-attention", "flashmla has pages of 64 tokens")
    for name, users in (("trtllm_mla", named), ("cutedsl_mla", {*named, args.prefill_attention_backend})):
        if name in users and args.page_size not in (32, 64):
            r.rewrite("page_size", 64, "page-of-attention", f"{name} has pages of 32 or 64 tokens")


def limit_prefills(r: Startup) -> None:
    """Turn prefill graphs off where SGLang does so by itself; refuse those that are captured whole."""
    if not r.model.latent:
        return
    asked = (PREFILL, "backend") in r.locked
    # Under a prefill graph this backend falls back to FlashAttention, which is slower (cuda_graph_hook.py).
    if r.model.architecture == _PREFILLS_OFF and r.attention[0] == "trtllm_mla" and not asked:
        says = f"prefills of a {_PREFILLS_OFF} on trtllm_mla run without graphs until a flag asks for them"
        r.disable(PREFILL, "prefills-of-trtllm-mla", says)
    if r.prefill.backend == FULL:
        says = "SGLang's whole prefill graphs of latent attention are not emulated"
        raise unfollowed("--cuda-graph-backend-prefill", says, "give breakable or disabled")


def check_draft(r: Startup) -> None:
    """Refuse a draft whose attention is not the target's, and branches that the backends do not have."""
    args = r.args
    if not (r.model.latent or r.draft.latent):
        return
    flag, path = "--speculative-draft-model-path", args.speculative_draft_model_path
    if r.draft.source == ASSUMED and path is not None:
        says = f"whether {path} has latent attention decides which graphs its drafts have, and it is unknown here"
        raise unfollowed(flag, says, checkpoints.remedy(path))
    if (r.draft.latent, r.draft.sparse) != (r.model.latent, r.model.sparse):
        says = "a draft with another kind of attention than its target is not emulated"
        raise unfollowed(flag, says, "leave it out where the model has a draft of its own")
    if args.speculative_eagle_topk > 1 and args.speculative_num_steps > 1:
        for name in _ONE_BRANCH:
            if name == r.attention[1]:
                raise refusal("--speculative-eagle-topk", f"SGLang's {name} drafts one branch only", "give 1")


def draft_prefills_decode(r: Startup) -> bool:
    """Whether the widths of a drafter's first pass have graphs: flashinfer's latent attention has none."""
    chosen = r.attention[r.args.speculative_attention_mode == "decode"]
    own = r.args.speculative_draft_attention_backend or chosen
    if own in ("fa3", "fa4") and not has("draft-prefills-of-flash-attention"):
        return False
    # FlashInferMLAAttnBackend is none of the types that eagle_worker_v2.py has graphs for.
    return not (r.draft.latent and chosen == "flashinfer")
