"""The reference backend: dense masked attention over gathered pages, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.plugins.backend import Attention, Executor, PaddingContract, Reservation, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.spec import Limits


class Reference:
    """Attention in torch operators whose shapes depend on padded extents alone.

    The operators read lengths and block tables from tensors, so nothing is baked in: any batch fits any
    graph that is large enough, and a draft chain can refresh itself.
    """

    name = "reference"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """ALWAYS, everywhere: a CUDA graph on a GPU, a recorded graph on a CPU."""
        graph = "CUDA" if environment.device.kind is DeviceKind.CUDA else "recorded"
        return Support(
            level=GraphSupport.ALWAYS,
            reason=f"Plain torch attention on {environment.device.name} reads lengths and pages from "
            f"tensors, so a {graph} graph holds any batch.",
        )

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare no fields beyond the common ones: empty rows are masked by ``seq_lens`` 0."""
        return PaddingContract()

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph: nothing is read on the host."""
        return Refresh.IN_GRAPH

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Zero bytes: intermediates come from the graph's pool."""
        return Workspace(formula="0: intermediates live in the graph's pool")

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group; it allocates nothing.

        Raises ``BackendError`` for latent attention, an NVFP4 cache, and caches of another shape than the group's.
        """
        # Imported here because planning must not import torch.
        from capture_planner_reference.executor import ReferenceExecutor

        return ReferenceExecutor(reservation)
