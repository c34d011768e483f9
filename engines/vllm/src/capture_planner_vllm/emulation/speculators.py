"""Checkpoints in the format of vLLM's speculators: a drafter, whose ``config.json`` names its target.

Served by itself, such a checkpoint makes vLLM serve its target with the drafter (0.33.0, transformers_utils/config.py
``maybe_override_with_speculators``). What it is as a draft is in ``transformer_layer_config`` (transformers_utils/
configs/speculators).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED, Checkpoint
from capture_planner.engines.parsing import refusal
from capture_planner_vllm.emulation.flags import CommandLine
from capture_planner_vllm.emulation.refusals import not_emulated

_FORMAT, _KIND = "speculators_config", "speculators_model_type"
_METHODS = {"peagle": "eagle3", "dflash2": "dflash"}
_PREFIXES = {"eagle3": "Eagle3", "peagle": "Peagle"}
_LAYERS = {"llama": "Llama", "qwen3": "Qwen3"}
_DSPARK = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")


def with_its_draft(line: CommandLine) -> CommandLine:
    """Return the line with the target and the drafter of the checkpoint that it serves, if that is a drafter.

    Raises ``NotEmulated`` for a name that says so and whose ``config.json`` is not here, and ``FlagError`` for one that
    vLLM cannot serve so.
    """
    name = line.model
    found = None if name is None else _find(name)
    if name is None or found is None:
        return line
    if found.source == ASSUMED and "speculator" in name.lower():
        says = (
            f"by its name {name} is a drafter; vLLM serves the target that its config.json names, with it as the draft"
        )
        raise not_emulated("--model", "", checkpoints.remedy(name), reason=says)
    if found.config.get(_FORMAT) is None:
        return line
    drafter, target = _drafter(name, found.config)
    asked = line.get("speculative_config")
    if asked is not None and not isinstance(asked, dict):
        return line  # Which is refused for itself.
    given = {key: value for key, value in (asked or {}).items() if key not in ("method", "model")}
    speculative = {**drafter, **given, "method": drafter["method"], "model": name}
    return attrs.evolve(line, model=target, values={**line.values, "model": target, "speculative_config": speculative})


def _find(name: str) -> Checkpoint | None:
    try:
        return checkpoints.find(name)
    except (OSError, ValueError):
        return None  # Reading the model's facts says what is wrong.


def _drafter(name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the speculative configuration that vLLM makes of a checkpoint, and the target's name."""
    try:
        kind = str(config[_KIND])
        first, target = config[_FORMAT]["proposal_methods"][0], config[_FORMAT]["verifier"]["name_or_path"]
        drafter = {"method": _METHODS.get(kind, kind), "num_speculative_tokens": first["speculative_tokens"]}
    except (KeyError, IndexError, TypeError) as error:
        says = f"vLLM finds no drafter in the {_FORMAT} of {name}: {error!r}"
        raise refusal(
            "--model", says, "name the target as the model, and the checkpoint in --speculative-config"
        ) from error
    remote = isinstance(target, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", target, re.ASCII) is not None
    if not remote or Path(target).exists():
        says = f"vLLM wants the name of a public model as the target of {name}, and finds {target!r}"
        raise refusal("--model", says, "name the target as the model, and the checkpoint in --speculative-config")
    return drafter | ({"parallel_drafting": True} if kind == "peagle" else {}), target


def as_draft(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the configuration that vLLM reads of it as a draft; others as they are.

    Raises ``ValueError`` for a kind of drafter that vLLM does not know.
    """
    config = checkpoint.config
    if config.get(_FORMAT) is None:
        return checkpoint
    kind, layer = str(config.get(_KIND)), dict(config.get("transformer_layer_config") or {})
    if kind in _PREFIXES and layer.get("model_type", "llama") in _LAYERS:
        architecture = f"{_PREFIXES[kind]}{_LAYERS[layer.get('model_type', 'llama')]}ForCausalLM"
    elif kind in ("dflash", "dflash2"):
        architecture = "DFlashDraftModel" if kind == "dflash" else "DFlash2DraftModel"
        layer["dflash_config"] = {"causal": not config.get("sliding_window_non_causal", True)}
    elif kind == "dspark":
        architecture = next((each for each in config.get("architectures") or () if each in _DSPARK), _DSPARK[0])
        layer |= {"sample_from_anchor": config.get("sample_from_anchor", False), "block_size": config.get("block_size")}
    else:
        raise ValueError(f"vLLM has no speculators of kind {kind} over {layer.get('model_type')} layers")
    return attrs.evolve(checkpoint, config={**layer, "architectures": [architecture], "model_type": "speculators"})
