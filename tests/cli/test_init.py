"""``init``: specs from published configurations; what they do not state is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.planning.from_config import ASSUMED, spec_from_config
from capture_planner.records.model import DataType, Latent, Recurrent
from capture_planner.records.spec import GroupSpec, Spec
from support.commands import Run

Config = dict[str, Any]

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960, "max_window_layers": 36, "sliding_window": None,
    "use_sliding_window": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 32768, "num_local_experts": 8, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880,
    "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8, "vocab_size": 201088,
    "max_position_embeddings": 131072, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024,
        "sliding_window_pattern": 6, "vocab_size": 262208, "max_position_embeddings": 131072,
    },
}  # fmt: skip
QWEN3_NEXT: Config = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16", "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
PUBLISHED = {
    "llama": LLAMA, "qwen3": QWEN3, "mixtral": MIXTRAL, "deepseek-v3": DEEPSEEK_V3, "gpt-oss": GPT_OSS,
    "gemma3": GEMMA3, "qwen3-next": QWEN3_NEXT,
}  # fmt: skip


def written(config: Any, name: str = "config.json") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config), "utf-8")
    return path


def spec_of(config: Config) -> Spec:
    return codec.loads(spec_from_config(written(config), "m"), Spec)


@pytest.mark.parametrize("name", PUBLISHED)
def test_init_writes_a_spec_that_plan_accepts(run: Run, name: str) -> None:
    """Also with the commented speculative block switched on."""
    written(PUBLISHED[name], f"{name}/config.json")
    assert run("init", name, "-o", "spec.yaml").code == 0
    text = Path("spec.yaml").read_text("utf-8")
    assert run("plan", "spec.yaml", "-e", "h100", "-o", "plan.yaml").code == 0
    assert codec.load_plan("plan.yaml").model.name == name
    Path("drafting.yaml").write_text(text.replace("# speculative:", "speculative:"), "utf-8")
    ran = run("plan", "drafting.yaml", "-e", "h100", "-o", "drafting.plan.yaml")
    assert ran.code == 0, ran.err
    assert Role.DRAFT_DECODE in [role.role for role in codec.load_plan("drafting.plan.yaml").roles]


@pytest.mark.usefixtures("run")
def test_init_fills_the_model() -> None:
    model = spec_of(QWEN3).model
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (36, 32, 8, 128)
    assert (model.max_model_len, model.hidden_size, model.vocab_size) == (40960, 4096, 151936)
    assert (model.dtype, model.latent, model.sinks) == (DataType.BFLOAT16, None, False)
    assert spec_of(LLAMA).model.head_dim == 128
    assert spec_of(LLAMA | {"torch_dtype": "float16"}).model.dtype is DataType.FLOAT16
    assert spec_of(DEEPSEEK_V3).model.latent == Latent(kv_lora_rank=512, rope_head_dim=64)
    assert spec_of(DEEPSEEK_V3).model.head_dim == 128
    assert spec_of(GPT_OSS).model.sinks
    for config in (DEEPSEEK_V3, QWEN3):
        with_layer, without = (
            spec_from_config(written(config | {"num_nextn_predict_layers": number}), "m") for number in (1, 0)
        )
        assert ("method: mtp" in with_layer, "method: mtp" in without) == (True, False)
    assert spec_of(LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}).model.mrope


@pytest.mark.parametrize(
    ("config", "sliding", "window"),
    [
        (GPT_OSS, 12, 128),
        (GEMMA3, 52, 1024),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, 8, 4096),
    ],
)
@pytest.mark.usefixtures("run")
def test_init_writes_attention_groups_for_sliding_windows(config: Config, sliding: int, window: int) -> None:
    spec = spec_of(config)
    full, groups = spec.model.num_layers - sliding, spec.roles.target.groups
    assert groups == (GroupSpec(name="full", layers=full), GroupSpec(name="sliding", layers=sliding, window=window))


@pytest.mark.usefixtures("run")
def test_init_knows_the_states_of_gated_delta_nets() -> None:
    """By the interval of full attention, or by the kinds of the layers; what is assumed of the state is marked."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    for config in (QWEN3_NEXT, QWEN3_NEXT | {"layer_types": kinds}):
        recurrent = spec_of(config).model.recurrent
        assert recurrent == Recurrent(layers=36, state=4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))
    text = spec_from_config(Path("config.json"), "m")
    assert "recurrent: {layers: 36, state: 2146304}  # bytes, not in the configuration; assumed: float32, the" in text


@pytest.mark.usefixtures("run")
def test_init_marks_every_assumption() -> None:
    """A head dimension, a dtype and KV heads that follow the usual default; layers of a window without a list."""
    text = spec_from_config(written({k: v for k, v in GPT_OSS.items() if k != "layer_types"}), "m")
    assert f"dtype: bfloat16  # {ASSUMED}" in text
    assert "sliding_window 128, but not which layers use it" in text
    assert codec.loads(text, Spec).roles.target.groups == ()
    bare = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    text = spec_from_config(written(bare), "m")
    assert f"num_kv_heads: 32  # {ASSUMED} to be num_heads" in text
    assert f"head_dim: 128  # {ASSUMED} to be hidden_size / num_heads" in text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({k: v for k, v in LLAMA.items() if k != key}, f"the configuration has no {key}")
            for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")
        ),
        ({k: v for k, v in DEEPSEEK_V3.items() if k != "qk_rope_head_dim"}, "has no qk_rope_head_dim"),
        (LLAMA | {"num_hidden_layers": "32"}, 'num_hidden_layers: expected a whole number of at least 1, got "32"'),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number of at least 1, got 0"),
        (LLAMA | {"num_key_value_heads": 5}, "num_heads: 32 query heads do not divide"),
        (
            LLAMA | {"layer_types": ["linear_attention"] * 32},
            "the configuration has no linear_num_key_heads; add it, or write the spec by hand",
        ),
        (LLAMA | {"layer_types": ["full_attention", "other"]}, "layer_types: a spec cannot describe other"),
        (LLAMA | {"mamba_d_state": 16}, "mamba_d_state: recurrent layers"),
        (LLAMA | {"is_encoder_decoder": True}, "an encoder-decoder model"),
        ([], "expected an object"),
    ],
)
def test_init_names_what_a_configuration_lacks(run: Run, config: Any, message: str) -> None:
    written(config)
    ran = run("init", "config.json", "-o", "spec.yaml")
    assert (ran.code, Path("spec.yaml").exists()) == (1, False)
    assert ran.err.startswith("error: config.json: ")
    assert message in ran.err


def test_init_takes_models_of_one_layer_with_one_head_of_keys(run: Run) -> None:
    """As multi-query attention has."""
    written(LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": 1})
    assert run("init", "config.json", "-o", "spec.yaml").code == 0
    assert "num_layers: 1" in Path("spec.yaml").read_text("utf-8")


def test_a_configuration_is_no_spec(run: Run) -> None:
    """One error, with the command that makes a spec of it."""
    Path("config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}', "utf-8")
    ran = run("plan", "config.json", "-e", "h100")
    assert ran.err.count("error: ") == 1
    assert ran.err.endswith("not a spec; write a spec from it first: capture-planner init config.json\n")


def test_init_refuses_what_is_no_configuration(run: Run) -> None:
    Path("text.json").write_text("layers: 3", "utf-8")
    assert "give a model's config.json" in run("init", "text.json").err
    Path("empty").mkdir()
    assert "error: empty: the folder has no config.json\n" in run("init", "empty").err
    assert "error: nowhere/here/config.json: no such file or folder" in run("init", "nowhere/here/config.json").err


def test_init_reads_the_local_cache_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: None)
    ran = run("init", "acme/model")
    assert ran.code == 1
    assert "not in the local Hugging Face cache" in ran.err
    assert "or give a config.json" in ran.err
    cached = str(written(LLAMA, "cache/config.json").resolve())
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: cached)
    assert codec.loads(run("init", "acme/model").out, Spec).model.name == "acme/model"


def test_init_says_that_the_cache_needs_huggingface_hub(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed" in run("init", "acme/model").err


def test_init_overwrites_with_force_only(run: Run) -> None:
    written(LLAMA)
    Path("spec.yaml").write_text("mine\n", "utf-8")
    ran = run("init", "config.json", "-o", "spec.yaml")
    assert (ran.code, Path("spec.yaml").read_text("utf-8")) == (1, "mine\n")
    assert "spec.yaml already exists; name another file, or overwrite it with --force" in ran.err
    assert run("init", "config.json", "-o", "spec.yaml", "--force").code == 0
    assert codec.load_spec("spec.yaml").model.num_layers == 32


KEYS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "sliding_window", "sliding_window_pattern", "max_window_layers"),
    *("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "use_sliding_window", "torch_dtype"),
    *("num_nextn_predict_layers", "rope_scaling", "text_config"),
)
values = st.sampled_from((None, 0, 1, 2, 8, 64, 4096, 1 << 21, "8", 8.0, True, [], {}))
kinds = st.lists(st.sampled_from(("full_attention", "sliding_attention")), max_size=3)
configs = st.dictionaries(st.sampled_from(KEYS), values, max_size=4) | st.fixed_dictionaries({"layer_types": kinds})


@given(config=st.sampled_from(list(PUBLISHED.values())), changes=configs, name=st.text(min_size=1, max_size=20))
def test_every_spec_that_init_writes_loads(
    tmp_path_factory: pytest.TempPathFactory, config: Config, changes: Config, name: str
) -> None:
    """Any other configuration is an error that names the file."""
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(config | changes), "utf-8")
    error, text = "", None
    try:
        text = spec_from_config(path, name)
    except CapturePlannerError as raised:
        error = str(raised)
    assert str(path) in error if text is None else codec.loads(text, Spec).model.name == name
