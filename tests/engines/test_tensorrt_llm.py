"""TensorRT-LLM: flags and files that it takes or refuses, and what it makes of them."""

import json

import pytest

from capture_planner.engines import read
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_tensorrt_llm.engine import ENGINE
from engines.generators.tensorrt_llm_answers import MACHINE, batch_of

EIGHTS = (1, 2, 4, *range(8, 129, 8))


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


def decode(num_reqs, query_len=1, *, past_prompt=True):
    """A decode batch."""
    return batch_of((num_reqs, query_len, past_prompt))


def test_default_sizes_run_unpadded(emulate):
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


def test_padding_rounds_batches_up_to_eight(emulate):
    """A dummy request for each place."""
    emulation = emulate(cuda_graph_config={"enable_padding": True})
    assert emulation.sizes == EIGHTS
    answer = emulation.dispatch(decode(33))
    assert (answer.entry.num_reqs, answer.padded_reqs, answer.padded_tokens) == (40, 7, 7)


def test_sizes_above_the_batch_limit_are_dropped_without_padding(emulate):
    """With it, the most that can takes its place."""
    for padding, sizes in ((False, (4,)), (True, (4, 6))):
        config = {"batch_sizes": [4, 8], "enable_padding": padding}
        assert emulate("--max_batch_size", "6", cuda_graph_config=config).sizes == sizes


def test_null_cuda_graph_config_turns_graphs_off(emulate):
    """And every batch is eager for its mode."""
    emulation = emulate(cuda_graph_config=None)
    assert (emulation.sizes, emulation.graphs) == ((), ())
    assert emulation.modes == {Role.TARGET: GraphMode.NONE}
    assert emulation.dispatch(decode(1)).reason is Reason.MODE


def test_flag_overrides_the_file(emulate):
    """And it is noted."""
    emulation = emulate("--max_batch_size", "16", max_batch_size=32, max_num_tokens=64)
    assert (emulation.limits.max_num_reqs, emulation.limits.max_num_tokens) == (16, 64)
    assert emulation.decisions[0].rule == "flag-over-file"
    sources = {setting.name: setting.source for setting in emulation.settings}
    assert (sources["max_batch_size"], sources["max_num_tokens"]) == ("flag", "file")
    assert sources["tensor_parallel_size"] == "default"


def test_command_accepts_a_model_and_ignored_flags(emulate):
    """And flags that decide nothing about graphs."""
    command = ["some/model", "--tp_size=2", "--trust_remote_code", "--host", "::1"]
    assert emulate(*command).parallel.tensor == 2


def test_attention_dp_ranks_are_data_parallel(emulate):
    """Its ranks are data-parallel to attention."""
    emulation = emulate("--tp_size", "4", enable_attention_dp="yes")
    assert (emulation.parallel.data, emulation.parallel.tensor) == (4, 1)
    assert emulation.decisions[-1].rule == "ranks-agree"


def test_file_is_read_as_yaml_1_1(emulate):
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


def test_schedule_pads_and_captures_its_thresholds(emulate):
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


def test_ngram_has_graphs_without_drafts_above_its_concurrency(emulate):
    """Each size twice; a schedule changes nothing but padding and sizes."""
    ngram = {"decoding_type": "NGram", "max_draft_len": 2}
    emulation = emulate(cuda_graph_config={"batch_sizes": [8]}, speculative_config=ngram | {"max_concurrency": 4})
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
def test_sizes_setting_names_its_source(emulate, sizes, most, schedule, source):
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
        (["--cuda_graph"], ("--cuda_graph",), "unknown flag"),
        (["--max_batch_size", "many"], ("--max_batch_size",), "expected an integer"),
        (["--max_batch_size"], ("--max_batch_size",), "its value is missing"),
        (["--max_batch_size=0"], ("--max_batch_size",), "nothing can be scheduled"),
        (["--trust_remote_code=1"], ("--trust_remote_code",), "takes no value"),
        (["one", "two"], ("two",), "one model"),
        (["--max_beam_width", "2"], ("--max_beam_width",), "several beams"),
        (["--cp_size", "2"], ("--cp_size",), "context parallelism"),
        (["--backend", "tensorrt"], ("--backend",), "not emulated"),
        (["--config", "/nowhere/file.yaml"], ("--config",), "cannot be read"),
    ],
)
def test_wrong_flags_are_refused_by_name(refused, flags, path, says):
    """Each names the flag as it was written, the engine's reason first."""
    problem = refused(*flags)
    assert problem.path == path
    assert says in problem.message
    assert problem.message.startswith("TensorRT-LLM ")


GRAPHS, SPEC = "cuda_graph_config", "speculative_config"
MTP = {"decoding_type": "MTP", "max_draft_len": 2}


@pytest.mark.parametrize(
    ("config", "path", "says"),
    [
        ({"max_batch": 4}, ("max_batch",), "unknown key"),
        ({GRAPHS: {"batch_size": [1]}}, (GRAPHS, "batch_size"), "unknown key"),
        ({GRAPHS: {"batch_sizes": [1, 8], "max_batch_size": 4}}, (GRAPHS, "max_batch_size"), "must be equal"),
        ({GRAPHS: {"max_batch_size": -1}}, (GRAPHS, "max_batch_size"), "at least 0"),
        ({GRAPHS: {"batch_sizes": 8}}, (GRAPHS, "batch_sizes"), "expected a list"),
        ({GRAPHS: {"batch_sizes": [4, "x"]}}, (GRAPHS, "batch_sizes", 1), "expected an integer"),
        ({GRAPHS: {"batch_sizes": [0]}}, (GRAPHS, "batch_sizes", 0), "not emulated"),
        ({GRAPHS: {"enable_padding": "maybe"}}, (GRAPHS, "enable_padding"), "expected true or false"),
        ({GRAPHS: True}, (GRAPHS,), "expected a mapping"),
        ({GRAPHS: {"num_tokens": [64]}}, (GRAPHS,), "encoders"),
        ({GRAPHS: {"mode": "prefill"}}, (GRAPHS, "mode"), "expected decode or encode"),
        ({"prefill_cuda_graph_backend": "piecewise"}, ("prefill_cuda_graph_backend",), "graphs of prompts"),
        ({"tensor_parallel_size": None}, ("tensor_parallel_size",), "null"),
        ({SPEC: {"decoding_type": "Medusa"}}, (SPEC, "decoding_type"), "unknown decoding_type"),
        ({SPEC: {"decoding_type": "SaveState"}}, (SPEC, "decoding_type"), "not emulated"),
        ({SPEC: {"decoding_type": "MTP"}}, (SPEC, "max_draft_len"), "checkpoint"),
        ({SPEC: {"decoding_type": "NGram"}}, (SPEC, "max_draft_len"), "at least one token"),
        ({SPEC: MTP | {"draft_len_schedule": {}}}, (SPEC, "draft_len_schedule"), "empty"),
        ({SPEC: MTP | {"draft_len_schedule": {4: 1}}}, (SPEC, "draft_len_schedule", "4"), "max_draft_len"),
        ({SPEC: MTP | {"draft_len_schedule": {4: 2, 8: 3}}}, (SPEC, "draft_len_schedule", "8"), "more than"),
        ({SPEC: MTP | {"draft_len_schedule": {0: 2}}}, (SPEC, "draft_len_schedule", "0"), "at least 1"),
        (
            {SPEC: MTP | {"max_concurrency": 4, "draft_len_schedule": {4: 2}}},
            (SPEC, "max_concurrency"),
            "exclude each other",
        ),
        ({SPEC: MTP | {"use_dynamic_tree": True}}, (SPEC, "dynamic_tree_max_topK"), "needs a value"),
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
def test_wrong_file_values_are_refused_with_their_place(refused, config, path, says):
    """Each leads into the file, the engine's reason first."""
    problem = refused(**config)
    assert problem.path == ("--config", *path)
    assert says in problem.message
    assert problem.message.startswith("TensorRT-LLM ")


@pytest.mark.parametrize(("text", "says"), [("[1, 2]", "expected a mapping"), ("a: [", "is not YAML")])
def test_file_without_a_mapping_is_refused(refused, text, says):
    """A file that is no configuration at all."""
    assert says in refused(text=text).message


def test_last_value_of_a_duplicate_key_counts(emulate):
    """As in PyYAML, which the engine reads its file with."""
    assert emulate(text="max_batch_size: 1\nmax_batch_size: 2").limits.max_num_reqs == 2


def test_schedule_without_sizes_is_refused(refused):
    """Its start-up asks for the largest size."""
    problem = refused("--max_num_tokens", "2", **{SPEC: MTP | {"max_concurrency": 4}})
    assert problem.path == ("--max_num_tokens",)


def test_problems_of_flags_and_file_are_reported_together(emulate):
    """Of flags and file alike."""
    with pytest.raises(FlagError) as error:
        emulate("--nope", "--tp_size", "x", unknown=1, **{GRAPHS: {"max_batch_size": -2}})
    assert len(error.value.problems) == 4


@pytest.mark.parametrize(
    "flags", ["--tp_size 4 --ep_size 3", "--max_seq_len many", "--pp_size 0", "--host", "--port -1 --tokenizer x"]
)
def test_ignored_flags_change_nothing(emulate, flags):
    """Whatever their values: they decide nothing about graphs."""
    words = [*flags.split(), "::1"] if flags == "--host" else flags.split()
    plain = emulate("--tp_size", "4") if "--tp_size" in words else emulate()
    assert emulate(*words).graphs == plain.graphs


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["--cp_size", "2"], NotEmulated),
        (["--max_batch_size", "0"], NotEmulated),
        (["--cp_size", "2", "--tp_size", "x"], FlagError),
        (["--nope"], FlagError),
    ],
)
def test_unemulated_values_raise_not_emulated(emulate, flags, kind):
    """``NotEmulated``, as long as the engine refuses nothing."""
    with pytest.raises(FlagError) as error:
        emulate(*flags)
    assert type(error.value) is kind


@pytest.mark.parametrize(
    ("given", "twice"),
    [({}, True), ({"skip_indexer_for_short_seqs": False}, False), ({"algorithm": "deepseek_v4"}, False)],
)
def test_sparse_attention_has_the_same_shapes(emulate, given, twice) -> None:
    """They may be captured twice, by length, which is said."""
    sparse = {"algorithm": "dsa", **given}
    plain, emulation = emulate(max_batch_size=8), emulate(max_batch_size=8, sparse_attention_config=sparse)
    assert emulation.graphs == plain.graphs
    assert bool(emulation.assumptions) == twice
    with pytest.raises(NotEmulated, match="sparse attention"):
        emulate(sparse_attention_config={"algorithm": "rocket"})


def test_a_worker_of_dynamo_has_flags_with_dashes() -> None:
    """And flags of its own."""
    line = "python3 -m dynamo.trtllm --model a --max-batch-size 8 --tensor-parallel-size 2 --kv-block-size 32"
    assert read("tensorrt-llm", [line]).words == ("a", "--max_batch_size", "8", "--tp_size", "2")
