"""The audit of public configurations: what is allowed, what a stated load reaches, and how each form is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.command_line import servers
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from support.files import module_at

audit = module_at(Path(__file__).parents[1] / "tools" / "audit.py", "audit_tool")

SLURM = """\
name: a
model: {{path: some-folder, container: "vllm/vllm-openai:v0.33.0"}}
identity: {{model: {{repo: Qwen/Qwen3-8B}}}}
resources: {{gpu_type: gb200, decode_workers: {workers}, prefill_workers: 1}}
backend:
  vllm_config:
    prefill: &prefill
      kv-transfer-config: '{{"kv_connector": "NixlConnector", "kv_role": "kv_both"}}'
      dyn-tool-call-parser: qwen3
      data-parallel-size: {ranks}
      enforce-eager: true
      max-num-seqs: {most}
    decode:
      <<: *prefill
      enforce-eager: false
      max-cudagraph-capture-size: {largest}
      compilation-config: '{{"cudagraph_mode": "FULL_DECODE_ONLY"}}'
benchmark: {{type: sa-bench, concurrencies: "{least}x{load}"}}
"""
GRAPH = """\
kind: DynamoGraphDeployment
spec:
  services:
    VllmDecodeWorker:
      replicas: 2
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-8B, --max-num-seqs, "64", --is-decode-worker]
"""
PERF = "env:\n- name: CONCURRENCY\n  value: '48'\n"
RECIPE = """\
meta: {hardware: {mi300x: verified, h200: verified}}
model: {model_id: Qwen/Qwen3-8B, base_args: [--max-num-seqs, "32"]}
variants:
  default: {}
  wide: {extra_args: [--no-such-flag]}
  images: {extra_args: [--omni]}
"""
SCRIPT = "docker run lmsysorg/sglang:v0.5.12 sglang serve --model-path Qwen/Qwen3-8B --cuda-graph-max-bs 8\n"
FLAGS_ALONE = "services:\n  a:\n    image: vllm/vllm-openai:v0.21.0\n    command: [--model, Qwen/Qwen3-8B]\n"


def rows_of(folder: Path, files: dict[str, str], **options: object) -> list:
    """Write files below a folder, and audit it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return audit.audit([folder], **options)[0]


@given(
    load=st.integers(1, 3000),
    workers=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 8]),
    most=st.sampled_from([1, 7, 64, 300]),
    largest=st.sampled_from([1, 16, 64, 400]),
)
def test_reached_is_what_the_load_has_of_what_is_allowed(tmp_path_factory, load, workers, ranks, most, largest) -> None:
    """Each decode is asked for by itself: allowed up to the limit, reached up to the load of a rank."""
    text = SLURM.format(workers=workers, ranks=ranks, most=most, largest=largest, least=1, load=load)
    folder = tmp_path_factory.mktemp("recipes")
    prefill, decode = rows_of(folder, {"a.yaml": text})
    emulation = emulate("vllm", [f"{folder}/a.yaml#decode"], find_environment("gb200"))
    each = math.ceil(load / (workers * ranks))
    entries = {n: emulation.dispatch(Batch.decode(Role.TARGET, n, 1)).entry for n in range(1, most + 1)}
    lacking = [n for n, entry in entries.items() if entry is None]
    used = {entry.num_tokens for n, entry in entries.items() if entry is not None and n <= each}
    assert bool(decode.allowed) == bool(lacking)
    assert bool(decode.reached) == any(n <= each for n in lacking)
    captured = {graph.entry.num_tokens for graph in emulation.graphs}
    assert (decode.sizes, decode.unreached) == (len(captured), len(captured - used))
    assert decode.load.startswith(f"{each} a rank ({load} in all")
    assert (decode.machine, decode.work, prefill.work, prefill.graphs) == ("gb200, stated", "decode", "prefill", 0)
    assert not prefill.allowed
    assert not prefill.reached


def test_load_machine_and_release_are_those_that_each_form_states(tmp_path: Path) -> None:
    """And what a form does not state is said to be assumed, or not to be stated."""
    files = {
        "b200/deploy.yaml": GRAPH,
        "b200/perf.yaml": PERF,
        "model.yaml": RECIPE,
        "run-mi300x.sh": SCRIPT,
        "run.sh": SCRIPT,
        "compose.yaml": FLAGS_ALONE,
        "none.yaml": "vllm: {a: 1}\n",
    }
    rows = rows_of(tmp_path / "all", files)
    by_place = {row.where.partition("/")[2]: row for row in rows}
    graph, compose = by_place["b200/deploy.yaml:10#VllmDecodeWorker"], by_place["compose.yaml:4#a"]
    assert (graph.machine, graph.work) == ("b200, stated", "decode")
    assert graph.load == "24 a rank (48 in all, 2 workers of 1 rank; its perf.yaml)"
    assert compose.release == "0.33.0, stated 0.21.0"
    assert (compose.machine, compose.load) == ("h100, assumed", "not stated")
    outcomes = {place.rpartition("#")[2]: row.outcome for place, row in by_place.items() if "model" in place}
    assert outcomes == {"default": audit.ANALYSED, "wide": audit.REFUSED, "images": audit.OTHER}
    assert by_place["model.yaml:4#default"].machine == "h200, the first that the recipe lists"
    assert by_place["run-mi300x.sh:1"].by_flags
    assert by_place["run.sh:1"].read_as == ("--cuda-graph-max-bs as --cuda-graph-max-bs-decode 8",)
    assert len(rows) == len(by_place) == 7


def test_a_stated_option_holds_for_what_states_nothing(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "all", {"run.sh": SCRIPT}, machine="h200", concurrency=9)
    assert row.machine == "h200, assumed"
    assert row.load == "9 a rank (9 in all, 1 worker of 1 rank; --concurrency)"
    assert row.reached == "target: 9"


def test_the_page_says_every_row_in_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown and HTML have the same cells, and JSON the same rows."""
    folder = tmp_path / "all"
    rows = rows_of(folder, {"model.yaml": RECIPE, "run.sh": SCRIPT})
    audit.main([str(folder), "--format", "json"])
    written = json.loads(capsys.readouterr().out)
    assert written["files"] == {"all": 2}
    assert written["rows"] == json.loads(json.dumps([attrs.asdict(row) for row in rows]))
    audit.main([str(folder), "--limit", "1", "-o", str(tmp_path / "page.md")])
    audit.main([str(folder), "-o", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "model.yaml:4#default" in (tmp_path / "page.md").read_text()
    assert all(row.where in page for row in rows)
    assert "run.sh" not in (tmp_path / "page.md").read_text()
    assert "a \\| b &lt;c" in audit.markdown(audit.Report(kind="a", title="a", sections=(SECTION,)))


SECTION = audit.Section(name="a", parts=[audit.Grid.of(("x",), [("a | b <c",)])])


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_what_older_releases_had_has_its_name_of_today(name: str) -> None:
    """No old flag, field or variable is left, and nothing else changes."""
    history = find_engine(name).history
    olds = [(flag, old) for flag, old in history.flags.items() if old.until is not None]
    for flag, old in olds:
        words, changes = history.renewed(["serve", flag, *["4"] * ("{}" in old.now), "--port", "80"])
        assert [change.split()[0] for change in changes] == [flag]
        assert not history.gone(words, "it")
        assert words[0] == "serve"
        assert words[-2:] == ("--port", "80")
        assert history.renewed(words) == (words, ())
    for kind, rows in history.parts.items():
        for field, old in rows.items():
            flag = f"--{kind.replace('_', '-')}"
            changed = [history.renewed([*words]) for words in _spellings(flag, field)]
            assert all(bool(changes) == (old.until is not None) for _, changes in changed)
            left = {key for words, _ in changed for word in words if word[0] == "{" for key in json.loads(word)}
            assert old.until is None or field not in left
    for variable, old in history.variables.items():
        words, changes = history.renewed([f"{variable}=1", "m"])
        assert len(changes) == (old.until is not None)
        assert words[-1] == "m"


def _spellings(flag: str, field: str) -> list[tuple[str, ...]]:
    whole = json.dumps({field: True, "other": 1})
    return [(flag, whole), (f"{flag}={whole}",), (f"{flag.replace('-config', '_config')}.{field}=True",)]


def test_a_file_without_a_program_or_an_image_of_an_engine_starts_none(tmp_path: Path) -> None:
    """Flags of one container could be anything's."""
    every = [find_engine(name) for name in audit.ENGINES]
    for text in ("image: busybox\nargs: [--model, a]\n", "a: 1\n", "image: busybox\ncommand: [vllm, bench]\n"):
        (tmp_path / "a.yaml").write_text(text)
        assert servers(str(tmp_path / "a.yaml"), every) == ()


def test_what_another_build_says_is_read_and_said(tmp_path: Path) -> None:
    """A folder by its public name, and a value that decides no graph; a mode that does not exist is refused."""
    line = "vllm serve /models/a --served-model-name Qwen/Qwen3-8B --moe-backend next_kernel --max-num-seqs 8\n"
    (row,) = rows_of(tmp_path / "read", {"run.sh": line})
    says = "--moe-backend next_kernel left out, which 0.33.0 does not know and which decides no graph"
    assert row.read_as == ("/models/a as Qwen/Qwen3-8B, its served name", says)
    assert (row.outcome, row.allowed, "next_kernel" in row.command) == (audit.ANALYSED, "", False)
    (row,) = rows_of(tmp_path / "refused", {"run.sh": "vllm serve Qwen/Qwen3-8B -cc.cudagraph_mode=NEXT\n"})
    assert (row.outcome, row.read_as) == (audit.REFUSED, ())
