"""The recorder: counts exactly, writes whole files now and then, and never disturbs the engine."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from attrs import astuple, evolve
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.engines.logs import read_traffic
from capture_planner.errors import CapturePlannerError
from capture_planner.measuring import recorder as module
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.observation import Observation, ObservedGraph, ObservedRole
from capture_planner.records.spec import Limits
from support.examples import at_most

GRAPHS = tuple(
    ObservedGraph(entry=Entry(mode=GraphMode.FULL, num_tokens=size, num_reqs=size, query_len=1)) for size in (8, 4, 1)
)
BASE = Observation(
    engine="vllm",
    engine_version="0.33.0",
    started="2026-11-22T13:00:00Z",
    model="tiny",
    limits=Limits(max_num_reqs=8, max_num_tokens=64),
    roles=(ObservedRole(role=Role.TARGET, mode=GraphMode.FULL, graphs=GRAPHS),),
)

outcomes = st.tuples(
    st.sampled_from(Role),
    st.integers(1, 3),
    st.integers(3, 5),
    st.none() | st.integers(1, 2),
    st.booleans(),
    st.integers(0, 1),
).flatmap(
    lambda shape: st.sampled_from(
        [(*shape, None, Reason.MODE), (*shape, None, Reason.SIZES)]
        + ([(*shape, 0, None), (*shape, 2, None)] if shape[0] is Role.TARGET else [])
    )
)


def recorder_in(folder: Path, every: float = 60.0) -> Recorder:
    recorder = Recorder(folder, "rank0", every)
    recorder.begin(BASE)
    return recorder


def counted(observation: Observation) -> Counter[tuple[object, ...]]:
    """The counts of an observation, by what was given to the recorder."""
    return Counter(
        {
            (role.role, *astuple(count)[:5], count.graph, count.reason): count.steps
            for role in observation.roles
            for count in role.batches
        }
    )


def in_numpy(outcome: tuple[object, ...]) -> tuple[object, ...]:
    """The same in NumPy's integers, in which vLLM counts tokens."""
    return tuple(np.int32(item) if type(item) is int else item for item in outcome)


@at_most(50)
@given(given=st.lists(outcomes, max_size=200), threads=st.integers(1, 4), numpy=st.booleans())
def test_counts_equal_those_of_a_plain_counter(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[Role, ...]], threads: int, numpy: bool
) -> None:
    """Whatever is counted, by several threads at a time, while others read."""
    recorder = recorder_in(tmp_path_factory.mktemp("observed"), every=0.001)

    def work(part: list[tuple[Role, ...]]) -> None:
        for number, outcome in enumerate(part):
            counted = in_numpy(outcome) if numpy else outcome
            if number % 2:
                recorder.add(counted, 1)  # type: ignore[arg-type]
            else:
                recorder.count(*counted)  # type: ignore[arg-type]
            recorder.draft(np.ones(2, int) if numpy else [1, 1], [1, 0])

    workers = [threading.Thread(target=work, args=(given[start::threads],)) for start in range(threads)]
    for worker in workers:
        worker.start()
    recorder.observation()
    for worker in workers:
        worker.join()
    recorder.close()
    observed = codec.load_observation(recorder.path)
    assert counted(observed) == Counter(given)
    replays = Counter(outcome[6] for outcome in given if outcome[0] is Role.TARGET)
    assert [graph.replays for graph in observed.roles[0].graphs] == [replays[index] for index in range(3)]
    assert observed.drafted == ((len(given),) * 2 if given else ())
    assert observed.accepted == ((len(given), 0) if given else ())


@at_most(50)
@given(given=st.lists(outcomes, max_size=200), most=st.integers(2, 8), timed=st.booleans())
def test_memory_is_bounded_and_every_step_is_counted(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[Role, ...]], most: int, timed: bool
) -> None:
    """Rare shapes are forgotten, and their steps are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SHAPES", most)
        recorder = recorder_in(tmp_path_factory.mktemp("observed"))
        for outcome in given:
            if timed:
                recorder.count(*outcome)  # type: ignore[arg-type]
                recorder.sample(*outcome[:6], 1.0)  # type: ignore[arg-type]
            else:
                recorder.add(outcome, 1)  # type: ignore[arg-type]
            listed = recorder.observation()
        recorder.close()
    observed = codec.load_observation(recorder.path)
    assert len(counted(observed)) <= most
    steps = Counter(outcome[0] for outcome in given)
    assert {role.role: role.steps for role in observed.roles if role.steps} == dict(steps)
    assert not given or listed.roles == observed.roles
    replays = Counter(outcome[6] for outcome in given if outcome[0] is Role.TARGET)
    assert [graph.replays for graph in observed.roles[0].graphs] == [replays[index] for index in range(3)]
    assert observed.roles[0].eager_steps == replays[None]


@given(times=st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
@at_most(20)
def test_time_of_a_shape_is_the_median_of_its_latest_samples(
    tmp_path_factory: pytest.TempPathFactory, times: list[float]
) -> None:
    recorder = recorder_in(tmp_path_factory.mktemp("observed"))
    recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
    for milliseconds in times:
        recorder.sample(Role.TARGET, 3, 3, 1, True, 0, milliseconds)
    (batch,) = recorder.observation().roles[0].batches
    latest = sorted(times[-module.MAX_SAMPLES :])
    assert batch.samples == len(times)
    assert batch.milliseconds is not None
    assert latest[0] - 1e-4 <= batch.milliseconds <= latest[-1] + 1e-4
    below = sum(value < batch.milliseconds - 1e-4 for value in latest)
    above = sum(value > batch.milliseconds + 1e-4 for value in latest)
    assert max(below, above) <= len(latest) / 2
    recorder.close()


def test_new_graphs_start_the_counts_anew(tmp_path: Path) -> None:
    """Counts name graphs by index, so they end with the graphs; costs that join them later end nothing."""
    recorder = recorder_in(tmp_path)
    recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
    with_costs = tuple(evolve(graph, milliseconds=1.5) for graph in GRAPHS)
    recorder.begin(replace(BASE, roles=(evolve(BASE.roles[0], graphs=with_costs),)))
    assert recorder.observation().roles[0].steps == 1
    assert recorder.observation().roles[0].graphs[1].milliseconds == 1.5
    recorder.begin(replace(BASE, roles=(evolve(BASE.roles[0], graphs=GRAPHS[:1]),)))
    assert recorder.observation().roles[0].steps == 0
    recorder.close()


def test_file_is_written_now_and_then(tmp_path: Path) -> None:
    """Right after ``begin``, then within the interval, then no more where nothing changed."""
    recorder = recorder_in(tmp_path, every=0.05)
    assert codec.load_observation(recorder.path).roles[0].steps == 0
    recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
    deadline = time.monotonic() + 20
    while codec.load_observation(recorder.path).roles[0].steps == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codec.load_observation(recorder.path).roles[0].steps == 1
    unchanged = recorder.path.stat().st_mtime_ns
    time.sleep(0.2)
    assert recorder.path.stat().st_mtime_ns == unchanged
    recorder.close()


def test_observation_before_begin_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CapturePlannerError, match="has not begun"):
        Recorder(tmp_path, "rank0").observation()


def test_write_error_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the path and the reason; counting goes on."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.ERROR, "capture_planner"):
        recorder = recorder_in(tmp_path / "file")
        recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
        recorder.close()
    (logged,) = caplog.records
    assert str(recorder.path) in logged.getMessage()
    assert "File exists" in logged.getMessage()
    assert recorder.observation().roles[0].steps == 1


def test_steps_of_a_failed_write_are_in_the_next(tmp_path: Path) -> None:
    """Also where nothing is counted in between."""
    recorder = recorder_in(tmp_path / "observed")
    recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
    (tmp_path / "observed").rename(tmp_path / "aside")
    (tmp_path / "observed").touch()
    recorder.begin(BASE)
    (tmp_path / "observed").unlink()
    (tmp_path / "aside").rename(tmp_path / "observed")
    assert codec.load_observation(recorder.path).roles[0].steps == 0
    recorder.close()
    assert codec.load_observation(recorder.path).roles[0].steps == 1


def test_error_of_counting_is_logged_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread goes on, or the queues would grow as long as the engine serves; ``close`` does not raise either."""
    recorder = recorder_in(tmp_path, every=0.05)
    deadline = time.monotonic() + 20
    for number in (1, 2):
        recorder.count(Role.TARGET, [3], 3, 1, True, 0, 1, None)  # type: ignore[arg-type]  # which has no hash
        while recorder._queue and time.monotonic() < deadline:
            time.sleep(0.01)
        recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
        while codec.load_observation(recorder.path).roles[0].steps < number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert codec.load_observation(recorder.path).roles[0].steps == number
    recorder.count(Role.TARGET, [3], 3, 1, True, 0, 1, None)  # type: ignore[arg-type]
    recorder.close()
    (logged,) = caplog.records
    assert str(recorder.path) in logged.getMessage()
    assert "TypeError: " in logged.getMessage()


SERVER = """
import sys, time
from pathlib import Path
from capture_planner import codec
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import Reason, Role
folder = Path(sys.argv[1])
recorder = Recorder(folder, "rank0", {every})
recorder.begin(codec.load_observation(folder / "base.yaml"))
print("ready", flush=True)
{then}
"""


def serve(folder: Path, every: float, then: str) -> subprocess.Popen[str]:
    codec.write(folder / "base.yaml", codec.dumps(BASE))
    code = SERVER.format(every=every, then=then)
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


COUNT_ON = """
step = 0
while True:
    recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)
    recorder.count(Role.TARGET, 1 + step % 8, 8 + step % 57, None, False, 0, None, Reason.MODE)
    step += 1
    if step % 100 == 0:
        print(step, time.monotonic(), flush=True)
    time.sleep(0.001)
"""


def test_killed_process_loses_at_most_one_interval(tmp_path: Path) -> None:
    """SIGKILL at any moment: the file is whole, and has every step that is older than the interval and one write."""
    every, grace = 0.1, 2.0
    process = serve(tmp_path, every, COUNT_ON)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    steps = [(0, time.monotonic())]
    while steps[-1][1] - steps[0][1] < every + grace + 0.3:
        number, moment = process.stdout.readline().split()
        steps.append((int(number), float(moment)))
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    process.wait(30)
    process.stdout.close()
    observed = codec.load_observation(tmp_path / "rank0.yaml")
    due = max(number for number, moment in steps if moment < killed - every - grace)
    assert due > 0
    assert observed.roles[0].steps >= 2 * due


def test_process_that_ends_writes_everything(tmp_path: Path) -> None:
    """By ``atexit``, without a call of ``close``."""
    process = serve(tmp_path, 60.0, "for _ in range(1000): recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)")
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert codec.load_observation(tmp_path / "rank0.yaml").roles[0].steps == 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_writes_nothing(tmp_path: Path) -> None:
    """A worker that a process forks must not replace the file of its parent."""
    fork = "recorder.count(Role.TARGET, 3, 3, 1, True, 0, 1, None)\nimport os\nif os.fork(): os.wait(); os._exit(0)"
    process = serve(tmp_path, 60.0, fork)
    process.communicate(timeout=300)
    assert codec.load_observation(tmp_path / "rank0.yaml").roles[0].steps == 0


@pytest.mark.parametrize("graphs", [10, 1000])
def test_file_with_many_batches_can_be_read(tmp_path: Path, graphs: int) -> None:
    """Three roles with more shapes than are listed, all timed; with many graphs fewer are listed."""
    many = tuple(
        ObservedGraph(entry=Entry(mode=GraphMode.PIECEWISE, num_tokens=700 + n), seconds=0.5, mib=1.5, milliseconds=2.5)
        for n in range(graphs)
    )
    recorder = Recorder(tmp_path, "rank0")
    recorder.begin(
        replace(BASE, roles=tuple(ObservedRole(role=r, mode=GraphMode.PIECEWISE, graphs=many) for r in Role))
    )
    for number, role in itertools.product(range(1, module.MAX_BATCHES + 100), Role):
        recorder.count(role, 1, number, None, number % 2 == 0, 0, number % 10, None)
        recorder.sample(role, 1, number, None, number % 2 == 0, 0, 1.25)
    recorder.close()
    observed, whole = codec.load_observation(recorder.path), recorder.observation()
    assert [role.graphs for role in observed.roles] == [role.graphs for role in whole.roles]
    assert {role.steps for role in observed.roles} == {module.MAX_BATCHES + 99}
    assert graphs > 10 or {role.other_batches for role in observed.roles} == {0}
    assert all(len(role.batches) <= module.MAX_BATCHES for role in whole.roles)
    assert (observed.roles == whole.roles) is (graphs == 10)
    if graphs > 10:
        assert max(len(role.batches) for role in observed.roles) < min(len(role.batches) for role in whole.roles)


def test_an_observation_of_many_shapes_has_all_steps_in_it(tmp_path: Path) -> None:
    """Mixed batches of thousands of shapes: none is lost, none shrinks, and each stays within its graph."""
    sizes = (2048, 512, 128, 32)
    graphs = tuple(ObservedGraph(entry=Entry(mode=GraphMode.PIECEWISE, num_tokens=size)) for size in sizes)
    base = replace(
        BASE,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        roles=(ObservedRole(role=Role.TARGET, mode=GraphMode.FULL_AND_PIECEWISE, graphs=graphs),),
    )
    recorder = Recorder(tmp_path, "rank0", 60.0)
    recorder.begin(base)
    draw = random.Random(1)
    given: Counter[tuple[int, int, int | None]] = Counter()
    for _ in range(12_000):
        tokens = int(8000 ** draw.uniform(0.3, 1))
        reqs = draw.randint(1, min(tokens, 256))
        graph = max((number for number, size in enumerate(sizes) if size >= tokens), default=None)
        recorder.count(Role.TARGET, reqs, tokens, None, False, 0, graph, None if graph is not None else Reason.SIZES)
        given[reqs, tokens, graph] += 1
    recorder.count(Role.TARGET, 7, 7, 1, True, 0, 3, None)
    assert len(given) > 2 * module.MAX_SHAPES
    recorder.close()
    (role,) = codec.load_observation(recorder.path).roles
    assert (role.steps, role.other_batches) == (12_001, 0)
    assert 0 < role.rounded_batches < 12_000
    assert any((each.num_reqs, each.num_tokens, each.query_len) == (7, 7, 1) for each in role.batches)
    for each in role.batches:
        assert each.graph is None or each.num_tokens <= sizes[each.graph]
        assert each.num_reqs <= min(256, each.num_tokens)
    before = sum(tokens * count for (_, tokens, _), count in given.items())
    after = sum(each.num_tokens * each.steps for each in role.batches)
    assert before < after < 1.1 * before
    traffic, _ = read_traffic([str(recorder.path)])
    assert sum(each.count for each in traffic.batches) == 12_001
    assert any("of rare shapes are listed as larger ones" in note for note in traffic.notes)
