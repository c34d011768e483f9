"""The vLLM plugin that only checks: when it looks, what it says, and that it never stops an engine."""

import importlib
import logging
import subprocess
import sys
import types
from enum import Enum
from importlib import machinery
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.engines import inside
from capture_planner.engines.launch import STRICT
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.model import Method
from capture_planner.testing import plans
from capture_planner_vllm import vllm_plugin
from capture_planner_vllm.emulation.export import export_vllm
from capture_planner_vllm.inside import hooks, seam
from capture_planner_vllm.inside.agreement import differences

Mode = Enum("Mode", [mode.name for mode in GraphMode])


def config_of(plan):
    """The configuration that vLLM has where it captures what a plan has."""
    sizes = sorted({entry.num_tokens for entry in plan.role(Role.TARGET).entries})
    speculative = None
    if plan.speculative is not None:
        speculative = SimpleNamespace(
            method=plan.speculative.method.value,
            num_speculative_tokens=plan.speculative.num_tokens,
            parallel_drafting=plan.speculative.parallel_drafting,
            num_speculative_tokens_per_batch_size=[list(t) for t in plan.speculative.schedule] or None,
        )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0), cudagraph_mode=Mode.NONE
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=plan.limits.max_num_reqs, max_num_batched_tokens=plan.limits.max_num_tokens
        ),
        speculative_config=speculative,
    )


def said(plan, config, mode=None):
    """All lines."""
    return list(differences(plan, config, mode or plan.role(Role.TARGET).mode.value))


class Manager:
    """What vLLM's graph manager shows of itself."""

    def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len=1):
        self.vllm_config, self.cudagraph_mode = vllm_config, cudagraph_mode


FILE = Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml"
LOCKED = codec.load_plan(FILE)


@pytest.fixture
def plan():
    """A locked plan, with speculation."""
    return LOCKED


@pytest.fixture
def engine(tmp_path, monkeypatch, plan):
    """A process of vLLM with a plan named; gives its graph manager's module."""
    file = tmp_path / "plan.yaml"
    codec.write(file, codec.dumps(plan))
    monkeypatch.setenv(vllm_plugin.PLAN, str(file))
    monkeypatch.delenv(STRICT, raising=False)
    monkeypatch.setattr(inside, "_logged", set())
    monkeypatch.setattr(seam, "_callbacks", {})
    monkeypatch.setenv(vllm_plugin.APPLY, "0")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    module = types.ModuleType(hooks.MANAGERS)
    module.ModelCudaGraphManager = type("ModelCudaGraphManager", (Manager,), {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hooks.MANAGERS, module)
    return module


def make(engine, plan, mode=None, **changes):
    """Make the engine's manager, as its runner does."""
    config = config_of(plan)
    for path, value in changes.items():
        part, name = path.split("__")
        setattr(getattr(config, part), name, value)
    mode = mode or Mode[plan.role(Role.TARGET).mode.name]
    return engine.ModelCudaGraphManager(config, "cuda", mode, decode_query_len=4)


def test_plugin_is_an_entry_point():
    """As vLLM looks for it, among what is installed."""
    (point,) = (
        point
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "capture_planner"
    )
    assert point.load() is vllm_plugin.register


def test_plugin_without_a_plan_does_nothing(engine, plan, monkeypatch, caplog):
    """No watch, no line, and the manager as it was."""
    monkeypatch.delenv(vllm_plugin.PLAN)
    made, finders = engine.ModelCudaGraphManager.__init__, list(sys.meta_path)
    vllm_plugin.register()
    assert engine.ModelCudaGraphManager.__init__ is made
    assert sys.meta_path == finders
    make(engine, plan, scheduler_config__max_num_seqs=1)
    assert not caplog.records


def test_register_without_a_plan_imports_nothing_of_the_planner():
    """A vLLM process without a plan loads this module and no other of ours."""
    code = "import sys; from capture_planner_vllm import vllm_plugin as v; v.register(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert [name for name in loaded if name.startswith("capture_planner")] == [
        "capture_planner_vllm",
        "capture_planner_vllm.vllm_plugin",
    ]


def test_register_with_a_plan_imports_nothing_heavy():
    """Neither torch nor vLLM; calling it again installs no second finder."""
    code = (
        f"import os, sys; from capture_planner_vllm import vllm_plugin as v; os.environ[v.PLAN] = {str(FILE)!r}; "
        "v.register(); v.register(); from capture_planner_vllm.inside import seam; "
        "print(sum(isinstance(f, seam._Finder) for f in sys.meta_path), *sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *loaded = run.stdout.split()
    assert count == "1"
    assert not {"torch", "vllm", "numpy", "hypothesis"} & set(loaded)


def test_no_difference_is_one_info_line(engine, plan, caplog):
    """And a manager that is made twice says it once."""
    caplog.set_level(logging.INFO, "capture_planner.vllm")
    vllm_plugin.register()
    make(engine, plan)
    make(engine, plan)
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.INFO, "capture_planner.vllm")


def test_each_difference_is_one_warning(engine, plan, caplog):
    """In the order of the configuration; registered any number of times, and the manager made as it was."""
    vllm_plugin.register()
    watched = engine.ModelCudaGraphManager.__init__
    for _ in range(3):
        vllm_plugin.register()
    assert engine.ModelCudaGraphManager.__init__ is watched
    manager = make(engine, plan, mode=Mode.PIECEWISE, scheduler_config__max_num_seqs=7)
    assert manager.cudagraph_mode is Mode.PIECEWISE
    lines = [record.getMessage() for record in caplog.records]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert [line.partition(":")[0] for line in lines] == ["cudagraph_mode", "max_num_seqs"]
    assert all("\n" not in line for line in lines)


def test_strict_plugin_raises_differences(engine, plan, monkeypatch, caplog):
    """Every line at once, and only where something differs."""
    monkeypatch.setenv(STRICT, "1")
    vllm_plugin.register()
    make(engine, plan)
    with pytest.raises(RunError, match="max_num_seqs: the plan has") as error:
        make(engine, plan, scheduler_config__max_num_seqs=7, scheduler_config__max_num_batched_tokens=9)
    assert str(error.value).count("\n") == 1


@pytest.mark.parametrize("how", ["no file", "no plan"])
def test_unreadable_plan_is_one_error_line(engine, plan, monkeypatch, caplog, tmp_path, how):
    """At registration, before a model is loaded; the engine goes on, unless it is strict."""
    if how == "no file":
        monkeypatch.setenv(vllm_plugin.PLAN, str(tmp_path / "missing.yaml"))
    else:
        (tmp_path / "plan.yaml").write_text("a: [1\nb", "utf-8")
    vllm_plugin.register()
    make(engine, plan)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("no plan is applied: ")
    assert "\n" not in record.getMessage()
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(RunError, match="no plan is applied"):
        vllm_plugin.register()


def test_failed_check_is_one_error_line(engine, monkeypatch, caplog):
    """A configuration of another make: the engine goes on, unless it is strict."""
    vllm_plugin.register()
    engine.ModelCudaGraphManager(SimpleNamespace(), "cuda", Mode.FULL)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("nothing is checked: ")
    assert "\n" not in record.getMessage()
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(RunError, match="nothing is checked"):
        engine.ModelCudaGraphManager(SimpleNamespace(), "cuda", Mode.FULL)


def test_missing_manager_is_one_error_line(engine, caplog):
    """Another version has it under another name."""
    del engine.ModelCudaGraphManager
    hooks.check_managers(engine)
    assert "has no ModelCudaGraphManager" in caplog.text


SOURCE = """
class ModelCudaGraphManager:
    def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len=1):
        self.vllm_config, self.cudagraph_mode = vllm_config, cudagraph_mode
"""


class DelegatingFinder:
    """Asks all other finders, as the finders of coverage tools do."""

    def find_spec(self, *asked):
        found = (finder.find_spec(*asked) for finder in sys.meta_path if not isinstance(finder, DelegatingFinder))
        return next((spec for spec in found if spec is not None), None)


@pytest.mark.parametrize("delegating", ["none", "before", "after"])
def test_plugin_waits_for_the_manager_import(engine, plan, tmp_path, monkeypatch, caplog, delegating):
    """The usual case: plugins are loaded before the runner's modules. The module is as it would have been."""
    monkeypatch.delitem(sys.modules, hooks.MANAGERS)
    # Not those that happen to be there, which may delegate as well.
    finders = [machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder]
    monkeypatch.setattr(sys, "meta_path", [DelegatingFinder(), *finders] if delegating == "after" else finders)
    folder = tmp_path
    for part in hooks.MANAGERS.split(".")[:-1]:
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "cudagraph_utils.py").write_text(SOURCE, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    vllm_plugin.register()
    vllm_plugin.register()
    if delegating == "before":
        monkeypatch.setattr(sys, "meta_path", [DelegatingFinder(), *sys.meta_path])
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    module = importlib.import_module(hooks.MANAGERS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    assert not type(module.__loader__).__module__.startswith("capture_planner")
    assert module.__spec__.loader is module.__loader__
    vllm_plugin.register()
    make(module, plan, scheduler_config__max_num_seqs=7)
    (record,) = caplog.records
    assert record.getMessage().startswith("max_num_seqs: the plan has ")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_missing_and_added_sizes_are_listed(plan):
    """Those that vLLM lacks, and those that it has besides."""
    config = config_of(plan)
    sizes = config.compilation_config.cudagraph_capture_sizes
    config.compilation_config.cudagraph_capture_sizes = [*sizes[1:], 9999]
    (line,) = said(plan, config)
    assert line == f"cudagraph_capture_sizes: vLLM lacks {sizes[0]} and vLLM adds 9999"


def test_speculative_differences_are_reported(plan):
    """In being there, in its method, its length and its schedule."""
    config = config_of(plan)
    config.speculative_config = None
    assert said(plan, config) == ["speculative_config: the plan speculates, vLLM does not"]
    config = config_of(plan)
    assert said(replace(plan, speculative=None), config) == ["speculative_config: vLLM speculates, the plan does not"]
    config.speculative_config.method = "deepseek_mtp"
    assert said(plan, config) == ["speculative_config.method: the plan has eagle3, vLLM has deepseek_mtp"]
    mtp = attrs.evolve(plan.speculative, method=Method.MTP)
    assert not said(replace(plan, speculative=mtp), config)
    config = config_of(plan)
    config.speculative_config.num_speculative_tokens = 99
    assert "has 99" in said(plan, config)[0]
    config = config_of(plan)
    most = plan.limits.max_num_reqs
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 4, 3), (5, most, 1)]
    (line,) = said(plan, config)
    assert f"{most - 4} of {most} batch sizes differ, the first at 5 requests" in line


@given(plans(varying=False), st.randoms(use_true_random=False))
def test_plan_has_no_difference_from_its_own_configuration(plan, random):
    """Whatever it speculates, and however its schedule is written: vLLM takes its ranges in any order."""
    config = config_of(plan)
    assert not said(plan, config)
    if plan.speculative is not None:
        tiers = list(plan.speculative.tiers(plan.limits.max_num_reqs))
        random.shuffle(tiers)
        config.speculative_config.num_speculative_tokens_per_batch_size = tiers
        assert not said(plan, config)


CHANGES = {
    "cudagraph_capture_sizes": ("compilation_config", lambda value: [*value, 1 << 20]),
    "max_cudagraph_capture_size": ("compilation_config", lambda value: value + 1),
    "max_num_batched_tokens": ("scheduler_config", lambda value: value + 1),
    "max_num_seqs": ("scheduler_config", lambda value: value + 1),
}


@given(plans(varying=False), st.sets(st.sampled_from(sorted(CHANGES))), st.booleans())
def test_changed_configuration_values_are_reported(plan, changed, mode_too):
    """A line for each, and none for anything else."""
    config = config_of(plan)
    for name in changed:
        part, change = CHANGES[name]
        holder = getattr(config, part)
        setattr(holder, name, change(getattr(holder, name)))
    mode = plan.role(Role.TARGET).mode
    other = GraphMode.NONE if mode is not GraphMode.NONE else GraphMode.FULL
    lines = said(plan, config, (other if mode_too else mode).value)
    named = {line.partition(":")[0] for line in lines}
    assert named == changed | ({"cudagraph_mode"} if mode_too else set())
    assert len(lines) == len(named)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_schedule_differences_equal_brute_force(ranges, random):
    """Counted by brute force, over ranges with gaps, in any order, that may draft more than there are."""
    first, schedule = 1, []
    for gap, length, k in ranges:
        start = first if not schedule else first + gap - 1
        schedule.append((start, start + length - 1, k))
        first = start + length
    plan = LOCKED
    most, tokens = plan.limits.max_num_reqs, plan.speculative.num_tokens
    drafted = [min([k for start, _, k in schedule if start <= num_reqs][-1], tokens) for num_reqs in range(1, most + 1)]
    wrong = [n for n, k in enumerate(drafted, 1) if k != plan.speculative.draft_tokens(n)]
    config = config_of(plan)
    random.shuffle(schedule)
    config.speculative_config.num_speculative_tokens_per_batch_size = schedule
    lines = said(plan, config)
    assert len(lines) == bool(wrong)
    if wrong:
        assert f": {len(wrong)} of {most} batch sizes differ, the first at {wrong[0]} requests:" in lines[0]


PLANS = sorted((Path(__file__).parents[2] / "plans" / "locked").glob("*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_exported_flags_have_no_difference(path):
    """Sizes that the plan's own export gives vLLM are no difference."""
    plan = codec.load_plan(path)
    sizes = export_vllm(plan).settings.get("cudagraph-capture-sizes", [])
    config = config_of(plan)
    config.compilation_config.cudagraph_capture_sizes = sorted(sizes)
    config.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
    assert not [line for line in said(plan, config) if "capture_size" in line and sizes]
