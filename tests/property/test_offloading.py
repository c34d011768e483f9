"""An engine's offloader is called before each piece of a graph and at its end inside, and never in eager forwards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import CaptureError, RunError
from capture_planner.modes import GraphMode
from capture_planner_runner.graphs import recorded
from capture_planner_runner.graphs.offloading import with_offloader
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.options import Options
from support.worlds import Watcher, requests_of, serve, spec_of, world_of, worlds

FEW = settings(max_examples=min(settings.default.max_examples // 3, 8))


class Offloader:
    """Notes its calls, and counts on the device how often an end of a piece ran."""

    def __init__(self):
        self.calls = []
        self.ends = torch.zeros((), dtype=torch.int64)

    def sync_prev_onload(self):
        recording = recorded._current()
        assert recording is None or recording.is_between, "a wait inside of a piece is not for what is before it"
        self.calls.append("sync")

    def join_after_forward(self):
        recording = recorded._current()
        assert recording is not None, "outside of a capture there is nothing to join"
        assert not recording.is_between, "outside of a piece there is nothing to join"
        self.calls.append("join")
        self.ends.add_(1)


@FEW
@given(worlds(), st.integers(0, 1 << 16), st.booleans())
def test_an_offloader_is_called_around_each_piece(world, seed, ahead):
    """Of target and drafter, FULL and PIECEWISE; tokens and fingerprints are those without it, up to its own work."""
    requests = requests_of(world, seed)
    answers = {request.name: request.prompt for request in requests}
    options = Options(run_ahead=ahead, drafts_on_device=ahead)
    with world.runner(options=options) as runner:
        runner.capture()
        expected = serve(runner, requests, answers)
    offloader, watcher = Offloader(), Watcher()
    grapher = with_offloader(RecordedGraphs(), offloader)
    with world.runner(grapher=grapher, options=options, observer=watcher) as runner:
        runner.capture()
        pieces = {
            (role.role, entry): graph.pieces for role in runner.roles.values() for entry, graph in role.graphs.items()
        }
        assert all((count == 1) == (entry.mode is GraphMode.FULL) for (_, entry), count in pieces.items())
        assert offloader.calls == ["sync", "join"] * sum(pieces.values())
        assert all(runner.fingerprint(done) is not None for done in runner.session.captured)
        offloader.calls.clear()
        offloader.ends.zero_()
        before = {}

        def begin(moment):
            before[moment.role] = len(offloader.calls), int(offloader.ends)

        def end(moment, _):
            calls, ends = before[moment.role]
            ran = pieces.get((moment.role.role, moment.entry), 0)
            assert offloader.calls[calls:] == ["sync"] * ran
            assert int(offloader.ends) - ends == ran

        with watcher.watching(runner, begin, end):
            assert serve(runner, requests, answers) == expected


@pytest.mark.parametrize("when", ["sync_prev_onload", "join_after_forward"])
def test_an_offloader_that_breaks_ends_the_capture(when):
    """With the role and the entry; no graph is left, and everything runs eager."""
    world, offloader = world_of(spec_of()), Offloader()
    with world.runner() as runner:
        expected = serve(runner, requests_of(world, 0))

    def broken():
        raise OSError("the copy engine is gone")

    setattr(offloader, when, broken)
    with world.runner(grapher=with_offloader(RecordedGraphs(), offloader)) as runner:
        with pytest.raises((CaptureError, RunError), match=r"target: .*: OSError: the copy engine is gone"):
            runner.capture()
        assert not any(role.graphs for role in runner.roles.values())
        assert serve(runner, requests_of(world, 0)) == expected
