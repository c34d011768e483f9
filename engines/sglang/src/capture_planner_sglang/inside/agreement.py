"""Where SGLang's resolved values differ from a plan, line by line, with the flag to give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from capture_planner.engines.launch import WITHOUT_VARYING, varying_obstacle
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.plan import Plan
from capture_planner_sglang.emulation.export import ALGORITHMS, decode_sizes_of


@attrs.frozen(kw_only=True)
class ResolvedFacts:
    """What SGLang has resolved before it loads the model, as far as a plan depends on it."""

    decode_backend: str
    disable_padding: bool
    max_running_requests: int | None
    """Requests of all attention-DP ranks together; None if SGLang takes what the KV pool holds."""
    attn_dp_size: int
    tp_size: int
    algorithm: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    adaptive: bool
    enable_lora: bool

    @classmethod
    def read(cls, context: Any) -> ResolvedFacts:
        """Read them from SGLang's module ``runtime_context``."""
        graph, spec, parallel = context.get_exec().graph, context.get_spec(), context.get_parallel()
        return cls(
            decode_backend=graph.cuda_graph_config.decode.backend,
            disable_padding=bool(graph.disable_cuda_graph_padding),
            max_running_requests=context.get_schedule().max_running_requests,
            attn_dp_size=parallel.attn_dp_size,
            tp_size=parallel.tp_size,
            algorithm=spec.speculative_algorithm,
            num_steps=spec.speculative_num_steps,
            topk=spec.speculative_eagle_topk,
            num_draft_tokens=spec.speculative_num_draft_tokens,
            adaptive=bool(spec.speculative_adaptive),
            enable_lora=bool(context.get_lora().enable_lora),
        )


def disagreements(plan: Plan, facts: ResolvedFacts) -> Iterator[str]:
    """Yield, for each fact in which SGLang is not what the plan is for, a line with the flag to give."""
    sizes, most = decode_sizes_of(plan), plan.limits.max_num_reqs
    if sizes.largest and facts.decode_backend != "full":
        yield f"decode graphs are {facts.decode_backend}, the plan's are full: give --cuda-graph-backend-decode full"
    if facts.disable_padding:
        yield "the plan pads batches to its sizes: remove --disable-cuda-graph-padding"
    if facts.max_running_requests not in (None, most * facts.attn_dp_size):
        # SGLang counts the requests of all ranks together.
        wanted = most * facts.attn_dp_size
        has = facts.max_running_requests
        yield f"the plan is for {most} requests of a rank: give --max-running-requests {wanted}, not {has}"
    if facts.tp_size != plan.parallel.tensor:
        yield f"the plan is for {plan.parallel.tensor} tensor-parallel ranks: give --tp-size {plan.parallel.tensor}"
    # With adapters SGLang's graphs are others: each size is captured for them.
    if facts.enable_lora != (plan.lora is not None):
        does, give = ("has no", "remove") if plan.lora is None else ("has", "give")
        yield f"the plan {does} adapters: {give} --enable-lora"
    yield from _speculation(plan, facts)


def _speculation(plan: Plan, facts: ResolvedFacts) -> Iterator[str]:
    if (varying := varying_obstacle(plan, "SGLang")) is not None:
        yield f"{varying}: {WITHOUT_VARYING}"
        return
    tiers = {k for *_, k in decode_tiers(plan)}
    if len(tiers) > 1:
        numbers = ", ".join(map(str, sorted(tiers)))
        yield f"the plan drafts {numbers} tokens by batch size, SGLang one number: make the plan without a schedule"
        return
    (drafted,) = tiers
    speculative = plan.speculative if drafted else None
    if speculative is None:
        if facts.algorithm is not None:
            yield f"the plan has no speculation: remove --speculative-algorithm {facts.algorithm}"
        return
    algorithm = ALGORITHMS[speculative.method]
    # SGLang itself rewrites NEXTN to EAGLE.
    if facts.algorithm not in (algorithm, "EAGLE" if algorithm == "NEXTN" else algorithm):
        yield f"the plan's speculation is {speculative.method.value}: give --speculative-algorithm {algorithm}"
        return
    if speculative.parallel_drafting:
        yield "the plan drafts in parallel, SGLang one token after another: make the plan without parallel_drafting"
    if facts.adaptive:
        yield f"the plan drafts {drafted} tokens at all times: remove --speculative-adaptive"
    for flag, wanted, has in (
        ("num-steps", drafted, facts.num_steps),
        ("eagle-topk", 1, facts.topk),
        ("num-draft-tokens", 1 + drafted, facts.num_draft_tokens),
    ):
        if has != wanted:
            yield f"the plan drafts {drafted} tokens in a chain: give --speculative-{flag} {wanted}, not {has}"
