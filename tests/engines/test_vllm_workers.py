"""Law 14 in vLLM: workers that would capture other graphs are refused on every one of them, before any capture."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner_vllm.inside import observe, workers
from support.vllm_observed import observed, process, run, started, step

dist = pytest.importorskip("torch.distributed", reason="needs torch with torch.distributed")
ANSWERS = st.lists(
    st.sampled_from(["15 graphs (a) of plan x", "133 graphs (b) of no plan", None]), min_size=2, max_size=5
)
"""What each worker captures; None: it does not answer."""


def errors_of(answers, *stores, seconds=0.05):
    """The error of each worker that answers, or None; each has a store of its own, or all have one."""

    def one(rank):
        try:
            workers.refuse_differences(
                stores[rank % len(stores)], rank, len(answers), "target, 1", answers[rank], seconds
            )
        except RunError as error:
            return str(error)
        return None

    ranks = [rank for rank, answer in enumerate(answers) if answer is not None]
    with ThreadPoolExecutor(len(ranks) or 1) as pool:
        return list(pool.map(one, ranks))


@given(ANSWERS)
def test_every_worker_sees_the_same_error_or_none(answers):
    """Who is missing is named, or else who captures what; without either, nothing is raised."""
    errors = errors_of(answers, dist.HashStore())
    missing = [str(rank) for rank, answer in enumerate(answers) if answer is None]
    assert len(set(errors)) <= 1
    for error in errors:
        if missing:
            assert (
                f"worker{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {len(answers)} did not say" in error
            )
        elif len(set(answers)) > 1:
            assert all(answer in error for answer in answers)
        else:
            assert error is None


def test_workers_meet_in_the_store_of_torch():
    """A TCP store, as vLLM's workers have."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = (dist.TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(2))
    assert errors_of(["15 graphs"] * 3, first, *others, seconds=20) == [None] * 3


@pytest.fixture
def world(monkeypatch):
    """Rank 0 of two workers, whose store is in this process."""
    store = dist.HashStore()
    monkeypatch.setattr(workers, "SECONDS", 0.05)
    monkeypatch.setattr(workers, "_turns", workers.Counter())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def manager(graphs, stages=1):
    """A graph manager that will capture these."""
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    return SimpleNamespace(_capture_descs={"FULL": graphs}, vllm_config=SimpleNamespace(parallel_config=parallel))


def test_managers_are_compared_by_their_graphs_and_turn(world):
    """Memory profiling makes each manager once more; order counts, as collectives follow it."""
    for turn in (1, 2):
        world.set(f"capture_planner/target, {turn}/1", workers.summary({"FULL": [8, 4]}, "plan x"))
    workers.compare(manager([8, 4]), "target", "plan x")
    with pytest.raises(RunError, match=r"2 graphs .* of plan x; worker 1: 2 graphs .* of plan x"):
        workers.compare(manager([4, 8]), "target", "plan x")


def test_stages_of_a_pipeline_are_not_compared(world):
    """Only the last one has the drafter's managers; a comparison would wait for the others."""
    workers.compare(manager([8], stages=2), "target", "plan x")


def test_single_worker_asks_no_store():
    """It has no process group."""
    workers.compare(manager([8]), "target", "plan x")


def test_engine_goes_on_where_workers_cannot_be_compared(world, caplog):
    """A line says why."""
    caplog.set_level(logging.WARNING, "capture_planner.vllm")
    workers.compare(SimpleNamespace(), "target", "plan x")
    assert "target: workers are not compared: AttributeError" in caplog.text


@given(
    st.lists(st.tuples(st.sampled_from([True, True, False, None]), st.integers(0, 8)), min_size=2, max_size=5),
    st.booleans(),
)
def test_all_workers_profile_or_none_does(answers, patient):
    """Also if answers are late or missing: no worker runs its dummy steps alone."""
    store, wanted = dist.HashStore(), {goes for goes, _ in answers}
    seconds = 20 if patient and None not in wanted else 0.04

    def one(rank):
        goes, delay = answers[rank]
        time.sleep(delay / 100)
        return workers.all_go_on(store, rank, len(answers), "profile, 1", seconds=seconds, goes=goes)

    ranks = [rank for rank, (goes, _) in enumerate(answers) if goes is not None]
    with ThreadPoolExecutor(len(ranks) or 1) as pool:
        found = set(pool.map(one, ranks))
    assert len(found) <= 1
    if seconds > 1 or wanted != {True}:
        assert found in ({wanted == {True}}, set())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("other", ["1", "0", None])
def test_worker_profiles_if_the_others_do(world, eager, other):
    """Else a note says why there are no times; the engine runs."""
    if other is not None:
        world.set("capture_planner/profile, 1/1", other)
    with process(**{observe.PROFILE: "1"}) as folder:
        runner = started(eager=eager, mode="NONE" if eager else "FULL_AND_PIECEWISE")
        run(runner, step(4, 4))
        runner.shutdown()
        seen = observed(folder)
    assert world.get("capture_planner/profile, 1/0") == b"1"
    assert bool(seen.roles[0].eager) is (other == "1")
    assert all(bool(graph.milliseconds) is (other == "1") for role in seen.roles for graph in role.graphs)
    assert any("not profiled" in note for note in seen.notes) is (other != "1")
    assert seen.roles[0].steps == 1


def test_worker_that_does_not_profile_says_so_and_does_not_wait(world, monkeypatch):
    """Its engine starts at once; the others read that they must not profile."""
    monkeypatch.setattr(workers, "SECONDS", 60.0)
    with process():
        started().shutdown()
    assert world.get("capture_planner/profile, 1/0") == b"0"
