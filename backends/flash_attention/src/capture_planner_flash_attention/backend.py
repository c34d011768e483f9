"""What the planner asks of the FlashAttention family: support, fields, refresh and workspace."""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.errors import BackendError
from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.plugins.backend import (
    Attention,
    Axis,
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
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.spec import Limits
from capture_planner_flash_attention.libraries import (
    FA3,
    LIBRARIES,
    MAX_SPLITS,
    SCHEDULER_METADATA,
    SPLIT_TOKENS,
    latent_refusal,
    select,
)

DCP_CONTEXT_KV_LENS = MetadataField(name="dcp_context_kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0)
"""This rank's share of each context under decode context parallelism (vLLM 0.33)."""


class FlashAttention:
    """The FlashAttention family, chosen by the environment and the shape of the heads."""

    name = "flash_attention"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """ALWAYS for 3 and 4, UNIFORM_BATCH for the kernels of 2, NEVER where no library runs.

        Latent attention is UNIFORM_BATCH, on FlashAttention 3 only: prompts take another path
        (vLLM 0.33, ``mla/flashattn_mla.py``).
        """
        library = select(model, environment)
        if library is None:
            return Support(level=GraphSupport.NEVER, reason=_unserved(model, environment))
        where = f"{library.title} ({environment.packages[library.package]}) on {_device(environment)}"
        if model.latent is not None:
            return Support(
                level=GraphSupport.UNIFORM_BATCH,
                reason=f"{where} decodes latent attention for uniform batches; prompts take another path.",
            )
        return Support(level=library.level, reason=f"{where} {library.why}.")

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare the fields that the selected library needs in addition to the common ones.

        The kernels take the runner's query_start_loc, seq_lens and block_table unchanged; a padded
        row has no tokens and length 0.
        """
        library = select(model, environment)
        if library is None:
            return PaddingContract()
        # What the host reads at launch is baked into the graph, so it is planned at its worst case.
        fields = [_frozen("max_query_len"), _frozen("max_seq_len")]
        if library.splits:
            fields.append(_frozen("num_splits"))
        # A chain in one graph has steps that no call before the graph can schedule.
        if library.ahead_of_time and role is not Role.DRAFT_DECODE:
            fields.append(SCHEDULER_METADATA)
        if model.decode_context > 1:
            fields.append(DCP_CONTEXT_KV_LENS)
        return PaddingContract(fields=tuple(fields))

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph, except under decode context parallelism."""
        # With several ranks the host decides from the lengths whether to attend to the context at all, and vLLM 0.33
        # keeps the fused chain off (`supports_draft_decode_metadata_update`).
        in_graph = select(model, environment) is not None and model.decode_context == 1
        return Refresh.IN_GRAPH if in_graph else Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Zero bytes: no library lets its caller supply its working memory.

        The captured call allocates the partial outputs and sums of a split KV (float32), so they live in
        the graph's pool. The formula states how many bytes the largest full graph takes there.
        """
        library = select(model, environment)
        tokens = max((entry.num_tokens for entry in entries if entry.mode is GraphMode.FULL), default=0)
        if library is None or not library.splits or not tokens:
            return Workspace(formula="0: the KV is not split, or there is no full graph")
        width = model.head_dim if model.latent is None else model.latent.kv_lora_rank
        heads = model.num_heads * model.decode_context
        return Workspace(
            formula=f"0: a split KV lives in the graph's pool, at most splits {MAX_SPLITS} * "
            f"min(tokens {tokens}, {SPLIT_TOKENS}) * heads {heads} * (width {width} + 1) * 4 bytes"
        )

    def reserve(self, reservation: Reservation) -> Executor:
        """Import the library that the environment names, and make the executor of one group.

        Raises ``BackendError`` where that library is missing here or is too old, and for what it
        cannot run: other page sizes, latent attention, an FP8 cache, decode context parallelism.
        """
        # Imported here because planning must not import torch.
        from capture_planner_flash_attention.executor import FlashAttentionExecutor

        library = select(reservation.attention, reservation.environment)
        if library is None:
            why = _unserved(reservation.attention, reservation.environment)
            if reservation.environment.device.kind is not DeviceKind.CUDA:
                why += " Plan with backend: reference, which runs anywhere."
            raise BackendError(f"flash_attention: {reservation.role.value}, group {reservation.group}: {why}")
        return FlashAttentionExecutor(reservation, library)


def _unserved(model: Attention, environment: Environment) -> str:
    """Return why no library serves these layers there, and what to install if one would."""
    device = environment.device
    major, _ = device.sm
    if device.kind is not DeviceKind.CUDA or major < 8:
        return (
            f"No flash-attention library supports {_device(environment)}, so attention runs eagerly "
            "(torch scaled_dot_product_attention over gathered pages) and cannot be held in a graph."
        )
    if model.latent is not None:
        absent = f"latent attention needs {FA3.package}, which is not installed"
        return f"{_device(environment)}: {latent_refusal(model, major) or absent}."
    serving = [lib for lib in LIBRARIES if lib.refusal(model, major) is None]
    installed = [lib for lib in LIBRARIES if lib.installed(environment)]
    # A library with kernels for this device gives the more telling reason.
    installed.sort(key=lambda lib: major not in lib.majors)
    why = installed[0].refusal(model, major) if installed else "No flash-attention library is installed"
    outdated = [
        f"{lib.title} needs {lib.package} {'.'.join(map(str, lib.since))} or newer for paged caches, not {version}"
        for lib in serving
        if (version := environment.packages.get(lib.package)) is not None and lib not in installed
    ]
    remedy = f"install {serving[0].package}" if serving else "no library of the family serves these layers there"
    return f"{'; '.join((why or '', *outdated, remedy))} ({_device(environment)})."


def _frozen(name: str) -> MetadataField:
    """Describe a host scalar that the launch bakes in (0 splits, the heuristic, is not graph safe)."""
    return MetadataField(name=name, axis=Axis.SCALAR, fill=Fill.WORST_CASE, lifetime=Lifetime.FROZEN, where=Where.HOST)


def _device(environment: Environment) -> str:
    major, minor = environment.device.sm
    cuda = environment.device.kind is DeviceKind.CUDA
    return f"{environment.device.name} (SM{major}{minor})" if cuda else f"the CPU {environment.device.name}"
