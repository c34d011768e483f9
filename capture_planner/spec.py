"""Spec: what is wanted, written by a person. Nothing here knows what is possible."""

import bisect
import enum
from typing import Annotated

from capture_planner._record import (
    Between,
    ByteCount,
    Count,
    Name,
    Seconds,
    field,
    record,
)
from capture_planner.errors import InvalidValue, Problem
from capture_planner.modes import GraphMode, Pool, Role

SCHEMA_VERSION = 1
"""The version of the spec, plan and environment files. A newer one is an error."""

SchemaVersion = Annotated[int, Between(1)]
Requests = Annotated[int, Between(1, 1 << 16)]
QueryLength = Annotated[int, Between(1, 256)]
DraftTokens = Annotated[int, Between(0, 255)]


class Policy(enum.Enum):
    """How capture sizes are chosen."""

    DEFAULT = "default"
    """Minimax, to the last request, with a number of graphs chosen from the limits."""
    MINIMAX = "minimax"
    """The ladder of ``graphs`` sizes whose worst padded/real ratio is least."""
    EXPLICIT = "explicit"
    """The sizes named, and no others."""
    POWERS_OF_TWO = "powers_of_two"
    """1, 2, 4, ... and the maximum itself."""
    VLLM = "vllm"
    """The list of vLLM 0.33."""
    SGLANG = "sglang"
    """The lists of SGLang 0.5.23."""
    TENSORRT_LLM = "tensorrt_llm"
    """The list of TensorRT-LLM."""


class DataType(enum.Enum):
    """Element types of activations and of the KV cache."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class Method(enum.Enum):
    """Speculation methods whose drafter is run by the engine, after the target."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"


def _refuse(*path: str | int, message: str, remedy: str = "") -> InvalidValue:
    return InvalidValue([Problem(path=path, message=message, remedy=remedy)])


@record
class Latent:
    """Multi-head latent attention: the KV cache holds one latent vector a token."""

    kv_lora_rank: Count = field("width of the latent KV vector")
    rope_head_dim: Count = field("width of the rotary part kept beside it")


@record
class Model:
    """The architecture numbers that planning needs, from the model's public configuration."""

    name: Name = field("the model's public name")
    num_layers: Count = field("decoder layers")
    num_heads: Count = field("query heads, over all tensor-parallel ranks")
    num_kv_heads: Count = field("key/value heads, over all tensor-parallel ranks")
    head_dim: Count = field("width of one head")
    max_model_len: Annotated[int, Between(1, 1 << 27)] = field("longest sequence, in tokens")
    hidden_size: Count | None = field("width of the hidden state", default=None)
    vocab_size: Count | None = field("size of the vocabulary", default=None)
    dtype: DataType = field("element type of activations", default=DataType.BFLOAT16)
    kv_dtype: DataType | None = field("element type of the KV cache; None: as dtype", default=None)
    causal: bool = field("whether attention is causal", default=True)
    latent: Latent | None = field("latent attention (DeepSeek), None: ordinary heads", default=None)
    sinks: bool = field("whether attention has learned sinks (gpt-oss)", default=False)

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise _refuse(
                "num_heads",
                message=f"{self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads",
                remedy="each KV head serves the same number of query heads",
            )


@record
class Limits:
    """The scheduler's limits: they decide which batches there can be."""

    max_num_reqs: Requests = field("most requests in one batch (vLLM: max_num_seqs)")
    max_num_tokens: Count = field("most tokens in one batch (vLLM: max_num_batched_tokens)")


@record
class DraftModel:
    """The drafter's own architecture where it differs from the target's."""

    num_layers: Count = field("decoder layers; an EAGLE head has one", default=1)
    num_heads: Count | None = field("query heads; None: the target's", default=None)
    num_kv_heads: Count | None = field("key/value heads; None: the target's", default=None)
    head_dim: Count | None = field("width of one head; None: the target's", default=None)
    latent: Latent | None = field("latent attention; None: ordinary heads", default=None)
    sinks: bool = field("whether its attention has learned sinks", default=False)
    vocab_size: Count | None = field("reduced draft vocabulary; None: the target's", default=None)


@record
class Speculative:
    """Speculative decoding by a drafter that the engine runs.

    A schedule is a list of ``[first, last, k]``: batches of first to last requests draft k tokens.
    As in vLLM 0.33, gaps and the tail carry the previous k forward, and k is at most num_tokens.
    """

    method: Method = field("how the drafter works")
    num_tokens: Annotated[int, Between(1, 255)] = field("K, the most tokens drafted a step")
    schedule: tuple[tuple[Count, Count, DraftTokens], ...] = field(
        "[first, last, k] by batch size, for a K that changes with the load", default=()
    )
    model: DraftModel = field("the drafter's architecture", factory=DraftModel)

    def __attrs_post_init__(self) -> None:
        previous = 0
        for index, (first, last, _) in enumerate(self.schedule):
            if first > last:
                raise _refuse("schedule", index, message=f"the range {first} to {last} is empty")
            if first <= previous:
                raise _refuse(
                    "schedule",
                    index,
                    message=f"starts at {first}, but the range before it ends at {previous}",
                    remedy="list the ranges by batch size, without overlap",
                )
            if index == 0 and first != 1:
                raise _refuse(
                    "schedule",
                    index,
                    message=f"the first range must start at 1, got {first}",
                    remedy="every batch size needs a number of draft tokens",
                )
            previous = last

    def tiers(self, max_num_reqs: int) -> tuple[tuple[int, int, int], ...]:
        """Return ``(first, last, k)`` over 1..max_num_reqs: dense, clamped to K, neighbours merged."""
        bounds = [tier for tier in self.schedule if tier[0] <= max_num_reqs] or [
            (1, max_num_reqs, self.num_tokens)
        ]
        tiers: list[tuple[int, int, int]] = []
        for index, (first, _, k) in enumerate(bounds):
            last = bounds[index + 1][0] - 1 if index + 1 < len(bounds) else max_num_reqs
            k = min(k, self.num_tokens)
            if tiers and tiers[-1][2] == k:
                tiers[-1] = (tiers[-1][0], last, k)
            else:
                tiers.append((first, last, k))
        return tuple(tiers)

    def draft_tokens(self, num_reqs: int) -> int:
        """Return k for a batch of ``num_reqs`` requests."""
        if not self.schedule:
            return self.num_tokens
        index = bisect.bisect_right(self.schedule, num_reqs, key=lambda tier: tier[0]) - 1
        return min(self.schedule[max(index, 0)][2], self.num_tokens)


_OPTIONS = {
    "graphs": {Policy.MINIMAX},
    "num_tokens": {Policy.EXPLICIT, Policy.VLLM},
    "num_reqs": {Policy.EXPLICIT},
    "padding": {Policy.SGLANG, Policy.TENSORRT_LLM},
}


@record
class Sizes:
    """Which capture sizes, for mixed batches (in tokens) and uniform decodes (in requests)."""

    policy: Policy = field("how sizes are chosen", default=Policy.DEFAULT)
    graphs: Count | None = field("minimax: sizes in each ladder", default=None)
    num_tokens: tuple[Count, ...] | None = field(
        "explicit: token counts for mixed batches; vllm: cudagraph_capture_sizes", default=None
    )
    num_reqs: tuple[Count, ...] | None = field("explicit: request counts for uniform decodes", default=None)
    max_tokens: Count | None = field("largest size for mixed batches, in tokens", default=None)
    max_reqs: Requests | None = field("largest size for uniform decodes, in requests", default=None)
    padding: bool | None = field(
        "sglang, tensorrt_llm: the engine's list with padding on or off; None: its default",
        default=None,
    )

    def __attrs_post_init__(self) -> None:
        problems = [
            Problem(
                path=(option,),
                message=f"the policy {self.policy.value} takes no {option}",
                remedy="only " + " and ".join(sorted(p.value for p in policies)) + " does",
            )
            for option, policies in _OPTIONS.items()
            if getattr(self, option) is not None and self.policy not in policies
        ]
        if self.policy is Policy.MINIMAX and self.graphs is None:
            problems.append(Problem(path=("graphs",), message="the policy minimax needs a number of graphs"))
        if self.policy is Policy.EXPLICIT and not (self.num_tokens or self.num_reqs):
            problems.append(
                Problem(
                    path=(),
                    message="the policy explicit needs sizes",
                    remedy="give num_tokens, num_reqs or both",
                )
            )
        if problems:
            raise InvalidValue(problems)


@record
class GroupSpec:
    """Layers of one role that share a KV layout and a backend."""

    name: Name = field("the group's name")
    layers: Count = field("how many of the role's layers are in it")
    backend: Name | None = field("attention backend; None: the role's", default=None)
    window: Count | None = field("sliding window, in tokens; None: full attention", default=None)


@record
class RoleSpec:
    """What one role wants that differs from the rest of the spec."""

    backend: Name | None = field("attention backend; None: the spec's", default=None)
    mode: GraphMode | None = field("graph mode; None: the spec's", default=None)
    sizes: Sizes | None = field("capture sizes; None: the spec's", default=None)
    groups: tuple[GroupSpec, ...] = field("attention groups; empty: one, of all layers", default=())

    def __attrs_post_init__(self) -> None:
        names = [group.name for group in self.groups]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise _refuse("groups", index, "name", message=f"a second group is named {name!r}")


@record
class Roles:
    """Differences by role."""

    target: RoleSpec = field("the served model", factory=RoleSpec)
    draft_prefill: RoleSpec = field("draft position 0, query length 1 + K", factory=RoleSpec)
    draft_decode: RoleSpec = field("later draft positions, query length 1", factory=RoleSpec)

    def of(self, role: Role) -> RoleSpec:
        """Return the differences of one role."""
        found: RoleSpec = getattr(self, role.value)
        return found


@record
class Parallel:
    """How the model is spread over devices."""

    data: Count = field("data-parallel ranks, each with its own batches", default=1)
    tensor: Count = field("tensor-parallel ranks, sharing each batch", default=1)
    sequence: bool = field(
        "sequence parallelism: padded tokens are a multiple of the tensor-parallel size", default=False
    )
    decode_context: Count = field("decode-context-parallel ranks (KV split over sequence)", default=1)


@record
class Lora:
    """LoRA adapters. Graphs are planned per number of active adapters (vLLM's cases).

    Specialised: 0, the powers of two up to max_active, and max_active + 1; else 0 and
    max_active + 1. The last one serves batches in which rows without an adapter count as one more.
    """

    max_active: Requests = field("most adapters active in one batch (vLLM: max_loras)")
    specialize: bool = field("plan graphs for smaller adapter counts too", default=False)

    def cases(self) -> tuple[int, ...]:
        """Return the adapter counts to plan for, ascending, 0 included."""
        top = self.max_active + 1
        if not self.specialize:
            return (0, top)
        return (0, *(1 << i for i in range(self.max_active.bit_length())), top)


@record
class Piecewise:
    """What is known of the model's compilation; it decides how the mode ladder steps down."""

    split_attention: bool = field("whether attention can be split out of the graph", default=True)
    capturable: bool = field("whether the pieces between attention can be captured", default=True)


@record
class Budget:
    """What graphs may cost. Costs per graph are the worst of public reports until measured."""

    max_graphs: Count | None = field("most graphs over all roles; None: no bound", default=None)
    memory: ByteCount | None = field("most device memory for graphs, as in 2GiB", default=None)
    seconds: Seconds | None = field("most time to capture, in seconds", default=None)
    memory_per_graph: ByteCount = field("memory of one graph (reports: 7 to 25 MiB)", default=25 << 20)
    seconds_per_graph: Seconds = field("time to capture one graph (reports: 0.05 to 0.25 s)", default=0.25)

    def allowed_graphs(self) -> tuple[int, str] | None:
        """Return the most graphs that fit and the rule that bounds them, or None where none does."""
        bounds = []
        if self.max_graphs is not None:
            bounds.append((self.max_graphs, f"max_graphs {self.max_graphs}"))
        if self.memory is not None:
            graphs = self.memory // max(self.memory_per_graph, 1)
            bounds.append((graphs, f"memory {self.memory} bytes at {self.memory_per_graph} a graph"))
        if self.seconds is not None:
            graphs = int(min(self.seconds / self.seconds_per_graph, 1e9) + 1e-9)
            bounds.append((graphs, f"{self.seconds:g} s at {self.seconds_per_graph:g} s a graph"))
        return min(bounds, default=None)


@record
class Spec:
    """A deployment: its model, its limits, and the graphs that are wanted for it."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    model: Model = field("the served model")
    limits: Limits = field("the scheduler's limits")
    mode: GraphMode = field("the graph mode wanted", default=GraphMode.FULL_AND_PIECEWISE)
    backend: Name = field("attention backend of every role that names no other")
    speculative: Speculative | None = field("speculative decoding; None: off", default=None)
    sizes: Sizes = field("capture sizes of every role that names no other", factory=Sizes)
    roles: Roles = field("differences by role", factory=Roles)
    parallel: Parallel = field("how the model is spread over devices", factory=Parallel)
    lora: Lora | None = field("LoRA adapters; None: off", default=None)
    piecewise: Piecewise = field("what the model's compilation allows", factory=Piecewise)
    budget: Budget = field("what graphs may cost", factory=Budget)
    pool: Pool = field("one memory pool for all roles, or one each", default=Pool.SHARED)

    def __attrs_post_init__(self) -> None:
        problems = []
        tensor = self.parallel.tensor
        if self.model.num_heads % tensor:
            problems.append(
                Problem(
                    path=("parallel", "tensor"),
                    message=f"{self.model.num_heads} query heads do not divide over {tensor} ranks",
                )
            )
        kv_heads = self.model.num_kv_heads
        if kv_heads % tensor and tensor % kv_heads:
            problems.append(
                Problem(
                    path=("parallel", "tensor"),
                    message=f"{kv_heads} KV heads neither divide over {tensor} ranks nor repeat on them evenly",
                )
            )
        if self.speculative is None:
            problems += [
                Problem(
                    path=("roles", role.value),
                    message="the spec has no speculative decoding, so this role never runs",
                    remedy="add speculative, or remove this",
                )
                for role in Role
                if role.is_drafter and self.roles.of(role) != RoleSpec()
            ]
        for role in Role:
            groups = self.roles.of(role).groups
            layers = (
                self.speculative.model.num_layers
                if self.speculative and role.is_drafter
                else self.model.num_layers
            )
            if groups and sum(group.layers for group in groups) != layers:
                problems.append(
                    Problem(
                        path=("roles", role.value, "groups"),
                        message=f"the groups have {sum(g.layers for g in groups)} layers, the model {layers}",
                    )
                )
        if problems:
            raise InvalidValue(problems)

    @property
    def active_roles(self) -> tuple[Role, ...]:
        """The roles that this deployment runs."""
        return (Role.TARGET,) if self.speculative is None else tuple(Role)
