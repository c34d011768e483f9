"""Compare graphs with eager forwards: each forward of a graph also runs eager, and all tensors are compared.

The eager forward is first, at real extents, with fields filled from the host and through the same backends. Then
everything that it changed is restored, everything else is poisoned, and the graph is replayed. Tensors are compared in
the order of computation: fields; of each layer queries, keys, values, caches and attention; then results. So the first
that differs is where it went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import NoReturn

import attrs
import numpy as np
import torch

from capture_planner.errors import DifferenceError
from capture_planner.modes import Role
from capture_planner.records.backend import Axis
from capture_planner.records.batch import Entry
from capture_planner_runner.execution import padding
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.fields import TensorRef, poison, tensor_of
from capture_planner_runner.execution.inputs import Array, ForwardStep, StepInputs
from capture_planner_runner.execution.role import ForwardObserver, ForwardTimes, LayerTensors, RoleRun
from capture_planner_runner.numerics.record import ComparisonLog, Difference, FieldSnapshot, LargestError
from capture_planner_runner.numerics.tolerance import NEAR_TIES, finite, prints, row_errors, shortfall, tolerance_of


@attrs.frozen
class TapKey:
    """One tensor of a forward."""

    step: int
    """Number of the draft decode in a chain; 0 outside of chains."""
    layer: int | None
    """Layer of the model; None outside of layers."""
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}, {self.name}"


class Taps:
    """Persistent buffers of one role that keep what passes through a forward, also inside a graph.

    A copy into a tap is an operator of the forward: captured with it, and run at every replay. So a tap reads a graph
    from the inside, and nothing waits for the device. Each buffer is made on first use, in a warm-up.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._buffers: dict[TapKey, torch.Tensor] = {}
        self._is_on = True

    def keep(self, key: TapKey, tensor: torch.Tensor) -> None:
        """Copy ``tensor [rows, ...]`` to the front of its buffer, which has rows for the largest graph."""
        if not self._is_on:
            return
        # Outside of a capture, in the warm-up before it: what a capture makes, later replays overwrite.
        if key not in self._buffers:
            rows = max(self._rows, len(tensor))
            self._buffers[key] = tensor.new_zeros(rows, *tensor.shape[1:])
        self._buffers[key][: len(tensor)].copy_(tensor)

    def kept(self, steps: int) -> Iterator[tuple[TapKey, torch.Tensor]]:
        """Yield the buffers of the first ``steps`` steps, in the order of computation."""
        return ((key, buffer) for key, buffer in self._buffers.items() if key.step < steps)

    def poison(self) -> None:
        """Overwrite all of it, so that nothing of an earlier forward is taken for what a graph computed."""
        for buffer in self._buffers.values():
            poison(buffer)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep nothing: for forwards that no graph serves, which may have more rows than any graph."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True


_RESULTS = (
    "aux",
    "hidden",
    "draft_state.hidden",
    "tokens",
    "draft_state.probabilities",
    "draft_state.token",
    "draft_state.proposed",
    "draft_state.column",
)
"""The order in which bodies compute their results."""
CACHES = ("key cache", "value cache")

_Owner = tuple[str | None, int | None]
"""The request that a row belongs to, and its token; None twice: padding, or no request's."""


@attrs.frozen(kw_only=True, eq=False)
class _ComparedForward:
    role: RoleRun
    entry: Entry
    step: ForwardStep
    chain: tuple[StepInputs, ...]
    """The host's inputs of each draft decode of a chain; of one forward, outside of chains."""
    fields: dict[str, torch.Tensor]
    """Each field as it was staged for the graph, by its key."""
    slots: torch.Tensor
    """``int64[steps * T]``: the slots that it writes, on the device."""
    turn: int
    """Number of earlier forwards of the role in this step."""

    @property
    def num_tokens(self) -> int:
        return self.step.real.tokens

    def owner(self, key: TapKey, row: int) -> tuple[int | None, int | None]:
        """Return the request of a row of a tensor, as its row in the batch, and its token; or None twice."""
        number = key.step
        if key.name == "draft_state.column":
            return None, None
        if key.name in CACHES:
            # The slots of a chain follow each other, step by step.
            number, row = divmod(row, self.num_tokens)
        inputs = self.chain[number]
        if key.name.startswith("draft_state."):
            return row, int(inputs.positions[inputs.last_token_indices[row]])
        return int(np.searchsorted(inputs.query_start_loc, row, "right")) - 1, int(inputs.positions[row])

    def is_tied(self, key: TapKey, rows: int, untied: Array) -> Array:
        """Return ``bool[rows]``: rows after a near tie, which are not compared.

        :param untied: ``int[R]``, the draft step of each request's near tie.
        """
        owners = [self.owner(key, row)[0] for row in range(rows)]
        steps = [row // self.num_tokens if key.name in CACHES else key.step for row in range(rows)]
        return np.array([at is not None and step >= untied[at] for at, step in zip(owners, steps, strict=True)])


class EagerCheck(ForwardObserver):
    """Compares the graphs of one role with eager forwards: taps them as an observer, and wraps their execution.

    :param log: what all roles of a run add to.
    :param max_tokens: rows of the role's largest graph.
    :param inner: watches the forwards that are served, by its ``forward``.
    """

    def __init__(self, log: ComparisonLog, max_tokens: int, inner: ForwardObserver | None = None) -> None:
        self._log = log
        self._inner = inner or ForwardObserver()
        self._taps = Taps(max_tokens)

    # What is tapped.

    @contextmanager
    def attention(self, role: RoleRun, number: int, layer: int, tensors: LayerTensors) -> Iterator[None]:
        """Keep what goes into attention and what comes out; see ``ForwardObserver``."""
        for name in ("queries", "keys", "values"):
            self._taps.keep(TapKey(number, layer, name), getattr(tensors, name))
        yield
        self._taps.keep(TapKey(number, layer, "attention"), tensors.out)

    def after_tokens(self, role: RoleRun, number: int) -> None:
        """Keep the state of a draft decode: each one goes on from the one before, and changes it."""
        if role.role is Role.DRAFT_DECODE:
            for name, tensor in _in_order(role.body.inputs()):
                self._taps.keep(TapKey(number, None, name), tensor)

    def forward(self, role: RoleRun, step: ForwardStep) -> AbstractContextManager[None]:
        """Let the inner observer watch the forward that is served."""
        return self._inner.forward(role, step)

    # What runs.

    def execute(self, role: RoleRun, step: ForwardStep, started: float) -> ForwardTimes:
        """Run a step eagerly, then from its graph, and compare; raises ``DifferenceError``."""
        turn = self._log.turn(role.role)
        if step.entry is None:
            self._log.eager[role.role] += 1
            with self._taps.off():
                return role.execute(step, started)
        begun = perf_counter()
        chain = _chain(step.inputs, step.entry.draft_steps or 1, role.bounds.positions)
        slots = np.concatenate([inputs.declared["slot_mapping"] for inputs in chain]).astype(np.int64)
        forward = _ComparedForward(
            role=role,
            entry=step.entry,
            step=step,
            chain=chain,
            # Copied now: the eager forward fills the same buffers at other extents.
            fields={buffer.key: buffer.tensor.clone() for buffer in role.fields},
            slots=role.attention.context.stored(torch.from_numpy(slots)).to(role.fields["positions"].device),
            turn=turn,
        )
        inputs = [tensor_of(actual) for actual in (*role.body.inputs(), *role.recurrent.persistent())]
        before = [tensor.clone() for tensor in inputs]
        caches = [(cache, cache[forward.slots]) for _, _, cache in _slots(role)]
        # Of all slots: the graph may write none that are not this batch's.
        before_graph = {(layer, name): prints(cache) for layer, name, cache in _caches(role)}
        eager = self._eager(forward)
        # The graph starts where the eager forward did, and finds none of its results.
        role.poison()
        self._taps.poison()
        for tensor, then in zip(inputs, before, strict=True):
            tensor.copy_(then)
        for buffer in role.fields:
            buffer.tensor.copy_(forward.fields[buffer.key])
        for cache, then in caches:
            cache[forward.slots] = then
        self._compare_fields(forward)
        # Once more: the eager forward has prepared the backends for its own extents.
        role.prepare_backends(step)
        # The start is moved by the time of the eager forward, which is no time of the step.
        times = role.execute(step, started + perf_counter() - begun)
        self._compare_tensors(forward, self._results(forward), eager, before_graph)
        self._log.add_equal(role.role)
        return times

    def _eager(self, forward: _ComparedForward) -> dict[TapKey, torch.Tensor]:
        """Run all steps eagerly, and return what they computed; of the target's likeliest tokens, the logits."""
        role = forward.role
        for number, inputs in enumerate(forward.chain):
            step = role.step(forward.step.batch, None, inputs)
            role.stage_inputs(step)
            role.prepare_backends(step)
            role.per_token(number, step.extents)
            role.body.per_request(step.extents, None)
        results = self._results(forward)
        tokens = TapKey(0, None, "tokens")
        if tokens in results and isinstance(role.body, TargetBody):
            body, rows = role.body, slice(forward.num_tokens)
            results[tokens] = body.model.logits(body.hidden[rows]) if body.sampler is None else body.next_tokens(rows)
        return results

    def _results(self, forward: _ComparedForward) -> dict[TapKey, torch.Tensor]:
        """Return copies of the real rows of every tensor, in the order of computation."""
        steps, results = len(forward.chain), dict[TapKey, torch.Tensor]()
        states = torch.from_numpy(forward.step.inputs.idx_mapping).long().to(forward.slots.device)
        caches: dict[int, list[tuple[TapKey, torch.Tensor]]] = {}
        for layer, name, cache in _caches(forward.role):
            caches.setdefault(layer, []).append((TapKey(steps - 1, layer, name), cache[forward.slots]))

        def keep(key: TapKey, tensor: torch.Tensor) -> None:
            if key.name == "draft_state.column":
                results[key] = tensor[:1].clone()
            elif key.name.startswith("draft_state."):
                results[key] = tensor[states]
            else:
                results[key] = tensor[: forward.num_tokens].clone()

        for key, tensor in self._taps.kept(steps):
            keep(key, tensor)
            if key.name == "values" and key.step == steps - 1 and key.layer is not None:
                # After the last step of a chain, when all of its slots are written.
                results.update(caches[key.layer])
        for name, tensor in _in_order(forward.role.body.outputs()):
            # Unless the graph is of decodes, only some rows are sampled, after it.
            if name != "tokens" or forward.entry.tokens_each is not None:
                keep(TapKey(0, None, name), tensor)
        return results

    # What is compared.

    def _compare_fields(self, forward: _ComparedForward) -> None:
        """Compare the fields that the graph will read with what they should be, padding included.

        Before the replay: what indexes with poison or with a stale row may not come back from it.
        """
        declared = forward.step.inputs.declared
        for buffer in forward.role.fields:
            real = declared.get(buffer.field.name)
            if real is None or buffer.is_frozen:
                continue
            actual = forward.fields[buffer.key][: forward.step.extents.rows(buffer.field)].cpu()
            expected = torch.full_like(actual, padding.fill_of(buffer, real, forward.num_tokens))
            expected[tuple(map(slice, real.shape))] = torch.from_numpy(np.ascontiguousarray(real)).to(actual.dtype)
            errors = row_errors(actual, expected)
            if bool(errors.any()):
                row = int(errors.argmax())
                owner: _Owner = (None, None)
                if row < len(real) and buffer.field.axis is Axis.TOKEN and buffer.field.scale == 1:
                    owner = self._named(*forward.owner(TapKey(0, None, ""), row))
                elif row < len(real) and buffer.field.axis is Axis.REQUEST:
                    owner = self._named(row, None)
                key = TapKey(0, None, f"field {buffer.key}")
                self._refuse(forward, key, actual, expected, errors, 0.0, None, (row, owner))

    def _compare_tensors(
        self,
        forward: _ComparedForward,
        graph: dict[TapKey, torch.Tensor],
        eager: dict[TapKey, torch.Tensor],
        before_graph: Mapping[tuple[int, str], torch.Tensor],
    ) -> None:
        """Raise ``DifferenceError`` at the first tensor that differs."""
        role, slots, steps = forward.role, forward.slots, len(forward.chain)
        untied = np.full(forward.step.real.reqs, steps)
        """By request, the draft step of its near tie: later rows follow from another, equally likely token."""
        half = any(tolerance_of(tensor) > NEAR_TIES for tensor in eager.values())
        after: TapKey | None = None
        for key, expected in eager.items():
            actual, tolerance, is_cache = graph[key], tolerance_of(expected), key.name in CACHES
            is_logits = key.name == "tokens" and expected.is_floating_point()
            errors = (shortfall(actual, expected) if is_logits else row_errors(actual, expected)).cpu()
            if is_cache:
                # Padding writes to the null page, and so does a draft past the model's end.
                errors[(slots < role.null_slots).cpu()] = 0
            if untied.min(initial=steps) < steps:
                errors[torch.from_numpy(forward.is_tied(key, len(errors), untied))] = 0
            # In half precision another draft from equal states is a near tie; its request is not compared further.
            # So is another sampled token, which nothing is computed from here.
            if half and (key.name == "draft_state.token" or (key.name == "tokens" and not is_logits)):
                tied = errors.numpy() > 0
                if key.name != "tokens":
                    untied[tied] = key.step
                self._log.near_ties += int(tied.sum())
                continue
            if bool((errors > tolerance).any()):
                expected = expected.argmax(-1) if is_logits else expected
                row = int((errors > tolerance).nonzero()[0])
                at = int(slots[row]) if is_cache else row, self._named(*forward.owner(key, row))
                self._refuse(forward, key, actual, expected, errors, tolerance, after, at)
            if expected.is_floating_point() and len(errors):
                worst = float(errors.max())
                seen = LargestError(tensor=key.name, error=worst, tolerance=tolerance, role=role.role, layer=key.layer)
                self._log.add_error(seen)
            # The slots of the batch agree; a graph may still have written others.
            if is_cache and key.layer is not None:
                self._compare_foreign(forward, key, before_graph[key.layer, key.name], after)
            after = key

    def _compare_foreign(
        self, forward: _ComparedForward, key: TapKey, before_graph: torch.Tensor, after: TapKey | None
    ) -> None:
        """Refuse a slot that the graph wrote and this batch does not; any row may write the null page."""
        role = forward.role
        # Read again: only checksums of the cache were kept.
        cache = next(tensor for *of, tensor in _caches(role) if of == [key.layer, key.name])
        changed = prints(cache) != before_graph
        changed[forward.slots] = False
        changed[: role.null_slots] = False
        if bool(changed.any()):
            slot = int(changed.nonzero()[0])
            actual = cache[changed]
            errors = torch.full((len(actual),), torch.inf, dtype=torch.float64)
            # A slot of this rank; pages are counted over all ranks that share the KV.
            at = slot, self._log.owner(slot * role.attention.context.size, role.page_size)
            self._refuse(forward, key, actual, torch.full_like(actual, torch.nan), errors, 0.0, after, at)

    def _refuse(
        self,
        forward: _ComparedForward,
        key: TapKey,
        graph: torch.Tensor,
        eager: torch.Tensor,
        errors: torch.Tensor,
        tolerance: float,
        after: TapKey | None,
        at: tuple[int, _Owner],
    ) -> NoReturn:
        """Raise ``DifferenceError``; ``at``: the row, or the slot, with its owner."""
        row, (request, token) = at
        first = int((errors > tolerance).nonzero()[0])
        actual, expected = graph[first].flatten().cpu(), eager[first].flatten().cpu()
        apart = (actual.double() - expected.double()).abs().nan_to_num(torch.inf, torch.inf)
        furthest, worst = int(apart.argmax()), float(errors.max())
        role, real = forward.role.role, forward.step.real
        difference = Difference(
            step=self._log.step,
            role=role,
            entry=forward.entry,
            draft_step=forward.turn + key.step if role is Role.DRAFT_DECODE else None,
            layer=key.layer,
            tensor=key.name,
            row=row,
            request=request,
            token=token,
            graph=finite(actual[furthest]),
            eager=finite(expected[furthest]),
            error=worst if np.isfinite(worst) else None,
            tolerance=tolerance,
            rows=int((errors > tolerance).sum()),
            after=None if after is None else str(after),
            num_tokens=real.tokens,
            num_reqs=real.reqs,
            padded_tokens=forward.step.extents.tokens - real.tokens,
            padded_reqs=forward.step.extents.reqs - real.reqs,
            requests=tuple(self._log.batch),
            fields=tuple(_metadata_seen(forward)),
        )
        self._log.difference = difference
        raise DifferenceError(str(difference), difference)

    def _named(self, row: int | None, token: int | None) -> _Owner:
        batch = self._log.batch
        return (batch[row], token) if row is not None and row < len(batch) else (None, token)


def _in_order(tensors: Iterator[TensorRef]) -> list[tuple[str, torch.Tensor]]:
    """Return a body's tensors in the order in which it computes them."""
    return [(each[0], tensor_of(each)) for each in sorted(tensors, key=lambda e: _RESULTS.index(e[0]))]


def _chain(inputs: StepInputs, steps: int, max_model_len: int) -> tuple[StepInputs, ...]:
    chain = [inputs]
    for _ in range(steps - 1):
        chain.append(chain[-1].next_draft(max_model_len))
    return tuple(chain)


def _slots(role: RoleRun) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield views of each layer's caches, ``[slots, heads, head_dim]``."""
    for layer, cache in role.attention.caches():
        for name, tensor in zip(CACHES, (cache.keys, cache.values), strict=True):
            yield layer, name, tensor.flatten(0, 1)


def _caches(role: RoleRun) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield each layer's caches as ``[slots, width]``: a copy where the cache is packed."""
    for layer, name, tensor in _slots(role):
        yield layer, name, tensor.flatten(1)


def _metadata_seen(forward: _ComparedForward) -> Iterator[FieldSnapshot]:
    """Yield the fields as they were staged, and the scalars of each group."""
    for buffer in forward.role.fields:
        actual, field = forward.fields[buffer.key], buffer.field
        real, padded = forward.step.real.rows(field), forward.step.extents.rows(field)
        yield FieldSnapshot(
            name=buffer.key, real=actual[:real].cpu().tolist(), padding=actual[real:padded].cpu().tolist()
        )
    for group, metadata in forward.role.attention.metadata.items():
        for name in ("num_reqs", "num_tokens", "max_query_len", "max_seq_len"):
            yield FieldSnapshot(name=f"{group}.{name}", real=getattr(metadata, name))
