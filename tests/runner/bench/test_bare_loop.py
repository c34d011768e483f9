"""The bare capture loop, on stand-ins for what only a GPU has: a piece begins and ends where it should."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from capture_planner.errors import RunError  # noqa: E402
from capture_planner.modes import GraphMode, Reason  # noqa: E402
from capture_planner.records.batch import Kind  # noqa: E402
from capture_planner.records.plan import Waiver  # noqa: E402
from capture_planner_runner.bench import capturing  # noqa: E402
from capture_planner_runner.bench.capturing import BareGraphs, capture, refuse_dropped  # noqa: E402
from capture_planner_runner.ledger.rows import GraphCapture  # noqa: E402
from support.tiny import planned, rigged  # noqa: E402


@attrs.define(eq=False, slots=False)
class Device:
    """Stands for ``torch.cuda``: notes what is captured, and has 100 bytes for each open pool."""

    log: list[str] = attrs.Factory(list)
    pools: int = 0

    CUDAGraph = object

    def graph_pool_handle(self) -> tuple[int, int]:
        """Return a new pool."""
        self.pools += 1
        return (0, self.pools)

    def current_stream(self) -> str:
        """Return the one stream."""
        return "stream"

    def synchronize(self) -> None:
        """Note it."""
        self.log.append("wait")

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return a segment of each pool, and one of none."""
        owners = [(0, number) for number in range(self.pools + 1)]
        return [{"segment_pool_id": owner, "total_size": 100} for owner in owners]

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Any:
        assert stream == "stream"
        self.log.append("begin")
        yield
        self.log.append("end")


@given(st.lists(st.sampled_from(["op", "split"]), max_size=12))
def test_bare_capture_runs_attention_between_pieces(forward: list[str]) -> None:
    """Every operator is inside a piece, every split outside, and there is one piece more than splits."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing.torch, "cuda", device)
        grapher = BareGraphs()

        def run() -> None:
            for what in forward:
                if what == "op":
                    device.log.append("op")
                else:
                    grapher.split(lambda: device.log.append("between"), (), ())

        graph = grapher.capture(run, grapher.pool())
    open_ = False
    for what in device.log:
        if what in ("begin", "end"):
            assert open_ == (what == "end")
            open_ = what == "begin"
        else:
            assert open_ == (what == "op")
    assert not open_
    assert len(graph.parts) == device.log.count("begin") == 1 + forward.count("split")


def test_bare_loop_captures_the_plan_in_the_same_order() -> None:
    """A piece for each FULL graph, one more than its layers for each PIECEWISE one; one shared pool."""
    plan = planned(2, GraphMode.FULL_AND_PIECEWISE)
    rig = rigged(plan)
    device = Device()
    named: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing.torch, "cuda", device)
        cost = capturing._bare_cost(rig, named.append)
    entries = [entry for role in plan.roles for entry in role.entries]
    assert len(named) == len(entries)
    pieces = sum(1 if entry.mode is GraphMode.FULL else 2 for entry in entries)
    assert device.log.count("begin") == device.log.count("end") == pieces
    assert (device.pools, cost.pool, cost.driver) == (1, 100, 0)
    captured = capture(rig, lambda now: None).captured
    assert [f"bare: {graph.role.value} {graph.entry}" for graph in captured] == named


def test_captures_with_dropped_graphs_are_not_compared() -> None:
    """Fewer graphs take less time and memory."""
    graph = capture(rigged(planned(0)), lambda now: None).captured[0]
    refuse_dropped([graph])
    waiver = Waiver(kind=Kind.DECODE, first=1, last=1, reason=Reason.MEMORY, message="no room")
    lost: GraphCapture = attrs.evolve(graph, waiver=waiver)
    with pytest.raises(RunError, match="1 of 2 graphs did not fit"):
        refuse_dropped([graph, lost])


def test_bare_capture_is_closed_after_an_error() -> None:
    """What is left open makes every later call of the device fail; the error is the forward's own."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing.torch, "cuda", device)
        grapher = BareGraphs()

        def broken() -> None:
            raise ValueError("not this one")

        with pytest.raises(ValueError, match="not this one"):
            grapher.capture(broken, grapher.pool())
    assert device.log == ["begin", "end"]
