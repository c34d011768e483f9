"""Hypothesis profiles, the marker ``thorough``, and fixtures that several folders share.

``HYPOTHESIS_PROFILE`` is ci, dev (the default), thorough or mutation. ci draws the same examples each time and
does not shrink a failure, so its time is bounded: run a test that fails there with dev. mutation does the same
with 25 examples, the number of the published results of benchmarks/mutation.py.

Tests marked ``thorough`` run with the profile thorough (``tox -e thorough``), or if ``-m`` selects them. They are
slow, and a faster test holds the same law:

- conformance: the reference backend with more scenes and a second seed, a wrong kernel with a third; the audit of the
  reference's own fields, which passes without attacks in every other test, and that of a field that nothing reads,
  which the command's tests have too; a case of five requests that comes down to three; a run of pytest over a
  backend's tests, of which the pages have an example; attacks in two processes, as scenes are in the same;
- bench: other draft lengths, the pages that each figure needs, interruptions between figures, and all figures of a
  plan with a fused chain; the command's own tests measure all figures and interrupt one;
- gallery: the mutants of ``gallery.core.LATE``, which take most of the time of all, and three of the four
  healthy backends; ``tox -e gallery`` searches all mutants with 20 seeds;
- planning: the draft lengths of a server of 512 requests, of which one of 256 is scheduled;
- report: a page of 200,000 forwards instead of 20,000;
- engines: the benchmark of transformers at its smallest, whose parts have tests of their own;
- tuner: a session by the costs of another deployment: test_tuning has its guards, the command's tests what it says.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

# Tiny operators are slower on many threads, and several workers share the cores. It holds for processes of tests too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, Phase, settings

from capture_planner import cli
from capture_planner.codec import documents, reading
from capture_planner.errors import InvalidDocument
from support.commands import CommandResult, Run

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_UNSHRUNK = (Phase.explicit, Phase.generate)

settings.register_profile(
    "ci", max_examples=6, derandomize=True, deadline=None, suppress_health_check=_SLOW, phases=_UNSHRUNK
)
settings.register_profile("dev", max_examples=100, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "mutation", max_examples=25, derandomize=True, deadline=None, suppress_health_check=_SLOW, phases=_UNSHRUNK
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)

_FROZEN: dict[str, int] = {}
"""How many modules there were when objects were left to no garbage collection."""


def pytest_configure() -> None:
    """Run in the root of the repository wherever pytest is called: tests name documents as their messages do.

    A text is parsed once: tests read the same plans a thousand times, and a third of a command's time was YAML. What is
    installed is listed once for each path of imports. Nothing of what is imported is garbage, and later there is
    little: a tenth of all time was spent looking for it.
    """
    gc.disable()
    gc.set_threshold(50_000, 20, 20)
    os.chdir(Path(__file__).parents[1])
    reading.parse = _parsed
    listed = lru_cache(maxsize=128)(lambda path, find=metadata.entry_points, **named: find(**named))
    metadata.entry_points = lambda **named: listed(tuple(sys.path), **named)


@lru_cache(maxsize=256)
def _node(text: str) -> documents.Node:
    return documents.parse(text, "")


def _parsed(text: str, name: str) -> documents.Node:
    """Parse a text once, whatever its file is called; a problem names the file, and is found again."""
    try:
        return _node(text)
    except InvalidDocument:
        return documents.parse(text, name)


LAST = {"backends", "conformance", "gallery", "gpu"}
"""Folders whose tests search and serve, and take most of the time of all."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what is cheap, and leave ``thorough`` tests to the profile of that name, unless ``-m`` names some."""
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] in LAST)
    if PROFILE == "thorough" or config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    """Look for garbage from here on, and only in what is made from here on."""
    gc.freeze()
    gc.enable()
    _FROZEN["modules"] = len(sys.modules)


def pytest_runtest_setup() -> None:
    """Leave what is imported to no later garbage collection: a capture that leaves tensors behind looks at it all."""
    if len(sys.modules) > _FROZEN.get("modules", 0) + 50:
        gc.collect()
        gc.freeze()
        _FROZEN["modules"] = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Let the end of the process collect everything: some libraries report what is left.

    A worker of pytest-xdist ends at once: nothing reads its reports, and all of torch would take seconds to take down.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit.register(os._exit, 0)
    else:
        gc.unfreeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operators are slower on many threads, and many times slower where several workers compute."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither ``run`` nor ``bench`` load or make a model."""

    def load(*given: object, **named: object) -> NoReturn:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(importlib.import_module("capture_planner_runner.models.huggingface"), "load_target", load)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Return a function that calls a command in this process, as ``main`` does."""

    def called(*arguments: str, stdin: bytes = b"") -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["capture-planner", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = (stream.decode() for stream in capsysbinary.readouterr())
        assert "Traceback" not in out + err
        assert isinstance(end.value.code, int)
        return CommandResult(end.value.code, out, err)

    return called


@pytest.fixture(autouse=True, scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of Hugging Face's cache in all tests, which is empty: answers depend on what is in it."""
    constants = importlib.import_module("huggingface_hub.constants") if find_spec("huggingface_hub") else None
    place = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        if constants is not None:
            patch.setattr(constants, "HF_HUB_CACHE", str(place))
        yield place


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the repository's plans, which is the current one."""
    plans = Path(__file__).parent.parent / "plans"
    shutil.copytree(plans, tmp_path / "plans", ignore=shutil.ignore_patterns("*.py", "*.pyc"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, call: Run) -> Run:
    """Return a function that runs a command there, in this process, as ``main`` does."""
    return call


_PLANS: dict[str, str] = {}
"""The plan of each spec that a command executed."""


@pytest.fixture
def executing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Iterator[Callable[[str, str], Run]]:
    """Return what binds ``call`` to a command that executes, in a folder with a spec and its plan.

    What ``--threads`` does to the process is undone.
    """
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)

    def bound(command: str, spec: str) -> Run:
        Path("spec.yaml").write_text(spec, "utf-8")
        if spec not in _PLANS:
            assert call("plan", "spec.yaml", "-e", "cpu", "-o", "plan.yaml").code == 0
            _PLANS[spec] = Path("plan.yaml").read_text("utf-8")
        Path("plan.yaml").write_text(_PLANS[spec], "utf-8")
        return partial(call, command)

    yield bound
    torch.set_num_threads(before)
