"""Fields: what their buffers hold from the start, and what spoils them. test_padding.py has the rest."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records.backend import COMMON_FIELDS, Axis, Fill, MetadataField, PaddingContract, Where
from capture_planner.records.plan import GroupPlan, RolePlan, Support
from capture_planner_runner.execution.fields import Extents, Fields, poison
from capture_planner_runner.execution.padding import apply, table

CPU = torch.device("cpu")


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


def fields_of(capacity, *inputs, groups=()):
    """The buffers of a role with these fields and groups."""
    role = RolePlan(role=Role.TARGET, requested=GraphMode.FULL, mode=GraphMode.FULL, groups=groups, inputs=inputs)
    return Fields(role, capacity, CPU)


def extents():
    """Capacities with one of everything, and larger ones."""
    return st.builds(Extents, tokens=st.integers(1, 20), reqs=st.integers(1, 9), pages=st.integers(1, 5))


@given(extents())
def test_new_buffers_are_padding_alone(capacity):
    """A batch of nothing, before the first step: constants everywhere, the null slot, and totals of 0."""
    held = fields_of(capacity, *COMMON_FIELDS)
    for buffer in held:
        assert (buffer.tensor == (buffer.field.value or 0)).all(), buffer.key
    before = {buffer.key: buffer.tensor.clone() for buffer in held}
    apply(table(held, {}, 0))
    assert all(torch.equal(before[buffer.key], buffer.tensor) for buffer in held)


@given(extents())
def test_every_axis_has_its_extent(capacity):
    """Pages of a vector are those of all requests; a scalar is one."""
    assert [capacity.along(axis) for axis in Axis] == [
        capacity.tokens,
        capacity.reqs,
        capacity.reqs + 1,
        capacity.reqs * capacity.pages,
        1,
    ]


@given(extents(), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))
def test_a_table_has_a_row_for_each_extent_and_a_column_for_each_inner_one(capacity, offset, scale, align):
    """Offset, scale and alignment are of the rows; a page axis inside is the pages of one request."""
    for axis in Axis:
        for inner in (None, *Axis):
            field = MetadataField(
                name="f", axis=axis, inner=inner, fill=Fill.CONSTANT, value=0, offset=offset, scale=scale, align=align
            )
            rows = offset + scale * math.ceil(capacity.along(axis) / align) * align
            columns = capacity.pages if inner is Axis.PAGE else inner and capacity.along(inner)
            shape = (rows,) if columns is None else (rows, columns)
            assert fields_of(capacity, field)["f"].shape == shape


def test_groups_share_a_field_that_all_declare_alike_and_no_other():
    """One that wants another fill has a buffer of its own; what is read on the host alone has none."""
    common = COMMON_FIELDS[4]
    other = MetadataField(name=common.name, axis=common.axis, fill=Fill.CONSTANT, value=7)
    own = MetadataField(name="own", axis=Axis.TOKEN, fill=Fill.CONSTANT, value=0)
    host = MetadataField(name="host", axis=Axis.TOKEN, fill=Fill.CONSTANT, value=0, where=Where.HOST)
    groups = (group_of("same", common, own), group_of("other", other, own, host))
    held = fields_of(Extents(tokens=4, reqs=2, pages=1), common, groups=groups)
    assert [buffer.key for buffer in held] == [common.name, "same.own", f"other.{common.name}", "other.own"]
    assert held.by_group["same"][common.name].tensor is held[common.name]
    assert held.by_group["other"][common.name].tensor is held[f"other.{common.name}"]
    assert held[f"other.{common.name}"].tolist() == [7, 7]
    assert "other.host" not in held
    assert "host" not in held.views("other", held.capacity)
    assert common.name in held


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "float32", "float64", "bfloat16"])
def test_poison_is_nothing_that_anybody_could_mean(dtype):
    """NaN, or the integer furthest from any index; unsigned types have no better than all ones."""
    tensor = torch.zeros(3, dtype=getattr(torch, dtype))
    poison(tensor)
    if tensor.is_floating_point():
        assert tensor.isnan().all()
    elif dtype.startswith("int"):
        assert (tensor == torch.iinfo(tensor.dtype).min).all()
    else:
        assert (tensor == (255 if dtype == "uint8" else 1)).all()


@given(extents())
def test_a_spoiled_buffer_is_filled_as_a_whole_at_the_next_step(capacity):
    """Nothing is known of what it holds, though the last batch was small."""
    held = fields_of(capacity, *COMMON_FIELDS)
    apply(table(held, {}, 0))
    for buffer in held:
        poison(buffer.tensor)
        buffer.spoil()
    apply(table(held, {}, 5))
    for buffer in held:
        wanted = 5 if buffer.field.fill is Fill.REAL_TOTAL else buffer.field.value or 0
        assert (buffer.tensor == wanted).all(), buffer.key
