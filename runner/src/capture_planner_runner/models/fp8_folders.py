"""Model folders with FP8 weights: what their ``quantization_config`` says, and which tensors belong together.

Two kinds are read, as transformers 5 (``FineGrainedFP8Config``) and compressed-tensors (``float-quantized``) write
them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from capture_planner.errors import RunError
from capture_planner_runner.models.fp8 import FP8, SCALE, Block, Fp8Experts, Fp8Linear, grid_of
from capture_planner_runner.models.loading import StoredTensor

_SUPPORTED = (
    "supported: weights in a floating-point dtype of torch, and FP8 weights (quant_method fp8, or compressed-tensors "
    "with format float-quantized), on any number of ranks"
)
_MOST_PROBLEMS = 4
_WHOLE = (None, None)


@attrs.frozen(eq=False)
class Fp8Format:
    """The storage of FP8 weights in a folder. Output embeddings are never FP8, as in engines."""

    scale: str
    """Name of a layer's scales; its weight is ``weight``."""
    activation_scale: str
    """Name of the scale of a layer's inputs. It is checked and left out, as inputs are not quantized here."""
    is_static: bool
    """True if each layer has an ``activation_scale``."""
    block: tuple[int | None, int | None]
    """Rows and columns that have one scale; None: all."""
    skips: Callable[[str], bool]
    """Returns True for the name of a linear layer without an FP8 weight."""

    def block_of(self, shape: torch.Size) -> Block:
        """Return the block of a weight ``[..., rows, columns]``."""
        rows, columns = (
            max(min(width, extent or width), 1) for width, extent in zip(shape[-2:], self.block, strict=True)
        )
        return rows, columns

    def place(self, model: PreTrainedModel) -> None:
        """Quantize linear layers and experts of a model, in place: what they hold, or nothing on the device ``meta``.

        Raises ``RunError`` where no linear layer would be, and for experts that are not gated or have biases.
        """
        head: Any = cast(Any, model).get_output_embeddings()
        # By type: a subclass may do something else with its weight.
        linear = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and each is not head}
        chosen = {name: each for name, each in linear.items() if not self.skips(name)}
        if not chosen:
            raise RunError(
                f"quantization_config: of {len(linear)} linear layers none is FP8; leave it out, or name fewer layers "
                "that are not quantized"
            )
        for name, module in chosen.items():
            model.set_submodule(name, Fp8Linear.of(module, self.block_of(module.weight.shape)))
        for name, experts in model.named_modules():
            if hasattr(experts, "is_transposed") and not self.skips(name):
                self._place_experts(name, experts)

    def _place_experts(self, name: str, experts: Any) -> None:
        if experts.is_transposed or experts.has_bias or not (experts.has_gate and experts.is_concatenated):
            raise RunError(f"{name}: experts with FP8 weights have a gate and no biases here; {_SUPPORTED}")
        for leaf, parts in _PROJECTIONS.items():
            whole = getattr(experts, leaf)
            shape = torch.Size((whole.shape[1] // len(parts), whole.shape[2]))
            delattr(experts, leaf)
            setattr(experts, leaf, Fp8Experts.of(whole, len(parts), self.block_of(shape)))
        experts._is_hf_initialized = True  # the library would draw weights for what is none any more

    def kind(self, plain: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Return a class whose models have FP8 layers from the start, as the library loads into models that it makes.

        It has the name of the plain one, by which the library finds how a model's weights are named.
        """

        def make(model: PreTrainedModel, config: object) -> None:
            plain.__init__(model, config)
            self.place(model)

        return type(plain.__name__, (plain,), {"__init__": make, "__module__": plain.__module__})

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Return what is loaded, by name: scales as ``Fp8Linear`` has them, and no scales of activations.

        Raises one ``RunError`` for FP8 tensors without scales, and scales that are not used or of another shape.
        """
        if problems := list(self._problems(stored)):
            more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
            raise RunError(
                f"{'; '.join(problems[:_MOST_PROBLEMS])}{more}; compare quantization_config with these weights"
            )
        found = {}
        for name, item in stored.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == self.scale:
                grid = grid_of(weight := stored[f"{layer}.weight"].tensor.shape, self.block_of(weight))
                found[f"{layer}.{SCALE}"] = item.tensor.float().view(grid)
            # The runner does not quantize activations, so their scales are not loaded.
            elif leaf != self.activation_scale:
                found[name] = item.tensor
        return _with_joined_experts(found)

    def _problems(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        for name, item in stored.items():
            layer, _, leaf = name.rpartition(".")
            if item.tensor.dtype is FP8:
                yield from self._unscaled(name, stored)
            elif leaf == self.scale or leaf == self.activation_scale:
                weight = stored.get(f"{layer}.weight")
                if weight is None or weight.tensor.dtype is not FP8:
                    yield f"{item.file}: {name} is not used: there is no FP8 {layer}.weight"
                elif leaf == self.activation_scale and not self.is_static:
                    yield f"{item.file}: {name} is not used: activations have no fixed scale"

    def _unscaled(self, name: str, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        """Yield what an FP8 tensor lacks."""
        file, shape = stored[name].file, stored[name].tensor.shape
        layer, _, leaf = name.rpartition(".")
        # Only linear layers have scales. Any other FP8 tensor would be loaded without one.
        if leaf != "weight" or len(shape) != 2:
            yield f"{file}: {name} is FP8 of shape {list(shape)}, expected the weight of a linear layer"
            return
        needed = (self.scale, self.activation_scale) if self.is_static else (self.scale,)
        yield from (
            f"{file}: {name} is FP8, and {layer}.{each} is missing"
            for each in needed
            if f"{layer}.{each}" not in stored
        )
        scale = stored.get(f"{layer}.{self.scale}")
        if scale is None:
            return
        has, grid = scale.tensor.shape, grid_of(shape, self.block_of(shape))
        # The scale of a whole weight is published as a scalar, as [1] and as [1, 1].
        fits = has == grid or (self.block == _WHOLE and scale.tensor.numel() == 1)
        if not fits or not scale.tensor.is_floating_point():
            says = f"shape {list(has)} and dtype {str(scale.tensor.dtype).removeprefix('torch.')}"
            yield f"{scale.file}: {layer}.{self.scale} has {says}, expected a floating-point dtype and {list(grid)}"

    def refuse_others(self, folder: Path, model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
        """Raise ``RunError`` where FP8 weights and the FP8 layers of a loaded model are not the same."""
        modules = dict(model.named_modules())
        # A missing scale is a layer that only the configuration has as FP8, an unexpected one only the weights.
        for names, has, lacks in ((missing, "config.json", "safetensors"), (unexpected, "safetensors", "config.json")):
            layers = sorted(name.removesuffix(f".{SCALE}") for name in names if name.endswith(f".{SCALE}"))
            if wrong := [layer for layer in layers if layer in modules]:
                more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
                raise RunError(
                    f"{folder}: {wrong[0]}{more} is FP8 in its {has}, and not in its {lacks}; compare "
                    "quantization_config with these weights"
                )


_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections of experts, as the library's modules have them, and the layers of each expert that they are made of."""

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<layer>\w+)\.weight")


def _with_joined_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in which the FP8 weights of experts are joined as ``Fp8Experts`` has them.

    The library joins those of other dtypes, but knows no scales. Raises ``RunError`` for experts of which a layer is
    missing, or is not FP8, and for other layers than a gate, up and down.
    """
    found = dict(tensors)
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype is FP8 and (match := _EXPERT.fullmatch(name)):
            experts.setdefault(match["experts"], {})[int(match["number"]), match["layer"]] = name
    for prefix, names in experts.items():
        # By the largest number, so that a gap in the numbers is reported as missing.
        count = 1 + max(number for number, _ in names)
        whole = {(number, layer) for number in range(count) for layer in itertools.chain(*_PROJECTIONS.values())}
        if other := sorted(whole ^ names.keys()):
            number, layer = other[0]
            has = "not FP8, or missing" if other[0] in whole else "FP8"
            raise RunError(
                f"{prefix}.{number}.{layer} is {has}; experts with FP8 weights have gate_proj, up_proj and down_proj"
            )
        for projection, layers in _PROJECTIONS.items():
            for leaf in ("weight", SCALE):
                keys = [[f"{prefix}.{number}.{layer}.{leaf}" for layer in layers] for number in range(count)]
                shapes = {found[key].shape for row in keys for key in row}
                if len(shapes) > 1:
                    raise RunError(f"{prefix}: {projection}.{leaf} has several shapes: {sorted(map(list, shapes))}")
                # As bytes, which can be stacked on every device.
                parts = [torch.stack([found.pop(key).view(torch.uint8) for key in row]) for row in keys]
                dtype = tensors[keys[0][0]].dtype
                found[f"{prefix}.{projection}.{leaf}"] = torch.stack(parts).view(dtype)
    return found


def fp8_format(stated: object, where: str) -> Fp8Format:
    """Return the format that a ``quantization_config`` states; raises ``RunError`` for every other one."""
    given = stated if isinstance(stated, dict) else {}
    method = given.get("quant_method")
    if method == "fp8":
        return _finegrained(given, where)
    if method == "compressed-tensors" and given.get("format") == "float-quantized":
        return _compressed(given, where)
    form = f" ({given['format']})" if "format" in given else ""
    raise RunError(f"{where} is quantized by {method}{form}; {_SUPPORTED}")


def _finegrained(given: Mapping[str, Any], where: str) -> Fp8Format:
    """Read what transformers calls ``FineGrainedFP8Config``.

    A weight has one scale where no block size is stated, as in vLLM; transformers would take blocks of 128 by 128.
    """
    scheme, block = given.get("activation_scheme", "dynamic"), given.get("weight_block_size")
    skipped = _names(where, "modules_to_not_convert", given.get("modules_to_not_convert", given.get("ignored_layers")))
    _expect(where, "activation_scheme", scheme, "dynamic or static", scheme in ("dynamic", "static"))
    _expect(where, "fmt", form := given.get("fmt", "e4m3"), "e4m3", form in ("e4m3", "float8_e4m3fn"))
    _expect(where, "expert_dtype", expert := given.get("expert_dtype", "fp8"), "fp8", expert == "fp8")
    _expect(where, "modules_to_convert", more := given.get("modules_to_convert"), "none", not more)
    return Fp8Format(
        scale="weight_scale_inv",
        activation_scale="activation_scale",
        is_static=scheme == "static",
        block=_WHOLE if block is None else _block(where, "weight_block_size", block),
        skips=lambda name: not should_convert_module(name, skipped),
    )


def _compressed(given: Mapping[str, Any], where: str) -> Fp8Format:
    """Read the configuration of compressed-tensors: one group, of all linear layers."""
    groups = given.get("config_groups")
    sole = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    group: dict[str, Any] = sole if isinstance(sole, dict) else {}
    _expect(where, "config_groups", groups, "one group with targets [Linear]", group.get("targets") == ["Linear"])
    weights, inputs = group.get("weights"), group.get("input_activations")
    numbers: dict[str, Any] = weights if isinstance(weights, dict) else {}
    is_fp8 = (numbers.get("num_bits"), numbers.get("type"), numbers.get("symmetric", True)) == (8, "float", True)
    _expect(where, "weights", weights, "symmetric float of 8 bits", is_fp8)
    sparsity = given.get("sparsity_config")
    # compressed-tensors writes a sparsity_config also where nothing is sparse.
    is_dense = not sparsity or (isinstance(sparsity, dict) and sparsity.get("format") == "dense")
    _expect(where, "sparsity_config", sparsity, "none, or format dense", is_dense)
    for name in ("kv_cache_scheme", "transform_config"):
        _expect(where, name, given.get(name), "none", not given.get(name))
    ignored = _names(where, "ignore", given.get("ignore"))
    strategy = str(numbers.get("strategy"))
    _expect(where, "strategy", strategy, "tensor, channel or block", strategy in ("tensor", "channel", "block"))
    # A channel is one output row with all of its inputs.
    block: tuple[int | None, int | None] = {"tensor": _WHOLE, "channel": (1, None)}.get(strategy, _WHOLE)
    if strategy == "block":
        block = _block(where, "block_structure", numbers.get("block_structure"))
    return Fp8Format(
        scale="weight_scale",
        activation_scale="input_scale",
        is_static=isinstance(inputs, dict) and inputs.get("dynamic") is not True,
        block=block,
        # compressed-tensors marks a regular expression by `re:`.
        skips=lambda name: any(re.match(key[3:], name) if key.startswith("re:") else key == name for key in ignored),
    )


def _expect(where: str, name: str, value: object, expected: str, is_so: bool) -> None:
    if not is_so:
        raise RunError(f"{where}: quantization_config: {name} is {value!r}, expected {expected}; {_SUPPORTED}")


def _block(where: str, name: str, value: object) -> Block:
    is_so = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
    _expect(where, name, value, "two numbers from 1", is_so)
    rows, columns = cast("list[int]", value)
    return rows, columns


def _names(where: str, name: str, value: object) -> list[str]:
    is_so = value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    _expect(where, name, value, "a list of names", is_so)
    return cast("list[str] | None", value) or []
