"""One role at run time: what backends are told at every forward, and whose fault an error is."""

from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import BackendError, CaptureError, RunError
from capture_planner.modes import GraphMode, Reason, Refresh, Role
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Axis, Fill, MetadataField, PaddingContract, Where
from capture_planner.records.batch import Batch
from capture_planner.records.spec import Policy, Sizes
from capture_planner_runner.capture.variants import without_graphs
from support.probe import Probe
from support.worlds import requests_of, serve, spec_of, world_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
SIZES = Sizes(policy=Policy.EXPLICIT, num_tokens=(4, 16), num_reqs=(1, 3))
GRAPHS = [mode for mode in GraphMode if mode is not GraphMode.NONE]


def derived(name, axis, fill, **options):
    """A field that follows from the common ones, read on both sides."""
    return MetadataField(name=name, axis=axis, fill=fill, where=Where.BOTH, **options)


DERIVED = PaddingContract(
    fields=(
        derived("qo_indptr", Axis.REQUEST_PLUS_ONE, Fill.REAL_TOTAL),
        derived("kv_lens", Axis.REQUEST, Fill.CONSTANT, value=0),
        derived("paged_kv_indptr", Axis.REQUEST_PLUS_ONE, Fill.REPEAT_LAST),
        derived("paged_kv_indices", Axis.PAGE, Fill.CONSTANT, value=0),
        derived("paged_kv_last_page_len", Axis.REQUEST, Fill.CONSTANT, value=0),
    )
)


@attrs.frozen(eq=False)
class RunnersWithFault:
    """A captured runner, an eager one, and a backend that breaks in a call when it is told to."""

    probe: Probe
    captured: object
    eager: object

    def work(self, data):
        """Any graph of any role, of the captured runner."""
        graphs = {
            f"{role.role.value}: {entry}": (role, entry)
            for role in self.captured.roles.values()
            for entry in role.graphs
        }
        return graphs[data.draw(st.sampled_from(sorted(graphs)), label="graph")]

    def forward(self, when, role, entry):
        """Return what warms up, captures, replays or runs eager a batch of an entry's shape."""
        inputs = role.warm_up_inputs(entry)
        tokens, reqs = inputs.num_tokens, inputs.num_reqs
        uniform = tokens // reqs if tokens % reqs == 0 else None
        batch = Batch(
            role=role.role,
            num_reqs=reqs,
            num_tokens=tokens,
            query_len=entry.query_len or uniform,
            past_prompt=entry.query_len is not None,
        )
        if when == "warm-up":
            return lambda: role.warm_up(entry)
        if when == "capture":
            return lambda: role.capture(entry)
        runner = self.captured if when == "replay" else self.eager
        dispatch = runner.dispatcher.dispatch(batch)
        return lambda: runner.roles[role.role].run(batch, dispatch, inputs, 0.0)


@pytest.fixture(scope="module")
def armed():
    """Tests put their own listener in, and take it out."""
    probe = Probe()
    world = world_of(
        spec_of(k=2, mode=GraphMode.FULL_AND_PIECEWISE, backend="probe", sizes=SIZES),
        registry=registry.load_backends(probe),
    )
    runner = world.runner()
    runner.capture()
    return RunnersWithFault(probe, runner, world.runner(without_graphs(world.plan)))


class Trap:
    """Raises at one kind of call, and counts how often it would have."""

    def __init__(self, probe, call, error):
        self._probe, self._call, self._error = probe, call, error
        self.sprung = 0

    def __enter__(self):
        self._probe.heard = self
        return self

    def __exit__(self, *error):
        self._probe.heard = lambda *_: None

    def __call__(self, call, reservation, metadata):
        if call == self._call:
            self.sprung += 1
            raise self._error


WHEN = st.sampled_from(("warm-up", "capture", "replay", "eager"))
CALLS = st.sampled_from(("prepare", "attend", "layout"))
ERRORS = st.sampled_from((RuntimeError, ValueError, KeyError, ZeroDivisionError, AssertionError, TypeError))


@torch.no_grad()
@given(st.data(), WHEN, CALLS, ERRORS)
def test_a_backend_that_breaks_is_named_with_role_group_and_entry(armed, data, when, call, error):
    """At every call of every forward; the same forward runs when the backend does not break."""
    role, entry = armed.work(data)
    run = armed.forward(when, role, entry)
    is_full = entry.num_reqs is not None
    is_called = {
        "prepare": True,
        # A FULL graph holds attention, so that its replay makes no call; and only it bakes a layout in.
        "attend": when != "replay" or not is_full,
        "layout": when in ("capture", "replay") and is_full,
    }
    with (
        Trap(armed.probe, call, error("out of\nluck")) as trap,
        pytest.raises(BackendError) if is_called[call] else nullcontext() as caught,
    ):
        run()
    if is_called[call]:
        where = "eager step" if when == "eager" else str(entry)
        text = str(caught.value)
        assert "the backend 'probe' (Probe 0) broke in " + call in text
        assert f"({role.role.value}, group all, {where}): {error.__name__}: " in text
        assert "\n" not in text
        assert type(caught.value.__cause__) is error
    else:
        assert not trap.sprung
    run()


@torch.no_grad()
@given(st.data(), WHEN, st.sampled_from((RunError, torch.OutOfMemoryError)))
def test_errors_that_say_enough_are_left_as_they_are(armed, data, when, error):
    """The package's own, and memory that does not suffice, which a capture answers with a waiver."""
    role, entry = armed.work(data)
    with Trap(armed.probe, "prepare", error("as it is")) as trap, pytest.raises(error) as caught:
        armed.forward(when, role, entry)()
    assert trap.sprung == 1
    assert str(caught.value) == "as it is"


@pytest.mark.parametrize("role", Role)
def test_a_backend_that_breaks_in_reserve_is_named_with_role_and_group(role):
    """There is no entry yet."""

    def listen(call, reservation, metadata):
        if call == "reserve" and reservation.role is role:
            raise ValueError("no room")

    world = world_of(spec_of(k=2, backend="probe"), registry=registry.load_backends(Probe(listen)))
    with pytest.raises(BackendError) as caught:
        world.runner()
    says = f"the backend 'probe' (Probe 0) broke in reserve ({role.value}, group all): ValueError: no room;"
    assert str(caught.value).startswith(says)


READS = {
    "item": lambda tensor: tensor.sum().item(),
    "bool": lambda tensor: bool(tensor.any()),
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "mask": lambda tensor: tensor[tensor > 0],
    "nonzero": lambda tensor: tensor.nonzero(),
}


@torch.no_grad()
@given(st.data(), st.sampled_from(sorted(READS)))
def test_a_host_read_in_a_graph_is_refused_with_its_place(armed, data, read):
    """Where attention is captured; between pieces, in warm-ups and in eager steps it may read."""
    role, entry = armed.work(data)

    def listen(call, reservation, metadata):
        if call == "attend":
            READS[read](metadata.fields["seq_lens"])

    armed.probe.heard = listen
    try:
        for when in ("warm-up", "eager"):
            armed.forward(when, role, entry)()
        capture = armed.forward("capture", role, entry)
        if entry.num_reqs is None:
            capture()
        else:
            with pytest.raises(CaptureError) as caught:
                capture()
            line = READS[read].__code__.co_firstlineno
            assert f" at {__file__}:{line}" in str(caught.value)
    finally:
        armed.probe.heard = lambda *_: None
    armed.forward("capture", role, entry)()


def test_a_backend_that_runs_out_of_memory_loses_that_graph():
    """The others are captured, and the batches that it would have served are waived."""
    lost = []

    def listen(call, reservation, metadata):
        if call == "attend" and metadata.entry is not None and metadata.entry.num_tokens == 4:
            lost.append((reservation.role, metadata.entry))
            raise torch.OutOfMemoryError("4 is too many")

    world = world_of(spec_of(k=2, backend="probe", sizes=SIZES), registry=registry.load_backends(Probe(listen)))
    with world.runner() as runner:
        runner.capture()
        serve(runner, requests_of(world, 0))
    waived = [done for done in runner.session.captured if done.waiver is not None]
    assert lost == [(done.role, done.entry) for done in waived] != []
    assert all(done.waiver.reason is Reason.MEMORY and "4 is too many" in done.waiver.message for done in waived)


@FEW
@given(worlds(GRAPHS), st.integers(0, 99), st.booleans())
def test_host_and_device_agree_at_every_forward(world, seed, is_graph):
    """Each field, padding included, is the same on both sides when a backend prepares."""
    heard = Counter()

    def listen(call, reservation, metadata):
        heard[call] += 1
        if call != "prepare":
            return
        # No row of a capture's batch is a request's; there each has a token.
        real = int((metadata.fields["idx_mapping"] >= 0).sum())
        real = real or int((np.diff(metadata.host["query_start_loc"]) > 0).sum())
        for name in metadata.fields:
            host, device = metadata.host[name], metadata.fields[name].numpy()
            if device.ndim == 2:
                assert not device[:, host.shape[1] :].any(), name
                device = device[:, : host.shape[1]]
            np.testing.assert_array_equal(device, host, f"{reservation.role} {metadata.entry} {name}")
        lengths, size = metadata.host["seq_lens"][:real], world.pages.page_size
        pages = metadata.host["paged_kv_indptr"]
        assert metadata.max_seq_len >= lengths.max()
        assert metadata.max_query_len >= np.diff(metadata.host["query_start_loc"]).max()
        np.testing.assert_array_equal(np.diff(pages)[:real], -(-lengths // size))
        np.testing.assert_array_equal(metadata.host["paged_kv_last_page_len"][:real], (lengths - 1) % size + 1)
        for row, (start, end) in enumerate(pairwise(pages[: real + 1])):
            np.testing.assert_array_equal(
                metadata.fields["paged_kv_indices"][start:end], metadata.fields["block_table"][row, : end - start]
            )

    # A chain that moves on inside its graph cannot derive these; who reads them refreshes on the host.
    probe = Probe(listen, padding=DERIVED, refresh=Refresh.HOST)
    world = world_of(
        replace(world.spec, backend="probe"), registry=registry.load_backends(probe), page_size=world.pages.page_size
    )
    with world.runner(None if is_graph else without_graphs(world.plan)) as runner:
        runner.capture()
        serve(runner, requests_of(world, seed))
    assert heard["prepare"]


def released_by(listen):
    """Leave a captured runner; ``listen`` hears the role of each release."""
    probe = Probe()
    world = world_of(spec_of(k=2, backend="probe", sizes=SIZES), registry=registry.load_backends(probe))
    with world.runner() as runner:
        runner.capture()
        roles = runner.roles
        probe.heard = lambda call, reservation, _: listen(call, roles[reservation.role])


def test_executors_are_released_once_and_last():
    """When the runner is left; graphs are gone by then."""
    heard = []
    released_by(lambda call, role: heard.append((call, role.role, len(role.graphs))))
    assert heard == [("release", role, 0) for role in Role]


def test_a_backend_that_breaks_in_release_is_named():
    """With its role and group."""

    def listen(call, role):
        if role.role is Role.DRAFT_PREFILL:
            raise ValueError("stuck")

    with pytest.raises(
        BackendError, match=r"Probe 0\) broke in release \(draft_prefill, group all\): ValueError: stuck"
    ):
        released_by(listen)
