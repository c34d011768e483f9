"""Model and drafter: the architecture numbers that planning needs, and how drafts are made."""

import bisect
import enum
import itertools
from collections.abc import Iterator
from typing import Annotated

from capture_planner.errors import Problem
from capture_planner.modes import Chain, Role
from capture_planner.records._base import Count, Interval, Name, Path, Pattern, Share, field, record
from capture_planner.records.text import counted

DraftTokens = Annotated[int, Interval(0, 255)]
Tier = tuple[Count, Count, DraftTokens]
EagerReason = Annotated[str, Pattern(r"[\s\S]{1,400}", "a sentence of at most 400 characters")]

MAX_TIERS = 64
"""Most ranges in a schedule: many more than any load needs."""


class DataType(enum.Enum):
    """Element types of activations and of the KV cache."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    """For exact comparison on a CPU: no engine serves in it."""
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class Method(enum.Enum):
    """Speculation methods whose drafter is run by the engine, after the target."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    """Multi-token prediction: one module that drafts a chain, or several that draft one token each."""
    DRAFT_MODEL = "draft_model"
    """A whole model that reads tokens alone, and nothing of the target's states."""


class ScheduleSource(enum.Enum):
    """Where a schedule comes from, if the spec does not list its ranges."""

    MEASURED = "measured"
    """The planner chooses it, from traffic and a profile (``planning.measured``)."""


@record
class Latent:
    """Multi-head latent attention: the KV cache holds one latent vector a token."""

    kv_lora_rank: Count = field("width of the latent KV vector")
    rope_head_dim: Count = field("width of the rotary part")


@record
class Recurrent:
    """Layers with a state of fixed size in place of a KV cache, as Mamba and gated delta nets have."""

    layers: Count = field("number of the model's layers that are recurrent")
    state: Annotated[int, Interval(1, 1 << 40)] = field(
        "bytes of the state of one layer and one request, over all tensor-parallel ranks"
    )


def head_problems(heads: int, kv_heads: int, tensor: int, *, grouped: Path, spread: Path) -> Iterator[Problem]:
    """Yield what is wrong with heads: at ``grouped`` among themselves, at ``spread`` on the tensor-parallel ranks."""
    if heads % kv_heads:
        message = f"{heads} query heads do not divide into {kv_heads} KV heads"
        yield Problem(path=grouped, message=message, remedy="each KV head serves the same number of query heads")
    if heads % tensor:
        yield Problem(path=spread, message=f"{heads} query heads do not divide over {tensor} ranks")
    # Fewer KV heads than ranks are repeated, each on the same number of ranks.
    if kv_heads % tensor and tensor % kv_heads:
        message = f"{kv_heads} KV heads neither divide over {tensor} ranks nor repeat on them evenly"
        yield Problem(path=spread, message=message)


@record
class Model:
    """The architecture numbers that planning needs, from the model's public configuration."""

    name: Name = field("the model's public name")
    num_layers: Count = field("decoder layers, recurrent ones included")
    num_heads: Count = field("query heads, over all tensor-parallel ranks")
    num_kv_heads: Count = field("key/value heads, over all tensor-parallel ranks")
    head_dim: Count = field("width of one head")
    max_model_len: Annotated[int, Interval(1, 1 << 27)] = field("longest sequence, in tokens")
    hidden_size: Count | None = field("width of the hidden state", default=None)
    vocab_size: Count | None = field("size of the vocabulary", default=None)
    dtype: DataType = field("element type of activations", default=DataType.BFLOAT16)
    kv_dtype: DataType | None = field("element type of the KV cache; None: as dtype", default=None)
    causal: bool = field("causal attention", default=True)
    latent: Latent | None = field("latent attention (DeepSeek), None: ordinary heads", default=None)
    sinks: bool = field("learned attention sinks (gpt-oss)", default=False)
    mrope: bool = field("positions of three sections (Qwen2-VL's rope)", default=False)
    embeddings: bool = field("graphs take embeddings in place of token ids", default=False)
    recurrent: Recurrent | None = field("layers with a state per request; None: all layers attend", default=None)

    def _problems(self) -> Iterator[Problem]:
        # One rank: the spec has the number of ranks, and checks how heads divide over them.
        yield from head_problems(self.num_heads, self.num_kv_heads, 1, grouped=("num_heads",), spread=())
        if self.attention_layers < 1:
            message = f"{self.num_layers - self.attention_layers} of {self.num_layers} layers, and one at least attends"
            yield Problem(path=("recurrent", "layers"), message=message)

    @property
    def attention_layers(self) -> int:
        """Layers with a KV cache: those that attention groups are made of."""
        return self.num_layers - (self.recurrent.layers if self.recurrent else 0)


@record
class DraftModel:
    """The drafter's own architecture where it differs from the target's."""

    num_layers: Count = field("decoder layers; an EAGLE head has one; mtp: modules of a layer each", default=1)
    num_heads: Count | None = field("query heads; None: the target's", default=None)
    num_kv_heads: Count | None = field("key/value heads; None: the target's", default=None)
    head_dim: Count | None = field("width of one head; None: the target's", default=None)
    latent: Latent | None = field("latent attention; None: ordinary heads", default=None)
    sinks: bool = field("learned attention sinks", default=False)
    vocab_size: Count | None = field("reduced draft vocabulary; None: the target's", default=None)
    eager_because: EagerReason | None = field(
        "why no graph can hold its forwards (vLLM: supports_sd_full_graph is false); None: graphs can", default=None
    )


_NO_DRAFTS = "to draft nothing, leave speculative out, or give batch sizes 0 in its schedule"


@record
class Speculative:
    """Speculative decoding by a drafter that the engine runs.

    A schedule is a list of ``[first, last, k]``: batches of first to last requests draft k tokens.
    As in vLLM 0.33, gaps and the tail carry the previous k forward, and k is at most num_tokens. With the word
    ``measured`` the planner chooses the ranges; until then a batch of any size drafts num_tokens.

    Acceptance is cumulative, as in vLLM's counters (accepted tokens of a position over drafts) and in its
    ``synthetic_acceptance_rates``: ``acceptance[i]`` is the share of steps in which drafts 0 to i were all accepted.
    A step with k drafts gives ``1 + sum(acceptance[:k])`` tokens a request.

    A drafter is a chain: a first pass makes one draft, and a draft decode each later one. Parallel drafting and MTP of
    several modules make all drafts in the first pass. With ``extra_slots`` that pass has more rows than the target's
    batch, for which ``max_num_tokens`` leaves room, as in vLLM 0.33 (``max_num_new_slots_for_drafting``).

    Decodes are uniform: every request has 1 + k tokens, filled up with any token where it has fewer drafts. With
    ``varying_decodes`` each has one token and its own drafts, and a decode graph of these roles serves any mix of 1 to
    1 + k tokens, as vLLM 0.33's do with adaptive verification. Their backends must support any batch (ALWAYS).
    """

    method: Method = field("kind of drafter")
    num_tokens: Annotated[int, Interval(1, 255, _NO_DRAFTS)] = field("K, the most tokens drafted a step")
    schedule: tuple[Tier, ...] | ScheduleSource = field(
        "[first, last, k] by batch size, for a K that changes with the load; measured: the planner chooses", default=()
    )
    acceptance: tuple[Share, ...] = field(
        "share of steps in which drafts 0 to i are all accepted, by i; empty: as the traffic has it", default=()
    )
    model: DraftModel = field("the drafter's architecture", factory=DraftModel)
    chain: Chain = field(
        "all draft decodes of a step in one graph where the backends can, or a graph of one replayed",
        default=Chain.FUSED,
    )
    parallel_drafting: bool = field(
        "all drafts in the first pass, on mask tokens (P-EAGLE, or PARD with draft_model)", default=False
    )
    varying_decodes: tuple[Role, ...] = field(
        "target, or target and draft_prefill: roles whose decodes have 1 to 1 + k tokens of each request in one graph; "
        "empty: every request has 1 + k",
        default=(),
        converter=lambda roles: tuple(sorted(roles, key=list(Role).index)),
    )

    def _problems(self) -> Iterator[Problem]:
        for index, (before, share) in enumerate(itertools.pairwise(self.acceptance), 1):
            if share > before:
                message = f"{share:g} after {before:g}: a draft counts only if those before it were accepted"
                remedy = "give the share of steps in which this draft and all before it are accepted"
                yield Problem(path=("acceptance", index), message=message, remedy=remedy)
        # A measured schedule weighs every k up to num_tokens.
        if self.is_measured and 0 < len(self.acceptance) < self.num_tokens:
            message = f"has {counted(len(self.acceptance), 'position')}, and num_tokens is {self.num_tokens}"
            remedy = "give a share for each position, or lower num_tokens"
            yield Problem(path=("acceptance",), message=message, remedy=remedy)
        yield from self._varying_problems()
        # An MTP module reads what the one before it drafted.
        if self.parallel_drafting and self.method is Method.MTP:
            message = "mtp modules draft one token each, after one another"
            remedy = "leave it out, or use eagle3 or draft_model"
            yield Problem(path=("parallel_drafting",), message=message, remedy=remedy)
        if len(self.ranges) > MAX_TIERS:
            yield Problem(path=("schedule",), message=f"{len(self.ranges)} ranges, at most {MAX_TIERS} are allowed")
            return
        previous = 0
        for index, (first, last, _) in enumerate(self.ranges):
            if first > last:
                yield Problem(path=("schedule", index), message=f"the range {first} to {last} is empty")
                continue
            if first <= previous:
                message = f"starts at {first}, but the range before it ends at {previous}"
                remedy = "list the ranges by batch size, without overlap"
                yield Problem(path=("schedule", index), message=message, remedy=remedy)
            # Only the first range has to begin at 1: later gaps carry the k before them forward.
            elif index == 0 and first != 1:
                message = f"the first range must start at 1, got {first}"
                remedy = "every batch size needs a number of draft tokens"
                yield Problem(path=("schedule", index), message=message, remedy=remedy)
            previous = max(previous, last)

    def head_problems(self, target: Model, tensor: int) -> Iterator[Problem]:
        """Yield what is wrong with the drafter's heads, on as many tensor-parallel ranks as the target."""
        own, path = self.model, ("speculative", "model")
        # A drafter without heads of its own has the target's, which are checked with the target.
        if own.num_heads is not None or own.num_kv_heads is not None:
            heads, kv_heads = own.num_heads or target.num_heads, own.num_kv_heads or target.num_kv_heads
            # The problem is at a number that the file states.
            place = (*path, "num_kv_heads" if own.num_heads is None else "num_heads")
            yield from head_problems(heads, kv_heads, tensor, grouped=place, spread=place)

    def _varying_problems(self) -> Iterator[Problem]:
        roles, path = self.varying_decodes, ("varying_decodes",)
        if len(set(roles)) < len(roles):
            yield Problem(path=path, message="a role is listed twice", remedy="list it once")
        if Role.DRAFT_DECODE in roles:
            message = "draft decodes have one token of each request"
            yield Problem(path=path, message=message, remedy="leave draft_decode out")
        if Role.DRAFT_PREFILL in roles and Role.TARGET not in roles:
            message = "the draft prefill follows the target's batch, whose decodes do not vary"
            yield Problem(path=path, message=message, remedy="add target")
        if roles and self.is_measured:
            message = "a profile has no times of varying decodes to choose a schedule by"
            yield Problem(path=path, message=message, remedy="leave it out, or list the ranges of the schedule")

    @property
    def is_modules(self) -> bool:
        """Whether several MTP modules make the drafts, one each."""
        return self.method is Method.MTP and self.model.num_layers > 1

    @property
    def is_chain(self) -> bool:
        """Whether draft decodes make the drafts after the first one."""
        return not (self.parallel_drafting or self.is_modules)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that a deployment with this drafter runs, target first."""
        return tuple(role for role in Role if role is not Role.DRAFT_DECODE or self.is_chain)

    @property
    def has_own_rows(self) -> bool:
        """Whether the first draft pass has rows of its own instead of the target's."""
        return self.parallel_drafting or self.method is Method.DRAFT_MODEL

    @property
    def extra_slots(self) -> int:
        """Rows that the first draft pass has more than the target's batch, for each request.

        A draft model reads the new token next to those of the target; an EAGLE head reads every token one position
        later, and so has it already. Each draft of a parallel pass but the first has a mask token.
        """
        unshifted = self.method is Method.DRAFT_MODEL
        return unshifted + (self.num_tokens - 1) * self.parallel_drafting

    @property
    def is_measured(self) -> bool:
        """Whether the planner has yet to choose the schedule."""
        return isinstance(self.schedule, ScheduleSource)

    @property
    def ranges(self) -> tuple[Tier, ...]:
        """The listed ranges; none where K is fixed, or the schedule is yet to be chosen."""
        return () if isinstance(self.schedule, ScheduleSource) else self.schedule

    def tiers(self, max_num_reqs: int) -> tuple[tuple[int, int, int], ...]:
        """Return ``(first, last, k)`` over 1..max_num_reqs: dense, clamped to K, neighbours merged."""
        # Ranges above max_num_reqs are of batches that never run.
        bounds = [tier for tier in self.ranges if tier[0] <= max_num_reqs] or [(1, max_num_reqs, self.num_tokens)]
        clamped = ((first, min(k, self.num_tokens)) for first, _, k in bounds)
        # Ranges that the bound num_tokens makes equal are one.
        starts = [next(alike) for _, alike in itertools.groupby(clamped, key=lambda start: start[1])]
        ends = [first - 1 for first, _ in starts[1:]] + [max_num_reqs]
        return tuple((first, last, k) for (first, k), last in zip(starts, ends, strict=True))

    def draft_tokens(self, num_reqs: int) -> int:
        """Return k for a batch of ``num_reqs`` requests."""
        if not self.ranges:
            return self.num_tokens
        index = bisect.bisect_right(self.ranges, num_reqs, key=lambda tier: tier[0]) - 1
        # A schedule begins at 1, so the index is negative only for a batch without requests.
        return min(self.ranges[max(index, 0)][2], self.num_tokens)
