"""What the command ``run`` refuses, and what makes it run all the same."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.cli.options import SHARES
from capture_planner.records._base import replace
from support.commands import Run, spec_for

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent.parent
SPEC = spec_for(3)
FEW = ("--requests", "3", "--prompt-tokens", "1:9", "--output-tokens", "2:6")


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``run``, in a folder with the plan of ``SPEC``."""
    return executing("run", SPEC)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument 'PLAN|SPEC'"),
        (("nowhere.yaml",), "nowhere.yaml: cannot be read"),
        (("plan.yaml", "-e", "cpu"), "is a plan, for cpu; --environment goes with a spec"),
        (("plan.yaml", "--requests", "0"), "there are no requests to serve"),
        (("plan.yaml", "--requests", "-1"), "-1 is not in the range"),
        (("plan.yaml", "--drafter", "coppy"), "give a folder or one of copy, miss, chance, random"),
        (("plan.yaml", *FEW, "--drafter", "."), "no config.json here"),
        (("plan.yaml", "--model", "nowhere"), "nowhere: no config.json here"),
        (("plan.yaml", "--prompts", "prompts.txt"), "--prompts and --tokenizer go together"),
        (("plan.yaml", "--tokenizer", "."), "--prompts and --tokenizer go together"),
        (("plan.yaml", "--prompts", "nowhere.txt", "--tokenizer", "."), "nowhere.txt: cannot be read"),
        (("plan.yaml", "--prompts", "spec.yaml", "--tokenizer", "nowhere"), "nowhere: no such folder"),
        (("plan.yaml", "--prompts", "spec.yaml", "--tokenizer", "."), "holds no tokenizer"),
        (("plan.yaml", "--trace", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("plan.yaml", "--trace", "spec.yaml"), "spec.yaml:1:1: no column of the"),
        (("plan.yaml", "--trace", "a", "--prompts", "b", "--tokenizer", "c"), "one of --trace and --prompts"),
        (("plan.yaml", "--prompt-tokens", "many"), "not a whole number or LOW:HIGH"),
        (("plan.yaml", "--prompt-tokens", "0"), "must be at least 1"),
        (("plan.yaml", "--output-tokens", "5:2"), "LOW must be at least 1 and at most HIGH"),
        (("plan.yaml", "--output-tokens", "9999999"), "output_tokens: expected a range within"),
        (("plan.yaml", "--graph-memory", "much"), "expected a size, got 'much'"),
        (("plan.yaml", "--page-size", "0"), "0 is not in the range"),
        (("plan.yaml", "--rate", "0"), "0.0 is not in the range"),
        (("plan.yaml", "--rate", "nan"), "nan"),
        (("plan.yaml", "--chance", "2", "--drafter", "chance"), "2.0 is not in the range"),
        (("plan.yaml", "--acceptance", "1.5,0.5"), "'1.5,0.5' is not a comma-separated list of numbers from 0 to 1"),
        (("plan.yaml", "--acceptance", "much"), "is not a comma-separated list of numbers from 0 to 1"),
        (("plan.yaml", "--acceptance", "0.5"), "1 share, and the plan drafts 2 tokens; give a share for each"),
        (("plan.yaml", "--acceptance", "0.5,0.6"), "share 1 is 0.6, expected 0 to 0.5: it is the share of steps"),
        (("plan.yaml", "--acceptance", "0.5,0.5", "--check", "tokens"), "with --acceptance tokens are not the model's"),
        (("plan.yaml", "--acceptance", "0.5,0.5", "--drafter", "chance"), "and so does --acceptance; leave one out"),
        (("plan.yaml", "--acceptance", "nan,0.1"), "is not a comma-separated list of numbers from 0 to 1"),
        (("plain.yaml", "--drafter", "copy"), "--drafter copy: the plan has no drafter; plan with speculative, or"),
        (("plain.yaml", "--model", "nowhere", "--drafter", "."), "--drafter .: the plan has no drafter"),
        (("plan.yaml", "--model", "nowhere", "--dump-graphs", "spec.yaml"), "spec.yaml is a file; name a folder"),
        (("plan.yaml", "--model", "nowhere", "--dump-graphs", "spec.yaml/x"), "spec.yaml/x cannot be written: Not"),
        (("plan.yaml", "--top-p", "0.5"), "--top-p goes with --temperature above 0"),
        (("plan.yaml", "--temperature", "0.001"), "temperature is 0.001, expected 0 or 0.01 to 100"),
        (("plan.yaml", "--temperature", "1", "--drafter", "copy"), "--drafter copy drafts by greedy answers, and"),
        (("plan.yaml", "--proposals", "0.5"), "--proposals 0.5: 1 share, and the plan drafts 2 tokens"),
        (("plan.yaml", "--memory-utilization", "0.5"), "the plan is for a processor; leave it out"),
        (("plan.yaml", "--memory-utilization", "1.5"), "1.5 is not in the range"),
        (("plan.yaml", "--check", "none,tokens"), "none removes even the guards, and the others add checks"),
        (("plan.yaml", "--check", "token"), "'token' is no check; give some of tokens, tensors, indices,"),
        (("plan.yaml", "--chance", "0.5"), "--chance goes with --drafter chance"),
        (("plan.yaml", "--speed", "2"), "--speed goes with --trace"),
        (("plan.yaml", "--trace", "a", "--rate", "2"), "--rate goes with generated requests"),
        (("plan.yaml", "--eager", "--strict"), "--strict goes with"),
        (("plan.yaml", "--eager", "--check", "tensors"), "--check tensors goes with graphs, so without --eager"),
        (("h100.yaml",), "the plan is for NVIDIA H100 80GB HBM3"),
        (("h100.yaml", "--any-environment"), "the plan is for NVIDIA H100 80GB HBM3"),
        (("unreadable.yaml",), "not YAML"),
        (("tensor.yaml",), "the plan is for 2 ranks"),
        (("tensor.yaml", "--ranks", "3"), "and 3 were started; use --ranks 2"),
        (("plan.yaml", "--ranks", "2"), "the plan is for 1 rank (parallel.tensor 1 x parallel.data 1), and 2 were"),
        (("plan.yaml", "--rank-timeout", "5"), "--rank-timeout goes with several ranks: --ranks or torchrun"),
    ],
)
def test_what_cannot_run_is_refused(run: Run, arguments: tuple[str, ...], says: str) -> None:
    """Text on the standard error stream, exit code 1, and nothing else is printed."""
    shutil.copy(ROOT / "plans" / "locked" / "llama-3.1-8b.h100.yaml", "h100.yaml")
    Path("unreadable.yaml").write_text("version: [", "utf-8")
    split = SPEC.replace("num_heads: 2, num_kv_heads: 1", "num_heads: 2, num_kv_heads: 2")
    Path("plain.yaml").write_text(SPEC.replace("speculative: {method: eagle, num_tokens: 2}", ""), "utf-8")
    Path("tensor.yaml").write_text(f"{split}parallel: {{tensor: 2}}\n", "utf-8")
    ran = run(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert says in " ".join(ran.err.split())


def test_a_refusal_is_json_where_that_was_asked_for(run: Run) -> None:
    """A program gets a document either way; the text stays on the standard error stream."""
    ran = run("plan.yaml", "--requests", "0", "--format", "json")
    assert ran.document(1) == {"errors": [{"message": "there are no requests to serve"}]}
    assert ran.err == "error: there are no requests to serve\n"


def test_missing_packages_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package that is missing, and how to get them; not the modules."""
    find = importlib.util.find_spec
    gone = ("torch", "safetensors")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    ran = run("plan.yaml")
    assert (ran.code, ran.out) == (1, "")
    assert "executing a plan needs torch, safetensors; install capture-planner-runner with its dependencies" in ran.err
    assert "pip install ./runner" in ran.err


def test_a_plan_for_other_packages_runs_only_where_it_is_wanted(run: Run) -> None:
    """``--any-environment`` runs what is refused without it."""
    plan = codec.load_plan("plan.yaml")
    codec.write("plan.yaml", codec.dumps(_for_torch(plan, "1.0")))
    refused = run("plan.yaml", *FEW)
    assert refused.code == 1
    assert "torch 1.0 was planned for" in refused.err
    assert "--any-environment" in refused.err
    assert run("plan.yaml", *FEW, "--any-environment").code == 0


def _for_torch(plan: Any, version: str) -> Any:
    return replace(plan, environment=replace(plan.environment, packages={"torch": version}))


def test_a_plan_with_holes_runs_only_where_it_is_wanted(run: Run) -> None:
    """Without each role's first graph, batches are uncovered: an error, or eager forwards that say so."""
    plan = codec.load_plan("plan.yaml")
    roles = tuple(replace(role, entries=role.entries[1:], waivers=()) for role in plan.roles)
    codec.write("plan.yaml", codec.dumps(replace(plan, roles=roles)))
    refused = run("plan.yaml", *FEW)
    assert refused.code == 1
    assert "CP001" in refused.err
    assert "--any-plan" in refused.err
    data = run("plan.yaml", "--format", "json", *FEW, "--any-plan").data
    assert "uncovered" in {fallback["reason"] for fallback in data["fallbacks"]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--threads", "100000"), "--threads"),
        (("--seed", str(1 << 64)), "--seed"),
        (("--step-time", "nan"), "'--step-time': nan is not a finite number"),
        (("--rate", "inf"), "'--rate': inf is not a finite number"),
        (("--html", "."), "is a folder; name a file"),
    ],
)
def test_a_number_out_of_range_is_refused_at_once(run: Run, arguments: tuple[str, ...], says: str) -> None:
    """Before torch or the operating system is asked."""
    ran = run("spec.yaml", *arguments)
    assert ran.code == 1
    assert says in ran.err


def test_weights_with_nan_are_not_verified(run: Run) -> None:
    """Every token is the likeliest one of NaN, with a graph and without."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    numbers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = LlamaConfig(**numbers, hidden_size=32, intermediate_size=8, vocab_size=64, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data[5, 5] = float("nan")
    model.save_pretrained("model")
    ran = run("plan.yaml", *FEW, "--model", "model", "--check", "tokens")
    assert (ran.code, ran.out) == (1, "")
    assert "lm_head.weight has NaN or infinity" in ran.err


@given(st.floats(), st.sampled_from(("{}", " {} ", "{:e}", "{:E}", "{:+.3e}", "{:.9f}")))
def test_shares_are_read_in_every_decimal_notation(value: float, form: str) -> None:
    """As Python reads them; what is not from 0 to 1 is refused, infinity and NaN too."""
    text = form.format(value)
    if 0 <= float(text) <= 1:
        assert SHARES.convert(f"1,{text}", None, None) == (1.0, float(text))
    else:
        with pytest.raises(click.BadParameter, match="is not a comma-separated list of numbers from 0 to 1"):
            SHARES.convert(f"1,{text}", None, None)
