"""What the runner did for each forward: its dispatch, its replay, its rows, slots and states, its served drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import Reason, Role
from capture_planner.plugins.backend import NULL_SLOT, NULL_STATE
from capture_planner.records.batch import Batch
from capture_planner.records.fingerprint import Fingerprint
from capture_planner_conformance.failure import Check
from capture_planner_conformance.memory import bits
from capture_planner_conformance.watch import FieldValues, Key, Watch, WatchedGraphs
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.graphs.graph import Graph, GraphPool, Leftover
from support.reference import dispatch as cheapest
from support.runner_conformance.classification import check_classified
from support.runner_conformance.laws import RunnerCheck
from support.runner_conformance.served_drafts import Event, decodes_of, proposals_of, rows_of


@attrs.frozen(kw_only=True, eq=False)
class WatchedGraph:
    """A graph, and the role and the entry that it was captured for."""

    graph: Graph
    key: Key
    on_replay: Callable[[Key], None]

    @property
    def memory(self) -> int:
        return self.graph.memory

    @property
    def alone(self) -> int:
        return self.graph.alone

    @property
    def leftover(self) -> Leftover:
        return self.graph.leftover

    @property
    def pieces(self) -> int:
        return self.graph.pieces

    def dump(self, stem: Path) -> list[Path]:
        return self.graph.dump(stem)

    def fingerprint(self) -> Fingerprint | None:
        return self.graph.fingerprint()

    def replay(self) -> None:
        """Note it, and replay the graph."""
        self.on_replay(self.key)
        self.graph.replay()


class RunnerGraphs(WatchedGraphs):
    """Knows which graphs were replayed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.replays: list[Key] = []
        """Which graphs were replayed, in order."""

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> Graph:
        graph = super().capture(forward, pool)
        assert self.key is not None, "a forward attended"
        return WatchedGraph(graph=graph, key=self.key, on_replay=self._note)

    def _note(self, key: Key) -> None:
        if self.is_open:
            role, entry = key
            raise RunnerCheck.REPLAYED.violation(
                "the graph is replayed inside a capture session", role=role, entry=entry
            )
        self.replays.append(key)


class RunnerWatch(Watch):
    """Checks the runner around every forward, with everything that the suite checks of a backend."""

    graphs: RunnerGraphs

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.served: list[Event] = []
        """What was verified and proposed while requests were served with drafts, in order."""
        self._replayed = 0
        self._pools: list[list[torch.Tensor]] = []

    def check_fields(self, role: RoleRun, step: ForwardStep, values: FieldValues) -> None:
        self._check_classified(role, step)
        super().check_fields(role, step, values)
        self._check_placed(step, values)
        self._check_described(role, step, values)
        serving = self.serving()
        if serving is not None and self.runner.drafter is not None:
            events = decodes_of if role.role is Role.DRAFT_DECODE else rows_of
            self.served.extend(events(step, values, serving))
        self._replayed, self._pools = len(self.graphs.replays), self._copied()

    def check_after(self, role: RoleRun, step: ForwardStep) -> None:
        self._check_replayed(role, step, self.graphs.replays[self._replayed :])
        serving, state, speculative = self.serving(), self.runner.draft_state, self.runner.plan.speculative
        if serving is not None and state is not None and speculative is not None and role.role.is_drafter:
            self.served.extend(proposals_of(step, state.proposed, speculative, serving))
        declared = step.inputs.array("state_indices")
        self._check_pools(self._pools, {NULL_STATE, *(() if declared is None else declared.tolist())})

    def between(self, capture: Callable[[], None]) -> None:
        """Capture between two forwards: it may write null states too, and nothing of a request."""
        before = self._copied()

        def checked() -> None:
            capture()
            self._check_pools(before, {NULL_STATE})

        super().between(checked)

    def _check_classified(self, role: RoleRun, step: ForwardStep) -> None:
        """Compare a batch that the scheduler made with its requests: their prompts, and what is computed of them."""
        serving = self.serving()
        if serving is not None and role.role is not Role.DRAFT_DECODE:
            states = serving.scheduler.states
            # After a step that the host has not read, positions are as if all drafts were kept.
            computed = states.computed + states.ahead if role.role is Role.TARGET else None
            check_classified(step, serving.scheduler.unfinished, computed, self.runner.plan.speculative)

    def check_dispatch(self, batch: Batch, answer: Dispatch) -> None:
        expected = cheapest(self.runner.dispatcher.plan, batch)
        if answer.entry != expected:
            raise RunnerCheck.DISPATCHED.violation(
                f"the batch is dispatched to {answer.entry or 'no graph'}, and the cheapest compatible graph is "
                f"{expected or 'none'}"
            )
        if expected is None and answer.reason in (None, Reason.UNCOVERED):
            raise RunnerCheck.DISPATCHED.violation("the batch runs eager without a reason")
        if answer.reason is Reason.NOT_ADMISSIBLE and self.serving() is not None:
            raise RunnerCheck.CLASSIFIED.violation("the batch was scheduled, and counts as one that is not admissible")

    def _check_described(self, role: RoleRun, step: ForwardStep, values: FieldValues) -> None:
        """Check the extents that attention is told: of a FULL graph its entry's, else the real ones (vllm#36626)."""
        entry, reqs = step.entry if step.is_full else None, step.real.reqs
        starts, lengths = values["query_start_loc"][: reqs + 1], values["seq_lens"][:reqs]
        expected = {
            "num_reqs": reqs,
            "num_tokens": int(starts[-1]),
            "max_query_len": int(np.diff(starts).max()),
            "max_seq_len": int(lengths.max()),
        }
        if entry is not None:
            expected = {
                "num_reqs": entry.num_reqs or 0,
                "num_tokens": entry.num_tokens,
                "max_query_len": entry.tokens_each or entry.num_tokens,
                "max_seq_len": self.runner.plan.model.max_model_len,
            }
        for group, metadata in role.attention.metadata.items():
            told = {name: getattr(metadata, name) for name in expected}
            of_reqs = {len(fields["seq_lens"]) for fields in (metadata.fields, metadata.host)}
            if told != expected or of_reqs != {expected["num_reqs"]}:
                message = (
                    f"group {group} is told {told}, with lengths of {sorted(of_reqs)} requests; expected {expected}"
                )
                raise RunnerCheck.DESCRIBED.violation(message)

    def _check_placed(self, step: ForwardStep, values: FieldValues) -> None:
        """Compare slots with positions and pages, and pages with those that the scheduler assigned."""
        tokens, reqs = step.real.tokens, step.real.reqs
        names = ("query_start_loc", "block_table", "positions", "slot_mapping", "idx_mapping")
        starts, table, positions, slots, places = (values[name] for name in names)
        owner = np.searchsorted(starts[1 : reqs + 1], np.arange(tokens), side="right")
        page, offset = np.divmod(positions[:tokens], self.world.pages.page_size)
        expected = table[owner, page].astype(np.int64) * self.world.pages.page_size + offset
        wrong = (slots[:tokens] != expected) & (slots[:tokens] != NULL_SLOT)
        if wrong.any():
            token = int(wrong.argmax())
            raise RunnerCheck.PLACED.violation(
                f"token {token} at position {positions[token]} has slot {slots[token]}, and by its block table "
                f"slot {expected[token]}",
                field="slot_mapping",
            )
        last = starts[1 : reqs + 1] - 1
        wrong = (values["seq_lens"][:reqs] != positions[last] + 1) & (np.diff(starts[: reqs + 1]) > 0)
        if wrong.any():
            row = int(wrong.argmax())
            keys, position = values["seq_lens"][row], positions[last[row]]
            message = f"row {row} has {keys} keys, and its last token is at position {position}"
            raise RunnerCheck.PLACED.violation(message, field="seq_lens")
        serving = self.serving()
        if serving is None:
            return
        rows = values.get("state_indices")
        pool_row = serving.scheduler.states.pool_row[places[:reqs]]
        if rows is not None and (rows[:reqs] != pool_row).any():
            row = int((rows[:reqs] != pool_row).argmax())
            raise RunnerCheck.PLACED.violation(f"row {row} has the state of another request", field="state_indices")
        given = serving.scheduler.states.table
        for row in range(reqs):
            width = 1 + int(page[owner == row].max(initial=-1))
            if (table[row, :width] != given[places[row], :width]).any():
                raise RunnerCheck.PLACED.violation(f"row {row} has pages of another request", field="block_table")

    def _check_replayed(self, role: RoleRun, step: ForwardStep, replays: Sequence[Key]) -> None:
        """Check that the graph of the step's entry was replayed, as it was known at its capture, and no other."""
        expected = [] if step.entry is None else [(role.role, step.entry)]
        if list(replays) != expected:
            graphs = ", ".join(f"{of.value}: {entry}" for of, entry in replays) or "no graph"
            raise RunnerCheck.REPLAYED.violation(f"{graphs} is replayed for this batch")

    def _copied(self) -> list[list[torch.Tensor]]:
        return [[pool.states.clone() for pool in cache.states] for cache in self.world.caches]

    def _check_pools(self, before: Sequence[Sequence[torch.Tensor]], own: set[int]) -> None:
        """Check that no recurrent state changed but those that may."""
        for cache, pools in zip(self.world.caches, before, strict=True):
            for layer, (pool, then) in enumerate(zip(cache.states, pools, strict=True)):
                changed = (bits(pool.states) != bits(then)).flatten(1).any(dim=1).nonzero().flatten().tolist()
                if others := set(changed) - own:
                    raise Check.UNTOUCHED.violation(
                        f"row {min(others)} of the states of recurrent layer {layer} changed, and no request of the "
                        "batch is in it",
                        field="state_indices",
                    )
