"""Families of transformers, spread over two ranks by their own ``tp_plan``: the whole model's logits, or a refusal."""

import pytest
import torch
from hypothesis import settings
from torch.testing import assert_close
from transformers import LlamaConfig, Qwen3MoeConfig

from capture_planner.errors import RunError
from capture_planner.records.model import Model
from capture_planner_runner.compilation.forwards import operators
from capture_planner_runner.compilation.pieces import compiled, traced
from capture_planner_runner.models.huggingface import Probe, load_target
from capture_planner_runner.models.spread import Vocabulary, spread
from capture_planner_runner.ranks.collectives import WHOLE, collectives_of
from support.model_families import BASE, FAMILIES, LAYERS
from support.rank_processes import on_processes
from support.rank_threads import collectives, on_ranks

DEVICE = torch.device("cpu")
SHAPE = Model(name="family", num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=8, max_model_len=64)
REFUSED = {"gpt-oss", "gpt2", "qwen3-vl"}
"""Those whose plan in transformers 5.17 to 5.23 does not spread attention."""
BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 2]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QUANTIZED = {
    "llama in FP8": lambda: LlamaConfig(**BASE, attention_bias=True, quantization_config=BLOCKS),
    "qwen3-moe in FP8": lambda: Qwen3MoeConfig(**BASE, **MIXTURE, quantization_config=BLOCKS),
}
IN_CI = ("llama tied", "gemma2", "mixtral", "qwen2-vl", "gpt-oss", *QUANTIZED)
NAMES = [*FAMILIES, *QUANTIZED] if settings.default.max_examples >= 100 else IN_CI


class ValuesOfHeads(Probe):
    """An ``attend`` without a cache: each query head answers the values of its key/value head."""

    def __call__(self, layer, query, key, value, scoring):
        super().__call__(layer, query, key, value, scoring)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).clone()


def logits_of(folder, among):
    """Return the logits and the likeliest tokens of five rows, or why the model is refused."""
    try:
        model = load_target(folder, SHAPE, device=DEVICE, dtype=torch.float64, seed=3, among=among)
    except RunError as error:
        return str(error)
    tokens = torch.arange(5)
    positions = tokens.expand(3, -1) if model.mrope else tokens
    with torch.no_grad():
        hidden, _ = model.forward(input_ids=tokens, embeddings=None, positions=positions, attend=ValuesOfHeads())
        return model.logits(hidden), model.likeliest(hidden), model.num_heads, model.num_kv_heads


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A configuration of each family, without weights: they are random, the same for any number of ranks."""
    found = {name: tmp_path_factory.mktemp("family") for name in NAMES}
    for name, folder in found.items():
        (FAMILIES | QUANTIZED)[name]().save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def spread_families(folders, tmp_path_factory):
    """What each family says on two ranks."""

    def work(peers):
        among = collectives_of(peers, DEVICE)
        return {name: logits_of(folder, among) for name, folder in folders.items()}

    return on_processes(2, work, tmp_path_factory.mktemp("spread"), tensor=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_says_on_two_ranks_what_it_says_on_one(name, folders, spread_families):
    """Experts, biases, tied embeddings, FP8, multimodal rope; a plan that leaves attention whole is refused."""
    whole = logits_of(folders[name], WHOLE)
    for rank in spread_families:
        found = rank[name]
        if name in REFUSED:
            assert "its tp_plan in transformers does not spread its attention" in found
        else:
            assert_close(found[0], whole[0], rtol=1e-10, atol=1e-10)
            assert torch.equal(found[1], whole[1])
            assert found[2:] == whole[2:] == (BASE["num_attention_heads"], BASE["num_key_value_heads"])


class Doubling:
    """Collectives of one rank by itself: a sum is twice its part, of which nothing is left."""

    rank, size = 0, 2

    def __init__(self):
        self.calls = 0

    def all_reduce(self, partial):
        self.calls += 1
        return partial.mul_(2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({*FAMILIES} - REFUSED))
def test_a_family_is_compiled_between_its_sums(name, tmp_path):
    """To the bits of what its rank computes, experts included, from two more kinds of pieces than on one rank."""
    FAMILIES[name]().save_pretrained(tmp_path)
    among = Doubling()
    model = load_target(tmp_path, SHAPE, device=DEVICE, dtype=torch.float32, seed=3, among=among)
    tokens = torch.arange(5)
    positions, rows = (tokens.expand(3, -1), 1) if model.mrope else (tokens, 0)

    def forward(attend, input_ids, positions):
        return [model.forward(input_ids=input_ids, embeddings=None, positions=positions, attend=attend)[0]]

    trace = traced(forward, {"input_ids": (tokens, 0), "positions": (positions, rows)}, model.weights())
    found, before = compiled(trace, operators, among), among.calls
    (whole,) = forward(ValuesOfHeads(), tokens, positions)
    middle = among.calls
    (part,) = found(ValuesOfHeads(), {"input_ids": tokens, "positions": positions})
    assert torch.equal(part, whole)
    assert among.calls - middle == middle - before == found.sums == 2 * LAYERS
    assert found.kinds == 5


def layer_of(**widths):
    """Return a module of linear layers, by name, with widths (inputs, outputs)."""
    return torch.nn.ModuleDict({name: torch.nn.Linear(*width) for name, width in widths.items()})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"k_proj": "colwise"}, "2 ranks cannot share a width of 9"),
        ({"q_proj": "mla_kv_a_proj"}, "in the style mla_kv_a_proj, which is not executed"),
        ({"q_proj": "sequence_parallel"}, "in the style sequence_parallel"),
    ],
)
def test_what_cannot_be_spread_is_named(plan, says):
    """Before any collective: the layer, and what is wrong with it."""
    model = layer_of(q_proj=(4, 8), k_proj=(4, 9))
    among, _ = collectives(2)
    with pytest.raises(RunError, match=says):
        spread(model, plan, kv_heads=2, among=among)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
def test_ranks_have_all_rows_and_each_key_head_as_often_as_the_others(size, kv_heads):
    """Of key/value heads that are fewer than ranks, neighbours have the same one."""
    if max(size, kv_heads) % min(size, kv_heads):
        size = kv_heads
    whole = layer_of(k_proj=(4, 2 * kv_heads))["k_proj"]
    rows = []
    for among in collectives(size):
        model = layer_of(k_proj=(4, 2 * kv_heads))
        model["k_proj"].load_state_dict(whole.state_dict())
        spread(model, {"*_proj": "replicate", "k_proj": "colwise"}, kv_heads=kv_heads, among=among)
        rows.append(model["k_proj"].weight.detach())
    assert {each.shape for each in rows} == {(max(2 * kv_heads // size, 2), 4)}
    copies = max(size // kv_heads, 1)
    assert torch.equal(torch.cat(rows[::copies]), whole.weight)
    assert all(torch.equal(rows[rank], rows[rank // copies * copies]) for rank in range(size))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("vocabulary", [11, 12, 30])
def test_the_likeliest_of_all_tokens_is_found_among_each_ranks_best(size, vocabulary):
    """Also where the last rank has fewer tokens than the others."""
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(size * vocabulary))
    groups = collectives(size)

    def work(peers):
        head = torch.nn.Linear(3, vocabulary)
        mine = Vocabulary(vocabulary, groups[peers.place.rank])
        head.weight.data[:, 0] = torch.arange(vocabulary)
        mine.keep(head)
        part = logits[:, head.weight[:, 0].long()]
        return mine.whole(part), mine.likeliest(part)

    for whole, tokens in on_ranks(size, work):
        assert torch.equal(whole, logits)
        assert torch.equal(tokens, logits.argmax(dim=-1))
