"""The observations of an engine's workers as one: steps of tensor-parallel ones count once, data-parallel ones' all."""

import os
from collections import Counter
from itertools import cycle, permutations
from operator import attrgetter
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.cli.files import show
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.logs import read_traffic
from capture_planner.errors import InvalidDocument
from capture_planner.measuring.workers import as_one, read_workers
from capture_planner.modes import Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.observation import BatchCount, EagerCost
from capture_planner.records.spec import Parallel
from support.observing import observation_of

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "tiny-mtp-cpu.cpu.yaml")
BASE = observation_of(PLAN)
REVERSED = replace(BASE.roles[0], graphs=BASE.roles[0].graphs[::-1], answers=())
STEPS = st.dictionaries(st.integers(1, 4), st.tuples(st.integers(1, 9), st.sampled_from([None, 2.5])))
"""How often decodes of so many requests ran, and their time."""


def worker(rank, tensor, data, shapes, **changes):
    """A worker whose target ran decodes of so many requests so many times."""
    (target, *others) = BASE.roles
    counts = tuple(
        BatchCount(
            num_reqs=reqs,
            num_tokens=reqs,
            query_len=1,
            steps=steps,
            reason=Reason.UNKNOWN,
            milliseconds=milliseconds,
            samples=int(milliseconds is not None),
        )
        for reqs, (steps, milliseconds) in shapes.items()
    )
    return replace(
        BASE,
        rank=rank,
        world_size=tensor * data,
        parallel=Parallel(tensor=tensor, data=data),
        seconds=10.0,
        kv_blocks=100 + rank,
        capture_seconds=1.0 + rank,
        roles=(replace(target, batches=counts), *others),
        **changes,
    )


@given(
    st.integers(1, 3),
    st.lists(
        st.dictionaries(st.integers(1, 4), st.tuples(st.integers(1, 9), st.sampled_from([None, 2.5]))),
        min_size=1,
        max_size=3,
    ),
    st.randoms(),
)
def test_steps_are_those_of_one_worker_of_each_data_parallel_rank(tensor, ranks, order):
    """In any order of the files; graphs are theirs, memory is the tightest worker's and time the slowest one's."""
    data = len(ranks)
    workers = [worker(rank, tensor, data, ranks[rank // tensor]) for rank in range(tensor * data)]
    named = [(f"rank{each.rank}", each) for each in workers]
    order.shuffle(named)
    whole = as_one(named)
    expected: Counter[int] = Counter()
    for shapes in ranks:
        expected.update({reqs: steps for reqs, (steps, _) in shapes.items()})
    assert {count.num_reqs: count.steps for count in whole.roles[0].batches} == dict(expected)
    assert (whole.kv_blocks, whole.capture_seconds) == (100, float(tensor * data))
    assert (whole.seconds, whole.notes) == (10.0 * data, BASE.notes)
    assert [role.graphs for role in whole.roles] == [role.graphs for role in BASE.roles]
    assert codec.loads(codec.dumps(whole), type(whole)) == whole
    batch = Batch.decode(Role.TARGET, 1, 1)
    assert emulation_of(whole).dispatch(batch) == emulation_of(BASE).dispatch(batch)


TIME = st.none() | st.integers(1, 9).map(float)


def timed_worker(rank, tensor, times):
    """A tensor-parallel worker whose graphs, trials, eager steps and batches took such pairs of times."""
    (target, *others) = BASE.roles
    graphs = tuple(
        evolve(graph, milliseconds=one, half_milliseconds=other, mib=other)
        for graph, (one, other) in zip(target.graphs, cycle(times), strict=False)
    )
    eager = tuple(EagerCost(num_reqs=1, num_tokens=n, milliseconds=one or 0.0) for n, (one, _) in enumerate(times, 1))
    counts = tuple(
        BatchCount(
            num_reqs=reqs,
            num_tokens=reqs,
            query_len=1,
            steps=5 + rank,
            reason=Reason.UNKNOWN,
            milliseconds=one,
            samples=10 + rank,
            interval=other,
            intervals=20 + rank,
            interval_error=float(rank),
        )
        for reqs, (one, other) in enumerate(times, 1)
    )
    timed = replace(target, graphs=graphs, trials=graphs[:2], eager=eager, batches=counts)
    return replace(worker(rank, tensor, 1, {}), roles=(timed, *others))


@given(
    st.sampled_from((TIME, st.none())).flatmap(
        lambda other: st.lists(st.lists(st.tuples(TIME, other), min_size=4, max_size=4), min_size=2, max_size=3)
    ),
    st.randoms(),
)
def test_times_of_workers_that_take_the_same_steps_are_the_slowest_ones(times, order):
    """Figures that belong together are of one worker: that with the longest time."""
    named = [(f"rank{rank}", timed_worker(rank, len(times), own)) for rank, own in enumerate(times)]
    every = [each.roles[0] for _, each in named]
    order.shuffle(named)
    whole = as_one(named).roles[0]

    def assert_slowest(costs, own, name="milliseconds", *along):
        """Each cost has the most of a time, and the other figures of a worker that has it."""
        for place, cost in enumerate(costs):
            candidates = [role[place] for role in own]
            times = [getattr(each, name) for each in candidates if getattr(each, name) is not None]
            assert getattr(cost, name) == max(times, default=None)
            figures = attrgetter(name, *along)
            assert not along or figures(cost) in map(figures, candidates)

    assert_slowest(whole.graphs, [role.graphs for role in every], "milliseconds", "half_milliseconds")
    assert_slowest(whole.graphs, [role.graphs for role in every], "mib")
    assert_slowest(whole.trials, [role.trials for role in every], "milliseconds", "half_milliseconds")
    assert_slowest(whole.eager, [role.eager for role in every])
    counts = [sorted(role.batches, key=attrgetter("num_reqs")) for role in (whole, *every)]
    assert [count.steps for count in counts[0]] == [5] * 4
    figures = "interval", "milliseconds", "samples", "intervals", "interval_error"
    assert_slowest(counts[0], counts[1:], *figures)
    if not any(count.interval for count in counts[0]):
        assert_slowest(counts[0], counts[1:], "milliseconds", *figures)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": None}, "plan is another"),
        ({"engine_version": "0.32.0"}, "engine_version is 0.32.0"),
        (
            {"roles": (replace(BASE.roles[0], graphs=BASE.roles[0].graphs[::-1], answers=()), *BASE.roles[1:])},
            "in this order",
        ),
        ({"roles": BASE.roles[:1]}, "other roles"),
        ({"rank": 0}, "another file is of rank 0"),
    ],
    ids=["plan", "version", "graphs", "roles", "rank"],
)
def test_workers_of_other_engines_are_refused(changes, message):
    """With the file, and what differs."""
    one, other = worker(0, 2, 1, {}), worker(1, 2, 1, {})
    with pytest.raises(InvalidDocument, match="second") as caught:
        as_one([("first", one), ("second", replace(other, **changes))])
    assert message in str(caught.value)


def test_missing_worker_is_a_note():
    """The counts are of those that are there."""
    whole = as_one([(str(rank), worker(rank, 4, 1, {2: (5, None)})) for rank in (1, 2)])
    assert whole.notes[-1] == "of 4 workers, there is no observation of rank 0, 3"
    assert whole.roles[0].steps == 5


def written(folder, *workers, process=7):
    """Write files as an engine names them."""
    for each in workers:
        path = folder / f"vllm.rank{each.rank}.{process}.yaml"
        path.write_text(codec.dumps(each))
        os.utime(path, (process, process))
    return [str(path) for path in sorted(folder.iterdir())]


def test_folder_stands_for_the_newest_workers_in_it(tmp_path):
    """Files of an earlier run are left out."""
    written(tmp_path, *(worker(rank, 2, 1, {1: (9, None)}) for rank in range(2)), process=3)
    written(tmp_path, *(worker(rank, 2, 1, {1: (2, None)}) for rank in range(2)))
    assert read_workers(tmp_path).roles[0].steps == 2
    shown = CliRunner().invoke(show, [str(tmp_path), "--format", "json"])
    assert (shown.exit_code, codec.loads(shown.stdout, type(BASE))) == (0, read_workers(tmp_path))


@pytest.mark.parametrize("changed", [*permutations(range(1, 4))])
def test_the_latest_worker_is_the_one_that_started_last(tmp_path, changed):
    """Files that are copied have times of their own."""
    for start, process in enumerate(changed):
        started = f"2026-11-22T13:00:0{start}{'.5Z' if start % 2 else 'Z'}"
        written(tmp_path, worker(0, 1, 1, {1: (1 + start, None)}, started=started), process=process)
    assert read_workers(tmp_path).roles[0].steps == len(changed)


@pytest.mark.parametrize("names", [("vllm.rank0.3.yaml", "vllm.rank0.7.yaml"), ("a.yaml", "b.yaml")])
def test_files_of_several_models_in_a_folder_are_refused(tmp_path, names):
    """Also files of one worker, of which only the latest is read; other files do not count."""
    for name, model in zip(names, ("8b", "0.6b"), strict=True):
        (tmp_path / name).write_text(codec.dumps(worker(0, 1, 1, {}, model=model)))
    (tmp_path / "plan.yaml").write_text(codec.dumps(PLAN))
    with pytest.raises(InvalidDocument, match=f"{names[0]}: model is 8b, compared with .*{names[1]}"):
        read_workers(tmp_path)
    (tmp_path / names[0]).unlink()
    assert read_workers(tmp_path).model == "0.6b"


def test_a_damaged_file_of_a_worker_is_an_error(tmp_path):
    """It may be the latest; nothing says that it is not."""
    written(tmp_path, worker(0, 1, 1, {}))
    (tmp_path / "vllm.rank0.3.yaml").write_text("engine: [")
    with pytest.raises(InvalidDocument, match=r"vllm\.rank0\.3\.yaml"):
        read_workers(tmp_path)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=3), min_size=2, max_size=4)
)
def test_drafts_are_those_of_one_of_the_workers_that_take_the_same_steps(drafts):
    """The one that drafted most; what another accepted is none of its drafts."""
    pairs = [(tuple(drafted for _, drafted in own), tuple(accepted for accepted, _ in own)) for own in drafts]
    named = [
        (str(rank), worker(rank, len(pairs), 1, {}, drafted=drafted, accepted=accepted))
        for rank, (drafted, accepted) in enumerate(pairs)
    ]
    whole = as_one(named)
    assert (whole.drafted, whole.accepted) in pairs
    assert sum(whole.drafted) == max(sum(drafted) for drafted, _ in pairs)


def test_folder_without_observations_is_an_error(tmp_path):
    """With what to name."""
    with pytest.raises(InvalidDocument, match="cannot be read: it is a folder, and has no observation"):
        read_workers(tmp_path)


def test_traffic_counts_the_steps_of_tensor_parallel_workers_once(tmp_path):
    """Whether files are named or their folder; those of data-parallel ranks add up."""
    files = written(tmp_path, *(worker(rank, 2, 2, {1 + rank // 2: (2, None)}) for rank in range(4)))
    for sources in (files, [str(tmp_path)]):
        traffic, _ = read_traffic(sources)
        assert {(each.num_reqs, each.count) for each in traffic.batches} == {(1, 2), (2, 2)}
        assert traffic.seconds == 20.0
    assert f"{files[1]}: rank 1 takes the steps of rank 0" in read_traffic(files)[0].notes
