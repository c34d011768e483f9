"""Run the steps of a scene, with all their checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture_planner.conformance.draft_checks import check_drafts
from capture_planner.conformance.forward_checks import check_serving, check_target
from capture_planner.conformance.scene import Arrive, Depart, Move, Reload, RunBatch, Serve, Step
from capture_planner.conformance.scene_batch import Row, SceneBatch
from capture_planner.conformance.stage import Stage
from capture_planner.modes import Role


@torch.no_grad()
def run_step(stage: Stage, step: Step) -> bool:
    """Run one step; raises ``Violation`` for what does not hold.

    Returns False for a step that does not apply and is skipped: its request is not live, or the limits do
    not admit its batch.
    """
    live = stage.live
    match step:
        case Arrive():
            stage.world.arrive(step)
        case Depart() if step.request in live:
            stage.world.depart(live[step.request])
        case Move() if step.request in live:
            stage.world.move(live[step.request])
        case Reload():
            stage.reload(step.seed)
        case RunBatch():
            has_run = _run_batch(stage, step)
            stage.capture_asked()
            return has_run
        case Serve():
            check_serving(stage, step)
            stage.capture_asked()
        case _:
            return False
    return True


def admits(stage: Stage, rows: Sequence[Row]) -> bool:
    """Say whether the limits admit a batch of these rows."""
    limits, tokens = stage.plan.limits, sum(count for _, count, _ in rows)
    return (
        len(rows) <= min(limits.max_num_reqs, tokens)
        and tokens + len(rows) * stage.scene.extra_slots <= limits.max_num_tokens
        and all(live.computed + count <= stage.scene.shape.longest for live, count, _ in rows)
    )


def _run_batch(stage: Stage, step: RunBatch) -> bool:
    rows = [
        (stage.live[request], count, max(0, min(accepted, count - 1)))
        for request, count, accepted in step.rows
        if request in stage.live
    ]
    if not rows or not admits(stage, rows):
        return False
    batch = SceneBatch(stage, rows, min(step.loras, stage.most_loras(len(rows))))
    made = batch.target()

    def forward(eager: bool) -> None:
        # Each run moves the states on.
        for live, _, _ in rows:
            stage.world.rewind(live)
        entry = stage.run(batch.batch(Role.TARGET), made, eager=eager)
        check_target(stage, batch, entry, eager=eager)

    stage.both_ways(forward)
    k = stage.draft_tokens(len(rows))
    if stage.drafter is not None and k and all(count for _, count, _ in rows):
        check_drafts(stage, stage.drafter, batch, made, k)
    for live, count, accepted in rows:
        live.advance(batch.settled(live, count, accepted))
    for live, _, _ in rows:
        stage.world.compute(live)
    return True
