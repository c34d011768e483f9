"""What the planner asks of FlashInfer: support, fields, refresh and workspace.

Fields follow the source of FlashInfer 0.7.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.plugins.backend import (
    Attention,
    Axis,
    Bound,
    Executor,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Reservation,
    Support,
    Where,
    Workspace,
)
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from capture_planner_flashinfer.selection import (
    KV_LENS,
    PACKAGE,
    KernelFamily,
    device_label,
    kernel_family,
    planless_family,
    refusal,
    shares_window,
)
from capture_planner_flashinfer.workspace import INT_WORKSPACE, formula, workspace_parts


class FlashInfer:
    """FlashInfer. Never ALWAYS: prompts and decodes take different kernels in one forward."""

    name = "flashinfer"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """UNIFORM_BATCH where one kernel takes several tokens a request, else one token.

        Latent attention on SM100 is ALWAYS in vLLM 0.33, for ragged decodes of up to 1 + K tokens;
        prompts take another kernel there too, so here it is UNIFORM_BATCH.
        """
        refused = refusal(model, environment)
        if refused is not None:
            return Support(level=GraphSupport.NEVER, reason=f"{refused}.")
        level, why = _level(model, environment)
        # Only the prefill wrapper has a buffer of lengths, whose size the library fixes.
        capped = kernel_family(model, environment) is KernelFamily.PREFILL
        return Support(
            level=level,
            reason=f"FlashInfer {environment.packages[PACKAGE]} on {device_label(environment)}: {why}.",
            max_num_reqs=KV_LENS if capped else None,
        )

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare the fields of the kernels that serve this group.

        Wrappers take their own page lists; XQA and trtllm-gen take seq_lens and block_table.
        """
        if refusal(model, environment) is not None:
            return PaddingContract()
        family = kernel_family(model, environment)
        if family.is_wrapper:
            # A padded row repeats the last offset, so it has no pages. Only if its last page has length 0, too, do
            # the lengths of host and device agree.
            return PaddingContract(fields=PAGE_LISTS + _WRAPPER_FIELDS[family])
        fields = [_frozen("max_query_len"), _frozen("max_seq_len")]
        # A sequence must be at least as long as its query, in padded rows too: those attend to the null page.
        if model.max_query_len > 1:
            fields.append(
                MetadataField(name="seq_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=model.max_query_len)
            )
        return PaddingContract(fields=tuple(fields))

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph for XQA and trtllm-gen; a wrapper is planned on the host before each replay."""
        served = refusal(model, environment) is None and model.decode_context == 1
        in_graph = served and not kernel_family(model, environment).is_wrapper
        return Refresh.IN_GRAPH if in_graph else Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Plan workspaces, counters, and one float workspace for every launch: see ``WorkspaceParts``.

        The float workspace must not grow after capture.
        """
        if refusal(model, environment) is not None:
            return Workspace(formula="0: FlashInfer does not run there")
        parts = workspace_parts(model, environment, entries)
        return Workspace(
            device=parts.device, pinned=parts.plans * INT_WORKSPACE, formula=formula(model, environment, entries)
        )

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group, with all of its wrappers.

        Raises ``BackendError`` if FlashInfer is missing, and for groups that this backend does not run:
        see ``executor.refuse``.
        """
        # Imported here because planning must not import torch.
        from capture_planner_flashinfer.executor import FlashInferExecutor

        return FlashInferExecutor(reservation)


def _level(model: Attention, environment: Environment) -> tuple[GraphSupport, str]:
    """Return the level of layers that FlashInfer serves, and the reason."""
    single, uniform = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, GraphSupport.UNIFORM_BATCH
    family = planless_family(model, environment)
    if model.decode_context > 1:
        return single, f"{model.decode_context} decode-context ranks leave one token a request"
    if environment.device.sm < (9, 0):
        if model.causal:
            return uniform, "the FA2 kernels below SM90 take uniform causal queries"
        return single, "the FA2 kernels below SM90 take several tokens a request only if causal"
    if family is not None:
        return uniform, f"{family.value} takes the same number of tokens of every request"
    shape = f"{model.num_heads} query heads, {model.num_kv_heads} KV heads, head dimension {model.head_dim}"
    kind = "causal" if model.causal else "non-causal"
    if shares_window(model, environment):
        kind += f", with a window of {model.window} (flashinfer#4137)"
    return single, f"neither XQA nor trtllm-gen takes {shape}, {kind}, on a {model.kv_dtype.value} cache"


def _frozen(name: str, dtype: str = "int32", scale: int = 1) -> MetadataField:
    """Describe numbers that the host reads at launch and a graph bakes in, planned at their worst case."""
    return MetadataField(
        name=name,
        axis=Axis.SCALAR,
        dtype=dtype,
        fill=Fill.WORST_CASE,
        lifetime=Lifetime.FROZEN,
        where=Where.HOST,
        scale=scale,
    )


PAGE_LISTS = (
    MetadataField(name="paged_kv_indptr", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.REPEAT_LAST, where=Where.BOTH),
    MetadataField(name="paged_kv_indices", axis=Axis.PAGE, fill=Fill.CONSTANT, value=0, indexes=Bound.PAGES),
    MetadataField(name="paged_kv_last_page_len", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
)
"""The fields of every wrapper. A plan reads the host's copies; a fast plan copies none to the device."""

_WRAPPER_FIELDS = {
    # DecodePlanInfo has 10 numbers, PrefillPlanInfo 15: the grid, the tile and every offset.
    KernelFamily.CUDA_CORE: (_frozen("plan_info", "int64", 10),),
    # The wrapper's own ramp of offsets, which it keeps on the device: one token for every planned row,
    # real or padded.
    KernelFamily.TENSOR_CORE: (
        MetadataField(
            name="qo_indptr",
            axis=Axis.REQUEST_PLUS_ONE,
            fill=Fill.WORST_CASE,
            lifetime=Lifetime.FROZEN,
            indexes=Bound.TOKENS,
            where=Where.HOST,
        ),
        _frozen("plan_info", "int64", 15),
    ),
    # No custom mask: a wrapper with a mask buffer keeps the old bits under a plan without a mask.
    KernelFamily.PREFILL: (
        MetadataField(
            name="qo_indptr", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.REAL_TOTAL, indexes=Bound.TOKENS, where=Where.BOTH
        ),
        MetadataField(name="kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
        _frozen("plan_info", "int64", 15),
    ),
}
