"""The vLLM plugin under a plan: what it sets, what it leaves to vLLM, and that it never stops an engine."""

import dataclasses
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from capture_planner import codec
from capture_planner.engines import inside
from capture_planner.engines.launch import STRICT
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner_vllm import vllm_plugin
from capture_planner_vllm.emulation.export import plan_sizes
from capture_planner_vllm.inside import hooks, log, seam
from support.vllm_module import (
    CONFIG,
    DRAFTERS,
    MANAGERS,
    CUDAGraphMode,
    capture,
    config_for,
    manager_for,
    vllm_modules,
)

PLANS = Path(__file__).parents[2] / "plans" / "locked"
FILE = PLANS / "qwen3-8b-eagle3.h100.yaml"
PLAN = codec.load_plan(FILE)


@pytest.fixture
def modules(monkeypatch, caplog):
    """A process of vLLM with a plan named and the plugin registered; gives vLLM's modules."""
    monkeypatch.setattr(inside, "_logged", set())
    monkeypatch.setattr(seam, "_callbacks", {})
    monkeypatch.setattr(hooks, "decisions", {})
    monkeypatch.setattr(hooks, "_reasons", log.ModeReasons())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(vllm_plugin.PLAN, str(FILE))
    for name in (vllm_plugin.APPLY, vllm_plugin.OBSERVE, vllm_plugin.PROFILE, STRICT):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, "capture_planner.vllm")
    with vllm_modules() as made:
        yield made


def configured(modules, **changes):
    """The configuration after vLLM has set its sizes."""
    config = config_for(modules, PLAN)
    for name, value in changes.items():
        setattr(config, name, value)
    config._set_cudagraph_sizes()
    return config


def errors(caplog):
    """The lines of warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def own_sizes(manager):
    """The sizes that the stand-in for vLLM captures by itself."""
    return [desc.num_tokens for descs in manager._capture_descs.values() for desc in descs]


def test_plan_replaces_sizes_and_graphs(modules, caplog):
    """The configuration has every size and the largest as its bound; each role its own entries."""
    vllm_plugin.register()
    config = configured(modules)
    sizes = plan_sizes(PLAN, PLAN.limits.max_num_tokens)
    assert config.compilation_config.cudagraph_capture_sizes == sizes
    assert config.compilation_config.max_cudagraph_capture_size == sizes[-1]
    for role in PLAN.planned:
        captured = capture(manager_for(modules, config, PLAN, role))
        assert len(captured) == len(PLAN.role(role).entries)
    assert not errors(caplog)


def test_registering_again_changes_nothing(modules):
    """VLLM may load its plugins several times; memory profiling makes managers before the real ones."""
    for _ in range(3):
        vllm_plugin.register()
    first = modules[MANAGERS].CudaGraphManager._init_candidates
    vllm_plugin.register()
    assert modules[MANAGERS].CudaGraphManager._init_candidates is first
    config = configured(modules)
    tables = [manager_for(modules, config, PLAN, Role.TARGET)._candidates for _ in range(2)]
    assert tables[0] == tables[1]
    assert tables[0] is not tables[1]


def test_apply_0_only_checks(modules, monkeypatch, caplog):
    """The sizes and the graphs stay vLLM's own, and the difference is a warning."""
    monkeypatch.setenv(vllm_plugin.APPLY, "0")
    vllm_plugin.register()
    config = configured(modules)
    assert own_sizes(manager_for(modules, config, PLAN, Role.TARGET)) == [512, 1]
    assert errors(caplog)[0].startswith("cudagraph_capture_sizes: vLLM lacks ")


def test_candidates_are_few(modules):
    """Dispatch walks a list: it must stay as short as vLLM's own, one graph for each kind of batch."""
    vllm_plugin.register()
    config = configured(modules)
    for role in PLAN.planned:
        manager = manager_for(modules, config, PLAN, role)
        assert max(len(tried) for tried in manager._candidates.values()) <= 2


def test_given_sizes_are_replaced_with_a_warning(modules, caplog):
    """Flags of the user that say otherwise; ``launch`` refuses them before."""
    vllm_plugin.register()
    config = config_for(modules, PLAN)
    config.compilation_config.cudagraph_capture_sizes = [4, 2]
    config._set_cudagraph_sizes()
    assert max(config.compilation_config.cudagraph_capture_sizes) > 4
    (line,) = errors(caplog)
    assert line.endswith("sizes replace [2, 4]")


@pytest.mark.parametrize("eager", ["enforce_eager", "mode", "no model"])
def test_configuration_without_graphs_stays_as_it_is(modules, caplog, eager):
    """Also a configuration that vLLM makes for a part of its own, without a model."""
    vllm_plugin.register()
    config = config_for(modules, PLAN)
    if eager == "enforce_eager":
        config.model_config.enforce_eager = True
    elif eager == "mode":
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    else:
        config.model_config = None
    config._set_cudagraph_sizes()
    assert config.compilation_config.cudagraph_capture_sizes == [1, 512]
    assert not errors(caplog)


def test_first_model_runner_is_refused_with_its_reason(modules, caplog):
    """It has one list of sizes for all roles."""
    vllm_plugin.register()
    config = configured(modules, use_v2_model_runner=False)
    assert config.compilation_config.cudagraph_capture_sizes == [1, 512]
    (line,) = errors(caplog)
    assert line.startswith("no plan is applied: model runner V1")
    assert line.endswith("it does so for a feature")


def refused(modules, config, role=Role.TARGET):
    """Whether the manager has vLLM's own graphs."""
    return own_sizes(manager_for(modules, config, PLAN, role)) == sorted(
        config.compilation_config.cudagraph_capture_sizes, reverse=True
    )


def test_other_draft_length_is_refused_with_the_flag(modules, caplog):
    """No decode of 1 + 5 tokens fits a graph for 1 + 3; one line, though sizes and managers ask."""
    vllm_plugin.register()
    config = config_for(modules, PLAN)
    config.speculative_config.num_speculative_tokens = config.num_speculative_tokens = 5
    config._set_cudagraph_sizes()
    assert refused(modules, config)
    (line,) = errors(caplog)
    assert 'give --speculative-config with "num_speculative_tokens": 3' in line


def test_bound_below_the_largest_graph_is_refused_with_the_flag(modules, caplog):
    """A configuration that was made before the plugin was there."""
    config = configured(modules)
    vllm_plugin.register()
    assert refused(modules, config)
    largest = plan_sizes(PLAN, PLAN.limits.max_num_tokens)[-1]
    (line,) = errors(caplog)
    assert line.endswith(f"give --max-cudagraph-capture-size {largest}")


def test_half_batches_are_refused(modules, caplog):
    """Dual batch overlap has graphs that no plan has."""
    vllm_plugin.register()
    config = config_for(modules, PLAN)
    config.parallel_config.enable_dbo = True
    config._set_cudagraph_sizes()
    assert refused(modules, config)
    assert "--enable-dbo" in errors(caplog)[0]


def test_unknown_class_keeps_its_own_graphs(modules, caplog):
    """A drafter of another kind has a manager of its own."""
    vllm_plugin.register()
    config = configured(modules)

    class DFlashCudaGraphManager(modules[MANAGERS].CudaGraphManager):
        """Another manager of vLLM's."""

    manager = DFlashCudaGraphManager(config, None, CUDAGraphMode.FULL_DECODE_ONLY, 4)
    assert own_sizes(manager)
    assert errors(caplog) == ["DFlashCudaGraphManager keeps vLLM's own graphs: the plan has no role for it"]


def test_role_without_a_plan_keeps_its_own_graphs(modules, monkeypatch, caplog):
    """Also said once for both of its managers."""
    vllm_plugin.register()
    config = configured(modules)
    only_target = replace(PLAN, roles=PLAN.roles[:1])
    monkeypatch.setattr(hooks, "current_plan", lambda: only_target)
    for _ in range(2):
        assert own_sizes(manager_for(modules, config, PLAN, Role.DRAFT_DECODE))
    assert errors(caplog) == ["SpeculatorCudaGraphManager keeps vLLM's own graphs: the plan has no draft_decode"]


def other_seam(managers, what):
    """Make something otherwise, as another release may."""
    owner = managers.CudaGraphManager
    if what == "method":
        owner._init_candidates = lambda self, sizes=(): None
    elif what == "no method":
        del owner._init_candidates
    elif what == "parameter":
        owner.dispatch = lambda self, num_reqs, num_tokens, uniform_token_count, num_active_loras, shape: None
    elif what == "field":
        names = ["cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "is_prefill"]
        managers.BatchExecutionDescriptor = dataclasses.make_dataclass("BatchExecutionDescriptor", names)
    else:
        del managers.BatchExecutionDescriptor


@pytest.mark.parametrize("what", ["method", "no method", "parameter", "field", "class"])
def test_unknown_seam_leaves_vllm_alone(modules, monkeypatch, caplog, what):
    """One line, and neither the sizes nor the managers change; strict mode stops the start."""
    other_seam(modules[MANAGERS], what)
    own = getattr(modules[MANAGERS].CudaGraphManager, "_init_candidates", None)
    vllm_plugin.register()
    assert getattr(modules[MANAGERS].CudaGraphManager, "_init_candidates", None) is own
    assert configured(modules).compilation_config.cudagraph_capture_sizes == [1, 512]
    (line,) = errors(caplog)
    assert line.startswith("no plan is applied: this vLLM is not known: ")
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(RunError, match="this vLLM is not known"):
        vllm_plugin.register()


def test_manager_with_other_attributes_keeps_its_own_graphs(modules, caplog):
    """What the seam reads must be there, and what it fills must be empty."""
    vllm_plugin.register()
    config = configured(modules)
    manager = manager_for(modules, config, PLAN, Role.TARGET)
    assert not hooks.fill(manager, PLAN)
    del manager.lora_capture_cases
    assert not hooks.fill(manager, PLAN)
    lines = errors(caplog)
    assert lines[0].endswith("this vLLM is not known: its tables are filled before _init_candidates")
    assert lines[1].endswith("this vLLM is not known: it has no lora_capture_cases")


def test_unknown_managers_are_noticed_before_they_are_imported(modules, monkeypatch, tmp_path, caplog):
    """The configuration is made in a process that never imports them."""
    vllm_plugin.register()
    monkeypatch.delitem(sys.modules, MANAGERS)
    source = tmp_path / "cudagraph_utils.py"
    spec = SimpleNamespace(origin=str(source))
    monkeypatch.setattr(hooks.importlib.util, "find_spec", lambda name: spec)
    source.write_text("class CudaGraphManager:\n    def _init_candidates(self) -> None: ...\n", "utf-8")
    assert configured(modules).compilation_config.cudagraph_capture_sizes != [1, 512]
    source.write_text("class CudaGraphManager: ...\n", "utf-8")
    assert configured(modules).compilation_config.cudagraph_capture_sizes == [1, 512]
    assert "has no CudaGraphManager._init_candidates" in errors(caplog)[0]


def test_older_descriptor_is_built_from_the_fields_that_it_has(modules, monkeypatch):
    """VLLM 0.26 has neither ``max_query_len`` nor ``num_ubatches``."""
    older = dataclasses.make_dataclass(
        "BatchExecutionDescriptor",
        [
            ("cg_mode", object),
            ("num_tokens", int),
            ("num_reqs", object),
            ("uniform_token_count", object, None),
            ("num_active_loras", int, 0),
        ],
        frozen=True,
    )
    monkeypatch.setattr(modules[MANAGERS], "BatchExecutionDescriptor", older)
    vllm_plugin.register()
    manager = manager_for(modules, configured(modules), PLAN, Role.TARGET)
    assert {type(desc) for descs in manager._capture_descs.values() for desc in descs} == {older}


@pytest.mark.parametrize(
    "place", ["facts_of", "role_table", "_fill_tables", "agreement.limit_differences", "agreement.plan_sizes"]
)
def test_error_of_ours_leaves_vllm_alone(modules, monkeypatch, caplog, place):
    """One line with its kind; the tables are vLLM's own, that of the adapters too, and no plan counts as applied."""
    vllm_plugin.register()
    config = configured(modules)
    own = [0, 2, 5]
    owner, name = (hooks.agreement, place.split(".")[1]) if "." in place else (hooks, place)
    monkeypatch.setattr(owner, name, lambda *words: 1 // 0)
    manager = modules[MANAGERS].ModelCudaGraphManager(config, None, CUDAGraphMode.FULL_AND_PIECEWISE, 4, own)
    assert own_sizes(manager) == sorted(config.compilation_config.cudagraph_capture_sizes, reverse=True)
    assert manager._lora_dispatch_map == {1: 2, 2: 2, 3: 5, 4: 5, 5: 5}
    assert Role.TARGET not in hooks.decisions
    assert "ZeroDivisionError" in errors(caplog)[0]


def test_strict_raises_what_is_else_logged(modules, monkeypatch):
    """A start that cannot follow the plan does not start."""
    monkeypatch.setenv(STRICT, "1")
    vllm_plugin.register()
    config = configured(modules)
    manager_for(modules, config, PLAN, Role.TARGET)
    with pytest.raises(RunError, match="not captured: vLLM resolved the target to PIECEWISE"):
        manager_for(modules, config, PLAN, Role.TARGET, GraphMode.PIECEWISE)
    config.scheduler_config.max_num_seqs = 7
    with pytest.raises(RunError, match=r"not captured|max_num_seqs"):
        manager_for(modules, config, PLAN, Role.TARGET)


def test_lower_mode_is_a_decision_with_the_reason_of_vllm(modules):
    """As vLLM logs it, where it resolves the mode."""
    vllm_plugin.register()
    config = configured(modules)
    text = "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with X backend; setting cudagraph_mode=PIECEWISE"
    logging.getLogger("vllm.config.compilation").warning(text)
    manager_for(modules, config, PLAN, Role.TARGET, GraphMode.PIECEWISE)
    (decision,) = hooks.decisions[Role.TARGET]
    assert (decision.rule, decision.before, decision.after) == ("engine-mode", "FULL_AND_PIECEWISE", "PIECEWISE")
    assert decision.message.endswith(text)


def test_planned_role_without_a_manager_is_a_decision(modules, caplog):
    """An independent draft model has no graphs in vLLM."""
    vllm_plugin.register()
    config = configured(modules)
    config.speculative_config.method = "draft_model"
    manager_for(modules, config, PLAN, Role.TARGET)
    assert [hooks.decisions[role][0].rule for role in (Role.DRAFT_PREFILL, Role.DRAFT_DECODE)] == [
        "engine-no-manager"
    ] * 2
    assert sum("vLLM has no graphs for" in line for line in errors(caplog)) == 2


@pytest.mark.parametrize("what", ["no plan", "another draft length"])
def test_next_engine_of_a_process_has_none_of_the_decisions(modules, monkeypatch, what):
    """Also where it keeps vLLM's own graphs."""
    vllm_plugin.register()
    config = configured(modules)
    config.speculative_config.method = "draft_model"
    manager_for(modules, config, PLAN, Role.TARGET, GraphMode.PIECEWISE)
    assert [*hooks.decisions] == [Role.DRAFT_PREFILL, Role.DRAFT_DECODE, Role.TARGET]
    if what == "no plan":
        monkeypatch.delenv(vllm_plugin.PLAN)
    else:
        config.speculative_config.num_speculative_tokens = config.num_speculative_tokens = 5
    assert own_sizes(manager_for(modules, config, PLAN, Role.TARGET))
    assert not hooks.decisions


def test_single_steps_replace_chains_where_the_drafter_has_none(modules, monkeypatch, caplog):
    """The schedule's chains become one graph of a single step for each size."""
    schedule = attrs.evolve(PLAN.speculative, schedule=((1, 8, 3), (9, 256, 2)))
    chain = Entry(mode=GraphMode.FULL, num_tokens=8, num_reqs=8, query_len=1)
    entries = tuple(attrs.evolve(chain, draft_steps=steps) for steps in (2, 1))
    plan = replace(
        PLAN, speculative=schedule, roles=(*PLAN.roles[:2], replace(PLAN.role(Role.DRAFT_DECODE), entries=entries))
    )
    monkeypatch.setattr(hooks, "current_plan", lambda: plan)
    vllm_plugin.register()
    config = config_for(modules, plan)
    config._set_cudagraph_sizes()
    chains = modules[DRAFTERS].SpeculatorBatchDescriptor
    fused = capture(manager_for(modules, config, plan, Role.DRAFT_DECODE), chains=True)
    assert [desc.num_speculative_tokens for desc in fused] == [3, 2]
    assert {type(desc) for desc in fused} == {chains}
    assert not errors(caplog)
    (single,) = capture(manager_for(modules, config, plan, Role.DRAFT_DECODE), chains=False)
    assert not isinstance(single, chains)
    assert "runs single steps" in errors(caplog)[0]


def test_missing_configuration_class_is_a_warning(modules, caplog):
    """The managers still refuse a bound that is too low."""
    del modules[CONFIG].VllmConfig
    vllm_plugin.register()
    assert errors(caplog) == ["capture sizes stay vLLM's own: vllm.config.vllm has no VllmConfig"]


def test_observer_attaches_after_the_plan(modules, monkeypatch):
    """With what reads the plan that is named by then: another engine of the process may have another."""
    attached = []
    observer = SimpleNamespace(attach=lambda module, plan, decisions: attached.append((module, plan, decisions)))
    monkeypatch.setitem(sys.modules, "capture_planner_vllm.inside.observe", observer)
    monkeypatch.setenv(vllm_plugin.OBSERVE, "folder")
    vllm_plugin.register()
    monkeypatch.delenv(vllm_plugin.PLAN)
    vllm_plugin.register()
    assert attached == [(modules[MANAGERS], hooks.current_plan, hooks.decisions)] * 2
