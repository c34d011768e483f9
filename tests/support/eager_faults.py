"""Deployments with one fault, and the difference from eager that the check names for it."""

import math

import pytest
import torch

from capture_planner.errors import DifferenceError
from capture_planner.modes import GraphMode
from capture_planner.plugins import registry
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records.spec import Policy, Sizes
from capture_planner_reference import Reference
from capture_planner_runner.numerics.eager_check import EagerCheck
from capture_planner_runner.options import Options
from support.worlds import requests_of, serve, spec_of, world_of

COMPARE = Options(compare=True)
SIZES = Sizes(policy=Policy.EXPLICIT, num_tokens=(5, 16), num_reqs=(3, 4))
"""Graphs that pad tokens and requests."""


class FaultyReference(Reference):
    """The reference backend; ``spoil`` is called after each attention inside a graph, and may change it.

    ``metadata`` returns what attention inside a graph is given instead of its metadata.
    """

    name = "probe"

    def __init__(self, spoil=lambda layer, out, metadata: None, metadata=lambda layer, given: given):
        self.spoil, self.given = spoil, metadata

    @hookimpl
    def capture_planner_backends(self):
        """A plugin that brings itself."""
        return (self,)

    def reserve(self, reservation):
        """Wrap the executor's attention."""
        executor = super().reserve(reservation)
        attend = executor.attend

        def spoiled(layer, query, out, scoring, metadata):
            inside = metadata.is_full and not reservation.role.is_drafter
            attend(layer, query, out, scoring, self.given(layer, metadata) if inside else metadata)
            if inside:
                self.spoil(layer, out, metadata)

        executor.attend = spoiled  # type: ignore[method-assign]
        return executor


def world(backend=None, k=0, mode=GraphMode.FULL_AND_PIECEWISE, **changes):
    """Two layers and four places, with graphs that pad; a backend of the test's, or the reference."""
    name, plugins = ("reference", ()) if backend is None else ("probe", (backend,))
    spec = spec_of(k=k, num_reqs=4, layers=2, mode=mode, sizes=SIZES, backend=name, **changes)
    return world_of(spec, registry=registry.load_backends(*plugins))


def difference_of(made, plant=lambda runner: None, armed=lambda runner: None, **options):
    """Serve with a fault that is planted before capture or armed after it, and return the difference.

    Whatever is found must be the first of all that differs, as found by brute force.
    """
    comparisons = []
    inner = EagerCheck._compare_tensors

    def record(role, forward, graph, eager, *rest):
        comparisons.append((graph, eager))
        inner(role, forward, graph, eager, *rest)

    with pytest.MonkeyPatch.context() as patch, made.runner(options=Options(compare=True, **options)) as runner:
        patch.setattr(EagerCheck, "_compare_tensors", record)
        plant(runner)
        runner.capture()
        armed(runner)
        with pytest.raises(DifferenceError) as caught:
            serve(runner, requests_of(made, 1))
        diff = caught.value.difference
        assert diff is runner.comparison.report().difference
        assert diff.step == len(runner.session.steps)
    assert str(diff) == str(caught.value)
    assert diff.requests
    assert len(diff.requests) == diff.num_reqs
    assert diff.num_tokens + diff.padded_tokens == diff.entry.num_tokens
    if not diff.tensor.startswith("field ") and not (diff.tensor.endswith("cache") and diff.eager is None):
        assert first_differing_tensor(*comparisons[-1]) == (diff.layer, diff.tensor)
    return diff


ORDER = ("queries", "keys", "values", "key cache", "value cache", "attention", "aux", "hidden", "tokens")


def first_differing_tensor(graph, eager):
    """Every tensor that differs, number by number, and the first of them in the order of computation."""
    wrong = []
    for key, expected in eager.items():
        actual = graph[key]
        if key.name == "tokens":
            expected = expected.argmax(-1)
        if key.name.endswith("cache"):
            # A row of the null slot is anybody's; no real row of these batches writes it.
            assert len(actual) == len(expected)
        if not torch.allclose(actual.double(), expected.double(), rtol=1e-7, atol=1e-9):
            name = ORDER.index(key.name) if key.name in ORDER else len(ORDER)
            wrong.append((key.step, math.inf if key.layer is None else key.layer, name, key))
    key = min(wrong, key=lambda item: item[:3])[3]
    return key.layer, key.name
