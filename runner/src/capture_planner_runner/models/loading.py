"""Weights and configurations from a local folder, read without a network and checked by shape."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from capture_planner.errors import CapturePlannerError, RunError, one_line
from capture_planner_runner.models.protocols import Weight

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The files of weights that transformers reads: the first, or without it those that the index names."""

_LONGEST_REASON = 400


@contextmanager
def library_errors(subject: str) -> Iterator[None]:
    """Turn whatever a library raises for a configuration or weights into a ``RunError``: subject and reason, one line.

    Of a configuration with impossible numbers transformers and torch raise errors of any type.
    """
    try:
        yield
    # It says what is wrong already, in words of ours.
    except CapturePlannerError:
        raise
    except Exception as error:
        says = one_line(error)
        reason = says if isinstance(error, OSError | ValueError) and says else f"{type(error).__name__}: {says}"
        raise RunError(f"{subject}: {reason[:_LONGEST_REASON]}") from error


@contextmanager
def held_back() -> Iterator[None]:
    """Show what transformers logs and Python warns of at the end; after an error, which has a line of its own, none."""
    # Its capacity is never reached: the records are shown at the end, and only if there was no error.
    logger, kept = logging.getLogger("transformers"), MemoryHandler(sys.maxsize, sys.maxsize, flushOnClose=False)
    # Kept, not silenced: what the library says matters where loading succeeds.
    handlers, logger.handlers = logger.handlers, [kept]
    try:
        with warnings.catch_warnings(record=True) as warned:
            yield
    finally:
        logger.handlers = handlers
    for record in kept.buffer:
        logger.handle(record)
    for each in warned:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


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
        return _json_object(self.config)


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


def _json_object(file: Path) -> dict[str, Any]:
    with library_errors(f"{file}: cannot be read as JSON"):
        data = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise RunError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data


def mask_token_of(found: Source, vocab_size: int) -> int:
    """Return the token of rows that parallel drafting has yet to draft, by the names that vLLM 0.33 reads.

    Raises ``RunError`` where the configuration has none, or one outside of the vocabulary.
    """
    values = found.read_config()
    names = ("mask_token_id", "pard_token", "ptd_token_id")
    token = next((values[name] for name in names if values.get(name) is not None), None)
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        raise RunError(
            f"{found.config}: the mask token of parallel drafting is {token}, expected one of {vocab_size} tokens as "
            f"{', '.join(names[:-1])} or {names[-1]}; plan without parallel_drafting, or use another drafter"
        )
    return token


def locate(path: Path) -> Source:
    """Return the source at ``path``: a folder with config.json, or only a configuration file.

    The weights are those of model.safetensors, or of the files that model.safetensors.index.json names, or of all
    safetensors files. Raises ``RunError`` where there is no configuration, where an index is wrong or names a file that
    is absent or is no safetensors file of the folder, and where there are weights in pickle files only.
    """
    if path.is_file():
        return Source(path)
    config = path / "config.json"
    if not config.is_file():
        raise RunError(f"{path}: no config.json here; give a local model folder, or a configuration file")
    if (path / SINGLE_FILE).exists():
        return Source(config, (path / SINGLE_FILE,))
    if (path / INDEX).exists():
        return Source(config, _shards(path))
    files = tuple(sorted(path.glob("*.safetensors")))
    pickles = sorted(path.glob("*.bin"))
    # A folder may have both; then the pickled ones are ignored.
    if pickles and not files:
        raise RunError(
            f"{pickles[0]}: pickled weights are not read, as loading them runs code from the file; "
            "convert them to safetensors"
        )
    return Source(config, files)


def _shards(folder: Path) -> tuple[Path, ...]:
    """Return the files of a folder's index; raises ``RunError`` for names that are no safetensors files in it."""
    index = folder / INDEX
    weights = _json_object(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise RunError(f"{index}: expected weight_map, a file name for each tensor; download it again")
    names = sorted(set(weights.values()))
    # An index could lead to other folders, or to pickled files, whose loading runs code.
    foreign = [name for name in names if Path(name).name != name or "\\" in name or not name.endswith(".safetensors")]
    if foreign:
        raise RunError(
            f"{index}: names {foreign[0]!r}; only safetensors files of the same folder are read, and no pickled "
            "weights, as loading them runs code from the file"
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        listed = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        raise RunError(
            f"{folder}: {listed} of {INDEX} are absent; download them, or remove the index to run random ones"
        )
    return tuple(folder / name for name in names)


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
            # A state dict has the module's own tensors, so this fills the module.
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
