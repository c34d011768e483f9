"""Numbers that are held to the oracle: rows, likeliest tokens, and what is stored in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from capture_planner.conformance.finding import Check
from capture_planner.conformance.rows import Rows
from capture_planner.conformance.scene import VOCABULARY
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.runtime.executor import NULL_SLOT

if TYPE_CHECKING:
    from capture_planner.conformance.stage import Stage


def of_rows(entry: Entry | None, *, eager: bool) -> Check:
    """Return what a wrong row breaks: of a replay, or of a step without a graph, wanted so or not."""
    return Check.EAGER if eager or entry is None else Check.ROWS


def compare_rows(
    stage: Stage,
    batch: Rows,
    role: Role,
    entry: Entry | None,
    index: int,
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    eager: bool,
    what: str = "attention",
) -> None:
    """Hold rows ``[n, layers * width]`` to what they are defined as, layer by layer."""
    width = stage.target.tables.heads.width if role is Role.TARGET else got.shape[1]
    off = (got.double() - want).view(len(want), -1, width).norm(dim=2)
    size = want.view(len(want), -1, width).norm(dim=2)
    wrong = ~(off <= stage.tolerance * (size + 0.1))
    if bool(wrong.any()):
        row, layer = (int(part) for part in wrong.nonzero()[0])
        says = (
            f"{what} of layer {layer}, row {row} of request {index} in the batch, is off by "
            f"{float(off[row, layer] / (size[row, layer] + 1e-30)):.2g} of its norm"
        )
        stage.refuse(of_rows(entry, eager=eager), says, batch, role, entry)


def is_likeliest(stage: Stage, tokens: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> bool:
    """Say whether each token is the likeliest, or as good as that, of ``hidden float64[n, hidden]``."""
    if not bool(((tokens >= 0) & (tokens < VOCABULARY)).all()):
        return False
    logits = hidden @ head.double()
    said = logits.gather(1, tokens[:, None].long()).squeeze(1)
    slack = 4 * stage.tolerance * (hidden.norm(dim=1) + 0.1) * head.double().norm(dim=0).max()
    return bool((said >= logits.max(1).values - slack).all())


def check_stored(stage: Stage, batch: Rows, family: int, entry: Entry | None, role: Role) -> None:
    of, declared = stage.world.families[family], batch.inputs_by_role[role].declared
    ids, positions = stage.on(declared["input_ids"]).long(), stage.on(declared["positions"])
    slots = stage.on(declared["slot_mapping"])
    real = slots != NULL_SLOT
    for cache, want in zip(of.flat(), of.made(ids, positions), strict=True):
        if not torch.allclose(cache[slots][real], want[real], rtol=stage.tolerance, atol=stage.tolerance):
            stage.refuse(
                Check.STORED,
                "a slot of the batch does not hold the key and value of its token",
                batch,
                role,
                entry,
            )
