"""FlashAttention on device lengths and pages, with every host number fixed before the capture."""

from __future__ import annotations

import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.model import DataType
from capture_planner.runtime.executor import Metadata, Reservation, Scoring
from capture_planner_flash_attention.backend import (
    FA2,
    FA3,
    MAX_SPLITS,
    SCHEDULER_METADATA,
    SPLIT_TOKENS,
    Library,
)
from capture_planner_flash_attention.kernels import Call, Kernel, load


class FlashAttentionExecutor:
    """One group of one role, on the library that the plan's environment names.

    A FULL graph bakes in the entry's longest query, the model's longest sequence and a number of
    splits; lengths, pages and query starts are read on the device. Padded rows become exact zeros.
    """

    def __init__(self, reservation: Reservation, library: Library) -> None:
        """Import the library and keep the caches.

        Raises ``BackendError`` where the library is missing or too old, and for what it cannot run.
        """
        self._attention, self._environment = reservation.attention, reservation.environment
        self._library, self._caches = library, dict(reservation.caches)
        planned = self._environment.packages[library.package]
        self._where = f"flash_attention: {reservation.role.value}, group {reservation.group}"
        self._name = f"{library.title} ({library.package} {planned})"
        _check(f"{self._where}: {self._name}", reservation, library)
        self._kernel = self._load()
        self._held = reservation.fields.get(SCHEDULER_METADATA.name)
        self._schedule: torch.Tensor | None = None
        self._layout: tuple[int, ...] | None = None
        tokens = max([reservation.limits.max_num_tokens, *(e.num_tokens for e in reservation.entries)])
        self._owned = torch.zeros(tokens, 1, 1, dtype=torch.bool, device=reservation.device)
        self._total = 0
        dtype = getattr(torch, self._attention.dtype.value)
        self._zero = torch.zeros((), dtype=dtype, device=reservation.device)

    def prepare(self, metadata: Metadata) -> None:
        """Mark the rows that requests own, and schedule the tiles of a FULL step on FlashAttention 3.

        The schedule is copied into the reserved field, whose tail is zeroed: a stale tail makes
        surplus thread blocks overwrite the output. Raises ``BackendError`` where it does not fit.
        """
        self._own(int(metadata.host["query_start_loc"][-1]))
        self._schedule = self._layout = None
        if not metadata.is_full:
            return
        self._layout = (self._num_splits(metadata),)
        if self._held is None:
            return
        layer, cache = next(iter(self._caches.items()))
        query = cache.keys.new_empty(0, self._attention.num_heads, self._attention.head_dim)
        made = self._kernel.schedule(self._call(layer, query, Scoring(scale=1.0), metadata))
        length = 0 if made is None else len(made)
        if made is None or length > len(self._held):
            raise BackendError(
                f"{self._where}, {metadata.entry}: {self._name} scheduled {length} numbers, expected 1 to "
                f"{len(self._held)}; its release lays them out in another way, so install the planned one"
            )
        self._held[:length].copy_(made)
        self._held[length:].zero_()
        self._schedule = self._held[:length]
        self._layout = (*self._layout, length)

    def attend(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Raises ``RunError`` for a softcap or sinks that the library does not take.
        """
        for what, asked, taken in (
            ("softcap", scoring.softcap, self._kernel.softcap),
            ("attention sinks", scoring.sinks, self._kernel.sinks),
        ):
            if asked is not None and not taken:
                raise RunError(
                    f"{self._where}, layer {layer}: {self._name} takes no {what} as it is installed here; "
                    "plan for an environment with another library, or name another backend"
                )
        result = self._kernel.run(self._call(layer, query, scoring, metadata), out)
        # No library writes the rows that no request owns: they hold what memory held before.
        torch.where(self._owned[: len(out)], result, self._zero, out=out)

    def _own(self, total: int) -> None:
        """Mark the first ``total`` rows: those that requests own come first, in every kind of step.

        The mask is this executor's alone and right for all extents at once, so that it changes with the
        total, by the rows in between, and a decode of the same requests launches nothing.
        """
        if total != self._total:
            self._owned[min(total, self._total) : max(total, self._total)] = total > self._total
            self._total = total

    def layout(self) -> tuple[int, ...] | None:
        """The splits of the last FULL step, and the length of its schedule where there is one."""
        return self._layout

    def release(self) -> None:
        """Let go of the caches and of the schedule."""
        self._caches.clear()
        self._held = self._schedule = None

    def _call(self, layer: int, query: torch.Tensor, scoring: Scoring, metadata: Metadata) -> Call:
        cache, fields = self._caches[layer], metadata.fields
        uniform = metadata.entry.query_len if metadata.is_full and metadata.entry is not None else None
        if uniform is not None and uniform * metadata.num_reqs != metadata.num_tokens:
            uniform = None
        return Call(
            query=query,
            keys=cache.keys,
            values=cache.values,
            cu_seqlens_q=fields["query_start_loc"],
            seqused_k=fields["seq_lens"],
            page_table=fields["block_table"],
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            query_len=uniform,
            num_splits=self._num_splits(metadata),
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
            schedule=self._schedule,
        )

    def _num_splits(self, metadata: Metadata) -> int:
        if metadata.entry is None or not metadata.is_full:
            return 0
        return num_splits(self._library, metadata.entry, self._attention, self._environment)

    def _load(self) -> Kernel:
        try:
            kernel = load(self._library, self._attention)
        except (ImportError, AttributeError, OSError) as error:
            says = " ".join(f"{type(error).__name__}: {error}".split())
            raise BackendError(
                f"{self._where}: the plan counts on {self._name}, and {self._library.module} cannot be used "
                f"here ({says}); install {self._library.package}, or plan for what this machine has"
            ) from error
        if self._attention.sinks and not kernel.sinks:
            raise BackendError(
                f"{self._where}: {self._name} takes no attention sinks as it is installed here; "
                "install a build that does, such as vLLM's, or name another backend"
            )
        return kernel


def num_splits(library: Library, entry: Entry, attention: Attention, environment: Environment) -> int:
    """Return into how many parts a FULL graph may split each KV: from 1 to ``MAX_SPLITS``.

    It depends on the entry alone, and is never 0, the library's own choice. FlashAttention 3 takes it
    as a bound and splits each request as far as its length is worth, so it gets as many as
    ``SPLIT_TOKENS`` leave room for. FlashAttention 2 splits every request that often, so it gets what
    fills the multiprocessors once when all rows are real. The others do not split.
    """
    if library is FA3:
        return max(1, MAX_SPLITS * SPLIT_TOKENS // max(entry.num_tokens, SPLIT_TOKENS))
    if library is FA2:
        blocks = (entry.num_reqs or 1) * attention.num_kv_heads
        return min(max((environment.device.multiprocessors or 1) // blocks, 1), MAX_SPLITS)
    return 1


def _check(who: str, reservation: Reservation, library: Library) -> None:
    """Raise ``BackendError`` for layers, pages or caches that the library cannot run here."""
    attention, page_size = reservation.attention, reservation.page_size
    unsupported = {
        "latent attention": attention.latent is not None,
        "an FP8 cache, which needs scales that no cache here has": attention.kv_dtype is DataType.FP8,
        "decode context parallelism": attention.decode_context > 1,
    }
    for what, asked in unsupported.items():
        if asked:
            raise BackendError(
                f"{who} plans and does not execute {what}; it runs ordinary heads (MHA, MQA, GQA) in bfloat16 "
                "or float16, on one rank; name another backend for this group"
            )
    if page_size % library.page_multiple:
        raise BackendError(
            f"{who} takes pages of a multiple of {library.page_multiple} tokens, not {page_size}; "
            f"run with pages of {library.page_multiple}"
        )
    shape = (page_size, attention.num_kv_heads, attention.head_dim)
    dtype = getattr(torch, attention.dtype.value)
    for layer, cache in reservation.caches.items():
        for kind, tensor in (("keys", cache.keys), ("values", cache.values)):
            if tensor.ndim != 4 or tensor.shape[1:] != shape or tensor.dtype != dtype:
                raise BackendError(
                    f"{who}, layer {layer}: {kind} are {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                    f"[num_pages, {', '.join(map(str, shape))}]"
                )
