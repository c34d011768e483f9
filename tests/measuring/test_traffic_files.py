"""Traffic of files that are read as a whole, parts of sources, and traffic that fits a file."""

import io
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.codec.documents import MAX_NODES, num_nodes
from capture_planner.engines.logs import read_traffic
from capture_planner.errors import InvalidDocument
from capture_planner.measuring.traffic import SourceOptions, TraceLimits, fitting
from capture_planner.measuring.traffic.fitting import rounded_up
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Spec
from capture_planner.records.traffic import Traffic, TrafficCount
from support import log_lines
from support.examples import at_most
from support.strategies import observations, traffics
from support.traffic_shapes import file_of, shapes

PROMETHEUS = """# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_sum{engine="0",model_name="a \\"b\\" {c}"} 400.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="a \\"b\\" {c}"} 3.0
vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="a \\"b\\" {c}"} 10.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="a \\"b\\" {c}"} 12.0
vllm:iteration_tokens_total_bucket{engine="1",le="8.0",model_name="a"} 1.0
vllm:spec_decode_num_drafts_total{engine="0"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 50.0
process_start_time_seconds 1.7e+09 1700000000000
not a sample
"""


def test_prometheus_histograms_are_read_with_their_warning(tmp_path):
    """Each bucket counts as its upper bound; the notes print buckets to set."""
    path = tmp_path / "metrics"
    path.write_text(PROMETHEUS)
    traffic, unreadable = read_traffic([str(path)])
    assert shapes(traffic) == {(None, 1, None): 3, (None, 8, None): 8}
    assert (traffic.drafted, traffic.accepted) == ((100, 100), (80, 50))
    assert (traffic.skipped, len(unreadable)) == (1, 1)
    text = " ".join(traffic.notes)
    assert "coarse" in text
    assert "accepted tokens" in text
    buckets = json.loads(text.split("--custom-histogram-buckets '")[1].split("'")[0])["iteration_tokens"]
    assert buckets == sorted(set(buckets))
    assert "2 steps above the last bucket are not counted" in text


def test_a_scrape_between_two_counters_accepts_no_more_than_was_drafted(tmp_path):
    """Counters are read one by one while the engine counts on."""
    path = tmp_path / "metrics"
    path.write_text(PROMETHEUS.replace("80.0", "103.0"))
    traffic = read_traffic([str(path)])[0]
    assert (traffic.drafted, traffic.accepted) == ((100, 100), (100, 50))


def test_other_metrics_may_be_below_zero(tmp_path):
    """A gauge of something else is no line that could not be read."""
    path = tmp_path / "metrics"
    skipped = []
    for more in ("", "\nroom_temperature_celsius -3.0\n"):
        path.write_text(PROMETHEUS + more)
        skipped.append(read_traffic([str(path)])[0].skipped)
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize("odd", ["NaN", "1e999", "-Inf", "-3", "1e300", "0x10", "9" * 5000, ""])
@pytest.mark.parametrize("at", ['"8.0"', '"0"', " 7.0", " 12.0"])
def test_an_odd_value_of_a_metric_costs_its_line_alone(tmp_path, at, odd):
    """NaN is legal Prometheus text; a bound or a position may be anything, too."""
    lines = [
        'vllm:iteration_tokens_total_bucket{engine="1",le="1.0"} 3.0',
        'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 12.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 7.0',
    ]
    path = tmp_path / "metrics"
    path.write_text("\n".join(line.replace(at, at[0] + odd + at[-1].strip("0")) for line in lines))
    traffic = read_traffic([str(path)])[0]
    assert shapes(traffic)[None, 1, None] == 3
    assert codec.loads(codec.dumps(traffic), Traffic) == traffic


@pytest.mark.parametrize("wrong", ['"num_reqs": 1e999', '"num_reqs": NaN', '"forwards": ' + "[" * 20_000])
def test_a_report_with_odd_numbers_is_refused(tmp_path, wrong):
    """As one that is none."""
    path = tmp_path / "report.json"
    forward = '{"step": 0, "role": "target", "num_tokens": 2, "query_len": 1, "repeats": 1, "num_reqs": 2}'
    report = f'{{"environment": 1, "captured": 1, "steps": [{{"index": 0, "seconds": 1}}], "forwards": [{forward}]}}'
    path.write_text(report.replace('"num_reqs": 2' if "reqs" in wrong else f'"forwards": [{forward}]', wrong))
    with pytest.raises(InvalidDocument, match="no run report"):
        read_traffic([str(path)])


def test_prometheus_of_sglang_has_no_shapes(tmp_path):
    """Its counter is of passes."""
    path = tmp_path / "metrics"
    path.write_text('sglang:cuda_graph_passes_total{mode="decode_cuda_graph"} 5.0\n')
    with pytest.raises(InvalidDocument, match="counts passes by mode, which are no batch shapes"):
        read_traffic([str(path)])


@at_most(30)
@given(observation=observations())
def test_observations_are_read(observation, tmp_path_factory):
    """Every step of every role's shapes; what is not listed is said."""
    path = tmp_path_factory.mktemp("files") / "a.yaml"
    path.write_text(codec.dumps(observation), encoding="utf-8")
    counts = [
        (role.role, each.num_reqs, each.num_tokens, each.steps)
        for role in observation.roles
        for each in role.batches
        if each.steps and each.num_reqs and each.num_tokens
    ]
    traffic = read_traffic([str(path)])[0]
    assert Counter(each.role for each in traffic.batches for _ in range(each.count > 0)).keys() == {
        c[0] for c in counts
    }
    assert traffic.steps == sum(count for *_, count in counts)
    assert traffic.accepted[: len(observation.accepted)] == observation.accepted


@at_most(30)
@given(traffic=traffics(), as_json=st.booleans())
def test_traffic_files_add_up(traffic, as_json, tmp_path_factory):
    """Twice the same file has each shape twice, as YAML and as JSON."""
    path = tmp_path_factory.mktemp("files") / "a"
    text = codec.dumps_json(codec.to_data(traffic)) if as_json else codec.dumps(traffic)
    path.write_text(text, encoding="utf-8")
    again = read_traffic([str(path), str(path)])[0]
    assert {b.shape: b.count for b in again.batches} == {b.shape: 2 * b.count for b in traffic.batches}
    assert again.skipped == 2 * traffic.skipped


def test_run_reports_are_read(tmp_path):
    """Each forward of each role, as often as it ran."""
    step = {"index": 0, "seconds": 0.5, "drafted": 3}
    forward = {"step": 0, "role": "draft_decode", "num_reqs": 2, "num_tokens": 2, "query_len": 1, "repeats": 2}
    mixed = {"step": 1, "role": "target", "num_reqs": 2, "num_tokens": 9, "query_len": None, "repeats": 1}
    report = {"model": "x", "environment": "cpu", "captured": {}, "steps": [step, step | {"index": 1}]}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report | {"forwards": [forward, mixed]}, indent=2))
    traffic = read_traffic([str(path)])[0]
    assert shapes(traffic) == {(2, 2, 1): 2, (2, 9, None): 1}
    assert traffic.seconds == 1
    assert shapes(read_traffic([str(path)], SourceOptions(part=(0, 0.5)))[0]) == {(2, 2, 1): 2}


def test_traces_run_through_the_scheduler(tmp_path):
    """One request: its prompt, and one decode for each token after the first."""
    path = tmp_path / "trace.csv"
    path.write_text("t,in_len,out_len\n0,100,5\n")
    traffic = read_traffic([str(path)])[0]
    assert shapes(traffic) == {(1, 100, None): 1, (1, 1, 1): 4}
    assert traffic.notes[0].startswith("assumed limits")


def test_a_position_counts_the_steps_that_drafted_it(tmp_path):
    """Under a schedule large batches draft one token, and no third draft of theirs is accepted."""
    path = tmp_path / "trace.csv"
    path.write_text("t,in_len,out_len\n" + "".join(f"0,20,{5 * length}\n" for length in range(1, 61)))
    speculative = Speculative(
        method=Method.EAGLE3, num_tokens=3, schedule=((1, 4, 3), (5, 64, 1)), acceptance=(0.8, 0.6, 0.4)
    )
    limits = TraceLimits(limits=Limits(max_num_reqs=64, max_num_tokens=512), speculative=speculative)
    traffic = read_traffic([str(path)], SourceOptions(deployment=limits))[0]
    decodes = [each for each in traffic.batches if each.past_prompt and each.role is Role.TARGET]
    drafted = [
        sum(each.count * each.num_reqs for each in decodes if speculative.draft_tokens(each.num_reqs) > position)
        for position in range(3)
    ]
    assert 0 < drafted[2] < drafted[0]
    assert traffic.drafted == tuple(drafted)
    assert traffic.accepted == tuple(round(share * each) for share, each in zip((0.8, 0.6, 0.4), drafted, strict=True))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "trace.csv",
            "t,in_len,out_len\n0,5,5\n100,5,5\n",
            "no request arrives in the part from 0.3 to 0.6 of its time",
        ),
        (
            "a.log",
            log_lines.vllm_iteration(0, 1, (0, 0), (2, 2)) + "\nready" * 99,
            "no steps in the part from 0.3 to 0.6",
        ),
    ],
)
def test_parts_without_steps_are_named_and_no_format_is_blamed(tmp_path, name, text, says):
    """What is empty is the part, not the file."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidDocument, match=says) as caught:
        read_traffic([str(tmp_path / name)], SourceOptions(part=(0.3, 0.6)))
    assert "read a larger part" in str(caught.value)
    assert "known format" not in str(caught.value)


def test_parts_of_a_trace_and_of_a_log_are_all_of_it(tmp_path):
    """Two parts have each request and each line once."""
    rng = random.Random(0)
    arrivals = sorted(rng.uniform(0, 100) for _ in range(60))
    trace, log = tmp_path / "trace.csv", tmp_path / "a.log"
    trace.write_text("t,in_len,out_len\n" + "".join(f"{at:.3f},10,1\n" for at in arrivals))
    log.write_text("".join(log_lines.vllm_iteration(0, n, (0, 0), (n + 1, n + 1)) + "\n" for n in range(99)))
    for path in (trace, log):
        whole, *parts = (
            read_traffic([str(path)], SourceOptions(part=part))[0] for part in ((0, 1), (0, 0.667), (0.667, 1))
        )
        requests = [sum(each.count * each.num_reqs for each in traffic.batches) for traffic in (whole, *parts)]
        assert requests[0] == requests[1] + requests[2]
        assert requests[1] > 0
    first = read_traffic([str(log)], SourceOptions(part=(0, 0.667)))[0]
    assert max(batch.num_reqs for batch in first.batches) == first.steps


def test_drafters_follow_from_the_target(tmp_path):
    """With a spec's speculation, where the source has the target only."""
    path = file_of(tmp_path, [log_lines.vllm_iteration(0, 1, (0, 0), (12, 48))])
    traffic = read_traffic([path], SourceOptions(deployment=codec.loads(SPEC, Spec)))[0]
    counts = {(each.role, each.num_reqs, each.num_tokens): each.count for each in traffic.batches}
    assert counts == {(Role.TARGET, 12, 48): 1, (Role.DRAFT_PREFILL, 12, 48): 1, (Role.DRAFT_DECODE, 12, 12): 2}


SPEC = """version: 1
model: {name: a, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 64, max_model_len: 4096}
limits: {max_num_reqs: 64, max_num_tokens: 2048}
mode: FULL_AND_PIECEWISE
backend: triton
speculative: {method: eagle3, num_tokens: 3}
"""


def test_standard_input_is_a_source(monkeypatch):
    """A hyphen names it; it has no parts."""
    line = log_lines.vllm_iteration(0, 1, (0, 0), (1, 1)).encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(line)))
    assert read_traffic(["-"])[0].sources == ("<stdin>: vLLM iteration lines",)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(line)))
    with pytest.raises(InvalidDocument, match="standard input has no parts"):
        read_traffic(["-"], SourceOptions(part=(0, 0.5)))


@given(st.integers(1, 1 << 20), st.floats(0.001, 1))
def test_rounding_up_moves_by_less_than_its_share(number, share):
    """And what was rounded stays."""
    rounded = rounded_up(number, share)
    assert number <= rounded <= number * (1 + share)
    assert rounded_up(rounded, share) <= rounded * (1 + share)


def test_traffic_of_many_shapes_fits_a_file():
    """Counts and the largest batch stay exact, and the note says what moved."""
    rng = random.Random(1)
    batches = {
        (rng.randint(1, 256), rng.randint(256, 8192), past): rng.randint(1, 50)
        for past in (False, None)
        for _ in range(20_000)
    }
    traffic = Traffic(
        sources=("x",),
        batches=tuple(
            TrafficCount(role=Role.TARGET, num_reqs=reqs, num_tokens=tokens, past_prompt=past, count=count)
            for (reqs, tokens, past), count in batches.items()
        ),
    )
    fit = fitting(traffic)
    assert num_nodes(codec.to_data(traffic)) > MAX_NODES >= num_nodes(codec.to_data(fit))
    assert fit.steps == traffic.steps
    for name in ("num_reqs", "num_tokens"):
        assert max(getattr(b, name) for b in fit.batches) == max(getattr(b, name) for b in traffic.batches)
    assert codec.loads(codec.dumps(fit), Traffic) == fit
    assert "counts are exact" in fit.notes[-1]
    small = replace(traffic, batches=traffic.batches[:100])
    assert fitting(small) is small
