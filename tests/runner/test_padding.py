"""Fields and padding in torch: what every element of every buffer holds after any run of steps."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records.backend import (
    COMMON_FIELDS,
    Axis,
    Bound,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Where,
)
from capture_planner.records.plan import GroupPlan, RolePlan, Support
from capture_planner_runner.execution.fields import Extents, Fields
from capture_planner_runner.execution.padding import Bounds, apply, check_bounds, table

CPU = torch.device("cpu")
CAPACITY = Extents(tokens=48, reqs=24, pages=20)
CONSTANTS = {
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "int64": st.integers(-(1 << 31), (1 << 31) - 1),
    "uint8": st.integers(0, 255),
    "bool": st.integers(0, 1),
    "float32": st.integers(-(1 << 31), (1 << 31) - 1),
}


@attrs.frozen(kw_only=True)
class Step:
    """One batch, and whether somebody poisons all buffers before it."""

    extents: Extents
    seed: int
    poisoned: bool


@st.composite
def fields(draw, name):
    """A field that a step can fill: what follows the batch are vectors of integers."""
    dtype = draw(st.sampled_from(sorted(CONSTANTS)))
    inner = draw(st.sampled_from((None, None, Axis.PAGE, *Axis)))
    fills = [Fill.CONSTANT, Fill.NULL_SLOT]
    if dtype in ("int32", "int64") and inner is None:
        fills += [Fill.REAL_TOTAL, Fill.REPEAT_LAST]
    fill = draw(st.sampled_from(fills))
    return MetadataField(
        name=name,
        axis=draw(st.sampled_from(Axis)),
        inner=inner,
        dtype=dtype,
        fill=fill,
        value=draw(CONSTANTS[dtype]) if fill is Fill.CONSTANT else None,
        offset=draw(st.integers(0, 3)),
        scale=draw(st.integers(1, 2)),
        align=draw(st.integers(1, 4)),
    )


@st.composite
def extents(draw, most=CAPACITY):
    """Extents of a batch, from empty to the capacity."""
    return Extents(
        tokens=draw(st.integers(0, most.tokens)),
        reqs=draw(st.integers(0, most.reqs)),
        pages=draw(st.integers(0, most.pages)),
    )


def steps():
    """Steps in which full, small and any batches follow each other."""
    sizes = st.just(CAPACITY) | extents(Extents(tokens=2, reqs=2, pages=2)) | extents()
    one = st.builds(Step, extents=sizes, seed=st.integers(0, 1 << 32), poisoned=st.booleans())
    return st.lists(one, min_size=3, max_size=5)


@st.composite
def roles(draw):
    """A role with a few fields of its own choice."""
    return role_of(*(draw(fields(f"field{index}")) for index in range(draw(st.integers(1, 4)))))


def role_of(*inputs, groups=()):
    """A plan for a role with these fields."""
    return RolePlan(role=Role.TARGET, requested=GraphMode.FULL, mode=GraphMode.FULL, groups=groups, inputs=inputs)


def random_bits(random, shape, dtype):
    """Any value that the type has, NaN included."""
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(bytearray(random.bytes(int(np.prod(shape)) * size)), dtype).reshape(shape)


def values_of(role, step):
    """Real values for most fields of a step; the others are their backend's own."""
    random = np.random.default_rng(step.seed)
    values = {}
    for field in role.inputs:
        rows, columns = step.extents.rows(field), step.extents.columns(field)
        if random.random() < 0.3:
            rows = int(random.integers(0, rows + 1))
        if random.random() < 0.2:
            continue
        real = random_bits(random, (rows,) if columns is None else (rows, columns), field.dtype)
        if random.random() < 0.3:
            # A part of a larger array, of another type: what a scheduler's own tables look like.
            wider = np.zeros([2 * extent for extent in real.shape], "int64" if field.dtype == "int32" else field.dtype)
            place = tuple(slice(extent) for extent in real.shape)
            wider[place] = real
            real = wider[place]
        values[field.name] = real
    return values


def expected(buffer, values, num_tokens):
    """Every element of a buffer after a step, from the contract alone."""
    field, real = buffer.field, values.get(buffer.field.name)
    fill = {
        Fill.CONSTANT: field.value,
        Fill.NULL_SLOT: 0,
        Fill.REAL_TOTAL: num_tokens,
        Fill.REPEAT_LAST: real[-1] if real is not None and len(real) else 0,
    }[field.fill]
    whole = np.full(tuple(buffer.tensor.shape), fill, field.dtype)
    if real is not None:
        whole[tuple(slice(extent) for extent in real.shape)] = real
    return whole


def bits(tensor):
    """The bytes of a tensor: equal where even NaNs are the same."""
    return tensor.numpy().tobytes()


@given(roles(), steps())
def test_every_element_is_a_real_value_or_the_fill_whatever_came_before(role, run):
    """Large, small, large, poisoned, written by a backend: nothing of an earlier batch is left."""
    held = Fields(role, CAPACITY, CPU)
    for step in run:
        if step.poisoned:
            held.poison()
        values = values_of(role, step)
        apply(table(held, values, step.extents.tokens))
        for buffer in held:
            assert bits(buffer.tensor) == expected(buffer, values, step.extents.tokens).tobytes(), buffer.key
            if buffer.field.name not in values:
                junk = random_bits(np.random.default_rng(step.seed), buffer.tensor.shape, buffer.field.dtype)
                buffer.tensor.copy_(torch.from_numpy(junk))


@given(roles(), steps())
def test_buffers_stay_where_they_are(role, run):
    """Graphs hold their addresses."""
    held = Fields(role, CAPACITY, CPU)
    before = [buffer.tensor.data_ptr() for buffer in held]
    for step in run:
        apply(table(held, values_of(role, step), step.extents.tokens))
    assert [buffer.tensor.data_ptr() for buffer in held] == before
    assert held.memory == sum(buffer.tensor.numel() * buffer.tensor.element_size() for buffer in held)


@given(fields("a"), st.booleans())
def test_no_row_is_written_twice_for_nothing(field, full):
    """The same batch again writes its real values and no fill, where the fill is a constant."""
    assume(field.fill in (Fill.CONSTANT, Fill.NULL_SLOT))
    role = role_of(field)
    held = Fields(role, CAPACITY, CPU)
    batch = CAPACITY if full else Extents(tokens=3, reqs=2, pages=1)
    columns = batch.columns(field)
    real = np.zeros((batch.rows(field),) if columns is None else (batch.rows(field), columns), field.dtype)
    for _ in range(2):
        (write,) = table(held, {"a": real}, 3)
        assert (write.rows, write.columns) == (len(real), columns or 1)


def test_a_fill_that_no_step_can_know_is_refused():
    """The worst case is not among the values of a batch; the field is named."""
    field = MetadataField(name="tiles", axis=Axis.REQUEST, fill=Fill.WORST_CASE)
    held = Fields(role_of(field), CAPACITY, CPU)
    with pytest.raises(RunError, match="tiles"):
        table(held, {}, 3)


@given(fields("a"), fields("b"))
def test_what_is_frozen_is_neither_filled_nor_poisoned(frozen, other):
    """Its backend wrote it once, and a graph counts on it."""
    held = Fields(role_of(attrs.evolve(frozen, lifetime=Lifetime.FROZEN), other), CAPACITY, CPU)
    held["a"].fill_(1)
    before = bits(held["a"])
    held.poison()
    assert [write.buffer.key for write in table(held, {}, 3)] == ["b"]
    apply(table(held, {}, 3))
    assert bits(held["a"]) == before


@given(fields("a"), st.data())
def test_values_without_room_are_refused_before_anything_is_written(field, data):
    """More rows or columns than the capacity, or another number of axes: the message has the field and both shapes."""
    held = Fields(role_of(field), CAPACITY, CPU)
    before, shape = bits(held["a"]), list(held["a"].shape)
    larger = data.draw(st.integers(0, len(shape) - 1))
    grown = [extent + (index == larger) for index, extent in enumerate(shape)]
    wanted = data.draw(st.sampled_from([grown, [1] * (3 - len(shape))]))
    with pytest.raises(RunError) as caught:
        apply(table(held, {"a": np.ones(wanted, field.dtype)}, 3))
    assert all(part in str(caught.value) for part in ("a has", str(shape), str(wanted)))
    assert bits(held["a"]) == before


def group_of(name, *declared):
    """An attention group whose backend declares these fields."""
    return GroupPlan(
        name=name,
        layers=1,
        backend="b",
        distribution="d",
        version="1",
        support=Support(level=GraphSupport.ALWAYS, reason="r"),
        padding=PaddingContract(fields=declared),
    )


@given(roles(), fields("own"), fields("own"), st.sampled_from(Where), st.data())
def test_a_group_sees_its_fields_at_the_extents_asked_for(role, one, two, where, data):
    """``offset + scale * round_up(extent, align)`` rows from the start of the buffer, all its columns."""
    common = role.inputs[0]
    again = data.draw(fields(common.name) | st.just(common))
    declared = {"first": (attrs.evolve(one, where=where), again), "second": (two,)}
    groups = tuple(group_of(name, *mine) for name, mine in declared.items())
    held = Fields(attrs.evolve(role, groups=groups), CAPACITY, CPU)
    batch = data.draw(extents())
    lengths = {
        Axis.TOKEN: batch.tokens,
        Axis.REQUEST: batch.reqs,
        Axis.REQUEST_PLUS_ONE: batch.reqs + 1,
        Axis.PAGE: batch.reqs * batch.pages,
        Axis.SCALAR: 1,
    }
    for name, mine in declared.items():
        views = held.views(name, batch)
        visible = {field.name: field for field in (*role.inputs, *mine) if field.where is not Where.HOST}
        assert set(views) == set(visible)
        for field in visible.values():
            view, length = views[field.name], lengths[field.axis]
            while length % field.align:
                length += 1
            assert len(view) == field.offset + field.scale * length
            assert view.shape[1:] == (() if field.inner is None else (CAPACITY.columns(field),))
            assert str(view.dtype) == f"torch.{field.dtype}"
            assert view.storage_offset() == 0
            runners = view.untyped_storage().data_ptr() in {held[f.name].data_ptr() for f in role.inputs}
            assert runners is (field in role.inputs)


BOUNDS = Bounds(reqs=30, pages=70, slots=900, states=31, positions=50, vocabulary=1000, workspace=11)


def first_wrong(field, batch):
    """The first number that is no place in what a field indexes; offsets may be one past the end."""
    top = {
        Bound.TOKENS: batch.tokens,
        Bound.REQUESTS: 30,
        Bound.PAGES: 70,
        Bound.SLOTS: 900,
        Bound.POSITIONS: 50,
        Bound.STATES: 31,
        Bound.VOCABULARY: 1000,
        Bound.WORKSPACE: 11,
    }[field.indexes]
    return top + 1 if field.axis is Axis.REQUEST_PLUS_ONE else top


@st.composite
def index_fields(draw):
    """A field of indices whose fill is inside its bound, or says skip."""
    fill = draw(st.sampled_from((Fill.CONSTANT, Fill.NULL_SLOT, Fill.REPEAT_LAST, Fill.REAL_TOTAL)))
    offsets = fill is Fill.REAL_TOTAL
    moving = offsets or fill is Fill.REPEAT_LAST
    return MetadataField(
        name="index",
        axis=Axis.REQUEST_PLUS_ONE if offsets else draw(st.sampled_from(Axis)),
        inner=None if moving else draw(st.sampled_from((None, Axis.PAGE))),
        dtype=draw(st.sampled_from(("int32", "int64"))),
        indexes=Bound.TOKENS if offsets else draw(st.sampled_from(Bound)),
        fill=fill,
        value=draw(st.sampled_from((0, -1))) if fill is Fill.CONSTANT else None,
    )


@given(index_fields(), extents(), extents(), st.data())
def test_check_bounds_names_each_planted_value_and_nothing_else(field, padded, some, data):
    """Healthy values pass; one wrong value, real or padded, is found with its place and its bound."""
    padded = Extents(tokens=padded.tokens + 1, reqs=padded.reqs + 1, pages=padded.pages + 1)
    real_extents = Extents(
        tokens=min(some.tokens, padded.tokens), reqs=min(some.reqs, padded.reqs), pages=min(some.pages, padded.pages)
    )
    role = role_of(field)
    capacity = Extents(tokens=50, reqs=26, pages=22)
    held = Fields(role, capacity, CPU)
    top = first_wrong(field, padded)
    shape = [real_extents.rows(field)] + ([] if field.inner is None else [real_extents.pages])
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    values = {"index": random.integers(0, top, shape).astype(field.dtype)}
    apply(table(held, values, real_extents.tokens))
    check_bounds(held, values, padded, BOUNDS)

    view = held["index"][: padded.rows(field)]
    if len(held["index"]) > len(view):
        held["index"][len(view) :] = top
        check_bounds(held, values, padded, BOUNDS)
    place = tuple(data.draw(st.integers(0, extent - 1)) for extent in view.shape)
    is_real = all(index < extent for index, extent in zip(place, shape, strict=True))
    wrong = data.draw(st.sampled_from((-2, -(1 << 31), top, (1 << 31) - 1, -1)))
    view[place] = wrong
    if wrong == -1 and field.value == -1 and not is_real:
        check_bounds(held, values, padded, BOUNDS)
    else:
        with pytest.raises(RunError) as caught:
            check_bounds(held, values, padded, BOUNDS)
        message = str(caught.value)
        kind = "a real value" if is_real else "padding"
        assert message.startswith(f"index[{', '.join(map(str, place))}] is {wrong}, {kind}; ")
        assert field.indexes.value in message
        fill = ", or its fill of -1" if field.value == -1 and not is_real else ""
        assert message.endswith(f"less than {top}{fill}")


@given(extents().filter(lambda batch: 0 < batch.reqs <= batch.tokens and batch.pages))
def test_the_common_fields_of_any_batch_stay_in_bounds(batch):
    """As they are declared they pad any batch to any capacity; -1 skips in padding, not in a real row."""
    held = Fields(role_of(*COMMON_FIELDS), CAPACITY, CPU)
    offsets = np.linspace(0, batch.tokens, batch.reqs + 1).astype("int32")
    values = {
        "input_ids": np.full(batch.tokens, 999, "int32"),
        "positions": np.full(batch.tokens, 49, "int64"),
        "slot_mapping": np.full(batch.tokens, 899, "int64"),
        "query_start_loc": offsets,
        "seq_lens": np.full(batch.reqs, 50, "int32"),
        "block_table": np.full((batch.reqs, batch.pages), 69, "int32"),
        "last_token_indices": offsets[1:] - 1,
        "idx_mapping": np.arange(batch.reqs, dtype="int32"),
    }
    apply(table(held, values, batch.tokens))
    check_bounds(held, values, batch, BOUNDS)
    check_bounds(held, values, CAPACITY, BOUNDS)
    values["idx_mapping"][-1] = -1
    apply(table(held, values, batch.tokens))
    with pytest.raises(RunError, match=rf"^idx_mapping\[{batch.reqs - 1}\] is -1, a real value"):
        check_bounds(held, values, CAPACITY, BOUNDS)
