"""Compare forwards with what attention is defined as: rows, draft states, slots, and tokens served to the end."""

from __future__ import annotations

import contextlib
from collections import Counter

import attrs
import numpy as np
import torch

from capture_planner.conformance.failure import Check, located
from capture_planner.conformance.probe import ProbeDrafter
from capture_planner.conformance.scene import VOCABULARY, Serve
from capture_planner.conformance.scene_batch import SceneBatch
from capture_planner.conformance.stage import Stage
from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.runtime.execution.inputs import StepInputs
from capture_planner.runtime.executor import NULL_SLOT
from capture_planner.runtime.serving.workload import Request


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
    return f"layer {layer}, {error_text(off[row, layer], size[row, layer])} in row {row}"


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
        if not torch.allclose(held[slots][real], want[real], rtol=stage.tolerance, atol=stage.tolerance):
            raise Check.STORED.violation("a slot of the batch does not hold the key and value of its token")


def check_drafts(stage: Stage, drafter: ProbeDrafter, batch: SceneBatch, target: StepInputs, k: int) -> None:
    """Run the draft prefill and the draft decodes of a batch, eager and from graphs, and check each."""
    parts = stage.runner.parts
    state = parts.state
    assert state is not None, "a drafter has a state"
    made, described = batch.draft_prefill(target), batch.batch(Role.DRAFT_PREFILL)
    given = parts.target.hidden[: len(batch.ids)].clone()
    places = stage.on_device(target.idx_mapping).long()
    ends = [start + batch.settled(*row) for start, row in zip(batch.starts[:-1], batch.rows, strict=True)]
    last = torch.tensor(ends, device=places.device) - 1

    def forward(eager: bool) -> None:
        entry = stage.run(described, made, eager=eager)
        with located(described, entry):
            check(row_check(entry, eager=eager))

    def check(rows_check: Check) -> None:
        hidden = parts.roles[Role.DRAFT_PREFILL].body.hidden  # type: ignore[attr-defined]
        rows: list[torch.Tensor] = []
        for index, live, where, ids in batch.each(shift=1):
            attention = drafter.tables.attended(stage.on_device(ids), live.computed).flatten(1)
            want = drafter.mixed(attention, given[where].double())
            wrong = first_wrong_row(hidden[where], want, want.shape[1], stage.tolerance)
            if wrong is not None:
                raise rows_check.violation(f"the state of {wrong} of request {index} in the batch")
            rows.append(want)
        expected = torch.cat(rows)[last]
        _check_state(rows_check, state.hidden[places], expected, stage.tolerance)
        tokens = state.proposed[places, 0]
        kept = torch.equal(state.token[places], tokens)
        if not (kept and is_likeliest(tokens, expected, drafter.head, stage.tolerance)):
            raise Check.STATE.violation("the first draft is not the likeliest token of its row")
        check_slots(stage, batch, Role.DRAFT_PREFILL)

    stage.both_ways(forward)
    if k > 1:
        _check_decodes(stage, drafter, batch, k, places)


def _check_decodes(stage: Stage, drafter: ProbeDrafter, batch: SceneBatch, k: int, places: torch.Tensor) -> None:
    """Run the draft decodes, eager and from graphs, from the same state."""
    state = stage.runner.parts.state
    assert state is not None, "a drafter has a state"
    before = {name: getattr(state, name).clone() for name in ("token", "hidden", "proposed", "column")}
    made, described = batch.draft_decode(), batch.batch(Role.DRAFT_DECODE)
    ends = [row[0].computed + batch.settled(*row) for row in batch.rows]

    def forward(eager: bool) -> None:
        for name, tensor in before.items():
            getattr(state, name).copy_(tensor)
        for (live, _, _), end in zip(batch.rows, ends, strict=True):
            # Up to its end, so that both runs of a chain begin with the same cache.
            stage.world.compute(attrs.evolve(live, computed=min(end, stage.scene.shape.longest)))
        entry = stage.run(described, made, eager=eager, steps=k - 1)
        with located(described, entry):
            check(row_check(entry, eager=eager))

    def check(rows_check: Check) -> None:
        hidden = before["hidden"][places].double()
        proposed = state.proposed[places, :k]
        for number in range(1, k):
            within = [row for row, end in enumerate(ends) if end + number <= stage.scene.shape.longest]
            for row in within:
                settled = batch.rows[row][0].tokens[1 : ends[row] + 1].tolist()
                ids = torch.tensor([*settled, *proposed[row, :number].tolist()], device=hidden.device)
                attention = drafter.tables.attended(ids, len(ids) - 1).flatten(1)
                hidden[row] = drafter.mixed(attention, hidden[row : row + 1])[0]
            drafts = proposed[within, number]
            if within and not is_likeliest(drafts, hidden[within], drafter.head, stage.tolerance):
                raise rows_check.violation(f"draft {number + 1} is not the likeliest token of its row")
        if len(within) == len(batch.rows):
            _check_state(rows_check, state.hidden[places], hidden, stage.tolerance)

    stage.both_ways(forward)


def _check_state(check: Check, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    off = (got.double() - want).norm(dim=1)
    wrong = ~(off <= 2 * tolerance * (want.norm(dim=1) + 0.1))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        message = f"is {error_text(off[row], want[row].norm())}"
        raise check.violation(f"the draft state of request {row} in the batch {message}")


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
        tokens = {served.name: served.tokens for served in stage.runner.serve(fitting)}
        _check_counted(stage, recorded, ran)
        for request in fitting:
            _check_tokens(stage, request, tokens[request.name])
    stage.world.refresh()


def _requests(step: Serve, longest: int, seed: int) -> list[Request]:
    draw = np.random.default_rng((seed, len(step.requests)))
    return [
        Request(
            name=f"served {number}",
            arrival=arrival * 0.01,
            prompt=tuple(draw.integers(0, VOCABULARY, max(1, min(prompt, longest - 1))).tolist()),
            max_new_tokens=max(1, output),
        )
        for number, (prompt, output, arrival) in enumerate(step.requests)
    ]


def _check_counted(stage: Stage, recorded: int, before: Counter[str]) -> None:
    """Compare the forwards of the session since ``recorded`` with those that ran, by role and mode."""
    counts: Counter[str] = Counter()
    for forward in stage.runner.session.forwards[recorded:]:
        counts[f"{forward.role.value} {forward.mode.value}"] += forward.repeats
    ran = stage.watch.ran - before
    for kind in sorted({*ran, *counts}):
        if counts[kind] != ran[kind]:
            raise Check.COUNTED.violation(f"{kind} ran {ran[kind]} times, and the session has {counts[kind]}")


def _check_tokens(stage: Stage, request: Request, tokens: tuple[int, ...]) -> None:
    if len(tokens) != request.max_new_tokens:
        raise Check.TOKENS.violation(f"{request.name} asked for {request.max_new_tokens} tokens and has {len(tokens)}")
    ids = torch.tensor([*request.prompt, *tokens[:-1]], device=stage.subject.device)
    hidden = stage.target.tables.attended(ids, len(request.prompt) - 1).flatten(1)
    served = torch.tensor(tokens, device=stage.subject.device)
    for number in range(len(tokens)):
        one = slice(number, number + 1)
        if not is_likeliest(served[one], hidden[one], stage.target.head, stage.tolerance):
            token = f"token {number + 1} of {request.name} (prompt of {len(request.prompt)})"
            raise Check.TOKENS.violation(f"{token} is not the model's greedy choice")
