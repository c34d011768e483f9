"""From a plan to what SGLang 0.5.23 has of it: the flags of a command, and the decode sizes of each role.

Decode sizes are requests, prefill sizes are tokens. SGLang captures uniform decodes for three roles, each in a runner
of its own: the target (with speculation its verification), the draft extend (our draft prefill) and the draft decode,
whose whole chain is one graph. A command has one list for all of them; the plugin gives each its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from capture_planner.engines.export import (
    DRAFT_MODEL,
    Export,
    Loss,
    all_scopes,
    backend_setting,
    decode_sizes,
    drafter_losses,
    fallback_loss,
    lazy_loss,
    longest_draft,
    parallel_loss,
)
from capture_planner.engines.launch import refuse_varying
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.model import Method
from capture_planner.records.plan import Decision, Plan, RolePlan

FILE_NAME = "sglang.yaml"

BACKENDS = {"flash_attention": "fa3", "flashinfer": "flashinfer", "triton": "triton"}
"""Our backends' names in SGLang."""

_LORA_RANK = 16
"""Stands where the adapters' rank belongs, which a plan does not know and graphs do not depend on."""

ALGORITHMS = {Method.EAGLE: "EAGLE", Method.EAGLE3: "EAGLE3", Method.MTP: "NEXTN", Method.DRAFT_MODEL: "STANDALONE"}
"""SGLang's name of each method; it takes NEXTN as EAGLE."""
_KINDS = {GraphMode.FULL: "full", GraphMode.PIECEWISE: "breakable", GraphMode.NONE: "disabled"}


def export_sglang(plan: Plan) -> Export:
    """Return the flags of SGLang that come closest to ``plan``.

    Raises ``DispatchError`` without a target, and ``FlagError`` where decodes vary in length.
    """
    refuse_varying(plan, "SGLang")
    target = plan.role(Role.TARGET)
    width = 1 + longest_draft(plan)
    decode, prefill = decode_sizes(plan, target, width), prefill_sizes(target)
    settings: dict[str, Any] = {
        "model-path": plan.model.name,
        "max-running-requests": plan.limits.max_num_reqs,
        # Chunks bound the tokens of a step; where they are off, the other flag does.
        "chunked-prefill-size": plan.limits.max_num_tokens,
        "max-prefill-tokens": plan.limits.max_num_tokens,
    }
    backend, unnamed = backend_setting(plan, BACKENDS, "SGLang")
    if backend is not None:
        settings["attention-backend"] = backend
    for name, count in (("tp-size", plan.parallel.tensor), ("dp-size", plan.parallel.data)):
        if count > 1:
            settings[name] = count
    if plan.lora is not None and not _is_standalone(plan):
        # SGLang counts the rows without an adapter as one more.
        settings |= {
            "enable-lora": True,
            "max-loras-per-batch": plan.lora.max_active + 1,
            "max-lora-rank": _LORA_RANK,
            "lora-target-modules": ["all"],
        }
    if plan.speculative is not None and width > 1:  # a schedule may draft nothing at all
        settings["speculative-algorithm"] = ALGORITHMS[plan.speculative.method]
        if plan.speculative.method is not Method.MTP:
            settings["speculative-draft-model-path"] = DRAFT_MODEL
        settings |= {
            "speculative-num-steps": width - 1,
            "speculative-eagle-topk": 1,  # plans draft chains, which have one branch
            "speculative-num-draft-tokens": width,
        }
        drafter, unnamed_drafter = backend_setting(plan, BACKENDS, "SGLang", drafter=True)
        unnamed += unnamed_drafter
        # A drafter has the target's backend unless it is given its own (model_executor/model_runner.py).
        if drafter is not None and drafter != backend:
            settings["speculative-draft-attention-backend"] = drafter
    settings["cuda-graph-backend-decode"] = _KINDS[target.mode.decode_mode if decode else GraphMode.NONE]
    if decode:
        settings |= {"cuda-graph-max-bs-decode": decode[-1], "cuda-graph-bs-decode": list(decode)}
    settings["cuda-graph-backend-prefill"] = _KINDS[target.mode.mixed_mode if prefill else GraphMode.NONE]
    if prefill:
        settings |= {"cuda-graph-max-bs-prefill": prefill[-1], "cuda-graph-bs-prefill": list(prefill)}
    return Export(
        engine="sglang",
        settings=settings,
        file_name=FILE_NAME,
        sizes=decode,
        losses=(*unnamed, *_losses(plan, target, width, prefill), *fallback_loss(plan, "SGLang")),
    )


def _is_standalone(plan: Plan) -> bool:
    """Whether a whole model drafts anything."""
    found = plan.speculative
    return found is not None and found.method is Method.DRAFT_MODEL and longest_draft(plan) > 0


def prefill_sizes(target: RolePlan) -> tuple[int, ...]:
    """Return the token counts of mixed batches."""
    return tuple(sorted({entry.num_tokens for entry in target.entries if entry.query_len is None}))


def _losses(plan: Plan, target: RolePlan, width: int, prefill: tuple[int, ...]) -> Iterator[Loss]:
    decodes, mixed = (Role.TARGET, Kind.DECODE), (Role.TARGET, Kind.MIXED)
    if len(decode_tiers(plan)) > 1:
        says = (
            f"no flag of SGLang takes a schedule: its graphs have {width} tokens a request, and batches of "
            "another width run eager"
        )
        yield Loss("schedule", says, all_scopes(plan))
    yield from parallel_loss(plan, "SGLang")
    yield from lazy_loss(plan, "SGLang")
    yield from drafter_losses(plan, "sizes", "the {role} captures the target's decode sizes, not its own {graphs}")
    if _is_standalone(plan) and plan.lora is not None:
        yield Loss("lora", "SGLang has no adapters with STANDALONE drafts, so they are left out", (decodes, mixed))
    elif plan.lora is not None:
        says = (
            "SGLang has no graphs by the number of adapters; it wants their rank, which a plan does not know: "
            f"--max-lora-rank {_LORA_RANK} is to be replaced"
        )
        yield Loss("lora-cases", says, (decodes, mixed))
    if prefill:
        wide = [(before, after) for before, after in zip((0, *prefill), prefill, strict=False) if after > 2 * before]
        refused = sum(max(0, (after - 1) // 2 - before) for before, after in wide)  # below half of the next size
        if refused:
            says = (
                f"SGLang refuses a prefill graph that pads a batch to more than twice its tokens: {refused} "
                "token counts run eager for it"
            )
            yield Loss("prefill-padding", says, (mixed,))
    if target.mode.mixed_mode is GraphMode.FULL:
        says = "SGLang's full prefill graphs have a fixed number of request slots, from the prefill chunk"
        yield Loss("full-prefill", says, (mixed,))
    if plan.parallel.decode_context > 1:
        says = (
            "decode-context parallelism is not emulated and so not exported: add "
            f"--dcp-size {plan.parallel.decode_context}"
        )
        yield Loss("decode-context-parallel", says)
    if plan.pool is Pool.PER_ROLE:
        yield Loss("pool", "SGLang has one memory pool for target and drafter")
    if plan.parallel.sequence:
        says = "SGLang drops decode sizes whose tokens its attention ranks do not divide; no flag sets the step"
        yield Loss("sequence-parallel", says, all_scopes(plan))


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
    """Return what SGLang captures of a plan that it agrees with (see ``inside.agreement``)."""
    longest = max(k for *_, k in decode_tiers(plan))
    sizes, decisions = {}, []
    for role in plan.roles:
        if role.role is Role.DRAFT_DECODE and longest < 2:  # the draft prefill makes the only draft
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
    # Entries of other lengths serve batches that never happen: SGLang drafts one number at all times.
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
