"""Layers: imports point one way, no circle of any kind, and the core has no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

import capture_planner

HERE = Path(capture_planner.__file__).parent
CHECKOUT = Path(__file__).parent.parent

LAYERS = (
    "lazy",
    "errors",
    "modes",
    "records",
    "codec",
    "plugins",
    "planning",
    "dispatch",
    "analysis",
    "measuring",
    "engines",
    "testing",
    "report",
    "cli",
    "__main__",
)
"""Lowest first: a part imports the parts before it, and itself."""

PLUGINS = sorted(path.parent for path in CHECKOUT.glob("[be]*/*/src/*/__init__.py") if "template" not in path.parts)
"""The packages of the backends and the engines."""

RUNNER, CONFORMANCE, TUNER = (
    Path(find_spec(f"capture_planner_{name}").submodule_search_locations[0])
    for name in ("runner", "conformance", "tuner")
)

TORCH = {"torch", "triton", "numpy", "transformers", "safetensors"}
"""What neither the core nor the tuner imports, for types only excepted."""

DISPATCH = {"errors", "modes", "records", "dispatch"}
"""What an engine would vendor with the dispatcher."""


def modules(package: Path) -> dict[str, Path]:
    """Return each module of a package with its file, by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if "template" in parts:
            continue  # the wheel carries the files of a new backend as data
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules in ``known`` that a file imports: at the top, in a function, or for types alone.

    An import of a module is an import of the packages that it is in only where nothing else is named:
    ``from capture_planner.records import plan`` needs ``records.plan``.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [name for name in names if name in known]
            yield from submodules
            if len(submodules) < len(names):
                yield node.module


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one module."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set(), [start]
        while todo:
            for module in edges.get(todo.pop(), set()) - seen:
                seen.add(module)
                todo.append(module)
        reach[start] = seen
    found = {
        frozenset({other for other in reach[start] if start in reach.get(other, set())})
        for start in edges
        if start in reach[start]
    }
    return [set(circle) for circle in sorted(found, key=sorted)]


def part(module: str) -> str:
    """Return the layer of a module of the core; the package itself is above all that it exports."""
    return module.split(".")[1] if "." in module else "analysis"


def test_every_module_of_the_core_has_a_layer() -> None:
    """A new part of the package is put into the list, with thought."""
    assert {part(name) for name in modules(HERE)} <= set(LAYERS)


def test_imports_point_upward_only() -> None:
    """No part of the core imports one that stands below it."""
    known = modules(HERE)
    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imported(path, known)
        if LAYERS.index(part(other)) > LAYERS.index(part(name))
    ]
    assert not wrong


@pytest.mark.parametrize("package", [HERE, RUNNER, CONFORMANCE, TUNER, *PLUGINS], ids=lambda path: path.name)
def test_no_import_circle(package: Path) -> None:
    """Lazy imports and imports for types count too."""
    known = modules(package)
    edges = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    assert circles(edges) == []


@pytest.mark.parametrize(
    "package", [path for path in PLUGINS if (path / "emulation").is_dir()], ids=lambda path: path.name
)
def test_emulation_needs_nothing_of_what_runs_in_an_engine(package: Path) -> None:
    """Flags are answered where the engine is not: what runs in it imports the emulation, never the reverse."""
    known = modules(package)
    needed = {other for name, path in known.items() if ".emulation" in name for other in imported(path, known)}
    assert needed
    assert not [other for other in needed if ".emulation" not in other]


def test_circles_are_found() -> None:
    """The check can fail: two modules that import each other, and one that imports itself through two others."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == [{"a", "b"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [{"a", "b", "c"}]


def test_dispatch_needs_records_only() -> None:
    """So that an engine can take it along."""
    known = modules(HERE)
    needed = {part(other) for name, path in known.items() if part(name) in DISPATCH for other in imported(path, known)}
    assert needed <= DISPATCH


def outside(path: Path) -> set[str]:
    """Return the top-level packages that a module imports when it runs, at the top or in a function."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        todo += ast.iter_child_nodes(node)
    return found


COMMANDS = {path.name for path in (RUNNER, CONFORMANCE, TUNER)}
"""The packages that bring commands."""

MISSING = {
    HERE: TORCH | COMMANDS,
    TUNER: TORCH | COMMANDS - {TUNER.name},
    RUNNER: COMMANDS - {RUNNER.name},
    CONFORMANCE: {TUNER.name},
    **dict.fromkeys(PLUGINS, COMMANDS),
}
"""What may not be installed where a package is: torch needs a distribution of its own, and so does each command."""


@pytest.mark.parametrize("package", MISSING, ids=lambda path: path.name)
def test_no_package_imports_what_may_not_be_installed(package: Path) -> None:
    """Not even in a function; the tests of a backend may."""
    wrong = {name: bad for name, path in modules(package).items() if (bad := outside(path) & MISSING[package])}
    assert wrong == {}


def test_what_needs_torch_and_the_runner_is_seen() -> None:
    """The check above can fail."""
    assert {"torch", "capture_planner"} <= outside(RUNNER / "host.py")
    assert {"hypothesis", "capture_planner_runner"} <= outside(CONFORMANCE / "machine.py")


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_the_core_does_not_know_its_plugins(package: Path) -> None:
    """No module of the core imports a backend or an engine."""
    assert not any(package.name in path.read_text(encoding="utf-8") for path in modules(HERE).values())


def run(code: str) -> list[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


PLAN = """
import sys
from capture_planner import Dispatcher, lint, load_backends, load_environment, load_spec, plan
planned = plan(load_spec(sys.argv[1]), load_environment(sys.argv[2]), load_backends())
Dispatcher(planned).dispatch_counts("target", 1, 1, 1)
lint(planned)
print(*sys.modules)
"""


def test_import_brings_no_torch() -> None:
    """Not even where torch is installed."""
    loaded = run("import capture_planner, sys; print(*sys.modules)")
    assert not {"torch", "triton", "hypothesis", "flashinfer"} & set(loaded)


def test_planning_with_all_backends_brings_no_torch() -> None:
    """Neither planning, dispatch nor lint."""
    spec = CHECKOUT / "plans" / "specs" / "qwen3-8b-eagle3.yaml"
    machine = CHECKOUT / "plans" / "environments" / "h100.yaml"
    loaded = run(PLAN.replace("sys.argv[1]", repr(str(spec))).replace("sys.argv[2]", repr(str(machine))))
    assert not {"torch", "triton", "hypothesis", "flashinfer", "flash_attn"} & set(loaded)
