"""TensorRT-LLM: flags and files that it takes or refuses, and its rules against a plain restatement of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.engines.core import Engine, Manager
from capture_planner.engines.tensorrt_llm import ENGINE, DecodeGraphs, agreed, rules
from capture_planner.engines.tensorrt_llm.settings import ALGORITHMS, Drafting
from capture_planner.entry import Batch
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, Reason, Role

MACHINE = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))
EIGHTS = (1, 2, 4, *range(8, 129, 8))
KINDS = tuple(ALGORITHMS)


@pytest.fixture
def emulate(tmp_path):
    """Emulate flags, with a file of these contents where there are any."""

    def emulated(*flags, text=None, **config):
        if config or text is not None:
            file = tmp_path / "config.yaml"
            file.write_text(json.dumps(config) if text is None else text, "utf-8")
            flags = (*flags, "--config", str(file))
        return ENGINE.emulate(flags, MACHINE)

    return emulated


@pytest.fixture
def refused(emulate):
    """Return the only problem of flags that are refused."""

    def problem(*flags, **config):
        with pytest.raises(FlagError) as error:
            emulate(*flags, **config)
        (found,) = error.value.problems
        return found

    return problem


def decode(num_reqs, query_len=1, **changes):
    """A decode batch."""
    shape = {"num_reqs": num_reqs, "num_tokens": num_reqs * query_len, "query_len": query_len}
    return Batch(**{"role": Role.TARGET} | shape | changes)


def graphs_of(sizes, *, padding=True, most=10_000, drafting=None, schedule=None):
    """Graphs of these sizes, in the engine's order."""
    lens = (0,) if drafting is None else drafting.draft_lens
    longest = 0 if drafting is None else drafting.max_draft_len
    return DecodeGraphs(
        sizes=tuple(sizes),
        shapes=rules.captured_shapes(sizes, lens, schedule, longest),
        padding=padding,
        max_batch_size=most,
        drafting=drafting,
        schedule=schedule,
    )


def test_it_is_an_engine():
    """The contract that every engine meets."""
    assert isinstance(ENGINE, Engine)
    manager: Manager = graphs_of((1, 2))
    assert manager.role is Role.TARGET
    assert manager.mode is GraphMode.FULL_DECODE_ONLY


def test_defaults(emulate):
    """All up to 32, then 64 and 128; nothing is padded, so 33 runs eager."""
    emulation = emulate()
    assert emulation.sizes == (*range(1, 33), 64, 128)
    assert emulation.modes == {Role.TARGET: GraphMode.FULL_DECODE_ONLY}
    assert (emulation.limits.max_num_reqs, emulation.limits.max_num_tokens) == (2048, 8192)
    assert [graph.entry.num_reqs for graph in emulation.graphs] == sorted(emulation.sizes, reverse=True)
    assert emulation.dispatch(decode(33)).reason is Reason.UNCOVERED
    assert emulation.dispatch(decode(129)).reason is Reason.SIZES
    assert emulation.dispatch(decode(64)).padded_reqs == 0
    assert emulation.dispatch(decode(8, 4, past_prompt=False)).reason is Reason.MODE
    assert emulation.dispatch(Batch(role=Role.TARGET, num_reqs=4, num_tokens=9)).reason is Reason.MODE
    assert emulation.dispatch(decode(0)).reason is Reason.NOT_ADMISSIBLE


def test_padding_pads_to_the_next_eight(emulate):
    """A dummy request for each place."""
    emulation = emulate(cuda_graph_config={"enable_padding": True})
    assert emulation.sizes == EIGHTS
    answer = emulation.dispatch(decode(33))
    assert (answer.entry.num_reqs, answer.padded_reqs, answer.padded_tokens) == (40, 7, 7)


def test_a_batch_is_not_padded_beyond_the_engine(emulate):
    """More dummies than max_batch_size has places for are not added, where a list was cut without padding."""
    graphs = graphs_of((4, 8), most=6)
    assert graphs.dispatch(decode(5)).reason is Reason.UNCOVERED
    assert graphs.dispatch(decode(3)).entry.num_reqs == 4
    assert emulate("--max_batch_size", "6", cuda_graph_config={"batch_sizes": [4, 8]}).sizes == (4,)


def test_null_turns_graphs_off(emulate):
    """And every batch is eager for its mode."""
    emulation = emulate(cuda_graph_config=None)
    assert (emulation.sizes, emulation.graphs) == ((), ())
    assert emulation.modes == {Role.TARGET: GraphMode.NONE}
    assert emulation.dispatch(decode(1)).reason is Reason.MODE


def test_a_flag_holds_over_the_file(emulate):
    """And it is noted."""
    emulation = emulate("--max_batch_size", "16", max_batch_size=32, max_num_tokens=64)
    assert (emulation.limits.max_num_reqs, emulation.limits.max_num_tokens) == (16, 64)
    assert emulation.decisions[0].rule == "flag-over-file"
    sources = {setting.name: setting.source for setting in emulation.settings}
    assert (sources["max_batch_size"], sources["max_num_tokens"]) == ("flag", "file")
    assert sources["max_seq_len"] == "default"


def test_a_model_may_stand_in_the_command(emulate):
    """And flags that decide nothing about graphs."""
    command = ["some/model", "--tp_size=2", "--trust_remote_code", "--host", "::1"]
    assert emulate(*command).parallel.tensor == 2


def test_attention_dp_has_a_rank_for_each_batch(emulate):
    """Its ranks are data-parallel to attention."""
    emulation = emulate("--tp_size", "4", enable_attention_dp="yes")
    assert (emulation.parallel.data, emulation.parallel.tensor) == (4, 1)
    assert emulation.decisions[-1].rule == "ranks-agree"


def test_yaml_as_the_engine_reads_it(emulate):
    """1.1, as PyYAML has it: yes is true, and keys may be numbers."""
    text = """
    cuda_graph_config: {enable_padding: yes, max_batch_size: 8}
    speculative_config:
      decoding_type: MTP
      max_draft_len: 3
      draft_len_schedule: {2: 3, 4: 1}
    """
    emulation = emulate(text=text)
    assert emulation.sizes == (1, 2, 4, 8)
    shapes = [(graph.entry.num_reqs, graph.entry.query_len) for graph in emulation.graphs]
    assert shapes == [(8, 4), (8, 1), (4, 2), (2, 4), (1, 4)]
    assert emulation.speculative.schedule == ((1, 2, 3), (3, 4, 1), (5, 2048, 0))
    assert emulation.dispatch(decode(3, 2)).entry.num_reqs == 4
    assert emulate(text="").sizes == emulate().sizes


def test_a_schedule_pads_and_captures_its_thresholds(emulate):
    """Whatever enable_padding says; thresholds above the largest size are left out."""
    config = {
        "decoding_type": "Eagle3",
        "speculative_model": "d",
        "max_draft_len": 2,
        "draft_len_schedule": {7: 2, 100: 1},
    }
    emulation = emulate(cuda_graph_config={"batch_sizes": [4, 16]}, speculative_config=config)
    assert emulation.sizes == (4, 7, 16)
    assert [decision.rule for decision in emulation.decisions] == [
        "one-engine",
        "schedule-pads",
        "schedule-sizes",
        "schedule-graphs",
        "decode-only",
        "sampling-variants",
    ]


def test_ngram_above_its_concurrency_has_graphs_without_drafts(emulate):
    """Each size twice; a schedule changes nothing but padding and sizes."""
    ngram = {"decoding_type": "NGram", "max_draft_len": 2}
    emulation = emulate(
        cuda_graph_config={"batch_sizes": [8]}, speculative_config=ngram | {"max_concurrency": 4}
    )
    assert [(graph.entry.num_reqs, graph.entry.query_len) for graph in emulation.graphs] == [(8, 3), (8, 1)]
    assert emulation.speculative.schedule == ((1, 4, 2), (5, 2048, 0))
    emulation = emulate(speculative_config=ngram | {"draft_len_schedule": {4: 2, 8: 1}})
    assert {graph.entry.query_len for graph in emulation.graphs} == {3}
    assert emulation.decisions[0].rule == "schedule-without-effect"


@pytest.mark.parametrize(
    ("sizes", "most", "schedule", "source"),
    [
        ([4, 8], 64, None, "file"),
        ([8, 4], 64, None, "sizes-sorted"),
        ([4, 8], 6, None, "sizes-admitted"),
        ([8, 4], 6, None, "sizes-admitted"),
        ([4, 8], 64, {5: 2}, "schedule-sizes"),
        ([4, 8], 64, {4: 2}, "file"),
        ([4, 8], 3, {5: 2}, "sizes-admitted"),
        (None, 64, None, "sizes-admitted"),
        (None, 4096, None, "generated-sizes"),
    ],
)
def test_where_sizes_come_from(emulate, sizes, most, schedule, source):
    """The file, or the last rule that changed them."""
    config = {} if sizes is None else {"cuda_graph_config": {"batch_sizes": sizes}}
    if schedule is not None:
        config["speculative_config"] = MTP | {"draft_len_schedule": schedule}
    emulation = emulate("--max_batch_size", str(most), **config)
    (found,) = (s for s in emulation.settings if s.name == "cuda_graph_config.batch_sizes")
    assert found.value == list(emulation.sizes)
    assert found.source == source
    assert source == "file" or source in {decision.rule for decision in emulation.decisions}


@pytest.mark.parametrize(
    ("flags", "path", "says"),
    [
        (["--cuda_graph"], ("--cuda_graph",), "knows no such flag"),
        (["--max_batch_size", "many"], ("--max_batch_size",), "not a whole number"),
        (["--max_batch_size"], ("--max_batch_size",), "needs a value"),
        (["--max_batch_size=0"], ("--max_batch_size",), "nothing can be scheduled"),
        (["--trust_remote_code=1"], ("--trust_remote_code",), "takes no value"),
        (["one", "two"], ("two",), "one model"),
        (["--tp_size", "4", "--ep_size", "3"], ("--ep_size",), "do not divide"),
        (["--max_beam_width", "2"], ("--max_beam_width",), "several beams"),
        (["--cp_size", "2"], ("--cp_size",), "context parallelism"),
        (["--backend", "tensorrt"], ("--backend",), "not emulated"),
        (["--config", "/nowhere/file.yaml"], ("--config",), "cannot be read"),
    ],
)
def test_wrong_flags(refused, flags, path, says):
    """Each names the flag as it was written, the engine's reason first."""
    problem = refused(*flags)
    assert problem.path == path
    assert says in problem.message
    assert problem.message.startswith("TensorRT-LLM ")


GRAPHS, SPEC = "cuda_graph_config", "speculative_config"
MTP = {"decoding_type": "MTP", "max_draft_len": 2}
EAGLE3 = {"decoding_type": "Eagle3", "max_draft_len": 2}


@pytest.mark.parametrize(
    ("config", "path", "says"),
    [
        ({"max_batch": 4}, ("max_batch",), "no such key"),
        ({GRAPHS: {"batch_size": [1]}}, (GRAPHS, "batch_size"), "no such key"),
        ({GRAPHS: {"batch_sizes": [1, 8], "max_batch_size": 4}}, (GRAPHS, "max_batch_size"), "the same"),
        ({GRAPHS: {"max_batch_size": -1}}, (GRAPHS, "max_batch_size"), "at least 0"),
        ({GRAPHS: {"batch_sizes": 8}}, (GRAPHS, "batch_sizes"), "not a list"),
        ({GRAPHS: {"batch_sizes": [4, "x"]}}, (GRAPHS, "batch_sizes", 1), "not a whole number"),
        ({GRAPHS: {"batch_sizes": [0]}}, (GRAPHS, "batch_sizes", 0), "not emulated"),
        ({GRAPHS: {"enable_padding": "maybe"}}, (GRAPHS, "enable_padding"), "neither true nor false"),
        ({GRAPHS: True}, (GRAPHS,), "not a mapping"),
        ({GRAPHS: {"num_tokens": [64]}}, (GRAPHS,), "encoders"),
        ({GRAPHS: {"mode": "prefill"}}, (GRAPHS, "mode"), "neither decode nor encode"),
        ({"prefill_cuda_graph_backend": "piecewise"}, ("prefill_cuda_graph_backend",), "graphs of prompts"),
        ({"tensor_parallel_size": None}, ("tensor_parallel_size",), "null"),
        ({SPEC: {"decoding_type": "Medusa"}}, (SPEC, "decoding_type"), "knows no"),
        ({SPEC: {"decoding_type": "SaveState"}}, (SPEC, "decoding_type"), "not emulated"),
        ({SPEC: {"decoding_type": "MTP"}}, (SPEC, "max_draft_len"), "checkpoint"),
        ({SPEC: {"decoding_type": "NGram"}}, (SPEC, "max_draft_len"), "at least one token"),
        ({SPEC: EAGLE3}, (SPEC, "speculative_model"), "needs a draft model"),
        ({SPEC: MTP | {"draft_len_schedule": {}}}, (SPEC, "draft_len_schedule"), "empty"),
        ({SPEC: MTP | {"draft_len_schedule": {4: 1}}}, (SPEC, "draft_len_schedule", "4"), "max_draft_len"),
        ({SPEC: MTP | {"draft_len_schedule": {4: 2, 8: 3}}}, (SPEC, "draft_len_schedule", "8"), "more than"),
        ({SPEC: MTP | {"draft_len_schedule": {0: 2}}}, (SPEC, "draft_len_schedule", "0"), "at least 1"),
        (
            {SPEC: MTP | {"max_concurrency": 4, "draft_len_schedule": {4: 2}}},
            (SPEC, "max_concurrency"),
            "exclude each other",
        ),
        ({SPEC: MTP | {"use_dynamic_tree": True}}, (SPEC, "dynamic_tree_max_topK"), "needs it"),
        (
            {SPEC: MTP | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 5}},
            (SPEC, "max_total_draft_tokens"),
            "2 to 4",
        ),
        (
            {SPEC: MTP | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_concurrency": 4}},
            (SPEC, "use_dynamic_tree"),
            "not emulated",
        ),
        ({SPEC: {"decoding_type": "PARD", "max_draft_len": 129}}, (SPEC, "max_draft_len"), "258 tokens"),
        ({"max_batch_size": 100_000}, ("max_batch_size",), "more than 65536"),
    ],
)
def test_wrong_files(refused, config, path, says):
    """Each leads into the file, the engine's reason first."""
    problem = refused(**config)
    assert problem.path == ("--config", *path)
    assert says in problem.message
    assert problem.message.startswith("TensorRT-LLM ")


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1, 2]", "not a mapping"), ("a: [", "is not YAML")],
)
def test_wrong_yaml(refused, text, says):
    """A file that is no configuration at all."""
    assert says in refused(text=text).message


def test_of_a_key_that_is_given_twice_the_last_holds(emulate):
    """As in PyYAML, which the engine reads its file with."""
    assert emulate(text="max_batch_size: 1\nmax_batch_size: 2").limits.max_num_reqs == 2


def test_a_schedule_without_sizes_does_not_start(refused):
    """Its start-up asks for the largest size."""
    problem = refused("--max_num_tokens", "2", **{SPEC: MTP | {"max_concurrency": 4}})
    assert problem.path == ("--max_num_tokens",)


def test_all_problems_at_once(emulate):
    """Of flags and file alike."""
    with pytest.raises(FlagError) as error:
        emulate("--nope", "--tp_size", "x", unknown=1, **{GRAPHS: {"max_batch_size": -2}})
    assert len(error.value.problems) == 4


@st.composite
def drafting(draw):
    """Speculation of any kind, or none."""
    kind = draw(st.none() | st.sampled_from(KINDS))
    if kind is None:
        return None
    drafts = draw(st.integers(1, 5))
    schedule = None
    if ALGORITHMS[kind].dynamic and draw(st.booleans()):
        thresholds = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=3)))
        lengths = sorted((draw(st.integers(0, drafts)) for _ in thresholds[1:]), reverse=draw(st.booleans()))
        schedule = dict(zip(thresholds, [drafts, *lengths], strict=True))
    most = draw(st.none() | st.integers(1, 40)) if not ALGORITHMS[kind].dynamic else None
    return Drafting(
        decoding_type=kind,
        max_draft_len=drafts,
        total_draft_tokens=drafts,
        schedule=schedule,
        max_concurrency=most,
    )


@given(drafting(), st.integers(1, 64))
def test_width_and_draft_length_are_inverse(spec, width):
    """PARD runs 2K tokens, the others K + 1, and a request without drafts one."""
    if spec is None:
        return
    doubled = spec.decoding_type == "PARD"
    lengths = [k for k in range(64) if (2 * k if doubled and k else k + 1) == width]
    assert spec.draft_len_of(width) == (lengths[0] if lengths else None)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8).map(sorted),
    st.integers(0, 60),
    st.booleans(),
)
def test_admitted(sizes, most, padding):
    """What is too large is dropped; with padding, the most takes its place, once."""
    kept = [size for size in sizes if size <= most]
    if padding and most and len(kept) < len(sizes) and most not in kept:
        kept.append(most)
    assert rules.admitted_sizes(sizes, most, padding) == (tuple(kept) if most else ())


@given(drafting(), st.sets(st.integers(1, 50), min_size=1, max_size=8).map(sorted))
def test_shapes(spec, sizes):
    """With a schedule a size has one length, and the largest the longest besides; else all lengths."""
    schedule = None if spec is None else spec.schedule
    shapes = graphs_of(sizes, drafting=spec, schedule=schedule).shapes
    assert list(shapes) == sorted(set(shapes), reverse=True)
    if schedule is None:
        lens = (0,) if spec is None else spec.draft_lens
        assert set(shapes) == {(size, draft_len) for size in sizes for draft_len in lens}
        return
    for size in sizes:
        reached = [threshold for threshold in schedule if threshold >= size]
        scheduled = schedule[min(reached)] if reached else 0
        own = {draft_len for found, draft_len in shapes if found == size}
        extra = {spec.max_draft_len} if size == max(sizes) else set()
        assert own == {scheduled} | extra


@given(
    drafting(),
    st.sets(st.integers(1, 50), min_size=1, max_size=8).map(sorted),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 6),
    st.booleans(),
)
def test_dispatch_by_brute_force(spec, sizes, num_reqs, most, draft_len, padding):
    """Padded: the least size with this length, not beyond the engine. Then the graph of just that shape."""
    schedule = None if spec is None else spec.schedule
    if schedule is not None and list(schedule.values()) != sorted(schedule.values(), reverse=True):
        return  # the engine searches by halves; the recorded answers have those
    if spec is None:
        draft_len = 0
    graphs = graphs_of(sizes, padding=padding, most=most, drafting=spec, schedule=schedule)
    width = 1 if spec is None else spec.width(draft_len)
    size = num_reqs
    if padding:
        lengths = {
            s: draft_len if schedule is None else rules.scheduled_draft_len(schedule, s) for s in sizes
        }
        fitting = [s for s in sizes if s >= num_reqs and lengths[s] == draft_len]
        if fitting and fitting[0] <= most:
            size = fitting[0]
    answer = graphs.dispatch(decode(num_reqs, width))
    if (size, draft_len) in graphs.shapes:
        assert (answer.entry.num_reqs, answer.entry.query_len) == (size, width)
        assert answer.padded_tokens == (size - num_reqs) * width
        assert answer.entry.rejection(decode(num_reqs, width)) is None
    else:
        assert answer.entry is None
        assert answer.reason is (Reason.SIZES if num_reqs > max(sizes) else Reason.UNCOVERED)


@given(
    st.sets(st.integers(1, 30), min_size=1, max_size=6).map(sorted),
    st.lists(st.tuples(st.integers(1, 34), st.booleans()), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 34),
)
def test_ranks_by_brute_force(sizes, ranks, padding, most):
    """All or none has a graph; with one, all have the same, and it is the one for the largest."""
    graphs = graphs_of(sizes, padding=padding, most=most)
    batches = [decode(num_reqs, past_prompt=past) for num_reqs, past in ranks]
    answers = agreed(graphs, batches)
    entries = {answer.entry for answer in answers}
    assert len(entries) == 1
    (entry,) = entries
    largest = max(num_reqs for num_reqs, _ in ranks)
    alike = len({num_reqs for num_reqs, _ in ranks}) == 1
    next_size = min((size for size in sizes if size >= largest), default=None)
    if not all(past for _, past in ranks) or next_size is None:
        wanted = None
    elif padding and next_size <= most:
        wanted = next_size
    else:
        wanted = next_size if alike and next_size == largest else None
    assert (None if entry is None else entry.num_reqs) == wanted
    for batch, answer in zip(batches, answers, strict=True):
        if entry is None and graphs.dispatch(batch).entry is not None:
            assert answer.reason in (Reason.RANK, Reason.SIZES, Reason.UNCOVERED)


@given(drafting(), st.integers(1, 60), st.integers(1, 400))
def test_speculative_has_the_widths_that_the_engine_runs(spec, most, tokens):
    """By batch size: the schedule's, or with and without drafts around a concurrency."""
    if spec is None:
        return
    speculative = spec.speculative(most, tokens)
    for num_reqs in range(1, most + 1):
        draft_len = spec.max_draft_len
        if spec.schedule is not None:
            draft_len = rules.scheduled_draft_len(spec.schedule, num_reqs)
        elif spec.max_concurrency is not None:
            together = min(num_reqs, tokens // spec.width(spec.max_draft_len))
            if num_reqs * 1 <= tokens and together > spec.max_concurrency:
                draft_len = 0
            elif num_reqs > tokens // spec.width(spec.max_draft_len):
                continue  # more than can draft together: such a batch is not scheduled
        assert 1 + speculative.draft_tokens(num_reqs) == spec.width(draft_len)
