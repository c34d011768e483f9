"""The Triton kernels, under Triton's interpreter, against a loop over tokens and heads."""

import importlib.util
import math
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


def load(name, path):
    """Run a file as a module of its own, so that nobody who imported it before or after matters."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXECUTOR = Path(capture_planner_triton.__file__).with_name("executor.py")
laws = load("reference_laws", Path(__file__).with_name("test_reference_executor.py"))
KINDS = {
    torch.float32: DataType.FLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}
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


def cases(dtypes=KINDS):
    """Batches like those of the reference backend, in the dtypes that the kernel takes."""
    return laws.cases(st.sampled_from(list(dtypes))).map(
        lambda case: attrs.evolve(
            case,
            attention=attrs.evolve(case.attention, dtype=KINDS[case.dtype], kv_dtype=KINDS[case.dtype]),
        )
    )


class Rig(laws.Rig):
    """A case in memory, with a workspace of what the plan says, full of NaN."""

    def __init__(self, module, case, cut, garbage=0):
        super().__init__(case, garbage)
        self.module, self.cut = module, cut
        gpu = Device(
            kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=cut.multiprocessors
        )
        environment = Environment(name="e", device=gpu, packages={"triton": "3.6.0"})
        limits = Limits(max_num_reqs=case.num_reqs, max_num_tokens=case.num_tokens)
        with self.cutting():
            need = Triton().workspace(Role.TARGET, case.attention, environment, (self.entry,), limits)
        workspace = torch.full((need.device,), 255, dtype=torch.uint8)
        self.reservation = attrs.evolve(self.reservation, environment=environment, workspace=workspace)

    def cutting(self):
        """Replace the sizes of tiles, which are made for a GPU."""
        patch = pytest.MonkeyPatch()
        patch.setattr(geometry, "_keys", lambda width, itemsize: (self.cut.keys, 1))
        patch.setattr(geometry, "MIN_TILE", 2)
        patch.setattr(geometry, "MAX_ROWS", self.cut.rows)
        context = pytest.MonkeyPatch.context()
        del context
        return _Undone(patch)

    def run(self, metadata):
        """Reserve, prepare and attend; the output starts as NaN."""
        with self.cutting():
            runs = self.module.TritonExecutor(self.reservation)
            runs.prepare(metadata)
            query = self.query[: metadata.num_tokens]
            out = torch.full_like(query, math.nan)
            runs.attend(laws.LAYER, query, out, self.scoring, metadata)
        return out
