"""Compare a forward with what attention is defined as: rows, likeliest tokens, and slots."""

from __future__ import annotations

import torch

from capture_planner.conformance.failure import Check, located
from capture_planner.conformance.scene import VOCABULARY
from capture_planner.conformance.scene_batch import SceneBatch
from capture_planner.conformance.stage import Stage
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.runtime.executor import NULL_SLOT


def check_target(stage: Stage, batch: SceneBatch, entry: Entry | None, *, eager: bool) -> None:
    """Check hidden states, tokens and slots of the target's forward that was just run."""
    body, width = stage.runner.parts.target, stage.target.tables.shape.width
    with located(batch.batch(Role.TARGET), entry):
        for index, live, where, ids in batch.each():
            if where.stop > where.start:
                want = stage.target.tables.attended(stage.on_device(ids), live.computed).flatten(1)
                wrong = first_wrong_row(body.hidden[where], want, width, stage.tolerance)
                if wrong is not None:
                    message = f"attention of {wrong} of request {index} in the batch"
                    raise row_check(entry, eager=eager).violation(message)
                has_tokens = entry is not None and entry.query_len is not None
                if has_tokens and not is_likeliest(body.tokens[where], want, stage.target.head, stage.tolerance):
                    raise Check.ROWS.violation("a token is not the likeliest of its row")
        check_slots(stage, batch, Role.TARGET)


def row_check(entry: Entry | None, *, eager: bool) -> Check:
    """Return the check that a wrong row fails: of a replay, or of a step without a graph."""
    return Check.EAGER if eager or entry is None else Check.ROWS


def first_wrong_row(got: torch.Tensor, want: torch.Tensor, width: int, tolerance: float) -> str | None:
    """Compare rows ``[n, layers * width]`` layer by layer; describe the first that is off, if any is."""
    off = (got.double() - want).view(len(want), -1, width).norm(dim=2)
    size = want.view(len(want), -1, width).norm(dim=2)
    wrong = ~(off <= tolerance * (size + 0.1))
    if not bool(wrong.any()):
        return None
    row, layer = (int(part) for part in wrong.nonzero()[0])
    return f"layer {layer}, off by {float(off[row, layer] / (size[row, layer] + 1e-30)):.2g} of its norm in row {row}"


def is_likeliest(tokens: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor, tolerance: float) -> bool:
    """Say whether each token is the likeliest of its row of ``hidden float64[n, hidden]``, or tied with it."""
    if not bool(((tokens >= 0) & (tokens < VOCABULARY)).all()):
        return False
    logits = hidden @ head.double()
    chosen = logits.gather(1, tokens[:, None].long()).squeeze(1)
    slack = 4 * tolerance * (hidden.norm(dim=1) + 0.1) * head.double().norm(dim=0).max()
    return bool((chosen >= logits.max(1).values - slack).all())


def check_slots(stage: Stage, batch: SceneBatch, role: Role) -> None:
    """Check that the slots of the batch hold the keys and values of its tokens."""
    cache, inputs = stage.world.caches[int(role.is_drafter)], batch.inputs_by_role[role].declared
    ids, positions = stage.on_device(inputs["input_ids"]).long(), stage.on_device(inputs["positions"])
    slots = stage.on_device(inputs["slot_mapping"])
    real = slots != NULL_SLOT
    for held, want in zip(cache.flat(), cache.expected(ids, positions), strict=True):
        if not torch.allclose(held[slots][real], want[real], rtol=stage.tolerance, atol=stage.tolerance):
            raise Check.STORED.violation("a slot of the batch does not hold the key and value of its token")
