"""The figures: each measures what it says, and measuring disturbs nothing."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from capture_planner.analysis.lint import Severity, lint  # noqa: E402
from capture_planner.dispatch.dispatcher import Dispatcher  # noqa: E402
from capture_planner.errors import RunError  # noqa: E402
from capture_planner.modes import GraphMode, Role  # noqa: E402
from capture_planner.plugins import registry  # noqa: E402
from capture_planner.plugins.registry import RegisteredBackend, Registry  # noqa: E402
from capture_planner.records.batch import Entry  # noqa: E402
from capture_planner_runner.bench import Bench, measure, verdicts  # noqa: E402
from capture_planner_runner.bench.decode import bare_replay, chain, decode, host_seconds, with_chains, with_single_steps  # noqa: E402
from capture_planner_runner.bench.preparation import preparation  # noqa: E402
from capture_planner_runner.bench.rig import Absence, Decoding, inputs_with_context, serving_entry, trimmed  # noqa: E402
from capture_planner_runner.bench.throughput import Load  # noqa: E402
from capture_planner_runner.ledger.rows import Forward  # noqa: E402
from support.examples import at_most  # noqa: E402
from support.tiny import MOST, planned, quiet, rigged  # noqa: E402

thorough = pytest.mark.thorough


def ignore(now: str) -> None:
    """Show no progress."""


def tokens(rig: Any, disturbed: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Serve three requests to their end, with a window of bare replays after some of the steps."""
    with rig.runner(rig.plan) as runner:
        runner.capture()
        decoding = Decoding(runner, rig.requests(3, 5, 24))
        for step in range(200):
            if decoding.serving.done:
                break
            if step in disturbed and not decoding.serving.served:
                bare_replay(rig, runner, decoding.replayed())
            decoding.serving.step()
        return {served.name: served.tokens for served in decoding.serving.served}


@pytest.mark.parametrize("k", [pytest.param(0, marks=thorough), pytest.param(1, marks=thorough), 4])
def test_bare_replays_change_no_token(k: int) -> None:
    """Graphs move their own fields on; what they changed is put back."""
    rig = rigged(planned(k))
    plain = tokens(rig, ())
    assert len(plain) == 3
    assert all(len(said) == 24 for said in plain.values())
    assert tokens(rig, (0, 1, 3)) == plain


@pytest.mark.parametrize("k", [pytest.param(0, marks=thorough), pytest.param(2, marks=thorough), 4])
def test_decode_is_measured_at_each_size_with_the_graphs_of_the_step(k: int) -> None:
    """With a drafter a step is its graphs and the draft prefill's and the draft decodes'."""
    rig = rigged(planned(k))
    rows = decode(rig, ignore)
    assert rig.absent == []
    assert [row.num_reqs for row in rows] == [1, MOST]
    for row in rows:
        assert min(row.step, row.bare, row.eager or 0) > 0
        assert row.host > 0
        assert [each.role for each in row.graphs] == [role.role for role in rig.plan.roles]
        decodes = sum((each.entry.draft_steps or 1) * each.times for each in row.graphs[2:])
        assert decodes == max(0, k - 1)


def test_decode_skips_sizes_that_do_not_fit() -> None:
    """A KV cache that holds one request: 4 never decode together, and the record says so."""
    plan = planned(0)
    rig = rigged(plan)
    rig = attrs.evolve(rig, pages=attrs.evolve(rig.pages, num_pages=14))
    rows = decode(rig, ignore)
    assert [row.num_reqs for row in rows] == [1]
    (absent,) = rig.absent
    assert absent.failed
    assert "give the model or the KV cache" in absent.says


def test_decode_skips_steps_that_are_partly_eager() -> None:
    """It has no bare graphs to stand beside; the sentence counts as people do."""
    plan = planned(2)
    rig = rigged(trimmed(plan, (1, MOST), (Role.TARGET, Role.DRAFT_PREFILL)))
    assert decode(rig, ignore) == ()
    assert [absent.failed for absent in rig.absent] == [False, False]
    for absent, size in zip(rig.absent, ("1 request", f"{MOST} requests"), strict=True):
        assert f"no graph for the draft_decode of {size}: " in absent.says


@at_most(20)
@given(st.sets(st.integers(1, MOST), min_size=1), st.sampled_from([0, 2, 4]), st.sampled_from(list(GraphMode)))
def test_trimmed_plan_serves_its_sizes_with_the_same_graphs(sizes: set[int], k: int, mode: GraphMode) -> None:
    """And is a sound plan: what it does not capture is waived, not forgotten."""
    whole = planned(k, mode)
    small = trimmed(whole, tuple(sorted(sizes)))
    for role in whole.roles:
        found = {serving_entry(Dispatcher(whole), whole, role.role, size) for size in sizes}
        assert set(small.role(role.role).entries) == found - {None}
        for size in sizes:
            again = serving_entry(Dispatcher(small), whole, role.role, size)
            assert again == serving_entry(Dispatcher(whole), whole, role.role, size)
    assert [str(f) for f in lint(small) if f.rule.severity is Severity.ERROR] == []


@pytest.mark.parametrize("k", [3, pytest.param(4, marks=thorough)])
def test_chains_and_single_steps_differ_in_draft_decodes_only(k: int) -> None:
    """Each is made of the other, and both give the same tokens."""
    plan = planned(k)
    single = with_single_steps(plan)
    fused = with_chains(single, registry.load_backends())
    assert fused is not None
    assert {entry.draft_steps for entry in single.role(Role.DRAFT_DECODE).entries} == {None}
    assert {entry.draft_steps for entry in fused.role(Role.DRAFT_DECODE).entries} == {k - 1}
    assert with_single_steps(fused) == single
    assert tokens(rigged(fused), ()) == tokens(rigged(single), ())


def test_chain_is_measured_fused_single_and_eager() -> None:
    """Where there are two or more draft decodes; otherwise the reason is told."""
    rows = chain(rigged(planned(4)), ignore)
    assert [(row.num_reqs, row.steps) for row in rows] == [(1, 3), (MOST, 3)]
    for row in rows:
        assert min(row.fused or 0, row.single, row.eager, row.host or 0) > 0
        assert row.one * row.steps == pytest.approx(row.single)
    for k, why in ((0, "no drafter"), (2, "at least 3")):
        with pytest.raises(Absence, match=why):
            chain(rigged(planned(k)), ignore)


class StockReference:
    """The reference backend, with a library's own plan call to compare with, or with one that breaks."""

    def __init__(self, backend: Any, *, breaks_after: int | None = None) -> None:
        self._backend, self.breaks_after = backend, breaks_after
        self.calls: list[int] = []

    name = "reference"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def support(self, *given: Any) -> Any:
        """As the backend does."""
        return self._backend.support(*given)

    padding = refresh = workspace = support

    def reserve(self, reservation: Any) -> Any:
        """Reserve, and add the optional method."""
        executor = self._backend.reserve(reservation)
        prepare, prepared = executor.prepare, [0]

        def broken(metadata: Any) -> None:
            prepared[0] += 1
            if self.breaks_after is not None and prepared[0] > self.breaks_after:
                raise ValueError("it is broken")
            prepare(metadata)

        executor.prepare = broken
        executor.stock = lambda metadata: lambda: self.calls.append(metadata.num_reqs)
        return executor


def standing(**given: Any) -> tuple[StockReference, Registry]:
    """Return the backend, and a registry with it alone."""
    found = registry.load_backends()["reference"]
    backend = StockReference(found.backend, **given)
    backend.padding = found.backend.padding  # type: ignore[method-assign]
    backend.refresh = found.backend.refresh  # type: ignore[method-assign]
    backend.workspace = found.backend.workspace  # type: ignore[method-assign]
    made = RegisteredBackend(backend=backend, distribution=found.distribution, version=found.version)
    return backend, Registry([made])


def test_preparation_is_compared_with_a_stock_call() -> None:
    """For each role and size, over as many steps as were asked for; the call is made at each of them, and
    at no step that is served.
    """
    backend, backends = standing()
    rig = rigged(planned(2), backends=backends)
    rows = preparation(rig, ignore)
    assert rig.absent == []
    assert {(row.num_reqs, row.role) for row in rows} == {(n, r.role) for n in (1, MOST) for r in rig.plan.roles}
    for row in rows:
        assert row.steps == rig.effort.prepared
        assert 0 < row.prepare < row.stage
        assert row.stock is not None
        assert row.step > 0
        assert row.of_stock == row.step / row.stock
    # One more than is counted: the first call of a library allocates.
    assert sorted(set(backend.calls)) == [1, MOST]
    assert len(backend.calls) == len(rows) * (rig.effort.prepared + 1)


def test_preparation_without_a_stock_call() -> None:
    """The reference plans nothing."""
    rows = preparation(rigged(planned(0)), ignore)
    assert {row.stock for row in rows} == {None}
    assert {row.of_stock for row in rows} == {None}


@at_most(30)
@given(st.integers(1, MOST), st.integers(1, 3), st.integers(0, 80))
def test_preparation_values_are_those_of_a_decode(size: int, query: int, more: int) -> None:
    """Each token's slot is where the block table has its position; positions end at the length."""
    shape = Entry(mode=GraphMode.FULL, num_tokens=size * query, num_reqs=size, query_len=query)
    step_inputs = inputs_with_context(RIG, ROLE, shape, more)
    page = RIG.pages.page_size
    for row in range(size):
        positions = step_inputs.positions[row * query : (row + 1) * query].tolist()
        assert positions == list(range(more, more + query))
        assert step_inputs.seq_lens[row] == more + query
        for index, position in enumerate(positions):
            slot = int(step_inputs.block_table[row, position // page]) * page + position % page
            assert step_inputs.slot_mapping[row * query + index] == slot
    assert np.unique(step_inputs.slot_mapping).size == size * query
    assert 0 < step_inputs.block_table.min() <= step_inputs.block_table.max() < RIG.pages.num_pages


RIG = rigged(planned(0))
with RIG.runner(RIG.plan) as _runner:
    ROLE = _runner.roles[Role.TARGET]


def test_host_seconds_of_a_draft_decode_come_from_the_ledger() -> None:
    """Of one draft decode, at its number of requests, by a graph; on a CPU without the replay itself."""
    rig = rigged(planned(4))

    def forward(host: float, **more: Any) -> Forward:
        role, size = more.pop("role", Role.DRAFT_DECODE), more.pop("num_reqs", 2)
        entry = more.pop("entry", rig.plan.role(Role.DRAFT_DECODE).entries[0])
        return Forward(
            step=0,
            role=role,
            num_reqs=size,
            num_tokens=size,
            query_len=1,
            entry=entry,
            reason=None,
            repeats=3,
            host_seconds=host,
            seconds=host + 30,
        )

    forwards = [forward(host) for host in (3.0, 6.0, 9.0)]
    others = [forward(99.0, role=Role.TARGET), forward(99.0, num_reqs=1), forward(99.0, entry=None)]
    assert host_seconds(rig, [*others, *forwards, *others], 2) == 2
    assert host_seconds(attrs.evolve(rig, device=torch.device("cuda")), forwards, 2) == 12
    assert host_seconds(rig, others, 2) is None


def test_chain_names_the_sizes_that_it_can_measure() -> None:
    """Numbers above the most are no reason to measure another; the sentence names those that do."""
    rig = attrs.evolve(rigged(planned(4)), sizes=(64,))
    with pytest.raises(Absence, match=r"up to 8 requests, .* --requests is 64; name one of 1, 2, 3, 4"):
        chain(rig, ignore)


@thorough
def test_measure_reports_all_figures() -> None:
    """Of a plan with a chain all are there; transformers needs a GPU, and that is said."""
    bench = Bench(quick=True, load=Load(requests=2, prompt=8, output=4), page_size=8)
    report = measure(planned(4, GraphMode.FULL_AND_PIECEWISE), registry.load_backends(), bench, quiet)
    assert report.absent == ()
    assert [row.num_reqs for row in report.decode] == [1, MOST]
    assert report.capture is not None
    assert len(report.capture.captured) == report.capture.graphs == report.plan.num_graphs
    assert report.capture.bare is None
    assert report.pools is not None
    assert report.pools.differing == ()
    assert report.pools.saved > 0
    assert report.throughput is not None
    assert report.throughput.other is None
    assert "GPU" in report.throughput.other_says
    assert {verdict.figure for verdict in verdicts(report)} == {"decode", "chain"}
    assert {"device", "torch", "date", "capture-planner"} <= set(report.facts)


def test_measure_records_a_failure_and_continues() -> None:
    """A backend that breaks after some calls costs the long figures, and not the record."""
    plan = planned(2)
    _, backends = standing(breaks_after=10)
    only = ("decode", "capture")
    report = measure(plan, backends, Bench(quick=True, requests=(1,), only=only, page_size=8), quiet)
    assert report.capture is not None
    assert report.decode == ()
    assert {absent.figure for absent in report.failed} == {"decode"}
    assert "it is broken" in report.failed[0].says


def test_measure_rejects_a_plan_without_decode_graphs() -> None:
    """There is nothing to measure, and the sentence says what to do."""
    with pytest.raises(RunError, match=r"no graph that serves a decode of 1 request .* name other --requests"):
        measure(planned(0, GraphMode.NONE), registry.load_backends(), Bench(quick=True, requests=(1,)), quiet)


def test_unexpected_error_is_recorded_with_its_location() -> None:
    """And what is measured after it is not lost; an absence is no failure."""
    rig = rigged(planned(0))

    def surprise() -> None:
        raise KeyError("nobody knows")

    with rig.trying("decode"):
        surprise()
    with rig.trying("chain"):
        raise Absence("there is none")
    broken, missing = rig.absent
    assert (broken.figure, broken.failed, missing.failed) == ("decode", True, False)
    assert "KeyError: 'nobody knows' (in surprise, test_figures.py:" in broken.says
    assert missing.says == "there is none"
