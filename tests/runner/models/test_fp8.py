"""FP8 weights: a folder of them is the folder of what they stand for, number by number, on one rank and on several."""

import json
import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.records._base import replace
from capture_planner.records.model import DataType
from capture_planner_runner.compilation.forwards import operators
from capture_planner_runner.compilation.pieces import compiled, traced
from capture_planner_runner.models.fp8 import FP8, Fp8Linear, Fp8Weight, dequantized, grid_of, quantized
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.models.spread import spread
from support.launches import CONFIG, SPEC, started
from support.model_families import BASE

CPU = torch.device("cpu")
FEW = settings(max_examples=max(settings.default.max_examples // 2, 3))
SHARED = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
"""Linear layers of a Llama, with the axis of a weight that ranks share."""
ALL = 1 << 20
"""More rows and columns than any weight here has."""
FINEGRAINED = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}


EXPERT = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def as_stored(shapes):
    """Yield the names and shapes of tensors in files, where each expert has tensors of its own."""
    for name, shape in shapes.items():
        prefix, _, projection = name.rpartition(".")
        if not prefix.endswith(".experts"):
            yield name, shape
            continue
        layers = EXPERT[:2] if projection == "gate_up_proj" else EXPERT[2:]
        for number in range(shape[0]):
            for layer in layers:
                yield f"{prefix}.{number}.{layer}.weight", (shape[1] // len(layers), shape[2])


def numbers_of(model):
    """Return what the linear layers and the experts of a decoder multiply by, by name, and the biases."""
    found = {}
    for name, module in model._decoder.named_modules():
        if isinstance(module, Fp8Weight):
            found[name] = module.matrix(torch.float32)
        elif name.rpartition(".")[2] in SHARED:
            found[name] = module.weight
        elif name.endswith(".experts"):
            found |= {f"{name}.{leaf}": tensor for leaf, tensor in module.named_parameters(recurse=False)}
        if getattr(module, "bias", None) is not None:
            found[f"{name}.bias"] = module.bias
    return found


def check_same_numbers(model, plain):
    """FP8 weights are those that they stand for."""
    found, expected = numbers_of(model), numbers_of(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@attrs.frozen
class Folders:
    """One model, stored twice: with FP8 weights, and with what they stand for."""

    config: LlamaConfig
    quantization: dict
    block: tuple
    """Rows and columns that have one scale."""
    skipped: frozenset
    tensors: dict
    plain: dict

    def _repr_pretty_(self, printer, cycle):
        """Keep Hypothesis from printing tensors."""
        printer.text(f"<{self.quantization}, biases {self.config.attention_bias}>")

    def load(self, folder, among=None, **options):
        """Write both and load both, in float32."""
        for name, tensors in (("fp8", self.tensors), ("plain", self.plain)):
            stated = self.config.to_dict() | ({"quantization_config": self.quantization} if name == "fp8" else {})
            write(folder / name, stated, tensors)
        given = {"device": CPU, "dtype": torch.float32} | ({} if among is None else {"among": among})
        return [load_target(folder / name, replace(SPEC.model, max_model_len=64), **given) for name in ("fp8", "plain")]


def write(folder, config, tensors):
    """Write a model folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def standing_for(weight, scale, block):
    """Return the numbers of an FP8 weight, each by the scale of its block."""
    rows, columns = (torch.arange(width) for width in weight.shape)
    return weight.float() * scale.float()[rows[:, None] // block[0], columns // block[1]]


def finegrained(kind, block, is_static, skipped):
    """Return a configuration of transformers, and what it calls scales."""
    size = {"weight_block_size": list(block)} if kind == "block" else {}
    scheme = "static" if is_static else "dynamic"
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme, "modules_to_not_convert": skipped}
    return stated | size, "weight_scale_inv", "activation_scale"


def compressed(kind, block, is_static, skipped):
    """Return a configuration of compressed-tensors, and what it calls scales."""
    weights = {"num_bits": 8, "type": "float", "strategy": kind} | (
        {"block_structure": block} if kind == "block" else {}
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": not is_static}}
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    ignored = [name if name == "lm_head" else f"re:.*{name}$" for name in skipped]
    return stated | {"ignore": ignored}, "weight_scale", "input_scale"


@st.composite
def folders(draw):
    """Any format, block, dtype of scales, and choice of layers that are not FP8."""
    form, kind = draw(st.sampled_from(((finegrained, "tensor"), (finegrained, "block"), *COMPRESSED)))
    size = st.sampled_from((1, 3, 4, 8, 16, 20, 32, 128))
    block = {"tensor": (ALL, ALL), "channel": (1, ALL)}.get(kind) or (draw(size), draw(size))
    has_experts = draw(st.booleans())
    # All layers of an expert are FP8, or none.
    skippable = [name for name in sorted(SHARED) if not (has_experts and name in EXPERT)]
    skipped = draw(st.lists(st.sampled_from(skippable), max_size=2, unique=True))
    is_static = draw(st.booleans())
    stated, scale_name, input_name = form(kind, block, is_static, ["lm_head", *skipped])
    config_of, more = (Qwen3MoeConfig, EXPERTS) if has_experts else (LlamaConfig, {})
    config = config_of(**BASE | {"num_hidden_layers": 1} | more, attention_bias=draw(st.booleans()))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float8_e8m0fnu)))
    tensors, plain = {}, {}
    with torch.device("meta"):
        whole = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    shapes = dict(as_stored(whole))
    for name, shape in shapes.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or layer.rpartition(".")[2] not in set(SHARED) - set(skipped):
            tensors[name] = plain[name] = torch.randn(shape, generator=numbers) / 4
            continue
        weight = torch.randint(0, 0x7F, shape, generator=numbers, dtype=torch.uint8)  # all but NaN
        weight = (weight + 128 * torch.randint(0, 2, shape, generator=numbers, dtype=torch.uint8)).view(FP8)
        grid = tuple(math.ceil(width / extent) for width, extent in zip(shape, block, strict=True))
        scale = (torch.rand(grid, generator=numbers) / 64 + 1e-4).to(dtype)
        tensors[name], plain[name] = weight, standing_for(weight, scale, block)
        tensors[f"{layer}.{scale_name}"] = scale.view(draw(st.sampled_from(((), (1,))))) if kind == "tensor" else scale
        if is_static:
            tensors[f"{layer}.{input_name}"] = torch.tensor(0.5)
    return Folders(config, stated, block, frozenset(skipped), tensors, plain)


COMPRESSED = tuple((compressed, kind) for kind in ("tensor", "channel", "block"))


@FEW
@given(stored=folders(), tokens=st.lists(st.integers(0, BASE["vocab_size"] - 1), min_size=1, max_size=6))
def test_a_folder_of_fp8_weights_says_what_their_numbers_say(
    stored, tokens, tmp_path_factory, attention, no_host_reads
):
    """Of every token, in float32; a weight takes a byte, and no forward waits for a value."""
    model, plain = stored.load(tmp_path_factory.mktemp("model"))
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    said = []
    for each in (model, plain):
        with no_host_reads():
            hidden, _ = each.forward(input_ids=ids, embeddings=None, positions=positions, attend=attention())
            said.append(each.logits(hidden))
    assert_close(*said, rtol=1e-4, atol=1e-4)
    assert torch.equal(*(logits.argmax(dim=-1) for logits in said))
    check_same_numbers(model, plain)
    weights = {name: getattr(module, attribute) for name, module, attribute in model.weights()}
    stored_in_bytes = sum(tensor.numel() for tensor in stored.tensors.values() if tensor.dtype is FP8)
    assert sum(tensor.nbytes for tensor in weights.values() if tensor.dtype is FP8) == stored_in_bytes


class Part:
    """The collectives of one of two ranks, which sums nothing; it counts."""

    size = 2

    def __init__(self, rank):
        self.rank, self.calls = rank, 0

    def all_reduce(self, partial):
        self.calls += 1
        return partial.clone()


def cuts(stored):
    """Return the layers of which two ranks would cut a block."""
    for name, axis in SHARED.items():
        width = next(t.shape[axis] for key, t in stored.plain.items() if key.endswith(f"{name}.weight"))
        if name not in stored.skipped and width > stored.block[axis] and width // 2 % stored.block[axis]:
            yield name


@FEW
@given(stored=folders())
def test_each_of_two_ranks_has_its_slice_of_the_numbers(stored, tmp_path_factory):
    """Of every layer; where a block would be cut, the first such layer is named."""
    folder, cut = tmp_path_factory.mktemp("model"), list(cuts(stored))
    for rank in range(2):
        if cut:
            with pytest.raises(RunError, match=r"would cut blocks of \d+ that have one FP8 scale") as caught:
                stored.load(folder, Part(rank))
            # Gate and up of all experts are one projection.
            named = str(caught.value).split(":")[0].rpartition(".")[2].replace("gate_up_proj", "gate_proj")
            assert named in cut
            continue
        models = stored.load(folder, Part(rank))
        check_same_numbers(*models)
        assert models[0].among.calls == models[1].among.calls > 0


@given(
    name=st.sampled_from(("q_proj", "k_proj", "o_proj")),
    heads=st.integers(1, 8),
    width=st.sampled_from((1, 2, 6)),
    block=st.integers(2, 9),
)
def test_the_numbers_of_ranks_that_an_error_names_are_those_that_work(name, heads, width, block):
    """Of the layer that would be cut, for any number of ranks; of keys as far as there are heads."""
    whole = heads * width
    most = heads if name == "k_proj" else whole

    def error(size):
        shape = (whole, 3) if SHARED[name] == 0 else (3, whole)
        model = torch.nn.ModuleDict({name: Fp8Linear.of(torch.nn.Linear(*shape[::-1]), (block, block))})
        among = Part(0)
        among.size = size
        try:
            spread(model, {name: ("colwise", "rowwise")[SHARED[name]]}, kv_heads=heads, among=among)
        except RunError as caught:
            return str(caught)
        return None

    errors = {size: error(size) for size in range(1, most + 1)}
    works = " or ".join(str(size) for size, says in errors.items() if says is None)
    for says in errors.values():
        assert says is None or "cannot share a width" in says or says.endswith(f"parallel.tensor {works}")


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    scale=st.sampled_from((0.0, 1e-20, 1.0, 1e20)),
    seed=st.integers(0, 99),
)
def test_quantized_numbers_are_as_near_as_fp8_allows(shape, block, scale, seed):
    """Half a step of three bits, or of the smallest numbers; what is zero stays zero."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    numbers, scales = quantized(weight, block)
    assert (numbers.dtype, scales.shape) == (FP8, grid_of(shape, block))
    assert bool((scales > 0).all())
    found = dequantized(numbers, scales, block, torch.float32)
    assert torch.equal(found, standing_for(numbers, scales, block))
    step = standing_for(torch.full(shape, 2.0**-9), scales, block)
    assert bool(((found - weight).abs() <= torch.maximum(weight.abs() / 16, step / 2) * 1.001).all())


def test_a_configuration_alone_has_random_fp8_weights_that_are_compiled_and_spread(tmp_path, attention):
    """Near to the random weights of the model that is not quantized; ranks sum between compiled pieces."""
    config = LlamaConfig(**BASE | {"num_hidden_layers": 2}).to_dict()
    shape, options = replace(SPEC.model, max_model_len=64), {"device": CPU, "dtype": torch.float32, "seed": 3}
    blocks = FINEGRAINED | {"weight_block_size": [2, 4]}
    for name, stated in (("plain", {}), ("fp8", {"quantization_config": blocks})):
        (tmp_path / name).write_text(json.dumps(config | stated))
    model, again, plain = (load_target(tmp_path / name, shape, **options) for name in ("fp8", "fp8", "plain"))
    assert "random weights (seed 3)" in model.name
    expected = {name: getattr(module, attribute) for name, module, attribute in plain.weights()}
    for (name, module, attribute), (_, other, _) in zip(model.weights(), again.weights(), strict=True):
        assert torch.equal(getattr(module, attribute).float(), getattr(other, attribute).float())
        if isinstance(module, Fp8Linear) and attribute == "weight":
            assert_close(module.matrix(torch.float32), expected[name], rtol=1 / 16, atol=0.01)
    part = load_target(tmp_path / "fp8", shape, among=Part(1), **options)
    ids = torch.arange(5)

    def forward(attend, input_ids, positions):
        return [part.forward(input_ids=input_ids, embeddings=None, positions=positions, attend=attend)[0]]

    trace = traced(forward, {"input_ids": (ids, 0), "positions": (ids, 0)}, part.weights())
    found = compiled(trace, operators, part.among)

    def attend(*call):
        return attention()(*call).contiguous()

    assert torch.equal(found(attend, {"input_ids": ids, "positions": ids})[0], forward(attend, ids, ids)[0])
    assert (found.kinds, found.sums) == (5, 2 * part.num_layers)


@pytest.mark.parametrize("dtype", [DataType.FLOAT64, DataType.BFLOAT16])
def test_fp8_weights_are_served_from_graphs_and_verified(dtype, tmp_path):
    """Against the same weights in a higher precision; the report counts a byte for each, and the scales."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": FINEGRAINED}))
    spec = replace(SPEC, speculative=None, model=replace(SPEC.model, dtype=dtype))
    outcome = started(spec, model=tmp_path, verify=True)
    assert outcome.differing == ()
    assert outcome.report.captured
    linear = {"q_proj": (32, 16), "k_proj": (16, 16), "v_proj": (16, 16), "o_proj": (16, 32)}
    linear |= {"gate_proj": (16, 16), "up_proj": (16, 16), "down_proj": (16, 16)}
    fp8 = sum(math.prod(shape) + 4 * math.prod(grid_of(shape, (16, 8))) for shape in linear.values())
    wide = (8 if dtype is DataType.FLOAT64 else 2) * (2 * 20 * 16 + 3 * 16)  # embeddings, and norms
    rotary = 2 * 4 * 4
    assert outcome.report.weights == fp8 + wide + rotary


@pytest.mark.parametrize("dtype", [DataType.FLOAT64, DataType.BFLOAT16])
def test_experts_with_fp8_weights_are_served_from_graphs_and_verified(dtype, tmp_path):
    """With blocks that do not divide their width, and drafts."""
    numbers = {name: value for name, value in CONFIG.items() if name != "architectures"}
    stated = numbers | EXPERTS | {"model_type": "qwen3_moe", "quantization_config": FINEGRAINED}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    outcome = started(replace(SPEC, model=replace(SPEC.model, dtype=dtype)), model=tmp_path, verify=True)
    assert outcome.differing == ()
    assert {forward.mode for forward in outcome.report.forwards} >= {GraphMode.FULL, GraphMode.PIECEWISE}
