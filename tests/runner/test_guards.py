"""Guards: a draft decode that pads no requests, and pointers of things that are no model's."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from capture_planner.analysis.lint import lint
from capture_planner.errors import GuardError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner_runner.execution.guards import PointerGuard, refuse_unpadded_requests
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from support.by_hand import PIECEWISE, with_piecewise_draft_decode
from support.worlds import bits, requests_of, spec_of, world_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stale():
    """A world whose draft decodes are to run PIECEWISE, and requests for it."""
    world = world_of(spec_of(k=3), change=lambda plan: with_piecewise_draft_decode(plan, 2, 3))
    return world, requests_of(world, 0)


@contextmanager
def silent(what, total):
    """Show no progress."""
    yield lambda name: None


def test_a_piecewise_draft_decode_is_found_and_not_launched(stale):
    """By the lint, with the rule that is about it; and a launch refuses with what the lint says."""
    world, requests = stale
    (finding,) = [f for f in lint(world.plan) if f.rule.code == "CP030"]
    with pytest.raises(RunError) as caught:
        launch(world.plan, world.registry, lambda _: requests, RunRequest(any_environment=True), silent)
    assert str(finding) in str(caught.value)


def test_forced_through_it_is_refused_before_it_is_captured(stale):
    """Whatever the lint said: the run ends with the thread's number."""
    world, requests = stale
    choices = RunRequest(any_environment=True, any_plan=True, page_size=4)
    with pytest.raises(GuardError, match=r"draft_decode: PIECEWISE .*vllm#39773"):
        launch(world.plan, world.registry, lambda _: requests, choices, silent)


def test_it_is_refused_before_anything_is_read(stale):
    """No forward of it runs, not even to warm up: its fields are as they were made."""
    world, _ = stale
    with world.runner() as runner:
        fields = runner.roles[Role.DRAFT_DECODE].fields
        found = {buffer.key: bits(buffer.tensor) for buffer in fields}
        with pytest.raises(GuardError):
            runner.capture()
        assert {buffer.key: bits(buffer.tensor) for buffer in fields} == found


ENTRIES = st.builds(
    Entry,
    mode=st.sampled_from((PIECEWISE, GraphMode.FULL)),
    num_tokens=st.integers(1, 9),
    num_reqs=st.none() | st.integers(1, 9),
    query_len=st.none() | st.integers(1, 3),
    draft_steps=st.none() | st.integers(1, 3),
)


@given(st.sampled_from(Role), ENTRIES)
def test_only_a_draft_decode_without_padded_requests_is_refused(role, entry):
    """Every other graph of every other role passes."""
    if role is Role.DRAFT_DECODE and entry.num_reqs is None:
        with pytest.raises(GuardError, match="FULL_DECODE_ONLY or NONE"):
            refuse_unpadded_requests(role, entry)
    else:
        refuse_unpadded_requests(role, entry)


class Holder:
    """Something that holds one tensor."""

    def __init__(self):
        self.tensor = torch.zeros(4, 3)


CHANGES = st.sampled_from(("none", "moved", "wider", "copied into"))


@given(st.lists(CHANGES, max_size=4), st.lists(CHANGES, max_size=4), st.booleans())
def test_the_first_that_moved_is_named_and_buffers_come_first(buffers, weights, parameters):
    """What is only written into has not moved."""
    holders = [Holder() for _ in buffers]
    modules = [nn.Module() for _ in weights]
    for module in modules:
        if parameters:
            module.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        else:
            module.register_buffer("weight", torch.zeros(4, 3))
    guard = PointerGuard(
        [(f"buffer{i}", holder, "tensor") for i, holder in enumerate(holders)],
        [(f"weight{i}", module, "weight") for i, module in enumerate(modules)],
    )
    # Held, so that what takes a tensor's place cannot get its memory.
    kept = [holder.tensor for holder in holders] + [module.weight.data for module in modules]
    for holder, change in zip(holders, buffers, strict=True):
        if change == "copied into":
            holder.tensor.fill_(1)
        elif change != "none":
            holder.tensor = torch.zeros(4, 3 if change == "moved" else 5)
    for module, change in zip(modules, weights, strict=True):
        if change == "copied into":
            module.weight.data.fill_(1)
        elif change != "none":
            module.weight.data = torch.zeros(4, 3 if change == "moved" else 5)
    moved = [f"buffer{i}" for i, change in enumerate(buffers) if change in ("moved", "wider")]
    moved += [f"weight{i}" for i, change in enumerate(weights) if change in ("moved", "wider")]
    if not moved:
        guard.check("who")
    else:
        with pytest.raises(GuardError, match=rf"^who: (the weight )?{moved[0]} ") as caught:
            guard.check("who")
        shape = moved[0].startswith("buffer") and buffers[int(moved[0][6:])] == "wider"
        assert ("has shape [4, 5] and strides [5, 1], at capture it had [4, 3] and" in str(caught.value)) == shape
    assert len(kept) == len(buffers) + len(weights)
