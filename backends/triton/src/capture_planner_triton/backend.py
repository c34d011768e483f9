"""What the planner asks of the Triton kernels: support, fields, refresh and workspace."""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.plugins.backend import Attention, Executor, PaddingContract, Reservation, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits
from capture_planner_triton.geometry import entry_geometry, entry_partial_bytes, refusal

MIN_VERSION = (3, 6)
"""The oldest Triton that the kernel is tested on."""

FP8_SM = (8, 9)
"""The oldest device that converts FP8 E4M3."""

MIN_TORCH = (2, 11)
"""The oldest torch whose CUDA builds depend on such a Triton."""


class Triton:
    """Paged attention in one Triton kernel, and one more that merges split keys."""

    name = "triton"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """ALWAYS on SM80 and newer, for ordinary heads in bfloat16, float16 or float32; else NEVER.

        SM89 and newer take an FP8 KV cache, without scales. Triton's interpreter for CPUs is for tests.
        """
        refused = _missing(environment, model) or refusal(model)
        if refused is not None:
            return Support(level=GraphSupport.NEVER, reason=f"Triton on {_device(environment)}: {refused}.")
        return Support(
            level=GraphSupport.ALWAYS,
            reason=f"Triton on {_device(environment)} reads lengths and pages on the device, in a grid of "
            "the padded extents, so a graph holds any batch.",
        )

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare no fields beyond the common ones: a row without queries is skipped."""
        return PaddingContract()

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph: nothing is read on the host."""
        return Refresh.IN_GRAPH

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Partial outputs and sums of split keys, in float32, for the full graph that needs most.

        Eager and piecewise steps split into as many parts as that memory holds.
        """
        graphs = [entry for entry in entries if entry.mode is GraphMode.FULL]
        if _missing(environment, model) or refusal(model) or not graphs:
            return Workspace(formula="0: there is no full graph")
        # Ties go to the larger number of splits, then tokens, so that the formula is deterministic.
        size, splits, tokens = max(
            (
                entry_partial_bytes(model, environment, entry),
                entry_geometry(model, environment, entry).splits,
                entry.num_tokens,
            )
            for entry in graphs
        )
        if not size:
            return Workspace(formula="0: every full graph fills the device without splitting keys")
        return Workspace(
            device=size,
            formula=f"split keys, float32: splits {splits} * tokens {tokens} * heads {model.num_heads} * "
            f"(head_dim {model.head_dim} + 1) * 4",
        )

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group; partial results go into the reservation's workspace.

        Raises ``BackendError`` if the device is not a GPU, or ``support`` rejects the group.
        """
        # Imported here because planning must not import torch.
        from capture_planner_triton.executor import TritonExecutor

        return TritonExecutor(reservation)


def _missing(environment: Environment, model: Attention) -> str | None:
    """Return the requirement that the machine does not meet, or None."""
    device = environment.device
    if device.kind is not DeviceKind.CUDA:
        return "Triton compiles for GPUs, and its interpreter is for tests; use the reference backend"
    # Older devices have no bfloat16 tensor cores and no asynchronous copies to shared memory.
    if device.sm < (8, 0):
        return "the kernel needs SM80 or newer"
    if model.kv_dtype is DataType.FP8 and device.sm < FP8_SM:
        return "an fp8 KV cache needs SM89 or newer"
    triton, torch = environment.package("triton"), environment.package("torch")
    if triton is not None:
        return None if triton >= MIN_VERSION else "the kernel needs Triton 3.6 or newer"
    # An environment need not list Triton: torch's CUDA builds depend on one.
    return None if torch is not None and torch >= MIN_TORCH else "neither triton 3.6 nor torch 2.11 is installed"


def _device(environment: Environment) -> str:
    major, minor = environment.device.sm
    cuda = environment.device.kind is DeviceKind.CUDA
    return f"{environment.device.name} (SM{major}{minor})" if cuda else f"the CPU {environment.device.name}"
