"""vLLM's own attention backends as backends of capture-planner: FLASH_ATTN and TRITON_ATTN of release 0.33.

Their metadata builders and kernels run as vLLM's V2 model runner calls them, so that the conformance suite and the
runner test what vLLM captures. What they support is answered without vLLM, by the emulation of its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capture_planner.errors import BackendError
from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.plugins.backend import (
    Attention,
    Axis,
    Executor,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Reservation,
    Support,
    Where,
    Workspace,
)
from capture_planner.records.batch import Entry
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.spec import Limits

if TYPE_CHECKING:
    from capture_planner_vllm.emulation.attention import AttentionChoice

RELEASE = (0, 33)
"""The release of vLLM whose builders and kernels are called."""


class VllmAttention:
    """One attention backend of vLLM.

    :param engine: its name in vLLM, ``FLASH_ATTN`` or ``TRITON_ATTN``.
    :param zeroes: write zeros to the rows that no request owns. vLLM's outputs come from ``torch.empty``, and
        FlashAttention leaves those rows as they are (vllm#57136); False shows it.
    :param frozen: build a replay with the maxima that its graph was captured with. vLLM's runner passes the batch's,
        from which FlashAttention 3 derives another layout of its schedule than the captured kernel reads; False shows
        it.
    """

    # vLLM's layers take keys and values in one tensor.
    packs_cache = True

    def __init__(self, engine: str, *, zeroes: bool = True, frozen: bool = True) -> None:
        self.engine, self.zeroes, self.frozen = engine, zeroes, frozen
        self.name = f"vllm_{engine.lower()}"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """Answer as vLLM's builders do: ALWAYS with Triton and FlashAttention 3 or 4, UNIFORM_BATCH with 2.

        NEVER without vLLM 0.33 or a GPU, and for layers that vLLM's backend refuses.
        """
        where = f"vLLM's {self.engine} on {environment.device.name}"
        if (refused := self._refusal(model, environment)) is not None:
            return Support(level=GraphSupport.NEVER, reason=f"{where}: {refused}.")
        level = _choice(model, environment).support(self.engine)
        return Support(level=level, reason=f"{where}: its metadata builder reports {level.name}.")

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare the numbers that the host passes to a captured kernel; vLLM pads the common fields as we do.

        Padded requests have no tokens and length 0, and their pages are page 0 (``prepare_pos_seq_lens`` and
        ``gather_block_tables`` of the V2 runner). FlashAttention's schedule is the builder's own buffer.
        """
        if self._refusal(model, environment) is not None:
            return PaddingContract()
        names = ("max_query_len", "max_seq_len") if self.engine == "FLASH_ATTN" else ("max_query_len",)
        return PaddingContract(fields=tuple(_frozen(name) for name in names))

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph, as both builders can update the metadata of a draft decode there."""
        in_graph = self._refusal(model, environment) is None
        return Refresh.IN_GRAPH if in_graph and _choice(model, environment).refreshes(self.engine) else Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Zero bytes: vLLM's builders allocate what their kernels need."""
        return Workspace(formula="0: vLLM's metadata builder allocates its scratch and its schedule")

    def reserve(self, reservation: Reservation) -> Executor:
        """Make vLLM's layers and metadata builder for one group.

        Raises ``BackendError`` where vLLM 0.33 is missing or refuses the group.
        """
        try:
            import vllm
        except ImportError as error:
            raise BackendError(
                f"{self.name}: vLLM cannot be imported ({error}); install vllm=={'.'.join(map(str, RELEASE))}.*"
            ) from None
        if tuple(vllm.__version_tuple__[:2]) != RELEASE:
            raise BackendError(
                f"{self.name}: it calls vLLM 0.33, and {vllm.__version__} is installed; install vllm==0.33.0"
            )
        # Imported here because planning must import neither torch nor vLLM.
        from capture_planner_vllm.attention.executor import VllmExecutor

        return VllmExecutor(reservation, self.engine, zeroes=self.zeroes, frozen=self.frozen)

    def _refusal(self, model: Attention, environment: Environment) -> str | None:
        """Return why the backend does not run these layers there, or None."""
        if environment.device.kind is not DeviceKind.CUDA:
            return "it runs on GPUs alone"
        version = environment.package("vllm")
        if version is None or version[:2] != RELEASE:
            return f"vLLM 0.33 is not installed{'' if version is None else ', but ' + environment.packages['vllm']}"
        if model.latent is not None:
            return "latent attention has other backends in vLLM"
        if model.kv_dtype is not model.dtype:
            return f"the runner writes a KV cache of {model.dtype.value} alone, without vLLM's scales"
        if model.decode_context > 1:
            return "decode context parallelism needs vLLM's process groups"
        return _choice(model, environment).unusable(self.engine)


def _choice(model: Attention, environment: Environment) -> AttentionChoice:
    # Imported here because every command asks for the backends, and few for vLLM's.
    from capture_planner_vllm.emulation.attention import AttentionChoice
    from capture_planner_vllm.emulation.model import ModelFacts

    facts = ModelFacts(
        name="layers",
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_size=model.head_dim,
        max_len=model.max_model_len,
        sinks=model.sinks,
    )
    return AttentionChoice(capability=environment.device.sm, model=facts, dtype=model.dtype.value)


def _frozen(name: str) -> MetadataField:
    return MetadataField(name=name, axis=Axis.SCALAR, fill=Fill.WORST_CASE, lifetime=Lifetime.FROZEN, where=Where.HOST)
