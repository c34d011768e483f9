"""Parts of the suite by themselves: its garbage, its wider plans, and what it finds in backends."""

from itertools import groupby
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import Role
from capture_planner.testing import deployments
from capture_planner_conformance import Scene, Shape, Stage, under_test
from capture_planner_conformance.memory import DEPTH, Garbage, Outputs, Snapshot, canaries_of, private_buffers
from capture_planner_conformance.stage import widened
from capture_planner_runner.execution.fields import Extents

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stage():
    """A stage of the reference backend with a drafter."""
    with Stage(under_test("reference"), Scene(shape=SHAPE, size_tokens=(8,), size_reqs=(2,), drafts=2)) as each:
        yield each


def test_garbage_takes_turns(stage):
    """For two forwards each: the largest number, the smallest, and what earlier steps left; each role for itself."""
    garbage, roles = Garbage(), stage.runner.roles
    last = torch.iinfo(torch.int64)
    for role in (roles[Role.TARGET], roles[Role.DRAFT_PREFILL]):
        positions, seen = role.fields["positions"], []
        for _ in range(13):
            positions.fill_(7)
            garbage.before(role, filled=False)
            value = int(positions[0])
            seen.append("left" if value == 7 else "largest" if value == last.max else "smallest")
        runs = [(name, len([*same])) for name, same in groupby(seen)]
        turns = ("largest", "smallest", "left", "largest", "smallest", "left")
        assert runs == [(name, 1 if index == 0 else 2) for index, name in enumerate(turns)] + [("largest", 2)]


@pytest.mark.parametrize("aligned", [True, False])
@given(data=st.data(), more=st.integers(1, 9))
def test_widened_plan_differs_in_the_largest_entry_of_each_kind(aligned, data, more):
    """By the next aligned number of requests or tokens, and in nothing else."""
    strategy = deployments(
        max_reqs=32, max_tokens=256, measured=False, where=lambda spec: spec.parallel.sequence is aligned
    )
    deployment = data.draw(strategy)
    try:
        plan = deployment.plan()
    except PlanningError:
        reject()
    step = plan.parallel.tensor if plan.parallel.sequence else 1
    for role, wider in zip(plan.roles, widened(plan, more, deployment.registry).roles, strict=True):

        def kind(entry):
            return entry.mode, entry.query_len, entry.max_query_len, entry.active_loras, entry.draft_steps

        assert len(wider.entries) == len(role.entries)
        for each in {kind(entry) for entry in role.entries}:
            before, after = (
                sorted((e for e in entries if kind(e) == each), key=lambda e: (e.num_tokens, e.num_reqs or 0))
                for entries in (role.entries, wider.entries)
            )
            assert after[:-1] == before[:-1]
            old, new = before[-1], after[-1]
            assert new.num_tokens % step == 0
            if old.tokens_each is None:
                assert new.num_tokens == next(n for n in range(old.num_tokens + more, 1 << 30) if n % step == 0)
                assert new.num_reqs == (None if old.num_reqs is None else old.num_reqs + more)
            else:
                reqs = range(old.num_reqs + more, 1 << 30)
                assert new.num_reqs == next(n for n in reqs if n * old.tokens_each % step == 0)
                assert new.num_tokens == new.num_reqs * old.tokens_each


class Holder:
    """An object of a library."""


@attrs.define
class SlotHolder:
    """An object without a dictionary."""

    tensor: torch.Tensor


def test_private_buffers_are_found_in_attributes_and_containers(stage):
    """Up to a depth; empty tensors, views of another, classes, and what is ours are left out."""
    role = stage.runner.roles[Role.TARGET]
    (group,) = role.groups
    before = private_buffers(stage.runner)
    holder, own = Holder(), role.fields["positions"]
    tensors = [torch.ones(4) for _ in range(4)]
    holder.near = tensors[0]
    holder.list = [tensors[1]]
    holder.deep = {"a": [tensors[2]]}
    holder.slots = SlotHolder(tensors[3])
    holder.kind = type("Kind", (), {"table": torch.ones(4)})
    holder.ours, holder.view, holder.empty = own[:1], tensors[0][1:], torch.empty(0)
    holder.suite = Garbage()
    holder.suite.tensor = torch.ones(4)
    group.executor.holder = holder
    found = private_buffers(stage.runner)
    names = {name: tensor for name, tensor in found.items() if name not in before}
    assert {name.removesuffix(f" of target, group {group.plan.name}") for name in names} == {
        f"private buffer holder.{path}" for path in ("near", "list[0]", "slots.tensor")
    }
    assert DEPTH == 3
    assert {tensor.data_ptr() for tensor in names.values()} == {tensors[index].data_ptr() for index in (0, 1, 3)}


def test_snapshot_names_the_buffer_that_changed(stage):
    """Each of another role, and behind the padding of its own; rows that the forward may write are not in it."""
    roles = stage.runner.roles
    role, other = roles[Role.TARGET], roles[Role.DRAFT_PREFILL]
    extents = Extents(tokens=4, reqs=2, pages=role.fields.capacity.pages)
    snapshot = Snapshot.of(canaries_of(stage.runner, role, extents))
    assert snapshot.changed() is None
    role.fields["positions"][:4] += 1
    assert snapshot.changed() is None
    role.fields["positions"][4] += 1
    assert snapshot.changed() == "target.positions behind the padding"
    role.fields["positions"][4] -= 1
    for name in ("positions", "slot_mapping"):
        other.fields[name][-1] += 1
        assert snapshot.changed() == f"draft_prefill.{name}"
        other.fields[name][-1] -= 1
    assert snapshot.changed() is None
    both = [other.fields[name] for name in ("positions", "slot_mapping")]
    for tensor in both:
        tensor[-1] += 1
    names = [name for name, _ in snapshot.canaries]
    assert snapshot.changed() == min(("draft_prefill.positions", "draft_prefill.slot_mapping"), key=names.index)


def test_outputs_are_those_of_one_role():
    """Of each layer, as many rows as the forward had; what another role's forwards left is not among them."""
    outputs = Outputs()
    roles = [
        SimpleNamespace(
            role=role,
            fields=SimpleNamespace(capacity=Extents(tokens=8, reqs=2, pages=1)),
            attention=SimpleNamespace(seen_rows=lambda: 3),
        )
        for role in Role
    ]
    for number, role in enumerate(roles):
        out = torch.zeros(3, 2)
        with outputs.marked(role, 5, out):
            out.fill_(number)
    for number, role in enumerate(roles):
        ((layer, rows),) = outputs.of(role)
        assert (layer, rows.tolist()) == (5, [[number, number]] * 3)
