"""tune: what people type, what they read, what is written, and what is refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest

from capture_planner import codec
from capture_planner.analysis.diff import diff
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import CostCurve
from support import log_lines
from support.commands import Run
from support.observing import observation_of
from support.tuning import MODEL, profile, vllm_log

DRAFTS = Speculative(method=Method.EAGLE3, num_tokens=3)
FLAGS = ("vllm", MODEL.name, "--max-num-seqs", "12", "--max-num-batched-tokens", "64")
EAGLE = ("--speculative-config", '{"method":"eagle3","model":"my/drafter","num_speculative_tokens":3}')
LOAD = ("--traffic", "vllm.log", "--profile", "profile.yaml")
SIDE = {
    "graphs",
    "objective",
    "mean_step_ms",
    "token_ms",
    "gap_ms",
    "gap_p99_ms",
    "prompt_step_ms",
    "eager_share",
    "memory_mib",
    "seconds",
    "regret",
    "worst_regret",
}
H200 = find_environment("h200")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a log of vLLM and a profile."""
    monkeypatch.chdir(tmp_path)
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 9, 11), longest=48), "utf-8")
    Path("profile.yaml").write_text(codec.dumps(profile()), "utf-8")


def tuned(call: Run, *words: str, code: int = 0) -> Any:
    """Return the JSON that tune prints."""
    return call("tune", *words, "--format", "json").document(code)


_MADE: list[Any] = []


@pytest.fixture
def document(call: Run, files: None) -> Any:
    """Return the JSON of the command line and the files that most tests have; it is made once."""
    if not _MADE:
        _MADE.append(tuned(call, *FLAGS, *LOAD))
    return _MADE[0]


def test_the_document_has_what_it_promises(document: Any) -> None:
    """Verdict, both sides, the Pareto table, the steps, and what is assumed; numbers in JSON's own types."""
    data = document
    assert set(data) == {
        *("verdict", "reason", "estimate", "needed", "objective", "today", "proposed", "gain", "beyond", "pareto"),
        *("doubled_load", "churn", "latency", "worse", "steps", "assumptions", "notes", "commands"),
    }
    assert (data["estimate"], data["needed"]) == (False, None)
    assert data["objective"] == "token"
    assert data["gain"]["low"] <= data["gain"]["high"]
    assert data["gain"]["blocks"] > 1
    assert data["churn"]["kept"] <= data["churn"]["graphs"] == data["proposed"]["graphs"]
    assert data["verdict"] == "change"
    for side in (data["today"], data["proposed"]):
        assert set(side) == SIDE
        assert set(side["eager_share"]) == {"target"}
    assert data["today"]["graphs"] == len(emulate("vllm", FLAGS[1:], H200).graphs)
    for point in data["pareto"]:
        assert set(point) == {"graphs", "objective", "mean_step_ms", "memory_mib", "seconds", "within"}
    steps = data["steps"]
    assert steps["chosen"] + steps["judged"] == 3600
    assert steps["judged"] == pytest.approx(1200, rel=0.01)  # a part of a log is a part of its bytes
    assert steps["held_out"] is True
    assert steps["least"] == 1000
    assert data["assumptions"] == []
    assert not any("no order in time" in note for note in data["notes"])
    assert data["commands"] == []  # no plan was written
    assert data["notes"][-1] == "nothing is written: give -o FOLDER for the plan"


def test_a_change_is_written_as_a_folder_that_reproduces_it(call: Run) -> None:
    """Spec, plan, traffic, profile and the launch line: planned again, the spec gives the plan; launch takes it.

    The page may be in it, in the place of one from before, but not under the name of another file; what was tuned is
    kept: that is said, with the reason, and nothing but the page is written.
    """
    names = ["launch.sh", "plan.yaml", "profile.yaml", "spec.yaml", "traffic.yaml"]
    ran = call("tune", *FLAGS, *LOAD, "-o", "tuned")
    assert ran.code == 0, ran.err
    assert "nothing is written" not in ran.out
    assert "capture-planner launch tuned/plan.yaml -- vllm serve " + " ".join(FLAGS[1:]) in ran.out
    budget = codec.load_spec("tuned/spec.yaml").budget
    assert budget.memory is not None
    assert budget.memory % (1 << 20) == 0  # as people write it
    assert sorted(path.name for path in Path("tuned").iterdir()) == names
    Path("tuned/page.html").touch()
    assert call("tune", *FLAGS, *LOAD, "-o", "tuned", "--html", "tuned/page.html").code == 0
    assert Path("tuned/page.html").stat().st_size
    assert sorted(path.name for path in Path("tuned").iterdir()) == sorted([*names, "page.html"])
    ran = call("tune", *FLAGS, *LOAD, "-o", "tuned", "--html", "tuned/plan.yaml")
    assert (ran.code, "is also a file of --output" in ran.err) == (1, True)
    assert call("plan", "tuned/spec.yaml", "-e", "h200", "-o", "again.yaml").code == 0
    tuned_plan = codec.load_plan("tuned/plan.yaml")
    assert diff(replace(tuned_plan, promise=None), codec.load_plan("again.yaml")) == ()
    assert tuned_plan.promise is not None
    assert replace(tuned_plan, promise=None) == codec.load_plan("again.yaml")
    (command,) = [line for line in Path("tuned/launch.sh").read_text("utf-8").splitlines() if line.startswith("exec")]
    words = shlex.split(command)
    assert words[3] == "$(dirname $0)/plan.yaml"
    assert words[-1] == "$@"
    ran = call("launch", "--dry-run", "tuned/plan.yaml", *words[4:-1])
    assert ran.code == 0, ran.err
    assert call("check", "tuned/plan.yaml").code == 0
    # The spec's own profile counts: of this engine on the device that it names.
    by_itself = tuned(call, "tuned/spec.yaml", *LOAD[:2])
    assert by_itself == tuned(call, "tuned/spec.yaml", *LOAD)
    assert by_itself["estimate"] is False
    ran = call("tune", "tuned/spec.yaml", *LOAD, "-o", "other")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0].endswith("tuned/spec.yaml: keep what you have")
    assert "nothing is written to other" in ran.out
    assert not Path("other").exists()
    data = tuned(call, "tuned/spec.yaml", *LOAD, "-o", "kept", "--html", "kept/page.html")
    assert [path.name for path in Path("kept").iterdir()] == ["page.html"]
    assert data["verdict"] == "keep"
    assert data["today"] == data["proposed"]
    assert data["commands"] == []


def test_too_little_data_promises_nothing(call: Run) -> None:
    """Exit code 2; no side is shown, and the least number of steps is named."""
    Path("vllm.log").write_text(vllm_log(300, (3, 5)), "utf-8")
    data = tuned(call, *FLAGS, *LOAD, "-o", "tuned", code=2)
    assert data["verdict"] == "too_little_data"
    assert data["today"] is data["proposed"] is None
    assert data["pareto"] == []
    assert "1,000" in data["reason"]
    assert not Path("tuned").exists()
    ran = call("tune", *FLAGS, *LOAD)
    assert ran.code == 2
    assert "too little data" in ran.out.splitlines()[0]


def test_the_order_of_sources_does_not_matter(call: Run) -> None:
    """Two logs, both ways round: the same answer and the same plan."""
    Path("b.log").write_text(vllm_log(1500, (2, 12), longest=48, seed=7), "utf-8")
    first = tuned(call, *FLAGS, *LOAD, "--traffic", "b.log", "-o", "ab")
    second = tuned(call, *FLAGS, "--traffic", "b.log", *LOAD, "-o", "ba")
    assert first | {"commands": []} == second | {"commands": []}
    assert Path("ab/plan.yaml").read_bytes() == Path("ba/plan.yaml").read_bytes()


def test_traffic_without_an_order_is_not_held_out(call: Run) -> None:
    """A traffic file is one histogram: sizes are chosen by it and judged on it, and that is said."""
    assert call("traffic", "vllm.log", "-o", "traffic.yaml").code == 0
    words = (*FLAGS, "--traffic", "traffic.yaml", "--profile", "profile.yaml")
    data = tuned(call, *words)
    assert data["steps"] == {"chosen": 3600, "judged": 3600, "held_out": False, "least": 1000}
    assert any("no order in time" in note for note in data["notes"])
    assert "nothing is held out" in call("tune", *words).out


def test_budgets_are_kept(call: Run, document: Any) -> None:
    """By the same costs as today's: graphs, memory and seconds."""
    today = document["today"]
    for name, value, key in (
        ("--max-graphs", "5", "graphs"),
        ("--memory", "90MiB", "memory_mib"),
        ("--seconds", "0.8", "seconds"),
    ):
        data = tuned(call, *FLAGS, *LOAD, name, value)
        most = float(value.removesuffix("MiB"))
        assert data["proposed"][key] <= most < today[key]
        assert data["verdict"] == "change"


@pytest.mark.parametrize("machine", ["h200", "h100"])
def test_budgets_of_a_spec_may_have_shares(call: Run, machine: str) -> None:
    """A quarter of the graphs for mixed batches; with costs of another machine, today's graphs are kept as well."""
    file = Path(_spec(call))
    shares = "budget: {max_graphs: 12, graphs: {mixed: 0.25}}\n"
    file.write_text(file.read_text("utf-8").replace("speculative: {method: eagle3, num_tokens: 3}\n", shares), "utf-8")
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 8), longest=40), "utf-8")
    data = tuned(call, file.name, *LOAD, "-e", machine)
    assert data["estimate"] is (machine == "h100")
    assert data["proposed"]["graphs"] <= 12


def test_drafters_count_and_what_is_assumed_comes_last(call: Run) -> None:
    """Without figures of acceptance, time per token rests on an assumption: in the last section and in the JSON."""
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 9), width=4, longest=20), "utf-8")
    Path("profile.yaml").write_text(codec.dumps(profile(tuple(Role), speculative=DRAFTS, spread=None)), "utf-8")
    data = tuned(call, *FLAGS, *EAGLE, *LOAD)
    assert set(data["proposed"]["eager_share"]) == {role.value for role in Role}
    said = " ".join(data["assumptions"])
    assert "acceptance" in said
    assert "spread" in said
    assert "my/drafter" in said
    lines = call("tune", *FLAGS, *EAGLE, *LOAD).out.splitlines()
    at = lines.index("Assumptions")
    assert at > lines.index("Today and proposed") > 3
    assert lines[at + 1].strip().startswith("assumed: ")


def test_observations_are_tuned_by_their_own_batches(call: Run, tmp_path: Path) -> None:
    """What an engine captured is today, what it ran is the traffic, and its acceptance counts.

    Its batches have no order, so that nothing is held out, whether the file is given or its folder.
    """
    spec = codec.load_spec(_spec(call))
    plan = codec.load_plan("spec.plan.yaml")
    recorder = Recorder(tmp_path / "observed", "seen")
    recorder.begin(replace(observation_of(plan), device="NVIDIA H200", model=spec.model.name))
    for _ in range(1200):
        recorder.count(Role.TARGET, 5, 20, 4, True, 0, None, Reason.RANK)
    recorder.draft([1200, 1200, 1200], [600, 300, 0])
    recorder.close()
    Path("profile.yaml").write_text(codec.dumps(profile(tuple(Role), speculative=DRAFTS)), "utf-8")
    data = tuned(call, "observed", "--profile", "profile.yaml")
    assert data["steps"] == {"chosen": 1200, "judged": 1200, "held_out": False, "least": 1000}
    assert tuned(call, "observed/seen.yaml", "--profile", "profile.yaml")["steps"] == data["steps"]
    stdin = Path("observed/seen.yaml").read_bytes()
    for name in ("-", "/dev/stdin"):
        ran = call("tune", name, "--profile", "profile.yaml", "--format", "json", stdin=stdin)
        assert ran.document(0)["today"] == data["today"]
    assert data["today"]["graphs"] == plan.num_graphs
    step, token = data["today"]["mean_step_ms"], data["today"]["token_ms"]
    assert token == pytest.approx(step / (1 + 900 / 1200), rel=1e-4)  # the document is rounded


def _spec(call: Run) -> str:
    """Write the spec and the plan of a deployment with a drafter, and return the spec's name."""
    Path("spec.yaml").write_text(
        f"version: 1\nmodel: {{name: {MODEL.name}, num_layers: 36, num_heads: 32, num_kv_heads: 8, head_dim: 128, "
        "max_model_len: 40960}\nlimits: {max_num_reqs: 8, max_num_tokens: 48}\nbackend: flash_attention\n"
        "speculative: {method: eagle3, num_tokens: 3}\n",
        "utf-8",
    )
    assert call("plan", "spec.yaml", "-e", "h200", "-o", "spec.plan.yaml").code == 0
    return "spec.yaml"


BY_KIND = """\
version: 1
model: {{name: {model}, num_layers: 36, num_heads: 32, num_kv_heads: 8, head_dim: 128, max_model_len: 40960}}
limits: {{max_num_reqs: 8, max_num_tokens: 64}}
mode: {mode}
backend: flash_attention
sizes: {{policy: explicit, num_tokens: [2, 35, 36, 53, 61], num_reqs: [1, 2, 3, 6, 8]}}
budget: {{{budget}}}
"""


def test_a_budget_by_kind_holds_for_what_is_kept_of_today_too(call: Run) -> None:
    """Without prompts in the load, today's graphs of mixed batches are kept; the kind has its bound all the same."""
    lines = "".join(f"{log_lines.vllm_iteration(0, step, (0, 0), (5, 5))}\n" for step in range(3600))
    Path("vllm.log").write_text(lines, "utf-8")
    Path("spec.yaml").write_text(
        BY_KIND.format(model=MODEL.name, mode="PIECEWISE", budget="graphs: {decode: 15, mixed: 2}"), "utf-8"
    )
    # Above 16 tokens a graph gains nothing, so the largest one of today is none that costs choose.
    costs = profile()
    pieces = CostCurve(role=Role.TARGET, mode=GraphMode.PIECEWISE, tokens=(8, 16, 17), milliseconds=(1.7, 1.8, 5.0))
    curves = (pieces, *(each for each in costs.curves if each.mode is not GraphMode.PIECEWISE))
    Path("profile.yaml").write_text(codec.dumps(replace(costs, curves=curves)), "utf-8")
    assert tuned(call, "spec.yaml", "-e", "h200", *LOAD, "-o", "out")["verdict"] == "change"
    (role,) = codec.load_plan("out/plan.yaml").roles
    assert len(role.entries) <= 2


def test_shares_of_a_budget_are_of_its_graphs(call: Run) -> None:
    """Not of each number of graphs that is tried: the same bounds in numbers give the same table."""
    Path("vllm.log").write_text(vllm_log(3600, (1, 3, 5, 7), longest=48), "utf-8")
    found = []
    for budget in ("graphs: {decode: 0.5, mixed: 0.25}", "graphs: {decode: 10, mixed: 5}"):
        text = BY_KIND.format(model=MODEL.name, mode="FULL_AND_PIECEWISE", budget=f"max_graphs: 20, {budget}")
        Path("spec.yaml").write_text(text, "utf-8")
        found.append(tuned(call, "spec.yaml", "-e", "h200", *LOAD))
    assert found[0] == found[1]


def test_traffic_of_other_limits_is_counted_and_said(call: Run) -> None:
    """Steps with more requests than run together here are left out, and decodes of another length named."""
    small = ("vllm", MODEL.name, "--max-num-seqs", "6", "--max-num-batched-tokens", "64")
    Path("vllm.log").write_text(vllm_log(7500, (3, 5, 9, 11), longest=48), "utf-8")
    data = tuned(call, *small, *LOAD)
    assert 1000 <= data["steps"]["judged"] < 2000
    assert any("beyond the limits" in note for note in data["notes"])
    Path("vllm.log").write_text(vllm_log(3600, (3, 5), width=2, longest=20), "utf-8")
    assumed = " ".join(tuned(call, *FLAGS, *LOAD)["assumptions"])
    assert "steps are decodes of query length 2; this deployment has those of 1: they count with the tokens" in assumed


def test_batches_of_roles_that_do_not_run_are_named(call: Run) -> None:
    """Traffic with a drafter's batches, for a deployment without one."""
    assert call("traffic", "vllm.log", "-o", "traffic.yaml").code == 0
    load = codec.load_traffic("traffic.yaml")
    draft = attrs.evolve(load.batches[0], role=Role.DRAFT_DECODE, num_reqs=2, num_tokens=2, query_len=1)
    Path("traffic.yaml").write_text(codec.dumps(replace(load, batches=(*load.batches, draft))), "utf-8")
    words = (*FLAGS, "--traffic", "traffic.yaml", "--profile", "profile.yaml")
    assert any("draft_decode" in note for note in tuned(call, *words)["notes"])
    Path("traffic.yaml").write_text(codec.dumps(replace(load, batches=(draft,))), "utf-8")
    ran = call("tune", *words)
    assert ran.code == 1
    assert "no batches of the target, only of draft_decode" in ran.err


@pytest.mark.parametrize("objective", ["p90", "regret"])
def test_graphs_are_compared_by_the_objective(call: Run, objective: str) -> None:
    """What is made least is in the table of graphs, on both sides and on the page, and never grows with graphs."""
    data = tuned(call, *FLAGS, *LOAD, "--objective", objective, "--html", "page.html")
    assert data["objective"] == objective
    ranks = [(each["objective"], each["mean_step_ms"]) for each in data["pareto"] if each["within"]]
    assert data["proposed"]["objective"] <= data["today"]["objective"] * (1 + 1e-9)
    assert min(ranks)[0] * 1.026 >= data["proposed"]["objective"]  # chosen on other steps than judged
    page = Path("page.html").read_text("utf-8")
    heads = [head for head in re.findall("<tr>.*?</tr>", page, re.DOTALL) if ">graphs<" in head]
    assert any({"p90": ">p90 step<", "regret": ">at worst<"}[objective] in head for head in heads)
    assert {"p90": "p90 step by graphs", "regret": "Worst step by graphs"}[objective] in page


def test_a_percentile_does_not_pay_with_the_mean(call: Run) -> None:
    """Where few graphs have the same percentile, since that step runs eager, the mean step still counts."""
    Path("vllm.log").write_text(vllm_log(6000, (3, 5, 9, 11), longest=64, seed=3), "utf-8")
    data = tuned(call, *FLAGS, *LOAD, "--objective", "p99.9")
    assert data["proposed"]["mean_step_ms"] <= data["today"]["mean_step_ms"] * 1.005


def test_a_command_may_be_one_argument(call: Run, document: Any) -> None:
    """Quoted as a whole, with its variables, or without ``serve``: the same answer."""
    words = " ".join(FLAGS[1:])
    for command in (f"VLLM_USE_V1=1 vllm serve {words}", f"vllm {words}"):
        assert tuned(call, command, *LOAD) | {"commands": []} == document | {"commands": []}


def test_budgets_that_leave_no_graph_name_themselves(call: Run) -> None:
    """A budget of next to nothing: what it is, and what the cheapest graph takes."""
    for name, value, text in (
        ("--memory", "1MiB", "memory 1MiB, where the cheapest takes 30MiB"),
        ("--seconds", "0.51", "seconds 0.51, where the cheapest takes 0.55"),
    ):
        data = tuned(call, *FLAGS, *LOAD, name, value, code=2)
        assert (data["verdict"], data["commands"]) == ("over_budget", [])
        (note,) = [each for each in data["notes"] if "no graph" in each]
        assert text in note


def test_budgets_below_what_cannot_run_eager_are_refused(call: Run) -> None:
    """Not the profile is to blame: the budget is named, with the smallest that would do; so where it is implied."""
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 7), width=4, longest=15), "utf-8")
    known = profile(tuple(Role), speculative=DRAFTS)
    curves = tuple(each for each in known.curves if each.mode.allowed or each.role is not Role.DRAFT_DECODE)
    Path("profile.yaml").write_text(codec.dumps(replace(known, curves=curves)), "utf-8")
    words = (_spec(call), *LOAD)
    data = tuned(call, *words, "--max-graphs", "1", code=2)
    assert data["proposed"]["eager_share"]["draft_decode"] == 0
    assert "today's graphs exceed the budget" in data["reason"]
    assert "CP052 target: every decode runs eager" in data["reason"]
    for name, value, least in (("--memory", "29MiB", "30MiB"), ("--seconds", "0.52", "0.55")):
        ran = call("tune", *words, name, value)
        assert ran.code == 1
        assert f"budget.{name[2:]}: {name[2:]} {value}" in ran.err
        assert "draft_decode" in ran.err
        assert f"the smallest budget is {least}; raise it" in ran.err
        assert tuned(call, *words, name, least, code=2)["proposed"]["eager_share"]["draft_decode"] == 0


def test_plans_are_refused_with_what_to_tune_instead(call: Run) -> None:
    """A plan has no policy to change."""
    _spec(call)
    ran = call("tune", "spec.plan.yaml", *LOAD)
    assert ran.code == 1
    assert "tune its spec" in ran.err
