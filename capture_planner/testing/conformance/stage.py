"""A scene that is set up: plan, runner and graphs; and what each step does, with all its checks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.contract import Attention
from capture_planner.dispatch import Dispatch
from capture_planner.entry import Batch, Entry
from capture_planner.environment import Environment
from capture_planner.errors import RunError
from capture_planner.lint import Severity, lint
from capture_planner.modes import GraphMode, Role
from capture_planner.plan import Plan
from capture_planner.planner import plan as make_plan
from capture_planner.registry import Registry
from capture_planner.runtime.chain import run_chain
from capture_planner.runtime.contract import NULL_PAGE, NULL_SLOT
from capture_planner.runtime.fields import SAMPLED_COUNTS, SAMPLED_ROWS, Extents
from capture_planner.runtime.graph import Grapher
from capture_planner.runtime.kv import PageFormat
from capture_planner.runtime.role import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.step import Made
from capture_planner.runtime.workload import Request
from capture_planner.testing.conformance.finding import Check, Finding, Violation
from capture_planner.testing.conformance.probe import Heads, ProbeDrafter, ProbeTarget, Tables
from capture_planner.testing.conformance.scene import (
    VOCABULARY,
    Arrive,
    Depart,
    Forward,
    Move,
    Reload,
    Scene,
    Serve,
    Step,
)
from capture_planner.testing.conformance.watch import Watch, in_words, nothing_captured
from capture_planner.testing.conformance.world import Family, Live, World

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""How far a row may be off, by its norm: what kernels of that type round, and far below one wrong key."""

SPARE_PLACES = 2
"""Requests' worth of pages that are free beside those that all places take."""


@attrs.frozen(kw_only=True)
class Tested:
    """What is put through: a backend of a registry, on a device, planned for an environment."""

    backend: str
    registry: Registry
    environment: Environment
    device: torch.device
    grapher: Grapher
    change: Callable[[Plan], Plan] = lambda plan: plan
    """What somebody does to a plan after it was made; nothing, as a rule."""


class Stage:
    """One scene. Use it as a context: leaving releases the backend."""

    def __init__(
        self,
        tested: Tested,
        scene: Scene,
        *,
        spared: Sequence[str] = (),
        trusting: bool = False,
        tamper: Callable[[Runner], None] = lambda runner: None,
    ) -> None:
        """Plan, assemble and capture; raises ``Violation`` where that shows a fault.

        ``spared`` are sources of garbage that are left clean. ``tamper`` is called before anything is
        captured: an audit changes there how the runner treats a field, and is ``trusting`` then: what
        stands in fields is not checked.
        """
        self.scene, self._tested = scene, tested
        self.plan = tested.change(make_plan(scene.spec(tested.backend), tested.environment, tested.registry))
        errors = [found for found in lint(self.plan) if found.rule.severity is Severity.ERROR]
        if errors:
            raise Violation(Finding(check=Check.PLANNED, says=str(errors[0]), role=errors[0].found.role))
        shape, device = scene.shape, tested.device
        self.tolerance = TOLERANCE[shape.dtype]
        self.target, self.drafter = _models(scene, self.plan, device)
        each = -(-shape.longest // shape.page_size)
        pages = PageFormat(page_size=shape.page_size, num_pages=1 + (scene.num_reqs + SPARE_PLACES) * each)
        self.runner = Runner(
            self.plan,
            self.target,
            self.drafter,
            tested.registry,
            tested.grapher,
            pages=pages,
            device=device,
            options=Options(run_ahead=scene.ahead, drafts_on_device=scene.ahead),
        )
        try:
            tamper(self.runner)
            self.runner.capture()
            self.world = World(
                tuple(self._families()), pages, scene.num_reqs, shape.longest, scene.drafts + 2, scene.seed
            )
            for source in self.world.is_spoilt:
                self.world.is_spoilt[source] = source not in spared
            self.world.refresh()
            self.watch = Watch(self.runner, self.world, spared, trusting=trusting)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the backend."""
        self.runner.__exit__()

    def _families(self) -> Iterator[Family]:
        roles = self.runner.parts.roles
        models: dict[Role, Tables] = {Role.TARGET: self.target.tables}
        if self.drafter is not None:
            models[Role.DRAFT_PREFILL] = self.drafter.tables
        for role, tables in models.items():
            found = {layer: cache for group in roles[role].groups for layer, cache in group.caches.items()}
            yield Family(tables, [found[layer] for layer in sorted(found)], int(role.is_drafter))

    # Steps.

    @property
    def live(self) -> dict[int, Live]:
        """The requests that are there, by number."""
        return self.world.live

    def draft_tokens(self, num_reqs: int) -> int:
        """Return k for a batch of so many requests."""
        return 0 if self.plan.speculative is None else self.plan.speculative.draft_tokens(num_reqs)

    @torch.no_grad()
    def do(self, step: Step) -> None:
        """Do one step; raises ``Violation`` for what does not hold. What no longer applies is left out."""
        match step:
            case Arrive():
                self.world.arrive(step)
            case Depart() if step.request in self.live:
                self.world.depart(self.live[step.request])
            case Move() if step.request in self.live:
                self.world.move(self.live[step.request])
            case Reload():
                self.target.tables.load(step.seed)
                if self.drafter is not None:
                    self.drafter.tables.load(step.seed + 1)
                self.world.refresh()
            case Forward():
                self._forward(step)
            case Serve():
                self._serve(step)
            case _:
                pass

    def admits(self, rows: Sequence[tuple[Live, int, int]]) -> bool:
        """Say whether the limits admit a batch of these rows."""
        limits, tokens = self.plan.limits, sum(count for _, count, _ in rows)
        return (
            len(rows) <= min(limits.max_num_reqs, tokens)
            and tokens <= limits.max_num_tokens
            and all(live.computed + count <= self.scene.shape.longest for live, count, _ in rows)
        )

    def _forward(self, step: Forward) -> None:
        rows = [
            (self.live[request], count, max(0, min(kept, count - 1)))
            for request, count, kept in step.rows
            if request in self.live
        ]
        if not rows or not self.admits(rows):
            return
        batch = _Rows(self, rows)
        made = batch.target()
        for eager in (True, False):
            self._run(Role.TARGET, batch.batch(Role.TARGET), made, eager=eager)
            self._check_target(batch, eager=eager)
        k = self.draft_tokens(len(rows))
        if self.drafter is not None and k and all(count for _, count, _ in rows):
            self._draft(batch, made, k)
        for live, count, kept in rows:
            live.computed += batch.settled(live, count, kept)
        for live, _, _ in rows:
            self.world.compute(live)

    def _run(self, role: Role, batch: Batch, made: Made, *, eager: bool, steps: int = 1) -> Entry | None:
        """Run one forward, or a chain of them, from a graph or eager."""
        run = self.runner.parts.roles[role]
        answer: Dispatch | None = nothing_captured(batch) if eager else None
        longest = self.scene.shape.longest
        ran, _ = run_chain(run, batch, dict(made), steps, max_model_len=longest, answer=answer)
        return ran.dispatch.entry

    # The target.

    def _check_target(self, batch: _Rows, *, eager: bool) -> None:
        body = self.runner.parts.target
        entry = self._entry(Role.TARGET, batch, eager=eager)
        for index, live, where, ids in batch.each():
            if where.stop > where.start:
                want = self.target.tables.attended(self._on(ids), live.computed).flatten(1)
                self._compare(batch, Role.TARGET, entry, index, body.hidden[where], want, eager=eager)
                if entry is not None and entry.query_len is not None:
                    self._check_likeliest(batch, entry, body.tokens[where], want, self.target.head)
        self._check_stored(batch, 0, entry, Role.TARGET)
        extents = len(batch.ids) if entry is None else entry.num_tokens
        written = _poisoned(body.hidden[:extents])
        if entry is not None and bool(written.any()):
            row = int(written.any(1).nonzero()[0])
            self._refuse(
                Check.WRITTEN,
                f"row {row} of {extents} holds what was in its memory before",
                batch,
                Role.TARGET,
                entry,
            )

    def _compare(
        self,
        batch: _Rows,
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
        tables = self.target.tables if role is Role.TARGET else self._drafting().tables
        width = tables.heads.width if role is Role.TARGET else got.shape[1]
        off = (got.double() - want).view(len(want), -1, width).norm(dim=2)
        size = want.view(len(want), -1, width).norm(dim=2)
        wrong = ~(off <= self.tolerance * (size + 0.1))
        if bool(wrong.any()):
            row, layer = (int(part) for part in wrong.nonzero()[0])
            says = (
                f"{what} of layer {layer}, row {row} of request {index} in the batch, is off by "
                f"{float(off[row, layer] / (size[row, layer] + 1e-30)):.2g} of its norm"
            )
            self._refuse(Check.EAGER if eager else Check.ROWS, says, batch, role, entry)

    def _check_likeliest(
        self,
        batch: _Rows,
        entry: Entry | None,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        if not self._is_likeliest(tokens, hidden, head):
            self._refuse(Check.ROWS, "a token is not the likeliest of its row", batch, Role.TARGET, entry)

    def _is_likeliest(self, tokens: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> bool:
        """Say whether each token is the likeliest, or as good as that, of ``hidden float64[n, hidden]``."""
        if not bool(((tokens >= 0) & (tokens < VOCABULARY)).all()):
            return False
        logits = hidden @ head.double()
        said = logits.gather(1, tokens[:, None].long()).squeeze(1)
        slack = 4 * self.tolerance * (hidden.norm(dim=1) + 0.1) * head.double().norm(dim=0).max()
        return bool((said >= logits.max(1).values - slack).all())

    def _check_stored(self, batch: _Rows, family: int, entry: Entry | None, role: Role) -> None:
        of, made = self.world.families[family], batch.made_by_role[role]
        ids, positions = self._on(made["input_ids"]).long(), self._on(made["positions"])
        slots = self._on(made["slot_mapping"])
        real = slots != NULL_SLOT
        for cache, want in zip(of.flat(), of.made(ids, positions), strict=True):
            if not torch.allclose(cache[slots][real], want[real], rtol=self.tolerance, atol=self.tolerance):
                self._refuse(
                    Check.STORED,
                    "a slot of the batch does not hold the key and value of its token",
                    batch,
                    role,
                    entry,
                )

    # The drafter.

    def _drafting(self) -> ProbeDrafter:
        assert self.drafter is not None, "asked where there is a drafter"
        return self.drafter

    def _draft(self, batch: _Rows, target: Made, k: int) -> None:
        parts, drafter = self.runner.parts, self._drafting()
        state = parts.state
        assert state is not None, "a drafter has a state"
        made = batch.draft_prefill(target)
        given = parts.target.hidden[: len(batch.ids)].clone()
        places = self._on(target["idx_mapping"]).long()
        last = self._on(made["last_token_indices"]).long()
        expected: list[torch.Tensor] = []
        for eager in (True, False):
            entry = self._run(Role.DRAFT_PREFILL, batch.batch(Role.DRAFT_PREFILL), made, eager=eager)
            hidden = parts.roles[Role.DRAFT_PREFILL].body.hidden  # type: ignore[attr-defined]
            expected = []
            for index, live, where, ids in batch.each(shift=1):
                attention = drafter.tables.attended(self._on(ids), live.computed).flatten(1)
                want = drafter.mixed(attention, given[where].double())
                self._compare(
                    batch, Role.DRAFT_PREFILL, entry, index, hidden[where], want, eager=eager, what="state"
                )
                expected.append(want)
            every = torch.cat(expected)
            self._check_state(
                batch, Role.DRAFT_PREFILL, entry, state.hidden[places], every[last], eager=eager
            )
            tokens = state.proposed[places, 0]
            if not self._is_likeliest(tokens, every[last], drafter.head) or not torch.equal(
                state.token[places], tokens
            ):
                self._refuse(Check.STATE, "the first draft", batch, Role.DRAFT_PREFILL, entry)
            self._check_stored(batch, 1, entry, Role.DRAFT_PREFILL)
        if k > 1:
            self._chain(batch, k, places)

    def _chain(self, batch: _Rows, k: int, places: torch.Tensor) -> None:
        """Run the draft decodes, eager and from graphs, from the same beginning."""
        state, drafter = self.runner.parts.state, self._drafting()
        assert state is not None, "a drafter has a state"
        before = {name: getattr(state, name).clone() for name in ("token", "hidden", "proposed", "column")}
        made = batch.draft_decode()
        for eager in (True, False):
            for name, tensor in before.items():
                getattr(state, name).copy_(tensor)
            ends = [row[0].computed + batch.settled(*row) for row in batch.rows]
            for (live, _, _), end in zip(batch.rows, ends, strict=True):
                self._settle_draft(live, end)
            entry = self._run(
                Role.DRAFT_DECODE, batch.batch(Role.DRAFT_DECODE), made, eager=eager, steps=k - 1
            )
            hidden = before["hidden"][places].double()
            proposed = state.proposed[places, :k]
            for number in range(1, k):
                within = [row for row, end in enumerate(ends) if end + number <= self.scene.shape.longest]
                for row in within:
                    settled = batch.rows[row][0].tokens[1 : ends[row] + 1].tolist()
                    ids = torch.tensor([*settled, *proposed[row, :number].tolist()], device=hidden.device)
                    attention = drafter.tables.attended(ids, len(ids) - 1).flatten(1)
                    hidden[row] = drafter.mixed(attention, hidden[row : row + 1])[0]
                if within and not self._is_likeliest(proposed[within, number], hidden[within], drafter.head):
                    self._refuse(
                        Check.EAGER if eager else Check.ROWS,
                        f"draft {number + 1} is not the likeliest token of its row",
                        batch,
                        Role.DRAFT_DECODE,
                        entry,
                    )
            if len(within) == len(batch.rows):
                self._check_state(batch, Role.DRAFT_DECODE, entry, state.hidden[places], hidden, eager=eager)

    def _settle_draft(self, live: Live, upto: int) -> None:
        """Write the drafter's cache up to a position, so that both runs of a chain begin alike."""
        computed, live.computed = live.computed, min(upto, self.scene.shape.longest)
        self.world.compute(live)
        live.computed = computed

    def _check_state(
        self,
        batch: _Rows,
        role: Role,
        entry: Entry | None,
        got: torch.Tensor,
        want: torch.Tensor,
        *,
        eager: bool,
    ) -> None:
        off = (got.double() - want).norm(dim=1)
        if not bool((off <= 2 * self.tolerance * (want.norm(dim=1) + 0.1)).all()):
            row = int((~(off <= 2 * self.tolerance * (want.norm(dim=1) + 0.1))).nonzero()[0])
            self._refuse(
                Check.EAGER if eager else Check.ROWS,
                f"the state that request {row} of the batch drafts on from is off by "
                f"{float(off[row] / want[row].norm()):.2g} of its norm",
                batch,
                role,
                entry,
            )

    # Serving.

    def _serve(self, step: Serve) -> None:
        """Serve requests by the scheduler, each token of which must be greedy."""
        longest = self.scene.shape.longest
        draw = np.random.default_rng((self.scene.seed, len(step.requests)))
        asked: list[Request] = []
        for number, (prompt, output, arrival) in enumerate(step.requests):
            prompt = max(1, min(prompt, longest - 1))
            tokens = tuple(draw.integers(0, VOCABULARY, prompt).tolist())
            asked.append(
                Request(
                    name=f"served {number}",
                    arrival=arrival * 0.01,
                    prompt=tokens,
                    max_new_tokens=max(1, output),
                )
            )
        too_long = [request for request in asked if request.length > longest]
        fitting = [request for request in asked if request.length <= longest]
        for request in too_long:
            with contextlib.suppress(RunError):
                self.runner.start((request,)).cut_off()
                self._refuse(
                    Check.TOKENS, f"a request of {request.length} tokens was taken", None, None, None
                )
        if fitting:
            noted, ran = len(self.runner.session.forwards), Counter(self.watch.ran)
            served = {done.name: done.tokens for done in self.runner.serve(fitting)}
            self._check_counted(noted, ran)
            for request in fitting:
                self._check_served(request, served[request.name])
        self.world.refresh()

    def _check_counted(self, noted: int, ran: Counter[str]) -> None:
        """Hold what the session wrote down to what ran, by role and by mode."""
        counted: Counter[str] = Counter()
        for forward in self.runner.session.forwards[noted:]:
            mode = GraphMode.NONE if forward.entry is None else forward.entry.mode
            counted[f"{forward.role.value} {mode.value}"] += forward.repeats
        for what, times in (self.watch.ran - ran).items():
            if counted[what] != times:
                says = f"{what} ran {times} times, and {counted[what]} are written down"
                self._refuse(Check.COUNTED, says, None, None, None)

    def _check_served(self, request: Request, tokens: tuple[int, ...]) -> None:
        if len(tokens) != request.max_new_tokens:
            self._refuse(
                Check.TOKENS,
                f"{request.name} asked for {request.max_new_tokens} tokens and has {len(tokens)}",
                None,
                None,
                None,
            )
        ids = torch.tensor([*request.prompt, *tokens[:-1]], device=self._tested.device)
        hidden = self.target.tables.attended(ids, len(request.prompt) - 1).flatten(1)
        said = torch.tensor(tokens, device=self._tested.device)
        for number in range(len(tokens)):
            if not self._is_likeliest(
                said[number : number + 1], hidden[number : number + 1], self.target.head
            ):
                self._refuse(
                    Check.TOKENS,
                    f"token {number + 1} of {request.name} (prompt of {len(request.prompt)}) is not what the "
                    "model says",
                    None,
                    None,
                    None,
                )

    # Beside.

    def _entry(self, role: Role, batch: _Rows, *, eager: bool) -> Entry | None:
        run = self.runner.parts.roles[role]
        return None if eager else run.dispatch(batch.batch(role)).entry

    def _on(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._tested.device)

    def _refuse(
        self, check: Check, says: str, batch: _Rows | None, role: Role | None, entry: Entry | None
    ) -> None:
        words = "" if batch is None or role is None else in_words(batch.batch(role))
        raise Violation(Finding(check=check, says=says, role=role, entry=entry, batch=words))


class _Rows:
    """A batch: whose rows, and the fields' values, made from what is known of each request."""

    def __init__(self, stage: Stage, rows: Sequence[tuple[Live, int, int]]) -> None:
        self._stage, self.rows = stage, tuple(rows)
        self.starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([count for _, count, _ in rows], out=self.starts[1:])
        self.ids = np.concatenate([self._fed(live, count, kept) for live, count, kept in rows])
        self.made_by_role: dict[Role, Made] = {}

    @staticmethod
    def _fed(live: Live, count: int, kept: int, shift: int = 0) -> np.ndarray:
        """Return the ids of a row: its own tokens, and wrong ones after the last draft that is kept."""
        ids = live.tokens[live.computed + shift : live.computed + count + shift].copy()
        if live.computed >= live.prompt:
            ids[kept + 1 :] = (ids[kept + 1 :] + 1) % VOCABULARY
        return ids

    @staticmethod
    def settled(live: Live, count: int, kept: int) -> int:
        """Return how many tokens of a row stay."""
        return min(kept + 1, count) if live.computed >= live.prompt else count

    def each(self, shift: int = 0) -> Iterator[tuple[int, Live, slice, np.ndarray]]:
        """Yield each row: its number, its request, its place in the batch, and all ids up to its end."""
        for index, (live, count, kept) in enumerate(self.rows):
            before = live.tokens[shift : live.computed + shift]
            where = slice(int(self.starts[index]), int(self.starts[index + 1]))
            yield index, live, where, np.concatenate([before, self._fed(live, count, kept, shift)])

    def batch(self, role: Role) -> Batch:
        """Return the batch of a role, as dispatch is asked about it."""
        reqs = len(self.rows)
        if role is Role.DRAFT_DECODE:
            return Batch(role=role, num_reqs=reqs, num_tokens=reqs, query_len=1)
        counts = {count for _, count, _ in self.rows}
        return Batch(
            role=role,
            num_reqs=reqs,
            num_tokens=int(self.starts[-1]),
            query_len=counts.pop() if len(counts) == 1 else None,
            past_prompt=all(live.computed >= live.prompt for live, _, _ in self.rows),
        )

    def _table(self, lengths: np.ndarray, more: int = 0) -> np.ndarray:
        pages = self._stage.world.pages
        width = min(pages.pages(int(lengths.max()) + more), pages.pages(self._stage.scene.shape.longest))
        table = np.full((len(self.rows), width), NULL_PAGE, dtype=np.int32)
        for row, (live, _, _) in enumerate(self.rows):
            table[row] = live.pages[:width]
        return table

    def target(self) -> Made:
        """Return the target's values."""
        world, starts = self._stage.world, self.starts
        positions = np.concatenate(
            [np.arange(live.computed, live.computed + count) for live, count, _ in self.rows]
        )
        slots = np.concatenate(
            [
                world.slots(live, np.arange(live.computed, live.computed + count))
                for live, count, _ in self.rows
            ]
        )
        lengths = np.array([live.computed + count for live, count, _ in self.rows], dtype=np.int32)
        drafts = np.array(
            [count - 1 if live.computed >= live.prompt and count else 0 for live, count, _ in self.rows]
        )
        made: Made = {
            "input_ids": self.ids.astype(np.int32),
            "positions": positions.astype(np.int64),
            "slot_mapping": slots.astype(np.int64),
            "query_start_loc": starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths),
            "last_token_indices": np.maximum(starts[1:] - 1, 0).astype(np.int32),
            "idx_mapping": np.array([live.place for live, _, _ in self.rows], dtype=np.int32),
            "cu_num_draft_tokens": np.cumsum(drafts, dtype=np.int32),
            SAMPLED_ROWS: np.arange(len(self.ids), dtype=np.int64),
            SAMPLED_COUNTS: np.array([count for _, count, _ in self.rows], dtype=np.int32),
        }
        self.made_by_role[Role.TARGET] = made
        return made

    def draft_prefill(self, target: Made) -> Made:
        """Return the drafter's values on the same batch: each token shifted by one."""
        ids = np.concatenate([self._fed(live, count, kept, 1) for live, count, kept in self.rows])
        kept = np.array([self.settled(*row) for row in self.rows])
        made = target | {
            "input_ids": ids.astype(np.int32),
            "last_token_indices": (self.starts[:-1] + kept - 1).astype(np.int32),
        }
        self.made_by_role[Role.DRAFT_PREFILL] = made
        return made

    def draft_decode(self) -> Made:
        """Return the values of the first draft decode: one token a request, after what is settled."""
        longest, world = self._stage.scene.shape.longest, self._stage.world
        wanted = np.array(
            [live.computed + self.settled(live, count, kept) for live, count, kept in self.rows]
        )
        positions = np.minimum(wanted, longest - 1)
        slots = np.array(
            [
                int(world.slots(live, positions[row : row + 1])[0]) if wanted[row] < longest else NULL_SLOT
                for row, (live, _, _) in enumerate(self.rows)
            ]
        )
        reqs, lengths = len(self.rows), (positions + 1).astype(np.int32)
        starts = np.arange(reqs + 1, dtype=np.int32)
        return {
            "input_ids": np.zeros(reqs, dtype=np.int32),
            "positions": positions.astype(np.int64),
            "slot_mapping": slots.astype(np.int64),
            "query_start_loc": starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths, self._stage.scene.drafts),
            "last_token_indices": starts[:-1],
            "idx_mapping": np.array([live.place for live, _, _ in self.rows], dtype=np.int32),
        }


def _models(scene: Scene, plan: Plan, device: torch.device) -> tuple[ProbeTarget, ProbeDrafter | None]:
    """Make the probe models of a plan."""
    dtype, shape = getattr(torch, scene.shape.dtype), scene.shape
    windows = tuple(group.window for group in plan.role(Role.TARGET).groups for _ in range(group.layers))
    heads = Heads(
        layers=plan.model.num_layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        windows=windows,
    )
    tables = Tables(heads, VOCABULARY, shape.longest, dtype, device, scene.seed)
    target = ProbeTarget(tables, VOCABULARY, shape.longest, scene.seed + 1)
    if plan.speculative is None:
        return target, None
    attention = Attention.of(plan, Role.DRAFT_DECODE, layers=1, window=None)
    heads = Heads(
        layers=plan.speculative.model.num_layers,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        windows=(None,) * plan.speculative.model.num_layers,
    )
    tables = Tables(heads, VOCABULARY, shape.longest, dtype, device, scene.seed + 2)
    aux = (0,) if scene.eagle3 else ()
    return target, ProbeDrafter(tables, target, aux, scene.seed + 3)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Say where every bit is set, as a poisoned pool has them: a NaN that no kernel makes."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.itemsize]) == -1


__all__ = ["Extents", "Stage", "Tested", "perf_counter"]
