"""One memory pool for all roles against one per role: bytes, and whether the tokens are equal."""

from __future__ import annotations

from collections.abc import Callable

from capture_planner.bench.capturing import pools_of, refuse_dropped
from capture_planner.bench.record import Pools
from capture_planner.bench.rig import Absence, Rig
from capture_planner.modes import Pool
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan

REQUESTS, PROMPT, OUTPUT = 16, 48, 24


def lengths(plan: Plan) -> tuple[int, int]:
    """Return prompt and output tokens of the requests that are served with either kind of pool."""
    third = max(1, plan.model.max_model_len // 3)
    return min(PROMPT, third), min(OUTPUT, third)


def pools(rig: Rig, advance: Callable[[str], None]) -> Pools:
    """Capture and serve the same requests with either kind of pool. Raises ``Absence`` for one role."""
    if len(rig.plan.roles) < 2:
        raise Absence("the plan has no drafter: with one role, both kinds of pool are the same")
    if not rig.plan.num_graphs:
        raise Absence("the plan captures nothing")
    requests = rig.requests(REQUESTS, *lengths(rig.plan))
    memory, tokens = {}, {}
    for pool in Pool:
        with rig.runner(replace(rig.plan, pool=pool)) as runner:
            runner.capture(progress=lambda done: advance(f"{done.role.value} {done.entry}"))
            refuse_dropped(runner.session.captured)
            memory[pool] = pools_of(runner)
            tokens[pool] = {served.name: served.tokens for served in runner.serve(requests)}
    return Pools(
        shared=memory[Pool.SHARED],
        per_role=memory[Pool.PER_ROLE],
        requests=len(requests),
        differing=tuple(name for name, output in tokens[Pool.SHARED].items() if output != tokens[Pool.PER_ROLE][name]),
    )
