"""Runners that pad wrongly, or let padded rows act: padding (D), and a mode that pads too little (G)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan, RolePlan
from capture_planner_runner.execution import role as role_module
from capture_planner_runner.execution import updates as updates_module
from capture_planner_runner.execution.fields import SAMPLED_COUNTS
from capture_planner_runner.execution.inputs import Array, ForwardStep, StepInputs
from capture_planner_runner.execution.padding import Write
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.execution.updates import DraftState, TokenFields, Updates, VerificationInputs
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving import serving as serving_module
from capture_planner_runner.serving.inputs import sampled_counts
from capture_planner_runner.serving.launching import DraftPasses
from capture_planner_runner.serving.speculative import Verification
from capture_planner_runner.serving.states import RequestStates, ScheduledBatch
from gallery.core import Mutant
from gallery.patching import Patch, nothing, patched

Writes = Callable[[RoleRun, StepInputs], list[Write]]


def filled(change: Callable[[RoleRun, Write], None], names: Iterable[str]) -> Patch:
    """Return a patch that changes the writes of the named fields, at every step."""
    wanted = frozenset(names)

    def make(original: Writes) -> Writes:
        def changed(run: RoleRun, inputs: StepInputs) -> list[Write]:
            writes = original(run, inputs)
            for write in writes:
                if write.buffer.field.name in wanted:
                    change(run, write)
            return writes

        return changed

    return patched((RoleRun, "writes", make))


def tail_left(run: RoleRun, write: Write) -> None:
    """Write the real rows and let the tail be."""
    if write.real is not None:
        write.rows = len(write.real)


def _tail_left_of_prefills(run: RoleRun, write: Write) -> None:
    if run.role is Role.DRAFT_PREFILL:
        tail_left(run, write)


def _zeroed(run: RoleRun, write: Write) -> None:
    write.fill = 0


def _within_the_entry(original: object) -> Callable[[RoleRun, ForwardStep], None]:
    """Pad up to the entry's extents, and remember the real ones as all that has to be cleaned."""

    def stage_inputs(run: RoleRun, step: ForwardStep) -> None:
        writes = run.writes(step.inputs)
        for write in writes:
            if write.real is not None:
                write.rows = max(len(write.real), min(write.rows, step.extents.rows(write.buffer.field)))
        run._apply(writes)

    return stage_inputs


# PIECEWISE draft decodes.


def _piecewise_drafts(original: Callable[..., None]) -> Callable[..., None]:
    def made(runner: Runner, plan: Plan, *given: object, **named: object) -> None:
        original(runner, replace(plan, roles=tuple(map(_piecewise, plan.roles))), *given, **named)

    return made


def _piecewise(role: RolePlan) -> RolePlan:
    if role.role is not Role.DRAFT_DECODE or not role.entries:
        return role
    sizes = sorted({entry.num_tokens for entry in role.entries}, reverse=True)
    entries = tuple(Entry(mode=GraphMode.PIECEWISE, num_tokens=size) for size in sizes)
    return replace(role, mode=GraphMode.PIECEWISE, entries=entries, waivers=())


# What padded rows do inside graphs and after them.


def _clamped(original: object) -> Callable[[DraftState, torch.Tensor], torch.Tensor]:
    return lambda state, idx_mapping: idx_mapping.clamp(min=0).long()


def _all_moved(original: Callable[..., None]) -> Callable[..., None]:
    def advance(updates: Updates, token_fields: TokenFields, rows: int, tokens: torch.Tensor | None = None) -> None:
        everybody = attrs.evolve(token_fields, idx_mapping=torch.zeros_like(token_fields.idx_mapping))
        original(updates, everybody, rows, tokens)

    return advance


def _all_verified(original: object) -> Callable[..., None]:
    """Verify as many rows as the fields have room for."""

    def verify(
        drafting: DraftPasses, num_reqs: int, num_tokens: int, most: int, *, is_synthetic: bool, has_decodes: bool
    ) -> None:
        verified = VerificationInputs(
            fields=drafting.token_fields[Role.TARGET],
            starts=drafting.target.fields["query_start_loc"],
            counts=drafting.target.fields[SAMPLED_COUNTS],
            answers=drafting.target.tokens,
            most=most,
        )
        drafting.updates.prepare_drafts(
            verified,
            drafting.token_fields[Role.DRAFT_PREFILL],
            drafting.prefill["last_token_indices"],
            drafting.token_fields[Role.DRAFT_DECODE] if has_decodes else None,
        )

    return verify


def _first_unverified(original: Callable[..., Verification]) -> Callable[..., Verification]:
    def settle(scheduled: ScheduledBatch, places: RequestStates, sampled: Array, *others: Array | None) -> Verification:
        counts = sampled_counts(scheduled, places)
        drafted, first = counts > 1, np.cumsum(counts) - counts
        rows, said = scheduled.state_indices[drafted], sampled.copy()
        said[first[drafted]] = places.tokens[rows, places.length[rows]]
        return original(scheduled, places, said, *others)

    return settle


PADDING_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="draft-decode-piecewise",
        threads=("vllm#39773",),
        bug_class=BugClass.G,
        says="Draft decodes are captured PIECEWISE, which pads tokens and not requests, so that a graph reads "
        "what stands past the batch's own requests",
        patch=patched((Runner, "__init__", _piecewise_drafts), (role_module, "refuse_unpadded_requests", nothing)),
    ),
    Mutant(
        name="requests-not-padded",
        threads=("vllm#39773",),
        bug_class=BugClass.D,
        says="A FULL graph's tokens are padded and its requests are not: lengths and block tables of padded "
        "rows are those of an earlier, larger batch",
        patch=filled(tail_left, ("seq_lens", "block_table")),
    ),
    Mutant(
        name="last-token-indices-stale",
        threads=("vllm#39773",),
        bug_class=BugClass.D,
        says="Behind the real requests of a draft prefill last_token_indices is not filled, and points past "
        "the tokens of a smaller batch",
        patch=filled(_tail_left_of_prefills, ("last_token_indices",)),
    ),
    Mutant(
        name="slot-mapping-stale",
        threads=("vllm#39773", "lmdeploy#4569"),
        bug_class=BugClass.D,
        says="Padded tokens keep the slots of an earlier, larger batch and write keys and values there",
        patch=filled(tail_left, ("slot_mapping",)),
    ),
    Mutant(
        name="idx-mapping-padded-with-zero",
        threads=("tokenspeed#700",),
        bug_class=BugClass.D,
        says="idx_mapping is padded with 0 instead of -1, so that padded rows are those of the first place",
        patch=filled(_zeroed, ("idx_mapping",)),
    ),
    Mutant(
        name="skip-clamped-to-zero",
        threads=("tokenspeed#700",),
        bug_class=BugClass.D,
        says="The -1 of a padded row is clamped to 0 where it is used, and the row writes a live request's draft state",
        patch=patched((updates_module, "_state_rows", _clamped)),
    ),
    Mutant(
        name="query-starts-fall-back",
        threads=("vllm#28579",),
        bug_class=BugClass.D,
        says="Padded rows of query_start_loc hold 0 instead of the real total, so that it falls at its end",
        patch=filled(_zeroed, ("query_start_loc",)),
    ),
    Mutant(
        name="large-small-large",
        threads=("vllm#39773",),
        bug_class=BugClass.D,
        says="Each step cleans up to its own graph's extents and takes the rest for clean: after a large and "
        "a small batch, a graph between them reads what the large one left",
        patch=patched((RoleRun, "stage_inputs", _within_the_entry)),
    ),
    Mutant(
        name="padded-rows-moved-on",
        threads=("vllm#39773",),
        bug_class=BugClass.D,
        says="A step moves positions and lengths of padded rows on too, so that they become real rows of the next",
        patch=patched((Updates, "advance", _all_moved)),
    ),
    Mutant(
        name="padded-rows-verified",
        threads=("vllm#39773",),
        bug_class=BugClass.D,
        says="Verification on the device counts all rows that its fields have room for, not those of the batch",
        patch=patched((DraftPasses, "verify", _all_verified)),
    ),
    Mutant(
        name="first-draft-unverified",
        threads=("ohdearquant/lattice#243",),
        bug_class=BugClass.B,
        says="Verification looks at each draft one row too late, so that the first one is kept unseen",
        patch=patched((serving_module, "settle", _first_unverified)),
    ),
)
