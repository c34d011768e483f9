"""Releases of which only a table made from the wheels is known: its numbers are in the answer, and it says so."""

from pathlib import Path

import pytest

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, engines, find_engine
from capture_planner.errors import FlagError
from capture_planner_sglang.emulation.releases import RELEASES as SGLANG
from capture_planner_vllm.emulation.releases import RELEASES as VLLM
from support.commands import Run
from support.files import module_at

BOTH = {"vllm": VLLM, "sglang": SGLANG}
LINES = {
    "vllm": (
        ["--model", "meta-llama/Llama-3.1-8B"],
        ["--max-num-seqs", "100"],
        ["--max-num-batched-tokens", "99", "--max-num-seqs", "90"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}', "--max-num-seqs", "100"],
    ),
    "sglang": (
        ["--model-path", "Qwen/Qwen3-8B"],
        ["--model-path", "Qwen/Qwen3-8B", "--max-running-requests", "20", "--tp-size", "4"],
        ["--model-path", "deepseek-ai/DeepSeek-V2", "--chunked-prefill-size", "512"],
        ["--model-path", "Qwen/Qwen3-8B", "--pp-size", "2", "--cuda-graph-backend-prefill", "breakable"],
    ),
}
MACHINES = ("b200", "h100", "l4", "gb10")
tool = module_at(Path(__file__).parents[2] / "tools" / "release_table.py")


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_of_the_table_are_those_of_the_newest_release(name, machine, monkeypatch):
    """What is in the code for the newest release is what its wheel says."""
    releases, environment = BOTH[name], find_environment(machine)
    own = [emulate(name, line, environment) for line in LINES[name]]
    monkeypatch.setattr(
        type(releases), "value", lambda self, value, _: next(iter(self.table["values"][value].values()))
    )
    kind = releases.table["values"]
    assert [each.sizes for each in (emulate(name, line, environment) for line in LINES[name])] == [
        each.sizes for each in own
    ]
    assert all(next(iter(rows)) == releases.newest for rows in kind.values())


@pytest.mark.parametrize("name", BOTH)
def test_every_release_of_the_table_answers_and_says_so(name):
    """Its first assumption names the release and the parts whose code differs; an emulated release has none."""
    releases, environment = BOTH[name], find_environment("h100")
    assert releases.by_table()
    for release in releases.by_table():
        found = emulate(f"{name}=={release}", LINES[name][0], environment)
        first = found.assumptions[0]
        assert found.version == release
        assert first.startswith(f"by the table of {release.removesuffix('.0')}: ")
        with releases.following(release):
            named = [part for part in releases.unknown_parts() if part in first]
        assert bool(named) == ("is not known" in first)
    for release in releases.emulated():
        found = emulate(f"{name}=={release}", LINES[name][0], environment)
        assert not any(each.startswith("by the table") for each in found.assumptions)


@pytest.mark.parametrize(("release", "largest"), [("0.33", 1024), ("0.28", 1024), ("0.27", 512), ("0.20", 512)])
def test_ceiling_on_blackwell_is_of_the_release(release, largest):
    emulation = emulate(f"vllm=={release}", LINES["vllm"][0], find_environment("b200"))
    assert emulation.sizes[-1] == largest


@pytest.mark.parametrize(("release", "largest"), [("0.5.23", 48), ("0.5.20", 48), ("0.5.19", 24), ("0.5.10", 24)])
def test_ceiling_by_memory_is_of_the_release(release, largest):
    emulation = emulate(f"sglang=={release}", LINES["sglang"][0], find_environment("l4"))
    assert emulation.sizes[-1] == largest


def test_model_runner_is_of_the_release():
    """Before 0.29 model runner V2 was the default of some models only."""
    runners = {}
    for release in ("0.20.2", "0.24", "0.25", "0.29"):
        for model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"):
            emulation = emulate(f"vllm=={release}", ["--model", model], find_environment("h100"))
            runners[release, model[5:]] = next(s.value for s in emulation.settings if s.name == "model_runner")
    dense, experts = "Qwen3-8B", "Qwen3-30B-A3B"
    assert {release: (runners[release, dense], runners[release, experts]) for release, _ in runners} == {
        "0.20.2": ("v1", "v1"),
        "0.24": ("v2", "v1"),
        "0.25": ("v2", "v1"),
        "0.29": ("v2", "v2"),
    }


def test_flags_are_those_of_the_release():
    """One that came later is refused, and one that has gone since is taken as it is called now."""
    h100 = find_environment("h100")
    with pytest.raises(FlagError, match=r"vLLM 0\.24 has no such flag; 0\.33\.0 was the first release with it"):
        emulate("vllm==0.24", ["--monokernel"], h100)
    with pytest.raises(FlagError, match=r"SGLang 0\.5\.12 has no such flag"):
        emulate("sglang==0.5.12", [*LINES["sglang"][0], "--cuda-graph-max-bs-decode", "8"], h100)
    assert (
        emulate("vllm==0.24", ["--max-num-partial-prefills", "2", "--max-num-seqs", "7"], h100).limits.max_num_reqs == 7
    )
    with pytest.raises(FlagError, match="0\\.26\\.0 was the last release with it"):
        emulate("vllm==0.28", ["--max-num-partial-prefills", "2"], h100)


def test_check_of_a_release_of_the_table(call: Run) -> None:
    """The finding about the assumption says what is not known."""
    shown = call("check", "--engine", "vllm==0.24", "--model", "Qwen/Qwen3-8B", "--environment", "h100").out
    assert "by the table of 0.24" in shown
    image = ["docker", "run", "vllm/vllm-openai:v0.24.0", "--model", "Qwen/Qwen3-8B", "--environment", "h100"]
    assert "vllm==0.24.0 answers by its table" in " ".join(call("check", "--engine", "vllm", *image).out.split())


@pytest.mark.parametrize("name", BOTH)
def test_answers_for_the_newest_release_read_no_table(name, monkeypatch):
    """YAML takes longer than an answer."""
    monkeypatch.setattr(type(BOTH[name]), "table", property(lambda self: pytest.fail("the table was read")))
    emulate(name, LINES[name][0], find_environment("h100"))
    assert find_engine(name).version == engines()[name].value.version


def test_code_without_what_decides_nothing(tmp_path):
    """Texts, types and log lines are no difference between two releases; a comparison is."""
    texts = (
        'def f(a: int) -> int:\n    """Says."""\n    logger.info("x")\n    if a < 1:\n        raise ValueError(a)\n',
        "def f(a):\n    # why\n    if a < 1:\n        raise TypeError('b')\n",
        "def f(a):\n    if a <= 1:\n        raise TypeError('b')\n",
    )
    codes = []
    for index, text in enumerate(texts):
        folder = tmp_path / str(index) / "vllm"
        folder.mkdir(parents=True)
        (folder / "m.py").write_text(text)
        codes.append(tool.bare(tool.Sources("vllm", folder.parent), ["m.py:f"]))
    assert codes[0] == codes[1] != codes[2]


def test_changes_are_written_where_a_value_changes():
    """Newest first, and each row holds down to the next one."""
    assert tool.changes({"3": 1, "2": 1, "1": 2, "0": 1}) == {"3": 1, "1": 2, "0": 1}
    assert tool._steps([1, 2, 4, 8, 12, 16, 24, 32]) == "1 2 4 to 16 by 4 24 32"
