"""A tuning from beginning to end: the engine's own list ends at half of its requests, and their decodes run eager."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.lint import Severity, lint
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.spec_of import DerivedSpec
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.model import Method, Speculative
from capture_planner.records.observation import BatchCount, EagerCost, Observation
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Policy, Sizes
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner_tuner.tuning.judgement import TuneVerdict
from capture_planner_tuner.tuning.session import (
    PLAIN_MODEL,
    TuneOptions,
    TuneResult,
    TuneSubject,
    accepted_of,
    churn_between,
    costs_of,
    engine_subject,
    grown,
    missing_costs,
    observed_subject,
    tuned,
)
from capture_planner_tuner.tuning.tune import MORE, Tuning, TuningBounds
from support.commands import PLAN, SPEC
from support.observing import observation_of
from support.tuning import MODEL, profile, vllm_log

H200 = find_environment("h200")
EAGLE = '{"method":"eagle3","model":"my/drafter","num_speculative_tokens":3}'
FLAGS = ("--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--speculative-config", EAGLE)
LIST = ("--cudagraph-capture-sizes", *map(str, (1, 2, 4, 8, 16, 32, 64)))
"""Half of the 128 tokens that 32 requests decode with three drafts."""
EAGER, FULL, PIECES = 12.0, 2.0, 4.0
"""Milliseconds that a pass takes apart from its tokens."""


def observed(mode: str | None, *, costs: bool = True, requests: range = range(20, 30)) -> Observation:
    """An engine under requests that keep arriving: most steps decode 20 to 29 of them, some have a prompt."""
    modes = () if mode is None else ("-cc", f'{{"cudagraph_mode":"{mode}"}}')
    today = emulate("vllm", [MODEL.name, *FLAGS, *LIST, *modes], H200)
    seen = replace(observation_of(today), device=H200.device.name, model=MODEL.name, kv_token_bytes=65536.0)
    shapes = [(n, 4 * n, 4, True) for n in requests] + [(n, 4 * n + 100, None, False) for n in requests[::4]]
    target, *others = seen.roles
    batches = []
    for n, tokens, width, past in shapes:
        batch = Batch(role=Role.TARGET, num_reqs=n, num_tokens=tokens, query_len=width, past_prompt=past)
        answer = today.dispatch(batch)
        entries = [graph.entry for graph in target.graphs]
        index = None if answer.entry is None else entries.index(answer.entry)
        own = EAGER if answer.entry is None else FULL + answer.entry.num_tokens / 400
        batches.append(
            BatchCount(
                num_reqs=n,
                num_tokens=tokens,
                query_len=width,
                past_prompt=past,
                steps=200 if past else 40,
                graph=index,
                reason=answer.reason if index is None else None,
                interval=own + 2.0 if costs else None,
                intervals=100 if costs else 0,
            )
        )
    roles = [replace(target, batches=tuple(batches)), *others]
    return replace(seen, roles=tuple(map(_timed, roles)) if costs else tuple(roles), graph_mib=300.0 if costs else None)


def _timed(role):  # type: ignore[no-untyped-def]
    scale = 0.1 if role.role.is_drafter else 1.0
    graphs = tuple(
        attrs.evolve(
            graph,
            milliseconds=scale
            * ((FULL if graph.entry.mode is GraphMode.FULL else PIECES) + graph.entry.num_tokens / 400),
            seconds=0.05,
            mib=4.0,
        )
        for graph in role.graphs
    )
    eager = tuple(EagerCost(num_reqs=1, num_tokens=n, milliseconds=scale * EAGER) for n in (64, 128, 256))
    return replace(role, graphs=graphs, eager=eager)


def tuning_of(observation: Observation, folder: Path, **options: object) -> TuneResult:
    """Tune what a file has."""
    file = folder / "seen.yaml"
    codec.write(file, codec.dumps(observation))
    return tuned(observed_subject(codec.Document.read(str(file)).load(Observation), str(file)), TuneOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [None, "FULL_DECODE_ONLY"])
def test_the_headline_case_is_fixed_by_the_costs_of_its_own_observation(mode: str | None, tmp_path: Path) -> None:
    """Decodes above the engine's list get full graphs up to the most requests, check agrees, and it is a promise."""
    found = tuning_of(observed(mode), tmp_path)
    tuning = found.tuning
    assert (tuning.verdict, tuning.is_estimate) == (TuneVerdict.CHANGE, False), tuning.reason
    assert found.first is None
    assert "the costs in" in found.costs.name
    assert found.plan is not None
    after = emulation_of(found.plan)
    for n in range(1, 33):
        assert after.dispatch(Batch.decode(Role.TARGET, n, 4)).mode is GraphMode.FULL
    assert not [each for each in lint(found.plan) if each.severity is not Severity.NOTE]
    assert tuning.today is not None
    assert tuning.proposed is not None
    assert tuning.proposed.mean_step_ms < tuning.today.mean_step_ms
    if tuning.proposed.graphs > tuning.today.graphs:  # only where that buys something
        fewer = [each.side.objective for each in tuning.pareto if each.side.graphs <= tuning.today.graphs]
        assert tuning.proposed.objective < min(fewer) * (1 - MORE / 4)
    assert found.plan.promise is not None
    assert found.plan.promise.after.mean_step_ms == pytest.approx(tuning.proposed.mean_step_ms, rel=1e-4)
    assert set(found.texts()) == {"plan.yaml", "spec.yaml", "profile.yaml", "traffic.yaml"}
    assert found.kv_token_mib == 1 / 16


def test_an_observation_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As standard input it is at its end, and a file may be another by now; nothing global is replaced."""
    seen, stream = observed(None), io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdin", stream)
    ways = [tuned(observed_subject(seen, name)) for name in ("-", str(tmp_path / "gone.yaml"))]
    assert sys.stdin is stream
    assert [found.load.traffic.sources for found in ways] == [
        (f"{name}: observation",) for name in ("<stdin>", tmp_path / "gone.yaml")
    ]
    assert all(found.load.judged == tuning_of(seen, tmp_path).load.judged for found in ways)
    assert not ways[0].load.held_out


@pytest.mark.parametrize("reported", [{"graph_mib": 333.0, "capture_seconds": 7.5}, {"graph_mib": 333.0}, {}])
def test_todays_memory_and_start_up_are_what_the_engine_reported(reported: dict[str, float], tmp_path: Path) -> None:
    """What it did not report is predicted; so is all where another device is tuned for."""
    seen = replace(observed(None), graph_mib=None, capture_seconds=None)
    plain = tuning_of(seen, tmp_path).tuning.today
    today = tuning_of(replace(seen, **reported), tmp_path).tuning.today
    assert plain is not None
    assert today is not None
    assert today.memory_mib == reported.get("graph_mib", plain.memory_mib)
    assert today.seconds == reported.get("capture_seconds", plain.seconds)
    other = observed_subject(replace(seen, **reported), str(tmp_path / "seen.yaml"), find_environment("h100"))
    elsewhere = tuned(other, TuneOptions(profile=profile(tuple(Role)), profile_name="mine")).tuning.today
    assert elsewhere is not None
    assert elsewhere.memory_mib != 333.0
    assert elsewhere.seconds != 7.5


@pytest.mark.thorough
def test_without_costs_it_is_an_estimate_that_takes_no_graph_away(tmp_path: Path) -> None:
    """Said first, with what to do for a promise; every batch that has a graph today keeps one."""
    found = tuning_of(observed(None, costs=False), tmp_path)
    assert found.tuning.is_estimate
    assert found.first is not None
    assert "CAPTURE_PLANNER_PROFILE=1" in found.first
    assert "shipped profile" in found.assumptions[0]
    if found.plan is not None:
        assert found.plan.promise is None
        after = emulation_of(found.plan)
        today = found.subject.today
        for tokens in range(1, 257):
            batch = Batch.mixed(Role.TARGET, min(tokens, 32), tokens)
            had = today.dispatch(batch)
            assert had.reason is Reason.UNKNOWN or had.entry is None or after.dispatch(batch).entry is not None


@pytest.mark.parametrize("role", [Role.TARGET, Role.DRAFT_PREFILL])
def test_costs_without_eager_times_are_an_estimate(role: Role) -> None:
    """As of an engine that was not profiled, under a plan with graphs for all batches: no table could be priced."""
    seen = observed(None)
    roles = [
        replace(each, eager=(), batches=tuple(batch for batch in each.batches if batch.graph is not None))
        if each.role is role
        else each
        for each in seen.roles
    ]
    assert not costs_of(observed_subject(seen, "seen.yaml")).is_estimate
    subject = observed_subject(replace(seen, roles=tuple(roles)), "seen.yaml")
    assert costs_of(subject).is_estimate
    assert "seen.yaml lacks times of graphs, or of steps without one" in missing_costs(subject)
    # On another device it is not the observation that lacks anything.
    assert ": seen.yaml is of another device;" in missing_costs(
        observed_subject(seen, "seen.yaml", find_environment("h100"))
    )


def test_an_engine_is_observed_into_a_folder(tmp_path: Path) -> None:
    """Launch takes neither a file nor standard input for one; a folder that lacks costs is observed into again."""
    seen = replace(observed(None), capture_seconds=None)
    seen = replace(seen, roles=tuple(replace(each, eager=(), batches=()) for each in seen.roles))
    file = tmp_path / "vllm.rank0.1.yaml"
    file.touch()
    for name, says in (("-", "<stdin> lacks"), (str(file), f"{file} lacks")):
        text = missing_costs(observed_subject(seen, name))
        assert says in text
        assert text.endswith("(`capture-planner launch --observe FOLDER --profile -- ...`) and tune FOLDER")
    again = missing_costs(observed_subject(seen, str(tmp_path)))
    assert again.endswith(f"(`capture-planner launch --observe {tmp_path} --profile -- ...`)")


@pytest.mark.parametrize("role", Role)
def test_costs_without_what_capturing_takes_are_an_estimate(role: Role, tmp_path: Path) -> None:
    """Of an observer that saw no capture: memory and start-up of no table could be told."""
    seen = observed(None)
    roles = [
        replace(each, graphs=tuple(attrs.evolve(graph, seconds=None, mib=None) for graph in each.graphs))
        if each.role is role
        else each
        for each in seen.roles
    ]
    found = tuning_of(replace(seen, roles=tuple(roles), graph_mib=None), tmp_path)
    assert found.tuning.is_estimate
    assert found.first is not None
    assert "lacks times of graphs, or of steps without one, or what capturing took" in found.first


@pytest.mark.parametrize(("active", "said"), [((0, 0), True), ((2, 1), False), ((0, 1), False)])
def test_adapters_are_assumed_only_where_no_step_has_any(active: tuple[int, int], said: bool, tmp_path: Path) -> None:
    """Traffic of an observation counts them; a log does not."""
    batches = tuple(
        TrafficCount(
            role=Role.TARGET, num_reqs=n, num_tokens=n, query_len=1, past_prompt=True, active_loras=loras, count=1000
        )
        for n, loras in zip((4, 6), active, strict=True)
    )
    codec.write(tmp_path / "load.yaml", codec.dumps(Traffic(sources=("x",), batches=batches)))
    subject = engine_subject("vllm", [MODEL.name, "--max-num-seqs", "8", "--enable-lora", "--max-loras", "2"], H200)
    found = tuned(subject, TuneOptions(sources=(str(tmp_path / "load.yaml"),), profile=profile()))
    assert any("what adapters are active" in each for each in found.assumptions) is said


def test_a_model_is_never_described_by_the_profile() -> None:
    """Of a model that is not known here, dimensions are the plain ones, whatever profile is nearest."""
    subject = engine_subject("vllm", ["some/unknown-model", "--max-num-seqs", "8"], H200)
    assert subject.derived.spec.model.num_layers == PLAIN_MODEL.num_layers
    near = costs_of(subject)
    assert near.is_estimate
    assert near.profile.model.num_layers != PLAIN_MODEL.num_layers


def test_a_model_of_another_size_widens_the_error() -> None:
    """A 70B by the times of an 8B: nothing as small as a few percent can be said."""
    small, large = (
        costs_of(engine_subject("vllm", [name, "--max-num-seqs", "8"], H200))
        for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B-Instruct")
    )
    assert small.foreign == 0
    assert large.foreign > 0.07


@pytest.mark.parametrize("given", [None, profile()])
def test_other_ranks_widen_the_error(given: Profile | None) -> None:
    """The further their number is from the profile's, whether it was given or ships; and that is said."""
    words = [MODEL.name, "--max-num-seqs", "8", "-tp"]
    one, two, four = (costs_of(engine_subject("vllm", [*words, n], H200), given, "mine") for n in "124")
    assert 0 == one.foreign < two.foreign < four.foreign
    assert four.is_estimate
    assert "with 1 tensor-parallel rank, and this has 4" in str(four.assumption)
    assert "tensor-parallel" not in str(one.assumption)


def test_a_profile_wins_over_what_was_observed_and_is_named_as_the_reason() -> None:
    """An observation with costs of its own lacks nothing."""
    subject, other = observed_subject(observed(None), "seen.yaml"), profile(tuple(Role))
    near = costs_of(subject, replace(other, model=replace(MODEL, name="my/model")), "mine")
    assert near.is_estimate
    assert "by the costs of another deployment" in missing_costs(subject, near.profile)


def test_an_engine_without_a_plugin_is_not_launched_for_its_costs() -> None:
    """Launch refuses it, by its flags and as it was observed; a profile that was measured apart makes a promise."""
    subject = engine_subject("tensorrt-llm", [MODEL.name, "--max_batch_size", "16"], H200)
    seen = replace(observation_of(subject.today), device=H200.device.name, model=MODEL.name)
    for each in (subject, observed_subject(seen, "seen.yaml")):
        says = missing_costs(each)
        assert "launch" not in says
        assert "CAPTURE_PLANNER_PROFILE" not in says
        assert f"measure {MODEL.name} on NVIDIA H200 with `capture-planner profile SPEC -o FILE`" in says
        assert not costs_of(each, profile(), "FILE").is_estimate
    assert "capture-planner launch" in missing_costs(engine_subject("sglang", ["--model-path", MODEL.name], H200))


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tuning]:
    """Return what a tuning of decodes of up to 63 requests finds within bounds."""
    log = tmp_path_factory.mktemp("load") / "vllm.log"
    log.write_text(vllm_log(6000, range(1, 64)), "utf-8")
    subject = engine_subject("vllm", [MODEL.name, "--max-num-seqs", "64"], H200)

    def found(**bounds: float) -> Tuning:
        return tuned(subject, TuneOptions(sources=(str(log),), profile=profile(), profile_name="mine", **bounds)).tuning  # type: ignore[arg-type]

    return found


@pytest.mark.parametrize("bound", [{"memory": 40 << 20}, {"seconds": 0.61}])
def test_what_more_buys_is_found_whatever_the_bound(bound: dict[str, float], bounded: Callable[..., Tuning]) -> None:
    """Memory or time for two graphs: the same table as of two graphs, and the same gain beyond."""
    by_graphs, found = bounded(graphs=2), bounded(**bound)
    assert found.proposed == by_graphs.proposed
    assert found.beyond is not None
    assert found.beyond == attrs.evolve(by_graphs.beyond, bounds=found.beyond.bounds)
    (given,) = bound
    name = {"memory": "memory_mib", "seconds": "seconds"}[given]
    assert found.beyond.bounds == TuningBounds(**{name: getattr(found.proposed, name) + getattr(found.beyond, name)})


def test_options_of_measured_sizes_are_kept(tmp_path: Path) -> None:
    """A spec that someone wrote bounds the slowdown of any step: the tuned one does."""
    spec = codec.load_spec(SPEC)
    sizes = Sizes(policy=Policy.MEASURED, traffic="t", profile="p", objective="p99", max_slowdown=0.05, max_reqs=8)
    today = emulation_of(codec.load_plan(PLAN))
    derived = DerivedSpec(spec=replace(spec, sizes=sizes))
    subject = TuneSubject(name="spec.yaml", today=today, environment=H200, derived=derived)
    log = tmp_path / "vllm.log"
    log.write_text(vllm_log(100, (1, 2)), "utf-8")
    own = tuned(subject, TuneOptions(sources=(str(log),))).spec.sizes
    assert own == replace(sizes, traffic="traffic.yaml", profile="profile.yaml")


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=6),
    st.integers(1, 6),
    st.lists(st.floats(0, 1), max_size=6).map(lambda shares: tuple(sorted(shares, reverse=True))),
)
def test_accepted_drafts_are_those_that_the_deployment_makes(
    counts: list[tuple[int, int]], most: int, shares: tuple[float, ...]
) -> None:
    """By request and step: positions beyond its own count nothing."""
    drafted = tuple(sorted((each for each, _ in counts), reverse=True))
    accepted = tuple(min(made, each) for made, (_, each) in zip(drafted, counts, strict=True))
    batch = TrafficCount(role=Role.TARGET, num_reqs=1, num_tokens=1, count=1)
    load = Traffic(sources=("x",), batches=(batch,), drafted=drafted, accepted=accepted)
    drafter = Speculative(method=Method.EAGLE3, num_tokens=most, acceptance=shares[:most])
    assert accepted_of(load, None) is None
    found = accepted_of(load, drafter)
    if drafted and drafted[0]:
        assert found == pytest.approx(sum(accepted[:most]) / drafted[0])
        assert 0 <= found <= most
    else:
        assert found == (sum(shares[:most]) if shares else None)


def test_drafts_of_other_traffic_give_no_tokens_without_a_drafter(tmp_path: Path) -> None:
    """A request waits the whole step for its token."""
    batch = TrafficCount(role=Role.TARGET, num_reqs=4, num_tokens=4, query_len=1, past_prompt=True, count=4000)
    load = Traffic(sources=("x",), drafted=(4000, 4000), accepted=(3200, 2400), batches=(batch,))
    codec.write(tmp_path / "load.yaml", codec.dumps(load))
    subject = engine_subject("vllm", [MODEL.name, "--max-num-seqs", "16"], H200)
    today = tuned(subject, TuneOptions(sources=(str(tmp_path / "load.yaml"),), profile=profile())).tuning.today
    assert today is not None
    assert today.token_ms == today.gap_ms


def test_little_more_traffic_changes_little() -> None:
    """Counts grow by about a twentieth; a plan has all of its own graphs."""
    batches = tuple(
        TrafficCount(role=Role.TARGET, num_reqs=n, num_tokens=n, query_len=1, count=1000) for n in (1, 2, 5)
    )
    load = Traffic(sources=("drawn",), batches=batches)
    more = grown(load)
    assert [each.shape for each in more.batches] == [each.shape for each in load.batches]
    assert more.steps == pytest.approx(1.05 * load.steps, rel=0.02)
    plan = codec.load_plan(PLAN)
    assert churn_between(plan, plan).kept == plan.num_graphs
    assert churn_between(plan, plan).new == 0
