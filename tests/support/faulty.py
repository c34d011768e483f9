"""Backends with one thing wrong, and one that declares more than it reads."""

from typing import Any

import numpy as np
import torch

from capture_planner.modes import GraphSupport
from capture_planner.records.backend import Axis, Bound, Fill, MetadataField, PaddingContract
from capture_planner_reference import Reference
from capture_planner_reference.executor import ReferenceExecutor

SKIPS = MetadataField(name="skips", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0)
OWNERS = MetadataField(
    name="owners", axis=Axis.TOKEN, fill=Fill.CONSTANT, value=0, dtype="int64", indexes=Bound.REQUESTS
)


class UnreadFields(Reference):
    """Declares fields that it does not read."""

    name = "declaring"
    fields: tuple[Any, ...] = (SKIPS,)
    executor = ReferenceExecutor

    def padding(self, role, model, environment):
        return PaddingContract(fields=self.fields)

    def reserve(self, reservation):
        return self.executor(reservation)


class DoubledOutput(UnreadFields):
    """Wrong wherever it runs: each output is doubled, with a graph or without one."""

    name = "doubling"
    fields = ()

    class executor(ReferenceExecutor):  # noqa: N801 - an attribute that is a class
        def attend(self, layer, query, out, scoring, metadata):
            super().attend(layer, query, out, scoring, metadata)
            out.mul_(2)


class TailReader(UnreadFields):
    """Adds up a field of its own as far as its buffer goes, which nobody fills behind the real rows."""

    name = "tail-reader"

    class executor(ReferenceExecutor):  # noqa: N801 - an attribute that is a class
        def __init__(self, reservation):
            super().__init__(reservation)
            self._skips = reservation.fields["skips"]

        def prepare(self, metadata):
            super().prepare(metadata)
            self._skips[: metadata.num_reqs] = 0

        def attend(self, layer, query, out, scoring, metadata):
            super().attend(layer, query, out, scoring, metadata)
            if metadata.is_full:
                out.add_((self._skips.sum() != 0).to(out.dtype))


class OwnerReader(UnreadFields):
    """Writes an index of its own for the real tokens, and gathers by it over the padded ones."""

    name = "owner-reader"
    fields = (OWNERS,)

    class executor(ReferenceExecutor):  # noqa: N801
        def __init__(self, reservation):
            super().__init__(reservation)
            self._owners = reservation.fields["owners"]

        def prepare(self, metadata):
            super().prepare(metadata)
            starts = np.asarray(metadata.host["query_start_loc"])
            real = int(starts[-1])
            owners = np.searchsorted(starts[1:], np.arange(real), side="right")
            self._owners[:real] = torch.from_numpy(owners)

        def attend(self, layer, query, out, scoring, metadata):
            super().attend(layer, query, out, scoring, metadata)
            if metadata.is_full:
                # Zero, unless an owner is none of the requests.
                lengths = metadata.fields["seq_lens"].index_select(0, self._owners[: len(out)])
                out.add_((lengths * 0)[:, None, None])


class ImpureSupport(Reference):
    """Answers support by how often it was asked."""

    name = "impure"

    def __init__(self):
        self._asked = 0

    def padding(self, role, model, environment):
        self._asked += 1
        return PaddingContract(fields=(SKIPS,) if self._asked % 2 else ())


class NoGraphs(Reference):
    """Runs in no graph."""

    name = "never"

    def support(self, role, model, environment):
        support = super().support(role, model, environment)
        return type(support)(level=GraphSupport.NEVER, reason="there is no kernel for this machine")
