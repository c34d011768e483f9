"""The flash_attention backend on a GPU, library by library, against a float32 loop over requests.

``python tests/gpu/test_flash_attention.py`` runs it all, and prints the benchmark first;
``CAPTURE_PLANNER_GPU_EXAMPLES`` says how many examples a property takes (20).
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Callable
from importlib import metadata as installed
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.spec import Limits
from capture_planner.runtime.executor import NULL_PAGE, LayerCache, Metadata, Reservation, Scoring
from capture_planner_flash_attention import FlashAttention, libraries
from capture_planner_flash_attention.executor import FlashAttentionExecutor

# Kernel libraries warn while they compile.
pytestmark = pytest.mark.filterwarnings("default")
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


@pytest.fixture(params=libraries.LIBRARIES, ids=lambda library: library.package, scope="module")
def library(request: pytest.FixtureRequest) -> libraries.Library:
    """Return each library of the family that this machine has."""
    found: libraries.Library = request.param
    why = missing(found)
    if why is not None:
        pytest.skip(why)
    return found


@pytest.fixture(scope="module")
def mixing(library: libraries.Library) -> libraries.Library:
    """Return each of them whose graphs hold any batch."""
    if library.level is not GraphSupport.ALWAYS:
        pytest.skip(f"{library.title} holds uniform batches only")
    return library


class OnTheHost(dict[str, torch.Tensor]):
    """Device fields that are read back when they are asked for: never in a capture."""

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Return one of them as an array."""
        return super().__getitem__(name).cpu().numpy()


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
            host=OnTheHost(fields),
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
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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


@EXAMPLES
@given(st.data())
def test_eager_step_equals_the_reference(library: libraries.Library, data: st.DataObject) -> None:
    """Mixed batches at real extents, prompts among them."""
    rig = draw_rig(data, library, full(8, None, 512))
    batch = data.draw(batches(rig.entry, 8))
    rig.fill(batch)
    rig.step(rig.metadata(batch))
    rig.out[sum(batch.queries) :] = 0
    rig.check(batch)


@EXAMPLES
@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_uniform_graph_serves_any_uniform_batch(
    library: libraries.Library, data: st.DataObject, query_len: int
) -> None:
    """Large, half padded, large again, with NaN in the null page and in freed pages."""
    rig = draw_rig(data, library, full(data.draw(st.sampled_from([1, 4, 16]), "num_reqs"), query_len))
    large_small_large(rig, data.draw)


@EXAMPLES
@given(st.data())
def test_mixed_graph_serves_any_batch(mixing: libraries.Library, data: st.DataObject) -> None:
    """Decodes and prompts in one graph."""
    rig = draw_rig(data, mixing, full(8, None, data.draw(st.sampled_from([16, 300]), "num_tokens")))
    large_small_large(rig, data.draw)


def test_graph_serves_300_requests(library: libraries.Library) -> None:
    """300 rows, past where FlashAttention 4 looks up its blocks in another way; half of them padded."""
    rig = Rig(library, full(300, 1), page_size=PAGES[library.page_multiple][-1], head_dim=64)
    graph = rig.capture(Batch(queries=(1,) * 300, lengths=(MAX_LEN,) * 300))
    for rows in (300, 150, 300):
        batch = Batch(queries=(1,) * rows, lengths=tuple(1 + row * 2 for row in range(rows)), seed=rows)
        rig.replay(graph, batch)
        rig.check(batch)


@pytest.mark.parametrize("what", ["window", "softcap", "sinks", "all"])
def test_graph_applies_windows_softcaps_and_sinks(library: libraries.Library, what: str) -> None:
    """In a graph, where the library takes them."""
    scoring = Scoring(
        scale=0.1,
        softcap=20.0 if what in ("softcap", "all") else None,
        sinks=torch.linspace(-2, 4, 8, device="cuda").to(DTYPE) if what in ("sinks", "all") else None,
    )
    for page_size in PAGES[library.page_multiple]:
        window = 100 if what in ("window", "all") else None
        rig = Rig(library, full(8, 2), page_size=page_size, window=window, scoring=scoring)
        try:
            graph = rig.capture(Batch(queries=(2,) * 8, lengths=(MAX_LEN,) * 8))
        except RunError as refused:
            pytest.skip(str(refused))
        for lengths in ((700, 3, 129, 64, 511, 2, 101, 16), (99, 100, 640)):
            batch = Batch(queries=(2,) * len(lengths), lengths=lengths, seed=len(lengths))
            rig.replay(graph, batch)
            rig.check(batch, tolerance=2e-2)


def leaks(library: libraries.Library, where: str, page_size: int) -> bool:
    """Say whether NaN in keys and values that are masked reaches the output, by reading the kernels.

    Past a sequence, in its last page: only where whole pages are loaded as tiles, which
    FlashAttention 4 does with pages of 128 (its weight is 0, and 0 * NaN is NaN), and 3 for
    larger queries than this one. Behind a window: all of them load whole tiles there.
    """
    return where == "behind the window" or (library is libraries.FA4 and page_size == 128)


@pytest.mark.parametrize("where", ["past the sequence", "behind the window"])
def test_nan_in_masked_slots_leaks_as_documented(library: libraries.Library, where: str) -> None:
    """It is as the README says: who writes pages must keep NaN out of exactly these slots."""
    batch = Batch(queries=(1,), lengths=(700,))
    found = {}
    for page_size in PAGES[library.page_multiple]:
        rig = Rig(library, full(1, 1), page_size=page_size, window=100 if where[0] == "b" else None)
        rig.fill(batch)
        bad = range(600) if where[0] == "b" else range(700, -(-700 // page_size) * page_size)
        for slot in bad:
            page = rig.fields["block_table"][0, slot // page_size]
            rig.cache.keys[page, slot % page_size] = rig.cache.values[page, slot % page_size] = math.nan
        rig.step(rig.metadata())
        found[page_size] = bool(rig.out.isnan().any())
    assert found == {size: leaks(library, where, size) for size in PAGES[library.page_multiple]}


def benchmark(replays: int = 200) -> None:
    """Print the median time of one captured attention call, by CUDA events: decodes at 700 tokens."""
    for library in libraries.LIBRARIES:
        why = missing(library)
        if why is not None:
            print(f"{library.title}: skipped, {why}")  # noqa: T201
            continue
        for page_size in PAGES[library.page_multiple]:
            for num_reqs in (1, 8, 32, 64, 256):
                rig = Rig(library, full(num_reqs, 1), page_size=page_size, kv_heads=8)
                graph = rig.capture(Batch(queries=(1,) * num_reqs, lengths=(700,) * num_reqs))
                times = []
                for _ in range(replays):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    start.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    times.append(start.elapsed_time(end) * 1e3)
                shape = f"{num_reqs:4} requests of 700 tokens, 32/8 heads of 128, pages of {page_size:3}"
                print(f"{library.title}: {shape}: {statistics.median(times):7.1f} us")  # noqa: T201


if __name__ == "__main__":
    benchmark()
    sys.exit(pytest.main([__file__, "-q", "-ra", *sys.argv[1:]]))
