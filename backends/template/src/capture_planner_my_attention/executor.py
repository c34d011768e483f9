"""What runs. The runner pads all fields, and calls prepare(), then attend() for each layer."""

import torch

from capture_planner.plugins.backend import Metadata, Reservation, Scoring


class MyExecutor:
    def __init__(self, reservation: Reservation) -> None:
        # Keep tensors of the reservation and make others here: a graph has their addresses.
        self.caches, self.window = reservation.caches, reservation.attention.window

    def prepare(self, metadata: Metadata) -> None:
        pass  # Replace: fill the fields that are your own, and plan on the host. Padding is done.

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        # Replace by your kernel. In a full graph this is captured: no .item(), no mask as an index, no
        # number of this step. Every row of out is written, and what pads reaches no other row.
        starts, lengths = metadata.fields["query_start_loc"], metadata.fields["seq_lens"]
        token = torch.arange(len(query), device=query.device, dtype=starts.dtype)
        owner = torch.searchsorted(starts[1:], token, right=True).clamp(max=metadata.num_reqs - 1)
        position = (lengths - starts[1:])[owner] + token
        cache, pages = self.caches[layer], metadata.fields["block_table"][owner]
        wide = torch.promote_types(query.dtype, torch.float32)
        keys, values = (
            held[pages].flatten(1, 2).to(wide).repeat_interleave(query.shape[1] // held.shape[2], dim=2)
            for held in (cache.keys, cache.values)
        )
        key = torch.arange(keys.shape[1], device=query.device)
        seen = (key <= position[:, None]) & (key < lengths[owner, None])
        if self.window is not None:
            seen = seen & (key > position[:, None] - self.window)
        scores = torch.einsum("thd,tkhd->thk", query.to(wide), keys) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        # The smallest number and not -inf: a row that sees nothing would be NaN.
        weights = scores.masked_fill(~seen[:, None], torch.finfo(wide).min).softmax(-1)
        values = values.masked_fill(~seen[:, :, None, None], 0)  # 0 * NaN would be NaN.
        out.copy_(torch.einsum("thk,tkhd->thd", weights, values))

    def layout(self) -> tuple[int, ...] | None:
        return None  # Replace: numbers of prepare() that a graph bakes in, such as splits.

    def release(self) -> None:
        self.caches = {}
