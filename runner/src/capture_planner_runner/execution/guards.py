"""Guards: what a graph baked in, compared with what is there now, before every replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch

from capture_planner.errors import GuardError
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner_runner.execution.fields import TensorRef
from capture_planner_runner.models.protocols import Weight

_Place = tuple[int, torch.Size, tuple[int, ...]]
"""Where a tensor is: its address, shape and strides."""


class PointerGuard:
    """Where everything is that a role's graphs touch, as it was before capture.

    Tensors are read anew from whatever holds them, so that a replaced object is seen as well as a
    moved one. Of weights the address alone is compared: there are hundreds, at every replay.
    """

    def __init__(self, buffers: Iterable[TensorRef], weights: Iterable[Weight]) -> None:
        self._buffers, self._weights = tuple(buffers), tuple(weights)
        # A module's own dictionaries: its attribute access is many times slower.
        self._slots = [
            (module._parameters if name in module._parameters else module._buffers, name)
            for _, module, name in self._weights
        ]
        self._at_capture = self._buffers_now()
        self._weights_at_capture = self._weights_now()

    def check(self, label: str) -> None:
        """Raise ``GuardError`` with the name of what moved; ``label`` names role and entry."""
        buffers = self._buffers_now()
        if buffers != self._at_capture:
            self._refuse_buffer(label, buffers)
        # Also a tensor that was replaced by an equal one: the graph reads the old memory.
        weights = self._weights_now()
        if weights != self._weights_at_capture:
            pairs = zip(self._weights, weights, self._weights_at_capture, strict=True)
            name = next(weight[0] for weight, now, then in pairs if now != then)
            raise GuardError(
                f"{label}: the weight {name} is not where it was at capture; load weights in place "
                "(copy_ into the old tensor), or capture again"
            )

    def _buffers_now(self) -> list[_Place]:
        found = [getattr(holder, attribute) for _, holder, attribute in self._buffers]
        return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in found]

    def _weights_now(self) -> list[int]:
        found = [slots.get(name) for slots, name in self._slots]  # None: a bias that a layer does without
        return [0 if tensor is None else tensor.data_ptr() for tensor in found]

    def _refuse_buffer(self, label: str, buffers: list[_Place]) -> None:
        for (name, *_), now, then in zip(self._buffers, buffers, self._at_capture, strict=True):
            if now[1:] != then[1:]:
                was = f"at capture it had {list(then[1])} and {list(then[2])}"
                raise GuardError(f"{label}: {name} has shape {list(now[1])} and strides {list(now[2])}, {was}")
            if now != then:
                remedy = "write into it instead of replacing it"
                raise GuardError(f"{label}: {name} is not where it was at capture; {remedy}")


@attrs.frozen
class GraphState:
    """The host's numbers that one graph holds."""

    frozen: Mapping[str, int]
    """Frozen fields by ``group.name``."""
    layouts: Mapping[str, tuple[int, ...] | None]
    """Each group's plan layout."""

    def check(self, now: GraphState, label: str) -> None:
        """Raise ``GuardError`` with the name of what differs."""
        # Nearly every check ends here: names are looked for only once something differs.
        if now == self:
            return
        for name, value in self.frozen.items():
            if now.frozen.get(name) != value:
                raise GuardError(
                    f"{label}: {name} is baked in as {value}, and this step has {now.frozen.get(name)}; "
                    "plan it at its worst case"
                )
        for group, layout in self.layouts.items():
            if now.layouts.get(group) != layout:
                raise GuardError(
                    f"{label}: the plan layout of the group {group} was {layout} at capture and is "
                    f"{now.layouts.get(group)}; plan it with a fixed split and grid"
                )
        raise AssertionError("records differ in a part that they do not have")


def refuse_unpadded_requests(role: Role, entry: Entry) -> None:
    """Refuse a draft decode from a PIECEWISE graph, whatever plan says so.

    Such a graph pads tokens and not requests, so the rows that it pads read the page indices and the
    last tokens of an earlier batch (vllm#39773).
    """
    if role is Role.DRAFT_DECODE and entry.num_reqs is None:
        raise GuardError(
            f"{role.value}: {entry}: a draft decode reads what belongs to requests, and a PIECEWISE graph "
            "pads none; its padded rows would read pages of an earlier batch (vllm#39773). Plan it "
            "FULL_DECODE_ONLY or NONE"
        )
