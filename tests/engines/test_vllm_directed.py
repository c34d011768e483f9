"""Command lines whose answer is known from vLLM's own code."""

import pytest

from capture_planner import engines
from capture_planner.codec.shipped import find_environment
from capture_planner.errors import FlagError, NotEmulated
from capture_planner_vllm.emulation.engine import emulate, resolve
from engines.generators.vllm import answer_of, write_models
from engines.generators.vllm_directed import IGNORED, REFUSED, directed
from engines.generators.vllm_ignored import IGNORED as IGNORED_FLAGS
from engines.generators.vllm_ignored import present, without


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the folder of the models that the command lines name."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def words(case, models):
    """Return the words of a command line, variables in front."""
    return [f"{name}={value}" for name, value in case.variables] + case.command_in(models)


def lines(*, kind=None):
    """Return the command lines that are marked with ``kind``; without one, those with an answer."""
    unmarked = [each for each in directed() if each[1] is not REFUSED and each[1] is not IGNORED]
    return unmarked if kind is None else [case for case, answer in directed() if answer is kind]


@pytest.mark.parametrize(("case", "answer"), lines())
def test_directed_line_has_vllms_answer(case, answer, models):
    """What each line is about is answered as by vLLM."""
    found = answer_of(resolve(words(case, models), find_environment(case.environment))[0])
    assert {name: found[name] for name in answer} == answer


@pytest.mark.parametrize("case", lines(kind=REFUSED))
def test_directed_line_is_refused(case, models):
    """Each line is refused as by vLLM, and not as something that is not emulated."""
    with pytest.raises(FlagError) as caught:
        resolve(words(case, models), find_environment(case.environment))
    assert not isinstance(caught.value, NotEmulated)


@pytest.mark.parametrize("case", lines(kind=IGNORED))
def test_ignored_flag_changes_nothing(case, models):
    """A line with flags that have no effect on graphs is answered as the line without them."""
    command, environment = words(case, models), find_environment(case.environment)
    flags = list(present(command))
    assert flags
    rest = resolve(without(command, flags), environment)[0]
    assert resolve(command, environment)[0] == rest


def test_without_removes_every_spelling_of_a_flag():
    """Flags and parts go with their values, as JSON or dotted; everything else stays as it is."""
    line = ["m", "--max_logprobs", "-2", "-sc", '{"method": "ngram", "moe_backend": "x"}', "-cc.custom_ops=3"]
    assert list(present(line)) == ["max_logprobs", "compilation_config.custom_ops", "speculative_config.moe_backend"]
    assert without(line, list(present(line))) == ["m", "-sc", '{"method": "ngram"}']
    assert all(IGNORED_FLAGS.values())


def test_capture_sizes_below_one_are_refused(models):
    """A graph of no tokens fails when it is captured; where no mode is left, nothing is captured."""
    sizes = ["--cudagraph-capture-sizes", "0", "1"]
    machine = find_environment("h100")
    with pytest.raises(FlagError, match="fails when it captures"):
        emulate([str(models / "dense"), *sizes], machine)
    uncaptured = ["-cc.cudagraph_mode=FULL_DECODE_ONLY", "-cc.mode=0"]
    found = emulate([str(models / "chunked"), *sizes, *uncaptured], machine)
    assert [graph for manager in found.managers for graph in manager.graphs] == []


def test_ignored_variables_are_accepted_and_shown():
    """Logs, ports and caches decide nothing; a variable that became a flag is refused with the flag."""
    machine = find_environment("h100")
    found = emulate(["VLLM_LOGGING_LEVEL=DEBUG", "VLLM_USE_V1=1", "m", "--port", "1"], machine)
    shown = {each.name: each for each in found.settings}
    assert shown["not_relevant"].value == ["port", "VLLM_LOGGING_LEVEL", "VLLM_USE_V1"]
    with pytest.raises(FlagError, match="give --attention-backend FLASHINFER"):
        engines.emulate("vllm", ["VLLM_ATTENTION_BACKEND=FLASHINFER", "m"], machine)
