"""Fields: the persistent buffers of a role's metadata, sized from the plan and its contracts.

Each declared field has one device tensor at full capacity, which graphs hold the pointer of. The
one invariant: past the real extent of the last step, every element holds the field's fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.plugins.backend import NULL_SLOT
from capture_planner.records.backend import Axis, Bound, Fill, Lifetime, MetadataField, Where
from capture_planner.records.plan import RolePlan

TensorRef = tuple[str, object, str]
"""A persistent tensor: its name, the object that holds it, and the attribute there."""

_INTEGER_POISON = {torch.int32: -(1 << 31), torch.int64: -(1 << 63), torch.uint8: 255, torch.bool: True}

SAMPLED_ROWS = "sampled_rows"
SAMPLED_COUNTS = "sampled_counts"
SAMPLED_FIELDS = (
    MetadataField(name=SAMPLED_ROWS, axis=Axis.TOKEN, fill=Fill.CONSTANT, value=0, dtype="int64", indexes=Bound.TOKENS),
    MetadataField(name=SAMPLED_COUNTS, axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0),
)
"""Fields of the target that only the runner reads: the rows of a batch whose next token is read, and their number
for each request. No plan names them, since no graph reads them."""
ACCEPTED_COUNTS = "accepted_counts"


def accepted_field(places: int) -> MetadataField:
    """Return a field of the target too, where acceptance is synthetic: how many drafts of each request are accepted.

    :param places: numbers of a request: one for each place where its step may begin, the furthest first.
    """
    return MetadataField(name=ACCEPTED_COUNTS, axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, scale=places)


REQUEST_KEYS = "request_keys"
PROPOSAL_ROWS = "proposal_rows"


def sampling_fields(no_draft: int | None) -> tuple[MetadataField, ...]:
    """Return the fields of a role whose tokens are sampled: the key of each row's request, and of the target the rows
    of ``Sampler.proposed``.

    :param no_draft: the row there for tokens that no draft follows; None: the role verifies none.
    """
    key = MetadataField(name=REQUEST_KEYS, axis=Axis.TOKEN, fill=Fill.CONSTANT, value=0, dtype="int64")
    if no_draft is None:
        return (key,)
    return key, MetadataField(name=PROPOSAL_ROWS, axis=Axis.TOKEN, fill=Fill.CONSTANT, value=no_draft, dtype="int64")


ACROSS_REPLICAS = "num_tokens_across_dp"
"""The field of plans with data-parallel ranks that has the tokens of each."""


@attrs.frozen(kw_only=True)
class Extents:
    """Extent of each axis: the capacity, or that of one batch or entry."""

    tokens: int
    reqs: int
    pages: int
    """Pages of one request."""
    adapters: int = 0
    """LoRA adapters that a forward has room for."""

    def along(self, axis: Axis) -> int:
        """Return the extent of an axis; a vector of pages has all requests' pages."""
        if axis is Axis.TOKEN:
            return self.tokens
        if axis is Axis.REQUEST:
            return self.reqs
        if axis is Axis.REQUEST_PLUS_ONE:
            return self.reqs + 1
        return self.reqs * self.pages if axis is Axis.PAGE else 1

    def rows(self, field: MetadataField) -> int:
        """Return the elements of a vector, or the rows of a table."""
        aligned = -(-self.along(field.axis) // field.align) * field.align
        return field.offset + field.scale * aligned

    def columns(self, field: MetadataField) -> int | None:
        """Return the columns of a table; None for a vector."""
        if field.inner is None:
            return None
        # A table row holds the pages of one request; `along` counts the pages of all requests.
        return self.pages if field.inner is Axis.PAGE else self.along(field.inner)


@attrs.define(eq=False)
class FieldBuffer:
    """One field's tensor, and how much of it is not the fill."""

    key: str
    """The field's name; with its group's name before it where a group's backend declared it."""
    field: MetadataField
    tensor: torch.Tensor
    """``[rows]``, or ``[rows, columns]`` of a table; on the device."""
    dirty_rows: int = 0
    dirty_columns: int = 0
    constant: int | None = attrs.field(init=False)
    """The fill where it is the same at every step, else None."""
    is_frozen: bool = attrs.field(init=False)
    """Whether its backend writes it once, at ``reserve``: no step touches it."""
    rows: int = attrs.field(init=False)
    columns: int = attrs.field(init=False)
    """Columns of a table; 1 of a vector."""

    array: np.ndarray[Any, Any] | None = attrs.field(init=False)
    """The same memory, where the host can write it: many times quicker than operators are."""

    def __attrs_post_init__(self) -> None:
        # Read at every step, so worked out once.
        self.array = self.tensor.numpy() if self.tensor.device.type == "cpu" else None
        self.rows = self.tensor.shape[0]
        self.columns = self.tensor.shape[1] if self.tensor.dim() == 2 else 1
        self._declare(self.field)

    def redeclare(self, field: MetadataField) -> None:
        """Treat the same tensor by another declaration, as an audit does; the next step fills all of it."""
        self._declare(field)
        self.spoil()

    def _declare(self, field: MetadataField) -> None:
        self.field = field
        # A fill that follows the batch has no value of its own, and so no constant.
        self.constant = NULL_SLOT if field.fill is Fill.NULL_SLOT else field.value
        self.is_frozen = field.lifetime is Lifetime.FROZEN

    def spoil(self) -> None:
        """Say that nothing is known of what it holds: the next step fills all of it."""
        self.dirty_rows, self.dirty_columns = self.rows, self.columns

    def view(self, extents: Extents) -> torch.Tensor:
        """Return the part that these extents cover, a table with all of its columns."""
        return self.tensor[: extents.rows(self.field)]


class Fields:
    """The device fields of one role, the runner's and its backends'; only the runner reads ``more``."""

    def __init__(
        self, role: RolePlan, capacity: Extents, device: torch.device, more: Iterable[MetadataField] = ()
    ) -> None:
        self.capacity = capacity
        self._buffers: dict[str, FieldBuffer] = {}
        self.by_group: dict[str, dict[str, FieldBuffer]] = {}
        for field in (*role.inputs, *more):
            self._add(field.name, field, device)
        for group in role.groups:
            mine = {field.name: self._buffers[field.name] for field in role.inputs}
            for field in group.padding.fields:
                common = mine.get(field.name)
                # A backend that declares a common field just as the runner does shares its buffer.
                if field.where is not Where.HOST and (common is None or common.field != field):
                    mine[field.name] = self._add(f"{group.name}.{field.name}", field, device)
            self.by_group[group.name] = mine

    def _add(self, key: str, field: MetadataField, device: torch.device) -> FieldBuffer:
        columns = self.capacity.columns(field)
        shape = (self.capacity.rows(field),) if columns is None else (self.capacity.rows(field), columns)
        tensor = torch.zeros(shape, dtype=getattr(torch, field.dtype), device=device)
        buffer = FieldBuffer(key, field, tensor)
        if buffer.constant:  # a fill of 0 is there already
            tensor.fill_(buffer.constant)
        self._buffers[key] = buffer
        return buffer

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._buffers[key].tensor

    def __iter__(self) -> Iterator[FieldBuffer]:
        return iter(self._buffers.values())

    def __contains__(self, key: object) -> bool:
        return key in self._buffers

    @property
    def memory(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self)

    def views(self, group: str, extents: Extents) -> Mapping[str, torch.Tensor]:
        """Return what a group's backend reads, cut to the extents when it is asked for."""
        return _Views(self.by_group[group], extents)

    def poison(self) -> None:
        """Overwrite what each step writes with what must never be read: far out of range, or NaN."""
        for buffer in self:
            # No step writes a frozen field again, so its values would be lost.
            if not buffer.is_frozen:
                poison(buffer.tensor)
                buffer.spoil()


@attrs.frozen
class _Views(Mapping[str, torch.Tensor]):
    """Device fields by name, cut to a step's extents."""

    buffers: Mapping[str, FieldBuffer]
    extents: Extents

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffers[name].view(self.extents)

    def __iter__(self) -> Iterator[str]:
        return iter(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)


def tensor_of(held: TensorRef) -> torch.Tensor:
    found: torch.Tensor = getattr(held[1], held[2])
    return found


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with an integer that no bound admits."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(_INTEGER_POISON[tensor.dtype])
