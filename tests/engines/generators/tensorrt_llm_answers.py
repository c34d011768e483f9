"""What TensorRT-LLM and the emulation of it answer to a drawn case, in one form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner_tensorrt_llm.engine import ENGINE
from capture_planner_tensorrt_llm.manager import TargetGraphs, agreed
from engines.generators.tensorrt_llm import Case, Question

MACHINE = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))
"""No rule of TensorRT-LLM asks for the machine."""


@attrs.frozen
class Answers:
    """What one side makes of a case; batches are answered by the requests of their graph, 0 for none."""

    sizes: list[int]
    """Requests, ascending."""
    shapes: list[tuple[int, int]]
    """Requests and tokens of each, in the order of capture."""
    alone: list[int]
    """Of the case's batches."""
    ranks: list[list[int]]
    """Of the batches of attention-DP ranks, step by step; empty without such ranks."""


def batch_of(question: Question) -> Batch:
    """Return the batch that a question is about; where requests differ, one has one token more."""
    num_reqs, query_len, past_prompt = question
    tokens = num_reqs + 1 if query_len is None else num_reqs * query_len
    return Batch(role=Role.TARGET, num_reqs=num_reqs, num_tokens=tokens, query_len=query_len, past_prompt=past_prompt)


def emulated(case: Case, file: Path) -> Answers:
    """Return what the emulation makes of a case, whose file is written to ``file``; raises ``FlagError``."""
    file.write_text(json.dumps(case.config), "utf-8")
    emulation = ENGINE.emulate([*case.flags, "--config", str(file)], MACHINE)
    (manager,) = emulation.managers
    assert isinstance(manager, TargetGraphs)
    entries = [graph.entry for graph in emulation.graphs]
    steps = case.ranks if emulation.parallel.data > 1 else ()
    return Answers(
        sizes=list(emulation.sizes),
        shapes=[(entry.num_reqs or 0, entry.query_len or 0) for entry in entries],
        alone=[_requests(emulation.dispatch(batch_of(question))) for question in case.batches],
        ranks=[list(map(_requests, agreed(manager, list(map(batch_of, step))))) for step in steps],
    )


def asked(engine: Any, case: Case) -> Answers:
    """Return what the engine itself makes of it: ``engine`` is the oracle's, with the case's flags."""
    steps = case.ranks if engine.attention_dp and engine.tensor > 1 else ()
    return Answers(
        sizes=sorted(set(engine.sizes)),
        shapes=[(size, engine.width(draft_len)) for size, draft_len in engine.shapes],
        alone=[engine.answers([question], together=False)[0] for question in case.batches],
        ranks=[engine.answers(step, together=True) for step in steps],
    )


def _requests(dispatch: Dispatch) -> int:
    return 0 if dispatch.entry is None else dispatch.entry.num_reqs or 0


def shortened(answers: Answers) -> dict[str, Any]:
    """Return answers as they are recorded: long lists as runs, shapes by tokens of a request.

    The order of capture is that of the first three shapes: largest batch first.
    """
    shapes: dict[str, list[int]] = {}
    for num_reqs, width in answers.shapes:
        shapes.setdefault(str(width), []).append(num_reqs)
    return {
        "sizes": _runs(answers.sizes),
        "shapes": {width: _runs(sorted(sizes)) for width, sizes in shapes.items()},
        "first": [list(shape) for shape in answers.shapes[:3]],
        "alone": answers.alone,
        "ranks": answers.ranks,
    }


def _runs(values: Iterable[int]) -> list[list[int]]:
    """Write ascending numbers as [first, count] of each run of neighbours."""
    found: list[list[int]] = []
    for value in values:
        if found and value == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
