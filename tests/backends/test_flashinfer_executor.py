"""FlashInfer's executor over a stand-in library: its calls, its plans, and what it refuses.

Graphs are core's recorded graphs. The checks are those that tests/gpu/test_flashinfer.py makes on a device.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from capture_planner_flashinfer import FlashInfer, kernels, wrappers
from capture_planner_flashinfer.backend import Path, parts
from capture_planner_flashinfer.workspace import INT_WORKSPACE
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.entry import Entry
from capture_planner.errors import BackendError, RunError
from capture_planner.model import DataType, Latent
from capture_planner.modes import GraphMode, Role
from capture_planner.runtime.contract import LayerCache, Reservation, Scoring
from capture_planner.spec import Limits

sys.path.insert(0, str(FilePath(__file__).parent))
sys.path.insert(0, str(FilePath(__file__).parents[1] / "gpu"))

import flashinfer_rig as checks
from flashinfer_standin import CPU, graphs_of, new_kernel, recorded, standin


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small operators are many times slower where threads of several workers wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the stand-in where FlashInfer would be imported from."""
    made: Any = standin()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", made.decode)
    return made


def rig_of(setting: Any) -> Any:
    """Make a rig on the CPU."""
    return checks.Rig(setting, CPU, recorded)


SMALL = {"kv_heads": 2, "head_dim": 64}
SETTINGS = {
    Path.CUDA_CORE: checks.Setting(heads=4, **SMALL),
    Path.TENSOR_CORE: checks.Setting(heads=8, page_size=64, window=33, softcap=20.0, **SMALL),
    Path.PREFILL: checks.Setting(heads=4, query_len=4, softcap=5.0, **SMALL),
    Path.XQA: checks.Setting(heads=4, query_len=4, capability="9.0", **SMALL),
    Path.TRTLLM_GEN: checks.Setting(heads=4, query_len=2, window=33, capability="10.0", **SMALL),
}
each_path = pytest.mark.parametrize("chosen", SETTINGS, ids=lambda chosen: chosen.name)
few = settings(max_examples=6)


@each_path
def test_each_setting_takes_its_path(chosen: Path) -> None:
    """The five settings reach the five paths, so that what follows is about all of them."""
    assert rig_of(SETTINGS[chosen]).path is chosen


@each_path
@few
@given(steps=checks.changes())
def test_replays_equal_dense_attention(chosen: Path, steps: Any) -> None:
    """A graph gives the right rows whatever batch came before, and its plan is never stale."""
    checks.check_replays(rig_of(SETTINGS[chosen]), steps, tail=float("nan"))


@each_path
@few
@given(steps=checks.changes())
def test_replays_depend_on_nothing_that_is_poisoned(chosen: Path, steps: Any) -> None:
    """Plans are made again and counters zeroed when the workspace was overwritten."""
    checks.check_poisoned(rig_of(SETTINGS[chosen]), steps[:2])


@each_path
@few
@given(requests=checks.mixed, seed=checks.seeds)
def test_eager_steps_equal_dense_attention(chosen: Path, requests: Any, seed: int) -> None:
    """Mixed batches run on real extents; their partial results spare plans and counters."""
    checks.check_eager(rig_of(SETTINGS[chosen]), requests, seed)


@each_path
def test_a_plan_is_made_only_where_one_is_needed(chosen: Path) -> None:
    """The host plans when page counts change, and after the workspace was overwritten."""
    checks.check_plan_counts(rig_of(SETTINGS[chosen]))


@pytest.mark.parametrize("query_len", [1, 3])
def test_trtllm_gen_takes_its_counters_as_an_argument_since_0_7(
    monkeypatch: pytest.MonkeyPatch, query_len: int
) -> None:
    """Counters and scratch are apart whichever way the library takes them."""
    made: Any = standin(new_kernel)
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", made.decode)
    rig = rig_of(checks.Setting(heads=4, query_len=query_len, capability="10.0", **SMALL))
    checks.check_eager(rig, [(70, query_len), (3, 9)], 5)
    checks.check_poisoned(rig, [([9, 100], 5), ([640], 6)])


@pytest.mark.parametrize("chosen", [Path.CUDA_CORE, Path.TENSOR_CORE, Path.PREFILL])
def test_wrappers_share_the_fields_and_one_float_workspace(chosen: Path) -> None:
    """Registered buffers are the role's fields, and every byte lies in the reserved workspace."""
    rig = rig_of(SETTINGS[chosen])
    found = [*graphs_of(rig).values(), rig.executor._wrappers[None]._wrapper]
    fields = rig.fields.by_group[checks.GROUP]
    for wrapper in found[:-1]:
        assert wrapper.indptr.data_ptr() == fields["paged_kv_indptr"].tensor.data_ptr()
        assert wrapper.indices.data_ptr() == fields["paged_kv_indices"].tensor.data_ptr()
        assert wrapper.last.data_ptr() == fields["paged_kv_last_page_len"].tensor.data_ptr()
        if chosen is Path.PREFILL:
            assert wrapper.starts.data_ptr() == fields["qo_indptr"].tensor.data_ptr()
    first, last = rig.workspace.data_ptr(), rig.workspace.data_ptr() + rig.workspace.numel()
    taken = sorted((w.ints.data_ptr(), w.ints.data_ptr() + w.ints.numel()) for w in found)
    floats = {(w.floats.data_ptr(), w.floats.data_ptr() + w.floats.numel()) for w in found}
    assert len(floats) == 1
    ranges = [*taken, *floats]
    assert ranges[0][0] == first
    assert ranges[-1][1] == last
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    first = rig.pinned.data_ptr()
    staged = sorted(wrapper._pin_memory_int_workspace_buffer.data_ptr() - first for wrapper in found)
    assert staged == [i * INT_WORKSPACE for i in range(len(found))]


@pytest.mark.parametrize("chosen", [Path.CUDA_CORE, Path.TENSOR_CORE])
def test_decodes_are_planned_fast_after_the_first(chosen: Path) -> None:
    """Only the first plan of a decode wrapper copies lists that the runner has filled already."""
    rig = rig_of(SETTINGS[chosen])
    for length in (10, 100, 600, 10):
        checks.check_replays(rig, [([length] * 3, length)])
    softcap = SETTINGS[chosen].softcap
    for wrapper in graphs_of(rig).values():
        assert wrapper.full_plans == (1 if softcap is None else wrapper.full_plans)
        assert wrapper.full_plans <= 2, "the softcap of the first layer chooses another kernel"
        assert wrapper.fast_plans == 4


def test_the_first_plan_covers_the_most_rows() -> None:
    """A graph with more requests than the limits admit is captured on its largest plan."""
    rig = rig_of(SETTINGS[Path.PREFILL])
    rig.executor = made = FlashInfer().reserve(reservation_of(rig))
    entry = rig.entries[0]
    for lengths in ([4, 4], [90] * 8):
        rig.stage(entry, rig.batch(lengths, [4] * len(lengths), 1, 0.0).values)
        assert made.layout()[1] == entry.num_tokens


@pytest.mark.parametrize("chosen", [Path.CUDA_CORE, Path.TENSOR_CORE])
def test_tensor_cores_are_asked_for_where_they_are_planned(chosen: Path) -> None:
    """The plan's fields and workspace are those of one of the two kernels."""
    found = graphs_of(rig_of(SETTINGS[chosen])).values()
    assert {wrapper.tensor_cores for wrapper in found} == {chosen is Path.TENSOR_CORE}


def test_other_queries_on_the_same_pages_are_planned_again() -> None:
    """A prefill plan depends on query lengths, which a batch may have fewer of than its graph."""
    rig = rig_of(SETTINGS[Path.PREFILL])
    for queries in ([4, 4], [2, 4], [4, 2]):
        rig.replay(rig.entries[0], rig.batch([40, 40], queries, 1, 0.0))


def test_eager_steps_on_other_pages_are_planned_again() -> None:
    """An eager wrapper keeps copies of the page lists, so equal counts do not make an equal plan."""
    rig = rig_of(SETTINGS[Path.CUDA_CORE])
    for seed in range(3):
        rig.eager(rig.batch([40, 5], [7, 1], seed, 0.0))


def test_the_first_eager_step_has_the_softcap_of_its_layer() -> None:
    """The plan before the first layer attends cannot know the softcap, and is made again."""
    rig = rig_of(SETTINGS[Path.PREFILL])
    rig.executor = FlashInfer().reserve(reservation_of(rig))
    rig.eager(rig.batch([40, 5], [7, 1], 1, 0.0))


def test_counters_are_zeroed_once_for_each_write_to_the_workspace() -> None:
    """A step after which nobody wrote to the workspace does not write to it either."""
    rig = rig_of(SETTINGS[Path.XQA])
    batch = rig.batch([40, 5], [4, 4], 1, 0.0)
    rig.poison()
    rig.replay(rig.entries[0], batch)
    before = rig.workspace._version
    rig.replay(rig.entries[0], batch)
    assert rig.workspace._version == before


def test_kernels_without_a_plan_get_dense_queries() -> None:
    """They know no strides of a query, and rotary embedding may leave some."""
    rig = rig_of(SETTINGS[Path.XQA])
    entry = rig.entries[0]
    batch = rig.batch([40] * 8, [4] * 8, 1, 0.0)
    query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty_like(batch.query)
    rig.executor.attend(checks.LAYER, query, out, rig.scoring, rig.stage(entry, batch.values))
    checks.close(out, batch.expected)


def reservation_of(rig: Any, **changes: Any) -> Reservation:
    """Return what a rig reserves with, as far as it is asked for."""
    planned = checks.environment(rig.setting, CPU)
    attention = checks.Attention(
        num_layers=1,
        num_heads=rig.setting.heads,
        num_kv_heads=rig.setting.kv_heads,
        head_dim=rig.setting.head_dim,
        max_model_len=checks.LENGTH,
        max_query_len=rig.setting.query_len,
    )
    given_ = {
        "role": Role.TARGET,
        "group": checks.GROUP,
        "attention": attention,
        "environment": planned,
        "entries": rig.entries,
        "limits": Limits(max_num_reqs=checks.REQS, max_num_tokens=checks.TOKENS),
        "caches": {checks.LAYER: rig.cache},
        "page_size": rig.setting.page_size,
        "fields": {name: b.tensor for name, b in rig.fields.by_group[checks.GROUP].items()},
        "workspace": rig.workspace,
        "pinned": torch.zeros(8 * INT_WORKSPACE, dtype=torch.uint8),
        "device": CPU,
    }
    return Reservation(**given_ | changes)


def test_scale_is_that_of_each_layer_and_softcap_that_of_the_group() -> None:
    """One plan serves layers of any scale, and refuses a second softcap."""
    rig = rig_of(SETTINGS[Path.CUDA_CORE])
    batch = rig.batch([40, 5], [1, 1], 3, 0.0)
    metadata = rig.stage(None, batch.values)
    out = torch.empty_like(batch.query)
    for scale in (0.01, 1.0):
        rig.executor.attend(checks.LAYER, batch.query, out, Scoring(scale=scale), metadata)
        rig.scoring = Scoring(scale=scale)
        checks.close(out, rig.batch([40, 5], [1, 1], 3, 0.0).expected)
    with pytest.raises(
        BackendError, match=r"layer 3: its softcap is 30\.0, and an earlier layer .* has None"
    ):
        rig.executor.attend(checks.LAYER, batch.query, out, Scoring(scale=1.0, softcap=30.0), metadata)


@each_path
def test_sinks_are_refused_by_name(chosen: Path) -> None:
    """Sinks are refused where a layer has them, and before that where the plan says so."""
    rig = rig_of(SETTINGS[chosen])
    batch = rig.batch([40], [1], 3, 0.0)
    metadata = rig.stage(None, batch.values)
    scoring = Scoring(scale=1.0, sinks=torch.zeros(rig.setting.heads))
    with pytest.raises(BackendError, match="layer 3 have learned sinks"):
        rig.executor.attend(checks.LAYER, batch.query, batch.query.clone(), scoring, metadata)


@pytest.mark.parametrize("chosen", [Path.XQA, Path.TRTLLM_GEN])
def test_kernels_without_a_plan_refuse_a_softcap(chosen: Path) -> None:
    """XQA and trtllm-gen have no softcap, which shows in the first warm-up."""
    setting = attrs.evolve(SETTINGS[chosen], softcap=30.0)
    with pytest.raises(BackendError, match=f"{chosen.value} has no softcap.* 30.0"):
        rig_of(setting)


def test_a_graph_that_was_not_reserved_is_refused() -> None:
    """A wrapper's batch is fixed, so there is none for another shape."""
    rig = rig_of(SETTINGS[Path.CUDA_CORE])
    entry = Entry(mode=GraphMode.FULL, num_tokens=3, num_reqs=3, query_len=1)
    with pytest.raises(RunError, match="no wrapper for FULL 3 tokens, 3 requests of 1"):
        rig.stage(entry, rig.batch([4, 4], [1, 1], 1, 0.0).values)


LATENT = Latent(kv_lora_rank=512, rope_head_dim=64)
PIECEWISE = Entry(mode=GraphMode.PIECEWISE, num_tokens=64)


@pytest.mark.parametrize(
    ("setting", "attention", "changes", "says"),
    [
        ("9.0", {"head_dim": 80}, {}, "head dimension of 80.*64, 128 or 256"),
        ("9.0", {"causal": False}, {}, "not causal"),
        ("8.0", {"decode_context": 2}, {}, "decode context parallelism"),
        ("10.0", {"latent": LATENT}, {}, "latent attention"),
        ("9.0", {"latent": LATENT}, {}, "latent attention needs SM100"),
        ("8.0", {"kv_dtype": DataType.FP8}, {}, "KV cache of fp8 needs scales"),
        ("8.0", {"num_heads": 3}, {}, "2 KV heads do not divide 3"),
        ("9.0", {"sinks": True}, {}, "learned sinks"),
        ("9.0", {}, {"page_size": 8}, "XQA takes pages of 16, 32, 64 or 128 tokens, not 8"),
        ("10.0", {}, {"page_size": 128}, "trtllm-gen takes pages of 16, 32 or 64 tokens, not 128"),
        ("8.0", {}, {"page_size": 8}, r"layer 3: keys are .* expected .*num_pages, 8, 2, 64"),
        ("8.0", {}, {"entries": (attrs.evolve(PIECEWISE, mode=GraphMode.FULL, num_reqs=8),)}, "mixed"),
        (
            "8.0",
            {},
            {"workspace": torch.zeros(64, dtype=torch.uint8)},
            "64 bytes of workspace.*plan it again",
        ),
        ("8.0", {}, {"pinned": torch.zeros(64, dtype=torch.uint8)}, "64 bytes of pinned memory"),
    ],
)
def test_what_is_not_run_is_refused_at_reserve(setting: str, attention: Any, changes: Any, says: str) -> None:
    """Each refusal names the role, the group, what is wrong, and what is supported."""
    rig = rig_of(checks.Setting(heads=4, capability=setting, **SMALL))
    asked = reservation_of(rig, **changes)
    asked = attrs.evolve(asked, attention=attrs.evolve(asked.attention, **attention))
    with pytest.raises(BackendError, match=f"flashinfer: target, group {checks.GROUP}.*{says}"):
        FlashInfer().reserve(asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_other_element_types_are_refused(dtype: torch.dtype) -> None:
    """The kernels take half precision alone."""
    rig = rig_of(SETTINGS[Path.CUDA_CORE])
    keys = rig.cache.keys.to(dtype)
    with pytest.raises(BackendError, match=f"keys are {dtype}"):
        FlashInfer().reserve(reservation_of(rig, caches={0: LayerCache(keys=keys, values=keys)}))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FlashInfer there is a reason and a remedy, not an ImportError."""
    rig = rig_of(SETTINGS[Path.CUDA_CORE])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendError, match=r"flashinfer-python.*install capture-planner-flashinfer\[run\]"):
        FlashInfer().reserve(reservation_of(rig))


def test_without_full_graphs_there_is_the_eager_wrapper_alone() -> None:
    """A PIECEWISE plan needs, and gets, memory for one wrapper."""
    rig = rig_of(SETTINGS[Path.CUDA_CORE])
    asked = reservation_of(rig, entries=(PIECEWISE,))
    cut = parts(asked.attention, asked.environment, (PIECEWISE,))
    need = FlashInfer().workspace(Role.TARGET, asked.attention, asked.environment, (PIECEWISE,), asked.limits)
    assert (cut.plans, need.pinned, need.device) == (1, INT_WORKSPACE, cut.device)
    small = torch.zeros(need.device, dtype=torch.uint8)
    rig.executor = FlashInfer().reserve(attrs.evolve(asked, workspace=small))
    rig.eager(rig.batch([40, 7], [3, 7], 3, 0.0))


def test_release_lets_go_of_everything() -> None:
    """After release nothing keeps a wrapper or a cache alive."""
    rig = rig_of(SETTINGS[Path.PREFILL])
    rig.executor.release()
    held = {name: value for name, value in vars(rig.executor).items() if isinstance(value, dict)}
    assert not any(held.values())


@given(query_len=st.integers(2, 70), reqs=st.integers(1, 3))
def test_masks_are_causal_in_words_of_32_bits(query_len: int, reqs: int) -> None:
    """Bit j of row i says that token i sees token j, and bits past the query are zero."""
    mask = kernels._causal(query_len, reqs)
    assert mask.shape == (reqs, query_len, -(-query_len // 32) * 2)
    rows = np.ascontiguousarray(mask.numpy()).view(np.uint8)
    bits = np.unpackbits(rows, axis=2, bitorder="little")
    assert all(
        (bits[r, i, j] == 1) == (j <= i)
        for r in range(reqs)
        for i in range(query_len)
        for j in range(bits.shape[2])
    )


@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), min_size=1, max_size=6),
    page_size=st.integers(1, 20),
)
def test_page_lists_of_an_eager_step(rows: Any, page_size: int) -> None:
    """The lists name the pages of each request in order, and give back its length."""
    lengths = np.array([length for length, _ in rows], dtype=np.int32)
    counts = -(-lengths // page_size)
    table = np.arange(len(rows) * (counts.max() + 2), dtype=np.int32).reshape(len(rows), -1)
    starts = np.concatenate(([0], np.cumsum([q for _, q in rows]))).astype(np.int32)
    host = {"seq_lens": lengths, "block_table": table, "query_start_loc": starts}
    lists = wrappers.PageLists.of(host, page_size)
    for row, length in enumerate(lengths.tolist()):
        mine = lists.indices[lists.kv_indptr[row] : lists.kv_indptr[row + 1]].tolist()
        assert mine == table[row, : len(mine)].tolist()
        assert max(len(mine) - 1, 0) * page_size + lists.last_page_len[row] == length
        assert min(length, 1) <= lists.last_page_len[row] <= page_size
    assert lists.qo_indptr.tolist() == starts.tolist()
