"""The fused kernel, under Triton's interpreter: the same bytes as padding in torch, everywhere."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import capture_planner_runner
from capture_planner.errors import RunError
from capture_planner.records.backend import COMMON_FIELDS, SPECULATIVE_FIELDS, Axis, Fill, MetadataField
from capture_planner_runner.execution.fields import Extents, FieldBuffer, Fields
from capture_planner_runner.execution.padding import Write, apply, table
from support.files import module_at

triton = pytest.importorskip("triton", reason="the fused padding kernel needs triton, which is not installed")


FUSED = Path(capture_planner_runner.__file__).parent / "execution" / "fused.py"
laws = module_at(Path(__file__).with_name("test_padding.py"), "padding_laws")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fused():
    """The module, interpreted: Triton looks at the variable where a kernel is defined, not later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return module_at(FUSED, "interpreted_fused")


@pytest.fixture(scope="module")
def compiled():
    """The module as it is on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return module_at(FUSED, "compiled_fused")


def same(ones, others):
    """Say whether all buffers hold the same bytes."""
    return all(laws.bits(a.tensor) == laws.bits(b.tensor) for a, b in zip(ones, others, strict=True))


@settings(max_examples=max(settings.default.max_examples // 5, 3))
@given(st.lists(laws.roles(), min_size=1, max_size=2), laws.steps())
def test_the_kernel_leaves_the_bytes_that_torch_leaves(fused, roles, run):
    """All roles of a step in one launch; large, small, poisoned, with fields of all types."""
    one = [Fields(role, laws.CAPACITY, CPU) for role in roles]
    other = [Fields(role, laws.CAPACITY, CPU) for role in roles]
    everything = fused.FusedPadding(CPU, sum(held.memory for held in one), sum(len(list(held)) for held in one))
    for step in run:
        ours, theirs = [], []
        for role, mine, yours in zip(roles, one, other, strict=True):
            if step.poisoned:
                mine.poison()
                yours.poison()
            values = laws.values_of(role, step)
            ours += table(mine, values, step.extents.tokens)
            theirs += table(yours, values, step.extents.tokens)
        everything.apply(ours)
        apply(theirs)
        assert all(same(mine, yours) for mine, yours in zip(one, other, strict=True))


def test_a_table_of_many_blocks_is_written_whole(fused):
    """Rows that straddle blocks of the grid, beside fields that end in the first block."""
    capacity = Extents(tokens=70, reqs=61, pages=53)
    role = laws.role_of(*COMMON_FIELDS, *SPECULATIVE_FIELDS)
    one, other = Fields(role, capacity, CPU), Fields(role, capacity, CPU)
    everything = fused.FusedPadding(CPU, one.memory, 16)
    random = np.random.default_rng(1)
    for reqs, pages in [(61, 53), (2, 1), (40, 29), (0, 0), (61, 53)]:
        batch = Extents(tokens=reqs, reqs=reqs, pages=pages)
        values = {}
        for field in role.inputs:
            shape = (batch.rows(field),) + (() if field.inner is None else (pages,))
            values[field.name] = random.integers(-9, 9, shape).astype(field.dtype)
        everything.apply(table(one, values, reqs))
        apply(table(other, values, reqs))
        assert same(one, other)


def test_steps_take_turns_with_the_host_memory_and_reuse_that_of_the_device(fused):
    """What a copy still reads is not what the next step is packed into; nothing is allocated anew."""
    role = laws.role_of(*COMMON_FIELDS)
    held = Fields(role, laws.CAPACITY, CPU)
    everything = fused.FusedPadding(CPU, held.memory, len(COMMON_FIELDS))
    turns, addresses = [], set()
    for number in range(1, 5):
        before = [staging.bytes.copy() for staging in everything._staged]
        everything.apply(table(held, {"seq_lens": np.full(3, number, "int32")}, 3))
        turns.append(
            [not np.array_equal(old, staging.bytes) for old, staging in zip(before, everything._staged, strict=True)]
        )
        addresses.add(everything._device.data_ptr())
    assert [sum(turn) for turn in turns] == [1, 1, 1, 1]
    assert turns[0] == turns[2] != turns[1] == turns[3]
    assert len(addresses) == 1


def test_no_writes_are_no_launch(fused):
    """A step without fields is in order."""
    fused.FusedPadding(CPU, 0, 0).apply([])


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.integers(0, 3))
def test_a_step_that_has_no_room_is_refused_with_both_numbers(fused, rows, room, writes, most):
    """Before anything is written, whether values or writes are too many."""
    field = MetadataField(name="a", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=7)
    buffers = [FieldBuffer(f"a{i}", field, torch.full((40,), 7, dtype=torch.int32)) for i in range(writes)]
    step = [Write(buffer, np.zeros(rows, "int32"), rows, 1, 7) for buffer in buffers]
    everything = fused.FusedPadding(CPU, room, most)
    needed = 4 * rows * writes
    if needed <= room and writes <= most:
        everything.apply(step)
        assert all(buffer.tensor.tolist() == [0] * rows + [7] * (40 - rows) for buffer in buffers)
    else:
        with pytest.raises(RunError) as caught:
            everything.apply(step)
        assert f"{writes} writes with {needed} bytes" in str(caught.value)
        assert f"{most} writes and {room} bytes" in str(caught.value)
        assert all(buffer.tensor.tolist() == [7] * 40 for buffer in buffers)


@given(laws.roles(), laws.steps())
def test_the_packed_table_says_where_everything_is(fused, role, run):
    """Read back from the bytes alone: addresses, extents, fills, and each value at its aligned offset."""
    held = Fields(role, laws.CAPACITY, CPU)
    staging = fused.Staging(torch.full(((held.memory + 200 * len(role.inputs)) // 8 * 8,), 0xEE, dtype=torch.uint8))
    most, most_written = len(role.inputs), []
    for step in run:
        values = laws.values_of(role, step)
        writes = table(held, values, step.extents.tokens)
        packed = fused.pack(writes, staging, most)
        memory = staging.memory.numpy().tobytes()
        last = 72 * most
        assert not any(memory[72 * len(writes) : 72 * len(most_written)])
        most_written = max(writes, most_written, key=len)
        for index, write in enumerate(writes):
            tensor, dtype = write.buffer.tensor, np.dtype(write.buffer.field.dtype)
            address, offset, stride, real_rows, real_columns, rows, columns, fill, size = np.frombuffer(
                memory, np.int64, 9, 72 * index
            ).tolist()
            assert (address, stride, size) == (tensor.data_ptr(), tensor.stride(0), dtype.itemsize)
            assert (rows, columns) == (write.rows, write.columns)
            assert np.array([fill], "<i8").tobytes()[:size] == np.array([write.fill]).astype(dtype).tobytes()
            assert offset % 8 == 0
            assert offset >= last
            last = offset + real_rows * real_columns * size
            if write.real is None:
                assert real_rows * real_columns == 0
            else:
                assert (real_rows, real_columns)[: write.real.ndim] == write.real.shape
                assert memory[offset:last] == write.real.astype(dtype).tobytes()
        assert last <= packed.bytes <= last + 8
        assert packed.elements == max(write.rows * write.columns for write in writes)


def test_a_kernel_meets_the_device_that_it_was_made_for(fused, compiled):
    """Interpreted on a GPU it would read device addresses on the host; compiled it has no CPU to run on."""
    with pytest.raises(RunError, match=r"interpreted.*cuda"):
        fused.FusedPadding(torch.device("cuda"), 8, 1)
    with pytest.raises(RunError, match=r"compiled.*cpu.*TRITON_INTERPRET"):
        compiled.FusedPadding(CPU, 8, 1)


def test_the_kernel_compiles_for_a_gpu(compiled, tmp_path, monkeypatch):
    """What the interpreter runs is what the compiler takes, down to the machine's code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = triton.compiler.ASTSource(
        compiled._fill_and_pad,
        signature={"staging": "*u8", "width": "constexpr", "block": "constexpr"},
        constexprs={"width": 9, "block": 1024},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert "st.global" in kernel.asm["ptx"]
