"""The template of a backend: short, in every distribution, installed as it is, and right."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import capture_planner
from capture_planner import codec
from capture_planner.cli.new_backend import slug, template_files, write_template
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import load_backends
from capture_planner.records.spec import Spec

ROOT = Path(__file__).parent.parent.parent
NAME = "Flash-MLA 2"


def _python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run Python in a process of its own, with the core of this one and what is installed in ``path``."""
    core = Path(capture_planner.__file__).parent.parent
    paths = [str(path), str(core), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths if path else paths[1:])),
            "SLIPCOVER_ENABLED": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of a copy that is not installed."""
    write_template("template-under-test", tmp_path / "made")
    monkeypatch.syspath_prepend(tmp_path / "made" / "src")
    return importlib.import_module(f"capture_planner_{slug('template-under-test')}")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy under a name that needs changing in each of its places."""
    folder = tmp_path_factory.mktemp("authors") / "mla"
    write_template(NAME, folder)
    return folder


@pytest.fixture(scope="module")
def installed(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the copy, from no index, into a folder of its own."""
    pytest.importorskip("hatchling")
    site = tmp_path_factory.mktemp("site")
    local = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    _python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *local, str(copied), cwd=site)
    return site


def test_a_backend_is_under_a_hundred_lines() -> None:
    """What plans and what runs, comments included, and all that an author installs."""
    lines = {name: len(text.splitlines()) for name, text in template_files().items()}
    sides = [name for name in lines if name.endswith(("/backend.py", "/executor.py"))]
    assert len(sides) == 2
    assert sum(lines[name] for name in sides) < 100


def test_the_copy_passes_the_suite_that_comes_with_it(copied: Path, installed: Path) -> None:
    """Installed, found by its entry point, and put through its own test file, with nothing skipped."""
    pytest.importorskip("torch")
    options = ["-q", "-p", "no:cacheprovider", "--conformance-examples", "1"]
    said = _python("-m", "pytest", *options, cwd=copied, path=installed)
    assert "3 passed" in said
    assert "skipped" not in said


def test_the_copy_is_found_by_its_name(installed: Path) -> None:
    """The planner asks it, and says from which distribution it is."""
    script = (
        "from capture_planner import load_backends\n"
        f"found = load_backends()[{NAME!r}]\n"
        "print(found.distribution, found.version)\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    assert _python("-c", script, cwd=installed, path=installed).split() == ["capture-planner-flash-mla-2", "0.1.0"]


@pytest.mark.parametrize(
    ("seed", "examples"), [(0, 4), *(pytest.param(seed, 150, marks=pytest.mark.thorough) for seed in range(10))]
)
def test_the_template_passes_the_suite(seed: int, examples: int, imported: ModuleType, one_thread: None) -> None:
    """With the scenes that its author's copy is tested with: what it supports no graph of is no scene."""
    import capture_planner_conformance as conformance

    (backend,) = imported.capture_planner_backends()
    profile = conformance.SearchProfile(name="template", examples=examples, steps=15, long_steps=60)
    options = conformance.SuiteOptions(profile=profile, seed=seed, shrink=False, blame=False, audits=examples > 8)
    result = conformance.conform(conformance.under_test(backend), options)
    assert result.passed, result.failures
    assert "attention sinks: It has causal attention with ordinary heads alone." in result.untried


def test_the_template_says_what_the_reference_says(imported: ModuleType, one_thread: None) -> None:
    """Token for token, in a whole run with a drafter: two backends that share no line."""
    from capture_planner_runner.launch.launch import launch
    from capture_planner_runner.launch.request import RunRequest
    from capture_planner_runner.serving.workload import generated

    backends = load_backends(imported)
    environment = codec.load_environment(ROOT / "plans" / "environments" / "cpu.yaml")
    spec = (ROOT / "plans" / "specs" / "tiny-reference-cpu.yaml").read_text("utf-8")

    @contextmanager
    def quiet(task: str, total: int) -> Iterator[Callable[[str], None]]:
        yield lambda name: None

    def answers(backend: str) -> dict[str, tuple[int, ...]]:
        text = spec.replace("backend: reference", f"backend: {backend}")
        made = plan(codec.loads(text, Spec), environment, backends)
        assert made.role("target").groups[0].backend == backend
        requests = generated(3, seed=1, rate=None, prompt_tokens=(1, 24), output_tokens=(4, 8), vocab_size=256)
        outcome = launch(made, backends, lambda vocab_size: requests, RunRequest(drafter="copy"), quiet)
        return {served.name: served.tokens for served in outcome.report.served}

    assert answers("template-under-test") == answers("reference")


def test_wheel_and_sdist_have_the_template(tmp_path: Path) -> None:
    """As whole as the repository has it: what ``new-backend`` copies is what was tested."""
    pytest.importorskip("hatchling")
    _python("-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(tmp_path), cwd=ROOT)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        for name, text in template_files().items():
            assert wheel.read(f"capture_planner/template/{name}").decode() == text
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"backends/template/{name}" for name in template_files()} <= packed
