"""Commands and profilers of plugins: what they bring, and what is wrong with the wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from capture_planner.cli.commands import CORE, OF_DISTRIBUTIONS, installed_commands
from capture_planner.errors import PluginWarning, RunError
from capture_planner.plugins import hookimpl, hookspecs
from capture_planner.plugins.profiler import Profiler
from capture_planner.plugins.registry import find_profiler, load_backends
from support.commands import Run

HEAD = "import click\nfrom capture_planner.plugins import Command, hookimpl\n"
GREET = '''
@click.command()
def greet() -> None:
    """Say hello."""
    click.echo("hello")

@hookimpl
def capture_planner_commands():
    return [Command(name="NAME", help="Say hello.", target="added_plugin:greet")]
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return what installs a distribution of one module, under the entry-point group of commands or another."""

    def installed(source: str, group: str = "capture_planner.commands") -> None:
        (tmp_path / "added_plugin.py").write_text(HEAD + source)
        info = tmp_path / "added_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\nadded = added_plugin\n")
        monkeypatch.syspath_prepend(tmp_path)

    installed_commands.cache_clear()
    yield installed
    installed_commands.cache_clear()
    sys.modules.pop("added_plugin", None)


def test_command_of_a_plugin_is_one_of_the_program(install: Callable[..., None], call: Run) -> None:
    """Help lists it with its sentence, and it runs."""
    install(GREET.replace("NAME", "greet"))
    assert "  greet        Say hello.\n" in call("--help").out
    assert call("greet").out == "hello\n"


@pytest.mark.parametrize("name", ["plan", "run"])
def test_command_of_a_taken_name_is_left_out(install: Callable[..., None], call: Run, name: str) -> None:
    """The core's command stays, and so does the one that was found first: no plugin replaces another in silence."""
    pytest.importorskip("capture_planner_runner")
    install(GREET.replace("NAME", name))
    with pytest.warns(PluginWarning, match=f"two commands are named '{name}', from .*added-plugin"):
        found = installed_commands()
    assert (name in found) is (name not in CORE)


BREAKS = {
    "raises at import": ("1 / 0", "ZeroDivisionError"),
    "brings what is no command": ("@hookimpl\ndef capture_planner_commands(): return [1]", "is not a capture_planner"),
    "raises in the hook": ("@hookimpl\ndef capture_planner_commands(): return 1 / 0", "ZeroDivisionError"),
    "misspells the hook": ("@hookimpl\ndef capture_planner_command(): return []", "did you mean capture_planner_comm"),
    "has hooks of another group": (
        "@hookimpl\ndef capture_planner_backends(): return []",
        "implements no hook of the group capture_planner.commands",
    ),
}


@pytest.mark.parametrize(("source", "says"), BREAKS.values(), ids=BREAKS)
def test_broken_plugin_is_a_warning_and_stops_no_command(install: Callable[..., None], source: str, says: str) -> None:
    """All other commands are there."""
    install(source)
    with pytest.warns(PluginWarning, match=says):
        found = installed_commands()
    assert set(found) >= {name for names in OF_DISTRIBUTIONS.values() for name in names}


def test_commands_in_the_group_of_backends_are_named(install: Callable[..., None]) -> None:
    """They would not be found: the command line does not look there."""
    install(GREET.replace("NAME", "greet"), "capture_planner")
    with pytest.warns(PluginWarning, match="implements no hook of the group capture_planner; mark"):
        load_backends()
    assert "greet" not in installed_commands()


def test_command_that_is_listed_is_not_imported(install: Callable[..., None], call: Run) -> None:
    """Only the one that is used is."""
    install(
        "@hookimpl\ndef capture_planner_commands(): "
        "return [Command(name='heavy', help='Be heavy.', target='no_such_module:heavy')]"
    )
    assert "Be heavy." in call("--help").out


@pytest.mark.parametrize(
    ("words", "distribution"),
    [
        (("run", "plan.yaml"), "capture-planner-runner"),
        (("conformance", "reference"), "capture-planner-conformance"),
        (("tune", "spec.yaml"), "capture-planner-tuner"),
    ],
)
def test_distribution_that_does_not_load_is_told_from_one_that_is_missing(
    call: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], distribution: str
) -> None:
    """The remedy is the same, the reason is not."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    installed_commands.cache_clear()
    try:
        ran = call(*words)
    finally:
        installed_commands.cache_clear()
    assert (ran.code, ran.out) == (1, "")
    assert f"{words[0]} needs {distribution}, which is installed but brought no such command; install it" in ran.err


def plugin(value: object) -> SimpleNamespace:
    """Return a plugin with one profiler."""

    @hookimpl
    def capture_planner_profilers() -> list[object]:
        return [value]

    return SimpleNamespace(__name__="measuring", capture_planner_profilers=capture_planner_profilers)


def test_profiler_is_found() -> None:
    """That of the runner; none where nothing measures."""
    pytest.importorskip("capture_planner_runner")
    assert isinstance(find_profiler(), Profiler)
    assert find_profiler(installed=False) is None


def test_what_is_no_profiler_is_an_error() -> None:
    """It names the plugin."""
    with pytest.raises(RunError, match=r"measuring: 3 is no capture_planner\.plugins\.profiler\.Profiler"):
        find_profiler(plugin(3), installed=False)


@pytest.mark.parametrize("hook", ["capture_planner_commands", "capture_planner_profilers"])
def test_hook_specification_is_never_called(hook: str) -> None:
    """It only documents."""
    with pytest.raises(AssertionError):
        getattr(hookspecs, hook)()


def test_command_loads_what_its_target_names() -> None:
    """A ``click.Command``, under the name of its declaration."""
    assert isinstance(CORE["plan"].load(), click.Command)
