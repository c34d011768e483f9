"""A healthy backend with scheduler metadata, as FlashAttention 3 has it under captured graphs.

Before every step each request's tiles are counted into a persistent buffer that is as long as the most
requests ask for; a graph launches its own number of requests, those with the most tiles first. So what
stands behind the requests of a step decides who is launched at all: it must be zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention, Axis, Fill, MetadataField, PaddingContract, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from capture_planner_reference.executor import ReferenceExecutor

METADATA = MetadataField(
    name="scheduler_metadata", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, offset=1, scale=4, align=4
)
"""A semaphore, then four numbers a request, requests rounded up to four; the first is the tile count."""


class ScheduledReference:
    """Tiles counted before the launch; ``executor`` is what counts and launches them."""

    name = "scheduled"

    def __init__(self, executor: type[ScheduledExecutor] | None = None) -> None:
        self._executor = executor or ScheduledExecutor

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """UNIFORM_BATCH: it is written for rows of equal query length."""
        return Support(level=GraphSupport.UNIFORM_BATCH, reason="Its launches hold uniform batches.")

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """The scheduler metadata, zero behind the requests of a step."""
        return PaddingContract(fields=(METADATA,))

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """On the host: tiles are counted by a call of their own."""
        return Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Nothing: intermediates come from the graph's own pool."""
        return Workspace(formula="0")

    def reserve(self, reservation: Reservation) -> ScheduledExecutor:
        """Make the executor of one group."""
        return self._executor(reservation)


class ScheduledExecutor(ReferenceExecutor):
    """The reference, launched by request in the order that the metadata says."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self.reservation = reservation
        self.scheduled = reservation.fields[METADATA.name]

    def prepare(self, metadata: Metadata) -> None:
        """Count the tiles of each request."""
        super().prepare(metadata)
        tiles = -(-metadata.fields["seq_lens"] // self.reservation.page_size)
        self.scheduled[METADATA.offset :][: METADATA.scale * len(tiles) : METADATA.scale] = tiles

    def _attend_padded(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Launch as many requests as the graph has: those with the most tiles."""
        reqs = metadata.num_reqs
        seen = len(metadata.fields[METADATA.name])
        tiles = self.scheduled[:seen][METADATA.offset :: METADATA.scale]
        order = tiles.argsort(descending=True, stable=True)[:reqs]
        # A launch beyond the requests of the graph finds an empty one.
        beyond, order = order >= reqs, order.clamp(max=reqs - 1)
        lengths = metadata.fields["seq_lens"].index_select(0, order).masked_fill(beyond, 0)
        queries = query.view(reqs, -1, *query.shape[1:])
        launched = torch.zeros_like(queries)
        taken = attrs.evolve(
            metadata,
            fields={
                **metadata.fields,
                "seq_lens": lengths,
                "block_table": metadata.fields["block_table"].index_select(0, order),
                "query_start_loc": _ramp(reqs, queries.shape[1], lengths),
            },
        )
        super()._attend_padded(
            layer, queries.index_select(0, order).view_as(query), launched.view_as(query), scoring, taken
        )
        where = torch.where(beyond, reqs, order)
        whole = query.new_zeros(reqs + 1, *queries.shape[1:]).index_copy_(0, where, launched)
        out.copy_(whole[:reqs].view_as(out))


def _ramp(reqs: int, query_len: int, like: torch.Tensor) -> torch.Tensor:
    """Return ``int32[reqs + 1]``: every launched request has all of its queries."""
    return torch.arange(reqs + 1, device=like.device, dtype=like.dtype) * query_len
