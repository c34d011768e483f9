"""Recurrent layers: a pool of states in place of a KV cache, and the recurrence itself.

A state is a vector h. A token with the input x and the logarithm d of its decay makes exp(d) * h + x of it, element by
element, and the layer's output is the new state. A request begins with a state of zeros at its position 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from capture_planner.plugins.backend import NULL_STATE
from capture_planner_runner.execution.fields import Fields, TensorRef
from capture_planner_runner.execution.inputs import ForwardStep


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
class Segments:
    """Where the tokens of each request are in a batch: a value for each token, ``int[T]``."""

    owner: torch.Tensor
    """The row of its request in the batch; the number of requests for a token of none."""
    first: torch.Tensor
    """The first token of the request."""
    end: torch.Tensor
    """The token after its last one."""
    state: torch.Tensor
    """The request's row in the pool of states; the null state's for a token of none."""
    begins: torch.Tensor | None
    """Whether the request has no state yet, ``bool[T]``; None: all have one."""


class RecurrentLayers:
    """The recurrent layers of one role; of most models there are none."""

    def __init__(self, fields: Fields, caches: Sequence[StateCache]) -> None:
        self.caches = tuple(caches)
        self._fields = fields
        self._step: ForwardStep | None = None

    def persistent(self) -> Iterator[TensorRef]:
        """Yield the pool of each layer, which a forward reads and changes."""
        for layer, cache in enumerate(self.caches):
            yield f"states[{layer}]", cache, "states"

    def prepare(self, step: ForwardStep) -> None:
        """Note the step whose fields are filled."""
        self._step = step

    def recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor, out: torch.Tensor) -> None:
        """Run one layer on ``inputs`` and ``decays [T, width]``, as kernels do: of a uniform FULL graph on all padded
        requests, which go on from states; else on the real tokens, and rows after them become zero.
        """
        step = self._step
        assert step is not None, "prepare comes first"
        entry = step.entry if step.is_full else None
        seen = step.real if entry is None else step.extents
        rows = seen.tokens
        positions = self._fields["positions"][:rows]
        indices = self._fields["state_indices"][: seen.reqs]
        if entry is not None and entry.query_len is not None:
            segments = uniform_segments(indices, rows, entry.query_len)
        else:
            segments = ragged_segments(indices, positions, self._fields["query_start_loc"][: seen.reqs + 1])
        if rows < out.shape[0]:
            out[rows:].zero_()
        out[:rows] = recurrence(self.caches[layer], segments, positions, inputs[:rows], decays[:rows])


def uniform_segments(indices: torch.Tensor, num_tokens: int, query_len: int) -> Segments:
    """Return the segments of a uniform decode, whose requests are past their prompts and so have states.

    :param indices: ``int32[R]``: the row of each request in the pool of states.
    """
    owner = torch.arange(num_tokens, device=indices.device) // query_len
    first = owner * query_len
    return Segments(owner, first, first + query_len, indices[owner], None)


def ragged_segments(indices: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> Segments:
    """Return the segments of any batch, whose requests begin at ``starts int32[R + 1]``."""
    tokens = torch.arange(len(positions), dtype=starts.dtype, device=positions.device)
    owner = torch.searchsorted(starts[1:], tokens, right=True)
    request = owner.clamp(max=len(indices) - 1)
    first = starts[request]
    state = torch.where(owner < len(indices), indices[request], NULL_STATE)
    return Segments(owner, first, starts[request + 1], state, positions[first] == 0)


def recurrence(
    cache: StateCache, segments: Segments, positions: torch.Tensor, inputs: torch.Tensor, decays: torch.Tensor
) -> torch.Tensor:
    """Return the state after each token, ``[T, width]``, and store those that a later step can go on from.

    In the parallel form, which takes T * T * width elements: for small models. Padding is behind all real tokens, and
    nothing of it is multiplied by zero to be left out, since it may hold NaN.

    :param positions: ``int64[T]``
    """
    owner, first, size = segments.owner, segments.first, cache.positions
    tokens, dtype = torch.arange(len(owner), device=owner.device), cache.states.dtype
    fading = decays.to(dtype)
    total = fading.cumsum(0)
    earlier = (owner[:, None] == owner) & (tokens[:, None] >= tokens)
    spread = (total[:, None] - total).exp() * inputs.to(dtype)
    states = torch.where(earlier[:, :, None], spread, 0).sum(1)
    before = cache.states[segments.state, (positions[first] - 1) % size]
    carried = (total - (total - fading)[first]).exp() * before
    states += carried if segments.begins is None else torch.where(segments.begins[:, None], 0, carried)
    kept = torch.where(tokens >= segments.end - size, segments.state, NULL_STATE)
    cache.states.flatten(0, 1).index_copy_(0, kept * size + positions % size, states)
    return states.to(inputs.dtype)
