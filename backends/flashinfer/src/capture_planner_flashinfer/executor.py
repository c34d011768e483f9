"""FlashInfer at run time: which wrapper or kernel serves a step, over memory that never moves.

In a FULL graph a group takes the path that was planned: a wrapper for each batch shape, or XQA or
trtllm-gen, which need none. Eager and PIECEWISE steps take one prefill wrapper, on real extents.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType
from capture_planner.runtime.executor import Metadata, Reservation, Scoring
from capture_planner_flashinfer.backend import KV_LENS, PACKAGE, Parts, Path, parts, path, refusal, splits
from capture_planner_flashinfer.kernels import Kernel
from capture_planner_flashinfer.stock import Stock
from capture_planner_flashinfer.workspace import INT_WORKSPACE
from capture_planner_flashinfer.wrappers import DecodeGraph, Eager, Memory, Planned, PrefillGraph, Shape

HEAD_DIMS = (64, 128, 256)
"""Those of the prefill wrapper, which serves eager steps on every path."""

PAGE_SIZES = {Path.XQA: (16, 32, 64, 128), Path.TRTLLM_GEN: (16, 32, 64)}
"""Those of the kernels without a plan; the wrappers take any."""

_DTYPES = (torch.float16, torch.bfloat16)


class FlashInferExecutor:
    """Attention of one group of one role."""

    def __init__(self, reservation: Reservation) -> None:
        """Make every wrapper that the entries need, in the reserved workspaces.

        Raises ``BackendError`` for what ``refuse`` says, where FlashInfer cannot be imported, and
        where the workspace is smaller than these entries need.
        """
        refuse(reservation)
        library = load()
        attention = reservation.attention
        self._where = _where(reservation)
        self._path = path(attention, reservation.environment)
        self._caches = dict(reservation.caches)
        self._shape = Shape(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            page_size=reservation.page_size,
            window_left=-1 if attention.window is None else attention.window - 1,
            dtype=next(iter(self._caches.values())).keys.dtype,
        )
        cut = parts(attention, reservation.environment, reservation.entries)
        memories, rest = _cut(reservation, cut)
        # By the batch shape of a graph; None: eager steps.
        self._wrappers: dict[tuple[int, int] | None, Planned] = {
            None: Eager(library, self._shape, memories[0])
        }
        self._kernel: Kernel | None = None
        if self._path.is_wrapper:
            shapes = dict.fromkeys(_shape_of(entry) for entry in _full(reservation.entries))
            for (num_reqs, query_len), memory in zip(shapes, memories[1:], strict=True):
                self._wrappers[num_reqs, query_len] = self._wrapper(
                    library, memory, reservation, num_reqs, query_len
                )
        elif _full(reservation.entries):
            self._kernel = Kernel(
                library,
                self._path,
                rest,
                cut.counters,
                _full(reservation.entries),
                self._shape.window_left,
                splits=splits(reservation.environment),
            )
        pages = -(-attention.max_model_len // reservation.page_size)
        self._stock = Stock(library, attention, self._shape, cut.floats, pages, reservation.device)
        self._now: Planned | None = None
        self._softcap: float | None = None
        self._is_settled = False
        self.plans = 0
        """Host plans so far: steps for which one was made, not left out."""

    def _wrapper(
        self, library: Any, memory: Memory, reservation: Reservation, num_reqs: int, query_len: int
    ) -> Planned:
        if self._path is Path.PREFILL:
            return PrefillGraph(library, self._shape, memory, reservation.fields, num_reqs, query_len)
        tensor_cores = self._path is Path.TENSOR_CORE
        return DecodeGraph(
            library, self._shape, memory, reservation.fields, num_reqs, tensor_cores=tensor_cores
        )

    def prepare(self, metadata: Metadata) -> None:
        """Plan the step's wrapper where it has to be; a kernel without a plan needs nothing.

        Raises ``RunError`` for a graph of a shape that was not reserved.
        """
        if metadata.is_full and self._kernel is not None:
            self._now = None
            self._kernel.clear()
            return
        entry = metadata.entry if metadata.is_full else None
        self._now = self._wrappers.get(None if entry is None else _shape_of(entry))
        if self._now is None:
            raise RunError(
                f"{self._where}: there is no wrapper for {entry}; reserve with all entries of the plan"
            )
        self.plans += self._now.plan(metadata.host, self._softcap)

    def attend(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Raises ``BackendError`` for sinks, for a custom mask, for a softcap that the path does not have, and for layers
        of one group whose softcaps differ.
        """
        if scoring.sinks is not None:
            raise BackendError(_no_sinks(f"{self._where}, layer {layer}"))
        if getattr(scoring, "mask", None) is not None:
            raise BackendError(f"{self._where}, layer {layer}: {_NO_MASK}")
        cache = self._caches[layer]
        if metadata.is_full and self._kernel is not None:
            self._kernel.run(query, cache, out, scoring, metadata)
            return
        if not self._is_settled or scoring.softcap != self._softcap:
            self._settle(layer, scoring.softcap, query, metadata)
        assert self._now is not None, "attend comes after prepare"
        self._now.run(query, cache, out, scoring.scale)

    def _settle(self, layer: int, softcap: float | None, query: torch.Tensor, metadata: Metadata) -> None:
        """Take the softcap from the first layer that attends: a plan chooses its kernel by it."""
        if self._is_settled:
            raise BackendError(
                f"{self._where}, layer {layer}: its softcap is {softcap}, and an earlier layer of the group "
                f"has {self._softcap}; one plan serves all layers of a group, so make two groups of them"
            )
        if softcap != self._softcap:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"{self._where}, layer {layer}: its softcap of {softcap} is first seen in a capture, "
                    "where nothing can be planned; run the forward once before it is captured"
                )
            self._softcap = softcap
            self.prepare(metadata)
        self._is_settled = True

    def layout(self) -> tuple[int, ...] | None:
        """Return the numbers of the last plan of a graph; None where no graph holds one."""
        return None if self._now is None or isinstance(self._now, Eager) else self._now.layout

    def stock(self, metadata: Metadata) -> Callable[[], None]:
        """Return a call that makes FlashInfer's own plan of a FULL step: what an engine pays a step.

        Optional: not all executors have it, and nothing but a benchmark calls it. The plan is made on
        a wrapper with memory of its own, so it may come between any two steps. For XQA and trtllm-gen,
        which have no plan, it is that of the wrapper that would serve in their place. Allocates, and
        compiles, at the first call of a shape. Raises ``RunError`` for any other step.
        """
        entry = metadata.entry
        if not metadata.is_full or entry is None:
            raise RunError(
                f"{self._where}: {entry or 'an eager step'} has no plan of its own to compare with"
            )
        return self._stock.plan(metadata.host, *_shape_of(entry))

    def release(self) -> None:
        """Let go of wrappers and caches."""
        self._wrappers.clear()
        self._stock.release()
        self._kernel = self._now = None
        self._caches.clear()


def load() -> Any:
    """Import FlashInfer; raises ``BackendError`` where it cannot be."""
    try:
        library = importlib.import_module("flashinfer")
        importlib.import_module("flashinfer.decode")
    except ImportError as error:
        raise BackendError(
            f"flashinfer: the plan counts on {PACKAGE}, which cannot be imported ({error}); "
            "install capture-planner-flashinfer[run]"
        ) from error
    return library


def refuse(reservation: Reservation) -> None:
    """Raise ``BackendError`` for what this backend does not run, naming what it does.

    Latent attention, decode context parallelism, non-causal layers, sinks, other element types than
    float16 and bfloat16, head dimensions and page sizes without a kernel, caches of another shape than
    the group's, full graphs that are not uniform, and more requests than FlashInfer's buffers hold.
    """
    attention, chosen = reservation.attention, path(reservation.attention, reservation.environment)
    reason = refusal(attention, reservation.environment) or _unsupported(attention)
    if reason is None:
        reason = _unsupported_pages(reservation, chosen) or _unsupported_entries(reservation, chosen)
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


def _unsupported(attention: Attention) -> str | None:
    """Return what is wrong with the layers, or None."""
    eight_bit = attention.kv_dtype in (DataType.FP8, DataType.NVFP4)
    unsupported = {
        "latent attention is planned and not run": attention.latent is not None,
        "decode context parallelism is planned and not run": attention.decode_context > 1,
        "attention that is not causal is planned and not run": not attention.causal,
        f"a KV cache of {attention.kv_dtype.value} needs scales, which no layer gives": eight_bit,
        f"{attention.num_kv_heads} KV heads do not divide {attention.num_heads} query heads": (
            attention.num_heads % attention.num_kv_heads != 0
        ),
        f"there is no prefill kernel for a head dimension of {attention.head_dim}, which eager steps need; "
        f"it takes {_list(HEAD_DIMS)}": attention.head_dim not in HEAD_DIMS,
    }
    if attention.sinks:
        return _no_sinks("its layers")
    return next(
        (f"{what}; name another backend for this group" for what, wrong in unsupported.items() if wrong), None
    )


def _unsupported_pages(reservation: Reservation, chosen: Path) -> str | None:
    sizes = PAGE_SIZES.get(chosen)
    if sizes is None or reservation.page_size in sizes:
        return None
    return f"{chosen.value} takes pages of {_list(sizes)} tokens, not {reservation.page_size}"


def _unsupported_entries(reservation: Reservation, chosen: Path) -> str | None:
    for entry in reservation.entries:
        if entry.mode is GraphMode.FULL and (entry.num_reqs is None or entry.query_len is None):
            return f"{entry} holds mixed batches, which no wrapper does under capture; plan it again"
        if chosen is Path.PREFILL and (entry.num_reqs or 0) > KV_LENS:
            return f"{entry} has more requests than the {KV_LENS} that a prefill wrapper holds; plan it again"
    return None


_NO_MASK = (
    "a mask of its own, such as a tree of drafts has, is not run: a graph holds the address of a mask's buffer, "
    "and a wrapper that has one goes on reading the bits of the last masked plan where a step has no mask "
    "(FlashInfer 0.6.9); plan drafts as chains"
)


def _no_sinks(who: str) -> str:
    return (
        f"{who} have learned sinks, and FlashInfer's FA2 kernels, which serve eager steps, have none; "
        "name another backend for this group"
    )


def _cut(reservation: Reservation, cut: Parts) -> tuple[list[Memory], torch.Tensor]:
    """Return the memory of each wrapper, and ``uint8[counters + floats]`` for a kernel."""
    pinned = cut.plans * INT_WORKSPACE
    for what, given, need in (
        ("workspace", reservation.workspace, cut.device),
        ("pinned memory", reservation.pinned, pinned),
    ):
        if given.numel() < need:
            raise BackendError(
                f"flashinfer: {_where(reservation)}: the plan has {given.numel()} bytes of {what}, and its "
                f"entries need {need}; plan it again with this version"
            )
    ints = reservation.workspace[:pinned].view(cut.plans, INT_WORKSPACE)
    rest = reservation.workspace[pinned : cut.device]
    memories = [
        Memory(floats=rest[cut.counters :], ints=device, pinned=host)
        for device, host in zip(ints, reservation.pinned[:pinned].view(cut.plans, INT_WORKSPACE), strict=True)
    ]
    return memories, rest


def _full(entries: tuple[Entry, ...]) -> list[Entry]:
    return [entry for entry in entries if entry.mode is GraphMode.FULL]


def _shape_of(entry: Entry) -> tuple[int, int]:
    """Return what fixes a wrapper; ``refuse`` has seen that both are known."""
    return entry.num_reqs or 0, entry.query_len or 0


def _where(reservation: Reservation) -> str:
    return f"{reservation.role.value}, group {reservation.group}"


def _list(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
