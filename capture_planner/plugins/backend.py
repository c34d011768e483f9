"""The contract of an attention backend: what the planner asks of it without torch, and what it executes with torch.

A backend answers four questions of the planner (``Backend``): how far it goes in a full graph, which fields it reads
and how they are padded, how much memory it needs, and who refreshes it. The answers are values of
``capture_planner.records``, because plans have them; they can be imported from here too. This module imports no torch.

A backend that can run has ``reserve`` in addition (``RunnableBackend``). ``reserve`` returns an ``Executor``; the
runner calls its methods in one order, always the same:

    reserve                       once for each attention group of each role, before any capture
    prepare, attend * layers      for every warm-up, capture and eager step
    prepare                       for every replay of a FULL graph: ``attend`` is in the graph
    prepare, attend * layers      for every replay of a PIECEWISE graph: ``attend`` runs between pieces
    release                       once, at the end; nothing is called after it

Before ``run`` and ``bench`` load a model they reserve each group on trial, with a KV cache of one page,
and release it: only the backend knows whether it runs here.

An executor serves one group of one role. It may keep what ``reserve`` gave it, and tensors that it
made there. Every pointer that ``attend`` touches must outlive the graphs, so nothing may be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from capture_planner.modes import Refresh, Role
from capture_planner.records.backend import (
    COMMON_FIELDS,
    Attention,
    Axis,
    Bound,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Support,
    Where,
    Workspace,
)
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "COMMON_FIELDS",
    "NULL_PAGE",
    "NULL_SLOT",
    "NULL_STATE",
    "Attention",
    "Axis",
    "Backend",
    "Bound",
    "Executor",
    "Fill",
    "KernelSizes",
    "LayerCache",
    "Lifetime",
    "Metadata",
    "MetadataField",
    "PaddingContract",
    "Reservation",
    "RunnableBackend",
    "Scoring",
    "Support",
    "Where",
    "Workspace",
]


@runtime_checkable
class Backend(Protocol):
    """An attention backend, as the planner sees it. No method may import torch or touch a device.

    All methods are pure: the same arguments give the same answer, in any order, any number of
    times. The planner calls each at most once per attention group of each role.
    """

    @property
    def name(self) -> str:
        """The name that specs use: unique among the installed backends."""

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """Return how far this backend goes inside a full graph, for one group.

        Called first, once per group. Raise nothing for a missing kernel library or GPU: return ``GraphSupport.NEVER``
        and name what is missing. Eager and piecewise execution do not depend on the answer.
        """

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare the metadata fields that a graph of this group reads.

        Called after ``support``, whatever that returned. Declare the runner's common fields
        (``COMMON_FIELDS``) again only where this backend needs another fill.
        """

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """Return whether the metadata can be refreshed inside a graph.

        The planner calls this for draft decodes only: a chain of draft steps becomes one graph where
        every group of the role returns ``IN_GRAPH``. The runner calls it for every role: decodes of such
        a role continue without the host, which may know upper bounds of lengths alone.
        """

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Return the memory needed before capture, for exactly these entries.

        Called last, once per group, when the entries are final. Size for the largest padded
        extents: the runner allocates this once and never grows it.
        """


@attrs.frozen(kw_only=True)
class KernelSizes:
    """The last sizes before the kernels of a backend change: to a second tile or split, or to another kernel.

    A backend may have them as its attribute ``kernel_sizes``. The conformance suite has batches and sequences of each
    of them, and of one more; otherwise it stays below 24 requests and, on small shapes, 140 keys.
    """

    num_reqs: tuple[int, ...] = ()
    """Requests of a batch."""
    num_keys: tuple[int, ...] = ()
    """Keys of a request."""

    @classmethod
    def of(cls, backend: object) -> KernelSizes:
        """Return what a backend declares; without a declaration there are none."""
        # Optional, so that backends without it stay backends.
        declared: KernelSizes = getattr(backend, "kernel_sizes", cls())
        return declared


NULL_PAGE = 0
"""The page that no request owns: padded rows of a block table name it."""

NULL_SLOT = 0
"""The slot that padded tokens write to, in the null page."""

NULL_STATE = 0
"""The row of the pool of recurrent states that no request owns: padded requests name it."""


@attrs.frozen(kw_only=True, eq=False)
class LayerCache:
    """The paged KV cache of one layer, owned by the runner.

    Pages can lie far apart, as where one block has those of all layers: a page is found by its stride, in 64 bits.
    """

    keys: torch.Tensor
    """``[num_pages, page_size, num_kv_heads, head_dim]``, in the group's KV dtype."""
    values: torch.Tensor
    """The same for values."""
    packed: torch.Tensor | None = None
    """``[num_pages, page_size, num_kv_heads, 2 * head_dim]``, whose halves keys and values are, for a backend with
    ``packs_cache``; None: two tensors of their own."""


@attrs.frozen(kw_only=True, eq=False)
class Reservation:
    """What a backend gets once, before anything is captured."""

    role: Role
    group: str
    attention: Attention
    environment: Environment
    entries: tuple[Entry, ...]
    """The role's graphs: everything that will be captured, in capture order."""
    limits: Limits
    caches: Mapping[int, LayerCache]
    """The KV cache of each layer of the group, by the layer's index in its model."""
    page_size: int
    """Tokens a page."""
    fields: Mapping[str, torch.Tensor]
    """The device field of each declared name, at full capacity: the persistent buffers of the role.

    A vector has ``offset + scale * round_up(extent, align)`` elements, a table one row an extent.
    """
    workspace: torch.Tensor
    """``uint8[Workspace.device]``: what the plan says this group needs, zeroed, never grown."""
    pinned: torch.Tensor
    """``uint8[Workspace.pinned]`` on the host, pinned where there is a GPU."""
    device: torch.device
    context_rank: int = 0
    """Place of this rank among ``attention.decode_context`` ones that share the KV of each request. It has the
    positions p with ``p % decode_context == context_rank``, in their order: its i-th key is of position
    ``i * decode_context + context_rank``, and a page of the block table has ``page_size`` of them."""


@attrs.frozen(kw_only=True, eq=False)
class Metadata:
    """One step's attention metadata, at the extents that attention sees.

    In a FULL graph those are the entry's padded extents. In a PIECEWISE graph and in an eager step
    attention sees real, unpadded extents, whatever is padded around it.
    """

    entry: Entry | None
    """The graph that is captured or replayed; None for an eager step."""
    for_capture: bool = False
    """Whether the step is the warm-up or the capture of ``entry``, on the null page, and not a batch."""
    num_reqs: int
    num_tokens: int
    max_query_len: int
    """Longest query: of a FULL graph the most that the entry can hold, else the real one."""
    max_seq_len: int
    """Longest sequence: of a FULL graph the model's maximum, else the real one."""
    fields: Mapping[str, torch.Tensor]
    """Device fields, cut to these extents: ``query_start_loc int32[num_reqs + 1]``,
    ``seq_lens int32[num_reqs]``, ``block_table int32[num_reqs, pages]``, and the backend's own."""
    host: Mapping[str, np.ndarray[Any, Any]]
    """The same values on the host, padding included, for backends that plan there.

    Where every group answers ``refresh`` with ``IN_GRAPH``, steps may follow each other without the host:
    then token ids and slots are not among them in a decode whose fields its graph moved on, and the
    lengths of a draft decode are those that it would have if all drafts had been kept. So are lengths, positions and
    slots of any FULL graph where the step before was not read, and token ids are negative there.
    """

    @property
    def is_full(self) -> bool:
        """Whether attention runs inside the graph."""
        return self.entry is not None and self.entry.num_reqs is not None


@attrs.frozen(kw_only=True, eq=False)
class Scoring:
    """How one layer turns products into weights; it is the same at every call of that layer."""

    scale: float
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: torch.Tensor | None = None
    """``[num_heads]``: a logit for each head that takes part in the sum and has no value."""


class Executor(Protocol):
    """The torch side of a backend, for one attention group of one role."""

    def prepare(self, metadata: Metadata) -> None:
        """Do the host work of a step, outside every graph.

        Called before each warm-up, capture, replay and eager step, once for the whole step (not for
        each layer), when all declared fields are filled and padded. Write the fields that are your
        own (those that the runner cannot know) into the buffers of the reservation; they hold their
        declared fill when you are called. Do not pad: that is done. Do not replace a buffer.
        """

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with one layer's queries; the runner wrote this step's keys and values already.

        ``query`` and ``out`` are ``[num_tokens, num_heads, head_dim]``, and every row of ``out``
        must be written. The causal mask is aligned to the end: with L tokens in the sequence and q
        of them in the query, query row i sees keys 0 to L - q + i.

        For a FULL entry this is captured. It must not read a device value on the host, must not
        depend on any number that is not in the entry, the reservation or ``metadata``'s scalars, and
        must not keep what it allocates: intermediates belong to the graph's pool.
        """

    def layout(self) -> tuple[int, ...] | None:
        """Return the numbers of the last plan that a graph bakes in, or None where there are none.

        Called after ``prepare``. At a replay they must equal those at capture, or the replay refuses.
        """

    def release(self) -> None:
        """Free what was reserved. Called once, after the last step."""


class ContextExecutor(Executor, Protocol):
    """The executor of a group whose KV several decode-context-parallel ranks share; its ``attend`` is not called."""

    def attend_part(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        scoring: Scoring,
        metadata: Metadata,
    ) -> None:
        """Attend with the queries of all these ranks to the keys that this one has.

        As ``attend``, and with ``num_heads * decode_context`` heads in ``query`` and ``out``. The mask is of positions
        in the whole sequence, as ``seq_lens`` is. ``scoring`` has no sinks. ``sums``, float32 or wider,
        ``[num_tokens, heads]``, become the logarithm of the sum of the exponentials of the scores, -inf where a row
        sees none of these keys. The runner merges the parts of all ranks by them.
        """


@runtime_checkable
class RunnableBackend(Backend, Protocol):
    """A backend that executes what it plans.

    With an attribute ``packs_cache = True`` the caches of its layers have the layout of vLLM 0.33: keys and values of a
    token and a head lie next to each other (``LayerCache.packed``). The first role that a layer has decides.
    """

    def reserve(self, reservation: Reservation) -> Executor:
        """Allocate persistent buffers and wrappers, sized for the largest entry.

        Called once for each group of each role, before the first capture. Raise
        ``capture_planner.BackendError`` where the library that the plan counts on is missing.
        """
