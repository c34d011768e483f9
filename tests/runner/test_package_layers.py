"""The packages of the runner: imports point one way between them, too."""

import ast
from pathlib import Path

import capture_planner_runner as runner

HERE = Path(runner.__file__).parent
LAYERS = ("ranks", "models", "graphs", "compilation", "execution", "capture", "numerics", "serving")
"""Lowest first; the modules of the package itself are above and below them, and checked one by one."""


def imports_of(path: Path) -> set[str]:
    """Return the parts of the runner that a module imports, for types and lazily included."""
    prefix = "capture_planner_runner."
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            found.add((node.module or "").removeprefix(prefix).split(".")[0])
    return found


def test_packages_import_lower_packages_only() -> None:
    """Graphs below execution, execution below serving."""
    for number, layer in enumerate(LAYERS):
        above = set(LAYERS[number + 1 :])
        for path in (HERE / layer).rglob("*.py"):
            assert not imports_of(path) & above, path


def test_what_runs_a_plan_is_above_all_packages() -> None:
    """No package needs the runner, or what puts it together."""
    for layer in LAYERS:
        for path in (HERE / layer).rglob("*.py"):
            needed = imports_of(path) & {"runner", "launch"}
            assert not needed, path


def test_modules_of_the_runner_that_packages_need_stand_below_them() -> None:
    """The ledger needs graphs and the record of comparisons; the options need no other module."""
    for path in (HERE / "ledger").glob("*.py"):
        assert imports_of(path) <= {"ledger", "graphs", "numerics"}, path
    assert imports_of(HERE / "options.py") == set()
    for layer in ("models", "graphs", "execution"):
        for path in (HERE / layer).rglob("*.py"):
            assert "ledger" not in imports_of(path), path
