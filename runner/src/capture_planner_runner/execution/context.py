"""Decode context parallelism: ranks that hold the same KV head share the keys and values of each request.

Position p of a request is on rank ``p % size``, as in vLLM with an interleave of one token. A page has its tokens over
all of these ranks, so that they have one block table, and each stores its part of a page at the same place. Queries are
gathered, each rank attends to the keys that it has, and the parts are merged by the sums of their weights.
"""

from __future__ import annotations

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.plugins.backend import NULL_SLOT, ContextExecutor, Metadata, Scoring
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner.execution.inputs import Array
from capture_planner_runner.ranks.collectives import WHOLE, Collectives

LENGTHS = "dcp_local_seq_lens"
"""The field of how many of each request's positions are on this rank."""


@attrs.frozen(eq=False)
class ContextRanks:
    """The ranks that share the KV of requests with this one: neighbours among those that share the model."""

    among: Collectives
    size: int

    @classmethod
    def of(cls, plan: Plan, among: Collectives, page_size: int) -> ContextRanks:
        """Return those of a plan.

        :param page_size: tokens per page, over all of them.
        :raises RunError: the plan's ranks do not hold the same KV heads, or do not share a page evenly.
        """
        size = plan.parallel.decode_context
        refuse_context(plan)
        if page_size % size:
            raise RunError(
                f"{size} decode-context ranks cannot share a page of {page_size} tokens; give --page-size a multiple"
            )
        return cls(among, size)

    @property
    def rank(self) -> int:
        return self.among.rank % self.size

    def stored(self, slots: torch.Tensor) -> torch.Tensor:
        """Return where this rank stores tokens that have ``slots int64[T]`` over all ranks: others in the null slot."""
        # A page has a multiple of `size` tokens, so a slot and its position have the same remainder.
        return torch.where(slots % self.size == self.rank, slots // self.size, NULL_SLOT)

    def lengths(self, seq_lens: Array) -> Array:
        """Return how many positions of each request are on this rank, ``int32[R]``."""
        own: Array = (seq_lens + (self.size - 1 - self.rank)) // self.size
        return own

    def attend(
        self,
        executor: ContextExecutor,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
        metadata: Metadata,
    ) -> None:
        """Write the attention to the keys of all ranks to ``out``, as an executor's ``attend`` does to its own."""
        tokens, heads, width = query.shape
        # Parts that are rounded before they are merged would differ from what one rank computes.
        wide = torch.promote_types(query.dtype, torch.float32)
        queries = self._gathered(query).transpose(0, 1).reshape(tokens, -1, width)
        part, sums = torch.empty_like(queries), query.new_empty(queries.shape[:2], dtype=wide)
        # A sink counts once over all ranks, not once on each: the merge adds it.
        plain = attrs.evolve(scoring, sinks=None)
        executor.attend_part(layer, queries, part, sums, plain, metadata)
        parts = self._gathered(torch.cat([part.to(wide), sums.unsqueeze(-1)], dim=-1))
        mine = parts[:, :, self.rank * heads :][:, :, :heads]
        out.copy_(merged(mine[..., :-1], mine[..., -1], scoring.sinks))

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of these ranks, ``[size, *part.shape]``."""
        # A gather is over all tensor-parallel ranks, of which those that share a request's KV are neighbours.
        first = self.among.rank - self.rank
        return self.among.gather(part.contiguous())[first : first + self.size]


ALONE = ContextRanks(WHOLE, 1)
"""A rank that has all keys and values."""


def merged(parts: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return the attention to all keys, ``[..., dim]``, of that to parts of them; zeros where there are none.

    :param parts: ``[n, ..., heads, dim]``.
    :param sums: ``[n, ..., heads]``: the logarithm of the sum of each part's weights; -inf where it has no keys.
    :param sinks: ``[heads]``: a logit that takes part in the sum and has no value.
    """
    largest = sums.amax(0) if sinks is None else torch.maximum(sums.amax(0), sinks)
    # A padded row has no keys on any rank: -inf less -inf is NaN, and below its 0 / 0 would be.
    top = largest.clamp(min=torch.finfo(sums.dtype).min)
    weights = (sums - top).exp()
    total = weights.sum(0) if sinks is None else weights.sum(0) + (sinks - top).exp()
    values = (weights.unsqueeze(-1) * parts).sum(0)
    return values / total.clamp(min=torch.finfo(sums.dtype).tiny).unsqueeze(-1)


def refuse_context(plan: Plan) -> None:
    """Raise ``RunError`` where ranks that share the KV of a request would not hold the same KV head."""
    parallel = plan.parallel
    if parallel.decode_context == 1:
        return
    heads = {plan.model.num_kv_heads}
    if plan.speculative is not None:
        heads.add(plan.speculative.model.num_kv_heads or plan.model.num_kv_heads)
    for count in sorted(heads):
        if parallel.tensor % (count * parallel.decode_context):
            alike = max(parallel.tensor // count, 1)
            works = " or ".join(str(size) for size in range(1, alike + 1) if alike % size == 0)
            ranks = counted(parallel.tensor, "tensor-parallel rank")
            raise RunError(
                f"parallel.decode_context is {parallel.decode_context}: {ranks} with {counted(count, 'KV head')} hold "
                f"each of them {counted(alike, 'time')}; plan it with {works}"
            )
