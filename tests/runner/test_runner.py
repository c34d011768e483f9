"""The runner on a plan that ships, and inputs other than token ids."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2VLConfig

from capture_planner import load_backends, load_plan, load_spec
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request, generated
from support.runs import CPU

pytestmark = pytest.mark.usefixtures("one_thread")
PLANS = Path(__file__).parents[2] / "plans"
PAGES = PageFormat(page_size=16, num_pages=1 + 8 * 16)


def runner_of(plan, target, **options):
    """Make a runner with a random head where the plan has a drafter."""
    drafter = None
    if plan.speculative is not None:
        places, length = plan.limits.max_num_reqs, plan.model.max_model_len
        drafter = choose_drafter("random", plan.speculative, target, num_states=places, length=length)
    return Runner(plan, target, drafter, load_backends(), RecordedGraphs(), pages=PAGES, options=Options(**options))


def test_every_uniform_decode_of_the_shipped_plan_is_served_from_a_full_graph():
    """Target, draft prefill and draft decodes; nothing runs eager at all."""
    plan = load_plan(str(PLANS / "locked" / "tiny-reference-cpu.cpu.yaml"))
    target = load_target(None, plan.model, device=torch.device("cpu"))
    requests = generated(
        12, seed=3, rate=200, prompt_tokens=(1, 40), output_tokens=(8, 16), vocab_size=target.vocab_size
    )
    with runner_of(plan, target) as runner:
        runner.capture()
        runner.serve(requests)
        forwards = runner.session.forwards
    for role in Role:
        decodes = [f for f in forwards if f.role is role and f.query_len is not None]
        assert decodes
        assert {f.mode for f in decodes} == {GraphMode.FULL}
    assert all(f.entry is not None for f in forwards)
    assert {f.mode for f in forwards if f.query_len is None} == {GraphMode.PIECEWISE}


def test_a_drafter_goes_with_a_plan_that_has_one():
    """Neither may be without the other."""
    plan = load_plan(str(PLANS / "locked" / "tiny-reference-cpu.cpu.yaml"))
    target = load_target(None, plan.model, device=torch.device("cpu"))
    with pytest.raises(RunError, match="the plan has a drafter and none was given"):
        Runner(plan, target, None, load_backends(), RecordedGraphs(), pages=PAGES)
    alone = replace(plan, speculative=None, roles=plan.roles[:1])
    drafter = choose_drafter("random", plan.speculative, target, num_states=8, length=256)
    with pytest.raises(RunError, match="a drafter was given, and the plan has none"):
        Runner(alone, target, drafter, load_backends(), RecordedGraphs(), pages=PAGES)


@pytest.mark.parametrize("embeddings", [False, True])
def test_multimodal_rope_has_a_static_buffer_of_its_own(embeddings, tmp_path):
    """Three positions a token, and embeddings in place of ids, inside graphs: the model's own answers."""
    spec = load_spec(str(PLANS / "specs" / "tiny-reference-cpu.yaml"))
    model = replace(spec.model, dtype=DataType.FLOAT64, mrope=True, embeddings=embeddings)
    plan = make_plan(replace(spec, model=model), CPU, load_backends())
    assert "mrope_positions" in {field.name for field in plan.role("target").inputs}
    text = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    seeing = {"depth": 1, "num_heads": 2, "embed_dim": 16, "hidden_size": 64}
    config = Qwen2VLConfig(text_config=text, vision_config=seeing)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        own = AutoModelForImageTextToText.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    own.save_pretrained(tmp_path)
    target = load_target(tmp_path, model, device=torch.device("cpu"), dtype=torch.float64)
    prompts = [(5, 9, 200, 31), tuple(range(40, 70)), (7,)]
    requests = [Request(name=str(i), arrival=0.0, prompt=prompt, max_new_tokens=6) for i, prompt in enumerate(prompts)]
    with runner_of(plan, target, poison=True, debug=True) as runner:
        runner.capture()
        answers = {done.name: done.tokens for done in runner.serve(requests)}
        assert any(f.mode is GraphMode.FULL for f in runner.session.forwards)
    for request in requests:
        tokens = list(request.prompt)
        for _ in range(request.max_new_tokens):
            with torch.no_grad():
                logits = own(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        assert answers[request.name] == tuple(tokens[len(request.prompt) :])
