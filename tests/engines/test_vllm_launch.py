"""The flags that launch adds to a vLLM command: with them the emulation has the plan's limits, mode and drafts."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given

from capture_planner import codec
from capture_planner.codec import shipped as catalog
from capture_planner.engines.export import DRAFT_MODEL
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.model import Method
from capture_planner_vllm.emulation.engine import resolve
from capture_planner_vllm.emulation.export import export_vllm, plan_sizes
from capture_planner_vllm.emulation.flags import read
from capture_planner_vllm.emulation.launch import launch_vllm
from engines.generators.vllm_plans import vllm_plans

PLANS = sorted((Path(__file__).parents[2] / "plans" / "locked").glob("*.yaml"))


def command_for(plan):
    """What a user gives: the model, and the drafter where a plan does not name it."""
    speculation = dict(export_vllm(plan).settings.get("speculative-config", {}))
    speculation.pop("attention_backend", None)
    if speculation.get("model") != DRAFT_MODEL:
        return [plan.model.name]
    return [plan.model.name, "--speculative-config", json.dumps({**speculation, "model": "x/drafter"})]


@given(vllm_plans())
def test_completed_command_lacks_nothing(plan):
    """Launching what was launched adds no flag, and no flag of it contradicts the plan."""
    assume(not plan.model.name.startswith("-"))
    words = command_for(plan)
    added = launch_vllm(plan, words).arguments
    again = launch_vllm(plan, [*words, *added])
    assert again.arguments == ()
    compilation = read([*words, *added]).get("compilation_config")
    sizes = plan_sizes(plan, plan.limits.max_num_tokens)
    assert compilation == {"cudagraph_mode": plan.role(Role.TARGET).mode.value if sizes else GraphMode.NONE.value}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_emulation_of_a_launched_command_has_the_plan_s_settings(path):
    """Limits, the largest size, K, the schedule; or both refuse the plan's backend on that machine."""
    plan = codec.load_plan(path)
    words = command_for(plan)
    try:
        settings, _ = resolve([*words, *launch_vllm(plan, words).arguments], plan.environment)
    except FlagError as error:
        pytest.skip(f"vLLM does not start so on {plan.environment.name}: {error}")
    assert settings.max_num_seqs == plan.limits.max_num_reqs
    assert settings.max_num_batched_tokens == plan.limits.max_num_tokens
    if plan.speculative is None or not plan.speculative.has_own_rows:  # vLLM pads those rows to sizes of the target
        assert settings.max_size == max(plan_sizes(plan, plan.limits.max_num_tokens), default=0)
    assert settings.num_speculative_tokens == (0 if plan.speculative is None else plan.speculative.num_tokens)
    assert settings.mode is plan.role(Role.TARGET).mode


def test_backend_that_the_machine_has_not_is_left_to_vllm():
    """With vLLM's reason; FlashAttention needs compute capability 8."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem.endswith(".t4")))
    launched = launch_vllm(plan, command_for(plan))
    assert "--attention-backend" not in launched.arguments
    assert "does not run on compute capability 7.5" in launched.notes[-1]


def test_script_arguments_have_a_drafter_to_be_named():
    """Without a command nothing can be missing."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem == "qwen3-8b-eagle3.h100"))
    arguments = launch_vllm(plan, []).arguments
    assert arguments[:2] == ("--model", plan.model.name)
    assert DRAFT_MODEL in arguments[-1]


def test_drafter_of_the_target_itself_needs_no_name():
    """MTP layers are part of the target."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem.startswith("deepseek-v3-mtp")))
    assert plan.speculative.method is Method.MTP
    words = launch_vllm(plan, [plan.model.name]).arguments
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "attention_backend": "FLASH_ATTN_MLA",
    }
    deployed = ["--speculative-config", '{"method": "deepseek_mtp", "num_speculative_tokens": 1}']
    assert "--speculative-config" not in launch_vllm(plan, [plan.model.name, *deployed]).arguments


def test_file_of_the_command_counts_as_flags(tmp_path):
    """VLLM's --config."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem == "llama-3.1-8b.h100"))
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 256\nmax-num-batched-tokens: 4096\n", "utf-8")
    with pytest.raises(FlagError, match=r"^--max-num-batched-tokens: given 4096") as error:
        launch_vllm(plan, [plan.model.name, "--config", str(file)])
    assert len(error.value.problems) == 1
    assert catalog.find_environment("h100") == plan.environment


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--distributed-executor-backend", "ray"), 1),
        (("-dpb", "ray"), 1),
        (("--distributed-executor-backend", "mp"), 0),
    ],
    ids=["executor", "data-parallel", "processes"],
)
def test_workers_of_ray_need_a_variable(flags, expected):
    """Ray copies variables by their names, and vLLM's list of them does not have the plugin's."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem == "llama-3.1-8b.h100"))
    notes = launch_vllm(plan, [*command_for(plan), *flags]).notes
    assert sum("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=CAPTURE_PLANNER_" in note for note in notes) == expected


@pytest.mark.parametrize("flag", ["-O0", "-cc.mode=0"])
def test_flags_that_turn_piecewise_graphs_off_are_noted(flag):
    """Nothing is compiled in pieces then; with vLLM's breakable graphs PIECEWISE ones are captured all the same."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem == "llama-3.1-8b.h100"))
    command = command_for(plan)
    assert not any("PIECEWISE" in note for note in launch_vllm(plan, command).notes)
    assert any("captures none of the plan's PIECEWISE" in note for note in launch_vllm(plan, [*command, flag]).notes)
    breakable = ["VLLM_USE_BREAKABLE_CUDAGRAPH=1", *command, flag]
    assert not any("PIECEWISE" in note for note in launch_vllm(plan, breakable).notes)


def test_plan_that_model_runner_v1_would_run_is_noted():
    """VLLM 0.33 runs parallel heads on it, and the plugin cannot apply a plan there."""
    plan = codec.load_plan(next(path for path in PLANS if path.stem == "gpt-oss-20b-p-eagle.h100"))
    assert any("model runner V1" in note for note in launch_vllm(plan, command_for(plan)).notes)
    plain = codec.load_plan(next(path for path in PLANS if path.stem == "llama-3.1-8b.h100"))
    assert not any("model runner V1" in note for note in launch_vllm(plain, command_for(plain)).notes)
