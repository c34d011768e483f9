"""The engine hook: installed engines, broken ones, and the example of the documentation."""

import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import attrs
import pytest
from hypothesis import assume, given, settings

from capture_planner import engines as shared
from capture_planner.codec.shipped import find_environment
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines import engines, find_engine, load_engines
from capture_planner.engines.check import check
from capture_planner.engines.export import prove
from capture_planner.errors import EngineError, FlagError, PluginWarning
from capture_planner.modes import Role
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.plugins.registry import load_backends
from capture_planner.records.batch import Batch
from capture_planner.testing import plans

CHECKOUT = Path(__file__).parents[2]
H100 = find_environment("h100")


def plugin(*values, name="plugin"):
    """A plugin as a module would be."""

    @hookimpl
    def capture_planner_engines():
        return values

    return SimpleNamespace(__name__=name, capture_planner_engines=capture_planner_engines)


def example():
    """Return the engine that the documentation shows, as a module."""
    page = (CHECKOUT / "docs" / "extending" / "engine.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = ModuleType("tiny")
    exec(compile(code, "docs/extending/engine.md", "exec"), module.__dict__)
    return module


def test_installed_engines_carry_their_distribution():
    """The engines of this repository are found by their entry points."""
    assert {"vllm", "sglang", "tensorrt-llm"} <= set(engines())
    assert engines()["vllm"].distribution == "capture-planner-vllm"
    assert engines()["vllm"].version == metadata.version("capture-planner-vllm")


def test_duplicate_engine_name_names_both_distributions():
    """Names are unique."""
    engine = find_engine("sglang")
    with pytest.raises(EngineError, match="two engines are named 'sglang', from one and two"):
        load_engines(plugin(engine, name="one"), plugin(engine, name="two"), installed=False)


def test_value_that_is_no_engine_is_rejected():
    """With the plugin's name."""
    with pytest.raises(EngineError, match=r"^broken: 'vllm' is not an engine"):
        load_engines(plugin("vllm", name="broken"), installed=False)


def test_hook_that_raises_is_named():
    """One line, with the cause."""

    @hookimpl
    def capture_planner_engines():
        raise ZeroDivisionError("no")

    broken = SimpleNamespace(__name__="broken", capture_planner_engines=capture_planner_engines)
    with pytest.raises(EngineError, match="the plugin broken failed: ZeroDivisionError: no; report it"):
        load_engines(broken, installed=False)
    assert load_backends(broken, installed=False) == {}


def test_engine_that_cannot_be_imported_is_named(monkeypatch):
    """With its distribution."""
    dist = SimpleNamespace(name="capture-planner-broken", version="1")

    def load():
        raise ModuleNotFoundError("No module named 'parts'")

    point = SimpleNamespace(value="broken", dist=dist, load=load)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    with pytest.warns(PluginWarning, match=r"capture-planner-broken \(broken\) failed: ModuleNotFoundError"):
        assert load_engines() == {}


def test_engine_is_loaded_alone_where_an_entry_point_has_its_name(monkeypatch):
    """The others are loaded too where none has, as an engine may have another name than its entry point."""
    loaded = []

    def point(name):
        def load():
            loaded.append(name)
            return plugin(attrs.evolve(find_engine("sglang"), name=name), name=name)

        return SimpleNamespace(name=name, value=name, dist=None, load=load)

    monkeypatch.setattr(metadata, "entry_points", lambda group: [point("one"), point("two")])
    assert list(load_engines(named="two")) == loaded == ["two"]
    assert list(load_engines(named="three")) == ["one", "two"]


def test_unknown_engine_says_how_to_install_one():
    """With a near name where there is one."""
    with pytest.raises(EngineError, match=r"did you mean 'sglang'\?.*python -m pip install engines/vllm"):
        find_engine("sglnag")


@pytest.mark.parametrize("arguments", [["engine", "vllm"], ["check", "--engine", "vllm"]])
def test_no_engine_installed_is_a_plain_error(monkeypatch, call, arguments):
    """The commands say how to install one."""
    # A command that is imported under the patch would keep the empty table.
    for module in ("engine", "files"):
        importlib.import_module(f"capture_planner.cli.{module}")
    monkeypatch.setattr(shared, "engines", dict)
    monkeypatch.setattr(shared, "_installed", lambda name: {})
    result = call(*arguments)
    assert result.code == 1
    shown = " ".join(result.err.split())
    assert "no engine named 'vllm' is installed; installed: none; install an engine from a clone" in shown


def test_help_lists_engines_with_distribution_and_version(call):
    """``engine --help`` is where a user finds them."""
    shown = " ".join(call("engine", "--help").out.split())
    for name, item in engines().items():
        assert f"{name} release {item.value.version}" in shown
        assert f", from {item.distribution} {item.version}" in shown
        assert all(older.version in shown for older in item.value.older)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "plans/specs/qwen3-8b-eagle3.yaml"]])
def test_commands_that_need_no_engine_import_none(arguments):
    """Only the modules with the hooks, which planning loads for backends."""
    code = f"""
import sys
from capture_planner.cli import main
sys.argv[1:] = {arguments!r}
try:
    main()
except SystemExit:
    pass
print(*(name for name in sys.modules if name.startswith("capture_planner_")), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    loaded = {name for name in ran.stderr.split() if re.match("capture_planner_(vllm|sglang|tensorrt_llm)", name)}
    engines = {"capture_planner_sglang", "capture_planner_tensorrt_llm", "capture_planner_vllm"}
    assert loaded <= engines | {"capture_planner_vllm.attention", "capture_planner_vllm.attention.backend"}


def test_example_engine_captures_and_dispatches():
    """The documentation's engine is loaded like any other, and checked."""
    tiny = load_engines(example(), installed=False)["tiny"].value
    emulation = tiny.emulate(["--sizes", "1,4"], H100)
    assert [graph.entry.num_reqs for graph in emulation.graphs] == [4, 1]
    assert emulation.dispatch(Batch.decode(Role.TARGET, 3, 1)).padded_reqs == 1
    assert emulation.dispatch(Batch.mixed(Role.TARGET, 1, 9)).entry is None
    assert [finding.rule.code for finding in check(emulation, tiny)] == ["EN001"]
    with pytest.raises(FlagError, match="--sizes: it is required"):
        tiny.emulate(["--nope"], H100)


@settings(max_examples=4)
@given(plans(max_reqs=16, max_tokens=64))
def test_example_engine_exports_its_sizes(plan):
    """And the export is proved like any other."""
    tiny = load_engines(example(), installed=False)["tiny"].value
    entries = plan.role(Role.TARGET).entries
    assume(any(entry.query_len == 1 for entry in entries) and plan.limits.max_num_reqs <= 16)
    proved = prove(tiny.export(plan), plan, tiny.emulate)
    assert proved.proof is not None
    dispatcher = Dispatcher(plan)
    for size in proved.sizes:
        assert dispatcher.dispatch(Batch.decode(Role.TARGET, size, 1)).entry is not None
