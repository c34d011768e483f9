"""What vLLM's dtypes, KV cache and models do to backends and graphs, and what is refused as not emulated."""

import json
import re
import shlex
from contextlib import nullcontext

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import checkpoints
from capture_planner.engines.deployments import walk
from capture_planner.engines.verdict import is_eager, is_eager_for_any_model
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records.batch import Kind
from capture_planner_vllm.emulation.attention import EMULATED, AttentionChoice
from capture_planner_vllm.emulation.engine import emulate, resolve
from capture_planner_vllm.emulation.model import ModelFacts
from capture_planner_vllm.emulation.settings import DrafterKind
from capture_planner_vllm.emulation.tables import flag_table, names, rules
from engines.generators.vllm import answer_of
from engines.generators.vllm_models import MODELS, write_models

H100, H200 = find_environment("h100"), find_environment("h200")
ATTENTIONS = st.builds(
    AttentionChoice,
    capability=st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]),
    model=st.builds(
        ModelFacts,
        name=st.just("m"),
        heads=st.just(32),
        kv_heads=st.sampled_from([1, 8]),
        head_size=st.sampled_from([64, 80, 128, 256, 512, 576]),
        mla=st.booleans(),
        sinks=st.booleans(),
        recurrent=st.booleans(),
        chunked=st.booleans(),
    ),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    cache=st.sampled_from(["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8_per_token_head"]),
    block=st.sampled_from([None, 8, 16, 32, 64, 128]),
    causal=st.booleans(),
    decode_context=st.sampled_from([1, 2]),
)


def resolved(*words, environment=H100):
    """Return the settings of a model that is a name only."""
    return resolve(["some/model", *words], environment)[0]


def folder(tmp_path, **config):
    """Return the words for a model with that config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["dense"], **config}))
    return str(tmp_path)


@given(ATTENTIONS)
def test_chosen_backend_is_usable(attention):
    """What is chosen can run, every other one that is named runs or is refused, and none is left out."""
    usable = [backend for backend in EMULATED if attention.unusable(backend) is None]
    with pytest.raises(FlagError) if not usable else nullcontext():
        assert attention.choose("--attention-backend", None) in usable
    assert {attention.choose("--attention-backend", backend) for backend in usable} == set(usable)


@given(ATTENTIONS, st.sampled_from(EMULATED))
def test_recurrent_and_chunked_layers_lower_backend_support(attention, backend):
    """Recurrent layers take mixed batches away, and attention in chunks takes everything."""
    support = attention.support(backend)
    if attention.model.chunked:
        assert support is GraphSupport.NEVER
    elif attention.model.recurrent:
        assert support <= GraphSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("environment", "cache", "backend"),
    [
        ("h100", "fp8", "FLASH_ATTN"),
        ("h100", "fp8_e5m2", "FLASHINFER"),
        ("a100", "fp8", "FLASHINFER"),
        ("a100", "auto", "FLASH_ATTN"),
        ("t4", "fp8", "TRITON_ATTN"),
        ("b200", "nvfp4", "FLASHINFER"),
        ("h100", "int8_per_token_head", "TRITON_ATTN"),
    ],
)
def test_kv_cache_dtype_selects_backend(environment, cache, backend):
    """A KV cache that a backend cannot read goes to the next in line."""
    found = resolved("--kv-cache-dtype", cache, environment=find_environment(environment))
    assert found.backend == backend


@pytest.mark.parametrize("cache", names()["cache_dtypes"])
def test_every_kv_cache_dtype_is_handled(cache):
    """Each of vLLM's KV cache dtypes leads to a backend or to a refusal that names a flag."""
    try:
        found = resolved("--kv-cache-dtype", cache).backend
    except FlagError as error:
        found = error.problems[0].path[0]
    assert found in (*EMULATED, "--kv-cache-dtype", "--attention-backend")


def test_block_size_selects_mla_backend():
    """MLA's backends have blocks of their own, and the next one in line takes what the first cannot."""
    mla = ModelFacts(name="m", mla=True, head_size=576)
    for block, backend in ((None, "FLASHINFER_MLA"), (128, "FLASHINFER_MLA"), (16, "TRITON_MLA")):
        attention = AttentionChoice(capability=(10, 0), model=mla, block=block)
        assert attention.choose("--attention-backend", None) == backend


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-cache-dtype", "float16"],
        ["--kv-cache-dtype", "fp4"],
        ["--dtype", "float32", "--attention-backend", "FLASH_ATTN"],
        ["--block-size", "0"],
        ["--block-size", "24"],
        ["--kv-cache-dtype", "fp8_e5m2", "--attention-backend", "FLASH_ATTN"],
    ],
)
def test_invalid_dtypes_and_blocks_are_refused(words):
    """Dtypes, blocks and methods that nothing here takes are refused."""
    with pytest.raises(FlagError):
        resolved(*words)


@pytest.mark.parametrize("name", sorted(set(names()["decoders"]) - set(names()["breakable_architectures"])))
def test_every_decoder_is_emulated(name, tmp_path):
    """Each architecture that counts as a decoder is answered."""
    assert resolve([folder(tmp_path, architectures=[name])], H100)[0].mode is GraphMode.FULL_AND_PIECEWISE


REAL_LINES = {
    "deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --tokenizer-mode deepseek_v32": "FLASH_ATTN_MLA_SPARSE",
    "zai-org/GLM-5-FP8 -tp 8 --kv-cache-dtype fp8 -sc.method=mtp -sc.num_speculative_tokens=3": "FLASHMLA_SPARSE",
    "XiaomiMiMo/MiMo-V2-Flash -dp 2 -tp 4 --enable-expert-parallel": "FLASH_ATTN_DIFFKV",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8 -sc.method=mtp -sc.num_speculative_tokens=3": "FLASH_ATTN",
    "Qwen/Qwen3.5-9B --disable-sliding-window --enforce-eager": "FLASH_ATTN",
}


@pytest.mark.parametrize("line", REAL_LINES)
def test_lines_that_people_run_are_answered(line):
    """Sparse MLA, heads of two sizes, MTP of Nemotron-H, and a window that is not there: once all refused."""
    found = emulate(line.split(), H200)
    assert next(each.value for each in found.settings if each.name == "attention_backend") == REAL_LINES[line]
    eager = "--enforce-eager" in line
    assert found.modes[Role.TARGET] is (GraphMode.NONE if eager else GraphMode.FULL_AND_PIECEWISE)


PLACE = r"vllm/\S+.* decides.*; .*CAPTURE_PLANNER_OBSERVE=FOLDER"


def test_a_refusal_names_where_vllm_decides_and_how_to_see_it():
    """What is not emulated leads on: to the file of the release, and to an observation."""
    with pytest.raises(NotEmulated, match=PLACE):
        emulate(["--use-replayssm"], H200)


@pytest.mark.parametrize("name", ["zai-org/GLM-5.3-Flash", "google/gemma-4-31B-it", "moonshotai/Kimi-K3"])
def test_flags_alone_answer_for_a_model_that_is_not_emulated(name):
    """The answer says so, names where vLLM decides, and leads on to an observation."""
    emulation = emulate([name], H200)
    assert name in emulation.by_flags
    (sentence,) = emulation.assumptions
    assert re.search(PLACE, sentence)
    assert sentence.startswith(emulation.by_flags)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V9", "a/GLM-5.9-FP8", "/m/kimi_k9", "b/c-30B-A3B", "d/e-8x7B"])
def test_names_of_other_families_are_no_dense_decoders(name):
    """Such a name says nothing of attention and experts, so that neither is assumed nor refused."""
    emulation = emulate([name, "--enable-expert-parallel", "-tp", "3"], H200)
    settings = {each.name: each for each in emulation.settings}
    assert settings["attention_backend"].value == "by the model"
    assert "unknown here" in emulation.by_flags


def test_names_of_gpt_oss_have_its_largest_size():
    """Whatever follows in the name, vLLM raises the largest size of the family."""
    emulation = emulate(["openai/gpt-oss-safeguard-20b"], H100)
    assert emulation.by_flags
    assert emulation.sizes[-1] == emulate(["openai/gpt-oss-20b"], H100).sizes[-1] == 1024


FLAG_LINES = st.lists(
    st.sampled_from(
        [
            *("--max-num-seqs=96", "--max-num-batched-tokens=512", "-O1", "--enforce-eager", "-dp=2", "-tp=2"),
            *("-cc.cudagraph_mode=FULL", "-cc.cudagraph_mode=FULL_DECODE_ONLY", "--max-cudagraph-capture-size=64"),
            *(
                "--cudagraph-capture-sizes 1 8 48",
                "--enable-lora",
                "--kv-cache-dtype=fp8",
                "-cc.mode=0",
                "--enable-dbo",
            ),
            *("--enable-dbo", "--attention-backend=TRITON_ATTN", "-sc.method=ngram -sc.num_speculative_tokens=3"),
        ]
    ),
    unique=True,
    max_size=5,
)
PLAIN_MODELS = sorted({c["architectures"][0]: n for n, c in checkpoints.known().items() if "gpt-oss" not in n}.values())


@given(st.sampled_from(PLAIN_MODELS), FLAG_LINES, st.sampled_from(["a100", "h100", "b200", "rtx-4090"]))
def test_flags_alone_bound_every_model(name, lines, machine):
    """For any model the limits and sizes are those of the flags, and what has no graph by the flags has none."""
    flags = ["--max-model-len=8192", *shlex.split(" ".join(lines))]
    try:
        exact = emulate([name, *flags], find_environment(machine))
    except FlagError:
        reject()  # the model cannot have it
    bound = emulate(["a/b-1B-A1B", *flags], find_environment(machine))
    assert bound.by_flags
    assert bound.limits == exact.limits
    assert set(exact.sizes) <= set(bound.sizes)
    without = {each.batch for each in walk(bound) if is_eager_for_any_model(each)}
    assert all(is_eager(each) for each in walk(exact) if each.batch in without)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": ["DeepseekV4ForCausalLM"], "index_topk": 512},
        {"architectures": ["CohereAsrForConditionalGeneration"]},
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        {"index_topk": 2048},
        {"rswa_window": 128},
    ],
)
def test_unemulated_decoders_are_answered_by_flags_alone(config, tmp_path):
    """A decoder whose graphs are not known has the flags' answer, and never a dense decoder's."""
    emulation = emulate([folder(tmp_path, **config)], H100)
    assert emulation.by_flags
    assert emulation.assumptions


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["BertModel"]},
        {"architectures": ["DiffusionGemmaForBlockDiffusion"]},
        {"architectures": ["LongcatFlashNgramForCausalLM"]},
        {"architectures": ["Unheard"]},
        {"is_causal": False},
    ],
)
def test_models_with_limits_of_their_own_are_refused(config, tmp_path):
    """What decodes no text, or whose rules set sizes and limits, has no answer by the flags."""
    with pytest.raises(NotEmulated):
        resolve([folder(tmp_path, **config)], H100)


def test_recurrent_layers_have_no_mixed_graphs(tmp_path):
    """FULL becomes FULL_AND_PIECEWISE for a hybrid model, and stays with attention layers alone."""
    write_models(tmp_path)
    words = ["-cc.cudagraph_mode=FULL"]
    hybrid = resolve([str(tmp_path / "hybrid"), *words], H100)[0]
    dense = resolve([str(tmp_path / "dense"), *words], H100)[0]
    assert (hybrid.mode, dense.mode) == (GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL)


def test_chunked_attention_has_no_full_graphs(tmp_path):
    """Llama 4 runs piecewise."""
    write_models(tmp_path)
    assert resolve([str(tmp_path / "chunked")], H100)[0].mode is GraphMode.PIECEWISE


@pytest.mark.parametrize("flag", sorted(rules()["unemulated_flags"]))
def test_unemulated_flags_are_refused(flag):
    """Each such flag is vLLM's, takes its plain value, and is refused with another."""
    entry = flag_table()[flag]
    name = entry["names"][0]
    odd = {"runner": "draft", "prefill_context_parallel_size": "2"}.get(flag, "{}" if "json" in entry["kind"] else "x")
    words = [name] if entry["kind"] == "switch" else [name, '{"a": 1}' if "object" in entry["kind"] else odd]
    with pytest.raises(NotEmulated):
        resolved(*words)


@pytest.mark.parametrize(
    "word",
    [
        "-cc.cudagraph_mm_encoder=true",
        '-ac.backend_per_kind={"full_attention": "FLASHINFER"}',
        "-ac.use_non_causal=true",
        "--all2all-backend=moonep",
        "--profiler-config.profiler=proton",
    ],
)
def test_unemulated_json_parts_are_refused(word):
    """The same holds for parts of JSON flags and for single values."""
    with pytest.raises(NotEmulated):
        resolved(word)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "draft_model"])
def test_drafters_widen_target_decodes(method):
    """Whoever drafts K tokens, the target's decodes have 1 + K, and the walk meets them."""
    config = {"method": method, "num_speculative_tokens": 3, "model": "a/b"}
    found = emulate(["m", "--max-num-seqs", "8", "-sc", json.dumps(config)], H100)
    asked = [one.batch for one in walk(found) if one.batch.kind is Kind.DECODE and one.batch.role is Role.TARGET]
    assert {batch.query_len for batch in asked} == {4}
    assert [batch.num_reqs for batch in asked][:8] == [*range(1, 9)]


def test_dflash_on_v1_is_not_emulated():
    """The error says that the emulation stops, not vLLM, with asynchronous scheduling too."""
    config = json.dumps({"method": "dflash", "model": "a/b", "num_speculative_tokens": 4})
    with pytest.raises(NotEmulated, match="dflash on model runner V1"):
        resolve(["VLLM_USE_V2_MODEL_RUNNER=0", "m", "--async-scheduling", "-sc", config], H100)


@pytest.mark.parametrize(("method", "width"), [("dflash", 8), ("dspark", 7)])
def test_parallel_drafters_run_one_pass(method, width):
    """DFlash drafts 1 + K tokens a request in one pass, DSpark K; model runner V1 is refused."""
    config = json.dumps({"method": method, "model": "a/b", "num_speculative_tokens": 7})
    found = resolved("-sc", config)
    assert (found.drafter, found.draft_query_len) == (DrafterKind.PARALLEL, width)
    draft = emulate(["m", "-sc", config], H100).managers[1]
    assert {graph.entry.query_len for graph in draft.graphs} == {width}
    with pytest.raises(FlagError):
        resolve(["VLLM_USE_V2_MODEL_RUNNER=0", "m", "-sc", config], H100)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("most", [1, 8])
def test_walk_includes_passes_of_parallel_drafters(method, tokens, most):
    """Every pass of a parallel drafter is asked for in its own width, and its graphs answer."""
    config = {"method": method, "model": "a/b", "num_speculative_tokens": tokens}
    found = emulate(["m", "--max-num-seqs", str(most), "-sc", json.dumps(config)], H100)
    width = tokens + (method == "dflash")
    asked = [one for one in walk(found) if one.batch.role is Role.DRAFT_DECODE]
    assert [one.batch.num_tokens for one in asked] == [reqs * width for reqs in range(1, most + 1)]
    assert all(one.answer.entry == one.best is not None for one in asked)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "extract_hidden_states"},
        {"method": "dspark", "model": "{models}/dense"},
        {"method": "dspark", "model": "{models}/dflash"},
    ],
)
def test_unemulated_drafters_are_refused(config, tmp_path):
    """A method or a draft whose graphs are not known says so."""
    write_models(tmp_path)
    words = ["-sc", json.dumps({**config, "num_speculative_tokens": 1}).replace("{models}", str(tmp_path))]
    with pytest.raises(NotEmulated):
        resolved(*words)


@pytest.mark.parametrize(("tensor", "own", "mode"), [(8, 8, "FULL"), (8, 1, "PIECEWISE"), (4, 1, "FULL")])
def test_independent_draft_with_own_tensor_parallel_size(tensor, own, mode, tmp_path):
    """FlashInfer sees a rank's heads of the target beside all KV heads of a draft that is not split."""
    write_models(tmp_path)
    draft = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2, "draft_tensor_parallel_size": own}
    words = [str(tmp_path / "dense"), "-tp", str(tensor), "-sc", json.dumps(draft)]
    words += ["--attention-backend", "FLASHINFER"]
    assert resolve(words, H100)[0].mode.decode_mode.value == mode
    with pytest.raises(FlagError) if tensor != own else nullcontext():
        resolve(["VLLM_USE_V2_MODEL_RUNNER=0", *words], H100)


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8"])
def test_draft_with_own_kv_cache_dtype_has_blocks_of_16(cache, tmp_path):
    """Its backend must take the default block, as if it were asked for, where the target's need not."""
    write_models(tmp_path)
    draft = {"method": "mtp", "num_speculative_tokens": 3}
    words = [str(tmp_path / "mla"), "--attention-backend", "FLASHMLA", "-sc"]
    assert resolve([*words, json.dumps(draft)], H100)[0].backend == "FLASHMLA"
    own = json.dumps({**draft, "kv_cache_dtype": cache})
    with pytest.raises(FlagError, match="blocks are multiples of 64, not 16"):
        resolve([*words, own], H100)
    assert resolve([*words, own, "--block-size", "64"], H100)[0].backend == "FLASHMLA"


def test_schedule_rule_applies_to_every_configuration_copy(tmp_path):
    """Under V1, an encoder-decoder's last copy, for an independent draft, loses FULL to the schedule again."""
    write_models(tmp_path)
    draft = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2, "parallel_drafting": True}
    draft["num_speculative_tokens_per_batch_size"] = [[1, 64, 1], [65, 65, 3]]
    words = [str(tmp_path / "whisper"), "--max-num-batched-tokens", "1.5k", "-sc", json.dumps(draft)]
    assert resolve(words, find_environment("b200"))[0].configured_mode is GraphMode.PIECEWISE


@pytest.mark.parametrize(("cache", "mode"), [(None, "FULL_DECODE_ONLY"), ("auto", "PIECEWISE")])
def test_configuration_copies_rewrite_the_mode(cache, mode, tmp_path):
    """A pooling encoder-decoder's mode goes to and fro: under V1 a draft makes a copy, and one for its cache."""
    write_models(tmp_path)
    draft = {"method": "eagle3", "model": str(tmp_path / "eagle3"), "num_speculative_tokens": 2}
    draft |= {"kv_cache_dtype": cache} if cache else {}
    words = [str(tmp_path / "whisper"), "--runner", "pooling", "-sc", json.dumps(draft)]
    words = ["VLLM_USE_V2_MODEL_RUNNER=0", *words]
    assert resolve(words, find_environment("b200"))[0].configured_mode.value == mode


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 8192},
        {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 512},
    ],
)
def test_overridden_fields_are_as_if_the_file_had_them(tmp_path, fields) -> None:
    """``--hf-overrides`` of lengths and classes; other fields are not emulated."""
    places = [tmp_path / "own", tmp_path / "other"]
    for place in places:
        place.mkdir()
    own, other = folder(places[0]), folder(places[1], **fields)
    overridden = resolve([own, "--hf-overrides", json.dumps(fields)], H100)[0]
    assert answer_of(overridden) == answer_of(resolve([other], H100)[0])
    assert overridden.max_model_len != resolve([own], H100)[0].max_model_len
    with pytest.raises(NotEmulated, match="hf-overrides"):
        resolve([own, "--hf-overrides", json.dumps(fields | {"num_experts": 8})], H100)


def test_a_flag_may_name_the_method_that_the_algorithm_of_modelopt_means() -> None:
    """NVFP4 is loaded as modelopt_fp4, whether a flag says so or not; as another method it is not."""
    name, b200 = "nvidia/Qwen3.5-122B-A10B-NVFP4", find_environment("b200")
    assert answer_of(resolve([name, "--quantization", "modelopt_fp4"], b200)[0]) == answer_of(resolve([name], b200)[0])
    with pytest.raises(NotEmulated, match="loading it as modelopt is"):
        resolve([name, "--quantization", "modelopt"], b200)
