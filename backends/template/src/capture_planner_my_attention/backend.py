"""What the planner asks. Nothing here imports torch or looks at a device: a plan may be for another."""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.plugins.backend import Attention, Executor, PaddingContract, Reservation, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits


class MyBackend:
    name = "my-attention"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        # Replace: how far your kernels go in a full graph, from environment.device and .packages. The
        # reason names the hardware or the version that decides.
        if model.latent or model.sinks or not model.causal or model.decode_context > 1:
            return Support(level=GraphSupport.NEVER, reason="It has causal attention with ordinary heads alone.")
        return Support(level=GraphSupport.ALWAYS, reason="Lengths and pages are read from tensors.")

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        # Replace: fields that your kernels read in addition to the runner's, and other fills that they need.
        return PaddingContract()

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        # Replace by HOST where prepare() has work to do before each replay.
        return Refresh.IN_GRAPH

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        # Replace: bytes for the largest entry. They are allocated once, and never grow.
        return Workspace(formula="0: intermediates are in the graph's pool")

    def reserve(self, reservation: Reservation) -> Executor:
        from capture_planner_my_attention.executor import MyExecutor

        return MyExecutor(reservation)
