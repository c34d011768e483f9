"""Guards: what a graph baked in, compared with what is there now, before every replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch

from capture_planner.entry import Entry
from capture_planner.errors import GuardError
from capture_planner.models.contract import Weight
from capture_planner.modes import Role

Tensors = Callable[[], Sequence[torch.Tensor]]
"""Returns the persistent tensors as they are now, always in the same order."""


class PointerGuard:
    """Pointers and shapes of everything that a role's graphs touch, as they were before capture.

    Buffers are asked for anew at each check, and weights are read from their modules, so that a
    replaced object is seen as well as a moved one.
    """

    def __init__(self, names: Sequence[str], buffers: Tensors, weights: Iterable[Weight]) -> None:
        self._names, self._buffers = tuple(names), buffers
        self._weights = tuple(weights)
        self._slots = [
            (module._parameters if attribute in module._parameters else module._buffers, attribute)
            for _, module, attribute in self._weights
        ]
        self._kept = list(self._buffers())
        self._pointers = [tensor.data_ptr() for tensor in self._kept]
        self._shapes = [tensor.shape for tensor in self._kept]
        self._weight_pointers = self._weights_now()

    def check(self, who: str) -> None:
        """Raise ``GuardError`` with the name of what moved; ``who`` names role and entry."""
        now = self._buffers()
        if [t.data_ptr() for t in now] != self._pointers or [t.shape for t in now] != self._shapes:
            self._refuse_buffer(who, now)
        weights = self._weights_now()
        if weights != self._weight_pointers:
            name = next(
                w[0] for w, a, b in zip(self._weights, weights, self._weight_pointers, strict=True) if a != b
            )
            raise GuardError(
                f"{who}: the weight {name} is not where it was at capture; load weights in place "
                "(copy_ into the old tensor), or capture again"
            )

    def _weights_now(self) -> list[int]:
        return [0 if (found := slots.get(name)) is None else found.data_ptr() for slots, name in self._slots]

    def _refuse_buffer(self, who: str, now: Sequence[torch.Tensor]) -> None:
        for name, tensor, pointer, shape in zip(self._names, now, self._pointers, self._shapes, strict=True):
            if tensor.shape != shape:
                raise GuardError(
                    f"{who}: {name} has shape {list(tensor.shape)}, at capture it had {list(shape)}"
                )
            if tensor.data_ptr() != pointer:
                raise GuardError(
                    f"{who}: {name} is not where it was at capture; write into it instead of replacing it"
                )


@attrs.frozen
class Baked:
    """The host's numbers that one graph holds."""

    frozen: Mapping[str, int]
    """Frozen fields by ``group.name``."""
    layouts: Mapping[str, tuple[int, ...] | None]
    """Each group's plan layout."""

    def check(self, now: Baked, who: str) -> None:
        """Raise ``GuardError`` with the name of what differs."""
        if now == self:
            return
        for name, value in self.frozen.items():
            if now.frozen.get(name) != value:
                raise GuardError(
                    f"{who}: {name} is baked in as {value}, and this step has {now.frozen.get(name)}; "
                    "plan it at its worst case"
                )
        for group, layout in self.layouts.items():
            if now.layouts.get(group) != layout:
                raise GuardError(
                    f"{who}: the plan layout of the group {group} was {layout} at capture and is "
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
