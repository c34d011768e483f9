"""Roles, graph modes and support levels, and their algebra.

They match vLLM 0.33 (``CUDAGraphMode``, ``AttentionCGSupport``).
"""

from __future__ import annotations

import enum
from functools import total_ordering


class Role(enum.StrEnum):
    """One kind of forward pass; each role has its own mode, sizes and dispatch table."""

    TARGET = "target"
    DRAFT_PREFILL = "draft_prefill"
    """Draft position 0, on the target's batch: query length 1 + K, more for a draft model. With parallel drafting, and
    MTP of several modules, all positions."""
    DRAFT_DECODE = "draft_decode"
    """Draft positions 1 and later: query length 1."""

    @property
    def is_drafter(self) -> bool:
        return self is not Role.TARGET


@total_ordering
class GraphMode(enum.Enum):
    """How batches run. FULL_DECODE_ONLY and FULL_AND_PIECEWISE separate decodes from mixed batches.

    Ordered as the resolution ladder steps down, so that ``resolved <= requested`` always holds:
    NONE < PIECEWISE < FULL_DECODE_ONLY < FULL_AND_PIECEWISE < FULL.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    FULL = "FULL"

    @property
    def decode_mode(self) -> GraphMode:
        """How a uniform decode batch runs: NONE, PIECEWISE or FULL."""
        return GraphMode.FULL if self.is_separate else self

    @property
    def mixed_mode(self) -> GraphMode:
        """How every other batch runs: NONE, PIECEWISE or FULL."""
        if self is GraphMode.FULL_DECODE_ONLY:
            return GraphMode.NONE
        return GraphMode.PIECEWISE if self is GraphMode.FULL_AND_PIECEWISE else self

    @property
    def is_separate(self) -> bool:
        """Whether uniform decode batches have graphs of their own."""
        return self in (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)

    @property
    def has_piecewise(self) -> bool:
        return self.mixed_mode is GraphMode.PIECEWISE

    @property
    def without_piecewise(self) -> GraphMode:
        """The mode without its piecewise graphs, for models where they cannot be captured."""
        if self is GraphMode.PIECEWISE:
            return GraphMode.NONE
        return GraphMode.FULL_DECODE_ONLY if self is GraphMode.FULL_AND_PIECEWISE else self

    @property
    def allowed(self) -> frozenset[GraphMode]:
        """The kinds of captured graph (PIECEWISE, FULL) that this mode has."""
        # NONE is the absence of a graph.
        return frozenset({self.decode_mode, self.mixed_mode}) - {GraphMode.NONE}

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, GraphMode):
            return NotImplemented
        order = list(GraphMode)
        return order.index(self) < order.index(other)


class GraphSupport(enum.IntEnum):
    """What an attention backend can do inside a full graph; more is better."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Every request has one token."""
    UNIFORM_BATCH = 2
    """Every request has the same number of tokens."""
    ALWAYS = 3
    """Any batch, prompts and decodes mixed."""


class Refresh(enum.Enum):
    """Where a backend updates its metadata from one step to the next."""

    IN_GRAPH = "in_graph"
    """On the device, inside the graph: a whole draft chain can be one graph."""
    HOST = "host"
    """On the host, before each replay: one draft step per graph."""


class Chain(enum.Enum):
    """How the K-1 draft decodes of a step run. Both give the same tokens at different cost."""

    FUSED = "fused"
    """One graph for all, where every draft backend refreshes in the graph; SINGLE elsewhere."""
    SINGLE = "single"
    """One graph of a single draft decode, replayed K-1 times."""


class Pool(enum.Enum):
    """Which graphs share a memory pool. A separate drafter pool cost vLLM 0.27 GiB (vllm#44078)."""

    SHARED = "shared"
    PER_ROLE = "per_role"


class Reason(enum.StrEnum):
    """Why a batch has no graph. A closed set."""

    MODE = "mode"
    """The role's resolved mode has no graph for this kind of batch."""
    SIZES = "sizes"
    """The batch is larger than the largest size that the policy plans."""
    BACKEND_CAP = "backend_cap"
    """The batch is larger than the backend can capture."""
    BUDGET = "budget"
    """A graph for it was planned and then dropped to meet the budget."""
    MEMORY = "memory"
    """Its graph did not fit into memory when it was captured."""
    LAZY = "lazy"
    """Its graph is captured on first use, and is not there yet."""
    RANK = "rank"
    """A data-parallel rank has not captured a graph for it, so no rank replays one."""
    IDLE = "idle"
    """No data-parallel rank has work: no forward runs."""
    NOT_ADMISSIBLE = "not_admissible"
    """The limits or the schedule do not admit the batch."""
    SHADOWED = "shadowed"
    """A captured graph could serve it, but the engine's dispatcher does not find it."""
    SPLIT = "split"
    """The engine splits it into microbatches, and has no graph of those (vLLM's dual batch overlap)."""
    UNCOVERED = "uncovered"
    """Neither an entry nor a waiver; ``check`` reports it as CP001."""
    UNKNOWN = "unknown"
    """Nothing was observed of such a batch, and an observation does not guess."""
