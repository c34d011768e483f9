"""The command ``ranks``: vectors from a file, the table, and what its errors say."""

import json
import subprocess
import sys

import pytest

from capture_planner.modes import Role

PLAN = "plans/locked/qwen3-8b-eagle3.h100.yaml"
LORA = "plans/locked/llama-3.1-8b-lora8.a100.yaml"
EIGHT = "plans/locked/deepseek-v3-mtp-dp8.h200.yaml"
DECODES = {"role": "target", "num_reqs": 5, "num_tokens": 20, "query_len": 4}
PROMPT = {"role": "target", "num_reqs": 1, "num_tokens": 100, "past_prompt": False}


@pytest.fixture
def run(pytestconfig, monkeypatch, capsys):
    """Run the command in this process, from the repository's root."""
    from capture_planner import cli

    monkeypatch.chdir(pytestconfig.rootpath)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["capture-planner", "ranks", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return end.value.code, out, err

    return run


@pytest.fixture
def written(tmp_path):
    """Write vectors, one a line, and return the file."""

    def write(*lines):
        path = tmp_path / "vectors.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def test_a_line_is_answered_with_a_line(run, written):
    """Entry and reason for all, batch and padding for each rank."""
    lines = [DECODES, None], [DECODES, PROMPT], [DECODES | {"captured": False}, DECODES], [None, None]
    code, out, _ = run(PLAN, "--vectors", written(*lines))
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    for answer, asked in zip(answers, lines, strict=True):
        assert list(answer) == ["role", "mode", "entry", "reason", "joint", "draft_tokens", "ranks"]
        assert [rank["idle"] for rank in answer["ranks"]] == [item is None for item in asked]
    assert [answer["mode"] for answer in answers] == ["FULL", "PIECEWISE", "NONE", "NONE"]
    assert [answer["reason"] for answer in answers] == [None, None, "rank", "idle"]
    first, second, third, last = answers
    assert first["entry"]["query_len"] == 4
    assert [rank["padded_reqs"] for rank in first["ranks"]] == [
        first["entry"]["num_reqs"] - 5,
        first["entry"]["num_reqs"] - 1,
    ]
    assert first["ranks"][1]["runs"]["num_tokens"] == 4
    assert second["joint"] == {
        "role": "target", "num_reqs": 5, "num_tokens": 100, "query_len": None, "past_prompt": False,
        "active_loras": 0, "max_query_len": None,
    }  # fmt: skip
    assert [rank["message"] for rank in third["ranks"]] == [
        "all run eager: this rank has no graphs",
        "all run eager: rank 0 has no graphs",
    ]
    assert (last["joint"], last["draft_tokens"]) == (None, None)
    assert [rank["runs"] for rank in last["ranks"]] == [None, None]


def test_an_idle_rank_can_be_without_graphs(run, written):
    """An object of that key alone is an idle rank."""
    _, out, _ = run(PLAN, "--vectors", written([DECODES, {"captured": False}, {"captured": True}], "", "  "))
    (answer,) = map(json.loads, out.splitlines())
    assert [(rank["idle"], rank["captured"]) for rank in answer["ranks"]] == [
        (False, True),
        (True, False),
        (True, True),
    ]
    assert answer["reason"] == "rank"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[", "not JSON"),
        ("[" * 5000, "not JSON"),
        ("{}", "expected a list with a batch, or null, for each rank"),
        ("[]", "expected a list with a batch, or null, for each rank"),
        ("null", "expected a list with a batch, or null, for each rank"),
        ("[null, 3]", "[1]: expected a mapping"),
        ('[null, {"role": "target", "num_reqs": 1}]', "[1].num_tokens: is missing"),
        ('[{"captured": 1}]', "[0].captured: expected true or false, got 1"),
        ('[{"captured": true, "captured": true}]', "captured: is given twice"),
        ([None, DECODES | {"num_reqs": 0}], "[1].num_reqs: a batch has at least one request"),
        ([None, DECODES | {"num_tokens": 4}], "[1].num_tokens: fewer tokens than requests"),
        ([None, DECODES | {"active_loras": -1}], "[1].active_loras: must be at least 0"),
        (
            [None, DECODES | {"rank": 1}],
            "[1].rank: unknown key; known are role, num_reqs, num_tokens, query_len, "
            "max_query_len, past_prompt, active_loras, captured, missing",
        ),
        ([3, None], "[0]: expected a mapping, got 3"),
        ([DECODES], "expected 2 to 16 ranks, got 1"),
        ([DECODES] * 17, "expected 2 to 16 ranks, got 17"),
        ([None, {"missing": 1}], "[1].missing: expected true or false, got 1"),
        ([DECODES | {"missing": True, "captured": False}, None], "[0].missing: a rank with"),
        ([DECODES, None, DECODES | {"role": "draft_prefill"}], "[2].role: expected target"),
        ([DECODES | {"role": "drafter"}], "[0].role: expected one of target, draft_prefill"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_answered(run, written, line, says):
    """With file, line and rank; all wrong lines at once."""
    path = written([DECODES, None], "", line, [None, DECODES], line)
    code, out, err = run(PLAN, "--vectors", path)
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert first.startswith(f"error: {path}:3: {says}")
    assert second.startswith(f"error: {path}:5: {says}")


@pytest.mark.parametrize("own", [DECODES, {}])
def test_a_rank_can_lose_the_graph_that_all_would_replay(run, written, own):
    """Beside its batch, or alone where it is idle: all take the next graph that every rank has."""
    lines = [DECODES, own or None], [DECODES, own | {"missing": True}], [DECODES, own | {"missing": False}]
    _, out, _ = run(PLAN, "--vectors", written(*lines))
    whole, lost, kept = map(json.loads, out.splitlines())
    assert kept == whole
    assert lost["entry"] != whole["entry"]
    assert lost["entry"]["num_tokens"] > whole["entry"]["num_tokens"]
    assert [rank["idle"] for rank in lost["ranks"]] == [False, not own]
    assert "this rank has not captured FULL" in lost["ranks"][1]["message"]
    assert "rank 1 has not captured FULL" in lost["ranks"][0]["message"]


def test_losing_a_graph_where_there_is_none_changes_nothing(run, written):
    """Ranks that run eager anyway have nothing to lose."""
    eager = PROMPT | {"num_tokens": 8192}
    _, out, _ = run(PLAN, "--vectors", written([eager, None], [eager, {"missing": True}], [None, {"missing": True}]))
    whole, lost, idle = map(json.loads, out.splitlines())
    assert lost == whole
    assert idle["reason"] == "idle"


@pytest.mark.parametrize(("plan", "count", "noted"), [(EIGHT, 8, False), (EIGHT, 2, True), (PLAN, 2, False)])
def test_another_number_of_ranks_than_the_plans_is_noted_once(run, written, plan, count, noted):
    """A plan of one rank has no number to differ from."""
    code, out, err = run(plan, "--vectors", written([None] * count, [None] * count))
    assert (code, len(out.splitlines())) == (0, 2)
    assert err == (f"note: a line has {count} ranks, but the plan has 8\n" if noted else "")


def test_every_wrong_rank_of_a_line_is_named(run, written):
    """Also as JSON, with the path of each."""
    path = written([DECODES | {"num_reqs": 0, "num_tokens": -1}, 3, DECODES])
    code, out, err = run(PLAN, "--vectors", path, "--format", "json")
    assert (code, len(err.splitlines())) == (1, 2)
    assert [(e["line"], e["path"]) for e in json.loads(out)["errors"]] == [(1, [0, "num_tokens"]), (1, [1])]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([PLAN, "--vectors", "nowhere.jsonl"], "nowhere.jsonl"),
        ([PLAN, "--ranks", "1"], "1 is not in the range"),
        ([PLAN, "--ranks", "17"], "17 is not in the range"),
        ([PLAN, "--role", "drafter"], "'drafter' is not one of"),
        ([PLAN, "--vectors", "pyproject.toml", "--ranks", "4"], "omit --ranks and --role"),
        ([PLAN, "--vectors", "pyproject.toml", "--role", "target"], "omit --ranks and --role"),
        (["plans/locked/llama-3.1-8b.h100.yaml", "--role", "draft_decode"], "the plan has no role draft_decode"),
    ],
)
def test_what_is_asked_wrongly(run, arguments, says):
    """Exit code 1 and a sentence."""
    code, _, err = run(*arguments)
    assert code == 1
    assert says in err


@pytest.mark.parametrize(("plan", "asked", "num_ranks"), [(PLAN, (), 4), (EIGHT, (), 8), (EIGHT, ("--ranks", 2), 2)])
def test_the_table_has_the_ranks_of_the_plan(run, plan, asked, num_ranks):
    """Four where the plan says nothing."""
    code, out, _ = run(plan, *asked)
    assert code == 0
    assert f"\n  0 to {num_ranks - 1} " in out
    for told in (
        "one rank is idle -> FULL",
        "one rank has no graphs -> eager",
        "all run eager: rank 0 has no graphs",
        "every rank is idle -> nothing",
    ):
        assert told in out


@pytest.mark.parametrize("role", Role)
def test_the_table_as_json(run, role):
    """The same cases as data, of the role that is asked for."""
    code, out, _ = run(PLAN, "--role", role, "--format", "json")
    shown = json.loads(out)["cases"]
    assert code == 0
    assert {case["role"] for case in shown} == {role}
    assert {len(case["ranks"]) for case in shown} == {4}
    prompts = {case["title"] for case in shown if "prompt" in case["title"]}
    assert bool(prompts) == (role is not Role.DRAFT_DECODE)


def test_the_table_of_a_plan_with_adapters(run):
    """A rank with adapters is among the cases."""
    assert "one rank has adapters -> FULL" in run(LORA)[1]


def test_a_role_that_never_runs_says_so(run, tmp_path, pytestconfig):
    """With one draft token there is no draft decode."""
    text = (pytestconfig.rootpath / "plans/specs/qwen3-8b-eagle3.yaml").read_text()
    spec = tmp_path / "spec.yaml"
    assert "num_tokens: 3" in text
    spec.write_text(text.replace("num_tokens: 3", "num_tokens: 1"))
    code, out, _ = run(spec, "-e", "h100", "--role", "draft_decode")
    assert (code, out) == (0, "draft_decode: never runs; the schedule drafts too few tokens\n")
    code, out, _ = run(spec, "-e", "h100", "--role", "draft_decode", "--format", "json")
    assert code == 0
    assert json.loads(out) == {"assumptions": [], "cases": [], "why": "never runs; the schedule drafts too few tokens"}


def test_a_spec_will_do_and_standard_input_too(pytestconfig):
    """As for the other commands."""
    done = subprocess.run(
        [sys.executable, "-m", "capture_planner", "ranks", "plans/specs/qwen3-8b-eagle3.yaml", "-e", "h100",
         "--vectors", "-"],
        input=json.dumps([DECODES, None]),
        capture_output=True,
        text=True,
        check=True,
        cwd=pytestconfig.rootpath,
    )  # fmt: skip
    assert json.loads(done.stdout)["mode"] == "FULL"
