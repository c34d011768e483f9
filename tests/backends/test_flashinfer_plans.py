"""When FlashInfer's executor plans, what of, and how its plans are kept apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capture_planner.errors import RunError
from capture_planner_flashinfer import FlashInfer, stock, wrappers
from capture_planner_flashinfer.selection import KernelFamily
from support import flashinfer_rig as checks
from support.flashinfer_cases import SETTINGS, WRAPPERS, each_family, reservation_of, rig_of
from support.flashinfer_standin import FENCES, graphs_of, newer_fast_decode_plan

pytestmark = pytest.mark.usefixtures("one_thread", "library")


@each_family
def test_plan_is_renewed_only_if_needed(family: KernelFamily) -> None:
    """The host plans when page counts change, and after the workspace was overwritten."""
    checks.check_plan_counts(rig_of(SETTINGS[family]))


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("family", WRAPPERS)
def test_wrappers_plan_fast_after_the_first_plan(library: Any, family: KernelFamily, newer: bool) -> None:
    """Only the first plan of a wrapper copies lists that the runner has filled already."""
    if newer:
        library.fast_decode_plan = newer_fast_decode_plan
    rig = rig_of(SETTINGS[family])
    full = {wrapper: wrapper.full_plans for wrapper in graphs_of(rig).values()}
    # The softcap of the first layer, which the first graph learns of in its warm-up, chooses another kernel.
    assert set(full.values()) == ({1} if SETTINGS[family].softcap is None else {1, 2})
    before = {wrapper: wrapper.fast_plans for wrapper in full}
    for length in (10, 100, 600, 10):
        checks.check_replays(rig, [([length] * 3, length)])
    assert {wrapper: wrapper.full_plans for wrapper in full} == full
    assert all(wrapper.fast_plans - before[wrapper] == 4 for wrapper in full)


class Fence:
    """Writes down who waits for the copy of a plan, and where one is recorded."""

    def synchronize(self) -> None:
        FENCES.append(("wait", id(self)))

    def record(self) -> None:
        FENCES.append(("record", id(self)))


@pytest.mark.parametrize("family", WRAPPERS)
def test_plan_waits_for_the_copy_of_the_last_one(monkeypatch: pytest.MonkeyPatch, family: KernelFamily) -> None:
    """Each plan waits for the record of the last on the same pinned memory, which stands right after it."""
    made: list[Fence] = []
    monkeypatch.setattr(wrappers, "_fence", lambda device: made.append(Fence()) or made[-1])
    FENCES.clear()
    rig = rig_of(SETTINGS[family])
    rig.executor = FlashInfer().reserve(reservation_of(rig))
    for length in (10, 100, 600):
        for entry in rig.entries:
            rig.stage(entry, rig.batch([length] * 2, [rig.setting.query_len] * 2, 1, 0.0).values)
        rig.stage(None, rig.batch([length], [3], 1, 0.0).values)
    assert len(FENCES) % 3 == 0
    owner: dict[int, int] = {}
    for (wait, fence), (plan, memory), (record, same) in zip(FENCES[::3], FENCES[1::3], FENCES[2::3], strict=True):
        assert (wait, plan, record, fence) == ("wait", "plan", "record", same)
        assert owner.setdefault(memory, fence) == fence, "another wrapper's fence"
    assert len(owner) >= 3


def test_first_plan_covers_the_most_rows() -> None:
    """A graph with more requests than the limits admit is captured on its largest plan."""
    rig = rig_of(SETTINGS[KernelFamily.PREFILL])
    rig.executor = made = FlashInfer().reserve(reservation_of(rig))
    entry = rig.entries[0]
    for lengths in ([4, 4], [90] * 8):
        rig.stage(entry, rig.batch(lengths, [4] * len(lengths), 1, 0.0).values)
        assert made.layout()[1] == entry.num_tokens


@pytest.mark.parametrize("family", [KernelFamily.CUDA_CORE, KernelFamily.TENSOR_CORE])
def test_decode_wrappers_use_tensor_cores_as_planned(family: KernelFamily) -> None:
    """The plan's fields and workspace are those of one of the two kernels."""
    found = graphs_of(rig_of(SETTINGS[family])).values()
    assert {wrapper.tensor_cores for wrapper in found} == {family is KernelFamily.TENSOR_CORE}


def test_prefill_wrappers_plan_again_for_other_queries() -> None:
    """A prefill plan depends on query lengths, which a batch may have fewer of than its graph."""
    rig = rig_of(SETTINGS[KernelFamily.PREFILL])
    for queries in ([4, 4], [2, 4], [4, 2]):
        rig.replay(rig.entries[0], rig.batch([40, 40], queries, 1, 0.0))


def test_launch_has_the_rows_of_a_fast_plan() -> None:
    """A batch that is smaller than its graph runs without the graph too, on what was planned for it."""
    rig = rig_of(SETTINGS[KernelFamily.PREFILL])
    entry = rig.entries[0]
    for count in (2, 5, 3):
        batch = rig.batch([40] * count, [4] * count, count, 0.0)
        metadata = rig.stage(entry, batch.values)
        query = torch.zeros(entry.num_tokens, *batch.query.shape[1:], dtype=batch.query.dtype)
        query[: len(batch.query)] = batch.query
        out = torch.full_like(query, torch.nan)
        rig.executor.attend(checks.LAYER, query, out, rig.scoring, metadata)
        checks.close(out[: len(batch.query)], batch.expected)
        assert not out[len(batch.query) :].any()


def test_eager_steps_plan_again_for_other_pages() -> None:
    """An eager wrapper keeps copies of the page lists, so equal counts do not make an equal plan."""
    rig = rig_of(SETTINGS[KernelFamily.CUDA_CORE])
    for seed in range(3):
        rig.eager(rig.batch([40, 5], [7, 1], seed, 0.0))


@each_family
def test_stock_plan_has_the_same_batch_and_separate_memory(
    library: Any, monkeypatch: pytest.MonkeyPatch, family: KernelFamily
) -> None:
    """Each call is one plan of the library; no graph, buffer or plan of the executor changes."""
    monkeypatch.setattr(stock, "FLOATS", 1 << 20)
    made: list[Any] = []
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        wrapper = getattr(library, name)
        setattr(library, name, lambda *args, of=wrapper, **how: made.append(of(*args, **how)) or made[-1])
    rig = rig_of(SETTINGS[family])
    reserved = len(made)
    query_len, size = rig.setting.query_len, rig.setting.page_size
    entry = rig.entries[0]
    for lengths in ([40], [40, 5 * size + 1, 7], [90] * checks.REQS):
        values = rig.batch(lengths, [query_len] * len(lengths), 1, 0.0).values
        metadata = rig.stage(entry, values)
        held = [wrapper._plan_info for wrapper in made[:reserved]]
        fields = {name: field.clone() for name, field in metadata.fields.items()}
        planned, layout = rig.executor.plans, rig.executor.layout()
        call = rig.executor.stock(metadata)
        assert len(made) == reserved + 1, "one wrapper a shape, when it is first asked for"
        separate = made[-1]
        before = separate.full_plans
        call()
        call()
        assert separate.full_plans == before + 2
        counts = [-(-length // size) for length in lengths]
        assert separate.indptr.diff().tolist()[: len(counts)] == counts
        pages = [page for row, count in enumerate(counts) for page in values["block_table"][row, :count]]
        assert separate.indices[: len(pages)].tolist() == pages
        assert [wrapper._plan_info for wrapper in made[:reserved]] == held
        assert (rig.executor.plans, rig.executor.layout()) == (planned, layout)
        assert all(torch.equal(fields[name], field) for name, field in metadata.fields.items())
        first, end = rig.workspace.data_ptr(), rig.workspace.data_ptr() + rig.workspace.numel()
        assert not any(first <= part.data_ptr() < end for part in (separate.floats, separate.ints))
    expected = {KernelFamily.CUDA_CORE: False, KernelFamily.TENSOR_CORE: True}.get(family)
    assert expected is None or separate.tensor_cores is expected


def test_stock_rejects_eager_steps() -> None:
    """An eager step is planned by the library itself, at each step."""
    rig = rig_of(SETTINGS[KernelFamily.XQA])
    metadata = rig.stage(None, rig.batch([40], [4], 1, 0.0).values)
    with pytest.raises(RunError, match="an eager step has no plan of its own"):
        rig.executor.stock(metadata)
