"""SGLang's rules other than graph settings: parallel sizes, attention, speculation, adapters."""

from __future__ import annotations

import argparse
import json
from typing import Any

import attrs

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED
from capture_planner.engines.parsing import did_you_mean, refusal, unfollowed
from capture_planner_sglang.emulation import latent
from capture_planner_sglang.emulation.families import SPARSE_BACKEND
from capture_planner_sglang.emulation.flags import ATTENTION_BACKENDS
from capture_planner_sglang.emulation.latent import LATENT_BACKENDS
from capture_planner_sglang.emulation.releases import has
from capture_planner_sglang.emulation.resolution import (
    COUNTS_AS,
    DISABLED,
    Startup,
    architectures,
    decided_in,
    read_model,
)

EAGLE_FAMILY = ("EAGLE", "EAGLE3", "STANDALONE")
WITHOUT_GRAPHS = ("torch_native", "flex_attention")
_SINKS = "GptOssForCausalLM"
_ATTENTION: dict[str | None, tuple[dict[int, str], tuple[str, ...]]] = {
    _SINKS: ({9: "fa3", 10: "trtllm_mha"}, ("triton", "trtllm_mha", "fa3", "fa4")),
    "Gemma4ForConditionalGeneration": ({10: "trtllm_mha"}, ("triton", "trtllm_mha", "fa4")),
}
"""Architectures with attention of their own: the default by SM, Triton elsewhere, and what they run with."""
_ALGORITHMS = (*EAGLE_FAMILY, "NEXTN", "NGRAM")
OBSERVE = "observe the engine itself (launch --observe FOLDER)"
OWN_LIMITS = (
    *("HrmTextForCausalLM", "LlavaLlamaForCausalLM", "MllamaForConditionalGeneration"),
    "MossVLForConditionalGeneration",
)
"""Architectures whose rules change the limits that flags set: they prefill whole prompts."""
_OF_DEVICES = ("--device", "--moe-runner-backend")
_RADIX = ("EAGLE", "EAGLE3")
_LLAMA_DRAFT = {"LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"}
_SPECULATIVE_REQUESTS = 48
_EXPERTS = (
    *("auto", "deep_gemm", "triton", "triton_kernel", "cutlass", "marlin", "humming", "hpc_ops"),
    *("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_mxfp4"),
)
"""Kernels of experts that decide nothing about graphs."""


_LENGTHS = {"max_position_embeddings", "rope_scaling", "rope_parameters"}
"""Fields of ``--json-model-override-args`` that change the longest sequence and nothing else."""


def replaced_lengths(args: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides of config.json; raises ``NotEmulated`` for fields that are not lengths."""
    flag, text = "--json-model-override-args", args.json_model_override_args
    try:
        given = json.loads(text)
    except ValueError:
        raise refusal(flag, "SGLang reads JSON", "give an object, as in '{\"a\": 1}'") from None
    if not isinstance(given, dict) or not given.keys() <= _LENGTHS:
        raise unfollowed(flag, "SGLang accepts it, and its effect on graphs is not emulated", "leave it out")
    return given


def check_followed(r: Startup) -> None:
    """Refuse values that SGLang takes and that are not emulated; of an unknown model's, flags alone are followed."""
    args = r.args
    judge_model(r)
    backends = (SPARSE_BACKEND,) if r.model.sparse else LATENT_BACKENDS if r.model.latent else ATTENTION_BACKENDS
    halves: tuple[str | None, ...] = (None, *(name for name in backends if name not in WITHOUT_GRAPHS))
    drafts = (None,) if r.model.latent else halves
    wanted: tuple[tuple[str, str | None, tuple[str | None, ...]], ...] = (
        ("--device", args.device, (None, "cuda")),
        # MegaMoE checks tokens by the model's class, and has no other effect on graphs.
        ("--moe-a2a-backend", args.moe_a2a_backend, ("none", "deepep", *(["megamoe"] if r.by_flags else []))),
        ("--moe-runner-backend", args.moe_runner_backend, _EXPERTS),
        ("--kv-cache-dtype", args.kv_cache_dtype, ("auto", "bf16", "bfloat16", "fp8_e4m3")),
        ("--attention-backend", args.attention_backend, (None, *backends)),
        ("--decode-attention-backend", args.decode_attention_backend, halves),
        ("--prefill-attention-backend", args.prefill_attention_backend, halves),
        ("--speculative-draft-attention-backend", args.speculative_draft_attention_backend, drafts),
    )
    for flag, value, known in wanted:
        by_model = r.by_flags and (flag.endswith("-attention-backend") or (flag in _OF_DEVICES and r.other_device))
        if value not in known and not by_model:
            names = " or ".join(str(name) for name in known if name is not None)
            remedy = f"give {names}" if names else "leave it out"
            raise unfollowed(flag, f"SGLang may take {value}, and its graphs are not emulated", remedy)
    for flag, given, other in (
        ("--load-format", args.load_format, "expert_pack"),
        ("--lora-backend", args.lora_backend, "ascend"),
    ):
        if given == other:
            says = f"SGLang's {other} changes which graphs there are, and is not emulated"
            raise unfollowed(flag, says, "give another, or leave it out")
    decode = args.linear_attn_decode_backend
    if decode == "flashkda":
        raise refusal("--linear-attn-decode-backend", "SGLang's flashkda runs prefills only", "give triton")
    if decode == "flashinfer" and r.environment.device.sm[0] >= 10 and args.mamba_ssm_dtype != "bfloat16":
        says = (
            "on SM100 and newer SGLang's flashinfer needs states in bfloat16, and whether the model has them is unknown"
        )
        raise unfollowed("--linear-attn-decode-backend", says, "give --mamba-ssm-dtype bfloat16")
    longest = None if args.longer_context else r.model.context
    if args.context_length is not None and longest is not None and args.context_length > longest:
        says = f"SGLang stops at a length over the model's own {longest} tokens"
        raise refusal("--context-length", says, "give less, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1")
    algorithm = args.speculative_algorithm
    if algorithm is not None and algorithm.upper() not in _ALGORITHMS:
        raise unfollowed(
            "--speculative-algorithm",
            f"{algorithm!r} is unknown to SGLang, or its graphs are not emulated",
            did_you_mean(algorithm, _ALGORITHMS, f"{', '.join(_ALGORITHMS)} are"),
        )


def judge_model(r: Startup) -> None:
    """Let flags alone decide for a model whose rules are not emulated; refuse what does not decode."""
    name, architecture, known = r.args.model_path, r.model.architecture, architectures()
    if r.other_device:
        r.by_flags = checkpoints.other_device(r.other_device, r.environment.name)
        r.model = attrs.evolve(r.model, latent=False, sparse=False, multimodal=False)
        return
    if r.model.source == ASSUMED:
        family = checkpoints.other_family(name) if r.named else None
        if family is not None:
            r.by_flags = f"{name} has a name of another family ({family}), and is unknown here"
        return
    reason = None
    followed = architecture in known["followed"] and r.model.sparse == (architecture in known["sparse"])
    if not followed and (r.model.sparse or r.model.latent or r.model.multimodal):
        what = "more than text" if not r.model.latent else "sparse attention" if r.model.sparse else "latent attention"
        reason = f"{name} has {what}, whose rules for graphs are not emulated"
    elif r.model.latent != (architecture in known["latent"]):
        reason = f"{name} is a {architecture} of another kind of attention, whose rules for graphs are not emulated"
    elif architecture is None:
        reason = f"SGLang stops: the config.json of {name} names no architecture"
    elif len(r.model.architectures) > 1:
        several = " and ".join(r.model.architectures)
        reason = f"{name} is {several} at once, whose rules for graphs are not emulated"
    elif architecture in known["not_followed"]:
        reason = f"{name} is a {architecture}, whose rules for graphs are not emulated"
    elif architecture not in known["followed"]:
        reason = (
            f"SGLang has no {architecture}, as {name} is: it stops, or runs Transformers' own class, "
            "whose rules for graphs are not emulated"
        )
    if reason is None:
        return
    places = decided_in(architecture)
    reason += f"; SGLang 0.5.23 decides them in {places}" if places else ""
    decodes = str(architecture).endswith(("ForCausalLM", "ForConditionalGeneration"))
    if not decodes or len(r.model.architectures) > 1 or architecture in OWN_LIMITS:
        error = refusal if architecture is None else unfollowed
        raise error("--model-path", reason, f"{OBSERVE}, or name another model")
    r.by_flags = reason.replace("; ", ", and ")
    r.model = attrs.evolve(r.model, latent=False, sparse=False, multimodal=False)


def read_attention_dp(r: Startup) -> None:
    """Turn the old spelling of attention DP, a switch next to --dp-size, into the new one."""
    args = r.args
    if args.enable_dp_attention and args.attn_dp_size == 1:
        says = "--enable-dp-attention makes --dp-size count attention-DP groups instead of replicas"
        r.rewrite("attn_dp_size", args.dp_size, "old-attention-dp", says)
        args.dp_size = 1
        r.sources["dp_size"] = "old-attention-dp"


def check_parallel(r: Startup) -> None:
    """Refuse parallel sizes that do not fit each other."""
    args = r.args
    for flag in ("tp_size", "pp_size", "dp_size", "attn_dp_size"):
        if getattr(args, flag) < 1:
            raise refusal(f"--{flag.replace('_', '-')}", "SGLang requires at least 1", "give 1 or more")
    if args.attn_dp_size > 1 and args.dp_size > 1:
        raise refusal("--dp-size", "SGLang has either replicas or attention-DP groups", "set one of them to 1")
    if args.tp_size % args.attn_dp_size:
        reason = f"SGLang cannot divide {args.tp_size} tensor-parallel ranks into {args.attn_dp_size} groups"
        raise refusal("--attn-dp-size", reason, f"give a divisor of --tp-size {args.tp_size}, or more ranks")
    if args.moe_dense_tp_size not in (None, 1, args.tp_size):
        raise refusal("--moe-dense-tp-size", "SGLang accepts 1 or --tp-size", f"give 1 or {args.tp_size}")


def choose_attention(r: Startup) -> None:
    """Choose attention backends and the page size; some backends have no graphs."""
    args = r.args
    prefill, decode = args.prefill_attention_backend, args.decode_attention_backend
    halves = (prefill is None) + (decode is None)
    if r.model.architecture == _SINKS and halves == 1 and args.attention_backend is None:
        reason = f"SGLang requires both attention backends of {_SINKS} where one is given"
        raise refusal("--attention-backend", reason, "give it, or a backend for prefills and one for decodes")
    if prefill is not None and prefill == decode:
        args.attention_backend = prefill
        r.sources["attention_backend"] = r.sources["prefill_attention_backend"]
    elif args.attention_backend is None and not r.by_flags:
        chosen = _default_attention(r)
        says = f"no attention backend is named, and this device's default is {chosen}"
        r.rewrite("attention_backend", chosen, "attention-by-device", says)
    if args.attention_backend in WITHOUT_GRAPHS:
        r.disable_all("attention-without-graphs", f"{args.attention_backend} attention runs without graphs")
    if args.attention_backend == "flex_attention" and args.speculative_algorithm is not None:
        raise refusal("--attention-backend", "SGLang has no speculation with flex_attention", "name another")
    r.attention = (prefill or args.attention_backend or "", decode or args.attention_backend or "")
    if r.by_flags:
        _choose_page(r, {args.attention_backend, prefill, decode})
        return
    if r.model.latent:
        latent.choose_page(r)
        latent.check_backends(r)
    _, own = _ATTENTION.get(r.model.architecture, ({}, r.attention))
    if not set(r.attention) <= set(own):
        reason = f"SGLang runs {r.model.architecture} only with {', '.join(own)}"
        raise refusal("--attention-backend", reason, "give one of them")
    major, minor = r.environment.device.sm
    if "fa3" in r.attention and major not in (8, 9):
        reason = f"SGLang's fa3 needs SM80 to SM90; {r.environment.name} has SM{major}{minor}"
        raise refusal("--attention-backend", reason, "name another, such as flashinfer")
    if "trtllm_mha" in r.attention and major not in (9, 10, 12):
        reason = "SGLang runs trtllm_mha on SM90, SM100 and SM120 only"
        raise refusal("--attention-backend", reason, "name another, such as flashinfer or triton")
    if r.attention[0] == "trtllm_mha" and major == 12 and args.kv_cache_dtype == "fp8_e4m3":
        reason = "SGLang's trtllm_mha prefill on SM120 has no fp8_e4m3"
        raise refusal("--kv-cache-dtype", reason, "give auto, or another --prefill-attention-backend")
    _choose_page(r, {args.attention_backend, prefill, decode})


def _default_attention(r: Startup) -> str:
    args, major = r.args, r.environment.device.sm[0]
    topk = args.speculative_eagle_topk
    halves = (args.prefill_attention_backend, args.decode_attention_backend)
    if r.model.latent:
        return latent.default_backend(r)
    if r.model.architecture in _ATTENTION and (r.model.architecture != _SINKS or halves == (None, None)):
        return _ATTENTION[r.model.architecture][0].get(major, "triton")
    linear = topk is None or (topk == 1 and args.page_size in (1, None))
    # FlashInfer has been slower on Hopper since 0.6.1 (sglang#17411).
    if major == 9 and linear:
        return "fa3"
    # trtllm_mha drafts and verifies one branch only.
    if major == 10 and linear and (args.speculative_algorithm is None or topk is not None):
        return "trtllm_mha"
    return "flashinfer"


def _choose_page(r: Startup, named: set[str | None]) -> None:
    args = r.args
    if "trtllm_mha" in {*named, args.speculative_draft_attention_backend} and args.page_size not in (16, 32, 64, 128):
        r.rewrite("page_size", 64, "page-of-attention", "trtllm_mha has pages of 16, 32, 64 or 128 tokens")
    # With several branches fa4 runs over pages of 1 token (_fa4_page_constraint).
    whole_pages = r.environment.device.sm[0] == 10 and (args.speculative_eagle_topk or 0) <= 1
    if "fa4" in named and whole_pages and args.page_size != 128 and not r.model.latent:
        r.rewrite("page_size", 128, "page-of-attention", "fa4 has pages of 128 tokens on SM100")
    if args.page_size is None:
        args.page_size = 1
        r.sources["page_size"] = "default"
    if args.page_size < 1:
        raise refusal("--page-size", "SGLang requires at least 1", "give 1 or more")


def resolve_speculation(r: Startup) -> None:
    """Settle the algorithm and how many tokens it drafts and verifies."""
    args = r.args
    if args.speculative_algorithm is None:
        return
    name = args.speculative_algorithm.upper()
    if name == "NEXTN":
        r.decisions.note("nextn-is-eagle", "NEXTN", "EAGLE", "NEXTN is run as EAGLE")
        r.sources["speculative_algorithm"] = "nextn-is-eagle"
        name = "EAGLE"
    args.speculative_algorithm = name
    if r.attention_dp and name in ("STANDALONE", "NGRAM"):
        raise refusal("--speculative-algorithm", f"SGLang has no {name} with attention DP", "drop one of them")
    if args.disaggregation_decode_enable_radix_cache and args.disaggregation_mode == "decode" and name not in _RADIX:
        raise refusal("--disaggregation-decode-enable-radix-cache", f"SGLang has no {name} with it", "drop one of them")
    if args.max_running_requests is None:
        says = f"with speculation, {_SPECULATIVE_REQUESTS} requests run at most unless a flag says how many"
        r.rewrite("max_running_requests", _SPECULATIVE_REQUESTS, "requests-of-speculation", says)
    if name == "NGRAM":
        _resolve_ngram(r)
    else:
        _resolve_eagle(r)


def _resolve_eagle(r: Startup) -> None:
    args = r.args
    if args.speculative_num_steps is None:
        _choose_draft_size(r)
    if args.speculative_eagle_topk is None:
        reason = "SGLang requires it with --speculative-num-steps"
        raise refusal("--speculative-eagle-topk", reason, "give it; 1 is a chain")
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
    path = args.speculative_draft_model_path
    # Without a path the draft is in the target's checkpoint.
    r.draft = r.model if path is None else read_model(path, "--speculative-draft-model-path")
    latent.check_draft(r)
    gemma = str(r.model.architecture).startswith("Gemma4") and path is not None
    if gemma and (r.draft.source == ASSUMED or "Assistant" in str(r.draft.architecture)):
        says = "an assistant of Gemma 4 drafts by FROZEN_KV_MTP (speculative_hook.py), which is not emulated"
        raise unfollowed("--speculative-draft-model-path", says, "observe the engine itself, or leave speculation out")
    first = r.attention[args.speculative_attention_mode == "decode"]
    own = args.speculative_draft_attention_backend
    if "torch_native" in ({own} if own else {first, r.attention[1] if steps > 1 else first}):
        raise refusal("--attention-backend", "SGLang drafts on no torch_native", "name another, or a drafter's own")
    flag = "--speculative-draft-attention-backend"
    if own == "fa3" and r.environment.device.sm[0] not in (8, 9):
        raise refusal(flag, "SGLang's fa3 needs SM80 to SM90", "name another, such as flashinfer")
    if own == "trtllm_mha" and topk > 1:
        raise unfollowed(flag, "branches that trtllm_mha drafts are not emulated", "give --speculative-eagle-topk 1")
    if "trtllm_mha" in r.attention and topk > 1:
        raise refusal("--speculative-eagle-topk", "SGLang's trtllm_mha verifies one branch only", "give 1")
    if topk == 1 and args.speculative_num_draft_tokens != steps + 1:
        says = f"one branch of {steps} steps is verified as {steps + 1} tokens"
        r.rewrite("speculative_num_draft_tokens", steps + 1, "draft-tokens-of-one-branch", says)
    if topk > 1 and args.page_size > 1 and args.attention_backend not in ("flashinfer", "fa3", "triton"):
        says = "SGLang verifies branches on pages with flashinfer, fa3 and triton only"
        raise refusal("--page-size", says, "give 1, one of these backends, or --speculative-eagle-topk 1")


def _choose_draft_size(r: Startup) -> None:
    args, flag = r.args, "--speculative-num-steps"
    if args.speculative_eagle_topk is not None or args.speculative_num_draft_tokens is not None:
        reason = "SGLang requires steps, branches and draft tokens together, or none of them"
        raise refusal(flag, reason, "give all three, or none")
    standalone = args.speculative_algorithm == "STANDALONE"
    if not standalone and r.model.architecture is None:
        assumption = checkpoints.assumption(r.named, COUNTS_AS)
        reason = f"{assumption}; SGLang chooses by the architecture, which its config.json gives"
        others = "--speculative-eagle-topk and --speculative-num-draft-tokens"
        raise refusal(flag, reason, f"name a folder with its config.json, or give {flag}, {others}")
    # _auto_choose_speculative_params of arg_groups/speculative_hook.py.
    steps, topk, tokens = (5, 4, 8) if not standalone and r.model.architecture in _LLAMA_DRAFT else (3, 1, 4)
    says = f"no draft size is given: {steps} steps, {topk} branches and {tokens} tokens are chosen"
    r.rewrite("speculative_num_steps", steps, "draft-size-by-model", says)
    args.speculative_eagle_topk, args.speculative_num_draft_tokens = topk, tokens
    for name in ("speculative_eagle_topk", "speculative_num_draft_tokens"):
        r.sources[name] = "draft-size-by-model"


def _resolve_ngram(r: Startup) -> None:
    args, breadth = r.args, r.args.speculative_ngram_max_bfs_breadth
    args.speculative_eagle_topk = breadth
    r.sources["speculative_eagle_topk"] = r.sources.get("speculative_ngram_max_bfs_breadth", "default")
    if args.speculative_num_draft_tokens is None:
        r.rewrite("speculative_num_draft_tokens", 12, "ngram-draft-tokens", "n-gram drafts have 12 tokens")
    if args.speculative_num_steps is None:
        if breadth == 0:
            raise refusal("--speculative-ngram-max-bfs-breadth", "SGLang divides by it, and it is 0", "give 1 or more")
        args.speculative_num_steps = args.speculative_num_draft_tokens // breadth
        r.sources["speculative_num_steps"] = r.sources["speculative_num_draft_tokens"]
    if breadth > 1 and args.page_size > 1 and args.attention_backend != "flashinfer":
        raise refusal("--page-size", "SGLang verifies n-gram branches on pages with flashinfer only", "give 1")


def check_launch(r: Startup) -> None:
    """Refuse what SGLang's last check refuses."""
    args = r.args
    if args.enable_two_batch_overlap and args.moe_a2a_backend == "none" and not r.attention_dp:
        says = "SGLang overlaps microbatches with experts' all-to-all or with attention DP only"
        raise refusal(
            "--enable-two-batch-overlap", says, "give --moe-a2a-backend deepep or --attn-dp-size, or leave it out"
        )
    if args.disable_cuda_graph_padding and args.enable_torch_compile:
        reason = "SGLang would compile the model for each batch size"
        raise refusal("--disable-cuda-graph-padding", reason, "drop it or --enable-torch-compile")
    algorithm, width = args.speculative_algorithm, args.speculative_num_draft_tokens
    staged = algorithm == "EAGLE" and args.disaggregation_mode == "prefill"
    if args.pp_size > 1 and algorithm is not None and not staged:
        reason = "SGLang speculates over pipeline stages only with EAGLE on a prefill server"
        raise refusal("--pp-size", reason, "give 1, or leave speculation out")
    if r.decode.backend != DISABLED and algorithm is not None:
        if width is None or width < 1:
            reason = "SGLang cannot capture a verification of no tokens"
            raise refusal("--speculative-num-draft-tokens", reason, "give 1 or more, and as many steps")
        if algorithm in EAGLE_FAMILY and args.speculative_eagle_topk < 1 and args.speculative_num_steps > 1:
            raise refusal("--speculative-eagle-topk", "SGLang cannot capture a draft of no branches", "give 1")
    chunk = args.chunked_prefill_size
    if chunk > 0 and args.disaggregation_mode != "decode" and chunk % args.page_size:
        reason = f"SGLang requires whole pages of {args.page_size} tokens in a chunk, got {chunk} tokens"
        raise refusal("--chunked-prefill-size", reason, f"give a multiple of {args.page_size} per rank")
    _check_lora(r)
    if args.enable_mixed_chunk and algorithm in ("STANDALONE", "NGRAM"):
        r.rewrite("enable_mixed_chunk", False, "no-mixed-chunk", "this speculation has no decodes in prefill chunks")


def _check_lora(r: Startup) -> None:
    args = r.args
    if args.max_loras_per_batch < 1:
        raise refusal("--max-loras-per-batch", "SGLang requires at least 1", "give 1 or more")
    if args.lora_paths and args.enable_lora is None:
        r.rewrite("enable_lora", True, "lora-by-paths", "adapters are named, so LoRA is on")
    if args.lora_backend == "triton_v2" and not has("triton-v2-adapters"):
        raise refusal("--lora-backend", "0.5.23 was the first SGLang with triton_v2", "name another")
    if not args.enable_lora:
        return
    if args.lora_backend == "triton_v2" and (r.attention_dp or args.enable_two_batch_overlap):
        other = "attention DP" if r.attention_dp else "overlapping microbatches"
        raise refusal("--lora-backend", f"SGLang has no triton_v2 with {other}", "name another")
    if args.speculative_algorithm == "STANDALONE":
        raise refusal("--enable-lora", "SGLang has no adapters with STANDALONE drafts", "drop one of them")
