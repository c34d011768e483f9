"""What stands for attention and recurrence in a traced forward: operators that no compiler looks into."""

from __future__ import annotations

import attrs
import torch

from capture_planner.runtime.models.protocols import Scoring


@torch.library.custom_op("capture_planner::attend", mutates_args=())
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, call: int
) -> torch.Tensor:
    """Stand for an ``Attend`` of a forward, by its number in the forward."""
    raise NotImplementedError("this operator is traced, and never run")


@attend.register_fake
def _(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, call: int
) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("capture_planner::recur", mutates_args=())
def recur(inputs: torch.Tensor, decays: torch.Tensor, layer: int) -> torch.Tensor:
    """Stand for an ``Attend.recur`` of a forward."""
    raise NotImplementedError("this operator is traced, and never run")


@recur.register_fake
def _(inputs: torch.Tensor, decays: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(inputs)


ATTEND, RECUR = torch.ops.capture_planner.attend.default, torch.ops.capture_planner.recur.default


@attrs.frozen(eq=False)
class TracedCalls:
    """An ``Attend`` that leaves an operator in the trace for each call."""

    real: torch.Tensor
    attended: list[tuple[int, float, float | None]] = attrs.Factory(list)
    """Of each call its layer, the scale of its scores and their softcap."""

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.attended.append((layer, scoring.scale, scoring.softcap))
        out: torch.Tensor = ATTEND(query, keys, values, scoring.sinks, len(self.attended) - 1)
        return out

    def recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = RECUR(inputs, decays, layer)
        return out
