"""Which FlashAttention serves a machine, and what a graph of it reads.

The rules are those of vLLM 0.33: ``v1/attention/backends/flash_attn.py``, its choice of a version in
``fa_utils.py``, and ``mla/flashattn_mla.py`` for latent attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from capture_planner.errors import BackendError
from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.records.backend import (
    Attention,
    Axis,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Support,
    Where,
    Workspace,
)
from capture_planner.records.batch import Entry
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits

if TYPE_CHECKING:
    from capture_planner.runtime.executor import Executor, Reservation

MAX_SPLITS = 32
"""Bound on KV splits under capture (vLLM 0.33: flash_attn_max_num_splits_for_cuda_graph)."""

SPLIT_TOKENS = 512
"""Up to this many tokens a graph uses all the splits (vLLM 0.33: its largest default capture size)."""


@attrs.frozen(kw_only=True)
class Library:
    """One kernel library: where it runs, and how far it goes inside a full graph."""

    title: str
    package: str
    module: str
    """What is imported to run it."""
    since: tuple[int, ...]
    majors: frozenset[int]
    only: str
    """The same in words, for a refusal."""
    level: GraphSupport
    why: str
    max_head_dim: int = 256
    narrow: frozenset[int] = frozenset()
    """Majors where head dimensions go up to 128, and then there is only the largest."""
    page_multiple: int = 1
    """Tokens a page must be a multiple of."""
    fp8_majors: frozenset[int] = frozenset()
    sinks: bool = False
    """Whether its kernels take learned attention sinks (gpt-oss)."""
    splits: bool = False
    ahead_of_time: bool = False
    """Whether tiles are scheduled by a call of their own, before the graph."""

    def installed(self, environment: Environment) -> bool:
        """Whether the environment has this library, in a version that will do."""
        found = environment.package(self.package)
        return found is not None and found >= self.since

    def refusal(self, model: Attention, major: int) -> str | None:
        """Return why the library cannot serve these layers on compute capability ``major``.x."""
        if major not in self.majors:
            return f"{self.title} {self.only}, not SM{major}x"
        if model.dtype is DataType.FLOAT32:
            return f"{self.title} takes no float32"
        if model.head_dim % 8 or model.head_dim > self.max_head_dim:
            return (
                f"{self.title} takes head dimensions that are multiples of 8 up to {self.max_head_dim}, "
                f"not {model.head_dim}"
            )
        if major in self.narrow and 128 < model.head_dim < self.max_head_dim:
            return (
                f"{self.title} takes head dimensions up to 128, and {self.max_head_dim}, on SM{major}x, "
                f"not {model.head_dim}"
            )
        if model.sinks and not self.sinks:
            return f"{self.title} takes no attention sinks"
        if model.kv_dtype is DataType.NVFP4 or (
            model.kv_dtype is DataType.FP8 and major not in self.fp8_majors
        ):
            return f"{self.title} takes no {model.kv_dtype.value} KV cache on SM{major}x"
        return None


_SM80_AND_NEWER = frozenset(range(8, 100))

_FA2_WHY = (
    "packs the query heads of a graph captured for one token a request, which cannot then serve mixed "
    "batches (vllm#22945)"
)

FA3 = Library(
    title="FlashAttention 3",
    package="flash-attn-3",
    module="flash_attn_interface",
    since=(3,),
    majors=frozenset({9}),
    only="is made for SM90",
    level=GraphSupport.ALWAYS,
    why="reads lengths and tile counts on the device, so a graph holds any batch",
    fp8_majors=frozenset({9}),
    sinks=True,
    splits=True,
    ahead_of_time=True,
)
FA4 = Library(
    title="FlashAttention 4",
    package="flash-attn-4",
    module="flash_attn.cute",
    since=(4,),
    majors=frozenset({9, 10}),
    only="reads a paged cache on SM90 and SM100 (4.0.0b36)",
    level=GraphSupport.ALWAYS,
    why="reads lengths and pages on the device, so a graph holds any batch",
    narrow=frozenset({10}),
    fp8_majors=frozenset({10}),
    sinks=True,
)
FA2 = Library(
    title="FlashAttention 2",
    package="flash-attn",
    module="flash_attn",
    since=(2,),
    majors=_SM80_AND_NEWER,
    only="needs SM80 or newer",
    level=GraphSupport.UNIFORM_BATCH,
    why=_FA2_WHY,
    page_multiple=256,
    splits=True,
)
TORCH = Library(
    title="torch varlen attention",
    package="torch",
    module="torch.nn.attention.varlen",
    since=(2, 13),
    majors=_SM80_AND_NEWER,
    only="needs SM80 or newer",
    level=GraphSupport.UNIFORM_BATCH,
    why=f"runs the FlashAttention 2 kernel, which {_FA2_WHY}",
    page_multiple=256,
)

LIBRARIES = (FA4, FA3, FA2, TORCH)
"""Best first. On SM90, where 3 and 4 both run, 3 alone splits a long KV over the machine (4.0.0b36
refuses to), and vLLM 0.33 prefers it there: who decodes few requests over long contexts plans for an
environment without 4. torch has had block tables since 2.13."""


def select(model: Attention, environment: Environment) -> Library | None:
    """Return the best installed library that serves these layers there, or None."""
    if environment.device.kind is not DeviceKind.CUDA:
        return None
    major, _ = environment.device.sm
    if model.latent is not None:
        return FA3 if FA3.installed(environment) and _latent_refusal(model, major) is None else None
    return next(
        (lib for lib in LIBRARIES if lib.installed(environment) and lib.refusal(model, major) is None), None
    )


def _latent_refusal(model: Attention, major: int) -> str | None:
    if major != 9:
        return f"latent attention needs FlashAttention 3 on SM90, not SM{major}x"
    if model.kv_dtype not in (DataType.BFLOAT16, DataType.FLOAT16):
        return f"latent attention in FlashAttention 3 takes no {model.kv_dtype.value} KV cache"
    return None


class FlashAttention:
    """The FlashAttention family, chosen by the environment and the shape of the heads."""

    name = "flash_attention"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """ALWAYS for 3 and 4, UNIFORM_BATCH for the kernels of 2, NEVER where none runs.

        Latent attention is UNIFORM_BATCH, on FlashAttention 3 alone: prompts take another path
        (vLLM 0.33, ``mla/flashattn_mla.py``).
        """
        library = select(model, environment)
        if library is None:
            return Support(level=GraphSupport.NEVER, reason=self._missing(model, environment))
        where = f"{library.title} ({environment.packages[library.package]}) on {_device(environment)}"
        if model.latent is not None:
            return Support(
                level=GraphSupport.UNIFORM_BATCH,
                reason=f"{where} decodes latent attention for uniform batches; prompts take another path.",
            )
        return Support(level=library.level, reason=f"{where} {library.why}.")

    def _missing(self, model: Attention, environment: Environment) -> str:
        device = environment.device
        major, _ = device.sm
        if device.kind is not DeviceKind.CUDA or major < 8:
            return (
                f"No flash-attention library supports {_device(environment)}, so attention runs eagerly "
                "(torch scaled_dot_product_attention over gathered pages) and cannot be held in a graph."
            )
        if model.latent is not None:
            absent = f"latent attention needs {FA3.package}, which is not installed"
            return f"{_device(environment)}: {_latent_refusal(model, major) or absent}."
        serving = [lib for lib in LIBRARIES if lib.refusal(model, major) is None]
        installed = [lib for lib in LIBRARIES if lib.installed(environment)]
        installed.sort(key=lambda lib: major not in lib.majors)
        why = installed[0].refusal(model, major) if installed else "No flash-attention library is installed"
        old = [
            f"{lib.title} reads pages from {lib.package} {'.'.join(map(str, lib.since))} on, not in {found}"
            for lib in serving
            if (found := environment.packages.get(lib.package)) is not None and lib not in installed
        ]
        remedy = (
            f"install {serving[0].package}" if serving else "none of the family serves these layers there"
        )
        return f"{'; '.join((why or '', *old, remedy))} ({_device(environment)})."

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare what differs from the common fields, for the library that serves this machine.

        The kernels take the runner's query_start_loc, seq_lens and block_table as they are; a padded
        row has no tokens and length 0. What the host reads at launch is baked in, so it is planned
        at its worst case.
        """
        library = select(model, environment)
        if library is None:
            return PaddingContract()
        fields = [_frozen("max_query_len"), _frozen("max_seq_len")]
        if library.splits:
            fields.append(_frozen("num_splits"))
        if library.ahead_of_time and role is not Role.DRAFT_DECODE:
            fields.append(SCHEDULER_METADATA)
        if model.decode_context > 1:
            fields.append(DCP_CONTEXT_KV_LENS)
        return PaddingContract(fields=tuple(fields))

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph, except under decode context parallelism.

        There the host decides from the lengths whether to attend to the context at all, and vLLM
        0.33 keeps the fused chain off (``supports_draft_decode_metadata_update``).
        """
        held = select(model, environment) is not None and model.decode_context == 1
        return Refresh.IN_GRAPH if held else Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Nothing: no library lets its caller supply what it works in.

        The partial outputs and sums of a split KV, float32, are allocated by the captured call, so
        they live in the graph's pool. The formula says how much the largest full graph takes there.
        """
        library = select(model, environment)
        tokens = max((entry.num_tokens for entry in entries if entry.mode is GraphMode.FULL), default=0)
        if library is None or not library.splits or not tokens:
            return Workspace(formula="0: the KV is not split, or there is no full graph")
        width = model.head_dim if model.latent is None else model.latent.kv_lora_rank
        heads = model.num_heads * model.decode_context
        return Workspace(
            formula=f"0: a split KV lives in the graph's pool, at most splits {MAX_SPLITS} * "
            f"min(tokens {tokens}, {SPLIT_TOKENS}) * heads {heads} * (width {width} + 1) * 4 bytes",
        )

    def reserve(self, reservation: Reservation) -> Executor:
        """Import the library that the environment names, and make the executor of one group.

        Raises ``BackendError`` where that library is missing here or is too old, and for what it
        cannot run: pages of another size, latent attention, an FP8 cache, decode context parallelism.
        """
        # Planning needs no torch, so that this module must not import it.
        from capture_planner_flash_attention.executor import FlashAttentionExecutor

        library = select(reservation.attention, reservation.environment)
        if library is None:
            raise BackendError(
                f"flash_attention: {reservation.role.value}, group {reservation.group}: "
                f"{self._missing(reservation.attention, reservation.environment)}"
            )
        return FlashAttentionExecutor(reservation, library)


def _frozen(name: str) -> MetadataField:
    """Describe a host scalar that the launch bakes in (0 splits, the heuristic, is not graph safe)."""
    return MetadataField(
        name=name, axis=Axis.SCALAR, fill=Fill.WORST_CASE, lifetime=Lifetime.FROZEN, where=Where.HOST
    )


SCHEDULER_METADATA = MetadataField(
    name="scheduler_metadata", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, offset=1, scale=4, align=4
)
"""FlashAttention 3's tile schedule: a semaphore, then four vectors of requests rounded up to 4.

A stale tail makes surplus thread blocks overwrite the output (vLLM 0.33 zeroes it each step). Draft
decodes go without: the kernel schedules itself there, as a call before the graph could not see the
later steps of a chain.
"""

DCP_CONTEXT_KV_LENS = MetadataField(
    name="dcp_context_kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0
)
"""This rank's share of each context under decode context parallelism (vLLM 0.33)."""


def _device(environment: Environment) -> str:
    major, minor = environment.device.sm
    cuda = environment.device.kind is DeviceKind.CUDA
    return f"{environment.device.name} (SM{major}{minor})" if cuda else f"the CPU {environment.device.name}"
