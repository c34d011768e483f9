"""Observers: handed to a runner, they are around every forward of every role, and change nothing by themselves."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.options import Options
from support.worlds import requests_of, serve, spec_of, world_of, worlds

FEW = settings(max_examples=min(settings.default.max_examples // 3, 8))


class Recorder(ForwardObserver):
    """Notes the order of its calls, and does nothing."""

    def __init__(self):
        self.calls = []
        self.attended = []
        self.times = torch.zeros(1, dtype=torch.int64)
        """How often a layer attended, counted on the device."""

    @contextmanager
    def run(self, role, batch, dispatch, *, filled):
        self.calls.append(("begin", role.role, dispatch.entry, filled))
        yield
        self.calls.append(("end", role.role, dispatch.entry, filled))

    def writes(self, role, writes):
        self.calls.append(("writes", role.role, None, False))
        return super().writes(role, writes)

    @contextmanager
    def attention(self, role, number, layer, tensors):
        tensors.out.fill_(float("nan"))
        yield
        self.times.add_(1)
        # Shapes alone: tensors that outlive their capture are looked for in all objects of the process.
        shapes = [tensor.shape for tensor in tensors]
        self.attended.append((role.role, number, layer, *shapes))

    def forward(self, role, step):
        self.calls.append(("forward", role.role, step.entry, False))
        return super().forward(role, step)


@FEW
@given(worlds(), st.integers(0, 1 << 16), st.booleans())
def test_an_observer_is_around_every_forward(world, seed, ahead):
    """As often as the session counts, filled first; the tokens are those without an observer."""
    requests = requests_of(world, seed)
    answers = {request.name: request.prompt for request in requests}
    options = Options(run_ahead=ahead, drafts_on_device=ahead)
    with world.runner(options=options) as runner:
        runner.capture()
        expected = serve(runner, requests, answers)
    recorder = Recorder()
    with world.runner(options=options, observer=recorder) as runner:
        runner.capture()
        assert not {"begin", "forward"} & {name for name, *_ in recorder.calls}, "a capture is no forward of a batch"
        recorder.calls.clear()
        assert serve(runner, requests, answers) == expected
        ran, noted = Counter(), Counter()
        for forward in runner.session.forwards:
            ran[forward.role, forward.entry] += forward.repeats
    for name, role, entry, _ in recorder.calls:
        noted[role, entry] += name == "forward"
    assert +noted == ran
    opened = None
    for name, role, entry, filled in recorder.calls:
        if name == "begin":
            assert opened is None, "one at a time"
            opened = role, entry, filled, Counter()
        elif name == "end":
            assert opened is not None
            assert opened[:3] == (role, entry, filled)
            assert opened[3] == {"forward": 1} | ({} if filled else {"writes": 1})
            opened = None
        elif opened is not None:
            opened[3][name] += 1
    assert opened is None


@pytest.mark.parametrize("k", [0, 2])
def test_what_attention_launches_is_in_graphs(k):
    """A layer counts on the device each time it attends, replays included; it is told with its shapes."""
    world = world_of(spec_of(k=k, layers=2))
    recorder = Recorder()
    with world.runner(observer=recorder) as runner:
        runner.capture()
        recorder.times.zero_()
        serve(runner, requests_of(world, 0))
        times = 0
        for forward in runner.session.forwards:
            model = world.drafter if forward.role.is_drafter else world.target
            steps = (forward.entry and forward.entry.draft_steps) or 1
            times += forward.repeats * steps * model.num_layers
        assert any(forward.entry for forward in runner.session.forwards)
    assert recorder.times.item() == times
    for role, number, layer, query, keys, values, out in recorder.attended:
        model = world.drafter if role.is_drafter else world.target
        assert query == out
        assert keys == values == (query[0], model.num_kv_heads, query[2])
        assert layer < model.num_layers
        assert number == 0 or role is Role.DRAFT_DECODE


def test_a_comparison_lets_an_observer_watch_the_forwards_that_are_served():
    """The eager forwards next to them are the comparison's own."""
    made = world_of(spec_of())
    served = []

    class Forwards(ForwardObserver):
        def batch(self, requests):
            served.append([])

        def forward(self, role, step):
            served[-1].append((role.role, step.entry))
            return super().forward(role, step)

    with made.runner(options=Options(compare=True), observer=Forwards()) as runner:
        runner.capture()
        serve(runner, requests_of(made, 0))
        forwards = runner.session.forwards
        assert sum(map(len, served)) == sum(forward.repeats for forward in forwards)
        assert len(served) == len(runner.session.steps)
