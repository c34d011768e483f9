"""Drafts of requests that are served: which of them are verified and kept, and what the drafter reads.

Tokens alone do not show it: a draft that is lost, made of other tokens, or not kept although the target agrees costs
time only. The tokens that a request was given say what is right, exactly: up to the first draft that is not kept, the
target's answers are those tokens, and the answer in its place is the newest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch

from capture_planner.modes import Role
from capture_planner.records.model import Speculative
from capture_planner_conformance.scene import DraftScheme
from capture_planner_conformance.served_rows import requests_by_state
from capture_planner_runner.execution.inputs import Array, ForwardStep
from capture_planner_runner.ledger.rows import Step
from capture_planner_runner.serving.serving import Serving
from support.runner_conformance.laws import RunnerCheck


@attrs.frozen(kw_only=True)
class StepRows:
    """The rows of one request in a forward, as they were on the device."""

    role: Role
    name: str
    is_decode: bool
    """Whether the target's rows are the newest token and drafts."""
    first: int
    """The position of the first one."""
    ids: tuple[int, ...]
    last: int
    """Of a draft prefill, the row that the first draft is made of."""


@attrs.frozen(kw_only=True)
class DecodeRow:
    """The row of one request in a forward of draft decodes, as it was on the device."""

    name: str
    position: int
    """Of the first decode in it."""
    steps: int
    """Draft decodes of the forward: more than one in a fused chain."""


@attrs.frozen(kw_only=True)
class Proposal:
    """The drafts of one request after a forward of the drafter."""

    name: str
    tokens: tuple[int, ...]


Event = StepRows | DecodeRow | Proposal


def rows_of(step: ForwardStep, values: Mapping[str, Array], serving: Serving) -> Iterator[StepRows]:
    """Yield the rows of each request in a step of the target or the draft prefill; ``values`` holds its fields."""
    requests = requests_by_state(serving.scheduler.unfinished)
    starts, positions, ids = (values[name] for name in ("query_start_loc", "positions", "input_ids"))
    for row, place in enumerate(values["idx_mapping"][: step.real.reqs].tolist()):
        start, end = starts[row : row + 2].tolist()
        if start == end:
            continue
        first = int(positions[start])
        yield StepRows(
            role=step.batch.role,
            name=requests[place].name,
            is_decode=first >= len(requests[place].prompt),
            first=first,
            ids=tuple(ids[start:end].tolist()),
            last=int(values["last_token_indices"][row]) - start,
        )


def decodes_of(step: ForwardStep, values: Mapping[str, Array], serving: Serving) -> Iterator[DecodeRow]:
    """Yield the row of each request in a forward of draft decodes."""
    requests = requests_by_state(serving.scheduler.unfinished)
    steps = (step.entry and step.entry.draft_steps) or 1
    for place, position in zip(
        values["idx_mapping"][: step.real.reqs].tolist(), values["positions"].tolist(), strict=False
    ):
        yield DecodeRow(name=requests[place].name, position=position, steps=steps)


def proposals_of(
    step: ForwardStep, proposed: torch.Tensor, speculative: Speculative, serving: Serving
) -> Iterator[Proposal]:
    """Yield the drafts of each request in a finished step of the drafter: those of ``proposed int[states, K]`` that its
    schedule asks for.
    """
    requests = requests_by_state(serving.scheduler.unfinished)
    places, made = step.inputs.idx_mapping.tolist(), speculative.draft_tokens(len(step.inputs.idx_mapping))
    for place, drafts in zip(places, proposed[places].tolist(), strict=True):
        yield Proposal(name=requests[place].name, tokens=tuple(drafts[:made]))


def check_served_drafts(
    drafter: DraftScheme, events: Sequence[Event], tokens: Mapping[str, Sequence[int]], longest: int
) -> None:
    """Check what was proposed, verified, kept and read while requests were served.

    :param events: in the order in which they happened.
    :param tokens: prompt and output of each request.
    :param longest: the model's longest sequence, in tokens.
    """
    given = {name: np.array(each) for name, each in tokens.items()}
    proposed: dict[str, Proposal] = {}
    verified: dict[str, StepRows] = {}
    chains: dict[str, _Chain] = {}
    for event in events:
        if isinstance(event, Proposal):
            proposed[event.name] = event
        elif isinstance(event, DecodeRow):
            chains[event.name].decode(event, longest)
        elif event.role is Role.TARGET:
            verified[event.name] = event
            if event.is_decode:
                _check_proposed(event, proposed[event.name])
                chains[event.name].check_ended(drafter, proposed[event.name])
        else:
            _check_prefill(drafter, verified[event.name], event, given[event.name])
            chains[event.name] = _Chain(event)
    for name, chain in chains.items():
        chain.check_ended(drafter, proposed[name])


@attrs.define
class _Chain:
    """The draft decodes of a request after a draft prefill."""

    prefill: StepRows
    steps: int = 0

    def decode(self, row: DecodeRow, longest: int) -> None:
        """Add the decodes of a forward: they follow the last token that was kept."""
        expected = min(self.prefill.first + self.prefill.last + 1 + self.steps, longest - 1)
        if row.position != expected:
            message = f"draft decode {self.steps + 1} stands at position {row.position}, and the one after "
            message += f"what was kept and drafted is {expected} ({_where(self.prefill)})"
            raise RunnerCheck.VERIFIED.violation(message, role=Role.DRAFT_DECODE)
        self.steps += row.steps

    def check_ended(self, drafter: DraftScheme, proposal: Proposal) -> None:
        """Check that each draft but the first took a decode, where decodes make them."""
        is_chain = not drafter.is_parallel and drafter is not DraftScheme.MODULES
        wanted = max(len(proposal.tokens) - 1, 0) if is_chain else 0
        if self.steps != wanted:
            message = f"{self.steps} draft decodes are run, and {len(proposal.tokens)} drafts take {wanted}"
            raise RunnerCheck.VERIFIED.violation(f"{message} ({_where(self.prefill)})", role=Role.DRAFT_DECODE)


def check_counted_drafts(
    steps: Sequence[Step], events: Sequence[Event], tokens: Mapping[str, Sequence[int]], places: int
) -> None:
    """Compare the drafts that steps counted with those that were verified and kept, by their place among ``places``.

    Where the last drafts of a request reach beyond its output, what was kept of them lies between two numbers.
    """
    bounds = np.zeros((4, places), dtype=np.int64)
    proposed: dict[str, Proposal] = {}
    for event in events:
        if isinstance(event, Proposal):
            proposed[event.name] = event
        elif isinstance(event, StepRows) and event.role is Role.TARGET and event.is_decode:
            given = np.array(tokens[event.name])
            if event.first + 1 >= len(given):  # The row of a request that had ended is wasted.
                continue
            drafts = min(len(event.ids) - 1, len(proposed[event.name].tokens))
            kept = _kept(event, given)
            least = len(given[event.first : event.first + len(event.ids)]) if kept is None else kept
            most = len(event.ids) if kept is None else kept
            for row, count in zip(bounds, (drafts, drafts, min(drafts, least - 1), min(drafts, most - 1)), strict=True):
                row[:count] += 1
    for names, (fewest, most) in zip(
        (("drafted", "drafted_at"), ("accepted", "accepted_at")), bounds.reshape(2, 2, -1), strict=True
    ):
        at = np.zeros(places, dtype=np.int64)
        for step in steps:
            for place, count in enumerate(getattr(step, names[1])):
                at[place] += count
        total = sum(getattr(step, names[0]) for step in steps)
        if total != at.sum() or (at < fewest).any() or (at > most).any():
            message = f"{total} drafts are counted as {names[0]}, {at.tolist()} by their place; there were from "
            message += f"{fewest.tolist()} to {most.tolist()}"
            raise RunnerCheck.COUNTED.violation(message)


def _check_proposed(target: StepRows, proposal: Proposal) -> None:
    # Any token takes the place of a draft that was not made, where all rows are to have as many.
    drafts, made = target.ids[1:], proposal.tokens
    if any(draft != token for draft, token in zip(drafts, made, strict=False)):
        message = f"the drafts {list(drafts)} are verified, and {list(made)} were proposed"
        raise RunnerCheck.VERIFIED.violation(f"{message} ({_where(target)})", role=Role.TARGET)


def _check_prefill(drafter: DraftScheme, target: StepRows, prefill: StepRows, tokens: Array) -> None:
    if prefill.first != target.first:
        message = f"the drafter goes on from position {prefill.first} ({_where(target)})"
        raise RunnerCheck.VERIFIED.violation(message, role=Role.DRAFT_PREFILL)
    shift = int(drafter.reads_states)
    kept = _kept(target, tokens)
    if kept is not None and prefill.last != min(kept + 1 - shift, len(prefill.ids)) - 1:
        message = (
            f"{prefill.last + shift} of {len(target.ids)} tokens are kept, and {kept} are what the request was given"
        )
        raise RunnerCheck.VERIFIED.violation(f"{message} ({_where(target)})", role=Role.DRAFT_PREFILL)
    # The last tokens of a request that has ended are not among those that it was given.
    read, given = np.array(prefill.ids[: prefill.last + 1]), tokens[prefill.first + shift :]
    wrong = np.flatnonzero(read[: len(given)] != given[: len(read)])
    if len(wrong):
        message = f"the drafter reads token {read[wrong[0]]} in row {wrong[0]}, and the request has {given[wrong[0]]}"
        raise RunnerCheck.VERIFIED.violation(f"{message} ({_where(target)})", role=Role.DRAFT_PREFILL)


def _kept(target: StepRows, tokens: Array) -> int | None:
    """Return how many of its rows are tokens of the request; None where it ended with them."""
    if not target.is_decode:
        return len(target.ids)
    given = tokens[target.first : target.first + len(target.ids)]
    agrees = np.array(target.ids[: len(given)]) == given
    if not agrees.all():
        return int(agrees.argmin())
    return len(target.ids) if len(given) == len(target.ids) else None


def _where(rows: StepRows) -> str:
    return f"{rows.name}, {len(rows.ids)} tokens from position {rows.first}"
