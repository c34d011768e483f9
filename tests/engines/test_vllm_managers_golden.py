"""Our emulation of vLLM's graph managers against what the engine's own functions answered."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines.generators import vllm_managers as cases

GOLDEN = Path(__file__).parent / "golden" / "vllm_managers.json"
PART = 50


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", range(0, 400, PART))
def test_golden_managers_are_the_engines(first: int) -> None:
    """Graphs in order, every batch's answer of every role, and every step of several ranks are the engine's."""
    for index in range(first, first + PART):
        recorded = golden()["answers"][index]
        case = cases.case(golden()["seed"], index)
        ours = json.loads(json.dumps(cases.answers(case)))
        for part in ("graphs", "batches", "steps"):
            assert ours[part] == recorded[part], (index, part, case.configuration)
        wanted = cases.schedule_case(golden()["seed"], index)
        assert cases.schedule_answer(wanted) == recorded["schedule"], (index, wanted)


def test_golden_managers_cover_every_kind() -> None:
    """The golden answers hold full and piecewise graphs, eager batches, chains and passes that do not run."""
    seen: Counter[str] = Counter()
    for answer in golden()["answers"]:
        ranks = [rank for step in answer["steps"] for rank in step]
        seen.update(
            (row[0] if row else "no pass") + " chain" * (len(row) == 6)
            for rows in (*answer["batches"], *ranks)
            for row in rows
        )
        seen["roles " + " ".join(answer["graphs"])] += 1
        seen["refused" if answer["schedule"] is None else "schedule"] += 1
    assert len(golden()["answers"]) == 400
    for kind in ("F", "P", "N", "F chain", "no pass", "refused", "schedule"):
        assert seen[kind] > 100, kind
    for roles in ("target", "target draft_prefill", "target draft_decode", "target draft_prefill draft_decode"):
        assert seen[f"roles {roles}"] > 15, roles
