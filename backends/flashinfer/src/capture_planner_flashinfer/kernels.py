"""XQA and trtllm-gen: decode kernels that read lengths and pages themselves, so nothing is planned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from capture_planner.errors import BackendError
from capture_planner.plugins.backend import LayerCache, Metadata, Scoring
from capture_planner.records.batch import Entry
from capture_planner_flashinfer.selection import KernelFamily

_COUNTERS = "multi_ctas_kv_counter_buffer"


class PlanlessKernel:
    """XQA or trtllm-gen, over a workspace whose first ``counters`` bytes stay zero between launches."""

    def __init__(
        self,
        library: Any,
        family: KernelFamily,
        workspace: torch.Tensor,
        counters: int,
        entries: Sequence[Entry],
        window_left: int,
        *,
        splits: bool,
    ) -> None:
        """Keep the workspace, and make the masks of the entries.

        ``workspace`` is ``uint8[counters + floats]``. ``window_left`` is the number of tokens before
        its own that a query sees, -1 for all. ``splits``: see ``selection.xqa_splits``.
        """
        xqa = family is KernelFamily.XQA
        self._launch = library.decode.trtllm_batch_decode_with_kv_cache
        self._family, self._window_left = family, window_left
        self._counters = workspace[:counters]
        self._cleared = self._counters._version
        self._workspace = workspace
        self._options: dict[str, Any] = {"backend": "xqa" if xqa else "trtllm-gen"}
        if not xqa and _COUNTERS in inspect.signature(self._launch).parameters:
            # Before 0.7 the counters are the head of the workspace. Since then they are an argument,
            # and each launch allocates them if it is missing.
            self._options[_COUNTERS] = self._counters
            self._workspace = workspace[counters:]
        if xqa and not splits:
            self._launch, self._options = _unsplit(library.xqa, counters), {}
        self._masks = _masks(entries, workspace.device) if xqa else {}

    def clear(self) -> None:
        """Zero the counters again if torch has written to the workspace, as poisoning does.

        The kernels reset them to zero themselves, and torch does not count what kernels write.
        """
        if self._counters._version != self._cleared:
            self._counters.zero_()
            self._cleared = self._counters._version

    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Attend with ``query`` to ``out``, both ``[num_reqs * query_len, num_heads, head_dim]``.

        Raises ``BackendError`` for a softcap, which neither kernel has.
        """
        if scoring.softcap is not None:
            raise BackendError(
                f"flashinfer: {self._family.value} has no softcap, and a layer asks for {scoring.softcap}; "
                "name another backend for this group, or plan it without full graphs"
            )
        query_len = metadata.max_query_len
        options = dict(self._options)
        # Only XQA takes a mask, and only for queries of several tokens.
        if query_len in self._masks:
            options["mask"] = self._masks[query_len][: metadata.num_reqs]
        self._launch(
            # The kernels ignore strides of the query.
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


def _unsplit(xqa: Callable[..., object], counters: int) -> Callable[..., None]:
    """Return ``trtllm_batch_decode_with_kv_cache`` for XQA with one block per sequence.

    The number of blocks follows from ``sm_count`` (``launchMHAFlashInfer`` in csrc/xqa/mha.cu of 0.6.9), which only
    ``xqa`` takes. That file's variable ``XQA_NB_SUB_SEQ`` is read by another launcher, and has no effect here.
    """

    def launch(
        *,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        bmm1_scale: float,
        window_left: int,
        out: torch.Tensor,
        q_len_per_req: int,
        mask: torch.Tensor | None = None,
        **_same: object,
    ) -> None:
        keys, values = kv_cache
        _, page_size, num_kv_heads, head_dim = keys.shape
        rows = query.view(-1, q_len_per_req, *query.shape[1:]) if q_len_per_req > 1 else query
        xqa(
            rows.unsqueeze(1),
            keys,
            values,
            block_tables,
            seq_lens.unsqueeze(1),
            out.unsqueeze(1),
            workspace_buffer[counters:],
            workspace_buffer[:counters],
            num_kv_heads,
            page_size,
            # It scales by 1 / sqrt(head_dim) itself.
            q_scale=bmm1_scale * head_dim**0.5,
            sliding_win_size=window_left + 1,  # 0: no window
            kv_layout="NHD",
            sm_count=1,
            q_seq_len=q_len_per_req,
            mask=mask,
        )

    return launch


def _masks(entries: Sequence[Entry], device: torch.device) -> dict[int, torch.Tensor]:
    """Return a causal mask for each query length above 1, with the rows of its largest entry.

    ``uint16[num_reqs, query_len, words]``: bit j of row i is set where token i of a query sees token j
    of it. Rows are padded to whole words of 32 bits.
    """
    requests: dict[int, int] = {}
    for entry in entries:
        if entry.query_len is not None and entry.query_len > 1 and entry.num_reqs is not None:
            requests[entry.query_len] = max(requests.get(entry.query_len, 0), entry.num_reqs)
    return {query_len: _causal(query_len, number).to(device) for query_len, number in requests.items()}


def _causal(query_len: int, num_reqs: int) -> torch.Tensor:
    words = -(-query_len // 32)
    bits = np.zeros((query_len, words * 32), dtype=np.uint8)
    bits[:, :query_len] = np.tri(query_len, dtype=np.uint8)
    rows = np.packbits(bits, axis=1, bitorder="little").view("<u2")
    return torch.from_numpy(np.repeat(rows[None], num_reqs, axis=0))
