"""With a plan, eager, and without speculation: the same tokens, whatever is drafted or poisoned."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from capture_planner import load_backends
from capture_planner.errors import PlanningError
from capture_planner.planning.planner import plan as make_plan
from capture_planner_runner.capture.variants import without_graphs, without_speculation
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.runs import CPU, VOCABULARY, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()
FEW = settings(max_examples=max(settings.default.max_examples // 2, 3))
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config, "mixture of experts": MixtralConfig}
OPTIONS = st.builds(
    Options,
    poison=st.booleans(),
    debug=st.booleans(),
    replay=st.sampled_from((True, True, True, False)),
    run_ahead=st.booleans(),
    drafts_on_device=st.booleans(),
)


def planned(spec):
    """Plan a spec for this machine; some random ones have no plan."""
    try:
        return make_plan(spec, CPU, REGISTRY)
    except PlanningError:
        return None


def target_of(spec, family, seed, folder):
    """Save a random model of a real architecture with the spec's numbers; return ours of it, and it."""
    shape = spec.model
    groups = spec.roles.target.groups
    windows = [group.window for group in groups for _ in range(group.layers)] or [None] * shape.num_layers
    options = {}
    if family == "mixture of experts":
        options = {"num_local_experts": 3, "num_experts_per_tok": 2}
    if any(windows):
        family = "qwen3"
        options = {
            "use_sliding_window": True,
            "sliding_window": max(filter(None, windows)),
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }
    config = FAMILIES[family](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=24,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=False,
        **options,
    )
    if family == "mixture of experts":
        config.sliding_window = None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        own = AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    own.eval().save_pretrained(folder)
    return load_target(Path(folder), shape, device=torch.device("cpu"), dtype=torch.float64), own


def drafter_of(kind, plan, target, seed):
    """Make a drafter of a kind; None where the plan has none."""
    if plan.speculative is None:
        return None
    return choose_drafter(
        kind,
        plan.speculative,
        target,
        num_states=plan.limits.max_num_reqs,
        length=plan.model.max_model_len + plan.speculative.num_tokens + 1,
        seed=seed,
    )


def serve(plan, target, drafter, requests, pages, *, options=None, answers=None):
    """Serve requests and return their tokens by name, and what happened."""
    with Runner(plan, target, drafter, REGISTRY, RecordedGraphs(), pages=pages, options=options) as runner:
        runner.capture()
        tokens = {done.name: done.tokens for done in runner.serve(requests, answers=answers)}
        return tokens, runner.session


def pages_for(plan, page_size):
    """Return pages for all places at full length."""
    each = -(-plan.model.max_model_len // page_size)
    return PageFormat(page_size=page_size, num_pages=1 + each * plan.limits.max_num_reqs)


@settings(FEW)
@given(
    data=st.data(),
    family=st.sampled_from(sorted(FAMILIES)),
    kind=st.sampled_from(("random", "copy", "miss", "chance")),
    page_size=st.sampled_from((1, 4, 16)),
    seed=st.integers(0, 1000),
    options=OPTIONS,
)
def test_tokens_with_a_plan_are_those_without(data, family, kind, page_size, seed, options):
    """Graphs, eager and plain greedy agree exactly: poisoned before every forward or not, a step ahead of
    the tokens or not, with drafts prepared on either side.
    """
    spec = data.draw(runnable_specs(lazy=True))
    plan = planned(spec)
    assume(plan is not None)
    requests = data.draw(requests_for(spec))
    pages = pages_for(plan, page_size)
    with tempfile.TemporaryDirectory() as folder:
        target, _ = target_of(spec, family, seed, folder)
    plain, _ = serve(without_speculation(plan, REGISTRY), target, None, requests, pages)
    answers = {request.name: request.prompt + plain[request.name] for request in requests}
    drafter = drafter_of(kind, plan, target, seed)
    eager, without = serve(without_graphs(plan), target, drafter, requests, pages, answers=answers)
    assert eager == plain
    tokens, session = serve(plan, target, drafter, requests, pages, options=options, answers=answers)
    assert tokens == plain
    served = [forward for forward in session.forwards if forward.entry is not None]
    assert bool(served) <= bool(plan.num_graphs)
    if plan.speculative is not None:
        drafted = sum(step.drafted for step in session.steps)
        accepted = sum(step.accepted for step in session.steps)
        assert accepted <= drafted
        # A step ahead of the tokens runs requests that are through, and k may go with how many there are.
        assert options.run_ahead or [(step.drafted, step.accepted) for step in session.steps] == [
            (step.drafted, step.accepted) for step in without.steps
        ]
        if kind == "miss":
            assert accepted == 0


class Serving(RuleBasedStateMachine):
    """One runner, any order of arrivals and steps; each answer is the model's own greedy one."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.count = 0
        self.expected = {}
        self.serving = None

    @initialize(data=st.data(), kind=st.sampled_from(("random", "chance")), seed=st.integers(0, 50), options=OPTIONS)
    def begin(self, data, kind, seed, options):
        """Capture a random plan of a random model."""
        self.spec = data.draw(runnable_specs(lazy=True))
        plan = planned(self.spec)
        if plan is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            family = data.draw(st.sampled_from(sorted(FAMILIES)))
            target, self.own = target_of(self.spec, family, seed, folder)
        runner = Runner(
            plan,
            target,
            drafter_of(kind, plan, target, seed),
            REGISTRY,
            RecordedGraphs(),
            pages=pages_for(plan, 4),
            options=options,
        )
        self.runner = self.stack.enter_context(runner)
        runner.capture()
        self.serving = runner.start()

    @precondition(lambda self: self.serving is not None)
    @rule(data=st.data(), length=st.integers(1, 32), output=st.integers(1, 10))
    def arrive(self, data, length, output):
        """Queue a request of any length that fits."""
        longest = self.spec.model.max_model_len
        length = min(length, longest - 1)
        prompt = tuple(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length)))
        request = Request(
            name=f"r{self.count}", arrival=0.0, prompt=prompt, max_new_tokens=min(output, longest - length)
        )
        self.count += 1
        self.expected[request.name] = request
        self.serving.scheduler.submit(request, 0.0)

    @precondition(lambda self: self.serving is not None)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        """Run some steps."""
        for _ in range(count):
            self.serving.step()

    @precondition(lambda self: self.serving is not None)
    @rule()
    def reload(self):
        """Load the same weights in place, as a server that is updated does."""
        for _, module, name in self.runner.model.weights():
            tensor = module._parameters.get(name, module._buffers.get(name))
            tensor.data.copy_(tensor.data.clone())

    @invariant()
    def every_answer_is_greedy(self):
        """What is finished is what the model says by itself, one request at a time."""
        if self.serving is None:
            return
        for done in self.serving.served:
            request = self.expected.pop(done.name, None)
            if request is not None:
                assert done.tokens == self.greedy(request)

    @torch.no_grad()
    def greedy(self, request):
        """Decode with the model and nothing of ours but its weights: all tokens anew at each step."""
        tokens = list(request.prompt)
        for _ in range(request.max_new_tokens):
            logits = self.own(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tuple(tokens[len(request.prompt) :])

    def teardown(self):
        """Serve what is left."""
        try:
            while self.serving is not None and not self.serving.done:
                self.serving.step()
            self.every_answer_is_greedy()
            assert not self.expected
        finally:
            self.stack.close()


TestServing = Serving.TestCase
TestServing.settings = settings(FEW, stateful_step_count=30)
