"""The flash_attention backend on a GPU, library by library, against a float32 loop over requests.

``PYTHONPATH=tests python tests/gpu/test_flash_attention.py`` runs it all, and prints the benchmark first;
``CAPTURE_PLANNER_GPU_EXAMPLES`` says how many examples a property takes (20).
"""

from __future__ import annotations

import math
import statistics
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import GraphSupport
from capture_planner.plugins.backend import Scoring
from capture_planner_flash_attention import libraries
from support.flash_attention_rig import (
    DTYPE,
    EXAMPLES,
    MAX_LEN,
    PAGES,
    Batch,
    Rig,
    batches,
    draw_rig,
    full,
    large_small_large,
    missing,
)

# Kernel libraries warn while they compile.
pytestmark = pytest.mark.filterwarnings("default")


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
