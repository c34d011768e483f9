"""vLLM's flags and configuration against answers recorded from its own code."""

import json
from pathlib import Path

import pytest

from capture_planner.codec.shipped import find_environment
from capture_planner.errors import FlagError, NotEmulated
from capture_planner_vllm.emulation.engine import FLAGS, resolve
from capture_planner_vllm.emulation.releases import following, releases
from capture_planner_vllm.emulation.tables import flag_table, rules
from engines.generators.vllm import Case, answer_of, write_models

FILES = Path(__file__).parent / "golden"
GOLDEN = json.loads((FILES / "vllm_config.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the models that the command lines name."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def _words(case, folder):
    return [f"{name}={value}" for name, value in case.variables] + case.command_in(folder)


def test_golden_has_every_outcome():
    """At least 300 command lines are recorded, most of them accepted, and each outcome is among them."""
    accepted = [entry["answer"] for entry in GOLDEN if "refused" not in entry["answer"]]
    assert len(GOLDEN) >= 300
    assert len(accepted) >= 250
    assert {answer["runner"] for answer in accepted} == {"v1", "v2"}
    assert len({answer["mode"] for answer in accepted}) == 5
    assert len(GOLDEN) - len(accepted) >= 30


def test_golden_has_every_known_flag():
    """Each flag that the engine object names occurs in a recorded command line, by one of its spellings."""
    spellings = {name: [name] for name in FLAGS}
    for entry in flag_table().values():
        for name in entry["names"]:
            if name in FLAGS:
                spellings[name] = [*entry["names"], *entry.get("no", ())]
    spellings["--optimization-level"].append("-O")
    text = " ".join(word.replace("_", "-") for entry in GOLDEN for word in entry["command"])
    variables = {name for entry in GOLDEN for name in entry.get("variables", ())}
    missing = [
        name
        for name, spelled in spellings.items()
        if name not in variables and not any(spelling in text for spelling in spelled)
    ]
    assert missing == []
    assert variables == set(rules()["variables"])


def _declined(case, folder):
    try:
        resolve(_words(case, folder), find_environment(case.environment))
    except NotEmulated:
        return True
    except FlagError:
        return False
    return False


def test_golden_is_almost_all_emulated(models):
    """Of the command lines that vLLM takes, at most one in fifty is refused as not emulated."""
    accepted = [Case.of(entry) for entry in GOLDEN if "refused" not in entry["answer"]]
    assert 50 * sum(_declined(case, models) for case in accepted) <= len(accepted)


@pytest.mark.parametrize("part", range(6))
def test_golden_settings_are_the_engines(part, models):
    """Each command line has the settings that vLLM's own code gave it, or is refused where vLLM refuses.

    Where vLLM refuses a value that has no effect on graphs, the answer is vLLM's without the flag.
    """
    _hold_to(GOLDEN[part::6], models)


@pytest.mark.parametrize("release", releases()[1:])
def test_older_release_settings_are_the_engines(release, models):
    """An older release answers as its own code did, where the newest answers otherwise."""
    entries = json.loads((FILES / f"vllm_config-{release}.json").read_text())
    assert len(entries) >= 50
    with following(release):
        _hold_to(entries, models)


def _hold_to(entries, models):
    for entry in entries:
        case, expected = Case.of(entry), entry["answer"]
        environment = find_environment(case.environment)
        if "refused" in expected and "ignored" not in expected:
            with pytest.raises(FlagError):
                resolve(_words(case, models), environment)
        else:
            try:
                settings, *_ = resolve(_words(case, models), environment)
            except NotEmulated:
                continue
            expected = expected.get("without", expected)
            answer = answer_of(settings)
            assert answer == {name: expected[name] for name in answer}, case
