"""Plans of plain deployments, to export."""

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records.backend import Support
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.spec import Limits, Spec
from capture_planner.testing import FakeBackend

MACHINE = Environment(
    name="h100",
    device=Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132),
)
MODEL = Model(name="tiny", num_layers=2, num_heads=4, num_kv_heads=4, head_dim=64, max_model_len=8192, vocab_size=100)
SCHEDULES = (
    ((1, 16, 2), (17, 256, 1)),
    ((1, 16, 5), (17, 64, 3), (65, 256, 1)),
    ((1, 16, 4), (17, 64, 2), (65, 256, 0)),
)


def made(schedule=(), reqs=256, tokens=4096, mode=GraphMode.FULL_AND_PIECEWISE, refresh=Refresh.IN_GRAPH, **options):
    """Return the plan of a plain spec on a backend that can do anything."""
    backend = FakeBackend(
        name="flash_attention",
        supports={role: Support(level=GraphSupport.ALWAYS, reason="anything") for role in Role},
        refreshes=refresh,
    )
    if schedule:
        longest = max(k for *_, k in schedule)
        options["speculative"] = Speculative(method=Method.EAGLE3, num_tokens=longest, schedule=schedule)
    spec = Spec(
        model=MODEL, limits=Limits(max_num_reqs=reqs, max_num_tokens=tokens), backend=backend.name, mode=mode, **options
    )
    registry = Registry([RegisteredBackend(backend=backend, distribution="fake", version="1")])
    return plan(spec, MACHINE, registry)
