"""What a resolution works on: the flags, the machine, and the values that the rules rewrite."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED
from capture_planner.engines.emulation import Decisions
from capture_planner.engines.history import json_table
from capture_planner.engines.parsing import refusal
from capture_planner.records.environment import Environment

FULL, BREAKABLE, DISABLED = "full", "breakable", "disabled"
"""How a phase's graphs are captured: whole, in segments between what cannot be captured, or not at all."""

DECODE, PREFILL = "decode", "prefill"


@attrs.define
class Phase:
    """The graph settings of one phase; sizes are requests for decodes and tokens for prefills."""

    backend: Any
    max_bs: Any = None
    bs: Any = None
    max_context_size: Any = None
    full_prefill_max_req: Any = None
    full_prefill_prefix_chunk_tokens: Any = None
    max_seq_len: Any = None


ASSUMED_CONTEXT = 1 << 17
"""Longest sequence where nothing says it; it only bounds prefill graphs of very small request pools."""
COUNTS_AS = f"an ordinary text decoder of {ASSUMED_CONTEXT} tokens"
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_LENGTH_LEFT_OUT = 2048
_OTHERS_BACKENDS = ("aiter", "wave", "ascend", "intel_amx", "intel_xpu")
"""Attention backends for devices that are not NVIDIA's."""
_ARCHITECTURES = "architectures.json"


@cache
def architectures() -> Mapping[str, frozenset[str]]:
    """Return the release's architectures, as recorded from it: followed, without prefill graphs, not followed.

    Those that are followed are decoders of text that no rule for graphs touches, or whose rule is emulated.
    """
    return {kind: frozenset(names) for kind, names in json_table(__package__, _ARCHITECTURES).items()}


def decided_in(architecture: str | None) -> str:
    """Return the release's files below ``sglang/srt`` that name an architecture that is not followed."""
    return ", ".join(json_table(__package__, _ARCHITECTURES)["decided_in"].get(architecture, ()))


@attrs.frozen
class SglangModel:
    """What is known of the served model: an ordinary text decoder, and what its config.json says."""

    source: str = ASSUMED
    architectures: tuple[str, ...] = ()
    context: int | None = None
    """Longest sequence, in tokens."""
    latent: bool = False
    """Whether its attention is latent (MLA)."""
    sparse: bool = False
    """Whether it attends to selected tokens only (DeepSeek sparse attention)."""
    multimodal: bool = False
    index_pool: int = 1
    """Tokens that one entry of the index of sparse attention stands for."""
    like: str | None = None
    """The known model whose facts these are, where the name is of its family."""

    @property
    def architecture(self) -> str | None:
        return self.architectures[0] if self.architectures else None

    def has(self, kind: str) -> bool:
        """Whether its architecture is of a kind of ``architectures``."""
        return self.architecture in architectures()[kind]

    @property
    def drafts_prefills(self) -> bool:
        """Whether SGLang finds the layers of the draft that it makes of the model, whose prefills it captures."""
        return not self.has("drafts_without_prefill_graphs")

    @property
    def has_prefill_graphs(self) -> bool:
        """Whether SGLang finds the layers of its class, whose prefills it captures."""
        return not self.has("without_prefill_graphs")


def read_model(path: str, flag: str = "--model-path", replaced: Mapping[str, Any] | None = None) -> SglangModel:
    """Read a config.json by folder or name; raises ``FlagError`` for a folder without one that can be read.

    :param replaced: fields that replace those of the file.
    """
    try:
        found = checkpoints.find(path)
        if replaced:
            found = attrs.evolve(found, config={**found.config, **replaced})
        return SglangModel(
            source=found.source,
            architectures=tuple(found.config.get("architectures") or ()),
            context=None if found.source == ASSUMED else _context(found.text, found.rope),
            latent=found.text.get("kv_lora_rank") is not None,
            sparse=found.text.get("index_topk") is not None,
            multimodal="vision_config" in found.config,
            index_pool=int(found.text.get("index_kpool") or 1),
            like=found.like,
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"SGLang cannot read the config.json in {path}: {error}"
        raise refusal(flag, reason, "give a model's own folder; a plan is checked without --engine") from error


def _context(text: Mapping[str, Any], ropes: tuple[Mapping[str, Any], ...]) -> int:
    """Return the longest sequence: what is stated, times the factor of a rotary embedding it lacks."""
    stated = next((text[key] for key in _LENGTHS if text.get(key) is not None), _LENGTH_LEFT_OUT)
    # get_context_length finds a factor only where all layers have one kind of rotary embedding.
    rope = ropes[0] if len(ropes) == 1 else {}
    # What has a length before scaling, its own or one that Transformers fills in, states the scaled one.
    scaled = "original_max_position_embeddings" in rope or rope.get("rope_type") in ("llama3", "yarn", "longrope")
    return int(stated if scaled else stated * rope.get("factor", 1))


@attrs.define
class Startup:
    """The values of one start of SGLang while SGLang's rules run over them, and what the rules did."""

    args: argparse.Namespace
    sources: dict[str, str]
    """Where each value comes from that is not the default, by flag; ``cuda_graph_config.decode.bs`` for a phase's."""
    environment: Environment
    model: SglangModel
    decode: Phase = attrs.Factory(lambda: Phase(FULL))
    prefill: Phase = attrs.Factory(lambda: Phase(BREAKABLE))
    locked: set[tuple[str, str]] = attrs.Factory(set)
    """(phase, key) pairs that a flag has set, which the defaults' rules leave alone."""
    draft: SglangModel = attrs.Factory(SglangModel)
    """The draft model: an ordinary decoder where nothing is known of it."""
    attention: tuple[str, str] = ("", "")
    """Backends of prefills and decodes; of a model that is not emulated those that flags name."""
    by_flags: str = ""
    """Why flags alone decide, where the model's rules are not emulated; it counts as an ordinary text decoder."""
    decisions: Decisions = attrs.Factory(Decisions)

    @property
    def named(self) -> str | None:
        """The model as the command names it."""
        return self.args.model_path if "model_path" in self.sources else None

    def phase(self, name: str) -> Phase:
        return self.decode if name == DECODE else self.prefill

    def rewrite(self, name: str, value: Any, rule: str, says: str) -> None:
        """Change a flag's value, and write down why."""
        before = getattr(self.args, name)
        setattr(self.args, name, value)
        self.sources[name] = rule
        self.decisions.note(rule, before, value, says)

    def put(self, phase: str, key: str, value: Any, source: str) -> None:
        """Set a phase's value, and where it comes from."""
        setattr(self.phase(phase), key, value)
        self.sources[f"cuda_graph_config.{phase}.{key}"] = source

    def change(self, phase: str, key: str, value: Any, rule: str, says: str) -> None:
        """Change a phase's value, and write down why."""
        self.decisions.note(rule, getattr(self.phase(phase), key), value, says)
        self.put(phase, key, value, rule)

    def disable(self, phase: str, rule: str, says: str) -> None:
        """Turn a phase's graphs off, and write down why where they were on."""
        if self.phase(phase).backend != DISABLED:
            self.change(phase, "backend", DISABLED, rule, says)

    def disable_all(self, rule: str, says: str) -> None:
        for phase in (DECODE, PREFILL):
            self.disable(phase, rule, says)

    @property
    def other_device(self) -> str:
        """What says that the device is not NVIDIA's; empty for a GPU of NVIDIA."""
        args = self.args
        names = (args.attention_backend, args.decode_attention_backend, args.prefill_attention_backend)
        others = [each for each in names if each in _OTHERS_BACKENDS]
        device = args.device if args.device not in (None, "cuda", "cpu") else ""
        return str(args.other_device or device or (others[0] if others else ""))

    @property
    def attention_dp(self) -> bool:
        return int(self.args.attn_dp_size) > 1
