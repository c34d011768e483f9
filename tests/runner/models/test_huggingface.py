"""The Hugging Face adapter: what it computes is what the library computes by itself."""

import itertools
from contextlib import nullcontext

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from capture_planner.errors import RunError
from capture_planner.records.model import Latent
from capture_planner_runner.models.huggingface import RefuseHostReads, differences, load_target
from support.model_families import FAMILIES, LAYERS, VOCAB, WINDOW

CPU = torch.device("cpu")
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
@given(tokens=TOKENS, start=st.integers(0, 32), layers=st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=4))
def test_hidden_states_and_logits_are_the_librarys_own(family, tokens, start, layers, loaded, attention):
    """Through plain attention, with any tokens at any positions, by ids and by embeddings.

    Auxiliary states are what enters their layers: in the order that was asked for, also where one is asked for twice.
    """
    (model, own), ids = loaded(family), torch.tensor(tokens)
    positions, attend = places_of(model, len(ids), start), attention(model.windows)
    hidden, aux = model.forward(input_ids=ids, embeddings=None, positions=positions, attend=attend)
    expected = own_forward(own, ids, positions, output_hidden_states=True)
    assert aux is None
    assert hidden.dtype == torch.float64
    assert_close(hidden, expected.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
    assert_close(model.logits(hidden), expected.logits[0], rtol=1e-5, atol=1e-5)
    embedded = model.embed(ids)
    again, aux = model.forward(
        input_ids=None, embeddings=embedded, positions=positions, attend=attend, aux_layers=tuple(layers)
    )
    assert torch.equal(hidden, again)
    states = [expected.hidden_states[layer][0] for layer in layers]
    assert_close(aux, torch.cat(states, dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_forward_reads_a_value_on_the_host(family, loaded, attention, no_host_reads):
    """Nothing in a forward, in embeddings or in logits waits for a value."""
    model, _ = loaded(family)
    ids = torch.arange(6, dtype=torch.int32)
    attend, positions = attention(model.windows), places_of(model, 6, 0)
    with no_host_reads():
        model.forward(input_ids=ids, embeddings=None, positions=positions, attend=attend, aux_layers=(0, LAYERS - 1))
        hidden, _ = model.forward(input_ids=None, embeddings=model.embed(ids), positions=positions, attend=attend)
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
    assert (model.windows, model.sinks, model.mrope) == (dict(enumerate(windows)), has_sinks, mrope)
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.max_model_len) == (3, 32, 50, 64)
    assert model.dtype == torch.float64
    assert model.name.startswith(f"{type(own).__name__} of model")
    assert "random" not in model.name


def test_a_forward_leaves_nothing_behind(target, attention):
    """No hook is left on a layer, not even by a forward that failed."""

    def fail(*args):
        raise RunError("attention failed")

    ids = torch.arange(4)
    for attend, outcome in ((attention(), nullcontext()), (fail, pytest.raises(RunError, match="failed"))):
        with outcome:
            target.forward(input_ids=ids, embeddings=None, positions=ids, attend=attend, aux_layers=(1,))
        assert not any(module._forward_pre_hooks for module in target._decoder.modules())


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
        assert all(tensor.is_contiguous() for tensor in (query, key, value))
        assert scoring.scale == 8**-0.5
        return torch.zeros_like(query)

    ids = torch.arange(3)
    target.forward(input_ids=ids, embeddings=None, positions=ids, attend=attend)
    assert seen == list(range(target.num_layers))


NUMBERS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")


@given(st.sets(st.sampled_from((*NUMBERS, "max_model_len", "latent", "causal", "sinks", "mrope"))))
def test_differences_are_the_numbers_that_differ(target, tiny, changed):
    """One sentence for each, that begins with its name; none for those that agree or are not planned."""
    values = {name: 2 * getattr(tiny, name) for name in changed & {*NUMBERS, "max_model_len"}}
    others = {"latent": Latent(kv_lora_rank=4, rope_head_dim=2), "causal": False, "sinks": True, "mrope": True}
    shape = attrs.evolve(tiny, **values, **{name: others[name] for name in changed & others.keys()})
    sentences = differences(target, shape)
    assert sorted(sentence.split(":")[0] for sentence in sentences) == sorted(f"model.{name}" for name in changed)
    for name, value in values.items():
        assert any(f"says {value}," in sentence for sentence in sentences if name in sentence)


def test_what_is_not_planned_or_not_reached_does_not_differ(target, tiny):
    """A plan without a hidden size, and for shorter sequences than the model knows."""
    shape = attrs.evolve(tiny, hidden_size=None, vocab_size=None, max_model_len=tiny.max_model_len // 2)
    assert differences(target, shape) == ()


def test_layers_that_are_not_there_have_no_states(target, attention):
    """Layers count from 0."""
    ids = torch.arange(2)
    for layers in itertools.product((-1, 0, 5), repeat=2):
        if set(layers) != {0}:
            with pytest.raises(RunError, match="has layers 0 to 4"):
                target.forward(input_ids=ids, embeddings=None, positions=ids, attend=attention(), aux_layers=layers)


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
