"""Each architecture of SGLang's release: answered as SGLang answers, by the flags alone, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from capture_planner.engines import checkpoints
from capture_planner.errors import FlagError
from capture_planner_sglang.emulation.engine import emulate
from capture_planner_sglang.emulation.resolution import architectures
from capture_planner_sglang.emulation.rules import OWN_LIMITS
from engines.generators import sglang as drawing
from engines.generators import sglang_answers as answers
from engines.generators.sglang_families import HYBRID, SPARSE, VISION

_GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "sglang_architectures.json").read_text())
_RECORDED: dict[str, list[int]] = _GOLDEN["architectures"]
H100 = drawing.environment("h100")
_FAMILIES = (*drawing.LATENT, *VISION, *HYBRID, *SPARSE)
_DECODES, _LIMITS = ("ForCausalLM", "ForConditionalGeneration"), ("requests", "pool", "chunk")
_UNFOLLOWED = "whole prefill graphs of .* are not emulated|may take (triton|flashinfer), .*not emulated; give dsa"


def test_architectures_are_emulated_or_refused() -> None:
    """It is followed or it is not; what has no prefill graphs is followed."""
    kinds = architectures()
    assert kinds["followed"] | kinds["not_followed"] == set(_RECORDED)
    assert not kinds["followed"] & kinds["not_followed"]
    assert kinds["without_prefill_graphs"] < kinds["followed"]


@pytest.mark.parametrize("probe", range(len(drawing.PROBES)))
def test_emulated_architectures_equal_sglang(tmp_path: Path, probe: int) -> None:
    """An emulated architecture has SGLang's own sizes and graphs; the flags' answer to another has no fewer."""
    device, flags = drawing.PROBES[probe]
    # In CI each probe asks a quarter of them, and each architecture is asked by three probes.
    step = 1 if settings.default.max_examples >= 100 else 4
    for architecture, recorded in [*_RECORDED.items()][probe % step :: step]:
        model = drawing.model_folder(tmp_path / architecture, architecture, 8192)
        command = ["--model-path", model, *flags.replace("MODEL", model).split()]
        ours = answers.emulated(command, drawing.environment(device), [])
        if re.search(_UNFOLLOWED, str(ours.get("refused"))):
            assert architecture in _FAMILIES
        elif architecture in architectures()["followed"]:
            kept: Any = "refused" if "refused" in ours else answers.shortened(ours)
            assert json.loads(json.dumps(kept)) == _GOLDEN["answers"][recorded[probe]], architecture
        elif not architecture.endswith(_DECODES) or architecture in OWN_LIMITS:
            assert "whose rules for graphs are not emulated" in ours["refused"]
            assert architecture in ours["refused"]
        elif "refused" in ours:
            assert "Gemma4" in architecture
            assert "FROZEN_KV_MTP" in ours["refused"]
        else:
            _assert_bounded(answers.shortened(ours), _GOLDEN["answers"][recorded[probe]], architecture)


def _assert_bounded(ours: Any, theirs: Any, architecture: str) -> None:
    """Sizes and limits are the engine's own for this model, and it captures no graph that the flags do not allow."""
    if theirs != "refused":
        assert ours["decode"][1:] == json.loads(json.dumps(theirs["decode"]))[1:], architecture
        assert [ours[key] for key in _LIMITS] == [theirs[key] for key in _LIMITS], architecture
        assert _sizes(theirs["graphs"]["target"]) <= _sizes(ours["graphs"]["target"]), architecture


def _sizes(rows: Any) -> set[tuple[object, ...]]:
    """Write runs of graphs out, one by one."""
    return {
        (*row[:-1], first + step * index) for row in rows for first, step, count in row[-1] for index in range(count)
    }


def test_refused_architectures_differ_from_a_decoder() -> None:
    """Were none refused, there would be wrong answers: SGLang answers otherwise than for an ordinary decoder."""
    plain = _RECORDED["MistralForCausalLM"]
    for name in ("Olmo2ForCausalLM", "Qwen3Model", "LlavaLlamaForCausalLM", "OPTForCausalLM", "Llama4ForCausalLM"):
        assert _RECORDED[name] != plain


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["LlamaForCausalLM", "Qwen3Model"], "rules for graphs are not emulated"),
        ([], "names no architecture"),
        (None, "names no architecture"),
    ],
)
def test_unknown_architectures_are_refused(tmp_path: Path, names: list[str] | None, why: str) -> None:
    """SGLang stops without an architecture, asks for any of several, and may run an unknown one all the same."""
    config = {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 64, "architectures": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlagError, match=why):
        emulate(["--model-path", str(tmp_path)], H100)


@pytest.mark.parametrize("architecture", sorted({c["architectures"][0] for c in checkpoints.known().values()}))
def test_known_models_are_those_of_their_architectures(architecture: str) -> None:
    """A name is answered as a folder of its architecture is: with its facts, or by the flags alone."""
    name = next(name for name, config in checkpoints.known().items() if config["architectures"] == [architecture])
    emulation = emulate(["--model-path", name], H100)
    assert emulation.graphs
    assert bool(emulation.by_flags) == (architecture not in architectures()["followed"])


def test_opt_has_no_prefill_graphs() -> None:
    """Its layers are in a decoder below the model, where SGLang does not look."""
    emulation = emulate(["--model-path", "facebook/opt-125m"], H100)
    assert {graph.entry.query_len for graph in emulation.graphs} == {1}
    assert "no-layers-for-prefills" in {decision.rule for decision in emulation.decisions}
