"""What is known of a model: folders, known models, and what is said where nothing is known."""

import json
import re
import shutil
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from capture_planner.codec import hub
from capture_planner.codec.shipped import find_environment, shipped_environments
from capture_planner.engines import checkpoints, emulate
from capture_planner.errors import FlagError
from capture_planner_vllm.emulation.attention import AttentionChoice
from capture_planner_vllm.emulation.engine import resolve
from capture_planner_vllm.emulation.model import ASSUMED_LENGTH, read_model

KNOWN = sorted(checkpoints.known())
DECODERS = {
    *("DeepseekV3", "Ernie4_5_Moe", "Gemma2", "Glm4Moe", "GptOss", "Llama", "MiniMaxM2", "Mistral", "Mixtral", "OPT"),
    *("Phi3", "Qwen2", "Qwen3", "Qwen3Moe"),
}
DENSE = [n for n, config in checkpoints.known().items() if config["architectures"][0].partition("For")[0] in DECODERS]
EVERY = pytest.mark.parametrize("name", DENSE)
H100 = find_environment("h100")
MACHINES = sorted(set(shipped_environments()) - {"cpu"})
MODEL = {"vllm": "--model", "sglang": "--model-path"}
SETTINGS = {"vllm": ("max_model_len", "attention_backend"), "sglang": ("context_length",)}
TEXT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "hidden_size": 512,
    "max_position_embeddings": 1000,
}


def settings(engine, name, *flags):
    """Return the settings of an engine with a model, by name."""
    return {s.name: s for s in emulate(engine, [MODEL[engine], str(name), *flags], H100).settings}


def folder(place, **config):
    """Write a model's folder."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def problem(engine, name, *flags):
    """Return the one problem of refused flags."""
    with pytest.raises(FlagError) as caught:
        emulate(engine, [MODEL[engine], str(name), *flags], H100)
    (found,) = caught.value.problems
    return found


def test_known_models_have_sources_and_facts():
    """Names are a hub's, in order, each once; numbers are whole; where they were found is named."""
    entries = json.loads((resources.files("capture_planner.engines") / "known_models.json").read_text())
    assert list(entries) == sorted(entries)
    names = [each for name, entry in entries.items() for each in (name, *entry.get("also", ()))]
    assert len(names) == len(set(names)) == len(KNOWN)
    assert all(hub.is_name(name) for name in names)
    for entry in entries.values():
        assert set(entry) - {"also"} == {"config", "source"}
        assert entry["source"]
        assert len(entry["config"]["architectures"]) == 1
        text = {**entry["config"], **entry["config"].get("text_config", {})}
        counts = ("num_attention_heads", "hidden_size", "max_position_embeddings", "vocab_size")
        assert all(text[key] > 0 for key in counts if key in text)


@EVERY
def test_known_facts_equal_transformers_configuration(name):
    """Transformers' own configuration class, given the fields, has the numbers that vLLM is emulated with."""
    config = {key: value for key, value in checkpoints.known()[name].items() if key != "quantization_config"}
    # Kimi K2 ships the code of its class, which is DeepSeek-V3's; the factors of a long rope are not kept.
    kind = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    ropes = config.pop("rope_scaling", None), config.pop("rope_parameters", None)
    config.pop("layer_types", None)  # Each kind once.
    theirs, ours = CONFIG_MAPPING[kind](**config), read_model("m", name)
    assert ours.source == "known"
    assert (ours.heads, ours.vocabulary) == (theirs.num_attention_heads, theirs.vocab_size)
    assert ours.limit == theirs.max_position_embeddings
    latent = getattr(theirs, "kv_lora_rank", None)
    assert ours.mla == (latent is not None)
    if latent is None:
        assert ours.kv_heads == getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
        head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_size == head
    else:
        assert (ours.kv_heads, ours.head_size) == (1, latent + theirs.qk_rope_head_dim)
    experts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    assert ours.experts == next((getattr(theirs, key) for key in experts if getattr(theirs, key, None)), 0)
    long = (ropes[0] or {}).get("type") == "longrope"
    assert ours.max_len == (theirs.original_max_position_embeddings if long else ours.limit)


@pytest.mark.parametrize("name", sorted({c["architectures"][0]: n for n, c in checkpoints.known().items()}.values()))
def test_known_models_are_answered_or_refused(name):
    """Both engines take one of each architecture with its own facts, or by the flags alone, and say so."""
    for engine, sourced in SETTINGS.items():
        emulation = emulate(engine, [MODEL[engine], name], H100)
        sources = {s.source for s in emulation.settings if s.name in (*sourced, "model_facts")}
        if emulation.by_flags:
            sources -= {"default"}
        usual = "attention heads|states of linear|the flags alone answer"
        strange = [each for each in emulation.assumptions if not re.search(usual, each)]
        assert (sources, strange) == ({"known"}, [])


@given(st.sampled_from(DENSE), st.sampled_from(MACHINES))
def test_model_folder_equals_known_model_with_the_same_config(tmp_path_factory, name, machine):
    """Only where the facts come from differs, on any machine."""
    environment = find_environment(machine)
    place = folder(tmp_path_factory.mktemp("m"), **checkpoints.known()[name])
    (ours, ran), (theirs, _) = resolve([name], environment), resolve([place], environment)
    assert ours == theirs
    assert ran.model.source == "known"


ENDINGS = (
    "-FP8",
    "-NVFP4",
    "-0528",
    "-2507",
    "-Instruct",
    "-AWQ",
    "-GPTQ-Int4",
    "-FP8-dynamic",
    "-w4a16",
    "-bnb-4bit",
    "",
)


@given(st.sampled_from(DENSE), st.sampled_from(ENDINGS), st.sampled_from(("some/", "/models/", "a/b/", "./")))
def test_names_of_a_family_are_taken_for_the_known_model(name, ending, before):
    """Another owner, a folder that is not here, and endings that leave dimensions alone; the first line says so."""
    last = name.partition("/")[2]
    for spelled in (before + last + ending, (before + last + ending).lower(), f"{before}{last}{ending}/"):
        found = checkpoints.find(spelled)
        assert found.source == "family" or spelled in checkpoints.known()
        theirs = checkpoints.known()[found.like or name]
        assert {**found.config, "quantization_config": None} == {**theirs, "quantization_config": None}
        assert theirs["architectures"] == checkpoints.known()[name]["architectures"]
    said = emulate("vllm", [before + last + ending], find_environment("b200")).assumptions
    assert said == () or f"taken for {checkpoints.find(before + last + ending).like}" in said[0]


@pytest.mark.parametrize(
    "name", ["a/DeepSeek-V3-1B-Test", "a/Qwen3-8B-speculator.eagle3", "a/DeepSeek-R1-Distill-Foo", "Qwen3", "a/x-FP8"]
)
def test_other_names_are_of_no_family(name):
    """What a name adds in its middle, or an ending that is not known, can be another model."""
    assert checkpoints.find(name).source == "assumed"


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2-Base"),
        ("x/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("deepseek-ai/DeepSeek-V2", None),
        ("deepseek-ai/DeepSeek-V5", None),
    ],
)
def test_a_sibling_of_a_known_model_is_of_its_family(name, like):
    """Kimi-K2-Thinking counted as a dense decoder, though Kimi-K2-Instruct is known; another version is no sibling."""
    assert checkpoints.find(name).like == like


SAYS_EXPERTS = re.compile(r"-A\d+B|moe|\d+x\d+b|\d+E(?:-|$)", re.IGNORECASE)
MIXTURES = [n for n, config in checkpoints.known().items() if SAYS_EXPERTS.search(n + config["architectures"][0])]


@pytest.mark.parametrize("name", MIXTURES)
def test_names_that_say_experts_have_them(name):
    """What a name or an architecture says is in the facts, and expert parallelism is never refused for lack of any."""
    assert read_model("m", name).experts > 0
    for spelled in (name, f"some/{name.partition('/')[2]}-FP8"):
        emulate("vllm", [spelled, "--enable-expert-parallel"], find_environment("b200"))


SAYS_WEIGHTS = re.compile("fp8|nvfp4", re.IGNORECASE)
QUANTIZED = [
    n for n, config in checkpoints.known().items() if "quantization_config" in config and SAYS_WEIGHTS.search(n)
]


@pytest.mark.parametrize("name", QUANTIZED)
def test_another_owner_quantizes_in_another_way(name):
    """RedHatAI's NVFP4 is not nvidia's of the same name: only a copy without an owner is taken for it whole."""
    last = name.partition("/")[2]
    for spelled, kept in ((f"Quantizer/{last}", False), (f"/models/{last}", True)):
        found = checkpoints.find(spelled)
        assert found.source == "family"
        assert ("quantization_config" in found.config) == kept


def test_the_cache_comes_before_known_models(hub_cache):
    """A config.json in Hugging Face's cache is the model's own; without it, the list of known models."""
    name, place = "Qwen/Qwen3-8B", hub_cache / "models--Qwen--Qwen3-8B"
    try:
        for part in ("refs", "snapshots"):
            (place / part).mkdir(parents=True)
        (place / "refs" / "main").write_text("abc")
        folder(place / "snapshots" / "abc", **TEXT)
        found = checkpoints.find(name)
        assert (found.source, found.config["max_position_embeddings"]) == ("cache", 1000)
        assert settings("vllm", name)["max_model_len"].source == "cache"
        assert settings("sglang", name)["context_length"].value == 1000
    finally:
        shutil.rmtree(place)
    assert checkpoints.find(name).source == "known"


def test_model_folder_overrides_known_model(tmp_path, monkeypatch):
    """An engine looks for a folder first."""
    (tmp_path / "Qwen").mkdir()
    folder(tmp_path / "Qwen" / "Qwen3-8B", **TEXT)
    monkeypatch.chdir(tmp_path)
    for engine, sourced in SETTINGS.items():
        found = settings(engine, "Qwen/Qwen3-8B")
        assert (found[sourced[0]].value, found[sourced[0]].source) == (1000, "model")


def test_deepseek_takes_an_mla_backend():
    """A known model with MLA takes FLASHMLA; a name without facts is refused, and told that it is assumed."""
    found = settings("vllm", "deepseek-ai/DeepSeek-V3", "--attention-backend", "FLASHMLA")
    assert (found["attention_backend"].value, found["attention_backend"].source) == ("FLASHMLA", "flag")
    refused = problem("vllm", "some/model", "--attention-backend", "FLASHMLA")
    assert "some/model is unknown here" in refused.message
    assert "counts as a dense decoder" in refused.message
    assert "it is for MLA models" in refused.message
    assert "folder with its config.json" in refused.remedy


def test_refusals_mention_assumed_facts_only_if_they_depend_on_them():
    """A length that a flag gives is not the model's; a known model's length is no assumption."""
    short = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "1000")
    assert "counts as" in problem("vllm", "some/model", *short).message
    assert "counts as" not in problem("vllm", "some/model", *short, "--max-model-len", "2000").message
    assert "counts as" not in problem("vllm", "Qwen/Qwen3-8B", *short).message
    eagle = ("--speculative-algorithm", "EAGLE")
    assert "counts as an ordinary text decoder" in problem("sglang", "some/model", *eagle).message
    assert settings("sglang", "Qwen/Qwen3-8B", *eagle)["speculative_num_steps"].value == 3


def test_assumed_facts_have_a_note():
    """It names the model, the settings that say assumed, and what to do; the drafter has one of its own."""
    for engine, sourced in SETTINGS.items():
        emulation = emulate(engine, [MODEL[engine], "some/model"], H100)
        (note,) = emulation.assumptions
        assumed = [s.name for s in emulation.settings if s.source == "assumed"]
        assert set(sourced) <= set(assumed)
        assert all(name in note for name in (*sourced, "some/model", "folder with its config.json"))
    draft = json.dumps({"method": "eagle3", "model": "some/draft", "num_speculative_tokens": 2})
    (note,) = emulate("vllm", ["Qwen/Qwen3-8B", "--speculative-config", draft], H100).assumptions
    assert "some/draft" in note
    assert "drafter" in note
    (note,) = emulate("vllm", ["some/model", "--max-model-len", "500"], H100).assumptions
    assert "max_model_len" not in note
    assert emulate("vllm", [], H100).assumptions == ()
    (note,) = emulate("sglang", [], H100).assumptions
    assert note.startswith("no model was named")
    assert emulate("tensorrt-llm", ["some/model"], H100).assumptions == ()


@pytest.mark.parametrize(
    ("config", "vllm", "asked", "sglang"),
    [
        ({}, 1000, 1000, 1000),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4000, 4000, 4000),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2000, 2000, 2000),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1000, 1000, 1000),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, 1000, 1000, 1000),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 100}, 100, 1000, 1000),
        ({"rope_scaling": {"type": "longrope"}}, 1000, 1000, 1000),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": {"rope_type": "linear", "factor": 2}}},
         2000, 2000, 1000),
        ({"rope_scaling": {"type": "linear", "factor": None}, "max_position_embeddings": 1000}, 1000, 1000, None),
        ({"model_max_length": 700}, 700, 700, 700),
        ({"model_max_length": 1700}, 1700, 1700, 1700),
        ({"seq_length": 800}, 800, 800, 800),
        ({"max_position_embeddings": None}, 2048, 2048, 2048),
        ({"text_config": {"max_position_embeddings": 300, "num_attention_heads": 4}}, 300, 300, 300),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}, 1000, 1000, 8000),
    ],
)  # fmt: skip
def test_max_model_len_is_derived_as_in_the_engine(tmp_path, config, vllm, asked, sglang):
    """Scaled lengths are scaled once; vLLM stays within what a long rope was trained for unless asked."""
    place = folder(tmp_path / "m", **{**TEXT, **config})
    model = read_model("--model", place)
    assert (model.max_len, model.limit) == (vllm, asked)
    assert f"1 to {asked}" in problem("vllm", place, "--max-model-len", str(asked + 1)).message
    assert settings("vllm", place, "--max-model-len", str(asked))["max_model_len"].value == asked
    if sglang is not None:
        assert settings("sglang", place)["context_length"].value == sglang


def test_mla_depends_on_model_type(tmp_path):
    """MLA is for the types that vLLM lists; another model with a latent rank has ordinary heads."""
    latent = {**TEXT, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = read_model("--model", folder(tmp_path / "a", **{**latent, "model_type": "deepseek_v2"}))
    assert (model.mla, model.head_size, model.kv_heads) == (True, 576, 1)
    model = read_model("--model", folder(tmp_path / "b", **{**latent, "model_type": "minicpm3"}))
    assert (model.mla, model.head_size, model.kv_heads) == (False, 64, 8)
    assert not read_model("--model", folder(tmp_path / "c", **{**TEXT, "model_type": "deepseek_v2"})).mla


def test_flashinfer_is_not_selected_for_unsupported_head_size():
    """On a B200, where it comes first, heads of 96 run on FlashAttention."""
    b200 = find_environment("b200")
    found = {name: resolve([name], b200)[0].backend for name in DENSE}
    assert found["microsoft/Phi-3-mini-4k-instruct"] == "FLASH_ATTN"
    assert found["microsoft/phi-4"] == found["facebook/opt-125m"] == "FLASHINFER"
    asked = AttentionChoice(capability=(10, 0), model=read_model("m", "microsoft/Phi-3-mini-4k-instruct"))
    with pytest.raises(FlagError, match="heads of 96"):
        asked.choose("--attention-backend", "FLASHINFER")


@pytest.mark.parametrize(
    ("machine", "chosen"), [("h100", "fa3"), ("b200", "trtllm_mha"), ("a100", "triton"), ("l40s", "triton")]
)
def test_sglang_selects_a_backend_with_attention_sinks(machine, chosen):
    """gpt-oss never runs on FlashInfer, which SGLang refuses."""
    environment = find_environment(machine)
    name = ["--model-path", "openai/gpt-oss-20b"]
    found = {s.name: s.value for s in emulate("sglang", name, environment).settings}
    assert found["attention_backend"] == chosen
    with pytest.raises(FlagError, match="GptOssForCausalLM"):
        emulate("sglang", [*name, "--attention-backend", "flashinfer"], environment)
    for half in ("--prefill-attention-backend", "--decode-attention-backend"):
        with pytest.raises(FlagError, match="both attention backends"):
            emulate("sglang", [*name, half, "triton"], environment)


@pytest.mark.parametrize("engine", sorted(MODEL))
@pytest.mark.parametrize("text", [None, "{", "[]", '{"num_attention_heads": {}, "max_position_embeddings": []}'])
def test_broken_model_folder_is_refused(tmp_path, engine, text):
    """Nothing falls back to an assumption where a folder is named."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert problem(engine, tmp_path).path == (MODEL[engine],)


def test_assumed_facts_describe_a_dense_decoder():
    """What the note says is what the emulation does."""
    model = read_model("--model", "some/model")
    assert (model.known, model.mla, model.experts, model.max_len) == (False, False, 0, ASSUMED_LENGTH)
    assert f"{ASSUMED_LENGTH} tokens" in emulate("vllm", ["some/model"], H100).assumptions[0]


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "--model"), ("sglang", "--model-path")])
def test_plan_file_as_model_is_refused(engine, flag):
    """A file that is given to ``check --engine`` by mistake is refused, whether it is there or not."""
    with pytest.raises(FlagError, match="checked without --engine"):
        emulate(engine, [flag, "plans/none.yaml"], find_environment("h100"))


@pytest.mark.parametrize("name", sorted(MODEL))
def test_a_configuration_that_is_nested_too_deep_is_an_error(tmp_path, name):
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(FlagError, match="nested too deep"):
        emulate(name, [MODEL[name], str(tmp_path)], H100)
