"""vLLM's flags and configuration: how words are read, what the rules keep, and what is refused where."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, GraphSupport
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner_vllm.emulation.attention import EMULATED, AttentionChoice
from capture_planner_vllm.emulation.engine import FLAGS, emulate, resolve
from capture_planner_vllm.emulation.flags import read, short_number
from capture_planner_vllm.emulation.model import ModelFacts
from capture_planner_vllm.emulation.resolution import resolve_mode
from capture_planner_vllm.emulation.tables import flag_table
from engines.generators.vllm import Case, cases, write_models

H100, A100 = find_environment("h100"), find_environment("a100")


def settings(*words, environment=H100):
    """Return the settings of a model that is a name only."""
    return resolve(["some/model", *words], environment)[0]


def refused(*words, environment=H100):
    """Return the first problem of words that are refused."""
    with pytest.raises(FlagError) as caught:
        resolve(["some/model", *words], environment)
    return caught.value.problems[0]


@given(
    st.dictionaries(
        st.sampled_from(["cudagraph_mode", "mode", "max_cudagraph_capture_size", "splitting_ops"]),
        st.one_of(st.integers(0, 9), st.booleans(), st.just("FULL"), st.lists(st.integers(0, 9))),
        min_size=1,
    )
)
def test_dotted_parts_equal_json(parts):
    """-cc.x=y for every field is read as -cc with all fields in one object."""
    dotted = [f"-cc.{name}={json.dumps(value)}" for name, value in parts.items()]
    assert read(["m", *dotted]).values == read(["m", "-cc", json.dumps(parts)]).values


def test_flags_accept_underscores():
    """--a-flag and --a_flag are one flag, for each that vLLM has, and an abbreviation of one."""
    for dest, entry in flag_table().items():
        if entry["kind"] in ("switch", "on") and not entry.get("append"):
            long = next(name for name in entry["names"] if name.startswith("--"))
            spelled = "--" + long[2:].replace("-", "_")
            assert read(["m", long]).values == read(["m", spelled]).values == {dest: True}
            for negative in entry.get("no", ()):
                assert read(["m", negative]).values == {dest: False}


@given(st.integers(0, 10**6), st.sampled_from("kmgtKMGT"))
def test_number_suffixes_are_decimal_or_binary(number, suffix):
    """8k is 8,000 and 8K is 8,192, and so on for m, g and t."""
    power = "kmgt".index(suffix.lower()) + 1
    base = 1000 if suffix.islower() else 1024
    assert short_number(f"{number}{suffix}") == number * base**power


def test_leading_environment_variables_are_read():
    """Words as in a shell are read: variables, then the model."""
    words = ["VLLM_USE_V2_MODEL_RUNNER=0", "some/model", "--max-num-seqs", "4"]
    given_ = read(words)
    assert given_.model == "some/model"
    assert given_.variables == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert resolve(words, H100)[0].runner == "v1"


def test_spec_flags_are_parts_of_the_speculative_config(tmp_path):
    """--spec-method and its like are read as the JSON, count as given, and clash with the same part of it."""
    short = ["--spec-method", "ngram", "--spec-tokens", "3"]
    whole = ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}']
    assert read(["m", *short]) == read(["m", *whole])
    assert read(["m", "--spec-tokens", "3", "-sc.method=ngram"]) == read(["m", *whole])
    shown = {each.name: each for each in emulate(["m", *short], H100).settings}
    assert shown["not_relevant"].value == []
    assert (shown["num_speculative_tokens"].value, shown["num_speculative_tokens"].source) == (3, "flag")
    file = tmp_path / "flags.yaml"
    file.write_text("spec-method: ngram\nspec-tokens: 3\n")
    assert read(["m", "--config", str(file)]).source("speculative_config") == "file"
    assert "method is given twice" in str(refused(*whole, "--spec-method", "ngram"))
    assert "JSON object" in str(refused("-sc", "3", "--spec-method", "ngram"))


@pytest.mark.parametrize(("number", "read_as"), [(True, 1), (2.0, 2), (" 2 ", 2), ("2.0", 2)])
def test_schedule_numbers_are_read_as_vllms_types_do(number, read_as):
    """True, whole floats and text count as numbers; the emulation has integers only."""
    config = {"method": "ngram", "num_speculative_tokens": 3}
    config["num_speculative_tokens_per_batch_size"] = [[1, 16, number]]
    words = ["-sc", json.dumps(config)]
    found = emulate(["m", *words], H100)
    assert found.speculative.schedule == ((1, 16, read_as),)
    assert type(found.speculative.schedule[0][2]) is int


@pytest.mark.parametrize("number", [2.9, "2.", None])
def test_schedule_refuses_other_numbers(number):
    """Fractions, incomplete numbers and null are no number of tokens."""
    config = {"num_speculative_tokens_per_batch_size": [[1, 16, number]], "num_speculative_tokens": 3}
    assert "three whole numbers" in str(refused("-sc", json.dumps({"method": "ngram", **config})))


def test_command_line_overrides_config_file(tmp_path):
    """Flags of --config count as written in front of the others; their source is the file."""
    file = tmp_path / "flags.yaml"
    file.write_text("max-num-seqs: 8\nmax-num-batched-tokens: 512\n")
    given_ = read(["m", "--config", str(file), "--max-num-seqs", "16"])
    assert given_.values["max_num_seqs"] == 16
    assert given_.values["max_num_batched_tokens"] == 512
    assert given_.source("max_num_seqs") == "flag"
    assert given_.source("max_num_batched_tokens") == "file"
    assert given_.source("seed") == "default"


@pytest.mark.parametrize(
    ("words", "flag", "part"),
    [
        (["--max-num-sqs", "4"], "--max-num-sqs", "did you mean --max-num-seqs?"),
        (["--max-num-seqs", "many"], "--max-num-seqs", "whole number"),
        (["-cc", "{"], "--compilation-config", "vLLM"),
        (["-cc.cudagraph_mode=FULLEST"], "--compilation-config", "give one of"),
        (["-cc.cudagraph_sizes=[1]"], "--compilation-config", "cudagraph_capture_sizes"),
        (["-cc.cudagraph_capture_sizes=[]"], "--cudagraph-capture-sizes", "at least one"),
        (["-O7"], "--optimization-level", "0, 1, 2 or 3"),
        (["-sc", '{"method": "guess", "num_speculative_tokens": 2}'], "--speculative-config", "no method"),
        (["-sc", '{"method": "eagle", "num_speculative_tokens": 2}'], "--speculative-config", "draft model"),
        (["-sc", '{"method": "ngram"}'], "--speculative-config", "draft tokens"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "--max-num-batched-tokens", "64"),
        (["--attention-backend", "XFORMERS"], "--attention-backend", "no backend"),
        (["--attention-backend", "FLASHMLA"], "--attention-backend", "MLA"),
        (["VLLM_NO_SUCH=1"], "VLLM_NO_SUCH=1", ""),
        (["--config", "none.txt"], "--config", ".yaml"),
        (["--config", "none.yaml"], "--config", "cannot read"),
    ],
)
def test_refusal_names_its_flag(words, flag, part):
    """A refusal is about the flag that caused it, with a reason and where there is one a remedy."""
    problem = refused(*words)
    assert problem.path[0] == flag
    assert part in str(problem)


def test_capture_sizes_agree_with_largest_size():
    """Both given: the largest size must be the one that is left after the budget, else vLLM refuses."""
    sizes = ["--cudagraph-capture-sizes", "1", "2", "300", "--max-num-batched-tokens", "256"]
    sizes += ["--max-num-seqs", "16"]
    assert settings(*sizes).sizes == (1, 2)
    assert settings(*sizes, "--max-cudagraph-capture-size", "2").max_size == 2
    assert refused(*sizes, "--max-cudagraph-capture-size", "300").path == ("--max-cudagraph-capture-size",)


def test_capture_sizes_given_twice_are_refused():
    """A list as a flag and one inside -cc contradict each other, even where they are equal."""
    words = ["--cudagraph-capture-sizes", "1", "2", "-cc.cudagraph_capture_sizes=[1,2]"]
    assert refused(*words).path == ("--cudagraph-capture-sizes",)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ([], "FULL_AND_PIECEWISE"),
        (["-O0"], "NONE"),
        (["-O1"], "PIECEWISE"),
        (["-O3"], "FULL_AND_PIECEWISE"),
        (["--enforce-eager"], "NONE"),
        (["--enforce-eager", "-cc.cudagraph_mode=FULL"], "NONE"),
        (["-O0", "-cc.cudagraph_mode=FULL_AND_PIECEWISE"], "FULL_DECODE_ONLY"),
        (["-cc.mode=STOCK_TORCH_COMPILE"], "NONE"),
        (["--runner", "pooling"], "PIECEWISE"),
        (["-cc.splitting_ops=[]"], "FULL"),
        (["VLLM_USE_BREAKABLE_CUDAGRAPH=1"], "FULL_AND_PIECEWISE"),
    ],
)
def test_rewritten_modes_are_vllms(words, mode):
    """What levels, eager mode, compilation and pooling make of the mode on an H100."""
    front = [word for word in words if word.startswith("VLLM")]
    found = resolve([*front, "some/model", *(word for word in words if word not in front)], H100)
    assert found[0].mode.value == mode
    if found[0].mode is not found[0].requested_mode:
        assert found[1].decisions[-1].after == mode


def test_mode_decisions_form_a_chain(tmp_path):
    """In every drawn configuration the mode decisions form a chain from the request to the result."""
    write_models(tmp_path)
    chains = 0
    for case in cases(300, seed=7):
        words = [f"{name}={value}" for name, value in case.variables] + case.command_in(tmp_path)
        try:
            found, configuration = resolve(words, find_environment(case.environment))
        except FlagError:
            continue
        modes = {mode.value for mode in GraphMode}
        steps = [decision for decision in configuration.decisions if {decision.before, decision.after} <= modes]
        at = found.requested_mode.value
        for step in steps:
            assert step.before == at
            assert step.message
            at = step.after
        assert at == found.mode.value
        chains += bool(steps)
        assert found.max_size == max(found.sizes, default=0)
        assert list(found.sizes) == sorted(set(found.sizes))
        assert all(size <= found.max_num_batched_tokens for size in found.sizes)
        assert found.decode_query_lens[-1] <= found.query_len
    assert chains > 30


def test_generator_is_deterministic_per_seed():
    """Cases are a function of count and seed, and come back from JSON as they were."""
    drawn = list(cases(50, seed=3))
    assert drawn == list(cases(50, seed=3)) != list(cases(50, seed=4))
    assert [Case.of(json.loads(json.dumps(case.data()))) for case in drawn] == drawn


@given(
    st.sampled_from(list(GraphMode)),
    st.sampled_from(list(GraphSupport)),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_resolve_mode_only_lowers_the_mode(mode, support, query_len, splits, compiles, capture):
    """The result captures no more than was requested, and nothing that the backend cannot."""
    notes = []

    def resolved():
        return resolve_mode(
            mode,
            support=support,
            backend="B",
            query_len=query_len,
            splits_attention=splits,
            graph_partition=False,
            compiles=compiles,
            piecewise_capture=capture,
            note=lambda rule, before, after, message: notes.append((before, after)),
        )

    if mode.mixed_mode is GraphMode.FULL and support is GraphSupport.NEVER:
        with pytest.raises(FlagError):
            resolved()
    else:
        left = resolved()
        assert left <= mode
        assert (left is mode) == (not notes)
        assert left.mixed_mode is not GraphMode.FULL or support is GraphSupport.ALWAYS
        if left.decode_mode is GraphMode.FULL:
            assert support >= (GraphSupport.UNIFORM_BATCH if query_len > 1 else 1)
        assert capture or not left.has_piecewise


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "9.0", "10.0", "12.0"])
def test_every_capability_has_a_backend(capability):
    """Some emulated backend runs on each capability, with and without MLA, and it is the first that can."""
    major, minor = capability.split(".")
    for mla in (False, True):
        attention = AttentionChoice(capability=(int(major), int(minor)), model=ModelFacts(name="m", mla=mla))
        chosen = attention.choose("--attention-backend", None)
        assert attention.unusable(chosen) is None
        assert attention.choose("--attention-backend", chosen) == chosen
        for other in EMULATED:
            if attention.unusable(other) is not None:
                with pytest.raises(FlagError):
                    attention.choose("--attention-backend", other)


def test_unknown_model_is_assumed_dense(tmp_path):
    """Facts come from config.json where there is one; else they are assumed, and said to be."""
    write_models(tmp_path)
    assert resolve(["some/model"], H100)[1].model.source == "assumed"
    known = resolve([str(tmp_path / "moe")], H100)[1].model
    assert known.source == "model"
    assert known.experts == 128
    (tmp_path / "dense" / "config.json").write_text("{")
    with pytest.raises(FlagError) as caught:
        resolve([str(tmp_path / "dense")], H100)
    assert caught.value.problems[0].path == ("--model",)


def test_default_budgets_depend_on_device():
    """Defaults are larger on devices with more memory; an A100's and an L40S's are the small ones."""
    found = {name: settings(environment=find_environment(name)) for name in ("b200", "h100", "a100", "l40s")}
    budgets = {name: (one.max_num_batched_tokens, one.max_num_seqs) for name, one in found.items()}
    assert budgets == {"b200": (16384, 1024), "h100": (8192, 1024), "a100": (2048, 256), "l40s": (2048, 256)}


@given(st.integers(1, 3000), st.sampled_from([None, 64, 100, 5000]))
def test_tokens_bound_requests(tokens, reqs):
    """Fewer tokens than requests bound the requests where no flag gives them, and the setting says so."""
    words = ["--max-num-batched-tokens", str(tokens), *(["--max-num-seqs", str(reqs)] if reqs else [])]
    assume(not reqs or reqs <= tokens)
    found = emulate(["m", *words], H100)
    shown = {each.name: each for each in found.settings}
    bounded = [each for each in found.decisions if each.rule == "requests-by-tokens"]
    source = "flag" if reqs else "requests-by-tokens" if tokens < 1024 else "default"
    assert (shown["max_num_seqs"].value, shown["max_num_seqs"].source) == (reqs or min(1024, tokens), source)
    assert [(each.before, each.after) for each in bounded] == [("1024", str(tokens))] * (source == "requests-by-tokens")


def test_fewer_tokens_than_requests_are_refused():
    """Where both are given, every request needs a token."""
    words = ["--max-num-batched-tokens", "63", "--max-num-seqs", "64"]
    assert refused(*words).path == ("--max-num-batched-tokens",)


def test_requests_bound_the_tokens():
    """Where no flag gives tokens, there are no more than whole prompts of all requests."""
    found = emulate(["m", "--max-num-seqs", "2", "--max-model-len", "100"], H100)
    shown = {each.name: (each.value, each.source) for each in found.settings}
    assert shown["max_num_batched_tokens"] == (200, "tokens-by-requests")
    assert ("8192", "200") in {(each.before, each.after) for each in found.decisions}


def test_environment_without_gpu_is_refused():
    """There are no CUDA graphs on a processor."""
    assert refused(environment=find_environment("cpu")).path == ("--environment",)


@given(st.integers(1, 2000), st.integers(1, 20000), st.sampled_from([None, 8, 32, 100, 700]))
def test_interactive_sizes_are_every_size_up_to_32(reqs, tokens, top):
    """Interactivity only adds sizes: all of 1 to 32 up to the largest."""
    common = {"max_num_reqs": reqs, "max_num_tokens": tokens, "query_len": 1, "platform_max": 512}
    usual = vllm_tokens(**common, user_max=top)
    fine = vllm_tokens(**common, user_max=top, interactive=True)
    assert set(fine) - set(usual) == set(range(1, min(fine[-1], 32) + 1)) - set(usual)
    assert set(usual) <= set(fine)


def test_known_flags_are_vllms():
    """Every flag of the engine object is one of the recorded release's, or a variable."""
    known = {name for entry in flag_table().values() for name in entry["names"]}
    assert {name for name in FLAGS if name.startswith("-")} <= known


@pytest.mark.parametrize("level", ["0", "1", "2", "3"])
def test_optimization_level_may_be_a_word_of_its_own(level):
    assert settings("-O", level) == settings(f"-O{level}")
