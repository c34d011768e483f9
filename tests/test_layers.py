"""Layers: imports point upward, and planning needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import capture_planner

ROOT = Path(capture_planner.__file__).parent
# Lowest first; what stands in a line may import lines above it, and its own package.
LAYERS = [
    "words",
    "errors",
    "needs",
    "_record",
    "modes",
    "entry",
    "model",
    "spec",
    "environment",
    "contract",
    "plan",
    "rows",
    "admissible",
    "hookspecs",
    "registry",
    "resolve",
    "sizing",
    "planner",
    "dispatch",
    "coverage",
    "explain",
    "ranks",
    "codec",
    "schema",
    "lint",
    "batches",
    "compare",
    "catalog",
    "engines",
    "models",
    "runtime",
    "bench",
    "testing",
    "report",
    "cli",
]


def imported(path):
    """The parts of the package that a module imports when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "capture_planner":
            names = [f"capture_planner.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.startswith("capture_planner."):
                yield name.split(".")[1]


def modules():
    """Every module with the part that it belongs to."""
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).with_suffix("").parts[0]
        if (part != "__init__" and (ROOT / f"{part}.py").exists()) or (ROOT / part / "__init__.py").exists():
            yield part, path


def test_every_module_has_a_layer():
    """A new part of the package is put into the list, with thought."""
    assert {part for part, _ in modules()} <= set(LAYERS)


def test_imports_point_upward_only():
    """No part imports one that stands below it."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for part, path in modules()
        for other in imported(path)
        if other in LAYERS and LAYERS.index(other) > LAYERS.index(part)
    ]
    assert not wrong


def run(code):
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


PLAN = """
import sys
import capture_planner
from capture_planner import codec, planner, registry, dispatch, lint
plan = planner.plan(codec.load_spec(sys.argv[1]), codec.load_environment(sys.argv[2]), registry.load())
dispatch.Dispatcher(plan).dispatch("target", 1, 1, 1)
lint.lint(plan)
print(*sys.modules)
"""


def test_import_brings_no_torch():
    """Not even where torch is installed."""
    loaded = run("import capture_planner, sys; print(*sys.modules)")
    assert not {"torch", "triton", "hypothesis", "flashinfer"} & set(loaded)


def test_planning_with_all_backends_brings_no_torch():
    """Neither planning, dispatch nor lint."""
    plans = Path(__file__).parent.parent / "plans"
    spec, machine = plans / "specs" / "qwen3-8b-eagle3.yaml", plans / "environments" / "h100.yaml"
    loaded = run(PLAN.replace("sys.argv[1]", repr(str(spec))).replace("sys.argv[2]", repr(str(machine))))
    assert not {"torch", "triton", "hypothesis", "flashinfer", "flash_attn"} & set(loaded)
