"""Runs vLLM's metadata builder and attention for the steps of one group, as its V2 model runner does.

``prepare`` is ``DefaultModelState.prepare_attn``, ``attend`` is the ``forward`` of the layer's implementation, and
draft chains refresh their metadata as ``_generate_fused_drafts`` does (vLLM 0.33, vllm/v1/worker/gpu).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata  # type: ignore[import-not-found, unused-ignore]

from capture_planner.errors import BackendError, one_line
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.batch import Entry
from capture_planner_vllm.attention.config import builder_of, configuration, layers_of


class VllmExecutor:
    """The executor of one group of one role: a model of vLLM that has no other layers.

    The runner writes keys and values, into vLLM's layout; vLLM's own cache kernels do not run.
    """

    def __init__(self, reservation: Reservation, engine: str, *, zeroes: bool, frozen: bool) -> None:
        """Make vLLM's configuration, layers and builder; see ``VllmAttention`` for ``zeroes`` and ``frozen``.

        Raises ``BackendError`` with vLLM's reason where it refuses the group, and for a cache in another layout.
        """
        self._role, self._attention = reservation.role, reservation.attention
        if self._attention.kv_dtype is not self._attention.dtype:
            raise BackendError(
                f"vLLM's {engine}, {reservation.role.value}: a KV cache of {self._attention.kv_dtype.value} needs "
                "vLLM's scales, which the runner does not write; leave kv_dtype out"
            )
        self._zeroes, self._frozen = zeroes, frozen
        self._caches = {}
        for layer, cache in reservation.caches.items():
            if cache.packed is None:
                raise BackendError(
                    f"vLLM's {engine}, {reservation.role.value}: the cache of layer {layer} is not vLLM's; "
                    "name the same backend for all roles of the drafter"
                )
            # [blocks, heads, block size, keys and values], physically LBNHC: the default of vLLM 0.33.
            self._caches[layer] = cache.packed.transpose(1, 2)
        try:
            self._config = configuration(reservation, engine)
            self._layers = layers_of(reservation, self._config)
            self._builder = builder_of(reservation, self._config, self._layers)
        except ValueError as error:
            text = one_line(error)
            raise BackendError(f"vLLM's {engine}, {reservation.role.value}: vLLM refuses the group: {text}") from None
        self._first = min(self._layers)
        self._metadata: Any = None
        self._captured: dict[Entry, Any] = {}

    def prepare(self, metadata: Metadata) -> None:
        """Build vLLM's metadata of a step.

        A graph of a whole draft chain refreshes its metadata itself: vLLM builds none before a replay of one.
        """
        entry = metadata.entry
        if entry is not None and metadata.is_full and metadata.for_capture:
            lengths = metadata.fields["seq_lens"]
            before = lengths.clone()
            self._metadata = self._captured[entry] = self._builder.build_for_cudagraph_capture(self._common(metadata))
            # TRITON_ATTN's builder sets all to 1, padding included, to capture faster. The runner's are as short.
            lengths.copy_(before)
        elif entry is not None and entry.draft_steps is not None:
            self._metadata = self._captured[entry]
        else:
            self._metadata = self._builder.build(0, self._common(metadata))

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``."""
        if layer == self._first and metadata.entry is not None and metadata.entry.draft_steps is not None:
            self._builder.update_draft_decode_metadata(self._metadata)
        if self._zeroes:
            out.zero_()
        module, implementation = self._layers[layer], self._implementation(layer, scoring)
        implementation.forward(module, query, None, None, self._caches[layer], self._metadata, out)

    def layout(self) -> tuple[int, ...] | None:
        """Return None: vLLM checks nothing of a plan before it replays."""
        return None

    def release(self) -> None:
        """Drop the caches and what vLLM made."""
        self._caches.clear()
        self._layers.clear()
        self._captured.clear()
        self._metadata = self._builder = None

    def _common(self, metadata: Metadata) -> Any:
        """Return what vLLM's runner hands to a builder.

        At a capture the maxima are those of every replay. ``prepare_attn`` passes the batch's to a replay; but from the
        maxima ``get_scheduler_metadata`` derives whether attention is causal, and from this the layout of the schedule
        (hopper/flash_api.cpp of vllm-project/flash-attention), so that a replay has to have those of its capture.
        """
        starts, lengths = metadata.host["query_start_loc"], metadata.host["seq_lens"]
        query, length = metadata.max_query_len, metadata.max_seq_len
        if not (metadata.for_capture or (self._frozen and metadata.is_full)):
            query, length = int(np.diff(starts).max(initial=0)), int(lengths.max(initial=0))
        fields = metadata.fields
        return CommonAttentionMetadata(
            query_start_loc=fields["query_start_loc"],
            query_start_loc_cpu=torch.from_numpy(np.ascontiguousarray(starts)),
            seq_lens=fields["seq_lens"],
            seq_lens_cpu_upper_bound=torch.from_numpy(np.ascontiguousarray(lengths)),
            num_reqs=metadata.num_reqs,
            num_actual_tokens=metadata.num_tokens,
            max_query_len=query,
            max_seq_len=length,
            block_table_tensor=fields["block_table"],
            slot_mapping=fields["slot_mapping"],
            causal=self._attention.causal,
        )

    def _implementation(self, layer: int, scoring: Scoring) -> Any:
        """Return the layer's implementation; one of its own where a model scores otherwise than the layer was made."""
        made, model, sinks = self._layers[layer].impl, self._attention, scoring.sinks
        if scoring.scale == made.scale and scoring.softcap is None and sinks is None:
            return made
        if sinks is not None and type(made).__name__ == "FlashAttentionImpl":
            sinks = sinks.to(torch.bfloat16)  # as gpt-oss holds them; FlashAttention 3 takes no other
        return type(made)(
            model.num_heads,
            model.head_dim,
            scoring.scale,
            model.num_kv_heads,
            None,
            model.window,
            "auto",
            scoring.softcap,
            sinks=sinks,
        )
