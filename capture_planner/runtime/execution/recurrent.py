"""Recurrent layers: a pool of states in place of a KV cache, and the recurrence itself.

A state is a vector h. A token with the input x and the logarithm d of its decay makes exp(d) * h + x of it, element by
element, and the layer's output is the new state. A request begins with a state of zeros at its position 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from capture_planner.runtime.execution.fields import Fields, TensorRef
from capture_planner.runtime.execution.inputs import ForwardStep
from capture_planner.runtime.executor import NULL_STATE


@attrs.frozen(kw_only=True, eq=False)
class StateCache:
    """The pool of states of one recurrent layer, owned by the runner."""

    states: torch.Tensor
    """``[rows, positions, width]``: of each row the states after its request's last tokens. The state after position
    p is at ``p % positions``, so that rejected drafts overwrite no state that a request may go on from. Row 0 is that
    of padded requests."""

    @property
    def positions(self) -> int:
        return self.states.shape[1]


@attrs.frozen(eq=False)
class _Segments:
    """Where the tokens of each request are in a batch: one value for each token, ``[T]``."""

    owner: torch.Tensor
    """The row of its request in the batch; as many as there are requests for a token of none."""
    first: torch.Tensor
    """The request's first token in the batch."""
    end: torch.Tensor
    """The token after the request's last one."""
    begins: torch.Tensor
    """Whether the request has no state yet."""


class RecurrentLayers:
    """The recurrent layers of one role; of most models there are none."""

    def __init__(self, fields: Fields, caches: Sequence[StateCache]) -> None:
        self.caches = tuple(caches)
        self._fields = fields

    def persistent(self) -> Iterator[TensorRef]:
        """Yield the pool of each layer, which a forward reads and changes."""
        for layer, cache in enumerate(self.caches):
            yield f"states[{layer}]", cache, "states"

    def recur(
        self, step: ForwardStep, layer: int, inputs: torch.Tensor, decays: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Run one layer on ``inputs`` and ``decays [T, width]``, as kernels do: of a uniform FULL graph on all padded
        requests, which go on from states; else on the real tokens, and rows after them become zero."""
        entry = step.entry if step.is_full else None
        seen = step.real if entry is None else step.extents
        rows = seen.tokens
        starts = self._fields["query_start_loc"][: seen.reqs + 1]
        positions = self._fields["positions"][:rows]
        indices = self._fields["state_indices"][: seen.reqs]
        if entry is not None and entry.query_len is not None:
            segments = uniform_segments(positions, entry.query_len)
        else:
            segments = ragged_segments(positions, starts)
        if rows < out.shape[0]:
            out[rows:].zero_()
        out[:rows] = recurrence(self.caches[layer], segments, positions, indices, inputs[:rows], decays[:rows])


def uniform_segments(positions: torch.Tensor, query_len: int) -> _Segments:
    """Return the segments of a uniform decode: all requests are past their prompt, so each has a state."""
    owner = torch.arange(len(positions), device=positions.device) // query_len
    first = owner * query_len
    return _Segments(owner, first, first + query_len, torch.zeros_like(owner, dtype=torch.bool))


def ragged_segments(positions: torch.Tensor, starts: torch.Tensor) -> _Segments:
    """Return the segments of any batch, whose requests begin at ``starts int32[R + 1]``."""
    tokens = torch.arange(len(positions), device=positions.device)
    owner = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    request = owner.clamp(max=len(starts) - 2)
    first, end = starts[request].long(), starts[request + 1].long()
    return _Segments(owner, first, end, positions[first.clamp(max=len(positions) - 1)] == 0)


def recurrence(
    cache: StateCache,
    segments: _Segments,
    positions: torch.Tensor,
    indices: torch.Tensor,
    inputs: torch.Tensor,
    decays: torch.Tensor,
) -> torch.Tensor:
    """Return the state after each token, ``[T, width]``, and store those that a later step can go on from.

    In the parallel form, which takes T * T * width: for small models. Nothing is multiplied by zero to leave it out,
    since padding may hold NaN.

    :param positions: ``int64[T]``
    :param indices: ``int32[R]``: the row of each request in the pool.
    """
    owner, first, dtype = segments.owner, segments.first, cache.states.dtype
    tokens, width = torch.arange(len(owner), device=owner.device), inputs.shape[1]
    real = owner < len(indices)
    rows = torch.where(real, indices[owner.clamp(max=len(indices) - 1)].long(), NULL_STATE)
    values, fading = inputs.to(dtype), torch.where(real[:, None], decays.to(dtype), 0)
    total = fading.cumsum(0)
    earlier = (owner[:, None] == owner) & (tokens[:, None] >= tokens)
    spread = (total[:, None] - total).exp() * values
    states = torch.where(earlier[:, :, None], spread, 0).sum(1)
    before = positions[first.clamp(max=len(tokens) - 1)] - 1
    initial = cache.states[rows, before % cache.positions]
    carried = (total - total[first.clamp(max=len(tokens) - 1)] + fading[first.clamp(max=len(tokens) - 1)]).exp()
    states = states + torch.where((real & ~segments.begins)[:, None], carried * initial, 0)
    last = real & (tokens >= segments.end - cache.positions)
    place = torch.where(last, rows, NULL_STATE) * cache.positions + positions % cache.positions
    cache.states.view(-1, width).index_copy_(0, place, states)
    return states.to(inputs.dtype)
