"""The shapes whose profiles ship: real configurations, which plan on the GPU that they are measured on."""

import pytest
from profile_shapes import profiled_shapes

from capture_planner import load_backends, plan
from capture_planner.bench.passes import entry_of, plan_with, ranges_of
from capture_planner.codec.shipped import find_environment
from capture_planner.modes import GraphMode, Role

SHAPES = {shape.name: shape for shape in profiled_shapes("triton", 48)}
REGISTRY = load_backends()


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_planned_with_every_size_of_its_ranges(name: str) -> None:
    """Decodes up to 256 requests and mixed batches up to the ceiling, each as a graph of a plan of its own."""
    planned = plan(SHAPES[name].spec, find_environment("h200"), REGISTRY)
    searched = [each for each in ranges_of(planned, named=False) if each.search]
    assert {each.last for each in searched} == {256, 512}
    graphs = [(each.key[0], entry_of(each.key, size, 256)) for each in searched for size in each.seeds]
    small = plan_with(planned, REGISTRY, graphs)
    assert {(role.role, entry) for role in small.roles for entry in role.entries} == set(graphs)


def test_eager_passes_are_measured_above_the_ceiling() -> None:
    """At the ceiling, 1.5 times it and its doubles, up to the tokens that the limits admit."""
    planned = plan(SHAPES["qwen3-8b"].spec, find_environment("h200"), REGISTRY)
    (mixed,) = (r for r in ranges_of(planned, named=False) if r.key == (Role.TARGET, GraphMode.NONE, None, None))
    assert {512, 768, 1024, 2048, 4096, 8192} <= set(mixed.seeds)
    assert not mixed.search


def test_configurations_have_the_numbers_of_their_specs() -> None:
    """Transformers makes the model that is planned; fewer layers of the mixture of experts are in its name."""
    for shape in SHAPES.values():
        assert shape.spec.model.num_layers == shape.config["num_hidden_layers"]
        assert shape.spec.model.hidden_size == shape.config["hidden_size"]
    assert [SHAPES[name].spec.model.num_layers for name in SHAPES] == [28, 36, 48]
    assert profiled_shapes("triton", 12)[2].spec.model.name == "Qwen/Qwen3-30B-A3B 12 of 48 layers"
