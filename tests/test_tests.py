"""The tests themselves: none ends early in silence, and mutation testing has those of each module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from _mutation_tests import TESTS

TREE = Path(__file__).parent
FILES = sorted(TREE.rglob("test_*.py"))
CORE = TREE.parent / "capture_planner"


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from own_nodes(child)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_test_returns_early(path: Path) -> None:
    """``assume`` and ``pytest.skip`` say that nothing was tested; a bare return hides it."""
    functions = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    early = [
        f"{path.name}:{node.lineno}: {function.name}"
        for function in functions
        if function.name.startswith("test_")
        for node in own_nodes(function)
        if isinstance(node, ast.Return) and node.value is None
    ]
    assert early == []


@pytest.mark.parametrize("folder", ["planning", "planning/sizing", "dispatch"])
def test_mutation_testing_has_every_module_that_decides(folder: str) -> None:
    """A new module is mutated as those next to it."""
    modules = {f"{folder}/{path.stem}" for path in (CORE / folder).glob("*.py") if path.stem != "__init__"}
    assert modules <= set(TESTS)


@pytest.mark.parametrize("module", sorted(TESTS))
def test_mutation_testing_has_modules_and_tests_that_exist(module: str) -> None:
    """A file, or a test in one."""
    assert (CORE / f"{module}.py").is_file()
    for name in TESTS[module]:
        path, _, test = name.partition("::")
        assert f"def {test}" in (TREE / path).read_text("utf-8")
