"""How SGLang makes each phase's graph settings of its flags: precedence, memory tiers, sizes."""

from __future__ import annotations

from typing import Any

from capture_planner.engines.parsing import refusal
from capture_planner.planning.sizing.engine_lists import GiB, sglang_default_max, sglang_requests, sglang_tokens
from capture_planner_sglang.emulation import families
from capture_planner_sglang.emulation.latent import MOST_PREFILL
from capture_planner_sglang.emulation.releases import memory_class, tabled
from capture_planner_sglang.emulation.resolution import BREAKABLE, DECODE, DISABLED, FULL, PREFILL, Startup

_PIPELINE_PREFILL_TOKENS = 8192
_LLAMA_2_PREFILL_TOKENS = 4096
_DEEPEP_TOKENS, _DEEPEP_STEP = 2048, 8
_STAGES = "with pipeline stages, prefill graphs are off until a flag asks for them"
_IMAGES = "prefills of a model that takes images run without graphs until a flag asks for them"


def read_settings(r: Startup) -> None:
    """Fold the flags into one setting per phase and key: JSON wins, then flags of a phase, then switches."""
    args = r.args
    # Weakest first: what comes later replaces what came before.
    given: list[tuple[str, str, str, Any]] = []
    for flag, phases in (
        ("disable_cuda_graph", (DECODE, PREFILL)),
        ("disable_prefill_cuda_graph", (PREFILL,)),
        ("disable_decode_cuda_graph", (DECODE,)),
    ):
        if getattr(args, flag):
            given += [(flag, phase, "backend", DISABLED) for phase in phases]
    named = [(phase, key) for phase in (DECODE, PREFILL) for key in ("backend", "max_bs", "bs")]
    for phase, key in (*named, (PREFILL, "max_seq_len")):
        flag = f"cuda_graph_{key}_{phase}"
        if getattr(args, flag) is not None:
            given.append((flag, phase, key, getattr(args, flag)))
    for phase, settings in (args.cuda_graph_config or {}).items():
        given += [("cuda_graph_config", phase, key, value) for key, value in settings.items()]
    for flag, phase, key, value in given:
        before = getattr(r.phase(phase), key)
        if (phase, key) in r.locked and before != value:
            r.decisions.note(
                "graph-setting-precedence",
                before,
                value,
                f"two flags set {key} of {phase}s: the JSON wins over a phase's flag, and that over a switch",
            )
        r.put(phase, key, value, r.sources[flag])
        r.locked.add((phase, key))
    _check_types(r)


def _check_types(r: Startup) -> None:
    """Refuse JSON values on which SGLang would fall over later."""
    for name in (DECODE, PREFILL):
        phase = r.phase(name)
        for key in ("max_bs", "max_seq_len", "full_prefill_max_req"):
            value = getattr(phase, key)
            if value is not None and type(value) is not int:  # not isinstance: `true` is an int
                says = f"{name}.{key} is no whole number: {value!r}"
                raise refusal("--cuda-graph-config", says, "write it without quotes, as in 64")
        sizes = phase.bs
        if sizes is not None and not (isinstance(sizes, list) and all(type(n) is int for n in sizes)):
            says = f"{name}.bs is no list of whole numbers: {sizes!r}"
            raise refusal("--cuda-graph-config", says, "write it as in [1, 2, 4]")
    if r.prefill.max_context_size is not None:
        raise refusal(
            "--cuda-graph-config",
            "SGLang has prefill.max_context_size for DeepSeek-V4 only: no other attention backend keeps it",
            "leave it out; max_seq_len bounds what a prefill graph serves",
        )
    if r.prefill.full_prefill_max_req is not None and r.prefill.full_prefill_max_req < 1:
        says = "prefill.full_prefill_max_req leaves a graph without requests"
        raise refusal("--cuda-graph-config", says, "give 1 or more")


def default_backends(r: Startup) -> None:
    """Turn off what the launch cannot have, unless a flag asks for it; refuse a backend there is not."""
    args, mode = r.args, r.args.disaggregation_mode
    free = (PREFILL, "backend") not in r.locked
    for rule, off, says in (
        # Large buckets over pipeline stages can be slower than eager (apply_cuda_graph_compatibility).
        ("pipeline-prefill", args.pp_size > 1, _STAGES),
        ("overlap-prefill", args.enable_two_batch_overlap, "two overlapping microbatches have no prefill graphs"),
        # Replays fault for models with images, except for those that SGLang lists.
        ("multimodal-prefill", r.model.has("multimodal") and not r.model.has("multimodal_prefill_graphs"), _IMAGES),
    ):
        if off and free:
            r.disable(PREFILL, rule, says)
    # Other sizes can hang DeepEP's all-to-all while it is captured (apply_deepep_adjustments).
    if args.moe_a2a_backend == "deepep" and r.prefill.backend == BREAKABLE:
        sizes = r.prefill.bs if r.prefill.bs is not None else sglang_tokens(r.prefill.max_bs or _DEEPEP_TOKENS)
        aligned = sorted({-(-size // _DEEPEP_STEP) * _DEEPEP_STEP for size in sizes})
        if aligned != sorted(sizes):
            says = f"with DeepEP, prefill graphs have multiples of {_DEEPEP_STEP} tokens, and {aligned[-1]} at most"
            r.change(PREFILL, "bs", aligned, "prefill-sizes-of-deepep", says)
            r.put(PREFILL, "max_bs", aligned[-1], "prefill-sizes-of-deepep")
    if free and mode == "decode":
        r.disable(PREFILL, "decode-server", "a decode server runs no prefills, so it captures none")
    if (DECODE, "backend") not in r.locked and mode == "prefill":
        r.disable(DECODE, "prefill-server", "a prefill server runs no decodes, so it captures none")
    for name in (DECODE, PREFILL):
        if r.phase(name).backend not in (FULL, BREAKABLE, DISABLED):
            raise refusal(
                "--cuda-graph-config",
                f"SGLang allows full, breakable and disabled for {name}.backend, not {r.phase(name).backend!r}",
                "give one of them",
            )


def fill_sizes(r: Startup) -> None:
    """Fill in what depends on the device's memory: the prefill chunk, and each phase's sizes."""
    args, memory = r.args, r.environment.device.memory
    if args.chunked_prefill_size is None:
        tiers = ((20 * GiB, 2048), (60 * GiB, 4096), (160 * GiB, 8192))
        chunk = next((tokens for below, tokens in tiers if memory < below), 16384)
        chunk = tabled("chunk_by_memory", {memory_class(memory): chunk})[memory_class(memory)]
        says = f"a device of {memory / GiB:.0f} GiB prefills chunks of {chunk} tokens"
        r.rewrite("chunked_prefill_size", chunk, "chunk-by-memory", says)
    _fill_decode(r)
    _fill_prefill(r)


def _fill_decode(r: Startup) -> None:
    args, decode = r.args, r.decode
    if decode.max_bs is None:
        memory, tensor = r.environment.device.memory, args.tp_size
        newest = {memory_class(memory): [sglang_default_max(memory, tensor)] * 2}
        # Two defaults for each class of memory: with fewer than 4 tensor-parallel ranks, and with more.
        top = tabled("decode_max_by_memory", newest)[memory_class(memory)][tensor >= 4]
        device = f"a device of {memory / GiB:.0f} GiB with {tensor} tensor-parallel ranks"
        r.change(DECODE, "max_bs", top, "decode-max-by-memory", f"{device} has decode graphs for up to {top} requests")
        # The default alone comes down; of a maximum that a flag gives, the pool cuts sizes later.
        most = args.max_running_requests
        if most is not None and top > most and tabled("decode_max_by_requests", True):
            says = f"at most {most} requests run, so the default of {top} comes down"
            r.change(DECODE, "max_bs", most, "decode-max-by-requests", says)
    families.expand_decodes(r)
    if decode.bs is not None:
        if not decode.bs:
            says = "SGLang takes the largest of decode.bs, which is empty"
            raise refusal("--cuda-graph-config", says, "give sizes, or leave bs out")
        largest, source = max(decode.bs), r.sources["cuda_graph_config.decode.bs"]
        if decode.max_bs != largest and (DECODE, "max_bs") in r.locked:
            says = "the list of decode sizes is taken as it is, and its largest is the maximum"
            r.decisions.note("decode-list-wins", decode.max_bs, largest, says)
            source = "decode-list-wins"
        if decode.max_bs != largest or (DECODE, "max_bs") not in r.locked:
            r.put(DECODE, "max_bs", largest, source)
        return
    sizes = sglang_requests(
        decode.max_bs, speculative=args.speculative_algorithm is not None, padding=not args.disable_cuda_graph_padding
    )
    r.put(DECODE, "bs", list(sizes), "default")


def _fill_prefill(r: Startup) -> None:
    args, prefill = r.args, r.prefill
    if prefill.max_bs is None:
        r.put(PREFILL, "max_bs", args.chunked_prefill_size, r.sources["chunked_prefill_size"])
        if r.model.latent:
            short, most = tabled("prefill_max_of_latent", [0, MOST_PREFILL])
            rule, says = "prefill-max-of-latent-attention", f"latent attention has prefill graphs of {most} tokens"
            # Before 0.5.23 there was one maximum, for shorter chunks too.
            if short == most != prefill.max_bs:
                r.change(PREFILL, "max_bs", most, rule, says)
            _lower_prefill(r, most, rule, "latent attention")
        # Larger forwards of pipeline stages stay eager by default (handle_gpu_memory_settings).
        staged = tabled("prefill_max_of_stages", _PIPELINE_PREFILL_TOKENS) == _PIPELINE_PREFILL_TOKENS
        if staged and args.pp_size > 1 and prefill.backend == BREAKABLE and (PREFILL, "bs") not in r.locked:
            _lower_prefill(r, _PIPELINE_PREFILL_TOKENS, "pipeline-prefill-max", "with pipeline stages")
        if args.max_total_tokens is not None:
            _lower_prefill(r, args.max_total_tokens, "prefill-max-by-pool", "the KV pool's size")
        # By the path alone, until an issue of these models is fixed (handle_gpu_memory_settings).
        if "llama-2" in args.model_path.lower():
            _lower_prefill(r, _LLAMA_2_PREFILL_TOKENS, "prefill-max-of-llama-2", "a Llama 2 by its name")
    # A list is taken as it is, whatever lowered the maximum above.
    if prefill.bs is None:
        r.put(PREFILL, "bs", list(sglang_tokens(prefill.max_bs)), "default")


def _lower_prefill(r: Startup, most: int, rule: str, why: str) -> None:
    if r.prefill.max_bs > most:
        r.change(PREFILL, "max_bs", most, rule, f"prefill graphs end at {most} tokens: {why}")


def lower_for_attention_dp(r: Startup) -> None:
    """Give each attention-DP rank its share of the chunk, and end its prefill graphs there."""
    args, prefill = r.args, r.prefill
    if not r.attention_dp:
        return
    share = args.chunked_prefill_size // args.attn_dp_size
    says = f"each of {args.attn_dp_size} attention-DP ranks prefills its share of the chunk"
    r.rewrite("chunked_prefill_size", share, "chunk-per-rank", says)
    if prefill.backend == DISABLED or prefill.max_bs <= share or (PREFILL, "max_bs") in r.locked:
        return
    says = f"prefill graphs end at a rank's share of the chunk, {share} tokens"
    r.change(PREFILL, "max_bs", share, "prefill-max-per-rank", says)
    if (PREFILL, "bs") not in r.locked:
        r.put(PREFILL, "bs", list(sglang_tokens(share)), "prefill-max-per-rank")
