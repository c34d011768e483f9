"""The gallery as a whole: what a mutant says of itself, and that no check is there for one of them."""

import ast
import re
from collections import Counter
from pathlib import Path

import attrs
import pytest

import capture_planner
import capture_planner_runner
import gallery
from capture_planner.analysis.lint import RULES, BugClass, Severity, lint
from capture_planner.analysis.lint.core import REPOSITORIES, link
from capture_planner.errors import RunError
from capture_planner_conformance import Check, SearchProfile
from gallery import MUTANTS, detect, named
from gallery.core import LATE, replaced
from support.runner_conformance import RunnerCheck

ROOT = Path(capture_planner.__file__).parent
TRIED = SearchProfile(name="tried", examples=1, steps=2)


def test_a_mutant_says_what_it_is():
    """One bug, planted in one place, with a sentence and threads that can be opened."""
    for mutant in MUTANTS:
        given = [mutant.backend, mutant.patch, mutant.plan, mutant.agreement, mutant.adapters, mutant.sampling]
        assert sum(place is not None for place in given) == 1, mutant.name
        assert mutant.kind in ("adapters", "backend", "runner", "plan", "ranks", "sampling"), mutant.name
        assert mutant.base is None or mutant.patch is not None, mutant.name
        assert mutant.name == mutant.name.lower().replace(" ", "-").replace("_", "-")
        assert mutant.says.strip(), mutant.name
        assert not mutant.says.endswith("."), mutant.name
        for thread in mutant.threads:
            assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", link(thread)), mutant.name


def test_a_thread_is_of_a_project_that_is_known_or_written_whole():
    """What cannot be opened is refused."""
    assert link("vllm#1") == f"https://github.com/{REPOSITORIES['vllm']}/issues/1"
    assert link("owner/name#2") == "https://github.com/owner/name/issues/2"
    with pytest.raises(KeyError):
        link("unheard-of#3")


def test_names_are_unique_and_found():
    """Each by its name; a wrong name has a hint."""
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert all(named(mutant.name) is mutant for mutant in MUTANTS)
    with pytest.raises(RunError, match=r"no mutant is named 'doubling-size'; did you mean doubling-sizes\?"):
        named("doubling-size")
    with pytest.raises(RunError, match="`python -m gallery` lists them"):
        named("0")


def test_each_place_has_a_mutant_that_ci_searches():
    """Late ones are mutants, and no place has late ones alone."""
    assert {mutant.name for mutant in MUTANTS} >= LATE
    assert {m.kind for m in MUTANTS if m.name not in LATE} == {m.kind for m in MUTANTS}


def test_mutants_are_in_order():
    """By class, by place, by name: the order of every list of them."""
    keys = [(mutant.bug_class.name, mutant.kind, mutant.name) for mutant in MUTANTS]
    assert keys == sorted(keys)


def test_what_is_planned_and_agreed_has_two_of_each_of_its_classes():
    """A class of one bug could be that bug."""
    classes = Counter(m.bug_class for m in MUTANTS if m.kind in ("plan", "ranks"))
    for kind in (BugClass.A, BugClass.B, BugClass.C, BugClass.G, BugClass.H, BugClass.I, BugClass.J):
        assert classes[kind] >= 2


def test_every_check_of_the_suite_is_a_law():
    """In a sentence, in the enum and for people; no two checks hold to the same."""
    laws = [check.law for check in Check]
    assert all(law.strip() and not law.endswith(".") for law in laws)
    assert len(set(laws)) == len(laws)


def test_every_rule_of_the_lint_is_a_law():
    """It explains itself without a mutant, and is of a class with an invariant."""
    names = {mutant.name for mutant in MUTANTS}
    for rule in RULES.values():
        assert rule.explanation
        assert rule.name not in names - {"piecewise-draft-decode"}  # which the bug and the rule are


def test_no_check_knows_a_mutant():
    """Neither suite nor lint names the gallery, or has the name of a mutant in a string."""
    names = {mutant.name for mutant in MUTANTS}
    runner = Path(capture_planner_runner.__file__).parent
    for folder in (*(ROOT / name for name in ("analysis", "dispatch", "testing")), runner):
        paths = sorted(folder.rglob("*.py"))
        assert paths, folder
        for path in paths:
            text = path.read_text("utf-8")
            assert "gallery" not in text, path
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert node.value not in names, path


def test_a_rule_is_not_made_for_one_plan():
    """Each rule that finds mutants also finds plans that are none: those of the lint's own tests."""
    cases = (Path(__file__).parent.parent / "analysis" / "test_lint.py").read_text("utf-8")
    finds = {found.rule.code for m in MUTANTS if m.plan is not None for found in lint(m.plan())}
    assert len(finds) > 10
    for code in finds:
        assert f'"{code}": (' in cases


def test_catch_says_what_was_found():
    """By the rule's code for a plan, by the law for ranks; a note alone is nothing found."""
    caught = detect(named("doubling-sizes"))
    assert (caught.by, caught.case, caught.finding) == ("CP045", "", None)
    assert caught.says.startswith("CP045 coarse-decode-sizes: ")
    caught = detect(named("own-adapters-count"), seed=3)
    assert caught.by == RunnerCheck.AGREED.value
    noted = next(make for make in gallery.HEALTHY.values() if lint(make()))
    assert {found.rule.severity for found in lint(noted())} == {Severity.NOTE}
    assert detect(attrs.evolve(named("doubling-sizes"), plan=noted)) is None
    assert detect(attrs.evolve(named("own-adapters-count"), agreement=lambda seed: None)) is None


def test_what_is_replaced_is_put_back():
    """Also where something fails meanwhile."""
    owner = type("Owner", (), {"name": 1})
    with replaced(owner, "name", lambda one: one + 1):
        assert owner.name == 2
    with pytest.raises(KeyError), replaced(owner, "name", lambda one: one + 1):
        raise KeyError
    assert owner.name == 1


@pytest.mark.usefixtures("one_thread")
def test_the_suite_runs_with_a_patch_and_a_base():
    """A patched runner is entered for the whole run, and left; healthy, it is not found."""
    entered = []

    class Patch:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *error):
            entered.append("out")

    mutant = attrs.evolve(named("doubling-sizes"), plan=None, patch=Patch)
    assert detect(mutant, profile=TRIED, minimize=False) is None
    assert entered == ["in", "out"]
