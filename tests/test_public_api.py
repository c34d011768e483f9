"""The public names: what each package exports, and what importing them loads."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import capture_planner
import capture_planner_conformance
from capture_planner import (
    Batch,
    CapturePlannerError,
    Dispatcher,
    Role,
    explain,
    load_backends,
    load_environment,
    load_plan,
    load_spec,
    plan,
)

LOCKED = Path(__file__).parent.parent / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml"
HEAVY = {"torch", "triton", "numpy", "hypothesis", "matplotlib", "click", "rich", "transformers"}
"""Third-party packages that planning does without."""
UPPER = {"engines", "testing", "report", "cli"}
"""Parts of the core above planning and analysis."""


@pytest.mark.parametrize("verb", ["plan", "lint", "explain", "diff", "load_spec", "load_plan", "load_backends"])
def test_verbs_are_functions(verb):
    """Not the modules of the same names."""
    assert verb in capture_planner.__all__
    assert callable(getattr(capture_planner, verb))


def test_lint_is_also_a_package():
    """The function is exported at the top; rules and findings are imported from the package."""
    from capture_planner.analysis.lint import RULES, lint

    assert capture_planner.lint is lint
    assert "CP001" in RULES


def test_explain_takes_a_plan_or_a_dispatcher():
    """A reader has a plan; a loop has a dispatcher, which keeps its tables."""
    plan = load_plan(LOCKED)
    batch = Batch.decode(Role.TARGET, num_reqs=100, query_len=4)
    assert explain(plan, batch) == explain(Dispatcher(plan), batch)


def test_a_plan_is_one_line_and_reads_well_in_a_notebook():
    """Shipped machines have names, backends are the installed ones, and what is shown is text for people."""
    machine = load_environment("H200")
    assert load_environment(Path(__file__).parent.parent / "plans" / "environments" / "h200.yaml") == machine
    with pytest.raises(CapturePlannerError, match="no environment is named 'h2000'; did you mean h200"):
        load_environment("h2000")
    spec = load_spec(LOCKED.parent.parent / "specs" / "qwen3-8b-eagle3.yaml")
    planned = plan(spec, machine)
    assert planned == plan(spec, machine, load_backends())
    title, *roles = planned._repr_html_().removeprefix("<pre>").removesuffix("</pre>").split("\n")
    assert title == f"Qwen/Qwen3-8B on h200: {planned.num_graphs} graphs"
    assert len(roles) == len(planned.roles)
    dispatcher = Dispatcher(planned)
    assert repr(dispatcher).startswith("Dispatcher(Qwen/Qwen3-8B on h200: target FULL_AND_PIECEWISE with ")
    explained = explain(dispatcher, Batch.decode(Role.TARGET, num_reqs=100, query_len=4))
    first, *others = str(explained).split("\n")
    assert first.endswith(explained.message)
    assert len(others) == len(explained.near_misses) > 0
    assert explained._repr_html_() == f"<pre>{explained}</pre>"


def test_importing_loads_no_upper_part_and_nothing_heavy():
    """In a fresh interpreter: no torch, no engine, no backend, no command line."""
    code = "import capture_planner, sys; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = names.stdout.split()
    assert not HEAVY & set(loaded)
    assert not {name for name in loaded if name.startswith("capture_planner_")}
    assert not UPPER & {name.split(".")[1] for name in loaded if name.startswith("capture_planner.")}


@pytest.mark.parametrize("package", [capture_planner, capture_planner_conformance], ids=lambda each: each.__name__)
def test_public_names_have_a_module_each(package):
    """Those that importing leaves for later are all that there are, and are found by ``dir`` and by name."""
    homes = [name for names in package._HOMES.values() for name in names]
    assert sorted(homes) == sorted(package.__all__)
    assert set(homes) <= set(dir(package))
    for home, names in package._HOMES.items():
        module = importlib.import_module(f"{package.__name__}.{home}")
        assert [name for name in names if getattr(package, name) is not getattr(module, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'plann'"):
        package.plann  # noqa: B018


def test_test_files_of_backends_are_collected_without_torch():
    """The class that they subclass, and pytest's plugin, import neither torch nor the suite."""
    code = "from capture_planner_conformance import ConformanceTests; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "capture_planner_conformance.suite"} & set(loaded)


def test_help_imports_no_records_and_nothing_heavy():
    """The list of commands is for every start: neither backends, nor engines, nor what a command needs."""
    code = (
        "import sys; from capture_planner.cli import main; sys.argv = ['capture-planner', '--help']\n"
        "try: main()\nexcept SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, last = done.stdout.splitlines()
    loaded = last.split()
    assert any(line.startswith("  plan ") for line in shown)
    assert not (HEAVY - {"click"}) & set(loaded)
    assert not {"capture_planner.records", "capture_planner.codec", "capture_planner_reference"} & set(loaded)
    assert not {
        name
        for name in loaded
        if name.startswith("capture_planner_vllm") or re.match(r"capture_planner_\w+\.cli", name)
    }
