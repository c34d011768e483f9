"""``--kv-transfer-config`` of vLLM: whether there is such a KV connector, and whether it works between layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture_planner.engines.parsing import did_you_mean
from capture_planner_vllm.flags import refusal
from capture_planner_vllm.parts import names
from capture_planner_vllm.unemulated import not_emulated

FLAG = "--kv-transfer-config"
_ROLES = ("kv_producer", "kv_both", "kv_consumer")
_BY_LAYER = "LMCacheConnectorV1"
_SEVERAL = "MultiConnector"


def check_connector(config: Mapping[str, Any]) -> None:
    """Raise ``FlagError`` for a connector or a role that vLLM has not, or whose class is the user's."""
    name, role = config.get("kv_connector"), config.get("kv_role")
    if role not in (None, *_ROLES) or (role is None and name is not None):
        says = f"vLLM has no role {role!r}" if role is not None else "vLLM wants the role of a connector"
        raise refusal(FLAG, says, f"give one of {', '.join(_ROLES)}", "kv_role")
    if name is None:
        raise refusal(FLAG, "vLLM wants a connector's name", "name one", "kv_connector")
    if config.get("kv_connector_module_path"):
        what = "a connector of your own"
        raise not_emulated(FLAG, what, "name one of vLLM's", "kv_connector_module_path")
    if name not in names()["connectors"]:
        remedy = did_you_mean(str(name), names()["connectors"], "name one of vLLM's")
        raise refusal(FLAG, f"vLLM 0.33 has no KV connector {name}", remedy, "kv_connector")
    if name == "HiSparseConnector":
        # Models with sparse attention are not emulated, and no other has it.
        raise refusal(FLAG, "vLLM has it for sparse attention only", "leave it out", "kv_connector")
    for child in _children(config):
        check_connector(child)


def works_between_layers(config: Mapping[str, Any]) -> bool:
    """Say whether a connector, or one of its children, needs PIECEWISE graphs."""
    if config.get("kv_connector") == _BY_LAYER:
        return bool(_extra(config).get("use_layerwise", False))
    return any(works_between_layers(child) for child in _children(config))


def _extra(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("kv_connector_extra_config") or {}
    return found


def _children(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if config.get("kv_connector") != _SEVERAL:
        return []
    found = _extra(config).get("connectors", [])
    if not isinstance(found, list) or not all(isinstance(child, dict) for child in found):
        inside = ("kv_connector_extra_config", "connectors")
        raise refusal(FLAG, "vLLM wants a list of connectors", "give objects with kv_connector", *inside)
    return found
