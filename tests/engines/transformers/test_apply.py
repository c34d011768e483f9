"""transformers' own continuous batching under a plan, on a CPU: real classes, closures in the place of CUDA graphs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation.continuous_batching import model_runner  # noqa: E402

from capture_planner import codec  # noqa: E402
from capture_planner.errors import CaptureError, RunError  # noqa: E402
from capture_planner.modes import GraphMode, Role  # noqa: E402
from capture_planner.records._base import digest, replace  # noqa: E402
from capture_planner.records.model import Method, Speculative  # noqa: E402
from capture_planner.records.observation import Observation  # noqa: E402
from capture_planner.records.plan import Plan  # noqa: E402
from capture_planner.records.spec import Budget, Lora, Parallel  # noqa: E402
from capture_planner_transformers import apply  # noqa: E402
from capture_planner_transformers.runner import PlannedBuffer  # noqa: E402
from support.continuous_batching import generated, graphs_of_closures, manager_of, planned, tiny_model  # noqa: E402

READS = (0, 32, 64, 128, 256, 512)
LENGTHS = (3, 30, 1, 17, 9, 22)


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    """The tokens of transformers by itself."""
    return generated(tiny_model(), LENGTHS)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    return graphs_of_closures(monkeypatch)


def served(manager: Any) -> dict[tuple[Any, Any], int]:
    """Return how many steps each graph or reason had."""
    return dict(manager.batch_processor.model_runner.ledger.steps)


def run(manager: Any, lengths: tuple[int, ...] = LENGTHS, tokens: int = 6) -> list[list[int]]:
    """Serve the prompts of ``generated``; the manager stays, with its counts."""
    torch.manual_seed(1)
    prompts = [torch.randint(0, 128, (length,)).tolist() for length in lengths]
    manager.warmup()
    manager.start()
    done: dict[str, list[int]] = {}
    names = manager.add_requests(prompts, max_new_tokens=tokens)
    while len(done) < len(prompts):
        result = manager.get_result(timeout=5)
        assert result is not None
        assert result.error is None
        done[result.request_id] = result.generated_tokens
    manager.stop(keep_for_next_session=True)
    vars(manager.model).pop("_cached_continuous_batching_manager")
    return [done[name] for name in names]


@settings(max_examples=min(settings.default.max_examples // 3, 8), suppress_health_check=[*HealthCheck])
@given(
    mode=st.sampled_from([GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE]),
    sizes=st.sets(st.integers(1, 64), min_size=1, max_size=4).map(lambda sizes: (*sorted({8, *sizes}),)),
    reads=st.sets(st.integers(0, 512), max_size=4).map(lambda sizes: (*sizes, 512)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12).map(tuple),
)
def test_tokens_under_a_plan_equal_stock_and_nothing_is_captured_while_serving(
    mode: GraphMode, sizes: tuple[int, ...], reads: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    """Any plan, any prompts: every padded size is an entry of the plan, and each graph was captured at warm-up."""
    expected = generated(tiny_model(), lengths)
    plan = planned(mode, sizes)
    with pytest.MonkeyPatch.context() as patch:
        captures = graphs_of_closures(patch)
        manager = manager_of(tiny_model())
        apply(manager, plan, kv_sizes=reads)
        manager.warmup()
        at_warmup = list(captures)
        assert run(manager, lengths) == expected
        assert captures == at_warmup
        entries = {entry.num_tokens for entry in plan.role(Role.TARGET).entries if entry.mode is GraphMode.FULL}
        assert {tokens for tokens, _ in captures} == entries
        assert len(set(captures)) == len(captures)
        for key, reason in served(manager):
            assert (key is None) is (reason is not None)
            assert key is None or key in captures


def test_generate_batch_runs_the_plan_of_its_model(captures: list[tuple[int, int]], stock: list[list[int]]) -> None:
    """Every manager of the model gets it, until it is removed."""
    model = tiny_model()
    application = apply(model, planned(), kv_sizes=READS)
    try:
        assert generated(model, LENGTHS) == stock
        assert captures
        with pytest.raises(RunError, match="this model runs another plan"):
            apply(model, planned())
    finally:
        application.remove()
    captures.clear()
    assert generated(model, LENGTHS) == stock
    assert captures == []


def test_a_device_without_graphs_runs_eager_with_the_reason(
    stock: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """On a real CPU: nothing is captured or padded, and the log says why."""
    manager = manager_of(tiny_model())
    with caplog.at_level(logging.INFO, "capture_planner.transformers"):
        apply(manager, planned())
    assert "the device is cpu, which has no CUDA graphs" in caplog.text
    assert run(manager) == stock
    assert {key for key, _ in served(manager)} == {None}


def test_settings_follow_the_plan_and_each_change_is_logged(
    captures: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(tiny_model(), max_batch_tokens=None, max_requests_per_batch=3)
    with caplog.at_level(logging.INFO, "capture_planner.transformers"):
        apply(manager, planned())
    config = manager.continuous_batching_config
    assert (config.max_requests_per_batch, config.max_batch_tokens, config.use_cuda_graph) == (8, 64, (True, True))
    assert "the plan of tiny: max_requests_per_batch: 3 -> 8" in caplog.text
    assert "the plan of tiny: max_batch_tokens: None -> 64" in caplog.text


def test_a_plan_is_applied_once(captures: list[tuple[int, int]]) -> None:
    """Again is the same; another plan is refused."""
    manager = manager_of(tiny_model())
    apply(manager, planned())
    creation = manager._create_batch_processor
    apply(manager, planned())
    assert manager._create_batch_processor is creation
    with pytest.raises(RunError, match="this manager runs the plan of tiny already"):
        apply(manager, planned(sizes=(1, 8)))


def test_a_manager_that_warmed_up_by_itself_is_refused() -> None:
    manager = manager_of(tiny_model())
    manager.warmup()
    with pytest.raises(RunError, match="has warmed up or started without it"):
        apply(manager, planned())


REFUSED = {
    "speculative decoding": {"speculative": Speculative(method=Method.EAGLE, num_tokens=2)},
    "LoRA adapters": {"lora": Lora(max_active=2)},
    "decode-context parallelism": {"parallel": Parallel(decode_context=2)},
    "2 tensor-parallel ranks": {"parallel": Parallel(tensor=2)},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_transformers_does_not_have_is_refused_with_the_plans_name(tmp_path: Path, says: str) -> None:
    plan: Plan = replace(planned(), **REFUSED[says])
    with pytest.raises(RunError, match=rf"^the plan of tiny .*{says}"):
        apply(manager_of(tiny_model()), plan)


def test_compiled_forward_passes_are_refused(captures: list[tuple[int, int]]) -> None:
    manager = manager_of(tiny_model(), default_compile_level=1)
    with pytest.raises(RunError, match="set default_compile_level=0"):
        apply(manager, planned())


def test_an_unknown_version_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has what differs; the model is left alone."""

    def maybe_pad_inputs(self: object, batch: object) -> None:
        """As another version might have it."""

    monkeypatch.setattr(model_runner.ModelRunner, "maybe_pad_inputs", maybe_pad_inputs)
    monkeypatch.delattr(model_runner.ModelRunner, "run_one_warmup")
    with pytest.raises(RunError) as caught:
        apply(tiny_model(), planned())
    assert "ModelRunner.maybe_pad_inputs takes (self batch), expected (self num_q_tokens" in str(caught.value)
    assert "ModelRunner.run_one_warmup is missing" in str(caught.value)
    assert "init_continuous_batching" not in vars(tiny_model())


def test_strict_raises_what_is_only_logged(captures: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """By argument and by variable."""
    plan = planned(GraphMode.FULL_AND_PIECEWISE)
    with pytest.raises(RunError, match="PIECEWISE graphs are left out"):
        apply(manager_of(tiny_model()), plan, strict=True)
    monkeypatch.setenv("CAPTURE_PLANNER_STRICT", "1")
    with pytest.raises(RunError, match="PIECEWISE graphs are left out"):
        apply(manager_of(tiny_model()), plan)
    other = replace(planned(), model=replace(planned().model, num_layers=3))
    with pytest.raises(RunError, match="num_hidden_layers is 2, and the plan's num_layers 3"):
        apply(manager_of(tiny_model()), other)


def test_the_plan_may_be_a_file_or_named_by_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.yaml"
    codec.write(file, codec.dumps(planned()))
    assert apply(manager_of(tiny_model()), file).plan == planned()
    monkeypatch.setenv("CAPTURE_PLANNER_PLAN", str(file))
    application = apply(manager_of(tiny_model()))
    assert (application.plan, application.name) == (planned(), str(file))
    monkeypatch.delenv("CAPTURE_PLANNER_PLAN")
    with pytest.raises(RunError, match="CAPTURE_PLANNER_PLAN"):
        apply(manager_of(tiny_model()))


def test_a_graph_that_cannot_be_captured_runs_eager_for_memory(
    captures: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    stock: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other graphs serve, tokens stay equal, and strict makes it an error."""
    works = model_runner.ModelRunner._capture_graph

    def capture(self: Any, forward_fn: Any, compute_stream: object, *args: Any) -> None:
        if self.inputs_and_outputs.num_q_tokens == 8:
            raise MemoryError("no room")
        works(self, forward_fn, compute_stream, *args)

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    manager = manager_of(tiny_model())
    apply(manager, planned(), kv_sizes=(512,))
    assert run(manager) == stock
    assert "graphs were not captured" in caplog.text
    assert (None, "memory") in served(manager)
    strict = manager_of(tiny_model())
    apply(strict, planned(), kv_sizes=(512,), strict=True)
    with pytest.raises(RunError, match="graphs were not captured"):
        strict.warmup()


def test_a_closed_pool_captures_nothing() -> None:
    """The last barrier: a capture while serving is an error, not a stall."""
    pool = PlannedBuffer()
    pool.set_graph((8, 64, 1024), object())
    assert pool.get_graph((8, 64, 2048)) is pool.get_graph((8, 64))
    pool.closed = True
    with pytest.raises(CaptureError, match="while serving"):
        pool.set_graph((8, 128, 1024), object())
    pool._storage.clear()


def test_a_budget_shortens_the_ladder_of_cache_reads(
    captures: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(tiny_model())
    apply(manager, planned(budget=Budget(max_graphs=8)), kv_sizes=READS)
    with caplog.at_level(logging.INFO, "capture_planner.transformers"):
        manager.warmup()
    assert len(captures) <= 8
    assert "the plan's budget" in caplog.text


def test_an_observation_has_the_graphs_and_every_step(
    captures: list[tuple[int, int]], tmp_path: Path, stock: list[list[int]]
) -> None:
    """The counts of the file are those of the runner, and each graph is an entry of the plan."""
    plan = planned(sizes=(4, 8, 16))
    manager = manager_of(tiny_model())
    application = apply(manager, plan, kv_sizes=(512,), observe=tmp_path)
    assert run(manager) == stock
    assert application.recorder is not None
    application.recorder.close()
    (file,) = tmp_path.iterdir()
    observation = codec.loads(file.read_text("utf-8"), Observation)
    (role,) = observation.roles
    assert (observation.engine, observation.plan) == ("transformers", digest(plan))
    assert tuple(graph.entry for graph in role.graphs) == plan.role(Role.TARGET).entries
    counts = served(manager)
    for index, graph in enumerate(role.graphs):
        assert sum(count.steps for count in role.batches if count.graph == index) == sum(
            steps for (key, _), steps in counts.items() if key is not None and key[0] == graph.entry.num_tokens
        )
    assert sum(count.steps for count in role.batches if count.reason == "sizes") == counts[None, "sizes"]
