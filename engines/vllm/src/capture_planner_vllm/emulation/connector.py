"""``--kv-transfer-config``: whether its KV connector works between layers, which rules out FULL graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture_planner.engines.parsing import did_you_mean, refusal
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.releases import minor
from capture_planner_vllm.emulation.tables import names

_FLAG = "--kv-transfer-config"


def works_between_layers(config: Mapping[str, Any]) -> bool:
    """Say whether a connector requires PIECEWISE; raises ``FlagError`` if unknown, ``NotEmulated`` for a custom one."""
    name, extra = config.get("kv_connector"), config.get("kv_connector_extra_config")
    if config.get("kv_connector_module_path"):
        subject, place = "a custom connector", "kv_connector_module_path"
        raise not_emulated(_FLAG, subject, "name one of vLLM's connectors", place)
    if name is not None and name not in names()["connectors"]:
        remedy = did_you_mean(str(name), names()["connectors"], "name one of vLLM's connectors")
        raise refusal(_FLAG, f"vLLM {minor()} has no KV connector {name}", remedy, "kv_connector")
    if not isinstance(extra, dict):
        return False
    if name == "MultiConnector":
        children = extra.get("connectors")
        known = [child for child in children if isinstance(child, dict)] if isinstance(children, list) else []
        # In a list, so that an unknown connector behind one that decides is refused too.
        return any([*map(works_between_layers, known)])
    return name == "LMCacheConnectorV1" and bool(extra.get("use_layerwise", False))
