"""Runs FlashInfer: chooses the wrapper or kernel of a step, over memory that never moves.

In a FULL graph a group takes the kernel family that was planned: a wrapper for each batch shape, or
XQA or trtllm-gen, which need none. Eager and PIECEWISE steps take one prefill wrapper, at real extents.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode
from capture_planner.plugins.backend import Attention, Metadata, Reservation, Scoring
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType
from capture_planner_flashinfer.kernels import PlanlessKernel
from capture_planner_flashinfer.selection import KV_LENS, PACKAGE, KernelFamily, kernel_family, refusal, xqa_splits
from capture_planner_flashinfer.stock import Stock
from capture_planner_flashinfer.workspace import INT_WORKSPACE, WorkspaceParts, workspace_parts
from capture_planner_flashinfer.wrappers import (
    DecodeGraph,
    EagerWrapper,
    GroupShape,
    Memory,
    PlannedWrapper,
    PrefillGraph,
)

HEAD_DIMS = (64, 128, 256)
"""Head dimensions of the prefill wrapper, which serves eager steps in every family."""

PAGE_SIZES = {KernelFamily.XQA: (16, 32, 64, 128), KernelFamily.TRTLLM_GEN: (16, 32, 64)}
"""Tokens per page that the kernels without a plan take; the wrappers take any."""

_DTYPES = (torch.float16, torch.bfloat16)


class FlashInferExecutor:
    """The executor of one group of one role."""

    def __init__(self, reservation: Reservation) -> None:
        """Make every wrapper that the entries need, in the reserved workspaces.

        Raises ``BackendError`` for the groups that ``refuse`` rejects, if FlashInfer cannot be imported,
        and if the workspace is smaller than these entries need.
        """
        refuse(reservation)
        library = load()
        attention, environment = reservation.attention, reservation.environment
        self._where = _where(reservation)
        self._family = kernel_family(attention, environment)
        self._caches = dict(reservation.caches)
        self._shape = GroupShape(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            page_size=reservation.page_size,
            window_left=-1 if attention.window is None else attention.window - 1,  # a window counts its own token
            dtype=next(iter(self._caches.values())).keys.dtype,
        )
        parts = workspace_parts(attention, environment, reservation.entries)
        memories, rest = _split_workspace(reservation, parts)
        graphs = [entry for entry in reservation.entries if entry.mode is GraphMode.FULL]
        # By the batch shape of a graph; None: eager steps.
        self._wrappers: dict[tuple[int, int] | None, PlannedWrapper] = {
            None: EagerWrapper(library, self._shape, memories[0])
        }
        self._kernel: PlanlessKernel | None = None
        if self._family.is_wrapper:
            # One for each shape, as `workspace_parts` counts them; graphs of one shape share it.
            batches = dict.fromkeys(_batch_shape(entry) for entry in graphs)
            for batch, memory in zip(batches, memories[1:], strict=True):
                self._wrappers[batch] = self._new_wrapper(library, memory, reservation, *batch)
        # Without full graphs nothing runs the kernel: all other steps take the eager wrapper.
        elif graphs:
            self._kernel = PlanlessKernel(
                library,
                self._family,
                rest,
                parts.counters,
                graphs,
                self._shape.window_left,
                splits=xqa_splits(environment),
            )
        pages = -(-attention.max_model_len // reservation.page_size)
        self._stock = Stock(library, attention, self._shape, parts.floats, pages, reservation.device)
        self._current: PlannedWrapper | None = None
        # One plan serves all layers of a group and is specific to a softcap, which the first layer that
        # attends decides.
        self._softcap: float | None = None
        self._has_softcap = False
        self.plans = 0
        """Host plans so far, without the steps that reused the last one."""

    def _new_wrapper(
        self, library: Any, memory: Memory, reservation: Reservation, num_reqs: int, query_len: int
    ) -> PlannedWrapper:
        if self._family is KernelFamily.PREFILL:
            return PrefillGraph(library, self._shape, memory, reservation.fields, num_reqs, query_len)
        tensor_cores = self._family is KernelFamily.TENSOR_CORE
        return DecodeGraph(library, self._shape, memory, reservation.fields, num_reqs, tensor_cores=tensor_cores)

    def prepare(self, metadata: Metadata) -> None:
        """Plan the step's wrapper, unless its last plan still holds; XQA and trtllm-gen need no plan.

        Raises ``RunError`` for a graph whose batch shape was not reserved.
        """
        if metadata.is_full and self._kernel is not None:
            self._current = None
            self._kernel.clear()
            return
        entry = metadata.entry if metadata.is_full else None
        self._current = self._wrappers.get(None if entry is None else _batch_shape(entry))
        if self._current is None:
            raise RunError(f"{self._where}: no wrapper was reserved for {entry}; reserve with all entries of the plan")
        self.plans += self._current.plan(metadata.host, self._softcap)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Raises ``BackendError`` for sinks, a custom mask, a softcap that the kernel does not have, and for
        layers of one group whose softcaps differ.
        """
        if scoring.sinks is not None:
            raise BackendError(_no_sinks(f"{self._where}, layer {layer}"))
        if getattr(scoring, "mask", None) is not None:
            raise BackendError(f"{self._where}, layer {layer}: {_NO_MASK}")
        cache = self._caches[layer]
        if metadata.is_full and self._kernel is not None:
            self._kernel.run(query, cache, out, scoring, metadata)
            return
        if not self._has_softcap or scoring.softcap != self._softcap:
            self._set_softcap(layer, scoring.softcap, query, metadata)
        assert self._current is not None, "attend comes after prepare"
        self._current.run(query, cache, out, scoring.scale)

    def _set_softcap(self, layer: int, softcap: float | None, query: torch.Tensor, metadata: Metadata) -> None:
        """Adopt the softcap of the first layer that attends, and plan again if it has one."""
        if self._has_softcap:
            raise BackendError(
                f"{self._where}, layer {layer}: its softcap is {softcap}, and an earlier layer of the group "
                f"has {self._softcap}; one plan serves all layers of a group, so make two groups of them"
            )
        # `prepare` planned before any layer had named its softcap, so without one.
        if softcap != self._softcap:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"{self._where}, layer {layer}: its softcap of {softcap} first appears in a capture, "
                    "where nothing can be planned; run the forward once before the capture"
                )
            self._softcap = softcap
            self.prepare(metadata)
        self._has_softcap = True

    def layout(self) -> tuple[int, ...] | None:
        """Return the numbers of the last plan of a graph; None without one."""
        wrapper = self._current
        return None if wrapper is None or isinstance(wrapper, EagerWrapper) else wrapper.layout

    def stock(self, metadata: Metadata) -> Callable[[], None]:
        """Return a call that makes FlashInfer's own plan of a FULL step, which other engines make each step.

        Optional for executors; only ``bench`` calls it. The plan is made on a separate wrapper with
        separate memory, so it may come between any two steps. For XQA and trtllm-gen, which have no plan,
        it is the plan of the wrapper for the same layers. The first call of a shape allocates and
        compiles. Raises ``RunError`` for other steps.
        """
        entry = metadata.entry
        if not metadata.is_full or entry is None:
            raise RunError(f"{self._where}: {entry or 'an eager step'} has no plan of its own to compare with")
        return self._stock.plan(metadata.host, *_batch_shape(entry))

    def release(self) -> None:
        """Drop wrappers and caches."""
        self._wrappers.clear()
        self._stock.release()
        self._kernel = self._current = None
        self._caches.clear()


def load() -> Any:
    """Import FlashInfer; raises ``BackendError`` if that fails."""
    try:
        library = importlib.import_module("flashinfer")
        # `PlanlessKernel` takes its launch from there.
        importlib.import_module("flashinfer.decode")
    except ImportError as error:
        raise BackendError(
            f"flashinfer: the plan needs {PACKAGE}, which cannot be imported ({error}); install it"
        ) from error
    return library


def refuse(reservation: Reservation) -> None:
    """Raise ``BackendError`` for a group that this backend does not run.

    These are latent attention, decode context parallelism, non-causal layers, sinks, element types other
    than float16 and bfloat16, head dimensions and page sizes without a kernel, caches of another shape
    than the group's, full graphs that are not uniform, and more requests than FlashInfer's buffers hold.
    """
    attention, environment = reservation.attention, reservation.environment
    family = kernel_family(attention, environment)
    reason = (
        refusal(attention, environment)
        or _unsupported_layers(attention)
        or _unsupported_pages(reservation, family)
        or _unsupported_entries(reservation, family)
    )
    if reason is not None:
        raise BackendError(f"flashinfer: {_where(reservation)}: {reason}")
    expected = (reservation.page_size, attention.num_kv_heads, attention.head_dim)
    for layer, cache in reservation.caches.items():
        for kind, tensor in (("keys", cache.keys), ("values", cache.values)):
            shape = tuple(tensor.shape)
            if shape[1:] != expected or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
                raise BackendError(
                    f"flashinfer: {_where(reservation)}, layer {layer}: {kind} are {tensor.dtype} "
                    f"{list(shape)}, expected contiguous float16 or bfloat16 "
                    f"[num_pages, {', '.join(map(str, expected))}]"
                )


def _unsupported_layers(attention: Attention) -> str | None:
    eight_bit = attention.kv_dtype in (DataType.FP8, DataType.NVFP4)
    unsupported = {
        "latent attention is planned but not run": attention.latent is not None,
        "decode context parallelism is planned but not run": attention.decode_context > 1,
        "attention that is not causal is planned but not run": not attention.causal,
        f"a KV cache of {attention.kv_dtype.value} needs scales, which no layer provides": eight_bit,
        f"{attention.num_kv_heads} KV heads do not divide {attention.num_heads} query heads": (
            attention.num_heads % attention.num_kv_heads != 0
        ),
        f"there is no prefill kernel for a head dimension of {attention.head_dim}, which eager steps need; "
        f"it takes {_list(HEAD_DIMS)}": attention.head_dim not in HEAD_DIMS,
    }
    if attention.sinks:
        return _no_sinks("its layers")
    return next(
        (f"{reason}; name another backend for this group" for reason, true in unsupported.items() if true), None
    )


def _unsupported_pages(reservation: Reservation, family: KernelFamily) -> str | None:
    sizes = PAGE_SIZES.get(family)
    if sizes is None or reservation.page_size in sizes:
        return None
    return f"{family.value} takes pages of {_list(sizes)} tokens, not {reservation.page_size}"


def _unsupported_entries(reservation: Reservation, family: KernelFamily) -> str | None:
    for entry in reservation.entries:
        if entry.mode is GraphMode.FULL and (entry.num_reqs is None or entry.query_len is None):
            return f"{entry} is for mixed batches, which no wrapper takes under capture; plan again"
        if family is KernelFamily.PREFILL and (entry.num_reqs or 0) > KV_LENS:
            return f"{entry} has more requests than the {KV_LENS} of a prefill wrapper; plan again"
    return None


_NO_MASK = (
    "custom masks, such as those of draft trees, are not supported: a wrapper with a mask buffer keeps reading "
    "the bits of its last masked plan in steps without a mask (FlashInfer 0.6.9); plan drafts as chains"
)


def _no_sinks(subject: str) -> str:
    return (
        f"{subject} have learned sinks, and FlashInfer's FA2 kernels, which serve eager steps, have none; "
        "name another backend for this group"
    )


def _split_workspace(reservation: Reservation, parts: WorkspaceParts) -> tuple[list[Memory], torch.Tensor]:
    """Return the memory of each wrapper, and ``uint8[counters + floats]`` for a kernel without a plan."""
    pinned = parts.plans * INT_WORKSPACE
    for kind, memory, need in (
        ("workspace", reservation.workspace, parts.device),
        ("pinned memory", reservation.pinned, pinned),
    ):
        if memory.numel() < need:
            raise BackendError(
                f"flashinfer: {_where(reservation)}: the plan has {memory.numel()} bytes of {kind}, and its "
                f"entries need {need}; plan again with this version"
            )
    # In the order of `WorkspaceParts`. Floats are shared by all wrappers: no two of their launches run at once.
    ints = reservation.workspace[:pinned].view(parts.plans, INT_WORKSPACE)
    rest = reservation.workspace[pinned : parts.device]
    memories = [
        Memory(floats=rest[parts.counters :], ints=device, pinned=host)
        for device, host in zip(ints, reservation.pinned[:pinned].view(parts.plans, INT_WORKSPACE), strict=True)
    ]
    return memories, rest


def _batch_shape(entry: Entry) -> tuple[int, int]:
    """Return (requests, query length), which fix a wrapper; ``refuse`` rejects entries without them."""
    return entry.num_reqs or 0, entry.query_len or 0


def _where(reservation: Reservation) -> str:
    return f"{reservation.role.value}, group {reservation.group}"


def _list(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
