"""Rows of requests that are served: kept forward by forward, and compared once their tokens say what is right.

A row of a token that the request was given depends on the tokens before it alone, whatever the batch and the graph. So
one dense pass over each request, when it is done, says what all of its rows must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch

from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry, batch_text
from capture_planner_conformance.world import ModelCache
from capture_planner_runner.execution.inputs import Array, ForwardStep
from capture_planner_runner.serving.states import AdmittedRequest
from capture_planner_runner.serving.workload import Request


@attrs.frozen(kw_only=True)
class RequestRows:
    """The rows of one request in a forward."""

    name: str
    where: slice
    """In the batch."""
    first: int
    """The position of the first one."""
    ids: Array
    """``int64[n]``: what they read; negative where the graph takes a token that the host has not read."""

    def known(self, tokens: Sequence[int], shift: int) -> int:
        """Return the number of leading rows whose input is the request's token ``shift`` positions later."""
        given = np.array(tokens[self.first + shift :][: len(self.ids)], dtype=np.int64)
        ids = self.ids[: len(given)]
        # A negative id is one that the host does not know, so it is not compared.
        wrong = np.flatnonzero((ids >= 0) & (ids != given))
        return int(wrong[0]) if len(wrong) else len(given)


@attrs.frozen(kw_only=True, eq=False)
class ServedForward:
    """A forward that was run while requests were served."""

    role: Role
    entry: Entry | None
    batch: Batch
    rows: tuple[RequestRows, ...]
    outputs: torch.Tensor
    """``[T, layers, width]``: what each layer attended to."""

    @property
    def place(self) -> dict[str, object]:
        """Return what a failure says of it."""
        return {"role": self.role, "entry": self.entry, "batch": batch_text(self.batch)}


def requests_by_state(admitted: Iterable[AdmittedRequest]) -> dict[int, Request]:
    """Return the requests by the index of their state, as ``idx_mapping`` names them."""
    return {each.state_index: each.request for each in admitted}


def rows_of(step: ForwardStep, values: Mapping[str, Array], requests: Mapping[int, Request]) -> Iterator[RequestRows]:
    """Yield the rows of each request in a forward, of ``values`` by field as they are before it."""
    starts, positions, ids = (values[name] for name in ("query_start_loc", "positions", "input_ids"))
    for row, place in enumerate(values["idx_mapping"][: step.real.reqs].tolist()):
        start, end = starts[row : row + 2].tolist()
        # A row of the batch may have no token.
        if start < end:
            yield RequestRows(
                name=requests[place].name,
                where=slice(start, end),
                first=int(positions[start]),
                ids=ids[start:end].astype(np.int64),
            )


@attrs.frozen(eq=False)
class ServedPiece:
    """Rows of one request in one forward, and what is right: ``[n, layers, width]`` each."""

    forward: ServedForward
    rows: RequestRows
    got: torch.Tensor
    want: torch.Tensor


def pieces(
    forwards: Sequence[ServedForward], cache: ModelCache, tokens: Mapping[str, Sequence[int]]
) -> Iterator[ServedPiece]:
    """Yield the rows of forwards of one model whose tokens are ``tokens`` of their request, prompt included.

    Layers that read other tokens than the first one are left out.
    """
    shift = cache.shifts[0]
    layers = [layer for layer, each in enumerate(cache.shifts) if each == shift]
    device = cache.tables.by_token.device
    found: dict[str, torch.Tensor] = {}
    for forward in forwards:
        for rows in forward.rows:
            count = rows.known(tokens[rows.name], shift)
            if count:
                if rows.name not in found:
                    ids = torch.tensor(tokens[rows.name][shift:], device=device)
                    found[rows.name] = cache.tables.attended(ids, 0)[:, layers]
                got = forward.outputs[rows.where][:count, layers]
                yield ServedPiece(forward, rows, got, found[rows.name][rows.first : rows.first + count])
