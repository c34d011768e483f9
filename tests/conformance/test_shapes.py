"""Which shapes and features a backend is tested with: its own refusals count, and other errors are for the search."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import BackendError, CaptureError, GuardError, RunError
from capture_planner.modes import GraphSupport, Role
from capture_planner.plugins.backend import KernelSizes
from capture_planner.records.backend import Support
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner_conformance import Shape, shapes, under_test
from capture_planner_conformance.scene import FEATURES
from capture_planner_conformance.shapes import CANDIDATES, KERNELS, SMALL, RefusedShape, usable_features, usable_shapes
from capture_planner_reference import Reference
from capture_planner_reference.executor import ReferenceExecutor
from support.runner_conformance import RunnerScene

pytestmark = pytest.mark.usefixtures("one_thread")

CHOICES = (*SMALL, *KERNELS)
SUBJECT = under_test("reference")


def backend_of(reserve: Any = None, support: Any = None) -> Any:
    """Return the reference with another ``reserve`` or ``support``."""
    own = {name: method for name, method in (("reserve", reserve), ("support", support)) if method is not None}
    return type("Other", (Reference,), {"name": "other", **own})()


def test_shapes_of_libraries_are_what_kernels_are_compiled_for() -> None:
    """Powers of two; several queries a key, and requests of several pages, some so long that a kernel splits them."""
    for shape in KERNELS:
        sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.page_size)
        assert all(size.bit_count() == 1 for size in sizes)
        assert shape.heads // shape.kv_heads in (2, 4)
        assert (shape.head_dim, shape.kv_heads, shape.longest % 16) == (64, 2, 0)
        assert shape.longest > 2 * shape.page_size
    assert {shape.page_size for shape in KERNELS} == {16, 64}
    assert {shape.dtype for shape in KERNELS} == {"bfloat16", "float16", "float32"}
    assert {shape.windowed for shape in KERNELS} == {True, False}
    assert [shape for shape in KERNELS if shape.longest > 1024] == [KERNELS[-1]]
    assert KERNELS[-1].longest == 1024 + 16
    assert {shape.longest for shape in KERNELS[:-1]} == {160}
    changed = [
        [name for name, value in attrs.asdict(shape).items() if value != getattr(KERNELS[0], name)] for shape in KERNELS
    ]
    assert changed == [[], ["dtype"], ["page_size"], ["dtype"], ["heads"], ["windowed"], ["longest"]]


def test_small_shapes_differ_in_everything() -> None:
    """Pages of one to four tokens, partly filled ones too; with and without shared keys; the last one is long."""
    assert [shape.page_size for shape in SMALL] == [4, 3, 1, 4, 2]
    assert [shape.heads // shape.kv_heads for shape in SMALL] == [2, 1, 2, 2, 2]
    assert all(shape.heads % shape.kv_heads == 0 and shape.head_dim == 4 for shape in SMALL)
    assert [shape.longest % shape.page_size for shape in SMALL] == [0, 2, 0, 0, 0]
    assert [shape.windowed for shape in SMALL] == [False, False, True, True, False]
    assert all(shape.longest <= 24 for shape in SMALL[:-1])
    assert all(shape.longest // shape.page_size >= 4 for shape in SMALL)
    assert SMALL[-1].longest > 2 * 64
    assert 4 * math.ceil(SMALL[-1].longest / SMALL[-1].page_size) > 256
    assert CANDIDATES == (SMALL, KERNELS)


@given(
    refused=st.dictionaries(st.sampled_from(CHOICES), st.sampled_from(("no kernel", "too small"))),
    wanted=st.lists(st.sampled_from(CHOICES), unique=True, max_size=3),
)
def test_shapes_that_a_backend_runs(refused: dict[Shape, str], wanted: list[Shape]) -> None:
    """Those that are wanted, or the first candidates of which it runs any; an error with each reason, if none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_refusal", lambda subject, shape: refused.get(shape))
        tested = SUBJECT
        tries = [wanted] if wanted else [SMALL, KERNELS]
        first = next((number for number, each in enumerate(tries) if any(shape not in refused for shape in each)), None)
        seen = [shape for each in tries[: None if first is None else first + 1] for shape in each]
        if first is None:
            with pytest.raises(RunError) as raised:
                usable_shapes(tested, wanted)
            reasons = "; ".join(dict.fromkeys(refused[shape] for shape in seen))
            assert (
                f"the backend 'reference' runs no shape on this machine that it could be tested with: {reasons};"
                in (str(raised.value))
            )
        else:
            usable, others = usable_shapes(tested, wanted)
            assert usable == tuple(shape for shape in tries[first] if shape not in refused)
            assert others == tuple(RefusedShape(shape, refused[shape]) for shape in seen if shape in refused)


@pytest.mark.parametrize(
    ("error", "reason"), [(BackendError("no pages of 4"), "no pages of 4"), (KeyError("pages"), None), (None, None)]
)
def test_shape_is_refused_by_an_error_of_the_backend_alone(error: Exception | None, reason: str | None) -> None:
    """Any other is a bug, and the shape is used."""

    def reserve(self: Any, reservation: Any) -> ReferenceExecutor:
        if error is not None:
            raise error
        return ReferenceExecutor(reservation)

    found = shapes._refusal(under_test(backend_of(reserve)), SMALL[0])
    assert found is None if reason is None else reason in str(found)


def test_shape_is_refused_where_no_graph_supports_it() -> None:
    """With the reason that the backend declares; and float64 on a GPU shows nothing more than float32."""

    def support(self: Any, role: Role, attention: Any, environment: Environment) -> Support:
        level = GraphSupport.NEVER if attention.head_dim == 4 else GraphSupport.ALWAYS
        return Support(level=level, reason=f"{role.value}, {attention.num_layers} layer, heads of {attention.head_dim}")

    tested = under_test(backend_of(support=support))
    assert shapes._refusal(tested, SMALL[0]) == "target, 1 layer, heads of 4"
    gpu = Device(kind=DeviceKind.CUDA, name="gpu", capability="9.0", memory=1 << 40, multiprocessors=132)
    machine = Environment(name="gpu", device=gpu)
    on_gpu = attrs.evolve(under_test("reference"), environment=machine)
    refusals = [shapes._refusal(on_gpu, attrs.evolve(SMALL[0], dtype=dtype)) for dtype in ("float64", "float32")]
    assert refusals == ["float64 on a GPU shows nothing that float32 does not", None]


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        (BackendError("no such scores"), True),
        (RunError("no such scores"), True),
        (CaptureError("no such scores"), False),
        (GuardError("no such scores"), False),
        (ValueError("no such scores"), False),
    ],
)
@pytest.mark.parametrize("in_graph", [True, False])
def test_feature_is_refused_by_an_error_of_the_backend_alone(error: Exception, refuses: bool, in_graph: bool) -> None:
    """Whether it is raised by a capture or by the decode; features that were not asked for are not tried."""

    class Refusing(ReferenceExecutor):
        def prepare(self, metadata: Any) -> None:
            super().prepare(metadata)
            if not metadata.for_capture and not in_graph:
                raise error

        def attend(self, layer: int, query: Any, out: Any, scoring: Any, metadata: Any) -> None:
            if in_graph:
                raise error
            super().attend(layer, query, out, scoring, metadata)

    tested = under_test(backend_of(lambda self, reservation: Refusing(reservation)))
    wanted = ("loras", "sinks", "sharp")
    usable, refused = usable_features(tested, SMALL[0], wanted)
    if refuses:
        assert usable == ("loras",)
        assert [(each.name, each.reason) for each in refused] == [
            (FEATURES[name].name, str(error)) for name in FEATURES if name in ("sinks", "sharp")
        ]
    else:
        assert (set(usable), refused) == (set(wanted), ())


def test_feature_is_refused_where_no_graph_supports_it() -> None:
    """With the reason that the backend declares, and without a forward of it: it may run without the feature."""

    def support(self: Any, role: Role, attention: Any, environment: Environment) -> Support:
        level = GraphSupport.NEVER if attention.sinks else GraphSupport.ALWAYS
        return Support(level=level, reason="no sinks" if attention.sinks else "always")

    usable, refused = usable_features(under_test(backend_of(support=support)), SMALL[0], ("softcap", "sinks"))
    assert usable == ("softcap",)
    assert [(each.name, each.reason) for each in refused] == [(FEATURES["sinks"].name, "no sinks")]


def test_scenes_of_a_feature_have_it() -> None:
    """A feature is tried with the last of its values, which is never the one without it."""
    assert all(feature.values[-1] != feature.values[0] for feature in RunnerScene.features.values())


@given(st.lists(st.integers(1, 2000), max_size=3), st.sampled_from(CANDIDATES))
def test_shapes_reach_past_the_keys_at_which_kernels_change(sizes: list[int], candidates: tuple[Shape, ...]) -> None:
    """By one more shape, where none of the others does; without a declaration they are as they were."""
    declaring: Any = type("Declaring", (), {"kernel_sizes": KernelSizes(num_keys=tuple(sizes))})()
    found = shapes._longer(candidates, declaring)
    assert found[: len(candidates)] == candidates
    assert max(shape.longest for shape in found) > max(sizes, default=0) + 1
    assert len(found) <= len(candidates) + (max(sizes, default=0) + 8 > max(shape.longest for shape in candidates))
    assert KernelSizes.of(object()) == KernelSizes()
    assert KernelSizes.of(declaring).num_keys == tuple(sizes)
