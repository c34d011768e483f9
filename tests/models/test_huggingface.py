"""The Hugging Face adapter: what it computes is what the library computes by itself."""

import itertools
import json

import attrs
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from capture_planner.errors import RunError
from capture_planner.model import DataType, Latent, Model
from capture_planner.models.huggingface import differences, load_target
from capture_planner.models.interface import RefuseHostReads

CPU = torch.device("cpu")
VOCAB, LAYERS, WINDOW = 50, 3, 4
BASE = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    # Larger than the default, so that attention is far from uniform.
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MROPE = BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
WITHOUT_HEAD_DIM = {name: value for name, value in MROPE.items() if name != "head_dim"}
SEEING = {"depth": 1, "num_heads": 2, "hidden_size": 32}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "llama tied": lambda: transformers.LlamaConfig(**BASE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**BASE),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **BASE, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "granite": lambda: transformers.GraniteConfig(**BASE, logits_scaling=4.0, embedding_multiplier=2.0),
    "cohere": lambda: transformers.CohereConfig(**BASE, logit_scale=0.25),
    "gpt-oss": lambda: transformers.GptOssConfig(**BASE, **EXPERTS, sliding_window=WINDOW),
    "mixtral": lambda: transformers.MixtralConfig(**BASE, **EXPERTS, sliding_window=None),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt2": lambda: transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32, n_positions=64, vocab_size=VOCAB),
    "qwen2-vl": lambda: transformers.Qwen2VLConfig(
        text_config=WITHOUT_HEAD_DIM, vision_config=SEEING | {"embed_dim": 16}
    ),
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config=MROPE, vision_config=SEEING | {"out_hidden_size": 32, "deepstack_visual_indexes": []}
    ),
}
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3 * WINDOW)


def class_of(config):
    """Return what makes the library's own model."""
    seeing = hasattr(config, "vision_config")
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny):
    """Load a family from a folder, beside the library's own model with eager attention; once each."""
    pairs = {}

    def load(family):
        if family not in pairs:
            folder, config = tmp_path_factory.mktemp("model"), FAMILIES[family]()
            with torch.random.fork_rng():
                torch.manual_seed(len(family))
                own = class_of(config).from_config(
                    config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
                )
            own.eval().save_pretrained(folder)
            pairs[family] = load_target(folder, tiny, device=CPU), own
        return pairs[family]

    return load


def places_of(model, tokens, start):
    """Return positions from ``start``; the three sections of multimodal rope go apart."""
    positions = torch.arange(start, start + tokens)
    return torch.stack([positions, positions // 2, 63 - positions]) if model.mrope else positions


@torch.no_grad()
def own_forward(own, tokens, positions, **options):
    """Run the library's own model."""
    return own(input_ids=tokens[None], position_ids=positions.unsqueeze(-2), use_cache=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
@given(tokens=TOKENS, start=st.integers(0, 32))
def test_hidden_states_and_logits_are_the_librarys_own(family, tokens, start, loaded, attention):
    """Through plain attention, with any tokens at any positions, by ids and by embeddings."""
    (model, own), ids = loaded(family), torch.tensor(tokens)
    positions, attend = places_of(model, len(ids), start), attention(model.windows)
    hidden, aux = model.forward(input_ids=ids, embeddings=None, positions=positions, attend=attend)
    expected = own_forward(own, ids, positions, output_hidden_states=True)
    assert aux is None
    assert hidden.dtype == torch.float64
    assert_close(hidden, expected.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
    assert_close(model.logits(hidden), expected.logits[0], rtol=1e-5, atol=1e-5)
    embedded = model.embed(ids)
    again, _ = model.forward(input_ids=None, embeddings=embedded, positions=positions, attend=attend)
    assert torch.equal(hidden, again)


@pytest.mark.parametrize("family", FAMILIES)
@given(tokens=TOKENS, layers=st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=4))
def test_auxiliary_states_are_what_enters_their_layers(family, tokens, layers, loaded, attention):
    """Side by side in the order that was asked for, also where one is asked for twice."""
    (model, own), ids = loaded(family), torch.tensor(tokens)
    positions = places_of(model, len(ids), 0)
    _, aux = model.forward(
        input_ids=ids,
        embeddings=None,
        positions=positions,
        attend=attention(model.windows),
        aux_layers=tuple(layers),
    )
    states = own_forward(own, ids, positions, output_hidden_states=True).hidden_states
    assert_close(aux, torch.cat([states[layer][0] for layer in layers], dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_forward_reads_a_value_on_the_host(family, loaded, attention, no_host_reads):
    """Nothing in a forward, in embeddings or in logits waits for a value."""
    model, _ = loaded(family)
    ids = torch.arange(6, dtype=torch.int32)
    attend, positions = attention(model.windows), places_of(model, 6, 0)
    with no_host_reads():
        model.forward(
            input_ids=ids, embeddings=None, positions=positions, attend=attend, aux_layers=(0, LAYERS - 1)
        )
        hidden, _ = model.forward(
            input_ids=None, embeddings=model.embed(ids), positions=positions, attend=attend
        )
        assert model.logits(hidden).shape == (6, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_all_of_the_text_part(family, loaded):
    """Each is the tensor of that name in the folder, and what is seen on the way to the tensor."""
    model, own = loaded(family)
    listed = {name: getattr(module, attribute) for name, module, attribute in model.weights()}
    kept = {name: tensor for name, tensor in own.state_dict().items() if "visual" not in name}
    assert kept.keys() <= listed.keys()
    assert not any("visual" in name for name in listed)
    for name, tensor in kept.items():
        assert torch.equal(tensor, listed[name])


@pytest.mark.parametrize(
    ("family", "windows", "has_sinks", "mrope"),
    [
        ("llama", (None,) * 3, False, False),
        ("mistral", (WINDOW,) * 3, False, False),
        ("gemma2", (WINDOW, None, WINDOW), False, False),
        ("gpt-oss", (WINDOW, None, WINDOW), True, False),
        ("qwen3-vl", (None,) * 3, False, True),
    ],
)
def test_numbers_are_those_that_attention_sees(family, windows, has_sinks, mrope, loaded):
    """Heads, windows, sinks and rope."""
    model, own = loaded(family)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 8)
    assert (model.windows, model.sinks, model.mrope) == (windows, has_sinks, mrope)
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.max_model_len) == (3, 32, 50, 64)
    assert model.dtype == torch.float64
    assert model.name.startswith(f"{type(own).__name__} of model")
    assert "random" not in model.name


def test_a_forward_leaves_nothing_behind(target, attention):
    """No hook is left on a layer, not even by a forward that failed."""

    def fail(*args):
        raise RunError("attention failed")

    ids = torch.arange(4)
    for attend in (attention(), fail):
        try:
            target.forward(input_ids=ids, embeddings=None, positions=ids, attend=attend, aux_layers=(1,))
        except RunError as error:
            assert attend is fail and "attention failed" in str(error)
        for _, module, _ in target.weights():
            assert not module._forward_pre_hooks and not module._forward_hooks


def test_two_models_run_inside_each_other(target, tiny, attention):
    """Attention belongs to a call: a forward inside another's attention does not disturb it."""
    other = load_target(None, tiny, device=CPU, dtype=torch.float64, seed=8)
    ids, plain, inner = torch.arange(5), attention(), []

    def run(model, attend):
        return model.forward(input_ids=ids, embeddings=None, positions=ids, attend=attend)[0]

    def nested(layer, *tensors):
        inner.append(run(other, plain))
        return plain(layer, *tensors)

    outer, expected = run(target, nested), run(other, plain)
    assert torch.equal(outer, run(target, plain))
    assert len(inner) == target.num_layers
    assert all(torch.equal(hidden, expected) for hidden in inner)
    assert not torch.equal(outer, expected)


def test_layers_are_named_in_order(target):
    """Attention is called once for each layer, by its index, with one row for each token."""
    seen = []

    def attend(layer, query, key, value, scoring):
        seen.append(layer)
        assert (query.shape, key.shape, value.shape) == ((3, 4, 8), (3, 2, 8), (3, 2, 8))
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        assert scoring.scale == 8**-0.5
        return torch.zeros_like(query)

    ids = torch.arange(3)
    target.forward(input_ids=ids, embeddings=None, positions=ids, attend=attend)
    assert seen == list(range(target.num_layers))


def all_weights(model):
    """Return every weight of a model, by name."""
    return {name: getattr(module, attribute) for name, module, attribute in model.weights()}


def test_random_weights_follow_the_seed_alone(tiny):
    """The same seed makes the same model, and the global generator does not notice."""
    before = torch.random.get_rng_state()
    one, same, other = (
        all_weights(load_target(None, tiny, device=CPU, dtype=torch.float32, seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_a_folder_without_weights_is_its_configuration_with_random_ones(tmp_path, tiny):
    """As the configuration file alone is; the name says so."""
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    models = [load_target(path, tiny, device=CPU) for path in (tmp_path, tmp_path / "config.json")]
    first, second = map(all_weights, models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for model in models:
        assert model.name == f"Qwen3ForCausalLM of {tmp_path.name}, random weights (seed 0)"


def test_sharded_weights_are_read(tmp_path, tiny, attention):
    """Several files with an index are one model."""
    with torch.random.fork_rng():
        own = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32)
    own.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_target(tmp_path, tiny, device=CPU)
    assert model.dtype == torch.float32
    assert all(torch.equal(tensor, all_weights(model)[name]) for name, tensor in own.state_dict().items())


def test_a_dtype_is_the_one_asked_for_or_the_configurations_or_the_plans(tmp_path, tiny):
    """In this order."""
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert load_target(tmp_path, tiny, device=CPU).dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert load_target(tmp_path, tiny, device=CPU).dtype == torch.float16
    assert load_target(tmp_path, tiny, device=CPU, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(RunError, match="fp8 cannot be computed in"):
        load_target(None, attrs.evolve(tiny, dtype=DataType.FP8), device=CPU)


NUMBERS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")


@given(st.sets(st.sampled_from((*NUMBERS, "max_model_len", "latent", "causal", "sinks", "mrope"))))
def test_differences_are_the_numbers_that_differ(target, tiny, changed):
    """One sentence for each, that begins with its name; none for those that agree or are not planned."""
    values = {name: 2 * getattr(tiny, name) for name in changed & {*NUMBERS, "max_model_len"}}
    others = {
        "latent": Latent(kv_lora_rank=4, rope_head_dim=2),
        "causal": False,
        "sinks": True,
        "mrope": True,
    }
    shape = attrs.evolve(tiny, **values, **{name: others[name] for name in changed & others.keys()})
    sentences = differences(target, shape)
    assert sorted(sentence.split(":")[0] for sentence in sentences) == sorted(
        f"model.{name}" for name in changed
    )
    for name, value in values.items():
        assert any(f"says {value}," in sentence for sentence in sentences if name in sentence)


def test_what_is_not_planned_or_not_reached_does_not_differ(target, tiny):
    """A plan without a hidden size, and for shorter sequences than the model knows."""
    shape = attrs.evolve(tiny, hidden_size=None, vocab_size=None, max_model_len=tiny.max_model_len // 2)
    assert differences(target, shape) == ()


SMALL = {"hidden_size": 32, "vocab_size": VOCAB}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
REFUSED = {
    "dynamic rope reads": lambda: transformers.LlamaConfig(**BASE, rope_parameters=DYNAMIC),
    "longrope chooses": lambda: transformers.LlamaConfig(**BASE, rope_parameters=LONG),
    "layers of type linear_attention": lambda: transformers.Qwen3NextConfig(**BASE),
    "layers of type chunked_attention": lambda: transformers.Llama4TextConfig(**BASE),
    "KV cache of another layer": lambda: transformers.Gemma3nTextConfig(**BASE),
    "keys of width 12 and values of width 6": lambda: transformers.DeepseekV3Config(
        **{name: value for name, value in BASE.items() if name != "head_dim"}, **LATENT
    ),
    "does not have the attention interface": lambda: transformers.BloomConfig(n_layer=2, n_head=2, **SMALL),
    "is not a causal language model": lambda: transformers.T5Config(num_layers=1),
    "is not causal": lambda: transformers.Gemma3TextConfig(**BASE, use_bidirectional_attention=True),
    "logits are not those of its output embeddings": lambda: transformers.HyperCLOVAXConfig(
        **BASE, logits_scaling=4.0
    ),
    "is quantized": lambda: transformers.LlamaConfig(**BASE, quantization_config={"quant_method": "fp8"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_no_plan_here_executes_are_refused(reason, tmp_path, tiny):
    """Each with its reason, and with what is supported."""
    REFUSED[reason]().save_pretrained(tmp_path)
    with pytest.raises(RunError, match=reason) as caught:
        load_target(tmp_path, tiny, device=CPU, dtype=torch.float32)
    assert "supported: " in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"latent": Latent(kv_lora_rank=4, rope_head_dim=2)},
        {"sinks": True},
        {"causal": False},
        {"head_dim": 7},
    ],
)
def test_numbers_that_no_llama_has_need_a_folder(change, tiny):
    """A random model is a Llama; what it cannot be is refused."""
    with pytest.raises(RunError, match="give a folder"):
        load_target(None, attrs.evolve(tiny, **change), device=CPU)


def test_a_model_of_a_plan_has_its_numbers():
    """What the plan leaves open is made up."""
    shape = Model(name="m", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, max_model_len=9)
    model = load_target(None, shape, device=CPU)
    assert differences(model, shape) == ()
    assert (model.hidden_size, model.vocab_size, model.max_model_len) == (12, 256, 9)
    assert model.dtype == torch.bfloat16


def test_folders_that_hold_no_model_are_refused(tmp_path, tiny):
    """Nothing there, no JSON, an unknown architecture, pickled weights, weights of another model."""

    def message():
        with pytest.raises(RunError) as caught:
            load_target(tmp_path, tiny, device=CPU)
        return str(caught.value)

    assert "no config.json" in message()
    config = tmp_path / "config.json"
    config.write_text("{")
    assert "not a configuration" in message()
    config.write_text('{"model_type": "no-such-model"}')
    assert "no-such-model" in message()
    FAMILIES["llama"]().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in message()
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert "cannot be loaded" in message()
    with torch.random.fork_rng():
        short = transformers.LlamaConfig(**BASE | {"num_hidden_layers": LAYERS - 1})
        AutoModelForCausalLM.from_config(short).save_pretrained(tmp_path)
    config.unlink()
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert "lack model.layers.2." in message()


def test_layers_that_are_not_there_have_no_states(target, attention):
    """Layers count from 0."""
    ids = torch.arange(2)
    for layers in itertools.product((-1, 0, 5), repeat=2):
        if set(layers) != {0}:
            with pytest.raises(RunError, match="has layers 0 to 4"):
                target.forward(
                    input_ids=ids, embeddings=None, positions=ids, attend=attention(), aux_layers=layers
                )


@pytest.mark.parametrize(
    "read",
    [
        lambda numbers: numbers.sum().item(),
        lambda numbers: numbers.nonzero(),
        lambda numbers: numbers[numbers > 1],
        lambda numbers: bool((numbers > 1).any()),
        lambda numbers: numbers.unique(),
    ],
)
def test_reading_on_the_host_is_refused(read):
    """Values, and shapes that depend on values; indexing by numbers is neither."""
    numbers = torch.arange(4)
    with RefuseHostReads():
        assert numbers[numbers.flip(0)].shape == (4,)
        with pytest.raises(RunError, match="on the host"):
            read(numbers)
