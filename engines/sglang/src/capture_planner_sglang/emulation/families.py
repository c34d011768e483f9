"""SGLang's rules for families of models: images, linear attention (GDN) and sparse attention (DSA).

Sources in 0.5.23, below ``sglang/srt``: model_hook.py, mamba_hook.py, overrides.py and model_overrides/qwen3_vl.py,
qwen3_5.py and deepseek_v2.py of arg_groups (backends, pages, states), configs/model_config.py (which architectures take
images), mem_cache/kv_cache_configurator.py (slots of states), multimodal/vit_cuda_graph_runner.py (encoders).
"""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.engines.parsing import refusal, unfollowed
from capture_planner.planning.sizing.engine_lists import GiB
from capture_planner_sglang.emulation.resolution import DECODE, DISABLED, FULL, Startup

SPARSE_BACKEND = "dsa"
_SPARSE_PAGE, _STATE_CHUNK = 64, 64
_PROFILED_MEMORY, _PROFILED_REQUESTS = 60 * GiB, 512
_PROFILED = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
_BUFFERED = ("extra_buffer", "extra_buffer_lazy")
_STRATEGY = "--mamba-radix-cache-strategy"
_ENCODER_BACKENDS = (None, "triton_attn", "fa3", "fa4")
DISPATCH = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
ENCODER = "SGLANG_VIT_ENABLE_CUDA_GRAPH"


def choose_defaults(r: Startup) -> None:
    """Fill in what a family chooses before attention is chosen: backends, pages, and how states are kept."""
    args = r.args
    if args.disaggregation_mode == "decode":
        args.disable_radix_cache = not args.disaggregation_decode_enable_radix_cache
    keeps = r.by_flags or r.model.has("hybrid")
    if not args.disable_radix_cache and args.mamba_radix_cache_strategy in _BUFFERED and not keeps:
        raise refusal(_STRATEGY, "SGLang keeps states of linear attention only", "leave it out")
    if _profiled(r) and args.attention_backend is None and args.decode_attention_backend is None:
        says = f"decodes of a {r.model.architecture} run on flashinfer on Hopper"
        r.rewrite("decode_attention_backend", "flashinfer", "decodes-of-qwen3-vl", says)
    if r.model.sparse:
        if (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend) == (None,) * 3:
            r.rewrite("attention_backend", SPARSE_BACKEND, "sparse-attention", "sparse attention runs on dsa")
        page = _SPARSE_PAGE * r.model.index_pool
        if args.page_size != page:
            r.rewrite("page_size", page, "page-of-sparse-attention", f"sparse attention has pages of {page} tokens")
    if r.model.has("hybrid"):
        _choose_linear(r)


def expand_decodes(r: Startup) -> None:
    """Raise the largest decode to the running requests where SGLang's authors measured that: Qwen3-VL on Hopper."""
    most, decode = r.args.max_running_requests, r.decode
    if not (_profiled(r) and most is not None and decode.max_bs < most <= _PROFILED_REQUESTS):
        return
    if not {(DECODE, "max_bs"), (DECODE, "bs")} & r.locked:
        says = f"decode graphs of a {r.model.architecture} on Hopper go to its {most} running requests"
        r.change(DECODE, "max_bs", most, "decode-max-of-qwen3-vl", says)


def _profiled(r: Startup) -> bool:
    device = r.environment.device
    return r.model.architecture in _PROFILED and device.sm[0] == 9 and device.memory >= _PROFILED_MEMORY


def _choose_linear(r: Startup) -> None:
    """Choose the other layers' attention on SM100, and how states are kept for shared prefixes."""
    args = r.args
    if args.linear_attn_backend != "triton":
        says = f"SGLang's linear attention on {args.linear_attn_backend} is not emulated"
        raise unfollowed("--linear-attn-backend", says, "give triton, or observe the engine")
    shares = not args.disable_radix_cache
    if r.environment.device.sm[0] == 10 and args.attention_backend is None:
        topk, algorithm = args.speculative_eagle_topk, args.speculative_algorithm
        linear = (topk is None and algorithm is None) or (topk == 1 and args.page_size in (1, None))
        states = not shares or algorithm is not None or args.mamba_radix_cache_strategy in _BUFFERED
        chosen, page = ("trtllm_mha", 64) if linear and states else ("triton", 1)
        says = f"on SM100, {chosen} runs the layers without linear attention, with pages of {page} tokens"
        r.rewrite("attention_backend", chosen, "attention-with-linear", says)
        r.rewrite("page_size", page, "attention-with-linear", says)
    if not shares:
        return
    if args.mamba_radix_cache_strategy == "auto":
        strategy = "extra_buffer" if not args.disable_overlap_schedule or (args.page_size or 1) > 1 else "no_buffer"
        r.rewrite("mamba_radix_cache_strategy", strategy, "states-of-prefixes", f"states are kept by {strategy}")
    page, interval = args.page_size, args.mamba_track_interval
    if args.mamba_radix_cache_strategy == "no_buffer":
        if page not in (1, None) or not args.disable_overlap_schedule or args.attention_backend == "trtllm_mha":
            says = "SGLang's no_buffer needs pages of 1, --disable-overlap-schedule, and no trtllm_mha"
            raise refusal(_STRATEGY, says, "give extra_buffer")
        return
    if args.mamba_radix_cache_strategy == "extra_buffer_lazy" and args.disaggregation_mode != "null":
        raise refusal(_STRATEGY, "SGLang has extra_buffer_lazy without disaggregation only", "give extra_buffer")
    drafted = args.speculative_num_draft_tokens
    if drafted is not None and interval < drafted:
        raise refusal("--mamba-track-interval", "SGLang wants it to hold the draft tokens", f"give {drafted} or more")
    if page is not None and (interval % page or max(_STATE_CHUNK, page) % min(_STATE_CHUNK, page)):
        says = f"SGLang wants pages that divide --mamba-track-interval {interval} and chunks of {_STATE_CHUNK} tokens"
        raise refusal("--page-size", says, "give 1 or 64")


def most_requests(r: Startup) -> int | None:
    """Return how many requests' states fit in --max-mamba-cache-size; None where no flag says it."""
    args, size = r.args, r.args.max_mamba_cache_size
    if not r.model.has("hybrid"):
        return None
    if args.speculative_algorithm is not None and args.speculative_num_draft_tokens is None:
        flag = "--speculative-num-draft-tokens"
        raise refusal(flag, "SGLang requires it for the states of linear attention", "give it")
    each = 1
    if not args.disable_radix_cache:
        overlap = not args.disable_overlap_schedule and args.pp_size == 1
        lazy = args.mamba_radix_cache_strategy == "extra_buffer_lazy"
        if lazy and not overlap:
            raise refusal(_STRATEGY, "SGLang's extra_buffer_lazy needs the overlap schedule", "give extra_buffer")
        # _calculate_mamba_ratio: three slots for each request, and those that track its state for prefixes.
        each = 3 + (0 if args.mamba_radix_cache_strategy == "no_buffer" else 2 if overlap and not lazy else 1)
    return None if size is None else int(size // args.attn_dp_size // each)


def assumptions(r: Startup, largest: int) -> Iterator[str]:
    """Yield what rests on the machine's memory, and on DeepEP itself, which SGLang does not ask.

    ``largest`` is the largest decode graph, in requests; 0 without any.
    """
    args = r.args
    by_flag = args.disable_radix_cache and args.max_running_requests is not None
    if largest and r.model.has("hybrid") and args.max_mamba_cache_size is None and not by_flag:
        yield (
            "states of linear attention are assumed to fit for all requests of the pool; memory decides that, and "
            "decode graphs above what fits are not captured; give --max-mamba-cache-size, or observe the engine"
        )
    width = (args.speculative_num_draft_tokens if args.speculative_algorithm else None) or 1
    ranks = 1 if args.disable_attn_tp_gather else args.tp_size // args.attn_dp_size
    if args.moe_a2a_backend == "deepep" and largest * width > args.dispatch_tokens * ranks:
        yield (
            f"DeepEP itself stops above {args.dispatch_tokens} tokens of a rank at low latency, on which start-up "
            f"rests; give --cuda-graph-max-bs-decode {args.dispatch_tokens * ranks // width}, or raise {DISPATCH}"
        )


def check_prefills(r: Startup) -> None:
    """Refuse whole prefill graphs of families whose capture is not emulated, and judge graphs of the encoder."""
    images, linear = r.model.has("multimodal"), r.model.has("hybrid")
    if r.args.enable_two_batch_overlap and r.prefill.backend != DISABLED:
        says = "prefill graphs of two overlapping microbatches, which SGLang calls unsupported, are not emulated"
        raise unfollowed("--cuda-graph-backend-prefill", says, "leave it out, or give disabled")
    if r.prefill.backend == FULL and (images or linear):
        what = "linear attention" if linear else "a model with images"
        says = f"SGLang's whole prefill graphs of {what} are not emulated"
        raise unfollowed("--cuda-graph-backend-prefill", says, "give breakable or disabled")
    if not r.args.encoder_graphs or not images:
        return
    if not r.model.has("encoder_graphs"):
        says = f"SGLang's graphs of the encoder of a {r.model.architecture} are not emulated"
        raise unfollowed(ENCODER, says, "leave it out, or observe the engine")
    if r.args.mm_attention_backend not in _ENCODER_BACKENDS:
        says = "SGLang stops at the first image: its graphs of the encoder have no such attention"
        raise refusal("--mm-attention-backend", says, "give triton_attn, fa3 or fa4")
    says = "the encoder is captured while it serves, once for each layout of images, and all these graphs are kept"
    r.decisions.note("encoder-while-serving", "graphs", "none at start-up", says)
