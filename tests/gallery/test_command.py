"""``python -m gallery``: lists mutants, searches for them, and fails if one is missed."""

import json

import attrs
import pytest

pytest.importorskip("torch")

import gallery
from capture_planner.analysis.lint.core import link
from capture_planner_conformance import DEFAULT
from gallery import MUTANTS, campaign, named
from gallery.__main__ import main

QUICK = ("prefill-sizes-far-apart", "idle-rank-submits-nothing")


@pytest.fixture
def command(capsys):
    """Run the command in this process; returns its exit code and what it printed."""

    def run(*arguments):
        try:
            code = main([*arguments, "--jobs", "1"])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_list_has_every_mutant_in_order(command):
    """With threads that can be opened; nothing is searched."""
    _, out, _ = command("--format", "json")
    listed = json.loads(out)["mutants"]
    assert [entry["name"] for entry in listed] == [mutant.name for mutant in MUTANTS]
    for entry, mutant in zip(listed, MUTANTS, strict=True):
        assert entry["threads"] == {thread: link(thread) for thread in mutant.threads}
        assert entry == campaign.mutant_data(mutant)
    _, text, _ = command()
    for mutant in MUTANTS:
        assert f"{mutant.name} ({mutant.bug_class.name}, {mutant.kind}): {mutant.says}\n" in text
    assert text.endswith(f"\n{len(MUTANTS)} mutants\n")


def test_list_takes_each_name_once(command):
    """In the order of the command line."""
    _, out, _ = command(*QUICK, QUICK[0], "--format", "json")
    assert [entry["name"] for entry in json.loads(out)["mutants"]] == list(QUICK)


def test_catch_shows_what_found_a_mutant(command):
    """The check or rule, its finding, and a command that finds it again."""
    code, out, _ = command("--catch", "--seed", "5", *QUICK)
    assert code == 0
    assert "prefill-sizes-far-apart (C, plan): found with 1 of 1 seed by CP023\n  CP023 heavy-padding" in out
    assert f"  again: PYTHONPATH=tests python -m gallery {QUICK[0]} --catch\n" in out
    assert f"  again: PYTHONPATH=tests python -m gallery {QUICK[1]} --catch --seed 5\n" in out
    assert out.endswith("2 of 2 mutants found with every seed\n")
    _, first, _ = command(QUICK[1], "--catch", "--seed", "5", "--format", "json")
    _, again, _ = command(QUICK[1], "--catch", "--seed", "5", "--format", "json")
    found = [json.loads(text)["mutants"][0] for text in (first, again)]
    assert found[0]["found"] == found[1]["found"]
    assert found[0]["by"] == {"agreed": 1}


def test_catch_fails_if_a_mutant_is_missed(command, monkeypatch):
    """The report names it, next to those that were found."""
    healthy = attrs.evolve(named(QUICK[0]), name="no-bug", plan=gallery.HEALTHY[QUICK[0]])
    monkeypatch.setattr(gallery, "MUTANTS", (*MUTANTS, healthy))
    code, out, err = command("--catch", "no-bug", QUICK[0], "--seeds", "2")
    assert code == 1
    assert "no-bug (C, plan): found with 0 of 2 seeds\n" in out
    assert out.endswith("1 of 2 mutants found with every seed\n")
    assert "no-bug, seed 0: missed" in err
    code, out, _ = command("--catch", "no-bug", "--format", "json")
    data = json.loads(out)
    assert code == 1
    assert data["mutants"][0]["missed"] == [0]
    assert data["targets"]["every mutant is found with every seed"] is False


def test_catch_without_names_searches_what_is_healthy(command, monkeypatch):
    """A fault there fails the campaign, with its name and seed; an error of a search does as well."""
    finds = {"backend a": lambda search: None, "plan b": lambda search: "bad"}
    monkeypatch.setattr(campaign, "healthy", lambda: finds)
    monkeypatch.setattr(gallery, "MUTANTS", (named(QUICK[0]),))
    code, out, _ = command("--catch", "--seeds", "2", "--format", "json")
    data = json.loads(out)
    assert code == 1
    assert data["healthy"]["searched"] == {"backend a": 2, "plan b": 1}
    assert data["healthy"]["faults"] == [{"name": "plan b", "seed": 0, "says": "bad"}]
    finds["plan b"] = lambda search: 1 // 0
    code, out, _ = command("--catch")
    assert code == 1
    assert "plan b, seed 0: ZeroDivisionError" in out
    del finds["plan b"]
    assert command("--catch")[0] == 0


def test_catch_passes_profile_and_seed_to_the_suite(command, monkeypatch):
    """The case is printed whole, and the command has both."""
    seen = []
    mutant = attrs.evolve(named(QUICK[0]), name="planted", plan=None, backend=lambda: None)

    def detect(mutant, *, seed, profile, minimize):
        seen.append((seed, profile.name, profile.examples, minimize))
        return gallery.Detection(mutant=mutant, by="rows", says="row 0 differs", case="")

    monkeypatch.setattr(gallery, "MUTANTS", (mutant,))
    monkeypatch.setattr(gallery, "detect", detect)
    _, out, _ = command("--catch", "planted", "--seed", "7", "--seeds", "2", "--profile", "thorough")
    assert seen == [(7, "thorough", 2000, True), (8, "thorough", 2000, False)]
    assert out.splitlines() == [
        "planted (C, backend): found with 2 of 2 seeds by rows",
        "  row 0 differs",
        "  again: PYTHONPATH=tests python -m gallery planted --catch --seed 7 --profile thorough",
        "1 of 1 mutant found with every seed",
    ]
    command("--catch", "planted", "--examples", "3")
    assert seen[-1] == (0, "3 scenes", 3, True)


def test_output_writes_the_results(command, tmp_path):
    """With where and how they were measured."""
    assert command("--catch", QUICK[0], "--output", str(tmp_path))[0] == 0
    (path,) = tmp_path.glob("gallery-*.json")
    written = json.loads(path.read_text("utf-8"))
    assert written["provenance"]["python"]
    assert written["mutants"][0]["hits"] == 1


@pytest.mark.parametrize("option", [("--seed", "3"), ("--seeds", "2"), ("--profile", "thorough"), ("--healthy",)])
def test_search_options_need_catch(command, option):
    """A list draws nothing: the option would be ignored."""
    code, out, err = command(*option)
    assert (code, out) == (2, "")
    assert f"{option[0]} needs --catch" in err


def test_unknown_names_are_refused_with_the_nearest(command):
    """Before anything is searched."""
    code, _, err = command("doubling-size", "--catch")
    assert code == 2
    assert "no mutant is named 'doubling-size'; did you mean doubling-sizes?" in err


def test_campaign_goes_on_where_it_stopped(command, tmp_path, monkeypatch):
    """Each result is in the file at once; a second run searches what is left, and reports all."""
    kept = tmp_path / "results.jsonl"
    assert command("--catch", QUICK[0], "--resume", str(kept))[0] == 0
    searched, run_search = [], campaign.run_search
    monkeypatch.setattr(campaign, "run_search", lambda search: searched.append(search.name) or run_search(search))
    with kept.open("a") as file:
        file.write('\n{"search": {"na')
    code, out, _ = command("--catch", *QUICK, "--resume", str(kept))
    assert (code, searched) == (0, [QUICK[1]])
    assert out.endswith("2 of 2 mutants found with every seed\n")


def test_campaign_stops_in_time_and_says_that_searches_are_left(command):
    """One search is finished, and the campaign is not."""
    code, out, _ = command("--catch", *QUICK, "--seconds", "0", "--format", "json")
    data = json.loads(out)
    assert code == 1
    assert data["targets"]["every search is done"] is False
    assert sorted((mutant["seeds"], mutant["left"]) for mutant in data["mutants"]) == [(0, 1), (1, 0)]
    _, out, _ = command("--catch", *QUICK, "--seconds", "0")
    assert "found with 0 of 0 seeds, 1 not tried\n" in out
    assert out.endswith("1 of 2 mutants found with every seed\n")


def test_what_is_healthy_is_searched_alone(command, monkeypatch):
    """Backends and ranks with every seed, plans once; mutant names are refused."""
    searched = []
    monkeypatch.setattr(
        campaign, "run_search", lambda search: searched.append(search) or campaign.Result(search=search, seconds=0.0)
    )
    code, out, _ = command("--catch", "--healthy", "--seeds", "2", "--jobs", "1")
    assert code == 0
    assert {search.name for search in searched} == {*campaign.healthy()}
    assert all(search.healthy for search in searched)
    assert sum(search.name == "backend reference" for search in searched) == 2
    assert out == f"healthy: {len(campaign.healthy())}, faults: 0\n"
    code, _, err = command("--catch", "--healthy", QUICK[0])
    assert (code, "leave the names out" in err) == (2, True)


def test_what_lacks_fewest_seeds_is_searched_first():
    """What is healthy comes last; each search that is not done is there once."""
    names = ["captured-to-32", "drafter-decides-for-the-target"]
    todo = list(campaign.searches([gallery.named(name) for name in names], range(4), DEFAULT, with_healthy=True))
    done = {search for search in todo if search.name == names[1] and search.seed < 3}
    left = campaign.remaining(todo, done)
    assert [search.name for search in left[:5]] == [names[1], *[names[0]] * 4]
    assert all(search.healthy for search in left[5:])
    assert {*left} == {*todo} - done
