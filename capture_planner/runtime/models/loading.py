"""Where a model's numbers come from: a local folder, read without a network and checked by shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from capture_planner.errors import RunError
from capture_planner.runtime.models.protocols import Weight

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, StrictDataclassError)
"""What transformers raises for configurations and weights that it cannot make a model of."""


@attrs.frozen
class Source:
    """A configuration, and the files of weights next to it; no files: the weights are random."""

    config: Path
    files: tuple[Path, ...] = ()

    @property
    def label(self) -> str:
        """The name of the folder: short, and the same on every machine."""
        return self.config.resolve().parent.name

    def read_config(self) -> dict[str, Any]:
        """Return the configuration. Raises ``RunError`` where it is not a JSON object."""
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.config}: cannot be read as JSON: {error}") from error
        if not isinstance(config, dict):
            raise RunError(f"{self.config}: expected a JSON object, got {type(config).__name__}")
        return config


@attrs.frozen(eq=False)
class StoredTensor:
    """A tensor and the file that it is from."""

    file: Path
    tensor: torch.Tensor


def contradictions(prefix: str, pairs: Iterable[tuple[str, Any, Any]], other: object) -> list[str]:
    """Return a sentence for each ``(name, planned, real)`` that is planned, and that ``other`` contradicts."""
    return [
        f"{prefix}.{name}: the plan says {planned}, {other} has {real}"
        for name, planned, real in pairs
        if planned is not None and planned != real
    ]


def locate(path: Path) -> Source:
    """Return what is at ``path``: a folder with config.json, or a configuration file alone.

    Raises ``RunError`` where it has neither, and where there are weights in pickle files only.
    """
    if path.is_file():
        return Source(path)
    config = path / "config.json"
    if not config.is_file():
        raise RunError(f"{path}: no config.json here; give a local model folder, or a configuration file")
    files = tuple(sorted(path.glob("*.safetensors")))
    pickles = sorted(path.glob("*.bin"))
    if pickles and not files:
        raise RunError(
            f"{pickles[0]}: pickled weights are not read, as loading them runs code from the file; "
            "convert them to safetensors"
        )
    return Source(config, files)


def read_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return all tensors of safetensors files, on the host, by name.

    Raises ``RunError`` for a broken file, and for a name that two files have.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file}: cannot be read as safetensors: {error}") from error
        for name, tensor in tensors.items():
            if name in found:
                raise RunError(f"{file}: tensor {name} is in {found[name].file} already; keep one of them")
            found[name] = StoredTensor(file, tensor)
    return found


def fill(module: nn.Module, found: Mapping[str, StoredTensor], folder: Path) -> None:
    """Copy tensors into the parameters and persistent buffers of their names, cast to their dtype.

    Raises one ``RunError`` that lists every tensor that is missing, unexpected or of another shape;
    then nothing is copied.
    """
    expected = module.state_dict()
    problems = [
        f"{folder}: {name} is missing, expected shape {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name not in found
    ]
    for name, item in found.items():
        shape = list(item.tensor.shape)
        if name not in expected:
            problems.append(f"{item.file}: {name} is unexpected, shape {shape}")
        elif shape != list(expected[name].shape):
            problems.append(f"{item.file}: {name} has shape {shape}, expected {list(expected[name].shape)}")
    if problems:
        raise RunError("\n".join([*problems, "compare config.json and the method with these weights"]))
    with torch.no_grad():
        for name, item in found.items():
            expected[name].copy_(item.tensor)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Make tensors on ``device`` from generators at ``seed``; put them back as they were after."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        yield


def weights_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Weight]:
    """Yield every parameter and buffer that these modules own themselves."""
    for prefix, module in modules:
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for attribute, _ in own:
            yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute
