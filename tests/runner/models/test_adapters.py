"""LoRA adapters: what they add, row by row, and the folders that peft saves them in."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from capture_planner.errors import RunError
from capture_planner_runner.models import adapters as adapters_module
from capture_planner_runner.models.adapters import (
    CONFIG,
    WEIGHTS,
    Adapter,
    LoraAdapters,
    Product,
    load_adapters,
    random_adapters,
    read_adapter,
)

GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
LAYER = "model.layers.0.self_attn.q_proj"


@given(data=st.data(), rows=st.integers(1, 9), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_each_row_has_what_its_own_adapter_adds(data, rows, count, seed):
    """Adapters of any ranks; row by row in float64 it is ``up @ down`` of that adapter, and nothing without one."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    layer = torch.nn.Linear(5, 3, dtype=torch.float64)
    ranks = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    adapters = [Adapter(str(rank), {"layer": Product(normal(rank, 5), normal(3, rank))}) for rank in ranks]
    lanes = data.draw(st.lists(st.integers(-1, 3), min_size=rows, max_size=rows))
    active = data.draw(st.lists(st.integers(0, count), min_size=4, max_size=4))
    inputs = normal(1, rows, 5)
    loaded = LoraAdapters({"layer": layer}, adapters)
    with torch.no_grad():
        with loaded.applied(torch.tensor(lanes, dtype=torch.int32), torch.tensor(active, dtype=torch.int32)):
            found = layer(inputs)[0]
        plain = layer(inputs)[0]
        for row, lane in enumerate(lanes):
            adapter = active[lane] if lane >= 0 else 0
            expected = plain[row]
            if adapter:
                product = adapters[adapter - 1].products["layer"]
                expected = expected + product.up @ (product.down @ inputs[0, row])
            torch.testing.assert_close(found[row], expected)
        torch.testing.assert_close(layer(inputs)[0], plain, rtol=0, atol=0)


def write(folder, config=GOOD, tensors=None):
    """Write an adapter folder; tensors are by the layer and A or B."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    if tensors is None:
        tensors = {f"{LAYER}.lora_A": torch.ones(2, 24), f"{LAYER}.lora_B": torch.ones(32, 2)}
    save_file({f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(("changes", "scale"), [({}, 8 / 2), ({"use_rslora": True}, 8 / math.sqrt(2))])
def test_a_folder_is_scaled_as_its_configuration_says(tmp_path, target, changes, scale):
    """By alpha over the rank, or with rank-stabilised LoRA over its root."""
    adapter = read_adapter(write(tmp_path / "one", GOOD | changes))
    (product,) = adapter.products.values()
    torch.testing.assert_close(product.up @ product.down, torch.full((32, 24), 2 * scale))
    assert adapter.name == "adapter of one"
    assert load_adapters((tmp_path / "one",), target.linears()).names == (adapter.name,)


def test_every_problem_of_a_folder_is_reported_at_once(tmp_path, target):
    """Configuration and tensors; then those that the model has no layer for."""
    tensors = {"other.lora_A": torch.ones(3, 4), f"{LAYER}.lora_embedding_A": torch.ones(1)}
    config = GOOD | {"use_dora": True, "bias": "all", "init_lora_weights": "pissa", "rank_pattern": {"q": 4}}
    with pytest.raises(RunError) as caught:
        read_adapter(write(tmp_path, config, tensors))
    for part in (
        "use_dora is True",
        "bias is 'all'",
        "init_lora_weights is 'pissa', which changes the model's weights",
        "rank_pattern is {'q': 4}",
        "lora_embedding_A.weight is unexpected",
        "other has lora_A alone",
        "other.lora_A has shape [3, 4], expected finite numbers of rank 2",
    ):
        assert part in str(caught.value)
    tensors = {"lm_head.lora_A": torch.ones(2, 4), "lm_head.lora_B": torch.ones(9, 2)}
    tensors |= {f"{LAYER}.lora_A": torch.ones(2, 4), f"{LAYER}.lora_B": torch.ones(9, 2)}
    with pytest.raises(RunError) as caught:
        load_adapters((write(tmp_path, GOOD, tensors),), target.linears())
    assert "adds to lm_head, which is no linear layer of the decoder" in str(caught.value)
    assert f"{LAYER}.lora_A has shape [2, 4], expected [2, 24]" in str(caught.value)
    assert f"{LAYER}.lora_B has shape [9, 2], expected [32, 2]" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ({}, "peft_type is None, expected 'LORA'"),
        (GOOD | {"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        (GOOD | {"r": 0}, "r is 0, expected a whole number from 1"),
        (GOOD | {"r": True}, "r is True"),
        (GOOD | {"lora_alpha": "8"}, "lora_alpha is '8', expected a number"),
        (GOOD | {"lora_alpha": float("nan")}, "lora_alpha is nan"),
        (GOOD | {"r": 3}, "has shape [2, 24], expected finite numbers of rank 3"),
    ],
)
def test_a_configuration_that_is_not_of_plain_lora_is_refused(tmp_path, config, said):
    """With what is wrong in it."""
    with pytest.raises(RunError) as caught:
        read_adapter(write(tmp_path, config))
    assert said in str(caught.value)


def test_files_that_are_not_there_or_broken_are_refused(tmp_path):
    """And pickled weights are not read."""
    with pytest.raises(RunError, match=f"no {CONFIG} here"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(GOOD))
    with pytest.raises(RunError, match=f"no {WEIGHTS} here$"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(RunError, match="pickled weights are not read"):
        read_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(RunError, match="cannot be read as safetensors"):
        read_adapter(tmp_path)
    nan = {f"{LAYER}.lora_A": torch.full((2, 24), torch.nan), f"{LAYER}.lora_B": torch.ones(32, 2)}
    with pytest.raises(RunError, match="expected finite numbers"):
        read_adapter(write(tmp_path, GOOD, nan))


def test_nothing_but_the_two_files_is_read(tmp_path, monkeypatch):
    """The model that a configuration names is not looked for, whatever it says."""
    read = []
    own = adapters_module.read_tensors
    monkeypatch.setattr(adapters_module, "read_tensors", lambda files: own([*map(read.append, files), *files][1:]))
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    read_adapter(write(tmp_path, GOOD | {"base_model_name_or_path": "../../etc", "auto_mapping": {"x": "y"}}))
    assert read == [tmp_path / WEIGHTS]


def test_random_adapters_are_the_same_for_the_same_seed(target):
    """And leave the global generator alone."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, same = (random_adapters(target.linears(), 2, seed=3) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    name = next(iter(one[0].products))
    assert torch.equal(one[1].products[name].up, same[1].products[name].up)
    assert not torch.equal(one[0].products[name].up, one[1].products[name].up)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_peft_saved_gives_the_logits_of_peft(tmp_path, attention):
    """The package writes the folder and computes the answer; ours adds the same."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    from transformers import AutoModelForCausalLM, LlamaConfig

    from capture_planner.records.model import Model
    from capture_planner_runner.models.huggingface import load_target

    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        own = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        own.save_pretrained(tmp_path / "model")
        options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
        adapted = peft.get_peft_model(own, peft.LoraConfig(**options, use_rslora=True)).eval()
        adapted.save_pretrained(tmp_path / "adapter")
    assert len(load_file(tmp_path / "adapter" / WEIGHTS)) == 2 * 7 * 2
    shape = Model(name="m", num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8, max_model_len=64)
    target = load_target(tmp_path / "model", shape, device=torch.device("cpu"), dtype=torch.float64)
    adapters = load_adapters((tmp_path / "adapter",), target.linears())
    ids = torch.arange(9)
    lanes, active = torch.zeros(9, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with torch.no_grad(), adapters.applied(lanes, active):
        hidden, _ = target.forward(input_ids=ids, embeddings=None, positions=ids, attend=attention())
        expected = adapted(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(target.logits(hidden), expected, rtol=1e-5, atol=1e-6)
