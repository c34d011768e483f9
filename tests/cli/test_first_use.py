"""What a first-time user of plans ran into, each from the complaint: the deployment, the command, the answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from support.commands import PLAN, SPEC, TINY_PLAN, Run, edited

DEPLOYMENT = """\
version: 1
model: {name: meta-llama/Llama-3.3-70B-Instruct, num_layers: 80, num_heads: 64, num_kv_heads: 8, head_dim: 128,
        max_model_len: 131072}
limits: {max_num_reqs: 128, max_num_tokens: 8192}
mode: FULL_AND_PIECEWISE
backend: flashinfer
speculative: {method: eagle3, num_tokens: 5, schedule: [[1, 16, 5], [17, 64, 3], [65, 128, 1]]}
parallel: {tensor: 4}
lora: {max_active: 4}
roles:
  draft_prefill: {backend: flash_attention}
  draft_decode: {backend: flash_attention}
budget: {max_graphs: 80, memory: 3GiB}
"""
"""Llama 3.3 70B on H200: EAGLE-3 with a schedule, two backends, adapters, at most 80 graphs and 3 GiB."""


@pytest.fixture
def deployment(folder: Path) -> str:
    Path("llama.yaml").write_text(DEPLOYMENT, "utf-8")
    return "llama.yaml"


def sizes_of(reqs: int) -> str:
    """Write a spec with sizes of its own, and return its file."""
    name = f"explicit-{reqs}.yaml"
    Path(name).write_text(
        f"""\
version: 1
model: {{name: Qwen/Qwen3-8B, num_layers: 36, num_heads: 32, num_kv_heads: 8, head_dim: 128, max_model_len: 40960}}
limits: {{max_num_reqs: {reqs}, max_num_tokens: 8192}}
backend: flashinfer
sizes: {{policy: explicit, num_tokens: [1, 8, 64, 256], num_reqs: [1, 8, 64, 128]}}
""",
        "utf-8",
    )
    return name


# export ------------------------------------------------------------------------------------------


@pytest.fixture
def small(deployment: str) -> str:
    """Return the same deployment for fewer requests, which is compared sooner."""
    schedule = ("[1, 16, 5], [17, 64, 3], [65, 128, 1]", "[1, 8, 5], [9, 24, 1]")
    limits = ("max_num_reqs: 128, max_num_tokens: 8192", "max_num_reqs: 24, max_num_tokens: 256")
    return edited("small.yaml", deployment, schedule, limits, ("max_graphs: 80", "max_graphs: 60"))


def drafts(flags: list[str]) -> dict[str, str]:
    found: dict[str, str] = json.loads(flags[flags.index("--speculative-config") + 1])
    return found


def test_export_keeps_the_drafter_s_backend(run: Run, small: str) -> None:
    """FlashAttention and FlashInfer drafters differ in vLLM's flags; what cannot be said is a loss."""
    other = edited("other.yaml", small, ("flash_attention", "flashinfer"))
    exported = {
        file: run("export", file, "--to", "vllm", "-e", "h200", "--format", "json").data for file in (small, other)
    }
    assert [drafts(data["flags"])["attention_backend"] for data in exported.values()] == ["FLASH_ATTN", "FLASHINFER"]
    data = run("export", small, "--to", "sglang", "-e", "h200", "--format", "json").data
    assert data["flags"][data["flags"].index("--speculative-draft-attention-backend") + 1] == "fa3"
    assert "drafter-backend" not in {loss["name"] for loss in data["losses"]}
    losses = run("export", small, "--to", "tensorrt-llm", "-e", "h200", "--format", "json").data["losses"]
    assert "flash_attention" in next(loss["message"] for loss in losses if loss["name"] == "backend")


def test_export_of_a_private_drafter_backend_is_a_loss(run: Run, folder: Path) -> None:
    """A backend that the engine does not know."""
    losses = run("export", TINY_PLAN, "--to", "vllm", "--format", "json").document(2)["losses"]
    assert "no attention backend reference for the drafter" in str(losses)


def test_export_keeps_the_budget(run: Run, small: str) -> None:
    """The flags capture at most what the plan's budget allows, and the loss says what that costs."""
    data = run("export", small, "--to", "vllm", "-e", "h200", "--format", "json").data
    captured = emulate("vllm", data["flags"], find_environment("h200")).graphs
    assert len(captured) <= 60
    (loss,) = (loss for loss in data["losses"] if loss["name"] == "budget")
    assert re.search(r"max_graphs 60 allows 60 graphs, and vllm would capture \d+ with", loss["message"])
    assert loss["cost"]["padded"] > 0
    roomy = edited("roomy.yaml", small, ("max_graphs: 60, memory: 3GiB", "max_graphs: 4000"))
    losses = run("export", roomy, "--to", "vllm", "-e", "h200", "--format", "json").data["losses"]
    assert "budget" not in {loss["name"] for loss in losses}


# explain and diff --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [None, "plans/locked/gpt-oss-20b-eagle3.h100.yaml"])
def test_coverage_has_a_row_for_each_draft_chain(run: Run, deployment: str, file: str | None) -> None:
    """No row runs backwards, and none joins two chains."""
    words = [deployment, "-e", "h200"] if file is None else [file]
    rows = [line for line in run("explain", *words, "--coverage").out.splitlines() if line.startswith("draft_decode")]
    spans = [re.search(r"(\d+) to (\d+) requests of 1, (\d+) draft step", row) for row in rows]
    assert all(span is not None and int(span[1]) <= int(span[2]) for span in spans)
    assert len({span[3] for span in spans if span}) == len(rows) == 2


def test_diff_names_the_batches_that_lose_their_graph(run: Run, folder: Path) -> None:
    """The same sizes and a higher max_num_reqs: the decodes above the largest size."""
    ran = run("diff", sizes_of(128), sizes_of(160), "-e", "h200")
    assert ran.code == 2
    assert ran.out.splitlines()[1] == (
        "target: decodes of 129 to 160 requests: new, run PIECEWISE padded by up to 98%; 128, the most until now, "
        "run FULL"
    )


def test_diff_plans_a_spec_for_the_machine_of_the_plan(run: Run, folder: Path) -> None:
    """Without --environment, h100 is no surprise in a comparison with a plan for h200."""
    run("plan", sizes_of(128), "-o", "old.h200.yaml")
    assert run("diff", "old.h200.yaml", sizes_of(128)).out == "the plans are the same\n"


# check -------------------------------------------------------------------------------------------


def test_lint_codes_can_be_ignored_in_the_spec_and_on_the_command_line(run: Run, deployment: str) -> None:
    """So that --strict is of use; a code that leaves out nothing is a note."""
    strict = ("check", deployment, "-e", "h200", "--strict")
    assert run(*strict).code == 2
    assert run(*strict, "--ignore", "CP012,CP021").code == 0
    assert run(*strict, "--ignore", "CP012", "--ignore", "cp021").code == 0
    Path(deployment).write_text(f"{DEPLOYMENT}ignore: [CP012, CP021]\n", "utf-8")
    assert run(*strict).code == 0
    run("plan", deployment, "-o", "llama.h200.yaml")
    assert run("check", "llama.h200.yaml", "--strict").code == 0
    Path(deployment).write_text(f"{DEPLOYMENT}ignore: [CP012, CP021, CP044]\n", "utf-8")
    assert "llama.yaml:14:9: note: CP053 unused-ignore: CP044 (separate-pools) is ignored" in run(*strict).out
    assert "CP001 (uncovered-batch) is an error" in run(*strict, "--ignore", "CP001").err
    assert "did you mean CP0" in run(*strict, "--ignore", "CP0122").err


def test_eager_decodes_are_a_warning(run: Run, folder: Path) -> None:
    """Not a note with exit code 0."""
    spec = edited("t4.yaml", "plans/specs/llama-3.2-3b-eagle-t4.yaml", ("ignore: [CP052]", ""))
    ran = run("check", spec, "-e", "t4")
    assert (ran.code, "warning: CP052 decodes-run-eager" in ran.out) == (2, True)


@pytest.mark.parametrize("words", [("plan", "llama.yaml", "-o", "llama.h200.yaml"), ("check", "llama.yaml")])
def test_the_price_of_a_budget_is_shown(run: Run, deployment: str, words: tuple[str, ...]) -> None:
    """Worst padding before and after, the limit that is reached, and sizes of memory that people read."""
    out = " ".join(run(*words, *(("-e", "h200") if words[0] == "check" else ())).out.split())
    assert "max_graphs 80 allows 80 of 223 graphs, memory 3GiB at 25MiB a graph would allow 122" in out
    assert "worst padding of decodes 12.3% becomes 52.9%" in out
    if words[0] == "plan":
        assert "estimate: 77 graphs take" in out
        assert "to capture, between those measured on an H200 and the most reported" in out
        assert "workspaces of the backends, 33 MiB, are not counted" in out
    assert "bytes" not in out


def test_a_graph_count_per_kind_of_batch_is_a_weight(run: Run, deployment: str) -> None:
    """Fewer PIECEWISE graphs leave more for decodes."""
    fewer = edited("fewer.yaml", deployment, ("max_graphs: 80,", "max_graphs: 80, graphs: {mixed: 20},"))
    shown = run("plan", fewer, "-e", "h200", "--format", "json").data
    mixed = [row for role in shown["roles"] for row in role["entries"] if "query_len" not in row]
    assert sum(len(row["num_tokens"]) * len(row.get("active_loras", [0])) for row in mixed) <= 20


def test_an_upgraded_environment_is_checked_at_its_own_line(run: Run, folder: Path) -> None:
    """With GitHub annotations in the file that changed."""
    run("plan", sizes_of(128), "-o", "explicit.h200.yaml")
    new = edited("new.yaml", "plans/environments/h200.yaml", ("memory: 140GiB", "memory: 130GiB"))
    line = next(n for n, text in enumerate(Path(new).read_text().splitlines(), 1) if "130GiB" in text)
    ran = run("check", "explicit.h200.yaml", "--spec", sizes_of(128), "-e", new, "--format", "github")
    assert ran.code == 2
    assert f"::error file=new.yaml,line={line},col=" in ran.out
    assert "environment.device.memory: explicit.h200.yaml has 140GiB, new.yaml gives 130GiB" in ran.out


def test_drift_points_at_the_line_of_the_spec_that_changed(run: Run, folder: Path) -> None:
    """With both values, and what follows from them."""
    run("plan", sizes_of(128), "-o", "explicit.h200.yaml")
    ran = run("check", "explicit.h200.yaml", "--spec", sizes_of(160), "--format", "github")
    (annotation,) = ran.out.splitlines()
    assert annotation.startswith(
        "::error file=explicit-160.yaml,line=3,col=24,title=CP099 drift::limits.max_num_reqs: "
    )
    assert "explicit.h200.yaml has 128, the spec gives 160%0A" in annotation
    assert "decodes of 129 to 160 requests: new, run PIECEWISE" in annotation


def test_several_pairs_are_checked_in_one_call(run: Run, folder: Path) -> None:
    """In their order, or by name in a folder."""
    Path("specs").mkdir()
    for reqs in (64, 128):
        Path(sizes_of(reqs)).rename(f"specs/e{reqs}.yaml")
        run("plan", f"specs/e{reqs}.yaml", "-o", f"e{reqs}.h200.yaml")
    plans = ("e64.h200.yaml", "e128.h200.yaml")
    assert run("check", *plans, "--spec", "specs").code == 0
    assert run("check", *plans, "--spec", "specs/e64.yaml", "--spec", "specs/e128.yaml").code == 0
    assert run("check", *plans, "--spec", "specs/e128.yaml", "--spec", "specs/e64.yaml").code == 2
    assert run("check", *plans, "--spec", "specs/e64.yaml", "--spec", "specs/e64.yaml", "--spec", "x").code != 0
    Path("specs/e128.yaml").unlink()
    assert (
        "e128.h200.yaml: no spec for it in specs; it would be called e128.yaml"
        in run("check", *plans, "--spec", "specs").err
    )


def test_sizes_in_another_order_are_drift(run: Run, folder: Path) -> None:
    """They read as the same plan, but somebody edited it."""
    run("plan", sizes_of(128), "-o", "explicit.h200.yaml")
    mixed = edited("mixed.h200.yaml", "explicit.h200.yaml", ("[128, 64, 8, 1]", "[64, 128, 8, 1]"))
    ran = run("check", mixed, "--spec", sizes_of(128))
    assert (ran.code, "the sizes are not in the order of capture" in ran.out) == (2, True)
    assert run("check", PLAN, "--spec", SPEC).code == 0


def test_schedules_with_gaps_or_beyond_the_limits_are_findings(run: Run, deployment: str) -> None:
    """With the batch sizes, and what they draft."""
    edited("gaps.yaml", deployment, ("[17, 64, 3], [65, 128, 1]", "[33, 48, 3], [65, 200, 1]"))
    out = run("check", "gaps.yaml", "-e", "h200").out
    assert "no range of the schedule has 17 to 32 requests, which draft 5 as the range before them" in out
    assert "no range of the schedule has 49 to 64 requests, which draft 3 as the range before them" in out
    assert "the schedule has 129 to 200 requests, but max_num_reqs is 128" in out


# files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("num_tokens: 5", "num_tokens: 0", "to draft nothing, leave speculative out"),
        ("mode: FULL_AND_PIECEWISE", "mode: full", "did you mean FULL?"),
        ("mode: FULL_AND_PIECEWISE", "mode: full-decode-only", "did you mean FULL_DECODE_ONLY?"),
        ("parallel: {tensor: 4}", "tensor_parallel_size: 4", "did you mean parallel.tensor?"),
        ("lora: {max_active: 4}", "lora: {max_loras: 4}", "did you mean lora.max_active?"),
        ("{max_num_reqs: 128, ", "{max-num-seqs: 128, ", "did you mean limits.max_num_reqs?"),
    ],
)
def test_near_misses_in_a_spec_have_a_suggestion(run: Run, deployment: str, old: str, new: str, hint: str) -> None:
    """As engines call it, in another case, or zero drafts."""
    ran = run("check", edited("near.yaml", deployment, (old, new)), "-e", "h200")
    assert (ran.code, hint in ran.err) == (1, True)


def test_a_capability_without_quotes_is_explained(run: Run, folder: Path) -> None:
    """It is text: 12.10 would be another number than 12.1."""
    machine = edited("machine.yaml", "plans/environments/h200.yaml", ('capability: "9.0"', "capability: 9.0"))
    assert 'expected text, got 9.0; write it in quotes: "9.0"' in run("check", SPEC, "-e", machine).err


def test_adapters_are_explained_where_they_are_counted(run: Run, deployment: str) -> None:
    """Active and not loaded, why five, and why drafters have none."""
    out = " ".join(run("show", deployment, "-e", "h200").out.split())
    assert "by the distinct adapters of a batch, not by those that are loaded" in out
    assert "drafters run without adapters" in out
    assert "chains of 2 and 4" in out  # and not 1 -> 4


def test_the_schema_serves_an_editor(run: Run, deployment: str) -> None:
    """What the how-to page wires into editors accepts this spec and marks a wrong key."""
    schema = Draft202012Validator(run("schema", "spec").data)
    spec = YAML(typ="safe", pure=True).load(DEPLOYMENT)
    assert not list(schema.iter_errors(spec))
    assert list(schema.iter_errors({**spec, "tensor_parallel_size": 4}))


def test_the_workflow_of_the_how_to_page_checks_every_pair(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command, as a shell would expand it, on plans and specs that are named as the page says."""
    page = (Path(__file__).parents[2] / "docs/howto/check-in-ci.md").read_text("utf-8")
    block = re.search(r"<!-- file: capture-plans.yml -->\n```text\n(.*?)```", page, re.S)
    assert block is not None
    steps = YAML(typ="safe", pure=True).load(block[1])["jobs"]["plans"]["steps"]
    (command,) = (step["run"] for step in steps if step.get("run", "").startswith("capture-planner check"))
    for name in ("own/specs", "own/plans"):
        Path(name).mkdir(parents=True)
    monkeypatch.chdir("own")
    for reqs in (64, 128):
        Path(sizes_of(reqs)).rename(f"specs/e{reqs}.yaml")
        run("plan", f"specs/e{reqs}.yaml", "-o", f"plans/e{reqs}.h200.yaml")
    files = sorted(map(str, Path("plans").glob("*.yaml")))
    words = [word for each in command.split()[1:] for word in (files if each == "plans/*.yaml" else [each])]
    assert run(*words).code == 0
    edited("specs/e64.yaml", "specs/e64.yaml", ("max_num_reqs: 64", "max_num_reqs: 96"))
    ran = run(*words)
    assert (ran.code, ran.out.startswith("::error file=specs/e64.yaml,line=3,")) == (2, True)
