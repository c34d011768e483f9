"""What an attention backend declares: support, padding, workspace.

The declarations are data: they are written into the plan, they drive the padding, and the conformance kit attacks them.
``capture_planner.plugins.backend`` has the contract that they belong to.
"""

import enum
from collections.abc import Iterator
from typing import Annotated, Protocol

from capture_planner.errors import Problem
from capture_planner.modes import GraphSupport, Role
from capture_planner.records._base import ByteCount, Count, Interval, Pattern, duplicates, field, record
from capture_planner.records.batch_space import Deployment, max_query_len
from capture_planner.records.model import DataType, Latent, Model

FieldName = Annotated[str, Pattern(r"[a-z][a-z0-9_]{0,63}", "a lower-case identifier")]
Constant = Annotated[int, Interval(-(1 << 31), (1 << 31) - 1)]
Sentence = Annotated[str, Pattern(r"[\s\S]{1,500}", "a sentence of at most 500 characters")]


@record
class Support:
    """How far a backend can go inside a full graph, with the reason."""

    level: GraphSupport = field("the highest level it supports")
    reason: Sentence = field("why that level, naming the hardware or version that decides")
    max_num_reqs: Count | None = field("most requests it can capture; None: no cap", default=None)
    max_graphs: Count | None = field("most full graphs it can hold; None: no cap", default=None)


class Axis(enum.Enum):
    """The axis that a metadata field extends along."""

    TOKEN = "token"
    REQUEST = "request"
    REQUEST_PLUS_ONE = "request+1"
    PAGE = "page"
    SCALAR = "scalar"


class Fill(enum.Enum):
    """What the padded tail of a field is filled with."""

    CONSTANT = "constant"
    REPEAT_LAST = "repeat_last"
    REAL_TOTAL = "real_total"
    NULL_SLOT = "null_slot"
    WORST_CASE = "worst_case"


class Lifetime(enum.Enum):
    """How long a value holds."""

    EVERY_STEP = "every_step"
    FROZEN = "frozen"
    """Read on the host at capture and baked into the graph: must be equal at every replay."""


class Where(enum.Enum):
    """Where a field is read."""

    DEVICE = "device"
    HOST = "host"
    BOTH = "both"


class Bound(enum.Enum):
    """What an index field indexes: each value, real or padded, must be within its bounds."""

    TOKENS = "tokens"
    REQUESTS = "requests"
    PAGES = "pages"
    SLOTS = "slots"
    STATES = "states"
    POSITIONS = "positions"
    VOCABULARY = "vocabulary"
    WORKSPACE = "workspace"


@record
class MetadataField:
    """One field of attention metadata, and how it is padded.

    Its length is ``offset + scale * round_up(extent of axis, align)``; with ``inner`` it is a
    table of that many rows, each as long as the inner axis.
    """

    name: FieldName = field("the field's name")
    axis: Axis = field("the axis that it extends along")
    inner: Axis | None = field("second axis of a table; None: a vector", default=None)
    dtype: Annotated[str, Pattern("int32|int64|uint8|bool|float32", "a torch dtype")] = field(
        "element type", default="int32"
    )
    fill: Fill = field("content of the padded tail")
    value: Constant | None = field("the constant, where fill is constant", default=None)
    lifetime: Lifetime = field("time for which a value holds", default=Lifetime.EVERY_STEP)
    indexes: Bound | None = field("target of the index; None: not an index", default=None)
    where: Where = field("where it is read", default=Where.DEVICE)
    offset: Annotated[int, Interval(0, 4096)] = field("constant part of its length", default=0)
    scale: Annotated[int, Interval(1, 4096)] = field("elements per step of the axis", default=1)
    align: Annotated[int, Interval(1, 4096)] = field("the axis is rounded up to this", default=1)

    def _problems(self) -> Iterator[Problem]:
        if (self.fill is Fill.CONSTANT) != (self.value is not None):
            yield Problem(path=("value",), message="needed for the fill constant, and only for it")
        # uint8 and bool alone have a smaller range than ``Constant``.
        most = {"uint8": 255, "bool": 1}.get(self.dtype)
        if most is not None and self.value is not None and not 0 <= self.value <= most:
            yield Problem(path=("value",), message=f"{self.dtype} holds 0 to {most}, not {self.value}")
        # Their fill is a value of the step, and is written into a vector of integers.
        counts = self.fill in (Fill.REPEAT_LAST, Fill.REAL_TOTAL)
        if counts and (self.inner is not None or self.dtype not in ("int32", "int64")):
            message = f"{self.fill.value} is for vectors of int32 or int64"
            remedy = "fill tables and other dtypes with a constant"
            yield Problem(path=("fill",), message=message, remedy=remedy)


@record
class PaddingContract:
    """The fields that one backend reads, each under its own name."""

    fields: tuple[MetadataField, ...] = field("metadata fields", default=())

    def _problems(self) -> Iterator[Problem]:
        return duplicates([f.name for f in self.fields], "{!r} is declared twice", "fields", "name")

    def __getitem__(self, name: str) -> MetadataField:
        return next(f for f in self.fields if f.name == name)


@record
class Workspace:
    """Memory that a backend needs before the first capture, and never grows afterwards."""

    device: ByteCount = field("bytes on the device", default=0)
    pinned: ByteCount = field("bytes of pinned host memory", default=0)
    formula: str = field("formula of the figures", default="")


class ModelDeployment(Deployment, Protocol):
    """A deployment of a known model; a Spec and a Plan both are one."""

    @property
    def model(self) -> Model: ...


@record
class Attention:
    """What one attention group of one role needs from its backend. Heads are per rank."""

    num_layers: Count = field("layers in the group")
    num_heads: Count = field("query heads on one rank")
    num_kv_heads: Count = field("key/value heads on one rank")
    head_dim: Count = field("width of one head")
    max_model_len: int = field("longest sequence, in tokens")
    max_query_len: Count = field("longest uniform query: 1 + K, or 1")
    window: Count | None = field("sliding window; None: full", default=None)
    causal: bool = field("causal attention", default=True)
    dtype: DataType = field("element type of activations", default=DataType.BFLOAT16)
    kv_dtype: DataType = field("element type of the KV cache", default=DataType.BFLOAT16)
    latent: Latent | None = field("latent attention; None: ordinary heads", default=None)
    sinks: bool = field("learned attention sinks (gpt-oss)", default=False)
    decode_context: Count = field("decode-context-parallel ranks", default=1)

    @classmethod
    def of(cls, deployment: ModelDeployment, role: Role, *, layers: int, window: int | None) -> "Attention":
        """Return what some layers of a role need from their backend.

        :param layers: how many layers the group has.
        :param window: sliding window in tokens; None: full attention.
        """
        model, tensor = deployment.model, deployment.parallel.tensor
        draft = deployment.speculative.model if deployment.speculative and role.is_drafter else None
        return cls(
            num_layers=layers,
            num_heads=max(((draft and draft.num_heads) or model.num_heads) // tensor, 1),
            # With more ranks than KV heads, each rank has a copy of one.
            num_kv_heads=max(((draft and draft.num_kv_heads) or model.num_kv_heads) // tensor, 1),
            head_dim=(draft and draft.head_dim) or model.head_dim,
            max_model_len=model.max_model_len,
            max_query_len=max_query_len(role, deployment),
            window=window,
            causal=model.causal,
            dtype=model.dtype,
            kv_dtype=model.kv_dtype or model.dtype,
            # None means ordinary heads here, not the heads of the target as in the fields above.
            latent=draft.latent if draft else model.latent,
            sinks=draft.sinks if draft else model.sinks,
            decode_context=deployment.parallel.decode_context,
        )


def _field(name: str, axis: Axis, fill: Fill, **options: object) -> MetadataField:
    return MetadataField(name=name, axis=axis, fill=fill, **options)  # type: ignore[arg-type]


COMMON_FIELDS = (
    _field("input_ids", Axis.TOKEN, Fill.CONSTANT, value=0, indexes=Bound.VOCABULARY),
    _field("positions", Axis.TOKEN, Fill.CONSTANT, value=0, dtype="int64", indexes=Bound.POSITIONS),
    _field("slot_mapping", Axis.TOKEN, Fill.NULL_SLOT, dtype="int64", indexes=Bound.SLOTS),
    _field("query_start_loc", Axis.REQUEST_PLUS_ONE, Fill.REAL_TOTAL, indexes=Bound.TOKENS),
    _field("seq_lens", Axis.REQUEST, Fill.CONSTANT, value=0),
    _field("block_table", Axis.REQUEST, Fill.CONSTANT, value=0, inner=Axis.PAGE, indexes=Bound.PAGES),
    _field("last_token_indices", Axis.REQUEST, Fill.CONSTANT, value=0, indexes=Bound.TOKENS),
    _field("idx_mapping", Axis.REQUEST, Fill.CONSTANT, value=-1, indexes=Bound.REQUESTS),
)
"""The fields that the runner owns, for every role (vLLM 0.33's input buffers)."""

SPECULATIVE_FIELDS = (_field("cu_num_draft_tokens", Axis.REQUEST, Fill.REPEAT_LAST, indexes=Bound.TOKENS),)
"""What the target also reads when it verifies draft tokens."""

PARALLEL_FIELDS = (_field("target_rows", Axis.TOKEN, Fill.CONSTANT, value=0),)
"""What a parallel head also reads: the row of the target that each of its rows belongs to, -1 of a mask token."""

MROPE_FIELDS = (
    _field("mrope_positions", Axis.TOKEN, Fill.CONSTANT, value=0, dtype="int64", scale=3, indexes=Bound.POSITIONS),
)
"""Positions of a target with multimodal rope: time, height and width of each token, token by token."""

LORA_FIELDS = (
    _field("adapter_lanes", Axis.TOKEN, Fill.CONSTANT, value=-1, indexes=Bound.REQUESTS),
    _field("active_adapters", Axis.REQUEST, Fill.CONSTANT, value=0),
)
"""What a target with LoRA also reads: where each token's adapter is among the active ones, and the active adapters,
counted from 1; 0 is the null adapter, which adds nothing. Padded tokens have none."""

DECODE_CONTEXT_FIELDS = (_field("dcp_local_seq_lens", Axis.REQUEST, Fill.CONSTANT, value=0),)
"""What every role also reads where keys and values are spread over ranks by position: how many of each request's are on
this rank (vLLM 0.33's ``get_dcp_local_seq_lens``)."""


def data_parallel_fields(ranks: int) -> tuple[MetadataField, ...]:
    """Return what every role also reads of several replicas: the tokens that each one runs, padding included.

    In a graph all run those of its entry; eagerly, each its own, and an idle one those of its dummy batch.
    """
    return (_field("num_tokens_across_dp", Axis.SCALAR, Fill.CONSTANT, value=0, scale=ranks),)


STATE_FIELDS = (_field("state_indices", Axis.REQUEST, Fill.CONSTANT, value=0, indexes=Bound.STATES),)
"""The row of each request in the pool of recurrent states (vLLM 0.33's ``state_indices_tensor``, whose padding is
NULL_BLOCK_ID, 0): no request owns row 0, so what a padded request writes there is never read for a real one."""
