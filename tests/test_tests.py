"""The tests themselves: none ends early in silence."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.rglob("test_*.py"))


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
