"""What SGLang captures of a plan: decode sizes by role, counted in requests, and why it cannot take the rest.

SGLang 0.5.23 captures uniform decodes for three roles, each in a runner of its own: the target (with speculation its
verification), the draft extend (our draft prefill) and the draft decode, whose whole chain is one graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from capture_planner.engines.varying import REMEDY, varying_obstacle
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.plan import Decision, Plan, RolePlan
from capture_planner_sglang.export import ALGORITHMS


@attrs.frozen(kw_only=True)
class DecodeSizes:
    """The sizes of decode graphs that a plan has for SGLang."""

    width: int
    """Tokens of a request in the target and the draft prefill: 1 + K."""
    by_role: Mapping[Role, tuple[int, ...] | None]
    """Requests, ascending. Empty: the plan leaves the role eager. None: the role keeps SGLang's own sizes."""
    decisions: tuple[Decision, ...]

    @property
    def largest(self) -> int:
        return max((size for sizes in self.by_role.values() for size in sizes or ()), default=0)

    def all(self, own: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the sizes of all roles together; ``own`` are SGLang's, for the roles that keep them."""
        return tuple(sorted({size for sizes in self.by_role.values() for size in (own if sizes is None else sizes)}))


def decode_sizes_of(plan: Plan) -> DecodeSizes:
    """Return what SGLang captures of a plan that it agrees with (see ``disagreements``)."""
    longest = max(k for *_, k in decode_tiers(plan))
    sizes, decisions = {}, []
    for role in plan.roles:
        if role.role is Role.DRAFT_DECODE and longest < 2:
            continue
        sizes[role.role], made = _role_sizes(role, 1 if role.role is Role.DRAFT_DECODE else 1 + longest, longest)
        decisions += made
    return DecodeSizes(width=1 + longest, by_role=sizes, decisions=tuple(decisions))


def _role_sizes(role: RolePlan, width: int, longest: int) -> tuple[tuple[int, ...] | None, list[Decision]]:
    def decision(rule: str, before: object, after: object, says: str) -> Decision:
        return Decision(role=role.role, rule=rule, before=str(before), after=str(after), message=says)

    mode, decisions = role.mode, []
    if mode in (GraphMode.FULL, GraphMode.PIECEWISE):
        says = f"SGLang has no {mode.value} graphs that serve decodes and prompts alike; decodes keep its own sizes"
        return None, [decision("sglang-decodes-alone", mode.value, "SGLang's own sizes", says)]
    if mode.mixed_mode is not GraphMode.NONE:
        says = "SGLang takes the sizes of prompts from --cuda-graph-bs-prefill, in tokens, not from the plan's entries"
        decisions.append(decision("sglang-prefill-flags", mode.value, mode.decode_mode.value, says))
    entries = [e for e in role.entries if e.mode is GraphMode.FULL and e.query_len == width and e.num_reqs]
    by_case = {
        loras: {e.num_reqs for e in entries if e.active_loras == loras} for loras in {e.active_loras for e in entries}
    }
    if len({frozenset(sizes) for sizes in by_case.values()}) > 1:
        says = "SGLang captures each size for its most adapters; the sizes of all adapter counts are captured"
        decisions.append(decision("sglang-lora-cases", sorted(by_case), max(by_case), says))
    if role.role is Role.DRAFT_DECODE and any(e.draft_steps is None for e in entries) and longest > 2:
        says = f"SGLang captures the chain of {longest - 1} draft decodes as one graph"
        decisions.append(decision("sglang-fused-chain", "single draft decodes", f"a chain of {longest - 1}", says))
    return tuple(sorted({e.num_reqs for e in entries if e.num_reqs})), decisions


@attrs.frozen(kw_only=True)
class ResolvedFacts:
    """What SGLang has resolved before it loads the model, as far as a plan depends on it."""

    decode_backend: str
    disable_padding: bool
    max_running_requests: int | None
    """For all attention-DP ranks together; None: SGLang takes what the KV pool holds."""
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
        wanted = most * facts.attn_dp_size
        has = facts.max_running_requests
        yield f"the plan is for {most} requests of a rank: give --max-running-requests {wanted}, not {has}"
    if facts.tp_size != plan.parallel.tensor:
        yield f"the plan is for {plan.parallel.tensor} tensor-parallel ranks: give --tp-size {plan.parallel.tensor}"
    if facts.enable_lora != (plan.lora is not None):
        does, give = ("has no", "remove") if plan.lora is None else ("has", "give")
        yield f"the plan {does} adapters: {give} --enable-lora"
    yield from _speculation(plan, facts)


def _speculation(plan: Plan, facts: ResolvedFacts) -> Iterator[str]:
    if (varying := varying_obstacle(plan, "SGLang")) is not None:
        yield f"{varying}: {REMEDY}"
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
