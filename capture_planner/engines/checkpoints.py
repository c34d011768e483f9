"""What is known of a model by the name that an engine is given, and what is assumed of the others.

Facts come, in this order, from the model's own folder, from Hugging Face's local cache, and from ``known_models.json``:
for each of the models that are served most the fields of its public ``config.json`` that the engines' rules read, and
where they were found. A name that differs from a known one only by its owner, its folder, or by endings such as
``-FP8`` or ``-Instruct`` is taken for that model, which is an assumption.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from capture_planner.codec import hub
from capture_planner.engines.history import json_table

FOLDER, CACHE, KNOWN, FAMILY, ASSUMED = "model", "cache", "known", "family", "assumed"
"""Where facts come from, as settings say it: the model's own folder, Hugging Face's cache, the list of known models,
a known model of the same family, or nowhere."""

_NO_MODEL = (".yaml", ".yml", ".json", ".jsonl", ".csv")
_CONFIG, _QUANTIZATION = "config.json", "hf_quant_config.json"
_ENDING = re.compile(
    r"[-_.](hf|it|instruct|chat|base|thinking|preview|latest|\d{4}|v\d|bf16|fp16|fp8|fp4|nvfp4|mxfp4|mxfp8|int4|int8|"
    r"w\d+a\d+|awq|gptq|bnb|[48]-?bit|quantized|dynamic|static|block|per-?tensor|autoround)$"
)
"""Endings of names that leave a model's architecture and dimensions as they are: tuning, dates, quantization."""
_OTHER = re.compile(
    r"(?:^|[-_.])(?:"
    # Experts, by their number or by the parameters of a token.
    r"a\d+(?:\.\d+)?b|\d+x\d+(?:\.\d+)?b|\d+e|moe|"
    # Families with experts, or with latent, sparse, linear or two kinds of attention.
    r"deepseek(?:v\d)?(?!.*distill)|kimi|moonlight|minimax|glm-?[4-9]|chatglm|qwen[-_]?(?:3[-_.](?:next|[5-9])|[4-9])|hunyuan|hy\d|ling|ring|"
    r"step-?\d|ernie|nemotron|jamba|mamba|bamba|zamba|rwkv|falcon-?(?:h\d|mamba)|granite-?[4-9]|lfm\d|gemma-?[3-9]n?|"
    r"llama-?[4-9]|mimo|intern|longcat|dots|pangu|grok|dbrx|arctic|exaone|laguna|inkling|muse|olmo|command|plamo|gpt-?oss|"
    r"(?:mistral|ministral|devstral)-(?:large|medium|small)?-?[3-9]|"
    # What is not text, or does not decode.
    r"vl|vision|omni|audio|voxtral|whisper|asr|tts|ocr|llava|pixtral|molmo|phi-?\d-(?:vision|multimodal)|embed\w*|rerank\w*|"
    r"reward|bge|gte|e5|bert|\w*diffusion"
    r")(?=$|[-_.\d])",
    re.IGNORECASE,
)
"""Words of names of models that are no dense decoders of text."""


_QUANTIZED = re.compile(r"fp[48]|int[48]|awq|gptq|w\d+a\d+")


@attrs.frozen
class Checkpoint:
    """A model's ``config.json``, as far as it is here; empty where nothing is known."""

    name: str
    source: str
    config: Mapping[str, Any]
    like: str | None = None
    """The known model that it is taken for, where ``source`` is ``family``."""

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the language model, also where it is part of a larger one."""
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config

    @property
    def rope(self) -> tuple[Mapping[str, Any], ...]:
        """The parameters of each rotary embedding, ``rope_type`` among them; one for all layers, or by kind."""
        found = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        parts = [part for part in found.values() if isinstance(part, dict)] or [found]
        return tuple({"rope_type": part.get("type", "default"), **part} for part in parts if part)


def find(name: str) -> Checkpoint:
    """Return what is known of a model: its own folder wins over the cache, and that over the list of known models.

    A plan or another file of text is no model, whether it is there or not. Raises ``OSError`` for that, and for a
    folder without a ``config.json`` that can be read, ``ValueError`` where it is no JSON object. Inside
    ``codec.hub.fetching`` the ``config.json`` of a name is fetched where it is not here; raises
    ``CapturePlannerError`` where that fails.
    """
    if Path(name).is_dir():
        return Checkpoint(name, FOLDER, _read(Path(name) / _CONFIG, Path(name) / _QUANTIZATION))
    # A mistyped plan or file of flags would count as a model that nobody knows.
    if Path(name).suffix in _NO_MODEL:
        raise FileNotFoundError(name)
    cached = hub.find(name, _CONFIG)
    if cached is not None:
        return Checkpoint(name, CACHE, _read(cached, hub.find(name, _QUANTIZATION)))
    # By its full name it is that model; by a like name it is assumed to be.
    if name in known():
        return Checkpoint(name, KNOWN, known()[name])
    return _of_family(name) or Checkpoint(name, ASSUMED, {})


def _read(path: Path, quantization: Path | None) -> dict[str, Any]:
    """Read a ``config.json``, and the other file that older checkpoints of ModelOpt have."""
    config = _object(path)
    # Newer checkpoints say it in config.json itself.
    if quantization is None or not quantization.is_file() or config.get("quantization_config") is not None:
        return config
    return config | {"quantization_config": _object(quantization)}


def _object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    # Callers expect a ``ValueError`` where a file is no JSON object.
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")
    return config


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of each known model's ``config.json`` by its public name."""
    rows = json_table("capture_planner.engines", "known_models.json").items()
    return {each: entry["config"] for name, entry in rows for each in (name, *entry.get("also", ()))}


@cache
def _by_last_part() -> Mapping[str, str]:
    """Return the known models by the last parts of their names; of two alike, the one with the shorter owner."""
    return {name.rpartition("/")[2].lower(): name for name in sorted(known(), key=len, reverse=True)}


@cache
def _by_stem() -> Mapping[str, str]:
    """Return the known models by the last parts of their names without endings, which leave a number: ``kimi-k2``."""
    stems = {list(_shortened(last))[-1]: name for last, name in _by_last_part().items()}
    return {stem: name for stem, name in stems.items() if re.search(r"\d", stem)}


def _shortened(last: str) -> Iterator[str]:
    """Yield the last part of a name, and what is left of it without each of its endings."""
    yield last
    while (ending := _ENDING.search(last)) is not None:
        last = last[: ending.start()]
        yield last


def _of_family(name: str) -> Checkpoint | None:
    """Return the known model that a name differs from by its owner and its endings only."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    *_, stem = shorter = list(_shortened(last))
    rest = next((each for each in shorter if each in _by_last_part()), stem)
    like = _by_last_part().get(rest) or _by_stem().get(rest)
    # No known model is near: nothing is taken for granted.
    if like is None:
        return None
    # What another ending says of the weights is not what the known model's file does, and another owner quantizes in
    # another way: RedHatAI's NVFP4 with compressed-tensors, nvidia's with ModelOpt.
    requantized = hub.is_name(name) and name.partition("/")[0] != like.partition("/")[0] and _QUANTIZED.search(last)
    lost = ("quantization_config",) if rest != last or requantized else ()
    return Checkpoint(name, FAMILY, {key: value for key, value in known()[like].items() if key not in lost}, like)


def says(source: str, stands_for: str, like: str | None = None) -> str:
    """Return in words what facts are, as the settings show it."""
    own = dict.fromkeys((FOLDER, CACHE), _CONFIG) | {KNOWN: f"its public {_CONFIG}"}
    return own.get(source, f"the public {_CONFIG} of {like}" if like else stands_for)


def assumption(name: str | None, counts_as: str) -> str:
    """Return the clause that says what a model without facts counts as; ``name`` is None where none was named."""
    if name is None:
        return f"no model was named, and {counts_as} is taken"
    return f"{name} is unknown here (no folder, not in Hugging Face's cache, no known name) and counts as {counts_as}"


def assumed(source: str, name: str | None, like: str | None, counts_as: str, results: str) -> tuple[str, ...]:
    """Return the sentence about a model without facts of its own: what it counts as, what rests on it, what to do."""
    if source != ASSUMED and like is None:
        return ()
    says = assumption(name, counts_as) if source == ASSUMED else f"{name} is taken for {like} by its name"
    return (f"{says}; {results} rest on that; {remedy(name)}",)


def by_flags(reason: str, remedy: str) -> str:
    """Return the sentence about an answer that flags alone decide: why, what holds, what depends on the model."""
    says = "so the flags alone answer: sizes, limits and what has no graph hold, and graphs are the most there can be"
    depends = (
        "mode, attention backend, experts, latent or sparse attention, drafters and encoders depend on model and device"
    )
    return f"{reason}, {says}; {depends}; {remedy}"


def other_device(sign: str, machine: str) -> str:
    """Return the reason of an answer for a device that is not NVIDIA's, by the word that says so."""
    return f"{sign} is for a device that is not NVIDIA's, which is not emulated (what no flag sets is as on {machine})"


def other_family(name: str) -> str | None:
    """Return the words that make a name no dense decoder of text, as in ``DeepSeek-V9``; None: it has none."""
    found = _OTHER.search(name.rstrip("/").rpartition("/")[2])
    return found[0].strip("-_.") if found else None


def remedy(name: str | None) -> str:
    """Return what to do about a model whose facts are not here."""
    fetch = ", or fetch that with --download" if name is not None and hub.is_name(name) else ""
    return f"name a folder with its config.json{fetch}"
