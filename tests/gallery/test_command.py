"""The command gallery: lists mutants, looks for them, and fails where one is not found."""

import importlib.util
import json

import attrs
import pytest

import gallery
from capture_planner.analysis.lint.core import link
from gallery import MUTANTS, named

QUICK = ("prefill-sizes-far-apart", "idle-rank-submits-nothing")


@pytest.fixture(autouse=True)
def same_threads(monkeypatch):
    """What the command does to torch is undone, as ``executing`` does for others."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_all_are_listed(call):
    """In the order of the gallery, with threads that can be opened; nothing is run."""
    listed = call("gallery", "--format", "json").data["mutants"]
    assert [made["name"] for made in listed] == [mutant.name for mutant in MUTANTS]
    for made, mutant in zip(listed, MUTANTS, strict=True):
        assert (made["class"], made["planted"], made["says"]) == (
            mutant.bug_class.name,
            mutant.kind,
            mutant.says,
        )
        assert made["threads"] == {thread: link(thread) for thread in mutant.threads}
    text = " ".join(call("gallery").out.split())
    for mutant in MUTANTS:
        assert f"{mutant.name} {mutant.bug_class.name} {mutant.kind} " in text


def test_some_are_listed_once_each(call):
    """As named, in that order."""
    listed = call("gallery", *QUICK, QUICK[0], "--format", "json").data["mutants"]
    assert [made["name"] for made in listed] == list(QUICK)


def test_what_is_caught_is_shown_with_what_found_it(call):
    """The check or rule, what it says, and a command that shows it again."""
    found = call("gallery", "--catch", "--seed", "5", *QUICK, "--format", "json").data
    assert (found["seed"], found["profile"]) == (5, "default")
    plan, ranks = (made["caught"] for made in found["mutants"])
    assert (plan["by"], ranks["by"]) == ("CP023", "agreed")
    assert plan["command"] == f"capture-planner gallery {QUICK[0]} --catch"
    assert ranks["command"] == f"capture-planner gallery {QUICK[1]} --catch --seed 5"
    again = call(*ranks["command"].split()[1:], "--format", "json").data
    assert again["mutants"][0]["caught"] == ranks
    text = call("gallery", "--catch", *QUICK).out
    assert "caught by CP023" in text
    assert text.endswith("2 of 2 caught\n")


def test_one_that_is_missed_ends_in_exit_code_1(call, monkeypatch):
    """And is named, beside those that were found."""
    healthy = attrs.evolve(named(QUICK[0]), name="no-bug", plan=gallery.HEALTHY[QUICK[0]])
    monkeypatch.setattr(gallery, "MUTANTS", (*MUTANTS, healthy))
    ran = call("gallery", "--catch", "no-bug", QUICK[0])
    assert ran.code == 1
    assert "no-bug (C, plan): not caught" in ran.out
    assert ran.out.endswith("1 of 2 caught\n")
    document = call("gallery", "--catch", "no-bug", "--format", "json").document(1)
    assert document["mutants"][0]["caught"] is None


def test_the_case_of_a_backend_is_shown(call, monkeypatch):
    """Profile and seed go to the suite; its smallest case is printed whole, and the command has both."""
    seen = []
    mutant = attrs.evolve(named(QUICK[0]), name="planted", plan=None, backend=lambda: None)

    def catch(mutant, *, seed, profile):
        seen.append((seed, profile.name))
        return gallery.Caught(mutant=mutant, by="rows", says="row 0 differs", case='{"scene": {}}')

    monkeypatch.setattr(gallery, "MUTANTS", (mutant,))
    monkeypatch.setattr(gallery, "catch", catch)
    ran = call("gallery", "--catch", "--seed", "7", "--profile", "thorough")
    assert seen == [(7, "thorough")]
    assert ran.out.splitlines() == [
        "planted (C, backend): caught by rows",
        "  row 0 differs",
        '  case: {"scene": {}}',
        "  again: capture-planner gallery planted --catch --seed 7 --profile thorough",
        "1 of 1 caught",
    ]


@pytest.mark.parametrize("option", [("--seed", "3"), ("--seed", "0"), ("--profile", "thorough")])
def test_what_only_a_search_has_is_refused_without_one(call, option):
    """Nothing is drawn for a list; what somebody gave is not left aside in silence."""
    ran = call("gallery", *option)
    assert (ran.code, ran.out) == (1, "")
    assert f"{option[0]} goes with --catch" in ran.err


def test_a_name_that_no_mutant_has_is_an_error(call):
    """With the nearest one."""
    ran = call("gallery", "doubling-size")
    assert ran.code == 1
    assert "no mutant is named 'doubling-size'; did you mean doubling-sizes?" in ran.err


def test_without_hypothesis_it_says_what_to_install(call, monkeypatch):
    """No traceback of an import."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "hypothesis" else real(name)
    )
    ran = call("gallery", "--format", "json")
    assert ran.code == 1
    assert "needs hypothesis" in ran.err
    assert "testing" in json.loads(ran.out)["errors"][0]["message"]
