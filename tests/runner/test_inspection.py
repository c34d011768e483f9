"""What shows which graphs there are and which ran: dumps, and ranges of PyTorch's profiler."""

import errno
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from capture_planner import load_backends
from capture_planner.errors import GuardError, RunError
from capture_planner.modes import GraphMode
from capture_planner.records.batch import Batch, Entry
from capture_planner_runner.execution import role as execution
from capture_planner_runner.graphs.graph import dump_graphs
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.tiny import planned

pytestmark = pytest.mark.usefixtures("one_thread")
REQUESTS = [Request(name=str(n), arrival=0.0, prompt=(1, 2, 3 + n), max_new_tokens=5) for n in range(3)]


@pytest.fixture(scope="module")
def runner():
    """A runner of a tiny plan with a drafter, captured."""
    plan = planned(2, GraphMode.FULL_AND_PIECEWISE)
    target = load_target(None, plan.model, device=torch.device("cpu"))
    drafter = choose_drafter("random", plan.speculative, target, num_states=4, length=128)
    pages = PageFormat(page_size=8, num_pages=1 + 4 * 13)
    with Runner(plan, target, drafter, load_backends(), RecordedGraphs(), pages=pages) as runner:
        runner.capture()
        yield runner


def dumped(runner, folder):
    """Dump all graphs of a runner."""
    pairs = ((role.role.value, *pair) for role in runner.roles.values() for pair in role.graphs.items())
    return dump_graphs(pairs, folder)


def test_a_dump_has_a_file_for_each_graph_with_its_operators(runner, tmp_path):
    """Under its role and entry; PIECEWISE graphs say where attention runs between pieces."""
    files = dumped(runner, tmp_path / "new" / "folder")
    assert len(files) == len(set(files)) == runner.plan.num_graphs == len(runner.session.captured)
    assert sorted(files) == sorted((tmp_path / "new" / "folder").iterdir())
    by_name = {file.name: file.read_text("utf-8") for file in files}
    for name, text in by_name.items():
        assert ("between pieces" in text) == ("piecewise" in name)
        assert re.search(r"^aten\.(mm|addmm|linear)\S* ", text, re.M), name


def test_a_dump_on_a_full_disk_leaves_nothing(tmp_path):
    """No half of a file, and no empty folder; the reason is a sentence."""

    def dump(stem):
        stem.with_suffix(".txt").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stem))

    folder = tmp_path / "graphs"
    with pytest.raises(RunError, match="cannot be dumped: No space left on device; name another"):
        dump_graphs([("target", "FULL 1", SimpleNamespace(dump=dump))], folder)
    assert not folder.exists()


def test_two_captures_of_one_plan_dump_the_same(runner, tmp_path):
    """No address is in a dump, so that dumps can be compared."""
    again = Runner(runner.plan, runner.model, runner.drafter, load_backends(), RecordedGraphs(), pages=runner.pages)
    with again:
        again.capture()
        pairs = zip(dumped(runner, tmp_path / "one"), dumped(again, tmp_path / "other"), strict=True)
        assert all(one.read_text("utf-8") == other.read_text("utf-8") for one, other in pairs)


def test_a_folder_that_cannot_be_written_is_an_error(runner, tmp_path):
    """In one line, with what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"graphs cannot be dumped: .*; name another folder"):
        dumped(runner, tmp_path / "file")


def test_a_trace_of_the_profiler_has_each_forward_with_its_graph(runner):
    """In the order of the ledger."""
    before = len(runner.session.forwards)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        runner.serve(REQUESTS)
    ranges = [event for event in trace.events() if event.name.split(":")[0] in {r.value for r in runner.roles}]
    found = [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)]
    expected = [
        f"{forward.role.value}: {forward.entry or 'eager'} for"
        for forward in runner.session.forwards[before:]
        for _ in range(forward.repeats)
    ]
    assert [name[: len(start)] for name, start in zip(found, expected, strict=True)] == expected
    assert any("FULL" in name for name in found)


def test_without_a_profiler_there_are_no_ranges(runner, monkeypatch):
    """Nothing is even described."""
    monkeypatch.setattr(execution, "batch_text", lambda batch: pytest.fail("described"))
    assert len(runner.serve(REQUESTS)) == len(REQUESTS)


def test_a_runner_captures_once(runner):
    """A second capture would list each graph twice, and leave those of the first in the pool."""
    before = list(runner.session.captured)
    with pytest.raises(RunError, match="has captured already; make another one"):
        runner.capture()
    assert runner.session.captured == before
    assert len(runner.serve(REQUESTS)) == len(REQUESTS)


def test_an_entry_without_a_graph_is_refused_by_name(runner):
    """Whoever forces it: what was not captured is not replayed."""
    role = next(iter(runner.roles.values()))
    known = next(iter(role.graphs))
    entry = Entry(mode=GraphMode.FULL, num_tokens=known.num_tokens + 1, num_reqs=known.num_tokens + 1)
    step = role.step(Batch.decode(role.role, 1, 1), entry, role.warm_up_inputs(known))
    with pytest.raises(GuardError, match=rf"target: {entry} has no graph; capture it"):
        role.execute(step, 0.0)
