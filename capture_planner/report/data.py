"""What ``--format json`` prints where it is not a file's own form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture_planner.analysis.coverage import Coverage
from capture_planner.analysis.explain import Explanation
from capture_planner.modes import Role
from capture_planner.planning.groups import attentions
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Batch
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Spec
from capture_planner.report.tables import entry_data

PLAIN = Attention(
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=131072, max_query_len=1
)
"""The layers of a plain 8B model, for questions that name no deployment."""


def batch_data(batch: Batch) -> dict[str, Any]:
    """Return a batch as plain data."""
    return {
        "role": batch.role,
        "num_reqs": batch.num_reqs,
        "num_tokens": batch.num_tokens,
        "query_len": batch.query_len,
        "past_prompt": batch.past_prompt,
        "active_loras": batch.active_loras,
    }


def explanation_data(explained: Explanation) -> dict[str, Any]:
    """Return an explanation as plain data."""
    batch, answer = explained.batch, explained.answer
    return {
        "batch": batch_data(batch),
        "mode": answer.mode.value,
        "entry": entry_data(answer.entry),
        "padded_tokens": answer.padded_tokens,
        "padded_reqs": answer.padded_reqs,
        "reason": answer.reason,
        "says": explained.message,
        "rejected": [
            {"entry": entry_data(miss.entry), "rejection": miss.rejection, "says": miss.message}
            for miss in explained.near_misses
        ],
    }


def coverage_data(walked: Coverage) -> dict[str, Any]:
    """Return every cell of the admissible space as plain data."""
    return {
        "covered": not walked.uncovered,
        "cells": [
            {
                "role": cell.role,
                "kind": cell.kind.value,
                "query_len": cell.query_len,
                "first": cell.first,
                "last": cell.last,
                "min_reqs": cell.min_reqs,
                "max_reqs": cell.max_reqs,
                "min_loras": cell.min_loras,
                "max_loras": cell.max_loras,
                "mode": cell.answer.mode.value,
                "entry": entry_data(cell.entry),
                "reason": cell.answer.reason,
                "share_padded": round(cell.padded, 4),
                "worst_ratio": round(cell.worst, 4),
            }
            for cell in walked.cells
        ],
    }


def backend_data(
    registry: Registry, environments: Sequence[Environment], spec: Spec | None
) -> list[dict[str, Any]]:
    """Return what each backend says of each environment, by role where a spec has several groups."""
    asked = [(Role.TARGET, "all", PLAIN)] if spec is None else list(attentions(spec))
    return [
        {
            "name": name,
            "distribution": registered.distribution,
            "version": registered.version,
            "support": [
                {
                    "environment": environment.name,
                    "role": role,
                    "group": group,
                    "level": support.level.name,
                    "reason": support.reason,
                }
                for environment in environments
                for role, group, attention in asked
                for support in (registered.support(role, attention, environment),)
            ],
        }
        for name, registered in registry.items()
    ]
