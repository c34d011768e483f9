"""Run the steps of a scene, and compare every forward with what attention is defined as."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch.linalg import vector_norm

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.plugins.backend import NULL_SLOT
from capture_planner.records.batch import Entry
from capture_planner_conformance.failure import Check, located
from capture_planner_conformance.probe import ProbeDrafter, ProbeTarget
from capture_planner_conformance.scene import (
    VOCABULARY,
    Arrive,
    Depart,
    DraftScheme,
    Move,
    Reload,
    RunBatch,
    Scene,
    Serve,
    Step,
)
from capture_planner_conformance.scene_batch import MASKED, DraftRowsOfRequest, Row, SceneBatch, sources_of
from capture_planner_conformance.served_rows import pieces
from capture_planner_conformance.stage import Stage
from capture_planner_runner.execution.inputs import StepInputs
from capture_planner_runner.execution.updates import DraftState
from capture_planner_runner.serving.workload import Request


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
        # No more are accepted than the row has drafts, whatever a case says.
        (stage.live[request], count, max(0, min(accepted, count - 1)))
        for request, count, accepted in step.rows
        if request in stage.live
    ]
    if not rows or not admits(stage, rows):
        return False
    batch = stage.batch(rows, min(step.loras, stage.most_loras(len(rows))))
    made = batch.target()

    def forward(eager: bool) -> None:
        # Each run moves the states on.
        for live, _, _ in rows:
            stage.world.rewind(live)
        entry = stage.run(batch.batch(Role.TARGET), made, eager=eager)
        check_target(stage, batch, entry, eager=eager)

    stage.both_ways(forward)
    k = stage.draft_tokens(len(rows))
    # A request without a token has no row that a draft could be made of.
    if stage.drafter is not None and k and all(count for _, count, _ in rows):
        check_drafts(stage, stage.drafter, batch, made, k)
    for live, count, accepted in rows:
        live.advance(batch.settled(live, count, accepted))
    for live, _, _ in rows:
        stage.world.compute(live)
    return True


# Forwards of the target.


def check_target(stage: Stage, batch: SceneBatch, entry: Entry | None, *, eager: bool) -> None:
    """Check hidden states, tokens and slots of the target's forward that was just run."""
    body, target = stage.runner.target, stage.target
    tables, each = target.tables, [one for one in batch.each() if one[2].stop > one[2].start]
    expected = torch.cat([tables.rows(ids, live.computed) for _, live, _, ids in each])
    expected = coupled_rows(stage, target, expected, batch.ids)
    with located(batch.batch(Role.TARGET), entry):
        parts = [(body.hidden[where], expected[where]) for _, _, where, _ in each]
        wrong = first_wrong_part(parts, tables.shape.width, stage.tolerance, tables.name)
        if wrong is not None:
            message = f"{wrong[1]} of request {each[wrong[0]][0]} in the batch"
            raise row_check(entry, eager=eager).violation(message)
        # Only a graph of decodes computes a token for every row; others are sampled behind the graph.
        has_tokens = entry is not None and entry.tokens_each is not None
        if has_tokens and unlikely(body.tokens[: len(expected)], expected, target.head, stage.tolerance).any():
            raise Check.ROWS.violation("a token is not the likeliest of its row")
        check_slots(stage, batch, Role.TARGET)
        stage.check_ran(batch)


def coupled_rows(stage: Stage, model: ProbeTarget | ProbeDrafter, rows: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """Return what becomes of all real rows of a batch, ``float64[T, hidden_size]``, where the model couples them."""
    tokens = stage.on_device(ids).long()
    return model.of_rows.coupled(rows, tokens, torch.ones_like(tokens, dtype=torch.bool))


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
    off = vector_norm((got.double() - want).view(len(want), -1, width), dim=2)
    size = vector_norm(want.view(len(want), -1, width), dim=2)
    wrong = beyond(off, size, tolerance)
    if not bool(wrong.any()):
        return None
    row, layer = (int(part) for part in wrong.nonzero()[0])
    return f"{name(layer)}, {error_text(off[row, layer], size[row, layer])} in row {row}"


def first_wrong_part(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    width: int,
    tolerance: float,
    name: Callable[[int], str] = lambda layer: f"layer {layer}",
) -> tuple[int, str] | None:
    """Compare parts, each the rows that were got and those that are right; return the first that is off.

    Returns its index and what is off, as ``first_wrong_row`` describes it; None: nothing is.
    """
    if not parts:
        return None
    # All rows at once first, since usually none is wrong.
    every_got, every_want = (torch.cat(rows) for rows in zip(*parts, strict=True))
    if first_wrong_row(every_got, every_want, width, tolerance) is None:
        return None
    described = (first_wrong_row(got, want, width, tolerance, name) for got, want in parts)
    return next((index, wrong) for index, wrong in enumerate(described) if wrong is not None)


def beyond(off: torch.Tensor, size: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Say of which rows the norm of the error is more than rounding makes of a row of norm ``size``; NaN is more."""
    return ~(off <= tolerance * (size + 0.1))  # not `off > ...`, which is false of NaN


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
    return not bool(unlikely(tokens, hidden, head, tolerance).any())


def unlikely(tokens: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Say of each token, ``bool[n]``, whether another one of its row is likelier; what is no token is unlikely."""
    is_token = (tokens >= 0) & (tokens < VOCABULARY)
    logits = hidden @ head.double()
    chosen = logits.gather(1, tokens[:, None].long().clamp(0, VOCABULARY - 1)).squeeze(1)
    # Two logits may each be off by a row's error times the norm of a column; twice that is let pass.
    slack = 4 * tolerance * (hidden.norm(dim=1) + 0.1) * head.double().norm(dim=0).max()
    likely: torch.Tensor = chosen >= logits.max(1).values - slack
    return ~(is_token & likely)  # not `chosen < ...`, which is false of NaN


def check_slots(stage: Stage, batch: SceneBatch, role: Role) -> None:
    """Check that the slots of the batch hold the keys and values of its tokens."""
    cache, inputs = stage.world.caches[int(role.is_drafter)], batch.inputs_by_role[role].declared
    # Padding writes the null slot, which may hold anything.
    real = inputs["slot_mapping"] != NULL_SLOT
    names = ("input_ids", "positions", "slot_mapping")
    ids, positions, slots = (stage.on_device(inputs[name][real]).long() for name in names)
    held = torch.cat([part[slots].double() for part in cache.flat()], dim=1)
    want = torch.cat([part.double() for part in cache.expected(ids, positions)], dim=1)
    if not torch.allclose(held, want, rtol=stage.tolerance, atol=stage.tolerance):
        raise Check.STORED.violation("a slot of the batch does not hold the key and value of its token")


# Forwards of the drafter, however drafts are made.


def check_drafts(stage: Stage, drafter: ProbeDrafter, batch: SceneBatch, target: StepInputs, k: int) -> None:
    """Run the draft prefill and the draft decodes of a batch, eager and from graphs, and check each."""
    made, described = batch.draft_prefill(target), batch.batch(Role.DRAFT_PREFILL)
    given = stage.runner.target.hidden[: len(batch.ids)].double().clone()
    pass_ = FirstPass(stage, drafter, batch, given)

    def forward(eager: bool) -> None:
        entry = stage.run(described, made, eager=eager)
        with located(described, entry):
            pass_.check(row_check(entry, eager=eager))

    stage.both_ways(forward)
    if k > 1 and Role.DRAFT_DECODE in stage.runner.roles:
        _check_decodes(stage, drafter, batch, k)


@attrs.frozen(eq=False)
class FirstPass:
    """A first draft pass that was run; ``given float64[T, hidden_size]`` are the target's states."""

    stage: Stage
    drafter: ProbeDrafter
    batch: SceneBatch
    given: torch.Tensor

    def check(self, rows_check: Check) -> None:
        """Check its states, its drafts, and its slots."""
        stage, batch, state = self.stage, self.batch, _state(self.stage)
        rows = batch.draft_rows
        hidden = stage.runner.roles[Role.DRAFT_PREFILL].body.hidden  # type: ignore[attr-defined]
        places, starts = _places(stage, batch), np.cumsum([0, *(each.count for each in rows)])
        is_modules = stage.scene.drafter is DraftScheme.MODULES
        want = list(self._modules(state.proposed[places])) if is_modules else [self._states(rows)]
        # Rows that follow the last one read tokens that modules have yet to draft.
        counts = [each.last + 1 if is_modules else each.count for each in rows]
        seen = [slice(start, start + count) for start, count in zip(starts[:-1], counts, strict=True)]
        parts = [(hidden[each], want[-1][each]) for each in seen]
        wrong = first_wrong_part(parts, self.drafter.hidden_size, stage.tolerance)
        if wrong is not None:
            raise rows_check.violation(f"the state of {wrong[1]} of request {wrong[0]} in the batch")
        proposed = state.proposed[places]
        last = torch.tensor([start + each.last for start, each in zip(starts[:-1], rows, strict=True)])
        ends = torch.from_numpy(starts[1:]) - 1
        check_state(rows_check, state.hidden[places], want[-1][last], stage.tolerance)
        made = len(want) if is_modules else stage.scene.drafts if stage.scene.drafter.is_parallel else 1
        for number in range(made):
            # In a parallel pass, a request at the model's end lacks rows, and repeats its last one.
            states = want[number][last] if is_modules else want[0][torch.minimum(last + number, ends)]
            if not is_likeliest(proposed[:, number], states, self.drafter.head, stage.tolerance):
                raise Check.STATE.violation(_wrong_draft(number, state.hidden[places]))
        if not torch.equal(state.token[places], proposed[:, made - 1 if is_modules else 0]):
            raise Check.STATE.violation("the last draft is not the token that a draft decode goes on from")
        if not is_modules:
            check_slots(stage, batch, Role.DRAFT_PREFILL)

    def _states(self, rows: tuple[DraftRowsOfRequest, ...]) -> torch.Tensor:
        """Return the states of a drafter that runs once, ``float64[T, hidden_size]``."""
        stage, drafter = self.stage, self.drafter
        attention = torch.cat([drafter.tables.rows(each.ids, each.first) for each in rows])
        sources = stage.on_device(sources_of(rows, self.batch.starts))
        given = self.given[sources.clamp(min=0, max=len(self.given) - 1)]
        if (mask := drafter.mask_hidden) is not None:
            given = torch.where((sources == MASKED)[:, None], mask.double(), given)
        ids = np.concatenate([each.ids[each.first :] for each in rows])
        return coupled_rows(stage, drafter, drafter.mixed(attention, given), ids)

    def _modules(self, proposed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the states after each module, ``float64[T, hidden_size]``, of rows up to each request's last.

        A module reads its tokens one position later than the one before it, the last of them what that one drafted;
        of earlier steps its cache holds final tokens.
        """
        rows, hidden, drafts = self.batch.draft_rows, self.given.clone(), proposed.cpu().numpy()
        fed = [each.ids[each.first : each.first + each.last + 1] for each in rows]
        for number in range(self.stage.scene.drafts):
            hidden = hidden.clone()
            for index, (each, ids) in enumerate(zip(rows, fed, strict=True)):
                before = each.live.tokens[1 + number : each.first + 1 + number]
                attention = self.drafter.tables.attended(
                    self.stage.on_device(np.concatenate([before, ids])), each.first
                )[:, number]
                seen = slice(int(self.batch.starts[index]), int(self.batch.starts[index]) + len(ids))
                hidden[seen] = self.drafter.mixed(attention, hidden[seen])
                fed[index] = np.append(ids[1:], drafts[index, number])
            yield hidden


def _check_decodes(stage: Stage, drafter: ProbeDrafter, batch: SceneBatch, k: int) -> None:
    """Run the draft decodes, eager and from graphs, from the same state."""
    state, places = _state(stage), _places(stage, batch)
    # Each of the two runs moves the state on, so both begin from this copy.
    before = {name: getattr(state, name).clone() for name in ("token", "hidden", "proposed", "column")}
    made, described = batch.draft_decode(), batch.batch(Role.DRAFT_DECODE)
    shift, longest = int(stage.scene.drafter.reads_states), stage.scene.shape.longest
    settled = [row[0].computed + batch.settled(*row) for row in batch.rows]
    ends = [end + 1 - shift for end in settled]

    def forward(eager: bool) -> None:
        for name, tensor in before.items():
            getattr(state, name).copy_(tensor)
        for (live, _, _), end in zip(batch.rows, settled, strict=True):
            # Up to its end, so that both runs of a chain begin with the same cache.
            stage.world.compute(attrs.evolve(live, computed=min(end, longest)))
        entry = stage.run(described, made, eager=eager, steps=k - 1)
        with located(described, entry):
            check(row_check(entry, eager=eager))

    def check(rows_check: Check) -> None:
        hidden = before["hidden"][places].double()
        proposed = state.proposed[places, :k]
        # A draft that is no token is found before the rows that read it are compared.
        read = proposed.clamp(0, VOCABULARY - 1).cpu().numpy()
        attended = {}
        for row, (end, (live, _, _)) in enumerate(zip(ends, batch.rows, strict=True)):
            # A draft decode reads the draft before it, up to the model's end.
            if (count := min(k - 1, longest - end)) > 0:
                known = live.tokens[shift : shift + end]
                attended[row] = drafter.tables.rows(np.concatenate([known, read[row, :count]]), end)
        for number in range(1, k):
            within = [row for row, end in enumerate(ends) if end + number <= longest]
            if within:
                attention = torch.stack([attended[row][number - 1] for row in within])
                hidden[within] = drafter.mixed(attention, hidden[within])
                # Rows past the model's end write the null slot, and count as padding.
                hidden[within] = coupled_rows(stage, drafter, hidden[within], read[within, number - 1])
            drafts = proposed[within, number]
            if within and not is_likeliest(drafts, hidden[within], drafter.head, stage.tolerance):
                raise rows_check.violation(_wrong_draft(number, state.hidden[places[within]]))
        # Rows past the model's end go on as padding, from states that are not compared.
        if len(within) == len(batch.rows):
            check_state(rows_check, state.hidden[places], hidden, stage.tolerance)

    stage.both_ways(forward)


def _wrong_draft(number: int, hidden: torch.Tensor) -> str:
    """Describe a draft that is wrong, counted from 0; ``hidden`` are the rows that requests go on from after it."""
    if bool(hidden.isnan().any()):
        return f"the row that draft {number + 1} or one after it is made of is NaN"
    return f"draft {number + 1} is not the likeliest token of its row"


def check_state(check: Check, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Check what a request's drafter goes on from, a row for each request."""
    off = (got.double() - want).norm(dim=1)
    wrong = ~(off <= 2 * tolerance * (want.norm(dim=1) + 0.1))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        message = f"is {error_text(off[row], want[row].norm())}"
        raise check.violation(f"the draft state of request {row} in the batch {message}")


def _state(stage: Stage) -> DraftState:
    state = stage.runner.draft_state
    assert state is not None, "a drafter has a state"
    return state


def _places(stage: Stage, batch: SceneBatch) -> torch.Tensor:
    return stage.on_device(np.array([live.place for live, _, _ in batch.rows]))


# Requests that are served.


def check_serving(stage: Stage, step: Serve) -> None:
    """Serve requests with the scheduler and check their tokens; ones that are too long must be refused."""
    longest = stage.scene.shape.longest
    requests = _requests(step, longest, stage.scene)
    for request in requests:
        if request.length > longest:
            with contextlib.suppress(RunError):  # the violation below is none, and gets through
                stage.runner.start((request,)).cut_off()
                raise Check.TOKENS.violation(f"a request of {request.length} tokens was accepted")
    fitting = [request for request in requests if request.length <= longest]
    if fitting:
        stage.watch.served_forwards.clear()
        stage.begin_serving()
        tokens = {served.name: served.tokens for served in stage.runner.serve(fitting)}
        for request in fitting:
            _check_answered(request, tokens[request.name])
        # What was done with drafts first, and then rows: both explain a wrong token.
        stage.check_served(fitting, tokens)
        check_served_rows(stage, {request.name: (*request.prompt, *tokens[request.name]) for request in fitting})
        for request in fitting:
            _check_tokens(stage, request, tokens[request.name])
    # The scheduler hands out the same pages, and has overwritten those of live requests.
    stage.world.refresh()


def _requests(step: Serve, longest: int, scene: Scene) -> list[Request]:
    draw = np.random.default_rng((scene.seed, len(step.requests)))
    choices = scene.loras + 2 if scene.loras else 1
    return [
        Request(
            name=f"served {number}",
            arrival=arrival * 0.01,
            prompt=tuple(draw.integers(0, VOCABULARY, max(1, min(prompt, longest - 1))).tolist()),
            max_new_tokens=max(1, output),
            stop=frozenset(range(0, VOCABULARY, step.stop) if step.stop else ()),
            adapter=(number + 1) % choices,
        )
        for number, (prompt, output, arrival) in enumerate(step.requests)
    ]


def _check_answered(request: Request, tokens: tuple[int, ...]) -> None:
    if not request.is_answered(tokens, is_cut_off=False):
        message = f"{request.name} asked for {request.max_new_tokens} tokens and has {len(tokens)}"
        raise Check.TOKENS.violation(message + (f": {', '.join(map(str, tokens))}" if request.stop else ""))


def _check_tokens(stage: Stage, request: Request, tokens: tuple[int, ...]) -> None:
    ids = np.array([*request.prompt, *tokens[:-1]], dtype=np.int64)
    # Coupled rows differ by a factor, which is the same for all tokens that could follow.
    hidden = stage.target.tables.rows(ids, len(request.prompt) - 1) + stage.target.adapters[request.adapter].double()
    served = torch.tensor(tokens, device=stage.subject.device)
    wrong = unlikely(served, hidden, stage.target.head, stage.tolerance).nonzero()
    if len(wrong):
        number = int(wrong[0])
        token = f"token {number + 1} of {request.name} (prompt of {len(request.prompt)})"
        place = _place_of(stage, request.name, len(request.prompt) + number - 1)
        raise Check.TOKENS.violation(f"{token} is not the model's greedy choice", **place)


def _place_of(stage: Stage, name: str, position: int) -> dict[str, object]:
    """Return where the last row of a request at a position was computed, for a failure."""
    found: dict[str, object] = {"role": Role.TARGET}
    for forward in stage.watch.served_forwards:
        for rows in forward.rows if forward.role is Role.TARGET else ():
            if rows.name == name and rows.first <= position < rows.first + len(rows.ids):
                found = forward.place
    return found


def check_served_rows(stage: Stage, tokens: Mapping[str, Sequence[int]]) -> None:
    """Check the rows that served requests had: rounding and a wrong layer may leave the likeliest token as it is.

    :param tokens: of each request, its prompt included.
    """
    # Not strict: without a drafter there is one cache.
    for cache, role in zip(stage.world.caches, (Role.TARGET, Role.DRAFT_PREFILL), strict=False):
        width, name = cache.tables.shape.width, cache.tables.name
        forwards = [forward for forward in stage.watch.served_forwards if forward.role is role]
        found = list(pieces(forwards, cache, tokens))
        parts = [(each.got.flatten(1), each.want.flatten(1)) for each in found]
        wrong = first_wrong_part(parts, width, stage.tolerance, name)
        if wrong is not None:
            each = found[wrong[0]]
            message = f"{wrong[1]} of {each.rows.name}, a request that is served"
            raise row_check(each.forward.entry, eager=False).violation(message, **each.forward.place)
