"""The attention and the recurrence of one role: prepared before each forward, called by its layers, released last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import attrs
import numpy as np
import torch

from capture_planner.errors import BackendError, CapturePlannerError, RunError, class_and_message
from capture_planner.modes import Role
from capture_planner.plugins.backend import (
    NULL_SLOT,
    NULL_STATE,
    ContextExecutor,
    Executor,
    LayerCache,
    Metadata,
    Scoring,
)
from capture_planner.records.backend import Lifetime
from capture_planner.records.batch import Entry
from capture_planner.records.plan import GroupPlan
from capture_planner_runner.execution import padding
from capture_planner_runner.execution.context import ALONE, ContextRanks
from capture_planner_runner.execution.fields import Extents, FieldBuffer, Fields, TensorRef
from capture_planner_runner.execution.guards import GraphState
from capture_planner_runner.execution.inputs import Array, ForwardStep, StepInputs
from capture_planner_runner.execution.updates import Updates


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
        # A PIECEWISE graph calls this between its pieces, on real rows: only a FULL graph has padded requests.
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
    # Padding is behind the last request: it takes that one's values to stay in range, and the null state.
    request = owner.clamp(max=len(indices) - 1)
    first = starts[request]
    state = torch.where(owner < len(indices), indices[request], NULL_STATE)
    return Segments(owner, first, starts[request + 1], state, positions[first] == 0)


def recurrence(
    cache: StateCache, segments: Segments, positions: torch.Tensor, inputs: torch.Tensor, decays: torch.Tensor
) -> torch.Tensor:
    """Return the state after each token, ``[T, width]``, and store those that a later step can go on from.

    A state is a vector h. A token with the input x and the logarithm d of its decay makes exp(d) * h + x of it, element
    by element, and the layer's output is the new state. A request begins with a state of zeros at its position 0.

    In the parallel form, which takes T * T * width elements: for small models. Padding is behind all real tokens, and
    nothing of it is multiplied by zero to be left out, since it may hold NaN.

    :param positions: ``int64[T]``
    """
    owner, first, size = segments.owner, segments.first, cache.positions
    tokens, dtype = torch.arange(len(owner), device=owner.device), cache.states.dtype
    fading = decays.to(dtype)
    total = fading.cumsum(0)
    earlier = (owner[:, None] == owner) & (tokens[:, None] >= tokens)
    # For pairs that are left out below, exp may be inf: hence `where`, since inf * 0 is NaN.
    spread = (total[:, None] - total).exp() * inputs.to(dtype)
    states = torch.where(earlier[:, :, None], spread, 0).sum(1)
    # Of a request that begins, at position 0, this is an earlier request's state, which `begins` leaves out.
    before = cache.states[segments.state, (positions[first] - 1) % size]
    carried = (total - (total - fading)[first]).exp() * before
    states += carried if segments.begins is None else torch.where(segments.begins[:, None], 0, carried)
    # A row has `size` places: earlier tokens of a long chunk would be written over, in an order that is not defined.
    kept = torch.where(tokens >= segments.end - size, segments.state, NULL_STATE)
    cache.states.flatten(0, 1).index_copy_(0, kept * size + positions % size, states)
    return states.to(inputs.dtype)


_SCALARS = ("max_query_len", "max_seq_len")


@attrs.frozen(kw_only=True, eq=False)
class GroupRun:
    """One attention group with what executes it."""

    plan: GroupPlan
    executor: Executor
    caches: Mapping[int, LayerCache]
    workspace: torch.Tensor
    label: str
    """Backend, distribution and version, for messages."""


class _HostFields(Mapping[str, Array]):
    """A step's metadata on the host, as one group declares it, padded when it is asked for."""

    def __init__(self, buffers: Mapping[str, FieldBuffer], inputs: StepInputs, seen: Extents, num_tokens: int) -> None:
        self._buffers, self._inputs, self._seen, self._num_tokens = buffers, inputs, seen, num_tokens

    def __getitem__(self, name: str) -> Array:
        value, buffer = self._inputs.declared[name], self._buffers.get(name)
        if buffer is None:
            # Only on the host: no buffer says how far to pad it.
            return value
        rows = self._seen.rows(buffer.field)
        if rows <= len(value):
            return value[:rows]
        fill = padding.fill_of(buffer, value, self._num_tokens)
        return np.concatenate((value, np.full((rows - len(value), *value.shape[1:]), fill, value.dtype)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs.declared)

    def __len__(self) -> int:
        return len(self._inputs.declared)


class RoleAttention:
    """The attention groups of one role.

    :param updates: stores keys and values.
    :param max_model_len: the longest sequence that a FULL graph is prepared for.
    :param context: the ranks that share the keys and values of each request.
    """

    def __init__(
        self,
        role: Role,
        groups: Sequence[GroupRun],
        fields: Fields,
        updates: Updates,
        max_model_len: int,
        context: ContextRanks = ALONE,
    ) -> None:
        self.groups = tuple(groups)
        self.metadata: dict[str, Metadata] = {}
        """Metadata of the prepared step, by the group's name."""
        self._role = role
        self._fields = fields
        self._updates = updates
        self._max_model_len = max_model_len
        self.context = context
        self._group_of = {layer: group for group in groups for layer in group.caches}
        frozen = {g.plan.name: [f.name for f in g.plan.padding.fields if f.lifetime is Lifetime.FROZEN] for g in groups}
        self._frozen = {group: [name for name in names if name in _SCALARS] for group, names in frozen.items()}
        """The frozen fields of each group that are scalars of a step's metadata."""

    def persistent(self) -> Iterator[TensorRef]:
        for group in self.groups:
            yield f"{self._role.value}.{group.plan.name}.workspace", group, "workspace"
            for layer, cache in group.caches.items():
                yield f"{self._role.value}.keys[{layer}]", cache, "keys"
                yield f"{self._role.value}.values[{layer}]", cache, "values"

    def caches(self) -> Iterator[tuple[int, LayerCache]]:
        """Yield each layer with its cache, in the model's order."""
        for layer, group in sorted(self._group_of.items()):
            yield layer, group.caches[layer]

    def prepare(self, step: ForwardStep) -> None:
        """Let each backend do its host work for a step whose fields are filled."""
        self._describe(step)
        for group in self.groups:
            try:
                group.executor.prepare(self.metadata[group.plan.name])
            except Exception as error:
                raise self._blamed(group, step.entry, "prepare", error) from error

    def _describe(self, step: ForwardStep) -> None:
        entry, inputs = step.entry, step.inputs
        if entry is not None and step.is_full:
            # A graph bakes these in, so they are the most that it can ever see.
            seen, query, length = step.extents, entry.tokens_each or entry.num_tokens, self._max_model_len
        else:
            # Around attention a PIECEWISE graph is padded; attention itself runs outside, on real rows.
            seen = step.real
            query = int(np.diff(inputs.query_start_loc).max(initial=0))
            length = int(inputs.seq_lens.max(initial=0))
        for group in self.groups:
            name = group.plan.name
            host = _HostFields(self._fields.by_group[name], inputs, seen, step.real.tokens)
            self.metadata[name] = Metadata(
                entry=entry,
                for_capture=step.for_capture,
                num_reqs=seen.reqs,
                num_tokens=seen.tokens,
                max_query_len=query,
                max_seq_len=length,
                fields=self._fields.views(name, seen),
                host=host,
            )

    def seen_rows(self) -> int:
        """Return the tokens that attention sees in the step that is prepared."""
        return next(iter(self.metadata.values())).num_tokens  # all groups see the same

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
    ) -> None:
        """Store keys and values, and attend; rows that attention does not see become zero."""
        group = self._group_of[layer]
        metadata = self.metadata[group.plan.name]
        rows = metadata.num_tokens
        # From the field, not from the host: a replay reads the slots of its own step there.
        slots = self._fields["slot_mapping"][:rows]
        if self.context.size > 1:
            slots = self.context.stored(slots)
        # Before attention, which reads the keys of this step from the cache.
        self._updates.store(group.caches[layer], slots, keys[:rows], values[:rows])
        if rows < out.shape[0]:
            # The rest of the model reads them, and garbage may be NaN, which some operators spread.
            out[rows:].zero_()
        try:
            if self.context.size > 1:
                executor = cast("ContextExecutor", group.executor)
                self.context.attend(executor, layer, query[:rows], out[:rows], scoring, metadata)
            else:
                group.executor.attend(layer, query[:rows], out[:rows], scoring, metadata)
        except Exception as error:
            raise self._blamed(group, metadata.entry, f"attend of layer {layer}", error) from error

    def graph_state(self) -> GraphState:
        """Return the host's numbers that a graph of the prepared step bakes in."""
        frozen, layouts = {}, {}
        for group in self.groups:
            name = group.plan.name
            metadata = self.metadata[name]
            # Around the attention of a PIECEWISE graph nothing is baked in: it runs outside, with metadata of its own.
            if metadata.is_full:
                for scalar in self._frozen[name]:
                    frozen[f"{name}.{scalar}"] = getattr(metadata, scalar)
                try:
                    layout = group.executor.layout()
                    # Compared at every replay: a tensor would be read from the device, a list may have changed.
                    if layout is not None and type(layout) is not tuple:
                        raise TypeError(f"it returned {layout!r}, not a tuple of integers or None")
                except Exception as error:
                    raise self._blamed(group, metadata.entry, "layout", error) from error
                layouts[name] = layout
        return GraphState(frozen, layouts)

    def release(self) -> None:
        """Release all backends, and raise the first error afterwards."""
        errors = []
        for group in self.groups:
            try:
                group.executor.release()
            except Exception as error:
                # The backends after it hold memory too.
                errors.append(self._blamed(group, None, "release", error))
        if errors:
            raise errors[0]

    def _blamed(self, group: GroupRun, entry: Entry | None, call: str, error: Exception) -> Exception:
        """Return an error that names the backend, the role and the entry; ours are left as they are."""
        if isinstance(error, (CapturePlannerError, torch.OutOfMemoryError)):
            # Out of memory is not the backend's fault: a capture drops the graph and goes on.
            return error
        step = "" if call == "release" else f", {entry or 'eager step'}"
        where = f"{self._role.value}, group {group.plan.name}{step}"
        message = class_and_message(error)
        return BackendError(f"{group.label} broke in {call} ({where}): {message}; tell its authors")


def _no_state(layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    raise RunError(f"recurrent layer {layer} has no state here; run the model without recurrent layers")


@attrs.frozen(eq=False)
class LayerCalls:
    """An ``Attend`` of one forward."""

    _attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Scoring], torch.Tensor]
    _slots: torch.Tensor
    """``int64[T]``: the slots that the tokens are stored in; the null slot for padding."""
    _recur: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] = _no_state

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        return self._attend(layer, query, keys, values, scoring)

    def recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        return self._recur(layer, inputs, decays)

    @property
    def real(self) -> torch.Tensor:
        # A graph pads tokens alone or requests too, and in both the slots of padding are filled.
        return self._slots != NULL_SLOT
