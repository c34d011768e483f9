"""The tests themselves: none ends early in silence, and mutation testing has those of each module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _equivalent import RULES, equivalent
from _mutation_tests import TESTS, source_of

TREE = Path(__file__).parent
FILES = sorted(TREE.rglob("test_*.py"))
CORE = TREE.parent / "capture_planner"


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from own_nodes(child)


def test_no_test_returns_early() -> None:
    """``assume`` and ``pytest.skip`` say that nothing was tested; a bare return hides it."""
    assert [
        f"{path.relative_to(TREE)}:{node.lineno}: {function.name}"
        for path in FILES
        for function in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_")
        for node in own_nodes(function)
        if isinstance(node, ast.Return) and node.value is None
    ] == []


@pytest.mark.parametrize("folder", ["planning", "planning/measured", "planning/sizing", "dispatch"])
def test_mutation_testing_has_every_module_that_decides(folder: str) -> None:
    """A new module is mutated as those next to it."""
    modules = {f"{folder}/{path.stem}" for path in (CORE / folder).glob("*.py") if path.stem != "__init__"}
    assert modules <= set(TESTS)


@pytest.mark.parametrize("module", sorted(TESTS))
def test_mutation_testing_has_modules_and_tests_that_exist(module: str) -> None:
    """A file, or a test in one."""
    assert source_of(module).is_file()
    for name in TESTS[module]:
        path, _, test = name.partition("::")
        assert f"def {test}" in (TREE / path).read_text("utf-8")


@pytest.mark.parametrize("module", sorted(RULES))
def test_mutants_that_are_no_gap_are_of_lines_that_exist(module: str) -> None:
    """A rule whose line was changed is taken away, so that it hides no new mutant."""
    assert module in TESTS
    text = source_of(module).read_text("utf-8")
    assert [code for code, _, _ in RULES[module] if code not in text] == []


def test_mutants_are_no_gap_only_as_a_rule_says() -> None:
    """The line has the code, and the change is that of the rule: not another one of the same line."""
    assert equivalent("modes", "if role is Role.TARGET:", "if role >= Role.TARGET:") == "no member sorts above it"
    for after in ("if role <= Role.TARGET:", "if role is not Role.TARGET:", "if role == Role.TARGET:"):
        assert equivalent("modes", "if role is Role.TARGET:", after) is None
    line = "if mode is GraphMode.FULL_AND_PIECEWISE:"
    assert equivalent("modes", line, line.replace(" is ", " >= ")) is None
    line = "rounds -= 1"
    assert equivalent("planning/sizing/minimax", line, "rounds -= 2") is not None
    assert equivalent("planning/sizing/minimax", line, "rounds += 1") is None
    assert equivalent("planning/sizing/policies", line, "rounds -= 2") is None


@pytest.mark.parametrize("code", [0, 3])
def test_what_runs_together_is_printed_one_after_the_other_and_counts(code: int) -> None:
    """In the order of the commands, whichever ends first."""
    commands = [f"python -c 'import sys; print({number}); sys.exit({code})'" for number in (1, 2)]
    script = [sys.executable, "tools/together.py", *commands]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("$ ")]
    assert done.returncode == int(code > 0)
    assert lines == ["1", f"exit code {code}", "2", f"exit code {code}"]
