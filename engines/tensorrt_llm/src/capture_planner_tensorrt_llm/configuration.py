"""Flags and file -> ``Resolved``: what the engine's configuration classes make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capture_planner.engines.parsing import names
from capture_planner.errors import FlagError
from capture_planner_tensorrt_llm.drafting import read_drafting
from capture_planner_tensorrt_llm.flags import FIELDS, read_file, read_flags
from capture_planner_tensorrt_llm.settings import Graphs, Resolved
from capture_planner_tensorrt_llm.values import (
    Path,
    Problems,
    integer,
    mapping,
    only,
    shown,
    truth,
)

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
    problems = Problems()
    read = read_flags(command, problems)
    given, spelled = read.values, read.spelled
    in_file = {} if read.file is None else read_file(read.file, problems)
    only(in_file, _FOLLOWED | {*_IGNORED, *_MUST_BE}, (_CONFIG,), problems)
    values: dict[str, Any] = {**in_file, **given}
    sources = {name: "flag" if name in given else "file" for name in values}
    for name, (harmless, what) in _MUST_BE.items():
        if name in values and values[name] not in harmless:
            problems.unfollowed(_where(name, spelled), what, remedy="leave it out")
    sizes = {
        name: _size(values, name, spelled, problems)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", *_RANKS)
    }
    speculative = values.get("speculative_config")
    drafting = None if speculative is None else read_drafting(speculative, problems)
    graphs: Graphs | None = Graphs()
    if "cuda_graph_config" in values:
        graphs = _graphs(values["cuda_graph_config"], problems)
    attention_dp = _truth(values, "enable_attention_dp", problems)
    overlap = not _truth(values, "disable_overlap_scheduler", problems)
    tensor = sizes["tensor_parallel_size"] or 1
    experts = sizes["moe_expert_parallel_size"]
    if experts is not None and tensor % experts:
        problems.refused(
            _where("moe_expert_parallel_size", spelled),
            f"experts over {experts} ranks do not divide {tensor} tensor-parallel ranks",
            remedy=f"give a divisor of {tensor}",
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
    if problems.found:
        raise FlagError(read.placed(problems.found))
    return resolved


_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size")
_NEVER_NULL = _RANKS[:2]
_MOST = {"max_batch_size": 1 << 16}


def _where(name: str, spelled: Mapping[str, str]) -> Path:
    """Return where a value was given: the flag as it was written, or the key in the file."""
    return (spelled[name],) if name in spelled else (_CONFIG, name)


def _size(values: Mapping[str, Any], name: str, spelled: Mapping[str, str], problems: Problems) -> int | None:
    """Return a number of at least 1; None where it is not given, and the engine's default holds."""
    value = values.get(name)
    path = _where(name, spelled)
    if value is None and name in values and name not in spelled and name in _NEVER_NULL:
        problems.refused(
            path, "it is null, and has no default for that", remedy="give a number, or leave it out"
        )
    number = None if value is None else integer(value, path, problems)
    if number is None:
        return None
    most = _MOST.get(name, 1 << 20)
    if not 1 <= number <= most:
        ours = f"nothing can be scheduled with {number}" if number < 1 else f"{number} is more than {most}"
        problems.unfollowed(path, ours, remedy=f"give 1 to {most}")
        return None
    return number


def _truth(values: Mapping[str, Any], name: str, problems: Problems) -> bool:
    return name in values and truth(values[name], (_CONFIG, name), problems)


def _graphs(value: Any, problems: Problems) -> Graphs | None:
    """Return ``cuda_graph_config``; None for null, which is no graphs."""
    path = (_CONFIG, "cuda_graph_config")
    data = None if value is None else mapping(value, path, problems)
    if data is None:
        return None
    mode = data.get("mode", "encode" if any(data.get(key) not in (None, 0) for key in _ENCODER) else "decode")
    if mode == "encode":
        problems.unfollowed(path, "graphs of encoders", remedy="give batch_sizes or max_batch_size")
        return None
    if mode != "decode":
        problems.refused(
            (*path, "mode"), f"it is neither decode nor encode, but {shown(mode)}", remedy="give decode"
        )
    only(data, ("batch_sizes", "max_batch_size", "enable_padding", "mode"), path, problems)
    sizes = _batch_sizes(data.get("batch_sizes"), (*path, "batch_sizes"), problems)
    top_path = (*path, "max_batch_size")
    top = integer(data.get("max_batch_size", 0), top_path, problems, low=0)
    if sizes and top and top != max(sizes):
        problems.refused(
            top_path,
            f"it is {top} and the largest of batch_sizes {max(sizes)}, and both have to be the same",
            "the sizes alone say it",
            remedy="leave it out",
        )
    if top is not None and top > 1 << 16:
        problems.unfollowed(top_path, f"a size of {top}", remedy=f"give at most {1 << 16}")
        top = 0
    padding = truth(data.get("enable_padding", False), (*path, "enable_padding"), problems)
    return Graphs(batch_sizes=sizes or None, max_batch_size=top or 0, enable_padding=padding)


def _batch_sizes(value: Any, path: Path, problems: Problems) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        problems.refused(path, f"it is not a list, but {shown(value)}", remedy="write it as in [1, 2, 4]")
        return ()
    sizes = []
    for index, item in enumerate(value):
        size = integer(item, (*path, index), problems)
        if size is not None and size < 1:
            problems.unfollowed((*path, index), f"a graph of {size} requests", remedy="give sizes from 1 on")
        elif size is not None:
            sizes.append(size)
    return tuple(sizes)
