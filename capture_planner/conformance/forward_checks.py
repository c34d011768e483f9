"""Compare forwards with what attention is defined as: rows, slots, and tokens served to the end."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from capture_planner.conformance.failure import Check, located
from capture_planner.conformance.probe import ProbeDrafter, ProbeTarget
from capture_planner.conformance.scene import VOCABULARY, Serve
from capture_planner.conformance.scene_batch import SceneBatch
from capture_planner.conformance.served_drafts import check_served_drafts
from capture_planner.conformance.stage import Stage
from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.runtime.executor import NULL_SLOT
from capture_planner.runtime.serving.workload import Request


def check_target(stage: Stage, batch: SceneBatch, entry: Entry | None, *, eager: bool) -> None:
    """Check hidden states, tokens, slots and recurrent states of the target's forward that was just run."""
    body, target = stage.runner.parts.target, stage.target
    shape, each = target.tables.shape, [one for one in batch.each() if one[2].stop > one[2].start]
    expected = torch.cat([target.tables.rows(stage.on_device(ids), live.computed) for _, live, _, ids in each])
    expected = coupled_rows(stage, target, expected, batch.ids)

    def name(layer: int) -> str:
        if layer < shape.layers:
            return f"attention of layer {layer}"
        return f"the state of recurrent layer {layer - shape.layers}"

    with located(batch.batch(Role.TARGET), entry):
        for index, _, where, _ in each:
            want = expected[where]
            wrong = first_wrong_row(body.hidden[where], want, shape.width, stage.tolerance, name)
            if wrong is not None:
                message = f"{wrong} of request {index} in the batch"
                raise row_check(entry, eager=eager).violation(message)
            has_tokens = entry is not None and entry.tokens_each is not None
            if has_tokens and not is_likeliest(body.tokens[where], want, stage.target.head, stage.tolerance):
                raise Check.ROWS.violation("a token is not the likeliest of its row")
        check_slots(stage, batch, Role.TARGET)
        _check_states(stage, batch)


def coupled_rows(stage: Stage, model: ProbeTarget | ProbeDrafter, rows: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """Return what becomes of all real rows of a batch, ``float64[T, hidden_size]``, where the model couples them."""
    return model.coupled(rows, stage.on_device(ids).long())


def _check_states(stage: Stage, batch: SceneBatch) -> None:
    """Check that the rows of the batch in the pools hold the states that a next step can go on from."""
    cache = stage.world.caches[0]
    if not cache.states:
        return
    for index, live, where, ids in batch.each():
        states = cache.tables.states(stage.on_device(ids))
        for layer, pool in enumerate(cache.states):
            held, count = pool.states[live.pool_row], min(where.stop - where.start, pool.positions)
            last = torch.arange(len(ids) - count, len(ids), device=held.device)
            want = states[last, layer]
            off = (held[last % pool.positions].double() - want).norm(dim=1)
            wrong = _beyond(off, want.norm(dim=1), stage.tolerance)
            if bool(wrong.any()):
                raise Check.STORED.violation(
                    f"row {live.pool_row} of the states of recurrent layer {layer} does not hold the state of request "
                    f"{index} in the batch after its position {int(last[wrong][0])}",
                    field="state_indices",
                )


def row_check(entry: Entry | None, *, eager: bool) -> Check:
    """Return the check that a wrong row fails: of a replay, or of a step without a graph."""
    return Check.EAGER if eager or entry is None else Check.ROWS


def first_wrong_row(
    got: torch.Tensor,
    want: torch.Tensor,
    width: int,
    tolerance: float,
    name: Callable[[int], str] = lambda layer: f"layer {layer}",
) -> str | None:
    """Compare rows ``[n, layers * width]`` layer by layer; describe the first that is off, if any is."""
    off = (got.double() - want).view(len(want), -1, width).norm(dim=2)
    size = want.view(len(want), -1, width).norm(dim=2)
    wrong = _beyond(off, size, tolerance)
    if not bool(wrong.any()):
        return None
    row, layer = (int(part) for part in wrong.nonzero()[0])
    return f"{name(layer)}, {error_text(off[row, layer], size[row, layer])} in row {row}"


def _beyond(off: torch.Tensor, size: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Say of which rows the norm of the error is more than rounding makes of a row of norm ``size``; NaN is more."""
    return ~(off <= tolerance * (size + 0.1))


def error_text(off: torch.Tensor, size: torch.Tensor) -> str:
    """Describe an error, given its norm and the norm of what is right."""
    if bool(off.isnan()):
        return "NaN"
    if bool(off.isinf()):
        return "infinite"
    if not bool(size):
        return f"off by {float(off):.2g} where it must be 0"
    return f"off by {float(off / size):.2g} of its norm"


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
        if not torch.allclose(
            held[slots][real].double(), want[real].double(), rtol=stage.tolerance, atol=stage.tolerance
        ):
            raise Check.STORED.violation("a slot of the batch does not hold the key and value of its token")


def check_serving(stage: Stage, step: Serve) -> None:
    """Serve requests with the scheduler and check their tokens; ones that are too long must be refused."""
    longest = stage.scene.shape.longest
    requests = _requests(step, longest, stage.scene.seed)
    for request in requests:
        if request.length > longest:
            with contextlib.suppress(RunError):
                stage.runner.start((request,)).cut_off()
                raise Check.TOKENS.violation(f"a request of {request.length} tokens was accepted")
    fitting = [request for request in requests if request.length <= longest]
    if fitting:
        recorded, ran = len(stage.runner.session.forwards), Counter(stage.watch.ran)
        noted = len(stage.watch.served)
        tokens = {served.name: served.tokens for served in stage.runner.serve(fitting)}
        _check_counted(stage, recorded, ran)
        for request in fitting:
            _check_tokens(stage, request, tokens[request.name])
        whole = {request.name: (*request.prompt, *tokens[request.name]) for request in fitting}
        check_served_drafts(stage.scene.drafter, stage.watch.served[noted:], whole)
    stage.world.refresh()


def _requests(step: Serve, longest: int, seed: int) -> list[Request]:
    draw = np.random.default_rng((seed, len(step.requests)))
    return [
        Request(
            name=f"served {number}",
            arrival=arrival * 0.01,
            prompt=tuple(draw.integers(0, VOCABULARY, max(1, min(prompt, longest - 1))).tolist()),
            max_new_tokens=max(1, output),
            stop=frozenset(range(0, VOCABULARY, step.stop) if step.stop else ()),
        )
        for number, (prompt, output, arrival) in enumerate(step.requests)
    ]


def _check_counted(stage: Stage, recorded: int, before: Counter[str]) -> None:
    """Compare the forwards of the session since ``recorded`` with those that ran, by role and mode."""
    counts: Counter[str] = Counter()
    for forward in stage.runner.session.forwards[recorded:]:
        counts[f"{forward.role.value} {forward.mode.value}"] += forward.repeats
        if forward.entry is None and forward.reason is None:
            raise Check.COUNTED.violation("the session has an eager forward without a reason", role=forward.role)
    ran = stage.watch.ran - before
    for kind in sorted({*ran, *counts}):
        if counts[kind] != ran[kind]:
            raise Check.COUNTED.violation(f"{kind} ran {ran[kind]} times, and the session has {counts[kind]}")


def _check_tokens(stage: Stage, request: Request, tokens: tuple[int, ...]) -> None:
    if not request.is_answered(tokens, is_cut_off=False):
        message = f"{request.name} asked for {request.max_new_tokens} tokens and has {len(tokens)}"
        raise Check.TOKENS.violation(message + (f": {', '.join(map(str, tokens))}" if request.stop else ""))
    ids = torch.tensor([*request.prompt, *tokens[:-1]], device=stage.subject.device)
    # Coupled rows differ by a factor, which is the same for all tokens that could follow.
    hidden = stage.target.tables.rows(ids, len(request.prompt) - 1)
    served = torch.tensor(tokens, device=stage.subject.device)
    for number in range(len(tokens)):
        one = slice(number, number + 1)
        if not is_likeliest(served[one], hidden[one], stage.target.head, stage.tolerance):
            token = f"token {number + 1} of {request.name} (prompt of {len(request.prompt)})"
            raise Check.TOKENS.violation(f"{token} is not the model's greedy choice")
