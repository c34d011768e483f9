"""Runners whose graphs hold what is no longer so, or too little room: baked state (F), capacity (E)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import Refresh, Role
from capture_planner.plugins.backend import Executor, LayerCache, Metadata, Reservation, RunnableBackend, Scoring
from capture_planner.plugins.registry import load_backends
from capture_planner.records.backend import Attention, PaddingContract, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from capture_planner_conformance.probe import Tables
from capture_planner_runner.execution.attention import RoleAttention
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.inputs import ForwardStep, StepInputs
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.execution.updates import TokenFields, Updates
from capture_planner_runner.graphs import recorded as pool_module
from capture_planner_runner.graphs.recorded import Block, Layout
from gallery.core import Mutant, with_field
from gallery.patching import GUARDS_OFF, patched


class Planning:
    """A healthy backend that plans on the host, as FlashInfer's wrappers do: the reference beneath it.

    Each ``prepare`` copies the step's lengths into a buffer of its own, and graphs read them there.
    """

    name = "planning"

    def __init__(self) -> None:
        beneath = load_backends()["reference"].backend
        assert isinstance(beneath, RunnableBackend), "the reference runs"
        self._beneath = beneath

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """As the reference."""
        return self._beneath.support(role, model, environment)

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """As the reference."""
        return self._beneath.padding(role, model, environment)

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """On the host: what it plans is copied from there."""
        return Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """As the reference."""
        return self._beneath.workspace(role, model, environment, entries, limits)

    def reserve(self, reservation: Reservation) -> Executor:
        """Reserve the reference, and a length for each row."""
        return _PlannedExecutor(self._beneath.reserve(reservation), torch.zeros_like(reservation.fields["seq_lens"]))


@attrs.frozen(eq=False)
class _PlannedExecutor:
    """The executor of one group."""

    beneath: Executor
    lengths: torch.Tensor

    def prepare(self, metadata: Metadata) -> None:
        """Plan: take the lengths over."""
        rows = metadata.num_reqs
        self.lengths[:rows] = torch.from_numpy(np.ascontiguousarray(metadata.host["seq_lens"][:rows])).to(
            self.lengths.device
        )
        self.beneath.prepare(metadata)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend to as many keys as were planned."""
        metadata = with_field(metadata, "seq_lens", self.lengths[: metadata.num_reqs])
        self.beneath.attend(layer, query, out, scoring, metadata)

    def layout(self) -> tuple[int, ...] | None:
        """None: no number of a plan is baked in."""
        return None

    def release(self) -> None:
        """Release the reference."""
        self.beneath.release()


# E: capacity.


def _one_long_request(original: Callable[[RoleRun, Entry], StepInputs]) -> Callable[[RoleRun, Entry], StepInputs]:
    """Capture any batch's graph with one request of all its tokens, whatever the model's longest is."""

    def warm_up_inputs(run: RoleRun, entry: Entry) -> StepInputs:
        if entry.query_len is not None:
            return original(run, entry)
        tokens = entry.num_tokens
        return StepInputs(
            input_ids=np.zeros(tokens, dtype=np.int32),
            positions=np.arange(tokens),
            slot_mapping=np.zeros(tokens, dtype=np.int64),
            query_start_loc=np.array([0, tokens], dtype=np.int32),
            seq_lens=np.array([tokens], dtype=np.int32),
            block_table=np.zeros((1, -(-tokens // run.page_size)), dtype=np.int32),
            idx_mapping=np.zeros(1, dtype=np.int32),
            cu_num_draft_tokens=np.zeros(1, dtype=np.int32),
            page_size=run.page_size,
        )

    return warm_up_inputs


def _unclamped(original: Callable[..., None]) -> Callable[..., None]:
    def advance(updates: Updates, token_fields: TokenFields, rows: int, tokens: torch.Tensor | None = None) -> None:
        original(updates, attrs.evolve(token_fields, max_model_len=1 << 30), rows, tokens)

    return advance


def _stored_side_by_side(original: Callable[..., None]) -> Callable[..., None]:
    def store(
        updates: Updates, cache: LayerCache, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        # Where pages lie apart this is a copy, and the cache stays as it is.
        rows = attrs.evolve(cache, keys=cache.keys.flatten(0, 1)[:, None], values=cache.values.flatten(0, 1)[:, None])
        original(updates, rows, slots, keys, values)

    return store


# F: baked state.


def _fresh_outputs(original: Callable[..., None]) -> Callable[..., None]:
    def per_token(body: TargetBody, extents: Extents, attend: Any) -> None:
        original(body, extents, attend)
        body.hidden = body.hidden.clone()

    return per_token


def _replaced_weights(original: Callable[[Tables, int], None]) -> Callable[[Tables, int], None]:
    def load(tables: Tables, seed: int) -> None:
        tables.by_token = torch.empty_like(tables.by_token)
        tables.by_position = torch.empty_like(tables.by_position)
        original(tables, seed)

    return load


def _planned_at_capture(original: Callable[..., None]) -> Callable[..., None]:
    def prepare(run: RoleRun, step: ForwardStep) -> None:
        if not step.is_full or step.entry not in run.graphs:
            original(run, step)

    return prepare


def _planned_once_a_chain(original: Callable[..., None]) -> Callable[..., None]:
    last: WeakKeyDictionary[RoleRun, StepInputs] = WeakKeyDictionary()

    def prepare(run: RoleRun, step: ForwardStep) -> None:
        # The later steps of a chain have the table of the first, and other positions.
        before, last[run] = last.get(run), step.inputs
        is_next = (
            before is not None
            and before.block_table is step.inputs.block_table
            and bool((step.inputs.positions > before.positions).any())
        )
        if run.role is not Role.DRAFT_DECODE or not is_next:
            original(run, step)

    return prepare


def _described_once(original: Callable[..., None]) -> Callable[..., None]:
    described: WeakKeyDictionary[RoleAttention, tuple[Entry | None, Extents, Extents]] = WeakKeyDictionary()

    def describe(attention: RoleAttention, step: ForwardStep) -> None:
        like = step.entry, step.real, step.extents
        if described.get(attention) != like:
            original(attention, step)
        described[attention] = like

    return describe


def _freed_early(original: Callable[..., Layout]) -> Callable[..., Layout]:
    def lay_out(blocks: Sequence[Block], chunks: Sequence[int] = ()) -> Layout:
        return original([attrs.evolve(b, last=max(b.first, b.last - 1)) for b in blocks], chunks)

    return lay_out


STATE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="captured-beyond-the-limits",
        threads=("vllm#40023",),
        bug_class=BugClass.E,
        says="Graphs of any batch are captured with one request of all their tokens, which is longer than the "
        "model, so that capture needs more room than any step",
        patch=patched((RoleRun, "warm_up_inputs", _one_long_request)),
    ),
    Mutant(
        name="drafts-past-the-model",
        threads=("vllm#48894", "vllm#32628"),
        bug_class=BugClass.E,
        says="Draft positions are not held at max_model_len, and go on past the last row of what is read by position",
        patch=patched((Updates, "advance", _unclamped)),
    ),
    Mutant(
        name="slots-side-by-side",
        threads=(),
        bug_class=BugClass.E,
        says="Keys and values are stored as if all slots were in a row, and of pages that lie apart a copy is written",
        patch=patched((Updates, "store", _stored_side_by_side)),
    ),
    Mutant(
        name="outputs-made-anew",
        threads=("vllm#37363",),
        bug_class=BugClass.F,
        says="The hidden states of a step are kept as a fresh tensor instead of being copied into the one that "
        "graphs know",
        patch=patched((TargetBody, "per_token", _fresh_outputs), GUARDS_OFF),
    ),
    Mutant(
        name="weights-replaced",
        threads=("vllm#53915",),
        bug_class=BugClass.F,
        says="Weights are reloaded into new tensors, without guards, and graphs go on with the old ones",
        patch=patched((Tables, "load", _replaced_weights), GUARDS_OFF),
    ),
    Mutant(
        name="planned-at-capture-alone",
        threads=("TRT-LLM#18769", "vllm#38311"),
        bug_class=BugClass.F,
        says="A backend that plans on the host is not asked to before a replay, which runs with the plan of "
        "the capture",
        patch=patched((RoleRun, "prepare_backends", _planned_at_capture), GUARDS_OFF),
        base=Planning,
    ),
    Mutant(
        name="planned-once-a-chain",
        threads=("TRT-LLM#18769",),
        bug_class=BugClass.F,
        says="A backend that plans on the host plans the first draft decode of a chain and none of the others",
        patch=patched((RoleRun, "prepare_backends", _planned_once_a_chain)),
        base=Planning,
    ),
    Mutant(
        name="metadata-of-the-step-before",
        threads=("vllm#38311",),
        bug_class=BugClass.F,
        says="Metadata is kept as long as extents are the same, even for other requests",
        patch=patched((RoleAttention, "_describe", _described_once)),
    ),
    Mutant(
        name="memory-freed-early",
        threads=("flashinfer#4399",),
        bug_class=BugClass.F,
        says="An intermediate gives up its place in the pool to the operator that reads it last",
        patch=patched((pool_module, "lay_out", _freed_early)),
    ),
)
