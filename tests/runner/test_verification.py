"""Verification: an error of 1 % in one layer is found in half precision, and no healthy run is blamed.

``thorough`` draws many more deployments.
"""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode
from capture_planner.records.model import DataType
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.numerics.record import number
from capture_planner_runner.serving.serving import Serving
from support.planted import Deployment, SpoiledReference, projection, scaled_attention, stale_row, wrong_page

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = (DataType.BFLOAT16, DataType.FLOAT16)
MODES = (GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL, GraphMode.FULL_DECODE_ONLY)
LAYERS = 3 if settings.default.max_examples >= 100 else 2


def deployments(dtypes=HALF):
    """Deployments whose plans have FULL graphs."""
    return st.builds(
        Deployment,
        seed=st.integers(0, 10_000),
        dtype=st.sampled_from(dtypes),
        mode=st.sampled_from(MODES),
        drafts=st.sampled_from((0, 0, 3)),
        hidden_size=st.sampled_from((64, 96)),
        layers=st.just(LAYERS),
        requests=st.integers(6, 8),
    )


def planted(kind, layer):
    """Return what a launch is given to have an error."""
    return {
        "scaled attention": lambda: {"backend": scaled_attention(layer)},
        "scaled attention in graphs": lambda: {"backend": scaled_attention(layer, 0.99, in_graphs=True)},
        "scaled output projection": lambda: {"plant": projection(layer)},
        "scaled MLP": lambda: {"plant": projection(layer, "mlp.down_proj", 0.98)},
        "wrong page": lambda: {"backend": wrong_page(layer)},
        "stale row": lambda: {"backend": stale_row(layer)},
    }[kind]()


KINDS = ("scaled attention", "scaled attention in graphs", "scaled output projection", "wrong page", "stale row")


def check_healthy(deployment):
    """Every bound holds, and what was measured adds up."""
    check = deployment.launch().report.verification
    assert check.passed, check.verdict
    assert check.differing == check.faults == ()
    for deviation in (check.tokens, check.rows):
        assert deviation.within == deviation.compared > 0
        assert deviation.worst <= deviation.bound
    assert len([scale for scale in check.scales if scale.served_by == "all"]) == 2 * deployment.layers


def check_planted(deployment, kind, layer):
    """It is found; a scale of all rows is measured too, in the layer that has it."""
    check = deployment.launch(**planted(kind, layer)).report.verification
    assert not check.passed, check.verdict
    if kind in ("scaled attention", "scaled output projection"):
        found = [s for s in check.scales if s.served_by == "all" and s.part == "attention" and s.layer == layer]
        assert found[0].error == pytest.approx(0.01, abs=0.004)
    if kind in ("wrong page", "stale row"):
        assert check.differing
        assert all(any(fault.startswith(f"{name}: ") for fault in check.faults) for name in check.differing)


@settings(max_examples=2)
@given(deployments())
def test_healthy_runs_in_half_precision_pass(deployment):
    """Of any seed, mode and number of drafts, though the reference runs other batches."""
    check_healthy(deployment)


@pytest.mark.parametrize(
    ("kind", "layer", "choices"),
    [
        ("scaled attention", 0, {}),
        ("scaled attention in graphs", 1, {"dtype": DataType.FLOAT16, "mode": GraphMode.FULL}),
        ("scaled output projection", 1, {"hidden_size": 96}),
        ("wrong page", 0, {"drafts": 3}),
        ("stale row", 1, {"mode": GraphMode.FULL_DECODE_ONLY}),
    ],
)
def test_an_error_in_one_layer_is_found(kind, layer, choices):
    """1 % of one layer, which is below the rounding of a row; and what is wrong in a few rows alone."""
    check_planted(Deployment(layers=2, requests=6, **choices), kind, layer)


@pytest.mark.thorough
@settings(max_examples=200)
@given(deployments())
def test_no_healthy_run_of_many_is_blamed(deployment):
    """As above."""
    check_healthy(deployment)


@pytest.mark.thorough
@settings(max_examples=400)
@given(deployments(), st.sampled_from(KINDS), st.integers(0, LAYERS - 1))
def test_errors_in_one_layer_are_found_wherever_they_are(deployment, kind, layer):
    """As above."""
    check_planted(deployment, kind, layer)


def test_an_error_in_graphs_alone_is_measured_by_what_it_does_there():
    """Keys of prompts, which run eager, are right: so rows move otherwise than by an error in all forwards."""
    deployment = Deployment(seed=4, dtype=DataType.BFLOAT16, mode=GraphMode.FULL_DECODE_ONLY, layers=LAYERS, requests=8)
    check = deployment.launch(**planted("scaled attention in graphs", 0)).report.verification
    found = [s.error for s in check.scales if (s.layer, s.part, s.served_by) == (0, "attention", "FULL graphs")]
    assert min(found, key=lambda error: abs(error + 0.01)) == pytest.approx(-0.01, abs=0.001)


def test_an_error_of_an_mlp_is_found():
    """Where MLPs add enough to the residual stream: random ones of small models add next to nothing."""
    check = (
        Deployment(dtype=DataType.FLOAT16, hidden_size=96, layers=2)
        .launch(**planted("scaled MLP", 1))
        .report.verification
    )
    assert not check.passed, check.verdict


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT64])
def test_verification_is_exact_in_float32_and_float64(dtype):
    """A healthy run is within 1e-5, so that one ten-thousandth of one layer is found."""
    deployment = Deployment(dtype=dtype, layers=2, requests=3)
    check = deployment.launch().report.verification
    assert check.passed, check.verdict
    assert max(check.rows.worst, check.tokens.worst) < 1e-5
    assert check.rows.bound < 2e-5
    check = deployment.launch(backend=scaled_attention(1, 1.0005)).report.verification
    assert not check.passed, check.verdict


@pytest.mark.parametrize("dtype", [DataType.BFLOAT16, DataType.FLOAT32])
def test_nan_is_found(dtype):
    """In one row of one layer's graphs; the report stays finite."""

    def spoil(layer, out, metadata, attend):
        attend()
        if layer == 1 and metadata.is_full:
            out[:1].fill_(torch.nan)

    check = Deployment(dtype=dtype, layers=2, requests=4).launch(backend=SpoiledReference(spoil)).report.verification
    assert "hidden states have NaN or infinity" in check.faults[0], check.verdict
    assert (check.rows.worst, check.rows.mean) == (None, None)
    assert number(check.rows.worst) == "not finite"


def test_one_other_token_is_one_fault(monkeypatch):
    """The reference goes on from the token that was served: what comes after it is not blamed."""
    sample = TargetBody.sample
    seen = []

    def wrong(self, entry, count):
        sample(self, entry, count)
        if count and not seen:
            seen.append(self.fields["sampled_rows"][0].item())
            self.tokens[seen[0]] = (self.tokens[seen[0]] + 7) % self.model.vocab_size

    monkeypatch.setattr(TargetBody, "sample", wrong)
    deployment = Deployment(dtype=DataType.FLOAT64, mode=GraphMode.FULL_DECODE_ONLY, layers=2, requests=3)
    check = deployment.launch().report.verification
    assert seen
    assert len(check.differing) == 1, check.verdict
    assert check.tokens.within == check.tokens.compared - 1
    assert check.rows.within == check.rows.compared


def test_a_token_that_no_forward_read_is_found(monkeypatch):
    """The host stores another token than the device reads: every row and token by itself is right."""
    output = Serving._output

    def wrong(self, live):
        tokens = output(self, live)
        return (*tokens[:-2], tokens[-2] ^ 1, tokens[-1]) if live.request.name == "request-1" else tokens

    monkeypatch.setattr(Serving, "_output", wrong)
    check = Deployment(dtype=DataType.FLOAT64, layers=1, requests=3).launch().report.verification
    assert check.differing == ("request-1",)


@pytest.mark.parametrize("change", [lambda tokens: tokens[:-1], lambda tokens: (*tokens, tokens[-1])])
def test_an_output_of_another_length_is_found(monkeypatch, change):
    """Too short or too long, with right tokens."""
    output = Serving._output
    monkeypatch.setattr(Serving, "_output", lambda self, live: change(output(self, live)))
    check = Deployment(dtype=DataType.FLOAT64, layers=1, requests=2).launch().report.verification
    assert len(check.differing) == 2


def test_a_weight_that_serving_changes_is_found():
    """The reference has the changed weight too, so that no row says so."""

    def spoil(layer, out, metadata, attend):
        attend()
        if metadata.is_full:
            model[0]._embedding.weight[-1, -1] += 1

    model = []

    def plant(target):
        model.append(target)
        return Deployment.nothing()

    check = Deployment(layers=1, requests=2).launch(backend=SpoiledReference(spoil), plant=plant).report.verification
    assert check.faults[0].startswith("serving changed the weights "), check.verdict


def test_rows_without_memory_are_counted_and_not_compared(monkeypatch):
    """Tokens are verified all the same."""
    monkeypatch.setattr("capture_planner_runner.launch.launch.RowKeeper.__init__.__defaults__", (4000,))
    check = Deployment(dtype=DataType.FLOAT32, layers=1, requests=3).launch().report.verification
    assert check.passed, check.verdict
    assert 0 < check.rows.compared < check.not_kept
    assert check.tokens.compared > 0
    assert attrs.evolve(check, not_kept=0).measured == check.measured[:-1]
