"""The distributions as they are built: the core plans where there is no torch, and wheels have what they need."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import attrs
import pytest
from packaging.requirements import Requirement

from capture_planner import codec
from capture_planner.records.observation import EagerCost
from support.files import module_at
from support.observing import observation_of

pytest.importorskip("hatchling")
build = module_at(Path(__file__).parent.parent / "tools" / "build.py", "build_tool")

ROOT = Path(__file__).parent.parent
CORE, RUNNER, CONFORMANCE, TUNER = ROOT, ROOT / "runner", ROOT / "conformance", ROOT / "tuner"
REFERENCE = ROOT / "backends" / "reference"
SPEC = ROOT / "plans" / "specs" / "tiny-reference-cpu.yaml"
INSTALL = {
    "runner": "python -m pip install ./runner",
    "conformance": "python -m pip install ./runner ./conformance",
    "tuner": "python -m pip install ./tuner",
}
"""What installs each distribution that brings commands, from a clone."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[Path, Path]]:
    """Return wheel and source distribution of the core, what brings commands and a backend, by their folders."""
    folder = tmp_path_factory.mktemp("dist")
    found = {}
    for source in (CORE, RUNNER, CONFORMANCE, TUNER, REFERENCE):
        wheel, archive = build.build(source, folder, sdist=True)
        found[source] = (wheel, archive)
    return found


def needed(distribution: metadata.Distribution, seen: set[str]) -> Iterator[metadata.Distribution]:
    """Yield the installed distributions that one needs, extras apart, each once."""
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        found = metadata.distribution(requirement.name)
        yield found
        yield from needed(found, seen)


@pytest.fixture(scope="module")
def bare(wheels: dict[Path, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment with the wheels of the core and a backend, and what the core declares.

    Its dependencies are links to those that are installed here: no index is asked, and nothing else can be imported.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for source in (CORE, REFERENCE):
        with zipfile.ZipFile(wheels[source][0]) as wheel:
            wheel.extractall(site)
    (core,) = metadata.distributions(name="capture-planner", path=[str(site)])
    for distribution in needed(core, {"capture-planner"}):
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the bare environment: nothing of this one is on its path."""
    words = [str(python), "-I", "-m", "capture_planner", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLIPCOVER"))}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


Tuned = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def with_tuner(bare: Path, wheels: dict[Path, tuple[Path, Path]], tmp_path: Path) -> Tuned:
    """Return a function that runs a command of the bare environment with the tuner's wheel added."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheels[TUNER][0]) as wheel:
        wheel.extractall(site)
    code = f"import sys; sys.path.append({str(site)!r}); from capture_planner.cli import main; main()"

    def run_words(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [bare, "-I", "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run_words


def test_core_plans_without_torch(bare: Path, tmp_path: Path) -> None:
    """It plans, explains and checks with what it declares, and nothing else is there to be imported."""
    others = ("torch", "numpy", *(f"capture_planner_{name}" for name in ("runner", "conformance", "tuner")))
    gone = f"import importlib.util as u; print([n for n in {others} if u.find_spec(n)])"
    assert subprocess.check_output([bare, "-I", "-c", gone], text=True).strip() == "[]"
    planned = run(bare, "plan", str(SPEC), "-e", "cpu", "-o", "plan.yaml", cwd=tmp_path)
    assert (planned.returncode, "26 graphs" in planned.stdout) == (0, True), planned.stderr
    assert run(bare, "explain", "plan.yaml", "--num-reqs", "3", "--query-len", "3", cwd=tmp_path).returncode == 0
    assert run(bare, "check", "plan.yaml", cwd=tmp_path).returncode == 0


def test_tuner_takes_a_profile_from_an_observation(bare: Path, with_tuner: Tuned, tmp_path: Path) -> None:
    """An engine measured it: of ``profile`` only measuring needs the runner, and the core alone shows the file."""
    plan = ROOT / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml"
    observation = observation_of(codec.load_plan(plan))
    target, *others = observation.roles
    eager = (EagerCost(num_reqs=1, num_tokens=1024, milliseconds=40.0),)
    timed = attrs.evolve(observation, roles=(attrs.evolve(target, eager=eager), *others))
    codec.write(tmp_path / "observation.yaml", codec.dumps(timed))
    ran = with_tuner("profile", str(plan), "--from", "observation.yaml", "-o", "profile.yaml")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert codec.load_profile(tmp_path / "profile.yaml").model.name == "Qwen/Qwen3-8B"
    shown = run(bare, "show", "profile.yaml", cwd=tmp_path)
    assert (shown.returncode, shown.stdout + "written to profile.yaml\n") == (0, ran.stdout)
    measured = with_tuner("profile", str(SPEC))
    assert (measured.returncode, measured.stdout) == (1, "")
    assert "profile without --from needs capture-planner-runner, which is not installed" in measured.stderr
    assert measured.stderr.endswith(f"{INSTALL['runner']}\n")


NOT_INSTALLED = [
    (["run", str(SPEC)], "runner"),
    (["bench", str(SPEC)], "runner"),
    (["conformance", "reference"], "conformance"),
    (["environment"], "runner"),
    (["tune", str(SPEC)], "tuner"),
    (["launch", "plan.yaml", "--", "vllm", "serve"], "tuner"),
    (["compare", "a.yaml", "b.yaml"], "tuner"),
    (["journal", "."], "tuner"),
    (["profile", str(SPEC)], "tuner"),
]
EACH = """
import json, sys
from capture_planner.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(codes)
"""


def test_core_says_what_to_install(bare: Path, tmp_path: Path) -> None:
    """One error with the distribution and the command that installs it; one process calls all commands."""
    words = json.dumps([words for words, _ in NOT_INSTALLED])
    ran = subprocess.run([bare, "-I", "-c", EACH, words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{[1] * len(NOT_INSTALLED)}\n")
    assert ran.stderr.splitlines() == [
        f"error: {command} needs capture-planner-{name}, which is not installed; "
        f"install it from a clone with: {INSTALL[name]}"
        for (command, *_), name in NOT_INSTALLED
    ]


def test_help_of_the_core_lists_the_commands_of_what_is_not_installed(bare: Path, tmp_path: Path) -> None:
    """With how to get them."""
    ran = run(bare, "--help", cwd=tmp_path)
    *_, runner, conformance, tuner = ran.stdout.strip().split("\n\n")
    for name, text, commands in (
        ("runner", runner, "bench, environment, run"),
        ("conformance", conformance, "conformance"),
        ("tuner", tuner, "compare, journal, launch, profile, tune"),
    ):
        title, listed = text.split("\n", 1)
        assert title == f"Commands of capture-planner-{name}, which is not installed ({INSTALL[name]}):"
        assert listed.strip() == commands


def test_tuner_needs_the_core_alone(with_tuner: Tuned) -> None:
    """Installed with the core, the tuner's wheel adds its commands, and compares two plans without torch."""
    plan = str(ROOT / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")
    for words in (["compare", plan, plan], ["tune", "--help"], ["launch", "--help"], ["journal", "--help"]):
        ran = with_tuner(*words)
        assert (ran.returncode, ran.stderr) == (0, "")


def test_new_backend_works_without_torch(bare: Path, tmp_path: Path) -> None:
    """The template is in the core's wheel."""
    assert run(bare, "new-backend", "mine", cwd=tmp_path).returncode == 0
    assert (tmp_path / "capture-planner-mine" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("source", "package", "files"),
    [
        (
            CORE,
            "capture_planner",
            ["py.typed", "report/page.html.j2", "engines/known_models.json", "template/pyproject.toml"],
        ),
        (RUNNER, "capture_planner_runner", ["py.typed", "plugin.py"]),
        (CONFORMANCE, "capture_planner_conformance", ["py.typed", "plugin.py", "pytest_plugin.py"]),
        (TUNER, "capture_planner_tuner", ["py.typed", "plugin.py"]),
    ],
    ids=["core", "runner", "conformance", "tuner"],
)
def test_wheel_and_archive_have_every_file(
    wheels: dict[Path, tuple[Path, Path]], source: Path, package: str, files: list[str]
) -> None:
    """All that is tracked of a package, and nothing of the other distribution."""
    wheel, archive = wheels[source]
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {f"{package}/{file}" for file in files} <= names
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == ({"capture_planner", "capture_planner_command.py"} if source == CORE else {package})
    home = source / "src" if (source / "src").is_dir() else source
    here = {
        str(path.relative_to(home))
        for path in (home / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= names
    with tarfile.open(archive) as unpacked:
        inside = {name.partition("/")[2] for name in unpacked.getnames()}
    assert {str((home / name).relative_to(source)) for name in here} | {"pyproject.toml", "README.md"} <= inside
