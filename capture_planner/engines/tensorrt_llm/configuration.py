"""Flags and file -> ``Resolved``: what the engine's configuration classes make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capture_planner.engines.tensorrt_llm.flags import FIELDS, read_file, read_flags
from capture_planner.engines.tensorrt_llm.settings import ALGORITHMS, Drafting, Graphs, Resolved
from capture_planner.engines.tensorrt_llm.values import (
    Notes,
    Path,
    integer,
    mapping,
    names,
    only,
    shown,
    truth,
)
from capture_planner.errors import FlagError

_CONFIG = "--config"

# Keys that have no say in which decode graphs there are, whatever they hold.
_IGNORED = names(
    """model tokenizer tokenizer_mode custom_tokenizer post_processor_hook skip_tokenizer_init
    trust_remote_code dtype revision hf_revision tokenizer_revision model_kwargs gpus_per_node
    moe_cluster_parallel_size moe_tensor_parallel_size enable_lm_head_tp_in_adp pp_partition load_format
    kv_cache_config enable_chunked_prefill guided_decoding_backend batched_logits_processor
    iter_stats_max_iterations request_stats_max_iterations peft_cache_config scheduler_config
    cache_transceiver_config kv_cache_compression_config max_input_len gather_generation_logits
    num_postprocess_workers postprocess_tokenizer_dir num_serve_frontends reasoning_parser
    otlp_traces_endpoint return_perf_metrics perf_metrics_output_dir perf_metrics_max_requests
    prometheus_metrics_config enable_energy_metrics orchestrator_type env_overrides telemetry_config
    generation_config garbage_collection_gen0_threshold enable_encoder_decoder_mixed_cuda_graph
    multimodal_config attention_dp_config moe_config nvfp4_gemm_config dwdp_config encoder_max_batch_size
    encoder_max_num_tokens sampler_type attn_backend enable_mla_skip_correction mla_skip_correction_threshold
    sampler_force_async_worker enable_speculative_beam_history_d2h enable_early_first_token_response
    enable_low_latency_host_dispatch enable_iter_perf_stats enable_iter_req_stats print_iter_log
    batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio prefill_capture_num_tokens
    enable_autotuner use_fine_grained_sync enable_layerwise_nvtx_marker enable_min_latency stream_interval
    force_dynamic_quantization allreduce_strategy checkpoint_loader checkpoint_format checkpoint_io_policy
    mx_config gms_config kv_connector_config disable_mm_encoder ray_worker_extension_cls ray_placement_config
    ray_worker_nsight_options sleep_config reorder_policy_config enable_resource_governor
    use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm
    max_stats_len layer_wise_benchmarks_config quant_config disagg_cluster enable_return_routed_experts"""
)

# Keys that make other graphs, with the values at which they make none.
_MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_beam_width": ((1, None), "graphs of several beams"),
    "context_parallel_size": ((1,), "context parallelism"),
    "cp_config": ((None, {}), "context parallelism"),
    "enable_lora": ((False,), "graphs for adapters"),
    "lora_config": ((None,), "graphs for adapters"),
    "sparse_attention_config": ((None,), "sparse attention, which has graphs by sequence length"),
    "enable_in_graph_sampling": ((False,), "sampling inside the graphs"),
    "torch_compile_config": ((None,), "graphs of compiled prompts"),
    "prefill_cuda_graph_backend": (("disabled",), "graphs of prompts"),
    "encode_only": ((False,), "graphs of encoders"),
    "mm_encoder_only": ((False,), "graphs of encoders"),
    "encoder_cuda_graph_config": ((None,), "graphs of encoders"),
    "backend": (("pytorch", None), "any backend but pytorch"),
}
_FOLLOWED = frozenset(FIELDS.values()) | {
    "enable_attention_dp",
    "disable_overlap_scheduler",
    "cuda_graph_config",
    "speculative_config",
}
_ENCODER = ("num_tokens", "max_num_token", "seq_lens", "max_seq_len")


def resolve(command: Sequence[str]) -> Resolved:
    """Return what a command line comes to; raises ``FlagError`` with all that is wrong with it."""
    notes = Notes()
    read = read_flags(command, notes)
    given, spelled = read.values, read.spelled
    in_file = {} if read.file is None else read_file(read.file, notes)
    only(in_file, _FOLLOWED | _IGNORED | set(_MUST_BE), (_CONFIG,), notes)
    values: dict[str, Any] = {**in_file, **given}
    sources = {name: "flag" if name in given else "file" for name in values}
    for name, (harmless, what) in _MUST_BE.items():
        if name in values and values[name] not in harmless:
            notes.unfollowed(_where(name, spelled), what, remedy="leave it out")
    sizes = {
        name: _size(values, name, spelled, notes)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", *_RANKS)
    }
    speculative = values.get("speculative_config")
    drafting = None if speculative is None else _drafting(speculative, notes)
    graphs: Graphs | None = Graphs()
    if "cuda_graph_config" in values:
        graphs = _graphs(values["cuda_graph_config"], notes)
    attention_dp = _truth(values, "enable_attention_dp", notes)
    overlap = not _truth(values, "disable_overlap_scheduler", notes)
    tensor = sizes["tensor_parallel_size"] or 1
    experts = sizes["moe_expert_parallel_size"]
    if experts is not None and tensor % experts:
        notes.refused(
            _where("moe_expert_parallel_size", spelled),
            f"experts over {experts} ranks do not divide {tensor} tensor-parallel ranks",
        )
    resolved = Resolved(
        max_batch_size=sizes["max_batch_size"] or 2048,
        max_num_tokens=sizes["max_num_tokens"] or 8192,
        max_seq_len=sizes["max_seq_len"],
        tensor=tensor,
        pipeline=sizes["pipeline_parallel_size"] or 1,
        experts=experts,
        attention_dp=attention_dp,
        overlap=overlap,
        graphs=graphs,
        drafting=drafting,
        sources=sources,
        overridden=tuple(sorted(name for name in given if name in in_file)),
    )
    if notes.problems:
        raise FlagError(notes.problems)
    return resolved


_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size")
_NEVER_NULL = _RANKS[:2]
_MOST = {"max_batch_size": 1 << 16}


def _where(name: str, spelled: Mapping[str, str]) -> Path:
    """Return where a value was given: the flag as it was written, or the key in the file."""
    return (spelled[name],) if name in spelled else (_CONFIG, name)


def _size(values: Mapping[str, Any], name: str, spelled: Mapping[str, str], notes: Notes) -> int | None:
    """Return a number of at least 1; None where it is not given, and the engine's default holds."""
    value = values.get(name)
    path = _where(name, spelled)
    if value is None and name in values and name not in spelled and name in _NEVER_NULL:
        notes.refused(path, "it is null, and has no default for that")
    number = None if value is None else integer(value, path, notes)
    if number is None:
        return None
    most = _MOST.get(name, 1 << 20)
    if not 1 <= number <= most:
        ours = f"nothing can be scheduled with {number}" if number < 1 else f"{number} is more than {most}"
        notes.unfollowed(path, ours)
        return None
    return number


def _truth(values: Mapping[str, Any], name: str, notes: Notes) -> bool:
    return name in values and truth(values[name], (_CONFIG, name), notes)


def _graphs(value: Any, notes: Notes) -> Graphs | None:
    """Return ``cuda_graph_config``; None for null, which is no graphs."""
    path = (_CONFIG, "cuda_graph_config")
    data = None if value is None else mapping(value, path, notes)
    if data is None:
        return None
    mode = data.get("mode", "encode" if any(data.get(key) not in (None, 0) for key in _ENCODER) else "decode")
    if mode == "encode":
        notes.unfollowed(path, "graphs of encoders", remedy="give batch_sizes or max_batch_size")
        return None
    if mode != "decode":
        notes.refused((*path, "mode"), f"it is neither decode nor encode, but {shown(mode)}")
    only(data, ("batch_sizes", "max_batch_size", "enable_padding", "mode"), path, notes)
    sizes = _batch_sizes(data.get("batch_sizes"), (*path, "batch_sizes"), notes)
    top_path = (*path, "max_batch_size")
    top = integer(data.get("max_batch_size", 0), top_path, notes, low=0)
    if sizes and top and top != max(sizes):
        notes.refused(
            top_path,
            f"it is {top} and the largest of batch_sizes {max(sizes)}, and both have to be the same",
            "the sizes alone say it",
            remedy="leave it out",
        )
    if top is not None and top > 1 << 16:
        notes.unfollowed(top_path, f"a size of {top}", remedy=f"give at most {1 << 16}")
        top = 0
    padding = truth(data.get("enable_padding", False), (*path, "enable_padding"), notes)
    return Graphs(batch_sizes=sizes or None, max_batch_size=top or 0, enable_padding=padding)


def _batch_sizes(value: Any, path: Path, notes: Notes) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        notes.refused(path, f"it is not a list, but {shown(value)}")
        return ()
    sizes = []
    for index, item in enumerate(value):
        size = integer(item, (*path, index), notes)
        if size is not None and size < 1:
            notes.unfollowed((*path, index), f"a graph of {size} requests")
        elif size is not None:
            sizes.append(size)
    return tuple(sizes)


_ANY_DECODING = (
    "decoding_type",
    "max_draft_len",
    "max_total_draft_tokens",
    "speculative_model",
    "speculative_model_dir",
    "max_concurrency",
    "draft_len_schedule",
    "load_format",
    "acceptance_rate_window_size",
    "acceptance_rate_threshold",
    "use_rejection_sampling",
    "allow_advanced_sampling",
    "advanced_sampling_mode",
    "enable_penalty",
)
_EAGLE = (
    "eagle_choices",
    "greedy_sampling",
    "posterior_threshold",
    "use_dynamic_tree",
    "dynamic_tree_max_topK",
    "num_eagle_layers",
    "max_non_leaves_per_layer",
    "eagle3_one_model",
    "eagle3_layers_to_capture",
    "eagle3_model_arch",
)
_OWN_DECODING: dict[str, tuple[str, ...]] = {
    "Eagle": _EAGLE,
    "Eagle3": (*_EAGLE, "sa_config"),
    "MTP": (
        "use_relaxed_acceptance_for_thinking",
        "relaxed_topk",
        "relaxed_delta",
        "use_mtp_vanilla",
        "mtp_eagle_one_model",
        "use_dynamic_tree",
        "dynamic_tree_max_topK",
        "sa_config",
        "num_nextn_predict_layers",
        "begin_thinking_phase_token",
        "end_thinking_phase_token",
    ),
    "Draft_Target": (),
    "SA": ("max_matching_ngram_size", "enable_global_pool", "global_pool_size"),
    "PARD": ("mask_token_id", "sa_config"),
    "DFlash": ("mask_token_id", "target_layer_ids", "attention_backend"),
    "NGram": ("max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"),
}
_NEEDS_MODEL = ("Eagle", "Eagle3", "Draft_Target")
_UNFOLLOWED = ("SaveState", "User_Provided", "DSpark", "AUTO")
_MOST_DRAFTS = 255


def _drafting(value: Any, notes: Notes) -> Drafting | None:
    """Return ``speculative_config``."""
    path: Path = (_CONFIG, "speculative_config")
    data = mapping(value, path, notes)
    if data is None:
        return None
    kind = data.get("decoding_type")
    if kind in _UNFOLLOWED:
        notes.unfollowed((*path, "decoding_type"), f"the graphs of {kind}")
        return None
    if not isinstance(kind, str) or kind not in ALGORITHMS:
        known = ", ".join((*ALGORITHMS, *_UNFOLLOWED))
        remedy = f"give one of {known}"
        notes.refused((*path, "decoding_type"), f"it knows no {shown(kind)}", remedy=remedy)
        return None
    only(data, (*_ANY_DECODING, *_OWN_DECODING[kind]), path, notes)
    if kind in _NEEDS_MODEL and not any(
        data.get(key) for key in ("speculative_model", "speculative_model_dir")
    ):
        notes.refused((*path, "speculative_model"), f"{kind} needs a draft model")
    drafts = _max_draft_len(kind, data, path, notes)
    if drafts is None:
        return None
    schedule = _schedule(data.get("draft_len_schedule"), drafts, (*path, "draft_len_schedule"), notes)
    concurrency = data.get("max_concurrency")
    most = None if concurrency is None else integer(concurrency, (*path, "max_concurrency"), notes, low=1)
    if most is not None and schedule is not None:
        notes.refused(
            (*path, "max_concurrency"),
            "it and draft_len_schedule exclude each other",
            "the schedule says where drafting ends",
            remedy="leave one out",
        )
    total = _total(data, drafts, path, notes)
    algorithm = ALGORITHMS[kind]
    changing = schedule is not None or most is not None
    if changing and total != drafts:
        notes.unfollowed((*path, "use_dynamic_tree"), "a tree of drafts whose length changes")
    if changing and data.get("use_mtp_vanilla"):
        notes.unfollowed((*path, "use_mtp_vanilla"), "a length of drafts that changes, for vanilla MTP")
    if most is not None and algorithm.dynamic and schedule is None:
        schedule, most = {most: drafts}, None
    longest = 2 * drafts - 1 if algorithm.doubled else total
    if longest > _MOST_DRAFTS:
        notes.unfollowed((*path, "max_draft_len"), f"decodes of {1 + longest} tokens a request")
    return Drafting(
        decoding_type=kind,
        max_draft_len=drafts,
        total_draft_tokens=total,
        schedule=schedule,
        max_concurrency=most,
    )


def _max_draft_len(kind: str, data: Mapping[str, Any], path: Path, notes: Notes) -> int | None:
    """Return K. MTP may leave it to the checkpoint, which is not here to be asked."""
    name, value = "max_draft_len", data.get("max_draft_len")
    if kind == "MTP" and "max_draft_len" not in data and "num_nextn_predict_layers" in data:
        name, value = "num_nextn_predict_layers", data["num_nextn_predict_layers"]
    where = (*path, name)
    if value is None and kind == "MTP":
        notes.unfollowed(where, "a length that the checkpoint decides", remedy="give max_draft_len")
        return None
    number = None if value is None else integer(value, where, notes)
    if value is not None and number is None:
        return None
    if number is None or number < 1:
        given = "is not given" if number is None else f"is {number}"
        notes.refused(where, f"{kind} has to draft at least one token, and it {given}")
        return None
    return number


def _schedule(value: Any, drafts: int, path: Path, notes: Notes) -> dict[int, int] | None:
    """Return a schedule, ascending by threshold."""
    data = None if value is None else mapping(value, path, notes)
    if data is None:
        return None
    found: dict[int, int] = {}
    before = len(notes.problems)
    for key, length in data.items():
        where = (*path, str(key))
        threshold, draft_len = integer(key, where, notes, low=1), integer(length, where, notes, low=0)
        if threshold is None or draft_len is None:
            continue
        found[threshold] = draft_len
        if draft_len > drafts:
            notes.refused(where, f"a length of {draft_len} is more than max_draft_len, {drafts}")
    if len(notes.problems) > before:
        return None
    if not found:
        notes.refused(path, "it is empty")
        return None
    first = min(found)
    if found[first] != drafts:
        notes.refused(
            (*path, str(first)),
            f"its least threshold drafts {found[first]}, and has to draft max_draft_len, {drafts}",
        )
        return None
    if len(found) > 63 or max(found) > 1 << 20:
        notes.unfollowed(path, "more than 63 thresholds, or one above a million")
        return None
    return dict(sorted(found.items()))


def _total(data: Mapping[str, Any], drafts: int, path: Path, notes: Notes) -> int:
    """Return the drafts that a step verifies of one request."""
    if data.get("eagle_choices") is not None:
        notes.unfollowed((*path, "eagle_choices"), "a static tree of drafts")
        return drafts
    if not (
        "use_dynamic_tree" in data and truth(data["use_dynamic_tree"], (*path, "use_dynamic_tree"), notes)
    ):
        return _linear_total(data, drafts, path, notes)
    where = (*path, "dynamic_tree_max_topK")
    wide = data.get("dynamic_tree_max_topK")
    breadth = None if wide is None else integer(wide, where, notes)
    if breadth is None or breadth < 1:
        if wide is None or breadth is not None:
            notes.refused(where, "a dynamic tree needs it, and at least 1")
        return drafts
    given = data.get("max_total_draft_tokens")
    if given is None:
        return breadth * drafts
    where = (*path, "max_total_draft_tokens")
    total = integer(given, where, notes)
    if total is not None and not drafts <= total <= breadth * drafts:
        notes.refused(where, f"it is {total}, and has to be {drafts} to {breadth * drafts}")
        return drafts
    return drafts if total is None else total


def _linear_total(data: Mapping[str, Any], drafts: int, path: Path, notes: Notes) -> int:
    """Return K: all but Eagle write it over what was given for the tokens of a tree."""
    given = data.get("max_total_draft_tokens")
    if given is not None and str(data["decoding_type"]).startswith("Eagle") and given != drafts:
        where = (*path, "max_total_draft_tokens")
        notes.unfollowed(where, "a chain of drafts with the tokens of a tree", remedy="leave it out")
    return drafts
