"""What SGLang takes of a plan, and the flags for it."""

from pathlib import Path
from random import Random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import Dispatcher, load_plan
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_tiers
from capture_planner.testing import plans
from capture_planner_sglang.emulation.export import decode_sizes_of
from capture_planner_sglang.emulation.flags import parse_any
from capture_planner_sglang.emulation.launch import launch
from capture_planner_sglang.inside.agreement import ResolvedFacts, disagreements
from engines.generators import sglang_apply

SEEDS = st.integers(0, 10**6).map(lambda seed: sglang_apply.plan(Random(seed)))
LOCKED = sorted((Path(__file__).parents[3] / "plans" / "locked").glob("*.yaml"))
EAGLE3 = load_plan(next(path for path in LOCKED if path.stem == "qwen3-8b-eagle3.h100"))


def command(plan):
    """A command that names what a plan does not know."""
    return ["--model-path", "M", *(["--speculative-draft-model-path", "D"] if plan.speculative else [])]


def resolved(plan, words):
    """SGLang's values under a command that gives them all."""
    args, _ = parse_any(words)
    return ResolvedFacts(
        decode_backend=args.cuda_graph_backend_decode or "full",
        disable_padding=False,
        max_running_requests=args.max_running_requests,
        attn_dp_size=1,
        tp_size=args.tp_size,
        algorithm=args.speculative_algorithm,
        num_steps=args.speculative_num_steps,
        topk=args.speculative_eagle_topk,
        num_draft_tokens=args.speculative_num_draft_tokens,
        adaptive=False,
        enable_lora=bool(args.enable_lora),
    )


@given(SEEDS | plans(varying=False))
def test_sizes_are_those_of_full_decodes_of_the_role(plan):
    """No other graph of a plan is taken, and each that is not has its decision."""
    planned = decode_sizes_of(plan)
    for role, sizes in planned.by_role.items():
        mode, width = plan.role(role).mode, 1 if role is Role.DRAFT_DECODE else planned.width
        full = {e.num_reqs for e in plan.role(role).entries if e.query_len == width and e.mode is GraphMode.FULL}
        assert sizes == (None if mode in (GraphMode.FULL, GraphMode.PIECEWISE) else tuple(sorted(full)))
        if mode not in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY):
            assert role in {decision.role for decision in planned.decisions}


@given(SEEDS)
def test_next_fit_over_the_sizes_is_our_dispatch(plan):
    """SGLang's rule, the smallest size that fits, is ours on every admissible decode."""
    planned, dispatcher = decode_sizes_of(plan), Dispatcher(plan)
    for role, sizes in planned.by_role.items():
        width = 1 if role is Role.DRAFT_DECODE else planned.width
        for num_reqs in range(1, plan.limits.max_num_reqs + 1):
            answer = dispatcher.dispatch(Batch.decode(role, num_reqs, width))
            ours = answer.entry.num_reqs if answer.mode is GraphMode.FULL else None
            if sizes is not None:
                assert ours == min((size for size in sizes if size >= num_reqs), default=None)


@given(SEEDS)
def test_launched_sglang_agrees_with_the_plan(plan):
    """And a second launch adds nothing."""
    words = [*command(plan), *launch(plan, command(plan)).arguments]
    assert not [*disagreements(plan, resolved(plan, words))]
    assert launch(plan, words).arguments == ()


@given(SEEDS | plans(varying=False))
def test_contradicting_flag_is_refused_with_the_value_to_give(plan):
    """And giving that value is accepted, where SGLang can execute the plan."""
    most = plan.limits.max_num_reqs
    with pytest.raises(FlagError) as error:
        launch(plan, [*command(plan), "--max-running-requests", str(most + 1)])
    remedies = {problem.path: problem.remedy for problem in error.value.problems}
    assert remedies["--max-running-requests",] == f"give --max-running-requests {most}"
    tiers = {k for *_, k in decode_tiers(plan)}
    if len(tiers) == 1 and all(remedies) and len(remedies) == 1:
        launch(plan, [*command(plan), "--max-running-requests", str(most)])


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ("--disable-cuda-graph", "--disable-cuda-graph"),
        ("--disable-cuda-graph-padding", "--disable-cuda-graph-padding"),
        ("--speculative-adaptive", "--speculative-adaptive"),
        ("--cuda-graph-max-bs-decode 9", "--cuda-graph-max-bs-decode"),
        ('--cuda-graph-config {"decode":{"bs":[1]}}', "--cuda-graph-config"),
        ("--cuda-graph-bs-decode 1 2", "--cuda-graph-bs-decode"),
        ("--speculative-num-steps 2", "--speculative-num-steps"),
        ("--speculative-algorithm EAGLE", "--speculative-algorithm"),
        ("--tp-size 2", "--tp-size"),
        ("--enable-lora", "--enable-lora"),
    ],
)
def test_each_contrary_flag_is_refused(flags, path):
    """By its name."""
    with pytest.raises(FlagError) as error:
        launch(EAGLE3, [*command(EAGLE3), *flags.split()])
    assert [problem.path for problem in error.value.problems] == [(path,)]


def test_drafter_is_to_be_named():
    """A plan does not know its path; a script reads it as a placeholder."""
    with pytest.raises(FlagError, match="speculative-draft-model-path"):
        launch(EAGLE3, ["--model-path", "M"])
    assert "DRAFT_MODEL" in launch(EAGLE3, []).arguments


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_shipped_plan_is_launched_or_refused_with_the_reason(path):
    """SGLang drafts one number of tokens at every batch size."""
    plan = load_plan(path)
    if len({k for *_, k in decode_tiers(plan)}) > 1:
        with pytest.raises(FlagError, match="make the plan without a schedule"):
            launch(plan, command(plan))
        assert "make the plan without a schedule" in " ".join(launch(plan, []).notes)
    else:
        assert launch(plan, command(plan)).arguments


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"decode_backend": "disabled"}, "give --cuda-graph-backend-decode full"),
        ({"disable_padding": True}, "remove --disable-cuda-graph-padding"),
        ({"max_running_requests": 48}, "give --max-running-requests 256, not 48"),
        ({"tp_size": 2}, "give --tp-size 1"),
        ({"enable_lora": True}, "remove --enable-lora"),
        ({"algorithm": None}, "give --speculative-algorithm EAGLE3"),
        ({"num_steps": 5}, "give --speculative-num-steps 3, not 5"),
        ({"topk": 4}, "give --speculative-eagle-topk 1, not 4"),
        ({"num_draft_tokens": 6}, "give --speculative-num-draft-tokens 4, not 6"),
        ({"adaptive": True}, "remove --speculative-adaptive"),
    ],
)
def test_disagreement_names_the_flag_to_give(change, line):
    """One line for each fact."""
    facts = resolved(EAGLE3, [*command(EAGLE3), *launch(EAGLE3, command(EAGLE3)).arguments])
    (found,) = disagreements(EAGLE3, attrs.evolve(facts, **change))
    assert found.endswith(line)
