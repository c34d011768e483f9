"""Launches of other models than Llamas: with windows, multimodal rope and recurrent layers."""

import json

import pytest

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.model import Method, Recurrent, Speculative
from capture_planner.records.spec import GroupSpec, Roles, RoleSpec
from capture_planner_runner.options import Options
from support.launches import MODEL, SPEC, one_request, started
from support.model_families import HYBRID, MAMBA

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = Options(debug=True, poison=True)
_GROUPS = tuple(GroupSpec(name=f"g{number}", layers=1, window=window) for number, window in enumerate((None, 3, 8)))
WINDOWS = Roles(target=RoleSpec(groups=_GROUPS))


def check_served(outcome, *modes):
    """All requests have the model's own tokens, and graphs of these modes served them."""
    assert outcome.differing == ()
    assert {forward.mode for forward in outcome.report.forwards if forward.role is Role.TARGET} >= {*modes}


@pytest.mark.parametrize(("roles", "mrope"), [(WINDOWS, False), (WINDOWS, True), (Roles(), True)])
def test_a_random_model_has_the_windows_and_the_rope_of_its_plan(roles, mrope):
    """With as many different windows as the plan has groups; tokens are compared with windows computed densely."""
    spec = replace(SPEC, model=replace(MODEL, num_layers=3, mrope=mrope), roles=roles)
    outcome = started(spec, verify=True, options=ALL)
    check_served(outcome, GraphMode.FULL, GraphMode.PIECEWISE)
    assert ("Qwen3VL" if mrope else "Llama") in outcome.report.model


def hybrid(tmp_path, family):
    """Write a configuration with recurrent layers around one that attends, and return a spec of it."""
    numbers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    rest = {"intermediate_size": 24, "vocab_size": 20, "max_position_embeddings": 48}
    kinds = {"layer_types": HYBRID} if family == "granitemoehybrid" else {"attn_layer_indices": [1]}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": family} | numbers | rest | MAMBA | kinds))
    model = replace(MODEL, num_layers=3, hidden_size=32, recurrent=Recurrent(layers=2, state=2048))
    return replace(SPEC, model=model), config


@pytest.mark.parametrize("family", ["granitemoehybrid", "bamba"])
@pytest.mark.parametrize("k", [0, 2])
def test_hybrids_go_on_from_the_states_of_their_requests(family, k, tmp_path):
    """Through chunked prompts, padded graphs of both modes and rejected drafts."""
    spec, config = hybrid(tmp_path, family)
    spec = replace(spec, speculative=Speculative(method=Method.EAGLE, num_tokens=k) if k else None)
    outcome = started(spec, model=config, verify=True, options=ALL)
    check_served(outcome, GraphMode.FULL, GraphMode.PIECEWISE)


def test_hybrids_are_planned_with_their_recurrent_layers_and_draft_nothing(tmp_path):
    """A plan without them is for another model; a draft model would need states of its own."""
    spec, config = hybrid(tmp_path, "granitemoehybrid")
    with pytest.raises(RunError, match=r"model.recurrent.layers: the plan says 0, .* has 2"):
        started(replace(spec, model=replace(spec.model, recurrent=None)), model=config)
    drafts = Speculative(method=Method.DRAFT_MODEL, num_tokens=2)
    with pytest.raises(RunError, match="has recurrent layers, which no draft model here has"):
        started(replace(spec, speculative=drafts), model=config, drafter=config, workload=one_request())
