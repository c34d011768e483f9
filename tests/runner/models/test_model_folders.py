"""Model folders that are hostile or broken: nothing outside of them is read, no pickle is, and each error is a line."""

import json
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from capture_planner.errors import RunError
from capture_planner.records._base import replace
from capture_planner_runner.models import loading
from capture_planner_runner.models.huggingface import load_target
from support.model_families import FAMILIES

CPU = torch.device("cpu")
SHARD = "model-00001-of-00002.safetensors"


class AuditTrail:
    """What this thread opens while it is watched, from an audit hook; safetensors opens files in Rust, so those too."""

    def __init__(self):
        self.thread, self.paths = None, []
        sys.addaudithook(self.hook)

    def hook(self, event, arguments):
        if event == "open" and threading.get_ident() == self.thread:
            self.paths.append(str(arguments[0]))


OPENED = AuditTrail()


@pytest.fixture
def opened(monkeypatch):
    """Return the list of what is opened from now on."""
    own = loading.load_file
    monkeypatch.setattr(loading, "load_file", lambda file: (OPENED.paths.append(str(file)), own(file))[1])
    OPENED.paths.clear()
    OPENED.thread = threading.get_ident()
    yield OPENED.paths
    OPENED.thread = None


@pytest.fixture(scope="module")
def tensors():
    """The weights of a tiny Llama."""
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32).state_dict()


def write(folder, tensors, other):
    """Write half of the weights as a shard, and an index that has the rest in ``other``."""
    folder.mkdir(exist_ok=True)
    FAMILIES["llama"]().save_pretrained(folder)
    names = sorted(tensors)
    half = names[: len(names) // 2]
    save_file({name: tensors[name] for name in half}, folder / SHARD)
    weights = dict.fromkeys(half, SHARD) | dict.fromkeys(set(names) - set(half), other)
    (folder / loading.INDEX).write_text(json.dumps({"weight_map": weights}))
    return {name: tensors[name] for name in names if name not in half}


def refused(folder, shape):
    """Return the one line that a folder is refused with."""
    with pytest.raises(RunError) as caught:
        load_target(folder, shape, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["0.bin", "0.dat", "../outside/s.safetensors", "ABSOLUTE", "/etc/passwd", "..", ""])
def test_an_index_never_leaves_its_folder_and_names_safetensors_only(name, tmp_path, tiny, tensors, opened):
    """Whatever lies there: the name alone refuses it, before anything is opened."""
    outside = tmp_path / "outside" / "s.safetensors"
    outside.parent.mkdir()
    folder = tmp_path / "model"
    rest = write(folder, tensors, str(outside) if name == "ABSOLUTE" else name)
    save_file(rest, outside)
    torch.save(rest, folder / "0.bin")
    torch.save(rest, folder / "0.dat")
    opened.clear()
    assert "only safetensors files of the same folder are read" in refused(folder, tiny)
    assert not {path for path in opened if path.endswith((".safetensors", ".bin", ".dat", "passwd"))}


def test_shards_that_an_index_names_are_all_there_or_named(tmp_path, tiny, tensors):
    """An interrupted download is no model with random weights."""
    rest = write(tmp_path, tensors, "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors of model.safetensors.index.json are absent" in refused(tmp_path, tiny)
    (tmp_path / SHARD).unlink()
    assert f"{SHARD}, model-00002-of-00002.safetensors of" in refused(tmp_path, tiny)
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    save_file({name: tensors[name] for name in set(tensors) - set(rest)}, tmp_path / SHARD)
    model = load_target(tmp_path, tiny, device=CPU, dtype=torch.float32)
    loaded = {name: getattr(module, attribute) for name, module, attribute in model.weights()}
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(index, tmp_path, tiny):
    """It says that there are weights: none are made up."""
    FAMILIES["llama"]().save_pretrained(tmp_path)
    (tmp_path / loading.INDEX).write_text(index)
    assert loading.INDEX in refused(tmp_path, tiny)


def test_files_that_lead_elsewhere_are_not_followed(tmp_path, tiny, tensors, opened):
    """An adapter's base model, a file of weights in config.json, and code."""
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "model"
    folder.mkdir()
    FAMILIES["llama"]().save_pretrained(folder)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config |= {"transformers_weights": "../outside/s.safetensors", "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise AssertionError('code of the folder ran')")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(outside)}))
    opened.clear()
    load_target(folder, tiny, device=CPU, dtype=torch.float32)
    assert not [path for path in opened if str(outside) in path or path.endswith("own.py")]
    config["model_type"] = "own"
    (folder / "config.json").write_text(json.dumps(config))
    assert "code next to it, which is not run" in refused(folder, tiny)


NUMBERS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
ODD = st.sampled_from((0, -1, 1, 3, 7, 10**30, 0.5, None, True, "x", "../x", [], [1], {}, {"a": 1}))
KEYS = st.sampled_from(
    (*NUMBERS, "dtype", "layer_types", "pad_token_id", "rope_parameters", "hidden_act", "model_type")
)


@given(st.dictionaries(KEYS, ODD, max_size=3))
def test_an_odd_configuration_loads_or_is_refused_in_one_line(tmp_path_factory, tiny, changes):
    """Whatever transformers and torch raise for it."""
    folder = tmp_path_factory.mktemp("odd")
    config = json.loads(FAMILIES["llama"]().to_json_string())
    (folder / "config.json").write_text(json.dumps(config | changes))
    try:
        load_target(folder, tiny, device=CPU)
    except RunError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both ends are right


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_hidden_layers", 0, "supported: 1 to 1024"),
        ("num_hidden_layers", 10**9, "supported: 1 to 1024"),
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("dtype", "no-such-dtype", "no-such-dtype"),
        ("pad_token_id", 99999, "Padding_idx"),
    ],
)
def test_an_impossible_number_is_named(key, value, says, tmp_path, tiny):
    config = json.loads(FAMILIES["llama"]().to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(RunError, match=says):
        load_target(tmp_path, tiny, device=CPU)


def test_no_position_at_all_is_not_taken_for_an_unknown_length(tmp_path, tiny):
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads(FAMILIES["llama"]().to_json_string()) | {"max_position_embeddings": 0})
    )
    assert load_target(tmp_path, tiny, device=CPU).max_model_len == 0


def test_a_vocabulary_of_one_token_runs(tiny):
    assert load_target(None, replace(tiny, vocab_size=1), device=CPU).vocab_size == 1


def test_numbers_that_no_llama_has_are_refused_in_one_line(tiny):
    """Without a folder, no configuration is blamed."""
    says = refused(None, replace(tiny, num_heads=3, num_kv_heads=3, hidden_size=64))
    assert says.startswith(f"model {tiny.name}: no random model has its numbers")
