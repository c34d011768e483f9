"""Launches the Triton kernels for the steps of one group."""

from __future__ import annotations

import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.model import DataType
from capture_planner_triton.geometry import Geometry, entry_partial_bytes, geometry, partial_bytes, refusal
from capture_planner_triton.kernels import attend, is_interpreted, merge


class TritonExecutor:
    """The executor of one group of one role. A step has no host work, and a graph bakes in none of its numbers.

    The sliding window counts the query's own token, as in vLLM: ``position - window < key <= position``;
    where attention is not causal it reaches as far to the other side. Scores and sums are float32.
    """

    def __init__(self, reservation: Reservation) -> None:
        """Keep the caches and the workspace; allocate nothing.

        Raises ``BackendError`` for layers that the kernel does not compute, a device that it was not
        compiled for, a workspace that is too small for an entry, and caches of another shape or dtype.
        """
        self._attention = reservation.attention
        self._page_size = reservation.page_size
        self._multiprocessors = reservation.environment.device.multiprocessors or 1
        self._caches = dict(reservation.caches)
        self._group = f"{reservation.role.value}, group {reservation.group}"
        self._refuse(reservation)
        self._workspace = reservation.workspace[: reservation.workspace.numel() // 4 * 4].view(torch.float32)

    def prepare(self, metadata: Metadata) -> None:
        """Do nothing: the kernels read the metadata of a step on the device."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Rows that no request owns, and rows that see no key, become exact zeros. Raises ``RunError`` if
        the shape or dtype of a tensor does not match the metadata and the caches.
        """
        self._check(layer, query, out, metadata)
        if not metadata.num_tokens or not metadata.num_reqs:  # no program would zero the padded rows
            out.zero_()
            return
        cut = self._geometry(metadata)
        model, cache = self._attention, self._caches[layer]
        starts, lengths, table = (metadata.fields[name] for name in ("query_start_loc", "seq_lens", "block_table"))
        heads, kv_heads = model.num_heads, model.num_kv_heads
        # Without a split the kernel writes no partial results, and this may be shorter than a part.
        partial = self._workspace[: partial_bytes(model, metadata.num_tokens, cut.splits) // 4]
        # The sums lie behind the partial outputs, in the same memory.
        sums = partial[metadata.num_tokens * heads * cut.splits * model.head_dim :]
        attend[(cut.blocks, kv_heads, cut.splits)](
            query,
            cache.keys,
            cache.values,
            out,
            partial,
            sums,
            starts,
            lengths,
            table,
            scoring.sinks,
            scoring.scale,
            scoring.softcap or 1.0,  # any number where the kernel is compiled without
            metadata.num_reqs,
            metadata.num_tokens,
            cut.blocks_each or 1,
            cut.splits,
            table.stride(0),
            *query.stride(),
            *cache.keys.stride(),
            *cache.values.stride(),
            *out.stride(),
            group=heads // kv_heads,
            head_dim=model.head_dim,
            width=cut.width,
            page_size=self._page_size,
            rows=cut.rows,
            queries=cut.queries,
            tile=cut.keys,
            window=model.window,
            causal=model.causal,
            softcapped=scoring.softcap is not None,
            uniform=cut.blocks_each is not None,
            split=cut.splits > 1,
            num_warps=cut.warps,
            num_stages=cut.stages,
            enable_fp_fusion=True,
        )
        if cut.splits > 1:
            merge[(metadata.num_tokens, heads)](
                partial,
                sums,
                out,
                starts,
                metadata.num_reqs,
                cut.splits,
                *out.stride(),
                head_dim=model.head_dim,
                width=cut.width,
                most=1 << (cut.splits - 1).bit_length(),  # tl.arange takes powers of two alone
                num_warps=2,
                enable_fp_fusion=True,
            )

    def layout(self) -> tuple[int, ...] | None:
        """Return None: everything that a graph bakes in follows from its entry."""
        return None

    def release(self) -> None:
        """Drop the caches."""
        self._caches.clear()

    def _geometry(self, metadata: Metadata) -> Geometry:
        """Cut a full graph as planned, and other steps into as many parts as the workspace holds."""
        full = metadata.is_full
        longest = metadata.max_query_len
        if full and metadata.entry is not None:
            query_len = metadata.entry.tokens_each
        else:
            query_len = longest if longest * metadata.num_reqs == metadata.num_tokens else None
        return geometry(
            self._attention,
            self._multiprocessors,
            num_reqs=metadata.num_reqs,
            num_tokens=metadata.num_tokens,
            query_len=query_len,
            # A graph is replayed for sequences of any length.
            max_seq_len=self._attention.max_model_len if full else max(metadata.max_seq_len, 1),
            workspace=self._workspace.nbytes,
        )

    def _check(self, layer: int, query: torch.Tensor, out: torch.Tensor, metadata: Metadata) -> None:
        """Raise ``RunError`` where the kernel would read or write beyond the end of a tensor."""
        model, dtype = self._attention, getattr(torch, self._attention.dtype.value)
        expected = (metadata.num_tokens, model.num_heads, model.head_dim)
        for name, tensor in (("query", query), ("out", out)):
            if tensor.shape != expected or tensor.dtype is not dtype:
                raise RunError(
                    f"{self._group}, layer {layer}: {name} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{dtype} {list(expected)}; cut it to the extents of the metadata"
                )

    def _refuse(self, reservation: Reservation) -> None:
        model, where = self._attention, f"triton: {self._group}"
        if refused := refusal(model):
            raise BackendError(f"{where}: {refused}; name another backend for this group")
        if is_interpreted() != (reservation.device.type == "cpu"):
            raise BackendError(
                f"{where}: the kernel was {'interpreted' if is_interpreted() else 'compiled'}, but the device is "
                f"{reservation.device}; compiled kernels need a GPU; the interpreter, for tests, needs the CPU "
                "and TRITON_INTERPRET=1 in the environment before capture_planner_triton.kernels is imported"
            )
        for entry in reservation.entries:
            need = entry_partial_bytes(model, reservation.environment, entry)
            # PIECEWISE entries have no requests: their steps split only as far as the workspace goes.
            if entry.num_reqs is not None and reservation.workspace.numel() < need:
                raise BackendError(
                    f"{where}: {entry} needs a workspace of {need} bytes, and it has "
                    f"{reservation.workspace.numel()}; reserve the size that workspace() returns"
                )
        expected = (self._page_size, model.num_kv_heads, model.head_dim)
        dtype = torch.float8_e4m3fn if model.kv_dtype is DataType.FP8 else getattr(torch, model.kv_dtype.value)
        for layer, cache in self._caches.items():
            for kind, tensor in (("keys", cache.keys), ("values", cache.values)):
                if tensor.ndim != 4 or tensor.shape[1:] != expected or tensor.dtype is not dtype:
                    raise BackendError(
                        f"{where}, layer {layer}: {kind} are {tensor.dtype} {list(tensor.shape)}, expected "
                        f"{dtype} [num_pages, {', '.join(map(str, expected))}]"
                    )
