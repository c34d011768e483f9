"""LoRA adapters of a target: products of two narrow matrices that are added to its linear layers.

A forward for n active adapters computes n products in each layer, and each row keeps its own. That is what a graph
for n adapters holds; which adapters they are is read on the device. Matrices of all adapters are stacked behind the
zero matrix of the null adapter; narrower ones are filled up with zeros, which add nothing.

peft's own layers are not used: they choose rows by a list of names on the host, which no graph can hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional

from capture_planner.errors import RunError
from capture_planner_runner.models.loading import Source, StoredTensor, read_tensors, seeded, weights_of
from capture_planner_runner.models.protocols import Weight

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter that peft saved."""
RANK = 8
"""Rank of adapters with random weights."""

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_OTHERS = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "layer_replication", "lora_bias",
    "megatron_config", "modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_dora",
    "use_qalora",
)  # fmt: skip
"""Options of peft that change what is computed, and are refused where they are set."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to start a training that leave the weights of the model as they are; others change those too."""


@attrs.frozen(eq=False)
class Product:
    """The addition of an adapter to one layer, ``up @ down``, on the host."""

    down: torch.Tensor
    """``[rank, in_features]``"""
    up: torch.Tensor
    """``[out_features, rank]``, scaled."""


@attrs.frozen(eq=False)
class Adapter:
    """One adapter: its products by layer."""

    name: str
    products: Mapping[str, Product]


class _Stack(nn.Module):
    """The products of all adapters for one layer; those without one have zeros."""

    down: torch.Tensor
    """``[adapters + 1, rank, in_features]``"""
    up: torch.Tensor
    """``[adapters + 1, out_features, rank]``"""

    def __init__(self, layer: nn.Linear, products: Sequence[Product | None]) -> None:
        super().__init__()
        # Products of all adapters have one shape, so a graph can pick any of them; zeros fill the narrower ones.
        rank = max(len(product.down) for product in products if product is not None)
        down = layer.weight.new_zeros(len(products) + 1, rank, layer.in_features)
        up = layer.weight.new_zeros(len(products) + 1, layer.out_features, rank)
        for index, product in enumerate(products, 1):
            if product is not None:
                down[index, : len(product.down)] = product.down.to(down)
                up[index, :, : len(product.down)] = product.up.to(up)
        self.register_buffer("down", down)
        self.register_buffer("up", up)

    def forward(self, rows: torch.Tensor, lanes: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return what is added to a layer's output ``[..., T, out_features]``, for its input ``[..., T, in]``."""
        added = rows.new_zeros(*rows.shape[:-1], self.up.shape[1])
        # Over all rows for each adapter, since which rows have it is known only on the device.
        for lane in range(len(active)):
            # Selected on the device, so that a replay takes the adapters of its own step.
            down, up = (stack.index_select(0, active[lane : lane + 1])[0] for stack in (self.down, self.up))
            product = functional.linear(functional.linear(rows, down), up)
            added = torch.where((lanes == lane).unsqueeze(-1), product, added)
        return added


class LoraAdapters:
    """``Adapters`` of the linear layers ``layers``, by name. Raises ``RunError`` for products that fit none of them."""

    def __init__(self, layers: Mapping[str, nn.Linear], adapters: Sequence[Adapter]) -> None:
        self.names = tuple(adapter.name for adapter in adapters)
        problems = [problem for adapter in adapters for problem in _misfits(adapter, layers)]
        if problems:
            raise RunError("\n".join([*problems, "give adapters of the model that is run"]))
        self._stacks = [
            (name, layers[name], _Stack(layers[name], [adapter.products.get(name) for adapter in adapters]))
            for name in layers
            # Layers that no adapter changes get no hook.
            if any(name in adapter.products for adapter in adapters)
        ]

    @contextmanager
    def applied(self, lanes: torch.Tensor, active: torch.Tensor) -> Iterator[None]:
        # By hooks, so that a batch without adapters runs the layers as they are.
        with ExitStack() as hooks:
            for _, layer, stack in self._stacks:
                hooks.callback(layer.register_forward_hook(partial(_add, stack, lanes, active)).remove)
            yield

    def weights(self) -> Iterator[Weight]:
        return weights_of((f"{name}.lora", stack) for name, _, stack in self._stacks)


def _add(
    stack: _Stack, lanes: torch.Tensor, active: torch.Tensor, layer: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """Return a layer's output with what its adapters add: the hook of a forward."""
    added: torch.Tensor = stack(args[0], lanes, active)
    return output + added


def _misfits(adapter: Adapter, layers: Mapping[str, nn.Linear]) -> Iterator[str]:
    for name, product in adapter.products.items():
        layer = layers.get(name)
        if layer is None:
            yield f"{adapter.name}: adds to {name}, which is no linear layer of the decoder"
            continue
        rank = len(product.down)
        for part, tensor, expected in (
            ("lora_A", product.down, [rank, layer.in_features]),
            ("lora_B", product.up, [layer.out_features, rank]),
        ):
            if list(tensor.shape) != expected:
                yield f"{adapter.name}: {name}.{part} has shape {list(tensor.shape)}, expected {expected}"


def random_adapters(layers: Mapping[str, nn.Linear], count: int, *, seed: int) -> tuple[Adapter, ...]:
    """Return adapters of random weights for all layers; each adds about as much as a layer computes."""
    adapters = []
    # On the host, so that a seed makes the same adapters for every device.
    with seeded(seed, torch.device("cpu")):
        for number in range(1, count + 1):
            products = {
                name: Product(
                    torch.randn(RANK, layer.in_features) / math.sqrt(layer.in_features),
                    torch.randn(layer.out_features, RANK)
                    * float(layer.weight.std())
                    * math.sqrt(layer.in_features / RANK),
                )
                for name, layer in layers.items()
            }
            adapters.append(Adapter(f"random adapter {number} (rank {RANK}, seed {seed})", products))
    return tuple(adapters)


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter that peft saved in a folder: adapter_config.json and adapter_model.safetensors.

    Nothing else is read, the model that it names neither. Raises one ``RunError`` with every problem: no such files,
    pickled weights, a configuration of another kind than plain LoRA, tensors that are not pairs of its rank.
    """
    config, weights = folder / CONFIG, folder / WEIGHTS
    if not config.is_file():
        raise RunError(f"{folder}: no {CONFIG} here; give a local folder that peft saved an adapter in")
    if not weights.is_file():
        pickled = "; pickled weights are not read, convert them" if (folder / "adapter_model.bin").exists() else ""
        raise RunError(f"{folder}: no {WEIGHTS} here{pickled}")
    stated = Source(config).read_config()
    tensors = read_tensors((weights,))
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    for name, stored in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            unknown.append(name)
        else:
            pairs.setdefault(match["layer"], {})[match["part"]] = stored.tensor
    problems = [*_unsupported(config, stated), *_unpaired(weights, stated.get("r"), tensors, pairs, unknown)]
    if problems:
        raise RunError("\n".join([*problems, "supported: plain LoRA of linear layers, as peft saves it"]))
    rank = stated["r"]
    scale = stated["lora_alpha"] / (math.sqrt(rank) if stated.get("use_rslora") else rank)
    # Scaled here, once and in float32, instead of in each forward.
    products = {layer: Product(pair["A"], pair["B"].float() * scale) for layer, pair in pairs.items()}
    return Adapter(f"adapter of {folder.resolve().name}", products)


def _unsupported(config: Path, stated: Mapping[str, Any]) -> Iterator[str]:
    rank, alpha = stated.get("r"), stated.get("lora_alpha")
    if stated.get("peft_type") != "LORA":
        yield f"{config}: peft_type is {stated.get('peft_type')!r}, expected 'LORA'"
    if type(rank) is not int or rank < 1:
        yield f"{config}: r is {rank!r}, expected a whole number from 1"
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        yield f"{config}: lora_alpha is {alpha!r}, expected a number"
    if stated.get("bias", "none") != "none":
        yield f"{config}: bias is {stated['bias']!r}, expected 'none'"
    if stated.get("init_lora_weights", True) not in _PLAIN_STARTS:
        yield f"{config}: init_lora_weights is {stated['init_lora_weights']!r}, which changes the model's weights too"
    yield from (f"{config}: {name} is {stated[name]!r}, expected none" for name in _OTHERS if stated.get(name))


def _unpaired(
    file: Path,
    rank: object,
    tensors: Mapping[str, StoredTensor],
    pairs: Mapping[str, Mapping[str, torch.Tensor]],
    unknown: Iterable[str],
) -> Iterator[str]:
    if not tensors:
        yield f"{file}: no tensors"
    yield from (f"{file}: {name} is unexpected" for name in unknown)
    for layer, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            yield f"{file}: {layer} has lora_{''.join(pair)} alone, expected lora_A and lora_B"
        for part, tensor in pair.items():
            wide = len(tensor.shape) == 2 and tensor.shape[0 if part == "A" else 1] == rank
            if not wide or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                shape = list(tensor.shape)
                yield f"{file}: {layer}.lora_{part} has shape {shape}, expected finite numbers of rank {rank}"


def load_adapters(source: int | Sequence[Path], layers: Mapping[str, nn.Linear], *, seed: int = 0) -> LoraAdapters:
    """Return adapters for these layers: a number of them with random weights, or those of the folders.

    Raises ``RunError`` as ``read_adapter`` does, and for adapters of another model.
    """
    if not layers:
        raise RunError("the model has no linear layers that adapters could add to")
    if isinstance(source, int):
        return LoraAdapters(layers, random_adapters(layers, source, seed=seed))
    return LoraAdapters(layers, [read_adapter(folder) for folder in source])
