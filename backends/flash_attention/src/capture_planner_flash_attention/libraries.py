"""The FlashAttention libraries: where each one runs, and which one serves a group of layers.

The rules follow vLLM 0.33: ``v1/attention/backends/flash_attn.py``, the choice of a version in
``fa_utils.py``, and ``mla/flashattn_mla.py`` for latent attention. No torch is needed here.
"""

from __future__ import annotations

import attrs

from capture_planner.modes import GraphSupport
from capture_planner.plugins.backend import Attention, Axis, Fill, MetadataField
from capture_planner.records.batch import Entry
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import DataType

MAX_SPLITS = 32
"""Bound on KV splits under capture (vLLM 0.33: flash_attn_max_num_splits_for_cuda_graph)."""

SPLIT_TOKENS = 512
"""Up to this many tokens a graph uses all the splits (vLLM 0.33: its largest default capture size)."""

SCHEDULER_METADATA = MetadataField(
    name="scheduler_metadata", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, offset=1, scale=4, align=4
)
"""FlashAttention 3's tile schedule: a semaphore, then four vectors of requests rounded up to 4.

A stale tail makes surplus thread blocks overwrite the output (vLLM 0.33 zeroes it each step). Draft
decodes have no such field. The kernel schedules itself there, because a call before the graph could not
see the later steps of a chain.
"""


@attrs.frozen(kw_only=True)
class Library:
    """One kernel library: where it runs, and how far it goes inside a full graph."""

    title: str
    package: str
    """Its distribution, as environments name it."""
    module: str
    """The module that is imported to run it."""
    since: tuple[int, ...]
    """The oldest version that reads a paged cache."""
    majors: frozenset[int]
    """Major compute capabilities with kernels for a paged cache."""
    only: str
    """``majors`` in words, for a refusal."""
    level: GraphSupport
    why: str
    """The reason for ``level``, as the predicate of a sentence about the library."""
    max_head_dim: int = 256
    narrow: frozenset[int] = frozenset()
    """Majors whose head dimensions are those up to 128, and ``max_head_dim`` itself."""
    page_multiple: int = 1
    """Page sizes are multiples of this many tokens."""
    fp8_majors: frozenset[int] = frozenset()
    """Majors that read an FP8 cache."""
    sinks: bool = False
    """Whether its kernels take learned attention sinks (gpt-oss)."""
    splits: bool = False
    """Whether a call takes a number of KV splits."""
    ahead_of_time: bool = False
    """Whether tiles are scheduled by a separate call, before the graph."""

    def installed(self, environment: Environment) -> bool:
        """Whether the environment has this library, in a version that reads a paged cache."""
        version = environment.package(self.package)
        return version is not None and version >= self.since

    def refusal(self, model: Attention, major: int) -> str | None:
        """Return why the library cannot serve these layers on compute capability ``major``.x, or None."""
        if major not in self.majors:
            return f"{self.title} {self.only}, not SM{major}x"
        if model.dtype is DataType.FLOAT32:
            return f"{self.title} takes no float32"
        if model.head_dim % 8 or model.head_dim > self.max_head_dim:
            return (
                f"{self.title} takes head dimensions that are multiples of 8 up to {self.max_head_dim}, "
                f"not {model.head_dim}"
            )
        if major in self.narrow and 128 < model.head_dim < self.max_head_dim:
            return (
                f"{self.title} takes head dimensions up to 128, and {self.max_head_dim}, on SM{major}x, "
                f"not {model.head_dim}"
            )
        if model.sinks and not self.sinks:
            return f"{self.title} takes no attention sinks"
        fp8_missing = model.kv_dtype is DataType.FP8 and major not in self.fp8_majors
        if model.kv_dtype is DataType.NVFP4 or fp8_missing:
            return f"{self.title} takes no {model.kv_dtype.value} KV cache on SM{major}x"
        return None


_SM80_AND_NEWER = frozenset(range(8, 100))

_FA2_WHY = (
    "packs the query heads of a graph captured for one token a request, which cannot then serve mixed "
    "batches (vllm#22945)"
)

FA3 = Library(
    title="FlashAttention 3",
    package="flash-attn-3",
    module="flash_attn_interface",
    since=(3,),
    majors=frozenset({9}),
    only="is made for SM90",
    level=GraphSupport.ALWAYS,
    why="reads lengths and tile counts on the device, so a graph holds any batch",
    fp8_majors=frozenset({9}),
    sinks=True,
    splits=True,
    ahead_of_time=True,
)
FA4 = Library(
    title="FlashAttention 4",
    package="flash-attn-4",
    module="flash_attn.cute",
    since=(4,),
    majors=frozenset({9, 10}),
    only="reads a paged cache on SM90 and SM100 (4.0.0b36)",
    level=GraphSupport.ALWAYS,
    why="reads lengths and pages on the device, so a graph holds any batch",
    narrow=frozenset({10}),
    fp8_majors=frozenset({10}),
    sinks=True,
)
FA2 = Library(
    title="FlashAttention 2",
    package="flash-attn",
    module="flash_attn",
    since=(2,),
    majors=_SM80_AND_NEWER,
    only="needs SM80 or newer",
    level=GraphSupport.UNIFORM_BATCH,
    why=_FA2_WHY,
    page_multiple=256,
    splits=True,
)
TORCH = Library(
    title="torch varlen attention",
    package="torch",
    module="torch.nn.attention.varlen",
    since=(2, 13),
    majors=_SM80_AND_NEWER,
    only="needs SM80 or newer",
    level=GraphSupport.UNIFORM_BATCH,
    why=f"runs the FlashAttention 2 kernel, which {_FA2_WHY}",
    page_multiple=256,
)

LIBRARIES = (FA4, FA3, FA2, TORCH)
"""In order of preference.

On SM90, where 3 and 4 both run, only 3 splits a long KV over the machine (4.0.0b36 refuses to), and
vLLM 0.33 prefers it there. Deployments with few requests over long contexts should plan for an
environment without 4.
"""


def select(model: Attention, environment: Environment) -> Library | None:
    """Return the preferred installed library that serves these layers there, or None."""
    if environment.device.kind is not DeviceKind.CUDA:
        return None
    major, _ = environment.device.sm
    if model.latent is not None:
        return FA3 if FA3.installed(environment) and latent_refusal(model, major) is None else None
    return next((lib for lib in LIBRARIES if lib.installed(environment) and lib.refusal(model, major) is None), None)


def latent_refusal(model: Attention, major: int) -> str | None:
    """Return why latent attention cannot run on compute capability ``major``.x, or None."""
    if major != 9:
        return f"latent attention needs FlashAttention 3 on SM90, not SM{major}x"
    if model.kv_dtype not in (DataType.BFLOAT16, DataType.FLOAT16):
        return f"latent attention in FlashAttention 3 takes no {model.kv_dtype.value} KV cache"
    return None


def num_splits(library: Library, entry: Entry, attention: Attention, environment: Environment) -> int:
    """Return into how many parts a FULL graph may split each KV: from 1 to ``MAX_SPLITS``.

    It depends on the entry only, and is never 0, which leaves the choice to the library.
    """
    if library is FA3:
        # An upper bound: the kernel splits each request as far as its length is worth.
        # Splits times tokens are bounded, and with them the graph's pool, which holds the partial outputs.
        return max(1, MAX_SPLITS * SPLIT_TOKENS // max(entry.num_tokens, SPLIT_TOKENS))
    if library is FA2:
        # It splits every request this often: fill the multiprocessors once when all rows are real.
        blocks = (entry.num_reqs or 1) * attention.num_kv_heads
        return min(max((environment.device.multiprocessors or 1) // blocks, 1), MAX_SPLITS)
    # The calls of FlashAttention 4 and torch are made with a single split.
    return 1
