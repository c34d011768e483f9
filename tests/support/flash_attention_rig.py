"""The flash_attention backend on a GPU: one group, its graph, and a float32 loop over requests to compare with."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata as installed
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import NULL_PAGE, LayerCache, Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.spec import Limits
from capture_planner_flash_attention import FlashAttention, libraries
from capture_planner_flash_attention.executor import FlashAttentionExecutor

EXAMPLES = settings(
    max_examples=int(os.environ.get("CAPTURE_PLANNER_GPU_EXAMPLES", "20")), deadline=None, database=None
)
LAYER, MAX_LEN, DTYPE = 5, 768, torch.bfloat16
PAGES = {1: (16, 64, 128), 256: (256,)}
"""Page sizes that are tried, by the multiple that a library asks for."""


def missing(library: libraries.Library) -> str | None:
    """Return why a library cannot be tried here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        found = importlib.util.find_spec(library.module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        return f"{library.package} is not installed ({library.module})"
    here = environment(library)
    if not library.installed(here):
        return f"{library.package} is {here.packages.get(library.package)}, too old or of another name"
    major, _ = here.device.sm
    return None if major in library.majors else f"{library.title} has no kernels for SM{major}x"


def environment(library: libraries.Library) -> Environment:
    """Describe this machine, with one library on it."""
    properties = torch.cuda.get_device_properties(0)
    try:
        packages = {library.package: installed.version(library.package).partition("+")[0]}
    except installed.PackageNotFoundError:
        packages = {}
    device = Device(
        kind=DeviceKind.CUDA,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
    )
    return Environment(name="here", device=device, packages=packages)


class HostCopies(Mapping[str, np.ndarray[Any, Any]]):
    """Device fields that are copied to the host when they are read: never in a capture."""

    def __init__(self, fields: Mapping[str, torch.Tensor]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._fields[name].cpu().numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Batch(NamedTuple):
    """What the requests of one step are."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    seed: int = 0


class Rig:
    """One group on one library: a cache, the role's fields, and one graph's buffers."""

    def __init__(
        self,
        library: libraries.Library,
        entry: Entry,
        *,
        page_size: int,
        kv_heads: int = 2,
        group: int = 4,
        head_dim: int = 128,
        window: int | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        reqs = entry.num_reqs or 1
        self.entry, self.page_size = entry, page_size
        self.attention = Attention(
            num_layers=1,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_model_len=MAX_LEN,
            max_query_len=entry.query_len or 1,
            window=window,
        )
        self.scoring = scoring or Scoring(scale=head_dim**-0.5)
        self.width = -(-MAX_LEN // page_size)
        cells = (1 + 2 * reqs * self.width, page_size, kv_heads, head_dim)
        keys, values = (torch.zeros(cells, dtype=DTYPE, device="cuda") for _ in "kv")
        self.cache = LayerCache(keys=keys, values=values)

        def vector(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device="cuda")

        self.fields = {
            "query_start_loc": vector(reqs + 1),
            "seq_lens": vector(reqs),
            "block_table": vector(reqs, self.width),
        }
        if library.ahead_of_time:
            self.fields["scheduler_metadata"] = vector(1 + 4 * -(-reqs // 4) * 4)
        rows = (entry.num_tokens, kv_heads * group, head_dim)
        self.query, self.out = (torch.zeros(rows, dtype=DTYPE, device="cuda") for _ in range(2))
        self.runs = FlashAttention().reserve(
            Reservation(
                role=Role.TARGET,
                group="all",
                attention=self.attention,
                environment=environment(library),
                entries=(entry,),
                limits=Limits(max_num_reqs=reqs, max_num_tokens=entry.num_tokens),
                caches={LAYER: self.cache},
                page_size=page_size,
                fields=self.fields,
                workspace=torch.empty(0, dtype=torch.uint8, device="cuda"),
                pinned=torch.empty(0, dtype=torch.uint8),
                device=torch.device("cuda"),
            )
        )
        assert isinstance(self.runs, FlashAttentionExecutor)

    def fill(self, batch: Batch) -> None:
        """Write one batch: NaN in the null page and in every page that no request has.

        Slots past a sequence, in its own last page, hold large numbers: some kernels load them.
        """
        made = torch.Generator("cuda").manual_seed(batch.seed)
        real, (reqs, width) = len(batch.queries), self.fields["block_table"].shape
        pages = self.cache.keys.shape[0]
        shuffled = 1 + torch.randperm(pages - 1, generator=made, device="cuda")
        # Padded rows, and cells past a sequence, name pages that were freed, as after a larger batch.
        table = shuffled[: reqs * width].view(reqs, width).clone()
        free = shuffled[reqs * width :]
        table[real:] = NULL_PAGE
        held = torch.zeros(pages, dtype=torch.bool, device="cuda")
        for row, length in enumerate(batch.lengths):
            used = -(-length // self.page_size)
            held[table[row, :used]] = True
            table[row, used:] = free[: width - used]
        for tensor in (self.cache.keys, self.cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=made, device="cuda"))
            tensor[~held] = math.nan
            for row, length in enumerate(batch.lengths):
                if length % self.page_size:
                    tensor[table[row, length // self.page_size], length % self.page_size :] = 1e4
        self.query.copy_(torch.randn(self.query.shape, generator=made, device="cuda"))
        self.query[sum(batch.queries) :] = math.nan
        starts = torch.tensor([0, *batch.queries, *[0] * (reqs - real)]).cumsum(0)
        self.fields["query_start_loc"].copy_(starts)
        self.fields["seq_lens"].copy_(torch.tensor([*batch.lengths, *[0] * (reqs - real)]))
        self.fields["block_table"].copy_(table)

    def metadata(self, batch: Batch | None = None) -> Metadata:
        """Describe a FULL step of the entry, or an eager step of a batch."""
        cut = len(batch.queries) if batch else self.entry.num_reqs or 1
        rows = {"query_start_loc": cut + 1, "seq_lens": cut, "block_table": cut}
        fields = {name: tensor[: rows.get(name)] for name, tensor in self.fields.items()}
        return Metadata(
            entry=None if batch else self.entry,
            num_reqs=cut,
            num_tokens=sum(batch.queries) if batch else self.entry.num_tokens,
            max_query_len=max(batch.queries) if batch else self.entry.query_len or self.entry.num_tokens,
            max_seq_len=max(batch.lengths) if batch else MAX_LEN,
            fields=fields,
            host=HostCopies(fields),
        )

    def step(self, metadata: Metadata) -> None:
        """Prepare and attend."""
        self.runs.prepare(metadata)
        self.attend(metadata)

    def attend(self, metadata: Metadata) -> None:
        """Do what a graph holds."""
        rows = slice(metadata.num_tokens)
        self.runs.attend(LAYER, self.query[rows], self.out[rows], self.scoring, metadata)

    def capture(self, batch: Batch) -> torch.cuda.CUDAGraph:
        """Warm up twice on a side stream, and capture."""
        self.fill(batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(self.metadata())
        torch.cuda.current_stream().wait_stream(side)
        self.runs.prepare(self.metadata())
        self.baked = self.runs.layout()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.attend(self.metadata())
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, batch: Batch) -> None:
        """Run another batch, into an output that holds NaN."""
        self.fill(batch)
        self.out.fill_(math.nan)
        self.runs.prepare(self.metadata())
        assert self.runs.layout() == self.baked
        graph.replay()

    def check(self, batch: Batch, tolerance: float = 5e-3) -> None:
        """Hold real rows to a float32 loop over requests, and the rest to exact zeros."""
        total = sum(batch.queries)
        got = self.out[:total].float()
        torch.testing.assert_close(got, self.expected(batch), rtol=2 * tolerance, atol=tolerance)
        assert not self.out[total:].any()

    def expected(self, batch: Batch) -> torch.Tensor:
        """``float32[real tokens, num_heads, head_dim]``."""
        rows, first, scoring, attention = [], 0, self.scoring, self.attention
        for row, (q, length) in enumerate(zip(batch.queries, batch.lengths, strict=True)):
            pages = self.fields["block_table"][row, : -(-length // self.page_size)].long()
            group = attention.num_heads // attention.num_kv_heads
            keys, values = (
                tensor[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                for tensor in (self.cache.keys, self.cache.values)
            )
            at = torch.arange(length - q, length, device="cuda")[:, None]
            key = torch.arange(length, device="cuda")
            seen = key <= at
            if attention.window is not None:
                seen &= key > at - attention.window
            query = self.query[first : first + q].float() * scoring.scale
            scores = torch.einsum("qhd,khd->hqk", query, keys)
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            scores = scores.masked_fill(~seen, -math.inf)
            if scoring.sinks is not None:
                scores = torch.cat([scores, scoring.sinks.float()[:, None, None].expand(-1, q, 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            unseen = ~seen.any(0)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values.masked_fill(unseen[:, None, None], 0)))
            first += q
        return torch.cat(rows)


def full(num_reqs: int, query_len: int | None, num_tokens: int | None = None) -> Entry:
    """Make the key of a FULL graph."""
    tokens = num_tokens or num_reqs * (query_len or 1)
    return Entry(mode=GraphMode.FULL, num_tokens=tokens, num_reqs=num_reqs, query_len=query_len)


@st.composite
def batches(draw: st.DrawFn, entry: Entry, most: int) -> Batch:
    """Draw at most so many requests that the entry holds."""
    queries: list[int] = []
    for _ in range(draw(st.integers(1, most))):
        room = entry.num_tokens - sum(queries)
        if room < (entry.query_len or 1):
            break
        short, long = st.integers(1, min(room, 8)), st.integers(1, room)
        queries.append(entry.query_len or draw(short | long))
    return Batch(
        queries=tuple(queries),
        lengths=tuple(draw(st.integers(q, MAX_LEN)) for q in queries),
        seed=draw(st.integers(0, 1 << 16)),
    )


def draw_rig(data: st.DataObject, library: libraries.Library, entry: Entry) -> Rig:
    """Draw the shape of a group: GQA of 1 to 8, head dimension, page size."""
    return Rig(
        library,
        entry,
        page_size=data.draw(st.sampled_from(PAGES[library.page_multiple]), "page size"),
        kv_heads=data.draw(st.sampled_from([1, 2]), "KV heads"),
        group=data.draw(st.sampled_from([1, 2, 4, 8]), "query heads each"),
        head_dim=data.draw(st.sampled_from([64, 128]), "head dimension"),
    )


def large_small_large(rig: Rig, draw: Callable[[st.SearchStrategy[Batch]], Batch]) -> None:
    """Capture a full graph, and replay it with other lengths and pages: full, half padded, full."""
    entry = rig.entry
    most = entry.num_reqs or 1
    graph = rig.capture(draw(batches(entry, most)))
    for rows in (most, max(most // 2, 1), most):
        batch = draw(batches(entry, rows))
        rig.replay(graph, batch)
        rig.check(batch)
