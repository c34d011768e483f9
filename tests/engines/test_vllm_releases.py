"""Older releases of vLLM: what they lack, and how one is named."""

import re
from pathlib import Path

import pytest

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, find_engine
from capture_planner.errors import EngineError, FlagError
from capture_planner_vllm import emulation
from capture_planner_vllm.emulation.releases import NEWEST, differences, followed, following, has, releases
from capture_planner_vllm.emulation.tables import flag_table, names
from support.commands import Run

H100 = find_environment("h100")
SOURCES = [Path(emulation.__file__).parent, Path(__file__).parent / "generators"]


def test_every_rule_that_a_release_lacks_is_asked_for():
    """The code asks for exactly the rules that the table has, so none of its rows is dead."""
    text = "".join(file.read_text() for folder in SOURCES for file in folder.glob("*.py"))
    assert set(re.findall(r'has\("([^"]+)"\)', text)) == {
        rule for each in differences().values() for rule in each["lacks"]
    }


def test_rule_that_no_release_lacks_is_an_error():
    with pytest.raises(KeyError):
        has("never-heard-of")


@pytest.mark.parametrize("release", releases())
def test_release_has_what_its_table_says(release):
    """A release lacks its own rules and those of releases between it and the newest, while it is followed."""
    between = [differences()[each]["lacks"] for each in releases()[1 : releases().index(release) + 1]]
    lacked = {rule for each in between for rule in each}
    with following(release):
        assert followed() == release
        assert {rule for each in differences().values() for rule in each["lacks"] if not has(rule)} == lacked
        assert all(entry["names"] for entry in flag_table().values())
        assert len({len(names()[kind]) for kind in names() if kind.startswith("quantization")}) == 1
    assert followed() == NEWEST


def test_release_is_chosen_with_two_equals_signs():
    """The emulation says which release it follows: a flag of 0.33 is refused by the release before it."""
    newest = emulate("vllm", ["--monokernel"], H100)
    assert (newest.version, find_engine("vllm==0.33").version) == (NEWEST, NEWEST)
    assert emulate("vllm==0.32", [], H100).version == find_engine("vllm==0.32.0").version == "0.32.0"
    with pytest.raises(FlagError, match=r"vLLM 0\.32 has no such flag"):
        emulate("vllm==0.32", ["--monokernel"], H100)


@pytest.mark.parametrize("release", ["0.3", "0.19.0", "33", ""])
def test_unknown_release_is_refused_with_those_that_are_known(release):
    with pytest.raises(EngineError, match=r"0\.33\.0 and 0\.32\.0"):
        find_engine(f"vllm=={release}")


def test_release_goes_through_the_commands(call: Run) -> None:
    """``engine``, ``check`` and ``compare`` take a release wherever they take an engine."""
    words = ["--model", "Qwen/Qwen3-8B", "--environment", "h100"]
    shown = call("engine", "vllm==0.32", *words, "--format", "json").data
    assert (shown["engine"], shown["version"]) == ("vllm", "0.32.0")
    assert "vllm 0.32.0" in call("check", "--engine", "vllm==0.32", *words).out
    assert "0.32.0" in call("engine", "--help").out
    both = [f"{name} --model Qwen/Qwen3-8B" for name in ("vllm", "vllm==0.32")]
    assert call("compare", *both, "--environment", "h100").code == 0
