"""Graph and eager side by side: what a graph serves is run eager too, and the tensors are compared.

The eager forward is first, at real extents, with the fields filled anew from the host and through the same
backends. Then all that it changed is put back, everything else is poisoned, and the graph is replayed. The
tensors are compared in the order of computation: fields, then of each layer queries, keys, values,
what the caches hold, and attention, then results. So the first that differs is where it went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NoReturn

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.errors import DifferenceError, RunError
from capture_planner.modes import Role
from capture_planner.records.backend import Axis
from capture_planner.records.batch import Entry
from capture_planner.runtime.eager_check.agreement import (
    HALF,
    number,
    prints,
    row_errors,
    shortfall,
    tolerance_of,
)
from capture_planner.runtime.eager_check.record import Comparing, Difference, FieldSeen, Largest
from capture_planner.runtime.execution import padding
from capture_planner.runtime.execution.bodies import TargetBody
from capture_planner.runtime.execution.fields import Extents, tensor_of
from capture_planner.runtime.execution.role import Options, Ran, RoleRun
from capture_planner.runtime.execution.step import Made, move_on
from capture_planner.runtime.execution.taps import Key, Taps
from capture_planner.runtime.models.protocols import Scoring

_RESULTS = (
    "aux",
    "hidden",
    "draft_state.hidden",
    "tokens",
    "draft_state.token",
    "draft_state.proposed",
    "draft_state.column",
)
"""The order in which bodies compute their results."""
CACHES = ("key cache", "value cache")

Row = tuple[str | None, int | None]
"""Whose a row is, and for which token; None twice: padding, or nobody's."""


def comparing(options: Options) -> Options:
    """Return the options of a run that compares.

    Raises ``RunError`` for those that leave nothing to compare, or no moment to do so.
    """
    wrong = {"replay": not options.replay, "run_ahead": options.run_ahead}
    wrong["drafts_on_device"] = options.drafts_on_device
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise RunError(
                f"compare runs each graph beside an eager forward, and {name} is {getattr(options, name)}; "
                "give one of them"
            )
    return attrs.evolve(options, poison=True, run_ahead=False, drafts_on_device=False)


@attrs.frozen(kw_only=True, eq=False)
class _Forward:
    """One forward that is compared."""

    entry: Entry
    real: Extents
    extents: Extents
    made: tuple[Made, ...]
    """The host's values of each step of a chain; of one step, without a chain."""
    fields: dict[str, torch.Tensor]
    """Each field as it was staged for the graph, by its key."""
    turn: int
    """How often the role ran in this step before."""

    @property
    def slots(self) -> torch.Tensor:
        """``int64[steps * T]``: the slots that it writes."""
        return torch.from_numpy(np.concatenate([made["slot_mapping"] for made in self.made]).astype(np.int64))

    def whose(self, key: Key, row: int) -> tuple[int | None, int | None]:
        """Return the request of a row of a tensor, as its row in the batch, and its token; or None twice."""
        step, tokens = key.step, self.real.tokens
        if key.name == "draft_state.column":
            return None, None
        if key.name in CACHES:
            step, row = divmod(row, tokens)
        made = self.made[step]
        if key.name.startswith("draft_state."):
            return row, int(made["positions"][made["last_token_indices"][row]])
        return int(np.searchsorted(made["query_start_loc"], row, "right")) - 1, int(made["positions"][row])

    def is_tied(self, key: Key, rows: int, untied: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return ``bool[rows]``: what comes after a near tie of its request, whose step is ``untied int[R]``."""
        whose = [self.whose(key, row)[0] for row in range(rows)]
        steps = [row // self.real.tokens if key.name in CACHES else key.step for row in range(rows)]
        return np.array(
            [at is not None and step >= untied[at] for at, step in zip(whose, steps, strict=True)]
        )


class ComparedRole(RoleRun):
    """A role whose graphs are held against eager forwards; see ``RoleRun`` for what it takes."""

    def __init__(self, *arguments: Any, findings: Comparing, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._findings = findings
        self._taps = Taps(max((entry.num_tokens for entry in self.plan.entries), default=0))
        self._step = 0
        """Which draft decode of a chain runs."""
        self._now: tuple[Extents, Made] | None = None

    # What is tapped.

    def _per_token(self, step: int, extents: Extents) -> None:
        self._step = step
        super()._per_token(step, extents)
        if self.role is Role.DRAFT_DECODE:
            # Each step goes on from the state of the one before, and changes it.
            for name, tensor in self._in_order(self.body.inputs()):
                self._taps.keep(Key(step, None, name), tensor)

    def _attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        for name, tensor in (("queries", query), ("keys", keys), ("values", values)):
            self._taps.keep(Key(self._step, layer, name), tensor)
        out = super()._attend(layer, query, keys, values, scoring)
        self._taps.keep(Key(self._step, layer, "attention"), out)
        return out

    @staticmethod
    def _in_order(held: Iterator[tuple[str, object, str]]) -> list[tuple[str, torch.Tensor]]:
        return [(each[0], tensor_of(each)) for each in sorted(held, key=lambda e: _RESULTS.index(e[0]))]

    # What runs.

    def prepare(self, entry: Entry | None, real: Extents, extents: Extents, values: Made) -> None:
        """Remember what is staged; see ``RoleRun``."""
        self._now = real, values
        super().prepare(entry, real, extents, values)

    def again(self, answer: Dispatch, entry: Entry | None, extents: Extents, started: float) -> Ran:
        """Run what is staged eager, and then as ``RoleRun`` does; raises ``DifferenceError``."""
        turn = self._findings.turn(self.role)
        if entry is None:
            self._findings.ran_eager(self.role)
            with self._taps.off():
                return super().again(answer, entry, extents, started)
        assert self._now is not None, "a forward is staged before it runs"
        begun, (real, values) = perf_counter(), self._now
        forward = _Forward(
            entry=entry,
            real=real,
            extents=extents,
            made=self._steps(values, entry.draft_steps or 1),
            fields={buffer.key: buffer.tensor.clone() for buffer in self.fields},
            turn=turn,
        )
        inputs = [tensor_of(held) for held in self.body.inputs()]
        slots = forward.slots.to(self.fields["positions"].device)
        before = [tensor.clone() for tensor in inputs]
        caches = [(cache, cache[slots]) for _, _, cache in self._caches()]
        before_graph = [prints(cache) for cache, _ in caches]
        eager = self._eager(forward, slots)
        self.poison()
        self._taps.poison()
        for tensor, was in zip(inputs, before, strict=True):
            tensor.copy_(was)
        for buffer in self.fields:
            buffer.tensor.copy_(forward.fields[buffer.key])
        for cache, held in caches:
            cache[slots] = held
        self._compare_fields(forward, values)
        self.prepare(entry, real, extents, values)
        ran = super().again(answer, entry, extents, started + perf_counter() - begun)
        graph = self._kept(forward, slots)
        self._compare_tensors(forward, graph, eager, slots, before_graph)
        self._findings.same(self.role)
        return ran

    def _steps(self, values: Made, steps: int) -> tuple[Made, ...]:
        made = [dict(values)]
        for _ in range(steps - 1):
            made.append(dict(made[-1]))
            move_on(made[-1], self.page_size, self._bounds.positions)
        return tuple(made)

    def _eager(self, forward: _Forward, slots: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Run all steps eager, and return what they computed; of the target's tokens, the logits."""
        for step, made in enumerate(forward.made):
            extents = self.stage(None, forward.real, dict(made))
            self._per_token(step, extents)
            self.body.per_request(extents, None)
        found = self._kept(forward, slots)
        tokens = Key(0, None, "tokens")
        if tokens in found and isinstance(self.body, TargetBody):
            found[tokens] = self.body.model.logits(self.body.hidden[: forward.real.tokens])
        return found

    def _caches(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield each layer's caches as ``[slots, width]``."""
        for layer, group in sorted(self._group_of.items()):
            cache = group.caches[layer]
            for name, tensor in zip(CACHES, (cache.keys, cache.values), strict=True):
                yield layer, name, tensor.flatten(0, 1).flatten(1)

    def _kept(self, forward: _Forward, slots: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return copies of the real rows of every tensor, in the order of computation."""
        steps, found = len(forward.made), dict[Key, torch.Tensor]()
        places = torch.from_numpy(forward.made[0]["idx_mapping"]).long().to(slots.device)
        caches: dict[int, list[tuple[Key, torch.Tensor]]] = {}
        for layer, name, cache in self._caches():
            caches.setdefault(layer, []).append((Key(steps - 1, layer, name), cache[slots]))

        def keep(key: Key, tensor: torch.Tensor) -> None:
            if key.name == "draft_state.column":
                found[key] = tensor[:1].clone()
            elif key.name.startswith("draft_state."):
                found[key] = tensor[places]
            else:
                found[key] = tensor[: forward.real.tokens].clone()

        for key, tensor in self._taps.kept(steps):
            keep(key, tensor)
            if key.name == "values" and key.step == steps - 1 and key.layer is not None:
                # After the last step of a chain, whose slots are all there then.
                found.update(caches[key.layer])
        for name, tensor in self._in_order(self.body.outputs()):
            if name != "tokens" or forward.entry.query_len is not None:
                keep(Key(0, None, name), tensor)
        return found

    # What is compared.

    def _compare_fields(self, forward: _Forward, values: Made) -> None:
        """Compare the fields that the graph will read with what they should be, padding included.

        Before the replay: what indexes with poison or with a stale row may not come back from it.
        """
        for buffer in self.fields:
            real = values.get(buffer.field.name)
            if real is None or buffer.is_frozen:
                continue
            held = forward.fields[buffer.key][: forward.extents.rows(buffer.field)].cpu()
            wanted = torch.full_like(held, padding.fill_of(buffer, real, len(values["positions"])))
            wanted[tuple(map(slice, real.shape))] = torch.from_numpy(np.ascontiguousarray(real)).to(
                held.dtype
            )
            errors = row_errors(held, wanted)
            if bool(errors.any()):
                row = int(errors.argmax())
                whose: Row = (None, None)
                if row < len(real) and buffer.field.axis is Axis.TOKEN and buffer.field.scale == 1:
                    whose = self._named(*forward.whose(Key(0, None, ""), row))
                elif row < len(real) and buffer.field.axis is Axis.REQUEST:
                    whose = self._named(row, None)
                key = Key(0, None, f"field {buffer.key}")
                self._refuse(forward, key, held, wanted, errors, 0.0, None, (row, whose))

    def _compare_tensors(
        self,
        forward: _Forward,
        graph: dict[Key, torch.Tensor],
        eager: dict[Key, torch.Tensor],
        slots: torch.Tensor,
        before_graph: Sequence[torch.Tensor],
    ) -> None:
        """Raise ``DifferenceError`` at the first tensor that differs."""
        untied = np.full(forward.real.reqs, len(forward.made))
        """By request, the first step of a chain after which it is not compared: it went on from another
        token of as much likelihood."""
        caches = dict(zip(((layer, name) for layer, name, _ in self._caches()), before_graph, strict=True))
        half = any(tolerance_of(tensor) > HALF for tensor in eager.values())
        after: Key | None = None
        for key, wanted in eager.items():
            held, tolerance, is_cache = graph[key], tolerance_of(wanted), key.name in CACHES
            is_logits = key.name == "tokens"
            errors = (shortfall(held, wanted) if is_logits else row_errors(held, wanted)).cpu()
            if is_cache:
                # Padding writes to the null page, and so does a draft past the model's end.
                errors[(slots < self.page_size).cpu()] = 0
            if untied.min(initial=len(forward.made)) < len(forward.made):
                errors[torch.from_numpy(forward.is_tied(key, len(errors), untied))] = 0
            if half and key.name == "draft_state.token":
                tied = errors.numpy() > 0
                untied[tied] = key.step
                self._findings.near_ties += int(tied.sum())
                continue
            if bool((errors > tolerance).any()):
                wanted = wanted.argmax(-1) if is_logits else wanted
                row = int((errors > tolerance).nonzero()[0])
                at = int(slots[row]) if is_cache else row, self._named(*forward.whose(key, row))
                self._refuse(forward, key, held, wanted, errors, tolerance, after, at)
            if wanted.is_floating_point() and len(errors):
                self._findings.saw(
                    Largest(
                        tensor=key.name,
                        error=float(errors.max()),
                        tolerance=tolerance,
                        role=self.role,
                        layer=key.layer,
                    )
                )
            if is_cache and key.layer is not None:
                self._compare_foreign(forward, key, caches[key.layer, key.name], slots, after)
            after = key

    def _compare_foreign(
        self, forward: _Forward, key: Key, before_graph: torch.Tensor, slots: torch.Tensor, after: Key | None
    ) -> None:
        """Refuse a slot that the graph wrote and this batch does not; the null page is anybody's."""
        cache = next(tensor for *of, tensor in self._caches() if of == [key.layer, key.name])
        changed = prints(cache) != before_graph
        changed[slots] = False
        changed[: self.page_size] = False
        if bool(changed.any()):
            slot = int(changed.nonzero()[0])
            held = cache[changed]
            errors = torch.full((len(held),), torch.inf, dtype=torch.float64)
            at = slot, self._findings.owner(slot, self.page_size)
            self._refuse(forward, key, held, torch.full_like(held, torch.nan), errors, 0.0, after, at)

    def _refuse(
        self,
        forward: _Forward,
        key: Key,
        graph: torch.Tensor,
        eager: torch.Tensor,
        errors: torch.Tensor,
        tolerance: float,
        after: Key | None,
        at: tuple[int, Row],
    ) -> NoReturn:
        """Raise ``DifferenceError``; ``at``: the row as it is told, and whose it is."""
        row, (request, token) = at
        first = int((errors > tolerance).nonzero()[0])
        held, wanted = graph[first].flatten().cpu(), eager[first].flatten().cpu()
        apart = (held.double() - wanted.double()).abs().nan_to_num(torch.inf, torch.inf)
        furthest, worst = int(apart.argmax()), float(errors.max())
        real = forward.real
        told = Difference(
            step=self._findings.step,
            role=self.role,
            entry=forward.entry,
            draft_step=forward.turn + key.step if self.role is Role.DRAFT_DECODE else None,
            layer=key.layer,
            tensor=key.name,
            row=row,
            request=request,
            token=token,
            graph=number(held[furthest]),
            eager=number(wanted[furthest]),
            error=worst if np.isfinite(worst) else None,
            tolerance=tolerance,
            rows=int((errors > tolerance).sum()),
            after=None if after is None else str(after),
            num_tokens=real.tokens,
            num_reqs=real.reqs,
            padded_tokens=forward.extents.tokens - real.tokens,
            padded_reqs=forward.extents.reqs - real.reqs,
            requests=tuple(live.request.name for live in self._findings.batch),
            fields=tuple(self._metadata_seen(forward)),
        )
        self._findings.difference = told
        raise DifferenceError(str(told), told)

    def _named(self, row: int | None, token: int | None) -> Row:
        batch = self._findings.batch
        return (batch[row].request.name, token) if row is not None and row < len(batch) else (None, token)

    def _metadata_seen(self, forward: _Forward) -> Iterator[FieldSeen]:
        """Yield the fields as they were staged, and the scalars of each group."""
        for buffer in self.fields:
            held, field = forward.fields[buffer.key], buffer.field
            real, padded = forward.real.rows(field), forward.extents.rows(field)
            yield FieldSeen(
                name=buffer.key, real=held[:real].cpu().tolist(), padding=held[real:padded].cpu().tolist()
            )
        for group, metadata in self._metadata.items():
            for name in ("num_reqs", "num_tokens", "max_query_len", "max_seq_len"):
                yield FieldSeen(name=f"{group}.{name}", real=getattr(metadata, name))
