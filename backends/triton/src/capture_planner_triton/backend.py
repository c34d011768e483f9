"""Where the kernel runs, and what a graph of it needs: nothing but memory for partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.records.backend import Attention, PaddingContract, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits
from capture_planner_triton.geometry import (
    ITEMSIZE,
    MAX_GROUP,
    MAX_GROUP_BYTES,
    MAX_HEAD_DIM,
    Geometry,
    geometry,
    partial_bytes,
)

if TYPE_CHECKING:
    from capture_planner.runtime.executor import Executor, Reservation

MIN_VERSION = (3, 6)
"""The oldest Triton that the kernel is tested on."""

MIN_TORCH = (2, 11)
"""The oldest torch whose CUDA builds bring such a Triton along."""


def refusal(model: Attention) -> str | None:
    """Return why the kernel cannot compute these layers on any device, or None."""
    if model.latent is not None:
        return (
            "latent attention has keys and values of two widths in one cache, which the kernel does not read"
        )
    if model.decode_context > 1:
        return (
            f"{model.decode_context} decode-context ranks need the log-sum-exp, which attend does not return"
        )
    if model.dtype not in ITEMSIZE:
        return f"activations in {model.dtype.value}; the kernel takes {_DTYPES}"
    if model.kv_dtype is not model.dtype:
        return (
            f"a {model.kv_dtype.value} KV cache under {model.dtype.value} activations; the kernel scales "
            "and converts nothing"
        )
    if model.head_dim > MAX_HEAD_DIM:
        return f"head dimension {model.head_dim} is more than {MAX_HEAD_DIM}, the widest tile of keys"
    group = model.num_heads // model.num_kv_heads
    if group > MAX_GROUP:
        return f"{group} query heads a KV head are more than the {MAX_GROUP} rows of a tile"
    taken = group * model.head_dim * ITEMSIZE[model.dtype]
    if taken > MAX_GROUP_BYTES:
        return (
            f"{group} query heads a KV head of dimension {model.head_dim} take {taken} bytes, and a tile has "
            f"{MAX_GROUP_BYTES}"
        )
    return None


class Triton:
    """Paged attention in one Triton kernel, and one more that merges split keys."""

    name = "triton"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """ALWAYS on SM80 and newer, for ordinary heads in bfloat16, float16 or float32; else NEVER.

        Older devices have no bfloat16 tensor cores and no asynchronous copies to shared memory. On a
        CPU there is Triton's interpreter, which is for tests.
        """
        refused = _missing(environment) or refusal(model)
        if refused is not None:
            return Support(level=GraphSupport.NEVER, reason=f"Triton on {_device(environment)}: {refused}.")
        return Support(
            level=GraphSupport.ALWAYS,
            reason=f"Triton on {_device(environment)} reads lengths and pages on the device, in a grid of "
            "the padded extents, so a graph holds any batch.",
        )

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Nothing beyond the runner's common fields: a row without queries is skipped."""
        return PaddingContract()

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph: no value is read on the host."""
        return Refresh.IN_GRAPH

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Partial outputs and sums of split keys, in float32, for the full graph that needs most.

        Eager and piecewise steps split as far as that memory goes.
        """
        graphs = [entry for entry in entries if entry.mode is GraphMode.FULL]
        if _missing(environment) or refusal(model) or not graphs:
            return Workspace(formula="0: there is no full graph")
        most, splits, tokens = max(_need(model, environment, entry) for entry in graphs)
        if not most:
            return Workspace(formula="0: every full graph fills the device without splitting keys")
        return Workspace(
            device=most,
            formula=f"split keys, float32: splits {splits} * tokens {tokens} * heads {model.num_heads} * "
            f"(head_dim {model.head_dim} + 1) * 4",
        )

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group; partial results go into the reservation's workspace.

        Raises ``BackendError`` where Triton is missing, the device is no GPU, or the group is one
        that ``support`` refuses.
        """
        # Planning needs no torch, so that this module must not import it.
        from capture_planner_triton.executor import TritonExecutor

        return TritonExecutor(reservation)


def of_entry(model: Attention, environment: Environment, entry: Entry) -> Geometry:
    """Return how a full graph is cut. Two graphs of the same extents are cut alike."""
    return geometry(
        model,
        environment.device.multiprocessors or 1,
        num_reqs=entry.num_reqs or 1,
        num_tokens=entry.num_tokens,
        query_len=entry.query_len,
        max_seq_len=model.max_model_len,
    )


def _need(model: Attention, environment: Environment, entry: Entry) -> tuple[int, int, int]:
    """Return the bytes of an entry's partial results, with the splits and tokens that they are of."""
    splits = of_entry(model, environment, entry).splits
    return (partial_bytes(model, entry.num_tokens, splits) if splits > 1 else 0, splits, entry.num_tokens)


def _missing(environment: Environment) -> str | None:
    """Return what the machine lacks, or None."""
    device = environment.device
    if device.kind is not DeviceKind.CUDA:
        return "Triton compiles for GPUs, and its interpreter is for tests; use the reference backend"
    if device.sm < (8, 0):
        return "the kernel needs SM80 or newer"
    triton, torch = environment.package("triton"), environment.package("torch")
    if triton is not None:
        return None if triton >= MIN_VERSION else "the kernel needs Triton 3.6 or newer"
    # An environment need not name it: torch's CUDA builds depend on a Triton of their own.
    return (
        None if torch is not None and torch >= MIN_TORCH else "neither triton 3.6 nor torch 2.11 is installed"
    )


def _device(environment: Environment) -> str:
    major, minor = environment.device.sm
    cuda = environment.device.kind is DeviceKind.CUDA
    return f"{environment.device.name} (SM{major}{minor})" if cuda else f"the CPU {environment.device.name}"


_DTYPES = ", ".join(kind.value for kind in ITEMSIZE if kind is not DataType.FLOAT32) + " and float32"
