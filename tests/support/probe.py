"""The reference backend with somebody who listens: what a test declares, counts and breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from capture_planner.modes import Refresh, Role
from capture_planner.plugins.backend import Backend, Executor, Metadata, Reservation, Scoring
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records.backend import Attention, PaddingContract, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from capture_planner_reference import Reference


class Probe(Reference):
    """The reference backend under another name, with a plan of its own and somebody who listens.

    ``heard`` is called before each call of the executor with its name, the group's reservation, and
    the metadata, where the call has it; what it raises, the backend raises.
    """

    name = "probe"

    def __init__(
        self,
        heard: Callable[[str, Reservation, Metadata | None], object] = lambda *_: None,
        *,
        refresh: Refresh = Refresh.HOST,
        padding: PaddingContract | None = None,
        workspace: int = 64,
    ) -> None:
        self.heard = heard
        self.numbers: tuple[int, ...] | None = (4, 2)
        """What every executor says its layout is."""
        self._refresh, self._padding, self._workspace = refresh, padding or PaddingContract(), workspace

    @hookimpl
    def capture_planner_backends(self) -> Sequence[Backend]:
        """A plugin that brings itself."""
        return (self,)

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """As given."""
        return self._padding

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """As given."""
        return self._refresh

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """As given."""
        return Workspace(device=self._workspace)

    def reserve(self, reservation: Reservation) -> Executor:
        """Wrap the reference executor."""
        self.heard("reserve", reservation, None)
        return _ReportingExecutor(self, reservation, super().reserve(reservation))


class _ReportingExecutor:
    def __init__(self, probe: Probe, reservation: Reservation, executor: Executor) -> None:
        self._probe, self._reservation, self._executor = probe, reservation, executor

    def prepare(self, metadata: Metadata) -> None:
        self._probe.heard("prepare", self._reservation, metadata)
        self._executor.prepare(metadata)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        self._probe.heard("attend", self._reservation, metadata)
        self._executor.attend(layer, query, out, scoring, metadata)

    def layout(self) -> tuple[int, ...] | None:
        self._probe.heard("layout", self._reservation, None)
        return self._probe.numbers

    def release(self) -> None:
        self._probe.heard("release", self._reservation, None)
        self._executor.release()
