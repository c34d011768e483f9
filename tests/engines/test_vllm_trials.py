"""Throw-away captures, by a stand-in: they are timed and priced, and nothing is left of them, whatever happens."""

import importlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner_vllm.inside import device, observe, profile, trials
from support.vllm_observed import MODES, observed, process, run, started, step

BATCHES = [(reqs, tokens, uniform) for reqs in (1, 3, 16) for tokens in (4, 12, 33, 64, 200) for uniform in (None, 4)]


def module(name):
    return sys.modules[f"vllm.{name}"]


def state(runner):
    """All that a capture changes: tables, pools, buffers, counters, and what the dispatchers answer."""
    managers = [runner.cudagraph_manager]
    if runner.speculator is not None:
        managers += [runner.speculator.prefill_cudagraph_manager, runner.speculator.decode_cudagraph_manager]
    wrappers = sorted(module("compilation.cuda_graph").CUDAGraphWrapper._all_instances, key=id)
    graphs = {id(each) for each in module("compilation.cuda_graph").Graph.live}
    kept = {id(each) for manager in managers for each in manager.graphs.values()}
    kept |= {id(each) for wrapper in wrappers for each in wrapper.concrete_cudagraph_entries.values()}
    found = {
        "graphs": [[(desc, graph.num_tokens, graph.pool) for desc, graph in each.graphs.items()] for each in managers],
        "lists": [each._capture_descs for each in managers],
        "answers": [[each.dispatch(*batch, 0) for batch in BATCHES] for each in managers],
        "pools": [each.pool for each in managers] + [wrapper.graph_pool for wrapper in runner.cudagraph_manager.pieces],
        "pieces": [sorted(wrapper.concrete_cudagraph_entries) for wrapper in runner.cudagraph_manager.pieces],
        "buffer": len(runner.cudagraph_manager.hidden_states or ()),
        "captured": module("compilation.counter").compilation_counter.num_cudagraph_captured,
        "workspace": vars(module("v1.worker.workspace")._manager),
        "pool": module("v1.worker.gpu.cudagraph_utils").Platform._global_graph_pool,
        "held by nothing": len(graphs - kept),
    }
    return {name: str(value) for name, value in found.items()}


@given(
    mode=st.sampled_from(MODES),
    fused=st.booleans(),
    k=st.sampled_from((0, 1, 3)),
    broken=st.sets(st.sampled_from((48, 64, 96, 128, 256))),
    workspace=st.sampled_from((0, 32, 64, 256)),
    sizes=st.sampled_from(((8, 16, 32), (4,), (64,))),
)
def test_nothing_is_left_of_a_trial(mode, fused, k, broken, workspace, sizes):
    """Graphs, tables, pools and answers are those of an engine that tried nothing, also where trials fail."""
    found, broken = [], broken - set(sizes)
    for environment in ({}, {observe.PROFILE: "1"}):
        with process(**environment) as folder:
            runner = started(fused, mode=mode, k=k, broken=broken, workspace=workspace, sizes=sizes)
            found.append(state(runner))
            run(runner, step(3, k + 1, sampled=[1] * 3))
            runner.shutdown()
            seen = observed(folder)
    plain, profiled = found
    assert plain == profiled  # in words, as each process has classes of its own
    tried = {graph.entry.num_tokens for graph in seen.roles[0].trials}
    assert not tried & broken
    wanted = not broken and workspace <= max(sizes)
    if mode == "FULL_AND_PIECEWISE" and wanted:
        assert {graph.entry.num_tokens for graph in seen.roles[0].trials if graph.entry.query_len is None} >= {256}
        assert not any("not all were timed" in note for note in seen.notes)
    elif mode == "FULL_AND_PIECEWISE" and 256 in broken | {workspace} and max(sizes) < 256:
        assert any("not all were timed" in note for note in seen.notes)


def test_trials_have_what_each_size_takes_by_itself():
    """By role and kind: times, and memory without the graphs that are there; ends of the range included."""
    with process(**{observe.PROFILE: "1"}) as folder:
        runner = started()
        runner.shutdown()
        seen = observed(folder)
    found = {
        role.role: {
            (each.entry.mode, each.entry.query_len, each.entry.num_tokens, each.entry.num_reqs) for each in role.trials
        }
        for role in seen.roles
    }
    full, pieces = GraphMode.FULL, GraphMode.PIECEWISE
    assert found[Role.TARGET] == {
        *((pieces, None, tokens, None) for tokens in (16, 32, 48, 64, 96, 128, 192, 256)),
        *((full, 4, 4 * reqs, reqs) for reqs in (4, 8, 12, 16)),
    }
    assert found[Role.DRAFT_DECODE] == {(full, 1, reqs, reqs) for reqs in (8, 16)}
    for role in seen.roles:
        for each in role.trials:
            # A MiB a token and graph; a piece is a graph, too.
            pieces_each = 3 if role.role is Role.TARGET and each.entry.mode is pieces else 1
            assert each.mib == pieces_each * each.entry.num_tokens
            assert each.milliseconds is not None


@pytest.mark.parametrize(("seconds", "tried"), [("0", False), ("-1", True)])
def test_no_time_is_no_trial(seconds, tried):
    """And the profile of what is captured is as ever; what is no number of seconds is the default."""
    with process(**{observe.PROFILE: "1", observe.PROFILE_SECONDS: seconds}) as folder:
        started().shutdown()
        seen = observed(folder)
    assert any(role.trials for role in seen.roles) == tried
    assert all(graph.milliseconds is not None for role in seen.roles for graph in role.graphs)


@given(st.integers(0, 1 << 11))
def test_trials_leave_memory(spare):
    """What is free above the reserve bounds what a trial may take, by what the smaller ones took."""
    from support import vllm_observed

    with pytest.MonkeyPatch.context() as patch, process(**{observe.PROFILE: "1"}) as folder:
        graphs = 3 * (8 + 16 + 32) + 32 + 16 + 8 + 2 * 32 + 16 + 8 + 8 + 16 + 16
        patch.setattr(vllm_observed, "MEMORY", trials.RESERVE + (graphs + spare << 20))
        started().shutdown()
        seen = observed(folder)
    for role in seen.roles:
        for each in role.trials:
            assert each.mib <= max(graphs + spare, 0)
    if spare > 3 * 3 * 256 + graphs:
        assert max(each.entry.num_tokens for each in seen.roles[0].trials) == 256


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 16))
def test_sizes_are_multiples_and_have_both_ends(largest, most, each):
    largest, most = -(-largest // each) * each, max(most, each)
    sizes = trials.sizes(largest, most, each)
    assert sizes == sorted(set(sizes))
    assert all(size % each == 0 for size in sizes)
    assert most // each * each in sizes
    assert all(size <= max(most, largest) for size in sizes)


def test_memory_that_profiling_keeps_is_not_that_of_graphs(monkeypatch):
    """VLLM's figure is of the whole capture, and it advises a size of the KV cache by it; profiling is not in it."""
    kept, replays = [], profile.replays

    def keeping(*arguments):
        kept.append(1 << 17)
        return replays(*arguments)

    monkeypatch.setattr(profile, "replays", keeping)
    with process(**{observe.PROFILE: "1"}) as folder:
        free = device.free_memory
        monkeypatch.setattr(device, "free_memory", lambda: free() - sum(kept))
        runner = started(k=0, sizes=(64,))
        runner.shutdown()
        seen = observed(folder)
    assert kept
    assert runner.vllm_config.graph_bytes == (3 << 20) - sum(kept)
    assert seen.graph_mib == pytest.approx(3.0 - sum(kept) / (1 << 20), abs=0.01)


@pytest.mark.parametrize("kind", ["data", "pipeline", "prefill_context"])
def test_workers_that_cannot_agree_try_nothing(monkeypatch, kind):
    """Their forwards have collectives over more ranks than those that can be asked."""
    with process(**{observe.PROFILE: "1"}) as folder:
        runners = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
        original = runners.__init__

        def parallel(runner, config, *arguments):
            setattr(config.parallel_config, f"{kind}_parallel_size", 2)
            original(runner, config, *arguments)

        monkeypatch.setattr(runners, "__init__", parallel)
        started().shutdown()
        roles = observed(folder).roles
    assert not any(role.trials for role in roles)
    assert all(graph.milliseconds is not None for role in roles for graph in role.graphs)


@given(
    st.sampled_from(MODES), st.booleans(), st.sampled_from((0, 1, 3)), st.sampled_from(((8, 32), (4,))), st.booleans()
)
def test_rows_of_a_mixture_count_as_tokens_while_it_is_timed(mode, fused, k, sizes, mixture):
    """All of them, and half of them: a mixture skips padding, and sends equal tokens to the same experts."""
    for environment in ({}, {observe.PROFILE: "1"}):
        with process(**environment) as folder:
            runner = started(fused, mode=mode, k=k, sizes=sizes, experts=(8 * mixture, 0))
            seen, buffers = runner.cudagraph_manager.seen, runner.input_buffers
            runner.shutdown()
            role = observed(folder).roles[0]
        assert bool(seen) is bool(environment)
        for num_tokens, real, ids in seen:
            assert real in ((num_tokens, num_tokens // 2) if mixture else (0,))
            assert ids > min(num_tokens, 50) // 2 if mixture else ids == 1
        assert {graph.half_milliseconds is not None for graph in (*role.graphs, *role.trials)} <= {
            bool(environment) and mixture
        }
        # At the end all is padding, as a capture leaves it.
        assert not bool(buffers.input_ids.any())
        assert bool(buffers.is_padding.all()) or not (seen or role.graphs)


def _timed_rows(monkeypatch, change, experts):
    """The rows that were timed, and the notes on padding, of a runner that is changed before it captures."""
    with process(**{observe.PROFILE: "1"}) as folder:
        runners = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
        original = runners.initialize_kv_cache

        def initialize(runner):
            original(runner)
            change(runner)

        monkeypatch.setattr(runners, "initialize_kv_cache", initialize)
        runner = started(experts=experts)
        seen = runner.cudagraph_manager.seen
        runner.shutdown()
        return seen, [note for note in observed(folder).notes if "padding" in note]


def _with_load(runner):
    runner.vllm_config.parallel_config.enable_eplb = True


def _with_ranks(runner):
    runner.pcp_manager = object()


REASONS = {"the load by which it places experts": _with_load, "prefill context parallelism": _with_ranks}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("experts", [(8, 0), (8, 8)])
def test_rows_that_stay_padding_are_said_to(monkeypatch, reason, experts):
    """Replays take no time of the experts, and the observation says so."""
    seen, (note, *others) = _timed_rows(monkeypatch, REASONS[reason], experts)
    assert note.startswith("graphs of the target were timed on padding, which its experts skip: ")
    assert reason in note
    assert len(others) == bool(experts[1])
    assert seen
    assert all(real == 0 and ids == 1 for _, real, ids in seen)


def _without_vocabulary(runner):
    vars(runner).pop("vocab_size", None)


def _without_experts(runner):
    def get_num_experts():
        raise ValueError("no such number")

    runner.vllm_config.model_config.get_num_experts = get_num_experts


SURPRISES = {
    "AttributeError: 'GPUModelRunner' object has no attribute 'vocab_size'": _without_vocabulary,
    "ValueError: no such number": _without_experts,
}


@pytest.mark.parametrize("says", SURPRISES)
def test_another_release_starts_and_its_rows_stay_padding(monkeypatch, says):
    """Whatever it lacks: graphs are timed as they were captured, and the observation says so."""
    seen, notes = _timed_rows(monkeypatch, SURPRISES[says], (8, 0))
    assert notes == [f"graphs were timed on padding, which the experts of a mixture skip: {says}"]
    assert seen
    assert all(real == 0 for _, real, _ in seen)


@pytest.mark.parametrize("experts", [(8, 8), (0, 8), (0, 0)])
def test_a_drafter_that_is_a_mixture_is_timed_on_padding(monkeypatch, experts):
    seen, notes = _timed_rows(monkeypatch, lambda _: None, experts)
    said = "graphs of the drafter were timed on padding, which its experts skip: only the target's are timed on tokens"
    assert notes == [said] * bool(experts[1])
    assert {real > 0 for _, real, _ in seen} == {bool(experts[0])}
