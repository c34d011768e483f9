"""Runs FlashAttention: lengths and pages are read on the device, host numbers are fixed before capture."""

from __future__ import annotations

import torch

from capture_planner.errors import BackendError, RunError, class_and_message
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.model import DataType
from capture_planner_flash_attention.kernels import AttentionCall, AttentionKernel, load
from capture_planner_flash_attention.libraries import SCHEDULER_METADATA, Library, num_splits


class FlashAttentionExecutor:
    """The executor of one group of one role, on the library that the plan's environment names.

    A FULL graph bakes in the entry's longest query, the model's longest sequence and a number of
    splits; lengths, pages and query starts are read on the device. Padded rows become exact zeros.
    """

    def __init__(self, reservation: Reservation, library: Library) -> None:
        """Import the library and allocate the mask of real rows.

        Raises ``BackendError`` if the library is missing or too old, or cannot run this group.
        """
        self._attention, self._environment = reservation.attention, reservation.environment
        self._library, self._caches = library, dict(reservation.caches)
        planned = self._environment.packages[library.package]
        self._where = f"flash_attention: {reservation.role.value}, group {reservation.group}"
        self._name = f"{library.title} ({library.package} {planned})"
        _check(f"{self._where}: {self._name}", reservation, library)
        self._kernel = self._load()
        self._schedule_field = reservation.fields.get(SCHEDULER_METADATA.name)
        self._schedule: torch.Tensor | None = None
        self._layout: tuple[int, ...] | None = None
        # A graph may be larger than the limits, and then it is padded.
        tokens = max([reservation.limits.max_num_tokens, *(e.num_tokens for e in reservation.entries)])
        # True for the rows that requests own, which come first in every kind of step.
        self._is_real = torch.zeros(tokens, 1, 1, dtype=torch.bool, device=reservation.device)
        self._num_real = 0
        dtype = getattr(torch, self._attention.dtype.value)
        self._zero = torch.zeros((), dtype=dtype, device=reservation.device)

    def prepare(self, metadata: Metadata) -> None:
        """Mark the rows that requests own; on FlashAttention 3, schedule the tiles of a FULL step.

        Raises ``BackendError`` if the schedule does not fit its field.
        """
        self._mark_rows(int(metadata.host["query_start_loc"][-1]))
        self._schedule = self._layout = None
        if not metadata.is_full:
            return
        self._layout = (self._num_splits(metadata),)
        field = self._schedule_field
        # The call itself schedules its tiles: in all libraries but FlashAttention 3, and there in draft chains.
        if field is None:
            return
        # A schedule follows from lengths and the shape of the heads: any layer serves, and an empty query.
        layer, cache = next(iter(self._caches.items()))
        query = cache.keys.new_empty(0, self._attention.num_heads, self._attention.head_dim)
        schedule = self._kernel.schedule(self._call(layer, query, Scoring(scale=1.0), metadata))
        length = 0 if schedule is None else len(schedule)
        if schedule is None or length > len(field):
            raise BackendError(
                f"{self._where}, {metadata.entry}: {self._name} scheduled {length} numbers, expected 1 to "
                f"{len(field)}; this release uses another layout, so install the planned version"
            )
        field[:length].copy_(schedule)
        # A stale tail would make surplus thread blocks overwrite the output.
        field[length:].zero_()
        self._schedule = field[:length]
        self._layout = (*self._layout, length)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Raises ``RunError`` for a softcap or sinks that the library does not take.
        """
        for feature, value, supported in (
            ("softcap", scoring.softcap, self._kernel.softcap),
            ("attention sinks", scoring.sinks, self._kernel.sinks),
        ):
            if value is not None and not supported:
                raise RunError(
                    f"{self._where}, layer {layer}: the installed {self._name} takes no {feature}; "
                    "plan for an environment with another library, or name another backend"
                )
        result = self._kernel.run(self._call(layer, query, scoring, metadata), out)
        # No library writes the rows that no request owns, so they may hold anything, NaN included.
        torch.where(self._is_real[: len(out)], result, self._zero, out=out)

    def _mark_rows(self, count: int) -> None:
        """Mark the first ``count`` rows as real, all others as padding."""
        # Only marks that change are written: a decode with the requests of the step before launches nothing.
        if count != self._num_real:
            low, high = sorted((count, self._num_real))
            self._is_real[low:high] = count > self._num_real
            self._num_real = count

    def layout(self) -> tuple[int, ...] | None:
        """Return the splits of the last FULL step and the length of its schedule, if it has one."""
        return self._layout

    def release(self) -> None:
        """Drop the caches and the schedule."""
        self._caches.clear()
        self._schedule_field = self._schedule = None

    def _call(self, layer: int, query: torch.Tensor, scoring: Scoring, metadata: Metadata) -> AttentionCall:
        cache, fields = self._caches[layer], metadata.fields
        uniform = metadata.entry.query_len if metadata.is_full and metadata.entry is not None else None
        if uniform is not None and uniform * metadata.num_reqs != metadata.num_tokens:
            # Tokens were padded beyond the requests, so rows do not divide into equal queries.
            uniform = None
        return AttentionCall(
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
            return 0  # No graph: the library may choose.
        return num_splits(self._library, metadata.entry, self._attention, self._environment)

    def _load(self) -> AttentionKernel:
        try:
            kernel = load(self._library, self._attention)
        except (ImportError, AttributeError, OSError) as error:
            message = class_and_message(error)
            raise BackendError(
                f"{self._where}: the plan needs {self._name}, but {self._library.module} cannot be used "
                f"here ({message}); install {self._library.package}, or plan for this machine's packages"
            ) from error
        if self._attention.sinks and not kernel.sinks:
            raise BackendError(
                f"{self._where}: the installed {self._name} takes no attention sinks; "
                "install a build that does, such as vLLM's, or name another backend"
            )
        return kernel


def _check(subject: str, reservation: Reservation, library: Library) -> None:
    """Raise ``BackendError`` for layers, pages or caches that the library cannot run here."""
    attention, page_size = reservation.attention, reservation.page_size
    unsupported = {
        "latent attention": attention.latent is not None,
        "an FP8 cache, which needs scales that the caches do not have": attention.kv_dtype is DataType.FP8,
        "decode context parallelism": attention.decode_context > 1,
    }
    for feature, required in unsupported.items():
        if required:
            raise BackendError(
                f"{subject} plans but does not execute {feature}; it runs ordinary heads (MHA, MQA, GQA) in bfloat16 "
                "or float16, on one rank; name another backend for this group"
            )
    if page_size % library.page_multiple:
        raise BackendError(
            f"{subject} takes page sizes that are multiples of {library.page_multiple} tokens, not {page_size}; "
            f"set the page size to {library.page_multiple}"
        )
    shape = (page_size, attention.num_kv_heads, attention.head_dim)
    dtype = getattr(torch, attention.dtype.value)
    for layer, cache in reservation.caches.items():
        for kind, tensor in (("keys", cache.keys), ("values", cache.values)):
            if tensor.ndim != 4 or tensor.shape[1:] != shape or tensor.dtype != dtype:
                raise BackendError(
                    f"{subject}, layer {layer}: {kind} are {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                    f"[num_pages, {', '.join(map(str, shape))}]"
                )
