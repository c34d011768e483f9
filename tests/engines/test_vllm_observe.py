"""Observing vLLM, by a stand-in: what is counted is what ran, the file says it, and vLLM never notices."""

import gc
import importlib
import os
import sys
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.engines.deployments import emulation_of
from capture_planner.modes import Reason, Role
from capture_planner.records._base import digest
from capture_planner.records.plan import Decision
from capture_planner_vllm.inside import observe, steps, watch
from capture_planner_vllm.inside import observe_seams as seams
from support.vllm_observed import MODES, PLAN, STEPS, Event, counted, observed, process, run, started, step, summary


@given(steps=STEPS, fused=st.booleans(), ranks=st.sampled_from((1, 2)), mode=st.sampled_from(MODES))
def test_counts_are_what_the_engine_ran(steps, fused, ranks, mode):
    """By role, batch and graph, against a log of the engine's own; profiling and dummy runs count as nothing."""
    with process() as folder:
        runner = started(fused, ranks=ranks, mode=mode)
        for num_reqs, query_len, prompts, k in steps:
            run(runner, step(num_reqs, query_len, prompts, k))
            runner._dummy_run(8)
        runner.shutdown()
        seen = observed(folder)
    for role in ("target", "draft_prefill", "draft_decode"):
        (mine,) = (each for each in seen.roles if each.role == role)
        assert summary(mine) == counted(runner, role)
        assert mine.steps == sum(role in answers for _, answers in runner.answers)
        assert all(batch.num_tokens == batch.num_reqs * batch.query_len for batch in mine.batches if batch.query_len)


@given(steps=STEPS, data=st.data())
def test_drafts_are_counted_by_position(steps, data):
    """Those of every request that sampled, against a loop over requests."""
    drafted, accepted = Counter(), Counter()
    with process() as folder:
        runner = started()
        for num_reqs, query_len, prompts, k in steps:
            counts = [data.draw(st.integers(0, query_len)) for _ in range(num_reqs)] + [0] * prompts
            run(runner, step(num_reqs, query_len, prompts, k, sampled=counts))
            for count in counts[:num_reqs]:
                for position in range(query_len - 1 if count else 0):
                    drafted[position] += 1
                    accepted[position] += position < count - 1
        runner.shutdown()
        seen = observed(folder)
    most = max(drafted, default=-1) + 1
    assert seen.drafted == tuple(drafted[position] for position in range(most))
    assert seen.accepted == tuple(accepted[position] for position in range(most))


@pytest.mark.parametrize("adaptive", [None, "manager"])
def test_drafts_that_may_be_taken_back_are_not_counted(adaptive):
    """Adaptive verification trims what was scheduled, and a draft that was never verified is not a rejected one."""
    with process() as folder:
        runner = started(adaptive=adaptive)
        run(runner, step(4, 4, sampled=[2] * 4))
        runner.shutdown()
        seen = observed(folder)
    assert seen.roles[0].steps == 1
    assert (seen.drafted, seen.accepted) == (((), ()) if adaptive else ((4, 4, 4), (4, 0, 0)))
    assert any("drafts are not counted" in note for note in seen.notes) is bool(adaptive)


@pytest.mark.parametrize("environment", [{}, {observe.PROFILE: "1"}], ids=["plain", "profiled"])
def test_graphs_are_the_captured_ones(environment):
    """In capture order, of the real capture only, with the chain's length where a graph has a chain."""
    with process(**environment) as folder:
        runner = started(fused=True)
        drafter = runner.speculator
        managers = (runner.cudagraph_manager, drafter.prefill_cudagraph_manager, drafter.decode_cudagraph_manager)
        captured = [list(manager.graphs) for manager in managers]
        runner.shutdown()
        seen = observed(folder)
    for role, descs in zip(seen.roles, captured, strict=True):
        entries = [graph.entry for graph in role.graphs]
        assert [(e.mode.value, e.num_tokens, e.num_reqs, e.query_len) for e in entries] == [
            (d.cg_mode.name, d.num_tokens, d.num_reqs, d.uniform_token_count) for d in descs
        ]
        assert all((graph.milliseconds is not None) is bool(environment) for graph in role.graphs)
    assert bool(seen.roles[0].eager) is bool(environment)
    assert [graph.entry.draft_steps for graph in seen.roles[2].graphs] == [2, 1, 2, 1]
    assert (seen.graph_mib, seen.kv_blocks) == (3.0, 1000)


def test_schedule_is_shown_as_ranges():
    """By batch size, as vLLM takes them: a list of [first, last, drafts]."""
    with process() as folder:
        started(schedule=[[1, 4, 3], (5, 16, 1)]).shutdown()
        seen = observed(folder)
    assert dict(seen.settings)["num_speculative_tokens_per_batch_size"] == "1 to 4: 3, 5 to 16: 1"
    assert seen.speculative.schedule == ((1, 4, 3), (5, 16, 1))


def test_nothing_is_wrapped_without_a_folder():
    """Not one function differs."""
    with process(**{observe.OBSERVE: ""}) as folder:
        before = functions()
        runner = started()
        run(runner, step(4, 4))
        runner.shutdown()
        assert functions() == before
        assert list(folder.iterdir()) == []


def functions():
    """The functions of all seams, as they are now."""
    for function in seams.SEAMS:
        importlib.import_module(function.module)
    return [getattr(*function.owner()) for function in seams.SEAMS]


def test_engine_gets_what_it_gets_unobserved():
    """Outputs and answers of the same steps."""
    steps = [step(1 + index % 9, 4, index % 3, 1 + index % 3) for index in range(40)]

    def results(**environment):
        with process(**environment):
            runner = started(fused=True)
            outputs = [run(runner, each).sampled_token_ids for each in steps]
            runner.shutdown()
            answers = [{role: str(desc) for role, desc in answer.items()} for _, answer in runner.answers]
            return outputs, answers

    assert results() == results(**{observe.OBSERVE: ""}) == results(**{observe.PROFILE: "1"})


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        *((watch.StepWatch, name) for name in ("begin", "timed", "forward", "forward_end", "end", "read", "flush")),
        *((steps.Dispatches, name) for name in ("dispatched", "specialized")),
        *((steps.Verifications, name) for name in ("scheduled", "sampled", "accepted", "take")),
    ],
)
def test_error_of_ours_ends_the_observation_only(owner, method, monkeypatch, caplog):
    """The engine runs on with the same answers; the log and the file say what happened."""

    def broken(*arguments):
        raise ZeroDivisionError("of ours")

    served = [step(4, 4, sampled=[2] * 4) for _ in range(watch.EVERY)]
    with process() as folder:
        runner = started()
        run(runner, served[0])
        monkeypatch.setattr(owner, method, broken)
        outputs = [run(runner, each).sampled_token_ids for each in served]
        runner.shutdown()
        assert outputs == [each.sampled for each in served]
        assert len(runner.answers) == 1 + len(served)
        assert any("of ours" in record.message for record in caplog.records)
        assert any("of ours" in note for note in observed(folder).notes)


@given(taken=STEPS, fused=st.booleans(), mode=st.sampled_from(MODES), data=st.data())
def test_steps_read_late_are_what_they_are_read_at_once(taken, fused, mode, data):
    """Whenever the log is read: after each event, now and then between them, or at the end alone.

    However many dispatches are read once for all like them.
    """
    served = [step(*each, sampled=data.draw(accepted_by(each))) for each in taken]

    def written(read, known):
        with process() as folder, pytest.MonkeyPatch.context() as limited:
            limited.setattr(steps, "MOST_KNOWN", known)
            with pytest.MonkeyPatch.context() as patch:
                recorders = []
                begin = watch.StepRecorder.begin
                patch.setattr(
                    watch.StepRecorder, "begin", lambda self, base: (recorders.append(self), begin(self, base))
                )
                runner = started(fused, mode=mode)
            for each in served:
                for part in parts(runner, each):
                    part()
                    if read():
                        recorders[-1].gather()
            runner.shutdown()
            seen = observed(folder)
        return (
            seen.drafted,
            seen.accepted,
            [
                # Intervals are of the host's clock, and of some steps it makes stalls.
                (
                    {evolve(each, interval=None, intervals=0, interval_error=None) for each in role.batches},
                    [each.replays for each in role.graphs],
                )
                for role in seen.roles
            ],
        )

    assert written(lambda: True, 1) == written(lambda: data.draw(st.booleans()), 3) == written(lambda: False, 1024)


def accepted_by(taken):
    """The tokens that each request of a step gets: none of a part of a prompt."""
    num_reqs, query_len, prompts, _ = taken
    return st.lists(st.integers(0, query_len), min_size=num_reqs, max_size=num_reqs).map(
        lambda own: own + [0] * prompts
    )


def parts(runner, scheduled):
    """A step, in the order of the engine's calls."""
    output = []
    return (
        lambda: runner.execute_model(scheduled),
        lambda: output.append(runner.sample_tokens(None)),
        lambda: output[0].get_output(),
    )


def test_step_that_is_not_timed_calls_eight_functions_of_ours():
    """One around each function of vLLM, and nothing that reads what they log."""
    entered = Counter()

    def count(frame, event, argument):
        if event == "call" and "capture_planner" in frame.f_globals["__name__"]:
            entered[frame.f_code.co_name] += 1

    with process() as folder:
        runner, each = started(), step(8, 4)
        run(runner, each)
        sys.setprofile(count)
        try:
            for _ in range(watch.EVERY - 2):
                run(runner, each)
        finally:
            sys.setprofile(None)
        runner.shutdown()
        assert observed(folder).roles[0].steps == watch.EVERY - 1
    steps_run = watch.EVERY - 2
    assert entered == {
        "execute_model": steps_run,
        "dispatch_cg_and_sync_dp": 3 * steps_run,
        "forward_start": steps_run,
        "specialize_spec_tokens": steps_run,
        "sample_tokens": steps_run,
        "get_output": steps_run,
    }


@pytest.mark.parametrize("place", ["facts.tracks", "facts.bonus_tokens", "StepRecorder"])
def test_error_of_ours_after_the_capture_ends_the_observation_only(place, monkeypatch, caplog):
    """VLLM has captured, and serves; the log says once why there is no file."""

    def broken(*arguments):
        raise ZeroDivisionError("of ours")

    owner, name = (observe.facts, place.split(".")[1]) if "." in place else (observe, place)
    monkeypatch.setattr(owner, name, broken)
    with process() as folder:
        runner = started()
        outputs = [run(runner, step(4, 4, sampled=[2] * 4)).sampled_token_ids for _ in range(3)]
        runner.shutdown()
        assert outputs == [[[0] * 2] * 4] * 3
        assert list(folder.iterdir()) == []
    assert sum("of ours" in record.message for record in caplog.records) == 1


def test_only_sampled_steps_are_timed_and_never_waited_for():
    """One step in ``EVERY``; a time is read when the device is done, at a later sampled step or at the end."""
    with process() as folder:
        runner, before = started(), Event.clock
        Event.ready = False
        for _ in range(watch.EVERY - 1):
            run(runner, step(4, 4))
        assert Event.clock == before
        for _ in range(watch.EVERY + 1):
            run(runner, step(4, 4))
        assert Event.clock == before + 2 * 6  # two steps of three roles, a pair of events each
        Event.ready = True
        runner.shutdown()
        for role in observed(folder).roles:
            (batch,) = role.batches
            passes = 2 if role.role is Role.DRAFT_DECODE else 1  # K - 1 replays of a graph of one step
            assert (batch.steps, batch.samples, batch.milliseconds) == (2 * watch.EVERY, 2, 1.0 / passes)


def test_file_has_what_ran_before_the_engine_ends():
    """Every so many seconds, so that a killed process loses no more: counts and drafts."""
    with process(**{observe.SECONDS: "0.05"}) as folder:
        runner = started()
        for _ in range(5):
            run(runner, step(4, 4, sampled=[3] * 4))
        until = time.monotonic() + 20
        while observed(folder).accepted != (20, 20, 0) and time.monotonic() < until:
            time.sleep(0.02)
        seen = observed(folder)
        runner.shutdown()
    assert (seen.drafted, seen.accepted) == ((20, 20, 20), (20, 20, 0))
    assert [role.steps for role in seen.roles] == [5, 5, 5]


def test_each_rank_and_each_runner_has_a_file():
    """A second model runner in one process does not overwrite the file of the first."""
    with process() as folder:
        runner = started(ranks=2, rank=1)
        run(runner, step(3, 4))
        runner.shutdown()
        assert observed(folder, rank=1).rank == 1
        second = started(ranks=2, rank=1)
        second.shutdown()
        names = {path.name for path in folder.iterdir()}
        assert names == {f"vllm.rank1.{os.getpid()}.yaml", f"vllm.rank1.{os.getpid()}.2.yaml"}


@pytest.mark.parametrize("environment", [{}, {observe.PROFILE: "1"}], ids=["plain", "profiled"])
@pytest.mark.parametrize("eager", [False, True])
def test_engine_that_ended_is_not_kept(environment, eager):
    """Neither its managers with their graphs, nor its buffers: vLLM frees them for the next in this process."""
    with process(**environment) as folder:
        runner = started(eager=eager, experts=(8, 0))
        run(runner, step(4, 4))
        owned = runner.cudagraph_manager, runner.speculator, runner.input_buffers.input_ids
        alive = [weakref.ref(each) for each in owned]
        runner.shutdown()
        del runner, owned
        until = time.monotonic() + 20  # the recorder's thread ends a moment later
        while any(each() is not None for each in alive) and time.monotonic() < until:
            gc.collect()
        assert [each() for each in alive] == [None] * 3
        assert observed(folder).roles[0].steps == 1


@given(
    steps=STEPS,
    ranks=st.sampled_from((1, 2)),
    profiled=st.booleans(),
    eager=st.booleans(),
    warm_up=st.booleans(),
    worker=st.sampled_from(("Worker", "OtherWorker")),
)
def test_no_step_has_work_of_ours(steps, ranks, profiled, eager, warm_up, worker):
    """Not even the first: ranks that have none would not take part in its dummy runs.

    What vLLM warms up by is no traffic. A worker that starts in another way is observed from the first step.
    """
    with process(**{observe.PROFILE: str(int(profiled))}) as folder:
        mode = "NONE" if eager else "FULL_AND_PIECEWISE"
        runner = started(ranks=ranks, eager=eager, mode=mode, warm_up=warm_up, worker=worker)
        before = len(runner.dummies)
        for num_reqs, query_len, prompts, k in steps:
            run(runner, step(num_reqs, query_len, prompts, k))
        assert len(runner.dummies) == before
        runner.shutdown()
        seen = observed(folder)
    profiles = profiled and (worker == "Worker" or not eager)
    assert bool(seen.roles[0].eager) is bool(before) is profiles
    assert any("not profiled" in note for note in seen.notes) is (profiled and not profiles)
    for role in seen.roles:
        assert summary(role) == counted(runner, role.role.value)
        assert not eager or {batch.reason for batch in role.batches} <= {Reason.MODE}


ENGINES = st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=3)
"""Of engines of one process: observed, profiled, under a plan, and started without graphs."""


@given(ENGINES)
def test_each_engine_of_a_process_is_observed_as_its_variables_say(engines):
    """In their folder, with their profile, and with the plan that ran: its digest, and the decisions on it."""
    decision = Decision(rule="any", before="1", after="2", role=Role.TARGET, message="A sentence.")
    # All engines of a process get their plans from the callable that the first one was attached with.
    decisions, plans = {}, []
    with process() as folder:
        for index, (is_observed, profiled, planned, eager) in enumerate(engines):
            place = folder / str(index)
            os.environ.update({observe.OBSERVE: str(place) if is_observed else "", observe.PROFILE: str(int(profiled))})
            decisions.clear()
            if planned and not eager:
                decisions[Role.TARGET] = (decision,)
            plans.append(PLAN if planned else None)
            mode = "NONE" if eager else "FULL_AND_PIECEWISE"
            runner = started(plan=lambda: plans[-1], decisions=decisions, eager=eager, mode=mode)
            run(runner, step(4, 4))
            runner.shutdown()
            assert bool(runner.dummies) is bool(is_observed and profiled)
            files = [*place.glob("*.yaml")]
            assert len(files) == is_observed
            for seen in map(codec.load_observation, files):
                assert seen.plan == (digest(PLAN) if planned and not eager else None)
                assert seen.decisions == ((decision,) if planned and not eager else ())
                assert [role.steps for role in seen.roles] == [1, 1, 1]
                assert all(bool(graph.milliseconds) is profiled for role in seen.roles for graph in role.graphs)


@given(steps=STEPS, fused=st.booleans(), mode=st.sampled_from(MODES))
def test_file_answers_as_the_engine_dispatches(steps, fused, mode):
    """Each batch that ran, asked of the observation as a deployment, has the graph that it ran on."""
    with process() as folder:
        runner = started(fused, mode=mode)
        for num_reqs, query_len, prompts, _ in steps:
            run(runner, step(num_reqs, query_len, prompts))
        runner.shutdown()
        seen = observed(folder)
    deployment = emulation_of(seen)
    for role in seen.roles:
        for count in role.batches:
            answer = deployment.dispatch(count.batch(role.role))
            entry = None if count.graph is None else role.graphs[count.graph].entry
            assert (answer.entry, answer.reason) == (entry, count.reason)


def test_model_runner_v1_is_not_observed_and_says_so(caplog):
    """When one is made, once."""

    class GPUModelRunner:
        def __init__(self, config):
            self.config = config

    seams.refuse(SimpleNamespace(GPUModelRunner=GPUModelRunner))
    with process():
        assert [GPUModelRunner(number).config for number in range(2)] == [0, 1]
    assert [record.message for record in caplog.records if "V1" in record.message] == [
        "nothing is observed: this is model runner V1; VLLM_USE_V2_MODEL_RUNNER=1 asks for V2"
    ]


@given(steps=STEPS, mode=st.sampled_from(MODES), data=st.data())
def test_observed_shares_and_acceptance_are_those_of_the_engine(steps, mode, data):
    """Graphs, the share of eager steps and the tokens of a verification, against the engine's own log."""
    verified, tokens = 0, 0
    with process() as folder:
        runner = started(mode=mode)
        for num_reqs, query_len, prompts, k in steps:
            counts = [data.draw(st.integers(1, query_len)) for _ in range(num_reqs)] + [0] * prompts
            run(runner, step(num_reqs, query_len, prompts, k, sampled=counts))
            verified += num_reqs * (query_len > 1)
            tokens += sum(counts) * (query_len > 1)
        runner.shutdown()
        seen = observed(folder)
    assert (seen.drafted[0] if seen.drafted else 0) == verified
    assert verified + sum(seen.accepted) == tokens
    for role in Role:
        answers = [answer[role.value] for _, answer in runner.answers if role.value in answer]
        eager = sum(not desc.cg_mode for desc in answers)
        roles = [each for each in seen.roles if each.role is role]
        assert sum(each.steps for each in roles) == len(answers)
        assert sum(each.eager_steps for each in roles) == eager
        assert sum(count.steps for each in roles for count in each.batches if count.reason is not None) == eager
