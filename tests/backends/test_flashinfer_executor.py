"""FlashInfer's executor over a stand-in library: what its calls compute, and over which memory.

Graphs are core's recorded graphs. The checks are those that tests/gpu/test_flashinfer.py makes on a device.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner_flashinfer import FlashInfer, kernels, wrappers
from capture_planner_flashinfer.selection import PACKAGE, KernelFamily, xqa_splits
from capture_planner_flashinfer.workspace import INT_WORKSPACE, workspace_parts
from support import flashinfer_rig as checks
from support.flashinfer_cases import SETTINGS, SMALL, each_family, reservation_of, rig_of
from support.flashinfer_standin import graphs_of, new_kernel, standin

pytestmark = pytest.mark.usefixtures("one_thread", "library")

few = settings(max_examples=4)


@each_family
def test_each_setting_takes_its_kernel_family(family: KernelFamily) -> None:
    """The five settings reach the five paths, so that what follows is about all of them."""
    assert rig_of(SETTINGS[family]).family is family


@each_family
@few
@given(steps=checks.changes())
def test_replays_equal_dense_attention(family: KernelFamily, steps: Any) -> None:
    """A graph gives the right rows whatever batch came before, and its plan is never stale."""
    checks.check_replays(rig_of(SETTINGS[family]), steps, tail=float("nan"))


@each_family
@few
@given(steps=checks.changes())
def test_replays_ignore_poisoned_memory(family: KernelFamily, steps: Any) -> None:
    """Plans are made again and counters zeroed when the workspace was overwritten."""
    checks.check_poisoned(rig_of(SETTINGS[family]), steps[:2])


@each_family
@few
@given(requests=checks.mixed, seed=checks.seeds)
def test_eager_steps_equal_dense_attention(family: KernelFamily, requests: Any, seed: int) -> None:
    """Mixed batches run on real extents; their partial results spare plans and counters."""
    checks.check_eager(rig_of(SETTINGS[family]), requests, seed)


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


@pytest.mark.parametrize("family", [KernelFamily.CUDA_CORE, KernelFamily.TENSOR_CORE, KernelFamily.PREFILL])
def test_wrappers_share_the_fields_and_one_float_workspace(family: KernelFamily) -> None:
    """Registered buffers are the role's fields, and every byte lies in the reserved workspace."""
    rig = rig_of(SETTINGS[family])
    found = [*graphs_of(rig).values(), rig.executor._wrappers[None]._wrapper]
    fields = rig.fields.by_group[checks.GROUP]
    for wrapper in found[:-1]:
        assert wrapper.indptr.data_ptr() == fields["paged_kv_indptr"].tensor.data_ptr()
        assert wrapper.indices.data_ptr() == fields["paged_kv_indices"].tensor.data_ptr()
        assert wrapper.last.data_ptr() == fields["paged_kv_last_page_len"].tensor.data_ptr()
        if family is KernelFamily.PREFILL:
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


def test_first_eager_step_has_the_softcap_of_its_layer() -> None:
    """The plan before the first layer attends cannot know the softcap, and is made again."""
    rig = rig_of(SETTINGS[KernelFamily.PREFILL])
    rig.executor = FlashInfer().reserve(reservation_of(rig))
    rig.eager(rig.batch([40, 5], [7, 1], 1, 0.0))


def test_counters_are_zeroed_once_for_each_write_to_the_workspace() -> None:
    """A step after which nobody wrote to the workspace does not write to it either."""
    rig = rig_of(SETTINGS[KernelFamily.XQA])
    batch = rig.batch([40, 5], [4, 4], 1, 0.0)
    rig.poison()
    rig.replay(rig.entries[0], batch)
    before = rig.workspace._version
    rig.replay(rig.entries[0], batch)
    assert rig.workspace._version == before


def test_kernels_without_a_plan_get_dense_queries() -> None:
    """They know no strides of a query, and rotary embedding may leave some."""
    rig = rig_of(SETTINGS[KernelFamily.XQA])
    entry = rig.entries[0]
    batch = rig.batch([40] * 8, [4] * 8, 1, 0.0)
    query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty_like(batch.query)
    rig.executor.attend(checks.LAYER, query, out, rig.scoring, rig.stage(entry, batch.values))
    checks.close(out, batch.expected)


PIECEWISE = Entry(mode=GraphMode.PIECEWISE, num_tokens=64)


def test_reserve_without_full_graphs_makes_only_the_eager_wrapper() -> None:
    """A PIECEWISE plan needs, and gets, memory for one wrapper."""
    rig = rig_of(SETTINGS[KernelFamily.CUDA_CORE])
    asked = reservation_of(rig, entries=(PIECEWISE,))
    cut = workspace_parts(asked.attention, asked.environment, (PIECEWISE,))
    need = FlashInfer().workspace(Role.TARGET, asked.attention, asked.environment, (PIECEWISE,), asked.limits)
    assert (cut.plans, need.pinned, need.device) == (1, INT_WORKSPACE, cut.device)
    small = torch.zeros(need.device, dtype=torch.uint8)
    rig.executor = FlashInfer().reserve(attrs.evolve(asked, workspace=small))
    rig.eager(rig.batch([40, 7], [3, 7], 3, 0.0))


def test_release_drops_everything() -> None:
    """After release nothing keeps a wrapper or a cache alive."""
    rig = rig_of(SETTINGS[KernelFamily.PREFILL])
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
        (bits[r, i, j] == 1) == (j <= i) for r in range(reqs) for i in range(query_len) for j in range(bits.shape[2])
    )


@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), min_size=1, max_size=6),
    page_size=st.integers(1, 20),
)
def test_page_lists_match_the_common_fields(rows: Any, page_size: int) -> None:
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


def test_xqa_has_one_block_per_sequence_before_0_7_1(library: Any) -> None:
    """``sm_count`` alone decides, which the decode function does not take; a variable is not read there."""
    seen, launch = [], library.xqa

    def watched(*args: Any, **options: Any) -> None:
        seen.append(options["sm_count"])
        launch(*args, **options)

    library.xqa = watched
    rig = rig_of(SETTINGS[KernelFamily.XQA])
    rig.replay(rig.entries[0], rig.batch([40, 5], [4, 4], 1, 0.0))
    assert set(seen) == {1}


def test_xqa_may_split_sequences_since_0_7_1() -> None:
    """From 0.7.1 on the last block alone writes; a version that is not known is taken for an old one."""
    device = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=1 << 36, multiprocessors=132)
    for version, expected in (("0.6.9", False), ("0.7.0.post1", False), ("0.7.1", True), ("0.7.2", True)):
        assert xqa_splits(Environment(name="e", device=device, packages={PACKAGE: version})) is expected
    assert not xqa_splits(Environment(name="e", device=device))
