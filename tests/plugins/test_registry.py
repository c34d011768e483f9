"""The registry: real plugins, and what is wrong with the wrong ones."""

import os
import subprocess
import sys
import warnings
from importlib import metadata
from types import SimpleNamespace

import pytest

from capture_planner.engines import engines, load_engines
from capture_planner.errors import BackendError, PlanningError, PluginWarning, Problem
from capture_planner.modes import GraphSupport, Role
from capture_planner.planning.planner import plan
from capture_planner.plugins import hookspecs
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.plugins.registry import RegisteredBackend, Registry, load_backends
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Model
from capture_planner.records.spec import Limits, Spec
from capture_planner.report.plans import backend_support
from capture_planner.testing import FakeBackend

TOLD = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="told"))
CPU = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1 << 30))
SPEC = Spec(
    model=Model(name="m", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64, max_model_len=64),
    limits=Limits(max_num_reqs=4, max_num_tokens=16),
    backend="alpha",
)


def fake(name):
    """A backend that can do everything."""
    return FakeBackend(name=name, supports=TOLD)


def plugin(*backends, name="plugin"):
    """A plugin as a module would be."""

    @hookimpl
    def capture_planner_backends():
        return backends

    return SimpleNamespace(__name__=name, capture_planner_backends=capture_planner_backends)


def test_backends_are_found_by_name_in_the_order_of_names():
    """Whoever brings them."""
    found = load_backends(plugin(fake("b"), name="one"), plugin(fake("a"), fake("c"), name="two"), installed=False)
    assert list(found) == ["a", "b", "c"]
    assert len(found) == 3
    assert found["b"].distribution == "one"


def test_installed_plugins_carry_their_distribution():
    """The three backends of this repository are found by their entry points."""
    found = load_backends()
    assert {"reference", "flashinfer", "flash_attention"} <= set(found)
    assert found["reference"].distribution == "capture-planner-reference"
    assert found["reference"].version == metadata.version("capture-planner-reference")


def test_a_name_that_is_taken_is_an_error():
    """Both distributions are named."""
    with pytest.raises(BackendError, match="two backends are named 'a', from one and two"):
        load_backends(plugin(fake("a"), name="one"), plugin(fake("a"), name="two"), installed=False)


def test_what_is_no_backend_is_an_error():
    """It says what is missing."""
    with pytest.raises(BackendError, match="is not a backend; it needs name, support, padding"):
        load_backends(plugin(object()), installed=False)


@pytest.mark.parametrize(("name", "says"), [("alhpa", "did you mean 'alpha'"), ("zzz", "installed: alpha, beta")])
def test_an_unknown_name_is_answered_with_near_ones(name, says):
    """Or with all there are."""
    with pytest.raises(BackendError, match=says):
        load_backends(plugin(fake("alpha"), fake("beta")), installed=False)[name]


def test_an_empty_registry_says_none():
    """No backend at all."""
    with pytest.raises(BackendError, match="installed: none"):
        Registry()["alpha"]


class BrokenEntryPoint:
    """An entry point whose module does not import."""

    value = "broken:plugin"
    dist = None

    def load(self):
        raise ModuleNotFoundError("No module named 'kernels'")


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch):
    """With the cause, and what to do."""
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [BrokenEntryPoint()] if group == hookspecs.PROJECT else []
    )
    says = "ModuleNotFoundError: No module named 'kernels'; report it to its authors, or uninstall it"
    with pytest.warns(PluginWarning, match=says):
        assert load_backends() == {}


def test_a_plugin_without_a_distribution_and_one_registered_twice(monkeypatch):
    """Both are accepted, once."""
    module = plugin(fake("alpha"), name="local")
    point = SimpleNamespace(value="local", dist=None, load=lambda: module)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point, point])
    assert load_backends()["alpha"].version == "0"
    assert list(load_backends(module)) == ["alpha"]


def test_a_hook_specification_is_never_called():
    """It only documents."""
    with pytest.raises(AssertionError):
        hookspecs.capture_planner_backends()


def raises(error):
    """A method that raises."""

    def method(*_):
        raise error

    return method


@pytest.mark.parametrize("method", ["support", "padding", "workspace"])
def test_the_planner_names_a_backend_that_raises(method):
    """Distribution, version, method, role and cause."""
    says = f"'alpha' .dist 1., asked for {method} of target failed: ZeroDivisionError: no"
    with pytest.raises(BackendError, match=says):
        _plan_with(method, raises(ZeroDivisionError("no")))


@pytest.mark.parametrize("method", ["support", "padding", "workspace"])
def test_the_planner_names_a_backend_that_returns_something_else(method):
    """With what it returned."""
    with pytest.raises(BackendError, match=f"asked for {method} of target, returned 3, not a "):
        _plan_with(method, lambda *_: 3)


def test_an_error_of_ours_that_a_backend_raises_is_still_the_backends():
    """A backend answers with a reason; it does not refuse to be planned for."""
    with pytest.raises(BackendError, match="failed: PlanningError: never"):
        _plan_with("support", raises(PlanningError([Problem(message="never")])))


def _plan_with(method, behaviour):
    kind = type("Odd", (FakeBackend,), {method: lambda self, *args: behaviour(*args)})
    registry = Registry(
        [RegisteredBackend(backend=kind(name="alpha", supports=TOLD), distribution="dist", version="1")]
    )
    return plan(replace(SPEC), CPU, registry)


def _plugin(bring):
    """A plugin object whose hook brings what ``bring`` returns."""

    class Plugin:
        @staticmethod
        @hookimpl
        def capture_planner_backends():
            return bring()

    return Plugin()


@pytest.mark.parametrize(
    ("bring", "says"),
    [
        (lambda: None, "NoneType"),
        (lambda: fake("a"), "not iterable"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: sys.exit(0), "SystemExit"),
        (lambda: [fake("")], "the name of a backend must be a name"),
        (lambda: [fake("a\x1bme:\n")], "the name of a backend must be a name"),
        (lambda: [fake(5)], "expected text, got 5"),
        (lambda: ["text"], "'text' is not a backend"),
    ],
)
def test_a_hook_that_brings_nonsense_is_an_error_of_one_line(bring, says):
    """Whatever a plugin does, the error names it; nothing ends the program in silence."""
    with pytest.raises(BackendError) as caught:
        load_backends(_plugin(bring), installed=False)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hook_with_an_argument_that_is_unknown_is_an_error():
    class Plugin:
        @staticmethod
        @hookimpl
        def capture_planner_backends(config):
            return []

    with pytest.raises(BackendError, match="PluginValidationError"):
        load_backends(Plugin(), installed=False)


BREAKS = {
    "raises at import": "raise ValueError('no')",
    "leaves at import": "raise SystemExit(0)",
    "raises no Exception": "raise type('Odd', (BaseException,), {})('no')",
    "is no Python": "def",
    "cannot be shown": "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
    "brings nothing": "@hookimpl\ndef capture_planner_backends(): return None",
    "brings engines that are none": "@hookimpl\ndef capture_planner_engines(): return ['x']",
    "misspells a hook": "@hookimpl\ndef capture_planner_backend(): return []",
    "has no hook": "x = 1",
    "has a hook with an argument": "@hookimpl\ndef capture_planner_backends(config): return []",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return what installs a distribution of one module."""

    def installed(source):
        (tmp_path / "broken_plugin.py").write_text(f"from capture_planner.plugins import hookimpl\n{source}\n")
        info = tmp_path / "broken_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[capture_planner]\nbroken = broken_plugin\n")
        monkeypatch.syspath_prepend(tmp_path)

    engines.cache_clear()
    yield installed
    engines.cache_clear()
    sys.modules.pop("broken_plugin", None)


@pytest.mark.parametrize("source", BREAKS.values(), ids=BREAKS)
def test_broken_installed_plugin_is_a_warning_and_stops_nothing_else(install, source):
    """Whatever is wrong with it: named in one line, and all others are there."""
    others = set(load_backends())
    install(source)
    with pytest.warns(PluginWarning) as caught:
        found, emulated = load_backends(), load_engines()
    assert set(found) == others
    assert "vllm" in emulated
    for each in caught:
        assert "broken-plugin" in str(each.message)
        assert "\n" not in str(each.message)


COMMANDS = (["backends"], ["check", "--engine", "vllm"])
"""Each hook has a command that calls it."""


def warned(code, err):
    """Return the warnings that a command showed, each of them once."""
    assert code in (0, 2), err
    assert "Traceback" not in err
    found = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert len(found) == len(set(found))
    return found


@pytest.mark.parametrize("source", BREAKS.values(), ids=BREAKS)
def test_commands_name_a_broken_plugin_once_and_go_on(install, call, source):
    """Under the filters that Python begins with."""
    install(source)
    found = []
    for words in COMMANDS:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            ran = call(*words)
        found += warned(ran.code, ran.err)
    assert found


def test_process_of_a_command_names_a_broken_plugin_once(install, tmp_path):
    """With the filters that Python begins with; one kind stands for all."""
    install(BREAKS["raises at import"])
    ran = subprocess.run(
        [sys.executable, "-c", "from capture_planner.cli import main; main()", *COMMANDS[0]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert warned(ran.returncode, ran.stderr)


def test_name_that_is_taken_stops_only_what_uses_it(install):
    """Neither backend is taken at random."""
    install("from capture_planner_reference import capture_planner_backends")
    with pytest.warns(PluginWarning, match="two backends are named 'reference', from broken-plugin and capture-plan"):
        found = load_backends()
    assert "triton" in set(found)
    with pytest.raises(BackendError, match="no backend named 'reference' is installed"):
        found["reference"]


def test_backend_that_answers_nonsense_is_left_out_of_a_table():
    """With a warning; the others are asked all the same."""

    class Odd(FakeBackend):
        def support(self, *_):
            return 3

    registry = load_backends(plugin(Odd(name="odd", supports=TOLD), fake("alpha")), installed=False)
    with pytest.warns(PluginWarning, match="the backend 'odd' .* returned 3, not a Support"):
        assert [each.name for each in backend_support(registry, [CPU], None)] == ["alpha"]
