"""What SGLang's runners capture of the resolved settings: pools, alignment, one manager per role."""

from __future__ import annotations

from capture_planner.engines.emulation import written
from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode, Role
from capture_planner_sglang.emulation import families
from capture_planner_sglang.emulation.latent import draft_prefills_decode
from capture_planner_sglang.emulation.managers import (
    DecodeGraphs,
    PrefillGraphs,
    SglangManager,
    decode_sizes,
    prefill_sizes,
)
from capture_planner_sglang.emulation.releases import has
from capture_planner_sglang.emulation.resolution import ASSUMED_CONTEXT, BREAKABLE, DECODE, DISABLED, FULL, Startup
from capture_planner_sglang.emulation.rules import EAGLE_FAMILY

_POOL_LEAST, _POOL_MOST = 2048, 4096
_NO_WHOLE_PREFILL = ("triton", "trtllm_mha")


def request_pool(r: Startup) -> int:
    """Return a rank's most requests; only --max-total-tokens bounds its KV pool, two tokens or more for each."""
    args = r.args
    tokens = args.max_total_tokens
    tokens = None if tokens is None else tokens // args.page_size * args.page_size
    source = r.sources.get("max_running_requests", "default")
    if args.max_running_requests is not None:
        # A rank has at least one request since 0.5.23 (resolve_max_num_reqs).
        pool = max(int(has("one-request-each")), args.max_running_requests // args.attn_dp_size)
        if r.attention_dp:
            says = f"{args.attn_dp_size} attention-DP ranks share the requests: {pool} each"
            r.decisions.note("requests-per-rank", args.max_running_requests, pool, says)
            source = "requests-per-rank"
    elif tokens is None:
        # Memory decides how many tokens there are; every estimate is at least this.
        pool = _POOL_LEAST
    else:
        # resolve_max_num_reqs of mem_cache/kv_cache_configurator.py.
        pool = max(min(int(tokens / context(r) * 512), _POOL_MOST), _POOL_LEAST)
        source = r.sources["max_total_tokens"]
    if tokens is not None and pool > tokens // 2:
        says = f"a KV pool of {tokens} tokens holds {tokens // 2} requests"
        r.decisions.note("requests-by-pool", pool, tokens // 2, says)
        pool, source = tokens // 2, "requests-by-pool"
    states = families.most_requests(r)
    if states is not None and pool > states:
        says = f"--max-mamba-cache-size holds the states of {states} requests"
        r.decisions.note("requests-by-states", pool, states, says)
        pool, source = states, "requests-by-states"
        if pool < 1:
            raise refusal("--max-mamba-cache-size", "SGLang's slots hold no request's states", "give more")
    r.sources["request_pool"] = source
    if pool < 1:
        flag = "--max-running-requests" if source == "requests-per-rank" else "--max-total-tokens"
        raise refusal(flag, "SGLang's pool holds no request", "give more")
    return int(pool)


def context(r: Startup) -> int:
    """Return the longest sequence, in tokens."""
    return int(r.args.context_length or r.model.context or ASSUMED_CONTEXT)


def gathers(r: Startup) -> tuple[bool, bool]:
    """Whether inputs of MLPs are gathered over attention-DP ranks, and those of attention over its TP ranks."""
    args, dense = r.args, r.args.moe_dense_tp_size
    experts = args.moe_a2a_backend == "none"
    groups = args.tp_size // args.attn_dp_size
    # require_mlp_tp_gather and require_attn_tp_gather of utils/common.py.
    mlp = r.attention_dp and (dense is None or not args.enable_dp_lm_head or experts or dense > groups)
    attention = not args.disable_attn_tp_gather and not (experts and dense is None)
    return mlp, attention and (groups > 1 or not r.attention_dp)


def alignment(r: Startup) -> int:
    """Return what divides every graph: attention's TP ranks, where they share rows, and microbatches that overlap."""
    shared = int(r.args.tp_size) // int(r.args.attn_dp_size) if any(gathers(r)) else 1
    return shared * (2 if r.args.enable_two_batch_overlap else 1)


def managers(r: Startup, pool: int) -> tuple[SglangManager, ...]:
    """Return a manager for each role that runs, target first."""
    args = r.args
    algorithm = args.speculative_algorithm
    drafts = algorithm in EAGLE_FAMILY
    prompts_of_drafts = drafts and r.prefill.backend == BREAKABLE and r.draft.drafts_prefills
    sizes = _prefill_list(r, pool) if r.model.has_prefill_graphs or prompts_of_drafts else ()
    target = SglangManager(
        role=Role.TARGET,
        decodes=_target_decodes(r, pool),
        prefills=_prefills(r, Role.TARGET, pool, sizes),
        speculative=algorithm is not None,
    )
    # Of a model that is not emulated, the drafter's graphs are the model's to decide.
    if not drafts or r.by_flags:
        return (target,)
    extends = _decodes(r, Role.DRAFT_PREFILL, pool, args.speculative_num_draft_tokens)
    if extends is not None and not draft_prefills_decode(r):
        says = "flashinfer has no graph for a drafter's first pass with latent attention"
        if not has("draft-prefills-of-flash-attention"):
            says += ", and before 0.5.23 fa3 and fa4 have none"
        r.decisions.note("draft-prefills-of-latent-attention", "decode graphs", "none", says, Role.DRAFT_PREFILL)
        extends = None
    prompts = _prefills(r, Role.DRAFT_PREFILL, pool, sizes) if prompts_of_drafts else None
    steps = args.speculative_num_steps - 1  # the draft prefill makes the first draft
    chain = _decodes(r, Role.DRAFT_DECODE, pool, args.speculative_eagle_topk, steps) if steps > 0 else None
    if steps < 1:
        says = "one draft step is the draft prefill itself, so that no draft decode is captured"
        r.decisions.note("one-draft-step", "decode graphs", "none", says, Role.DRAFT_DECODE)
    return (
        target,
        SglangManager(role=Role.DRAFT_PREFILL, decodes=extends, prefills=prompts, speculative=True),
        SglangManager(role=Role.DRAFT_DECODE, decodes=chain, speculative=True),
    )


def _target_decodes(r: Startup, pool: int) -> DecodeGraphs | None:
    args = r.args
    if args.speculative_algorithm is None:
        return _decodes(r, Role.TARGET, pool, 1)
    width = args.speculative_num_draft_tokens
    # Such a server verifies nothing, and its pool has no room for it (capture_decode_graph).
    if args.disaggregation_mode == "prefill":
        return None
    found = _decodes(r, Role.TARGET, pool, width)
    if found is not None:
        says = f"a verification has {width} tokens a request; a batch of another width runs eager"
        r.decisions.note("verify-width", 1, width, says)
    return found


def _decodes(r: Startup, role: Role, pool: int, width: int, steps: int | None = None) -> DecodeGraphs | None:
    if r.decode.backend == DISABLED:
        return None
    drafts = role.is_drafter
    wanted = sorted(set(r.decode.bs))
    # A drafter's runner filters by requests, whatever the width of its own batches.
    # Overlapping microbatches split the rows of each request, so requests have to divide as well.
    whole = drafts or r.args.enable_two_batch_overlap
    found = decode_sizes(wanted, pool=pool, alignment=alignment(r), width=1 if whole else width)
    if found and found[0] < 1:
        raise refusal(
            _cause_of_sizes(r),
            f"SGLang wants every decode size to be positive, and has {found[0]}",
            "give sizes from 1 on" if (DECODE, "bs") in r.locked else "give 1 or more",
        )
    if not found:
        raise refusal(
            "--cuda-graph-bs-decode",
            f"SGLang has no decode size left: of {written(wanted)}, none is in the pool of {pool} "
            f"requests and divisible by {alignment(r)}",
            "give sizes that are, or --cuda-graph-backend-decode disabled",
        )
    if list(found) != wanted:
        says = (
            f"decode sizes are those within a pool of {pool} requests whose tokens divide by "
            f"{alignment(r)}; the pool's own size is one where the list passes it"
        )
        r.decisions.note("decode-sizes-in-pool", wanted, found, says, role)
    return DecodeGraphs(
        role=role,
        mode=GraphMode.FULL if r.decode.backend == FULL else GraphMode.PIECEWISE,
        sizes=found,
        width=width,
        padding=not r.args.disable_cuda_graph_padding,
        loras=(0,) if drafts else _lora_cases(r),
        draft_steps=steps,
        microbatches=2 if r.args.enable_two_batch_overlap and not drafts else 1,
        agreed=r.attention_dp or any(gathers(r)),
    )


def _cause_of_sizes(r: Startup) -> str:
    if (DECODE, "bs") in r.locked:
        return "--cuda-graph-bs-decode"
    return "--cuda-graph-max-bs-decode" if (DECODE, "max_bs") in r.locked else "--max-running-requests"


def _lora_cases(r: Startup) -> tuple[int, ...]:
    if not r.args.enable_lora:
        return (0,)
    most = r.args.max_loras_per_batch
    if r.args.lora_backend != "triton_v2":
        return (most,)  # batches without adapters replay these graphs too
    says = "triton_v2 skips its kernels without adapters, so each size is captured with them and without"
    r.decisions.note("lora-and-base-graphs", most, (most, 0), says)
    return (most, 0)


def _slots(r: Startup, pool: int) -> int:
    slots = r.prefill.full_prefill_max_req
    if slots is None:
        # The default that capture resolves once the pool is known (cuda_graph_setup.py).
        slots = max(r.args.chunked_prefill_size // 512, 1)
    return min(int(slots), pool)


def _prefill_list(r: Startup, pool: int) -> tuple[int, ...]:
    prefill = r.prefill
    if prefill.backend == DISABLED:
        return ()
    if any(size < 1 for size in prefill.bs):
        raise refusal("--cuda-graph-bs-prefill", "SGLang cannot capture a prefill of no tokens", "give sizes from 1 on")
    # A capture has no more dummy requests than slots, each of at most the context's length.
    most = (_slots(r, pool) if prefill.backend == FULL else pool) * context(r)
    found = prefill_sizes(prefill.bs, most=most, alignment=alignment(r))
    if not found:
        says = f"no prefill size fits {most} tokens, so there are no prefill graphs"
        r.decisions.note("no-prefill-size", prefill.bs, found, says)
    elif list(found) != sorted(set(prefill.bs)):
        says = f"prefill sizes are those up to {most} tokens, rounded up to multiples of {alignment(r)}"
        r.decisions.note("prefill-sizes-aligned", prefill.bs, found, says)
    return found


def _prefills(r: Startup, role: Role, pool: int, sizes: tuple[int, ...]) -> PrefillGraphs | None:
    args, whole = r.args, r.prefill.backend == FULL
    if not role.is_drafter and r.prefill.backend != DISABLED and not r.model.has_prefill_graphs:
        says = f"SGLang looks for the layers of a {r.model.architecture} where its class has none"
        r.decisions.note("no-layers-for-prefills", r.prefill.backend, DISABLED, says, role)
        return None
    if r.prefill.backend == DISABLED or not sizes:
        return None
    slots = _slots(r, pool) if whole else None
    lora = bool(args.enable_lora) and not role.is_drafter
    # Ranks could disagree on which batches fit the adapters' static buffers (lora_manager.py).
    if lora and (r.attention_dp or args.lora_backend == "torch_native"):
        why = "attention DP" if r.attention_dp else "torch_native adapters"
        r.decisions.note("no-lora-prefill", r.prefill.backend, DISABLED, f"prefills with {why} run eager", role)
        return None
    if whole and r.attention[0] in _NO_WHOLE_PREFILL:
        raise refusal(
            "--cuda-graph-backend-prefill",
            f"SGLang's {r.attention[0]} has no metadata for a prefill inside a graph, and its capture stops",
            "give breakable, or fa3, fa4 or flashinfer for prefills",
        )
    return PrefillGraphs(
        role=role,
        mode=GraphMode.FULL if whole else GraphMode.PIECEWISE,
        sizes=sizes,
        num_reqs=slots,
        # The adapters' static buffers have so many rows (init_prefill_cuda_graph_batch_info).
        max_reqs=slots if whole else min(sizes[-1], pool) if lora else None,
        max_seq_len=r.prefill.max_seq_len if has("prefill-length") else None,
        loras=args.max_loras_per_batch if lora else 0,
    )
