"""A tiny deployment on recorded graphs, and a rig to measure it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from capture_planner import codec  # noqa: E402
from capture_planner.modes import GraphMode  # noqa: E402
from capture_planner.planning.planner import plan as make_plan  # noqa: E402
from capture_planner.plugins import registry  # noqa: E402
from capture_planner.records._base import replace  # noqa: E402
from capture_planner.records.model import Speculative  # noqa: E402
from capture_planner.records.plan import Plan  # noqa: E402
from capture_planner.records.spec import Limits, Policy, Sizes, Spec  # noqa: E402
from capture_planner_runner.bench.rig import QUICK, Rig  # noqa: E402
from capture_planner_runner.graphs.recorded import RecordedGraphs  # noqa: E402
from capture_planner_runner.launch.assembly import dtype_of  # noqa: E402
from capture_planner_runner.models.drafters import choose_drafter  # noqa: E402
from capture_planner_runner.models.huggingface import load_target  # noqa: E402
from capture_planner_runner.serving.states import PageFormat  # noqa: E402

PLANS = Path(__file__).parent.parent.parent / "plans"
MOST = 4


def planned(k: int, mode: GraphMode = GraphMode.FULL_DECODE_ONLY, backends: object = None) -> Plan:
    """Return a plan of a tiny model for 4 requests with k drafts."""
    shipped = codec.load_spec(PLANS / "specs" / "tiny-reference-cpu.yaml")
    assert shipped.speculative is not None
    drafts: Speculative | None = replace(shipped.speculative, num_tokens=k) if k else None
    spec: Spec = replace(
        shipped,
        model=replace(shipped.model, num_layers=1, max_model_len=96),
        limits=Limits(max_num_reqs=MOST, max_num_tokens=MOST * (1 + k) + 12),
        mode=mode,
        speculative=drafts,
        sizes=Sizes(policy=Policy.POWERS_OF_TWO),
    )
    environment = codec.load_environment(PLANS / "environments" / "cpu.yaml")
    return make_plan(spec, environment, backends or registry.load_backends())  # type: ignore[arg-type]


def rigged(plan: Plan, sizes: tuple[int, ...] = (1, MOST), *, backends: object = None) -> Rig:
    """Return a rig that measures it quickly."""
    model = load_target(None, plan.model, device=torch.device("cpu"), dtype=dtype_of(plan.model.dtype))
    drafter = None
    if plan.speculative is not None:
        drafter = choose_drafter("random", plan.speculative, model, num_states=MOST, length=128)
    return Rig(
        plan=plan,
        model=model,
        drafter=drafter,
        registry=backends or registry.load_backends(),  # type: ignore[arg-type]
        grapher=RecordedGraphs(),
        device=torch.device("cpu"),
        pages=PageFormat(page_size=8, num_pages=1 + MOST * 13),
        effort=QUICK,
        sizes=sizes,
    )


@contextmanager
def quiet(task: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show nothing."""
    yield lambda now: None
