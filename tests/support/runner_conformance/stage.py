"""Scenes of the runner: more features than a backend can see, and checks of what a backend is not asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import torch

from capture_planner.modes import Role
from capture_planner.records._base import record, replace
from capture_planner.records.model import Recurrent
from capture_planner.records.spec import Spec
from capture_planner_conformance.failure import Check
from capture_planner_conformance.probe import LayerShape, Rows, Tables
from capture_planner_conformance.scene import FEATURES, VOCABULARY, DraftScheme, Feature, Scene
from capture_planner_conformance.scene_batch import SceneBatch
from capture_planner_conformance.stage import Stage
from capture_planner_conformance.steps import beyond
from capture_planner_conformance.world import ModelCache, World
from capture_planner_runner.options import Options
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.runner_conformance.batch import RunnerBatch
from support.runner_conformance.laws import RunnerCheck
from support.runner_conformance.models import RECURRENT, CoupledRows, RecurrentTables, RunnerWorld
from support.runner_conformance.served_drafts import check_counted_drafts, check_served_drafts
from support.runner_conformance.watch import RunnerGraphs, RunnerWatch

RUNNER_FEATURES: Mapping[str, Feature] = {
    **FEATURES,
    "recurrent": Feature("recurrent layers", (False, False, True)),
    "coupled": Feature("coupled rows", (False, False, True)),
    "compiled": Feature("compiled models", (False, False, True)),
}


@record
class RunnerScene(Scene):
    """A scene whose model can be more than attention."""

    features: ClassVar[Mapping[str, Feature]] = RUNNER_FEATURES

    recurrent: bool = False
    """Whether a layer of the target has a state per request, and no KV cache."""
    compiled: bool = False
    """Whether models are compiled. On a CPU what was traced is called; on a GPU it would take longer than all else."""
    coupled: bool = False
    """Whether the rows of a batch depend on each other, at the end of each model."""

    def spec(self, backend: str) -> Spec:
        plain = super().spec(backend)
        if not self.recurrent:
            return plain
        width = self.shape.heads * self.shape.head_dim
        # States are of float32 at least.
        recurrent = Recurrent(layers=RECURRENT, state=width * (8 if self.shape.dtype == "float64" else 4))
        layers, hidden_size = plain.model.num_layers + RECURRENT, plain.model.hidden_size
        assert hidden_size is not None, "a scene has one"
        model = replace(
            plain.model, num_layers=layers, hidden_size=hidden_size + RECURRENT * width, recurrent=recurrent
        )
        return replace(plain, model=model)


class RunnerStage(Stage):
    """A scene of the runner, with its checks."""

    scene_type = RunnerScene
    graphs_type = RunnerGraphs
    watch_type = RunnerWatch
    batch_type = RunnerBatch

    scene: RunnerScene
    watch: RunnerWatch

    def options(self) -> Options:
        compiled = self.scene.compiled and self.subject.device.type == "cpu"
        return attrs.evolve(super().options(), compile=compiled)

    def tables(self, role: Role, shape: LayerShape, seed: int) -> Tables:
        if role.is_drafter or not self.scene.recurrent:
            return super().tables(role, shape, seed)
        dtype = getattr(torch, self.scene.shape.dtype)
        return RecurrentTables(shape, VOCABULARY, self.scene.shape.longest, dtype, self.subject.device, seed)

    def rows(self, role: Role, padding: float | None) -> Rows:
        # Of modules, rows whose tokens are yet to be drafted read what comes next in the batch, padding included.
        reads_padding = role.is_drafter and self.scene.drafter is DraftScheme.MODULES
        is_coupled = self.scene.coupled and not reads_padding
        return CoupledRows(padding=padding) if is_coupled else super().rows(role, padding)

    def make_world(self, caches: Sequence[ModelCache], pages: PageFormat, spared: Sequence[str]) -> World:
        pool_rows = self.plan.states.rows if self.plan.states else 1 + self.scene.num_reqs
        return RunnerWorld(caches, pages, self.scene, pool_rows, spared)

    def check_ran(self, batch: SceneBatch) -> None:
        """Check that the rows of the batch in the pools hold the states that a next step can go on from."""
        cache = self.world.caches[0]
        if not cache.states:
            return
        assert isinstance(cache.tables, RecurrentTables), "of a model with states"
        for index, live, where, ids in batch.each():
            states, row = cache.tables.states(self.on_device(ids)), batch.pool_row(live)
            for layer, pool in enumerate(cache.states):
                held, count = pool.states[row], min(where.stop - where.start, pool.positions)
                last = torch.arange(len(ids) - count, len(ids), device=held.device)
                want = states[last, layer]
                off = (held[last % pool.positions].double() - want).norm(dim=1)
                wrong = beyond(off, want.norm(dim=1), self.tolerance)
                if bool(wrong.any()):
                    raise Check.STORED.violation(
                        f"row {row} of the states of recurrent layer {layer} does not hold the state of request "
                        f"{index} in the batch after its position {int(last[wrong][0])}",
                        field="state_indices",
                    )

    def begin_serving(self) -> None:
        self._recorded, self._ran = len(self.runner.session.forwards), Counter(self.watch.ran)
        self._noted, self._counted = len(self.watch.served), len(self.runner.session.steps)

    def check_served(self, requests: Sequence[Request], tokens: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the session has all forwards, and what was done with drafts."""
        self._check_counted()
        whole = {request.name: (*request.prompt, *tokens[request.name]) for request in requests}
        events, steps = self.watch.served[self._noted :], self.runner.session.steps[self._counted :]
        check_served_drafts(self.scene.drafter, events, whole, self.scene.shape.longest)
        check_counted_drafts(steps, events, whole, self.scene.drafts)

    def _check_counted(self) -> None:
        """Compare the forwards of the session since serving began with those that ran, by role and mode."""
        counts: Counter[str] = Counter()
        for forward in self.runner.session.forwards[self._recorded :]:
            counts[f"{forward.role.value} {forward.mode.value}"] += forward.repeats
            if forward.entry is None and forward.reason is None:
                raise RunnerCheck.COUNTED.violation(
                    "the session has an eager forward without a reason", role=forward.role
                )
        ran = self.watch.ran - self._ran
        for kind in sorted({*ran, *counts}):
            if counts[kind] != ran[kind]:
                raise RunnerCheck.COUNTED.violation(f"{kind} ran {ran[kind]} times, and the session has {counts[kind]}")
