"""Comparing with eager forwards: a recurrent state moves on once a step, although two forwards run."""

import pytest
import torch

from capture_planner.errors import DifferenceError
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner_conformance.probe import LayerShape, ProbeDrafter, ProbeTarget, Rows, Tables
from capture_planner_conformance.scene import VOCABULARY, DraftScheme, Shape
from capture_planner_runner.execution.attention import RecurrentLayers
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.eager_faults import COMPARE
from support.runner_conformance import RunnerScene
from support.runner_conformance.models import RecurrentTables
from support.runs import CPU

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
REQUESTS = [
    Request(name=f"r{number}", arrival=number * 0.01, prompt=tuple(range(3, 3 + length)), max_new_tokens=7)
    for number, length in enumerate((2, 5, 9))
]


def served(drafts, options):
    """Serve with a probe, one of whose layers is recurrent; return the tokens, and how many forwards were compared."""
    scene = RunnerScene(shape=SHAPE, recurrent=True, drafts=drafts)
    plan = make_plan(scene.spec("reference"), CPU, registry.load_backends())
    device = torch.device("cpu")

    def tables(seed, recurrent=0):
        shape = LayerShape(heads=2, kv_heads=1, head_dim=4, windows=(None,))
        return (RecurrentTables if recurrent else Tables)(shape, VOCABULARY, SHAPE.longest, torch.float64, device, seed)

    target = ProbeTarget(tables(0, 1), Rows(), VOCABULARY, SHAPE.longest, 1)
    drafter = ProbeDrafter(tables(2), Rows(), target, DraftScheme.EAGLE, 3) if drafts else None
    pages = PageFormat(page_size=SHAPE.page_size, num_pages=40)
    grapher = RecordedGraphs()
    with Runner(plan, target, drafter, registry.load_backends(), grapher, pages=pages, options=options) as runner:
        runner.capture()
        tokens = {done.name: done.tokens for done in runner.serve(REQUESTS)}
        log = runner.comparison
        return tokens, 0 if log is None else sum(log.report().compared.values())


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_compared_run_has_the_tokens_of_one_that_is_not(drafts):
    """The eager forward's state is taken back before the graph runs."""
    tokens, compared = served(drafts, COMPARE)
    assert compared
    assert tokens == served(drafts, Options())[0]


def test_a_state_that_is_not_taken_back_is_a_difference(monkeypatch):
    monkeypatch.setattr(RecurrentLayers, "persistent", lambda layers: iter(()))
    with pytest.raises(DifferenceError):
        served(0, COMPARE)
