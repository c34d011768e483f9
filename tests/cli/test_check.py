"""``check`` and ``diff``: findings in every format, and drift."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from capture_planner.analysis import lint
from capture_planner.codec import dumps, load_plan
from capture_planner.engines.check import ENGINE_RULES, OBSERVED_RULES
from capture_planner.records._base import replace
from capture_planner.records.plan import Forecast
from capture_planner.records.promise import ExpectedSteps, Promise
from capture_planner.records.spec import Budget
from support.commands import PLAN, SPEC, TINY, TINY_PLAN, Run, edited

# check -------------------------------------------------------------------------------------------


def test_check_of_sound_plans(run: Run) -> None:
    ran = run("check", *sorted(str(path) for path in Path("plans/locked").glob("*.yaml")))
    assert ran.code == 0
    assert " warning" not in ran.out
    assert " error" not in ran.out


def test_notes_count_only_when_strict(run: Run) -> None:
    plan = "plans/locked/llama-3.2-3b-eagle-t4.t4.yaml"
    assert run("check", plan).code == 0
    ran = run("check", plan, "--strict")
    assert ran.code == 2
    assert ": note: CP" in ran.out


def test_check_of_a_spec_points_into_the_spec(run: Run) -> None:
    few = edited("few.yaml", "plans/specs/llama-3.1-8b.yaml", ("num_tokens: 8192", "num_tokens: 128"))
    ran = run("check", few, "-e", "h100")
    line = next(n for n, text in enumerate(Path(few).read_text().splitlines(), 1) if "limits:" in text)
    assert ran.code == 2
    assert f"few.yaml:{line}:" in ran.out
    assert "warning: CP003 tokens-limit-requests" in ran.out
    assert "1 file checked: 1 warning" in ran.out.splitlines()[-1]


@pytest.fixture
def unsound(folder: Path) -> str:
    """Return a plan that lost its waivers and gained a graph that nothing reaches."""
    text = Path(TINY_PLAN).read_text("utf-8")
    old = "num_reqs: [8, 4,"
    assert old in text
    Path("unsound.yaml").write_text(text.replace(old, "num_reqs: [9, 8, 4,", 1), "utf-8")
    return "unsound.yaml"


def test_findings_exit_with_2(run: Run, unsound: str) -> None:
    ran = run("check", unsound)
    assert ran.code == 2
    assert ": warning: CP020 unreachable-entry: target: 1 of" in ran.out


def test_findings_as_json(run: Run, unsound: str) -> None:
    data = run("check", unsound, "--format", "json").document(2)
    assert set(data) == {"assumptions", "findings", "drift", "budgets"}
    for finding in data["findings"]:
        assert set(finding) == {
            "code", "name", "severity", "class", "role", "message", "remedy", "threads", "file", "line",
            "column",
        }  # fmt: skip
        assert finding["code"] in lint.RULES
        assert finding["file"] == unsound
        assert finding["line"] > 1


def test_findings_for_github(run: Run, unsound: str) -> None:
    ran = run("check", unsound, "--format", "github")
    assert ran.code == 2
    for line in ran.out.splitlines():
        command, properties, _message = line.split(" ", 1)[0], *line.split(" ", 1)[1].split("::", 1)
        assert command in ("::error", "::warning", "::notice")
        assert properties.startswith("file=unsound.yaml,line=")
        assert ",title=CP" in properties


def test_nothing_to_say_is_nothing_for_github(run: Run) -> None:
    ran = run("check", "plans/locked/llama-3.1-8b.h100.yaml", "--format", "github")
    assert (ran.code, ran.out) == (0, "")


def test_names_are_escaped_for_github(run: Run, unsound: str) -> None:
    shutil.copy(unsound, "a:b,c%d.yaml")
    out = run("check", "a:b,c%d.yaml", "--format", "github").out
    assert "file=a%3Ab%2Cc%25d.yaml,line=" in out


def test_sarif(run: Run, unsound: str) -> None:
    data = run("check", unsound, "--spec", SPEC, "--format", "sarif").document(2)
    assert data["version"] == "2.1.0"
    assert data["$schema"].endswith("sarif-2.1.0.json")
    (once,) = data["runs"]
    driver = once["tool"]["driver"]
    assert driver["name"] == "capture-planner"
    ids = [rule["id"] for rule in driver["rules"]]
    assert set(ids) == {*lint.RULES, *ENGINE_RULES, *OBSERVED_RULES, "CP099"}
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["text"]
    assert {result["ruleId"] for result in once["results"]} >= {"CP020", "CP099"}
    for result in once["results"]:
        assert result["ruleId"] in ids
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        expected = SPEC if result["ruleId"] == "CP099" else unsound
        assert place["artifactLocation"]["uri"] in (expected, unsound)
        assert place["region"]["startLine"] >= 1
        assert place["region"]["startColumn"] >= 1


def test_no_drift(run: Run) -> None:
    ran = run("check", PLAN, "--spec", SPEC)
    assert ran.code == 0
    assert "CP099" not in ran.out


def test_promise_is_no_drift(run: Run, folder: Path) -> None:
    """It is of an engine that was observed: planning again gives none."""
    side = ExpectedSteps(mean_step_ms=10.0, error_ms=0.01)
    promised = replace(load_plan(PLAN), promise=Promise(costs="vllm 0.33.0", steps=5000, before=side, after=side))
    (folder / "plan.yaml").write_text(dumps(promised), "utf-8")
    ran = run("check", str(folder / "plan.yaml"), "--spec", SPEC)
    assert ran.code == 0
    assert "CP099" not in ran.out


@pytest.fixture
def drifted(folder: Path) -> str:
    """Return a spec that moved on after its plan was made."""
    return edited("moved.yaml", TINY, ("max_num_reqs: 8", "max_num_reqs: 12"))


@pytest.mark.parametrize("form", ["text", "github", "sarif", "json"])
def test_drift_is_found(run: Run, drifted: str, form: str) -> None:
    ran = run("check", TINY_PLAN, "--spec", drifted, "--format", form)
    assert ran.code == 2
    assert f"limits.max_num_reqs: {TINY_PLAN} has 8, the spec gives 12" in ran.out


def test_drift_as_json(run: Run, drifted: str) -> None:
    drift = run("check", TINY_PLAN, "--spec", drifted, "--format", "json").document(2)["drift"]
    assert drift
    for difference in drift:
        assert set(difference) == {"file", "message", "line", "column"}


def test_drift_by_hand_is_at_the_line_of_the_plan(run: Run) -> None:
    """The spec, which nobody touched, is not to blame; where its sizes change, it is."""
    graphs = "query_len: 1, num_reqs: [8, 4, 2"
    assert graphs in Path(TINY_PLAN).read_text("utf-8")
    plan = edited("edited.cpu.yaml", TINY_PLAN, (graphs, graphs.replace(" 4,", "")))
    listed = run("check", plan, "--spec", TINY, "--format", "json").document(2)["drift"]
    lines = Path(plan).read_text("utf-8").splitlines()
    for difference in listed:
        assert difference["file"] == plan
        assert graphs[:24] in lines[difference["line"] - 1] or "entries" in lines[difference["line"] - 2]
        assert "the plan was edited" in difference["message"]
    assert len(listed) == 2
    spec = edited("sized.yaml", TINY, ("powers_of_two", "default"))
    listed = run("check", TINY_PLAN, "--spec", spec, "--format", "json").document(2)["drift"]
    assert {difference["file"] for difference in listed} == {spec}


def test_drift_goes_away_by_planning_again(run: Run, drifted: str) -> None:
    assert run("plan", drifted, "-o", TINY_PLAN).code == 0
    assert run("check", TINY_PLAN, "--spec", drifted).code == 0


# diff --------------------------------------------------------------------------------------------


def test_diff_of_equal_plans(run: Run) -> None:
    ran = run("diff", PLAN, SPEC, "-e", "h100")
    assert (ran.code, ran.out) == (0, "the plans are the same\n")
    assert run("diff", PLAN, PLAN, "--format", "json").data == {"assumptions": [], "changes": []}


def test_diff_in_words(run: Run, drifted: str) -> None:
    ran = run("diff", TINY_PLAN, drifted, "-e", "cpu")
    assert ran.code == 2
    lines = ran.out.splitlines()
    assert lines[0] == "limits: max_num_reqs 8 became 12"
    assert "target also captures 1 graph: FULL decodes of 3 at 12 requests" in lines


def test_diff_is_the_other_way_round(run: Run, drifted: str) -> None:
    run("plan", drifted, "-o", "moved.cpu.yaml")
    out = run("diff", "moved.cpu.yaml", TINY_PLAN).out
    assert "target no longer captures 1 graph: FULL decodes of 3 at 12 requests" in out


def test_diff_as_json(run: Run, drifted: str) -> None:
    changes = run("diff", TINY_PLAN, drifted, "-e", "cpu", "--format", "json").document(2)["changes"]
    for change in changes:
        assert set(change) == {"role", "what", "message", "entries", "fields"}
    (added,) = [c for c in changes if c["what"] == "added" and c["role"] == "target"]
    assert [entry["num_reqs"] for entry in added["entries"]] == [12]


def test_diff_says_when_a_mode_changes(run: Run) -> None:
    spec = "plans/specs/llama-3.2-3b-eagle-t4.yaml"
    run("plan", spec, "-o", "new.h100.yaml")
    out = run("diff", "plans/locked/llama-3.2-3b-eagle-t4.t4.yaml", "new.h100.yaml").out
    assert "target: mode PIECEWISE became FULL_AND_PIECEWISE" in out
    assert "environment: name t4 became h100" in out


def test_check_of_measured_sizes_says_what_they_take_of_the_budget(run: Run, tmp_path: Path) -> None:
    """A measured plan had no line about its budget, as `plan` prints one: both say what is taken of each limit."""
    digest = f"sha256:{0:064x}"
    taken = {"graphs": 41, "mib": 1200.0, "seconds": 13.0, "next_graph_ms": 0.5, "prior": 0.0}
    forecast = Forecast(profile=digest, expected=1.0, mean_step_ms=1.0, regret=0.0, eager_share=0.0, **taken)
    measured = replace(load_plan(TINY_PLAN), forecast=forecast, budget=Budget(max_graphs=64, seconds=20.0))
    file = tmp_path / "measured.yaml"
    file.write_text(dumps(measured))
    line = "budget: 41 of 64 graphs, 13 of 20 s, by the profile; one more graph next to others takes 0.5 ms off the "
    line += "mean step"
    assert f"{file}: {line}\n" in run("check", str(file)).out
    assert line in run("show", str(file)).out
    # Without a graph the budget holds none, so nothing is known of one more.
    none = replace(forecast, graphs=0, mib=0.0, seconds=0.0, next_graph_ms=0.0)
    file.write_text(dumps(replace(measured, forecast=none)))
    assert f"{file}: budget: 0 of 64 graphs, 0 of 20 s, by the profile\n" in run("check", str(file)).out


def test_fixes_together_are_of_findings_that_the_load_reaches(call: Run) -> None:
    """What no load reaches costs no graph."""
    line = ("vllm", "--max-num-seqs", "300", "--cudagraph-capture-sizes", "8", "250", "--environment", "h100")
    assert "together (" in call("check", "--engine", *line).out
    assert "together (" not in call("check", "--engine", *line, "--concurrency", "100").out
