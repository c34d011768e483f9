"""XQA and trtllm-gen: decode kernels that read lengths and pages themselves, so nothing is planned."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from capture_planner.errors import BackendError
from capture_planner.records.batch import Entry
from capture_planner.runtime.executor import LayerCache, Metadata, Scoring
from capture_planner_flashinfer.backend import Path

_COUNTERS = "multi_ctas_kv_counter_buffer"

_BLOCKS = "XQA_NB_SUB_SEQ"
"""Where XQA looks, at each launch, for how many blocks a sequence has; it takes no argument for it."""


class Kernel:
    """One of the two, over a workspace whose first ``counters`` bytes stay zero between launches."""

    def __init__(
        self,
        library: Any,
        path: Path,
        workspace: torch.Tensor,
        counters: int,
        entries: Sequence[Entry],
        window_left: int,
        *,
        splits: bool,
    ) -> None:
        """Keep ``workspace uint8[counters + floats]``, and make the masks of the entries.

        ``splits``: whether XQA may give a sequence several blocks; see ``backend.splits``.
        """
        self._variables = {} if splits or path is not Path.XQA else {_BLOCKS: "1"}
        self._launch = library.decode.trtllm_batch_decode_with_kv_cache
        self._path, self._window_left = path, window_left
        self._counters = workspace[:counters]
        self._cleared = self._counters._version
        self._workspace = workspace
        self._options: dict[str, Any] = {"backend": "xqa" if path is Path.XQA else "trtllm-gen"}
        if path is Path.TRTLLM_GEN and _COUNTERS in inspect.signature(self._launch).parameters:
            # Until 0.7 the counters are the head of the workspace; since then they are an argument,
            # and where it is missing each launch allocates them.
            self._options[_COUNTERS] = self._counters
            self._workspace = workspace[counters:]
        self._masks = _masks(entries, workspace.device) if path is Path.XQA else {}

    def clear(self) -> None:
        """Zero the counters again if somebody has written to the workspace with torch.

        The kernels put them back to zero themselves, and torch does not count what they write.
        """
        if self._counters._version != self._cleared:
            self._counters.zero_()
            self._cleared = self._counters._version

    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Attend with ``query`` to ``out``, both ``[num_reqs * query_len, num_heads, head_dim]``."""
        if scoring.softcap is not None:
            raise BackendError(
                f"flashinfer: {self._path.value} has no softcap, and a layer asks for one of "
                f"{scoring.softcap}; name another backend for this group, or plan it without full graphs"
            )
        query_len = metadata.max_query_len
        options = dict(self._options)
        if query_len in self._masks:
            options["mask"] = self._masks[query_len][: metadata.num_reqs]
        with _environment(self._variables):
            self._call(query, cache, out, scoring, metadata, query_len, options)

    def _call(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        scoring: Scoring,
        metadata: Metadata,
        query_len: int,
        options: dict[str, Any],
    ) -> None:
        self._launch(
            # They read queries as if they were dense.
            query=query.contiguous(),
            kv_cache=(cache.keys, cache.values),
            workspace_buffer=self._workspace,
            block_tables=metadata.fields["block_table"],
            seq_lens=metadata.fields["seq_lens"],
            max_seq_len=metadata.max_seq_len,
            bmm1_scale=scoring.scale,
            bmm2_scale=1.0,
            window_left=self._window_left,
            out=out,
            kv_layout="NHD",
            q_len_per_req=query_len,
            **options,
        )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _masks(entries: Sequence[Entry], device: torch.device) -> dict[int, torch.Tensor]:
    """Return a causal mask for each query length above 1, wide enough for its largest entry.

    ``uint16[num_reqs, query_len, words]``: bit j of row i says that token i of a query sees token j
    of it. Rows are whole words of 32 bits.
    """
    most: dict[int, int] = {}
    for entry in entries:
        if entry.query_len is not None and entry.query_len > 1 and entry.num_reqs is not None:
            most[entry.query_len] = max(most.get(entry.query_len, 0), entry.num_reqs)
    return {query_len: _causal(query_len, reqs).to(device) for query_len, reqs in most.items()}


def _causal(query_len: int, num_reqs: int) -> torch.Tensor:
    words = -(-query_len // 32)
    bits = np.zeros((query_len, words * 32), dtype=np.uint8)
    bits[:, :query_len] = np.tri(query_len, dtype=np.uint8)
    rows = np.packbits(bits, axis=1, bitorder="little").view("<u2")
    return torch.from_numpy(np.repeat(rows[None], num_reqs, axis=0))
