"""The JSON Schemas: valid, accept what the codec accepts, refuse what it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from capture_planner import codec
from capture_planner.codec.json_schema import SCHEMAS, json_schema
from capture_planner.errors import InvalidDocument
from capture_planner.records._base import replace
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import CapturePolicy, CaptureTiming, Spec
from capture_planner.records.traffic import Traffic
from capture_planner.testing import environments, plans, specs
from support.examples import at_most
from support.strategies import observations, profiles, traffics

PLANS = Path(__file__).parent.parent.parent / "plans"
KINDS: dict[str, type] = {
    "spec": Spec,
    "plan": Plan,
    "environment": Environment,
    "observation": Observation,
    "traffic": Traffic,
    "profile": Profile,
}
FOLDERS = {"spec": "specs", "plan": "locked", "environment": "environments", "profile": "profiles"}
SHIPPED = [
    pytest.param(kind, path, id=path.name)
    for kind, folder in FOLDERS.items()
    for path in sorted((PLANS / folder).glob("*.yaml"))
]

Change = Callable[[dict[str, Any]], object]


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(SCHEMAS[kind]())


def data_of(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_itself_valid(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind]())
    assert SCHEMAS[kind]() == json_schema(KINDS[kind]) == json.loads(json.dumps(SCHEMAS[kind]()))


@pytest.mark.parametrize(("kind", "path"), SHIPPED)
def test_a_schema_accepts_every_shipped_file(kind: str, path: Path) -> None:
    validator(kind).validate(data_of(path))


@given(specs())
def test_the_spec_schema_accepts_what_is_written_of_any_spec(spec: Spec) -> None:
    validator("spec").validate(json.loads(codec.dumps_json(codec.to_data(spec))))


@given(environments())
def test_the_environment_schema_accepts_what_is_written_of_any(environment: Environment) -> None:
    validator("environment").validate(json.loads(codec.dumps_json(codec.to_data(environment))))


@at_most(30)
@given(plans())
def test_the_plan_schema_accepts_what_is_written_of_any_plan(plan: Plan) -> None:
    validator("plan").validate(json.loads(codec.dumps_json(codec.to_data(plan))))


@given(observations())
def test_the_observation_schema_accepts_what_is_written_of_any(observation: Observation) -> None:
    validator("observation").validate(json.loads(codec.dumps_json(codec.to_data(observation))))


@given(traffics())
def test_the_traffic_schema_accepts_what_is_written_of_any(traffic: Traffic) -> None:
    validator("traffic").validate(json.loads(codec.dumps_json(codec.to_data(traffic))))


@given(profiles())
def test_the_profile_schema_accepts_what_is_written_of_any(profile: Profile) -> None:
    validator("profile").validate(json.loads(codec.dumps_json(codec.to_data(profile))))


@given(specs(), st.sampled_from(CapturePolicy))
def test_a_word_may_stand_for_a_policy(spec: Spec, policy: CapturePolicy) -> None:
    """The schema accepts it. Read, it is all at start; lazy capture has a budget, and the error shows how."""
    data = json.loads(codec.dumps_json(codec.to_data(replace(spec, capture=CaptureTiming())))) | {
        "capture": policy.value
    }
    validator("spec").validate(data)
    text = codec.dumps_json(data)
    if policy is CapturePolicy.START:
        assert codec.loads(text, Spec) == replace(spec, capture=CaptureTiming())
    else:
        with pytest.raises(
            InvalidDocument, match=r"capture\.memory: lazy capture needs a budget; write capture: {policy"
        ):
            codec.loads(text, Spec)


def _set(value: object, *path: str | int) -> Change:
    def change(data: dict[str, Any]) -> None:
        at: Any = data
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value

    return change


WRONG: list[tuple[str, str, Change]] = [
    ("spec", "unknown key", _set(1, "colour")),
    ("spec", "unknown key inside", _set(1, "limits", "max_num_request")),
    ("spec", "missing", lambda data: data.pop("backend")),
    ("spec", "text for a number", _set("256", "limits", "max_num_reqs")),
    ("spec", "a fraction for a count", _set(8.7, "limits", "max_num_reqs")),
    ("spec", "true for a count", _set(True, "limits", "max_num_reqs")),
    ("spec", "zero for a count", _set(0, "limits", "max_num_reqs")),
    ("spec", "null for a count", _set(None, "limits", "max_num_reqs")),
    ("spec", "no such mode", _set("FULL_AND_FAST", "mode")),
    ("spec", "a list for a mapping", _set([], "model")),
    ("spec", "a mapping for a list", _set({}, "speculative", "schedule")),
    ("spec", "too short a range", _set([[1, 2]], "speculative", "schedule")),
    ("spec", "text for a switch", _set("no", "model", "sinks")),
    ("spec", "no such unit", _set("2 gigabytes", "budget", "memory")),
    ("spec", "below zero", _set(-1.0, "budget", "seconds")),
    ("spec", "another version", _set(2, "version")),
    ("plan", "unknown key", _set(1, "colour")),
    ("plan", "no such role", _set("drafter", "roles", 0, "role")),
    ("plan", "no digest", _set("sha256:12", "spec")),
    ("plan", "unknown key in a row", _set(1, "roles", 0, "entries", 0, "size")),
    ("plan", "text in a row", _set(["8"], "roles", 0, "entries", 0, "num_tokens")),
    ("plan", "no such reason", _set("forgot", "roles", 0, "waivers", 0, "reason")),
    ("environment", "unknown key", _set(1, "colour")),
    ("environment", "no such device", _set("tpu", "device", "kind")),
    ("environment", "a number for a capability", _set(9.0, "device", "capability")),
    ("environment", "a number for a version", _set(2.13, "packages", "torch")),
]
START = {
    "spec": PLANS / "specs" / "qwen3-8b-eagle3.yaml",
    "plan": PLANS / "locked" / "qwen3-8b-eagle3.h100.yaml",
    "environment": PLANS / "environments" / "h100.yaml",
}


@pytest.mark.parametrize(
    ("kind", "change"), [pytest.param(kind, change, id=f"{kind}-{what}") for kind, what, change in WRONG]
)
def test_schema_and_codec_refuse_the_same(kind: str, change: Change) -> None:
    data = data_of(START[kind])
    codec.loads(json.dumps(data), KINDS[kind])
    wrong = copy.deepcopy(data)
    change(wrong)
    assert not validator(kind).is_valid(wrong)
    with pytest.raises(InvalidDocument):
        codec.loads(json.dumps(wrong), KINDS[kind])


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for inner in schema.values():
            yield from _objects(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _objects(inner)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described_and_nothing_else_admitted(kind: str) -> None:
    for found in _objects(SCHEMAS[kind]()):
        assert found["additionalProperties"] is False
        assert found["description"]
        for name, field in found["properties"].items():
            assert field.get("description"), name
