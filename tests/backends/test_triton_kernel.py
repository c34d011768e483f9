"""The Triton kernels, under Triton's interpreter, against a loop over tokens and heads."""

import importlib.util
import math
from contextlib import contextmanager
from pathlib import Path

import attrs
import capture_planner_triton
import pytest
import torch
from capture_planner_triton import Triton, geometry
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.entry import Entry
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import BackendError, RunError
from capture_planner.model import DataType, Latent
from capture_planner.modes import GraphMode, Role
from capture_planner.runtime.contract import LayerCache
from capture_planner.spec import Limits

triton = pytest.importorskip("triton", reason="the Triton kernels need triton, which is not installed")
tl = triton.language
InterpretedFunction = importlib.import_module("triton.runtime.interpreter").InterpretedFunction


def load(name, path):
    """Run a file as a module of its own, so that nobody who imported it before or after matters."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXECUTOR = Path(capture_planner_triton.__file__).with_name("executor.py")
laws = load("reference_laws", Path(__file__).with_name("test_reference_executor.py"))
KINDS = {torch.float32: DataType.FLOAT32, torch.float16: DataType.FLOAT16}
"""The interpreter multiplies bfloat16 as if it were integers: tests/gpu has that."""
FEWER = settings(max_examples=max(settings.default.max_examples // 3, 5))


@pytest.fixture(scope="module")
def interpreted():
    """The module, interpreted: Triton looks at the variable where a kernel is defined, not later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield load("interpreted_executor", EXECUTOR)


@pytest.fixture(scope="module")
def compiled():
    """The module as it is on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return load("compiled_executor", EXECUTOR)


@attrs.frozen(kw_only=True)
class Cut:
    """How a step is cut: so small that a handful of keys is many tiles, and a few tokens many blocks."""

    keys: int
    rows: int
    multiprocessors: int


CUTS = st.builds(
    Cut,
    keys=st.sampled_from([4, 16]),
    rows=st.sampled_from([2, 8]),
    multiprocessors=st.sampled_from([1, 4, 64]),
)


def cases(*dtypes):
    """Batches like those of the reference backend, in the dtypes that the interpreter takes."""
    return laws.cases(st.sampled_from(dtypes or list(KINDS))).map(
        lambda case: attrs.evolve(
            case,
            attention=attrs.evolve(case.attention, dtype=KINDS[case.dtype], kv_dtype=KINDS[case.dtype]),
        )
    )


@contextmanager
def interpreting():
    """Interpret Triton's own functions, too: it compiled them when it was imported, without the variable."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cdiv", "max", "sum", "zeros"):
            function = getattr(tl, name)
            if isinstance(function, triton.runtime.JITFunction):
                patch.setattr(tl, name, InterpretedFunction(function.fn))
        yield


@contextmanager
def cutting(cut):
    """Replace the sizes of tiles, which are made for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "_keys", lambda width, itemsize: (cut.keys, 1))
        patch.setattr(geometry, "MIN_TILE", 2)
        patch.setattr(geometry, "MAX_ROWS", cut.rows)
        yield


def strided(tensor, *order):
    """The same values, laid out in another order of axes and with a gap after each."""
    shape = [tensor.shape[axis] + 1 for axis in order]
    wide = torch.full(shape, math.nan, dtype=tensor.dtype).permute(*torch.tensor(order).argsort().tolist())
    view = wide[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


class Rig(laws.Rig):
    """A case in memory, with a workspace of what the plan says, full of NaN."""

    def __init__(self, module, case, cut, garbage=0, far=False):
        super().__init__(case, garbage)
        self.module, self.cut, self.far = module, cut, far
        gpu = Device(
            kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=cut.multiprocessors
        )
        environment = Environment(name="e", device=gpu, packages={"triton": "3.6.0"})
        limits = Limits(max_num_reqs=case.num_reqs, max_num_tokens=case.num_tokens)
        with cutting(cut):
            need = Triton().workspace(Role.TARGET, case.attention, environment, (self.entry,), limits)
        caches = self.caches
        if far:
            self.query = strided(self.query, 1, 0, 2)
            caches = {
                layer: LayerCache(keys=strided(cache.keys, 0, 2, 1, 3), values=strided(cache.values, 2, 0, 3, 1))
                for layer, cache in caches.items()
            }
        self.reservation = attrs.evolve(
            self.reservation,
            environment=environment,
            caches=caches,
            workspace=torch.full((need.device,), 255, dtype=torch.uint8),
        )

    def run(self, metadata):
        """Reserve, prepare and attend; the output starts as NaN."""
        with cutting(self.cut), interpreting():
            runs = self.module.TritonExecutor(self.reservation)
            runs.prepare(metadata)
            query = self.query[: metadata.num_tokens]
            out = torch.full(query.shape, math.nan, dtype=query.dtype)
            if self.far:
                out = strided(out, 1, 0, 2)
            runs.attend(laws.LAYER, query, out, self.scoring, metadata)
        return out


@given(cases(), CUTS, st.booleans())
def test_every_way_equals_a_loop_over_tokens(interpreted, case, cut, far):
    """In a graph, between its pieces and in an eager step; rows of padding are zeros."""
    rig = Rig(interpreted, case, cut, far=far)
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=case.num_tokens)
    padded, eager = rig.run(rig.padded), rig.run(rig.unpadded())
    between = rig.run(attrs.evolve(rig.unpadded(piecewise), num_tokens=case.num_tokens))
    expected = rig.expected()
    for out in (padded, eager, between):
        laws.assert_close(case, out[: case.real], expected)
        assert not out[case.real :].any()
